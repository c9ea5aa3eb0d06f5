"""A rank that has joined its job, before it builds a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import HEALING
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.trainer.build.input import Splits
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.order import describe_left_out
from bigbatch.trainer.machine.host import describe_load
from bigbatch.trainer.run.resume import ResumePoint

if TYPE_CHECKING:
    from bigbatch.comm.tuning.tuned import Tuned


@dataclass(frozen=True)
class JoinedRank:
    """Connection of a rank to its job, and what it did since."""

    communicator: Communicator
    env: ProcessEnv
    tuned: "Tuned | None"
    bound: str | None
    """Line for the log: the cores to which this process is bound."""
    staged: str | None = None
    """Line for the log: where the data was staged."""
    mode_note: str = ""
    """Line for the log: how compute.mode=auto chose."""

    def describe_placement(self, config: Config, splits: Splits, start: ResumePoint) -> list[str]:
        """Return lines for the log: how this process is placed, and where its data lies."""
        communicator, root = self.communicator, config.data.root
        left_out = describe_left_out(root, *(split.index for split in splits))
        lines = [left_out, self.bound, self.staged, describe_load(communicator.device), self.mode_note]
        if config.run.heal == "in_place" and communicator.world_size > 1 and communicator.endpoints is None:
            lines.append(why_not_healing(config, communicator.backend.name))
        if start.is_of_unknown_classes:
            lines.append(f"{start.path} keeps no class names: those of {root} are not compared")
        return [line for line in lines if line]


def why_not_healing(config: Config, backend: str) -> str:
    """Return the log line that says why this run cannot heal in place."""
    if backend not in HEALING:
        why, remedy = f"{backend} cannot continue without a rank", f"comm.backend {' or '.join(HEALING)} can"
    elif config.compute.cuda_graph:
        why, remedy = "a captured step cannot be interrupted", "compute.cuda_graph=false can"
    elif config.comm.buffers != "torch":
        why, remedy = f"NCCL cannot abort sums in {config.comm.buffers} buffers", "comm.buffers=torch can"
    else:
        why, remedy = "the ranks met in a process group of the script's own", "without one they can"
    return f"run.heal=in_place: {why}, so a lost rank ends the job, as with restart; {remedy}"
