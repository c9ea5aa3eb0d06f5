"""What each rank of a job does in test_calibration.py."""

from functools import partial

from bigbatch.cli import main
from bigbatch.comm.measure.calibration import calibrate
from bigbatch.trainer.build import job


def train(seconds: str, *command: str) -> int:
    """As `bigbatch` does, but for how long it may measure."""
    job.calibrate = partial(calibrate, seconds=float(seconds))  # type: ignore[attr-defined]
    return main(command)
