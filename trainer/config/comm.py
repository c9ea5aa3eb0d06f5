"""Check that the comm settings fit each other."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import CommConfig


def check_comm(comm: CommConfig) -> Iterator[str]:
    """Yield an error for each pair of settings that contradict each other."""
    if comm.table is None:
        for key, value in (("threshold_bytes", comm.threshold_bytes), ("buffer_bytes", comm.buffer_bytes)):
            if value is None:
                yield f"comm.{key} is null, so comm.table must give it, but comm.table is null: set one of them"
        if comm.algorithm == "hybrid":
            yield "comm.algorithm=hybrid needs comm.table, which is null: make one with bigbatch comm tune"
    if comm.wire_dtype is None and comm.predivide != 1:
        yield (
            f"comm.predivide={comm.predivide} has no meaning without comm.wire_dtype: set it to 1.0, or wire_dtype "
            "to float16"
        )
    if comm.warn_seconds > comm.timeout_seconds:
        yield (
            f"comm.warn_seconds={comm.warn_seconds:g} is longer than comm.timeout_seconds={comm.timeout_seconds:g}, "
            f"after which the job has ended: set it to {comm.timeout_seconds / 4:g}"
        )
    if comm.timeline_steps and comm.timeline_steps[0] > comm.timeline_steps[1]:
        yield f"comm.timeline_steps={list(comm.timeline_steps)} must be the first and the last step"
