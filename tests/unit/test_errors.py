"""Errors travel between processes, such as from the workers of a pool."""

import pickle

import pytest

from bigbatch.errors import ConfigError, JobRefused, UserError, add_note
from bigbatch.launch.launchers.slurm_queue import NotInstalled
from bigbatch.trainer.input.reading import UndecodableError
from bigbatch.trainer.step.loop import InputLost

ERRORS = [
    ConfigError("a=1 is wrong", "b=2, too"),
    NotInstalled("sbatch"),
    JobRefused(["no image", "no GPU"]),
    UndecodableError("a.jpg: is cut off", position=3),
    InputLost("a.jpg: is gone", done=4, replaced={5: "b.jpg: is empty"}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_are_the_same_after_a_way_through_a_pickle(error: UserError) -> None:
    add_note(error, "what to do")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
