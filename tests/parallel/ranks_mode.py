"""What each rank of a job does in test_mode.py."""

import json
from functools import partial
from typing import Any

from bigbatch.cli import main
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.trainer import train as training
from bigbatch.trainer.doctor.mode import choose_mode
from bigbatch.trainer.doctor.modes import Mode, Trial


class Played:
    """Trials with the rates of this rank, by microbatch."""

    def __init__(self, rates: dict[str, float], **_: Any) -> None:
        self.rates = rates

    def __call__(self, mode: Mode, *, limit_seconds: float) -> Trial:
        return Trial(self.rates[str(mode.microbatch_size)])

    def close(self) -> None:
        pass


def train(rates: str, *command: str) -> int:
    """As `bigbatch` does on GPUs. rates: by rank and microbatch, in JSON."""
    played = Played(json.loads(rates)[read_process_env().rank])
    training.choose_mode = partial(  # type: ignore[attr-defined]
        choose_mode, measures=lambda communicator: True, start_trials=lambda config, **_: played
    )
    return main(command)
