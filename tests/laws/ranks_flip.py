"""One rank of a job in which a bit of rank 1's weights flips after a step: `STEP HOW_OFTEN COMMAND ...`."""

import torch
from forked_ranks import bigbatch

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.step.loop import TrainStep


def main(at: str, times: str, *command: str) -> int:
    """bigbatch, where the memory of rank 1 is faulty."""
    healthy, left = TrainStep.__call__, int(times)

    def faulty(train_step: TrainStep, step: int, stream: InputStream) -> None:
        nonlocal left
        healthy(train_step, step, stream)
        if step + 1 == int(at) and left:
            left -= 1
            train_step.parts.precision.wait_for_weights()  # or weights that are on their way would come over it
            with torch.no_grad():
                weight = next(train_step.parts.model.parameters())
                weight.view(torch.int32)[(0,) * weight.dim()] ^= 1 << 10

    if read_process_env().rank == 1:
        TrainStep.__call__ = faulty  # type: ignore[method-assign]
    return bigbatch(*command)
