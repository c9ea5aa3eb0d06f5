"""Which settings of the communication go together."""

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.sections import CommConfig


def check_comm(comm: CommConfig) -> None:
    """Raise ConfigError where settings contradict each other."""
    if comm.table is None:
        for key, value in (("threshold_bytes", comm.threshold_bytes), ("buffer_bytes", comm.buffer_bytes)):
            if value is None:
                raise ConfigError(f"comm.{key} is null, which means as comm.table says, and that is null, too")
        if comm.algorithm == "hybrid":
            raise ConfigError(
                "comm.algorithm=hybrid chooses by comm.table, which is null: make one with bigbatch comm tune"
            )
    if comm.wire_dtype is None and comm.predivide != 1:
        raise ConfigError(
            f"comm.predivide={comm.predivide} has no meaning without comm.wire_dtype: set it to 1.0, or wire_dtype "
            "to float16"
        )
    if comm.timeline_steps and comm.timeline_steps[0] > comm.timeline_steps[1]:
        raise ConfigError(f"comm.timeline_steps={list(comm.timeline_steps)} must be the first and the last step")
