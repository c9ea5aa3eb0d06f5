"""A rank of torchrun's whose job loses one in each of its first starts: `script_restarts.py FOLDER RANK [RANK ...]`.

The ranks named are lost one after another, a start each, after they have met the others and summed with them.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import bigbatch


def main(folder: str, *victims: str) -> None:
    """Sum, be lost where it is this rank's turn, sum again, and leave a word at the end."""
    with bigbatch.connect(backend="tcp", timeout_seconds=120) as communicator:
        assert communicator.sum_(torch.ones(1), label="first").item() == communicator.world_size
        # no rank writes its file before all have listed the existing ones
        lost = len(list(Path(folder).glob("lost-*")))
        communicator.gather("seen")
        if lost < len(victims) and communicator.rank == int(victims[lost]):
            (Path(folder) / f"lost-{lost}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        total = communicator.sum_(torch.tensor([communicator.rank + 1.0]), label="second").item()
    (Path(folder) / f"done-{communicator.rank}").write_text(f"{total:g} after {lost}")


main(*sys.argv[1:])
