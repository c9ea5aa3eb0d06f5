"""Searches whose trials are fake_train.py instead of a training, for the tests of searching."""

import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

from bigbatch.experiments.engine import engine
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.launch_option import Launch
from bigbatch.experiments.search import search as searching
from bigbatch.experiments.search.search import Search, search

FAKE = Path(__file__).with_name("fake_train.py")
SPACE = "schedule.base_lr=log:1:64"


def stated(folder, **changes):
    settings = {
        "config": ("--config", "quickstart"),
        "space": (SPACE,),
        "folder": folder,
        "trials": 10,
        "rounds": 2,
        "epochs": 2,
        "metric": "top1",
        "prune": False,
        "parallel": 1,
        "launch": Launch(),
    }
    return Search(**(settings | changes))


class Fake:
    """Makes commands of the stand-in, and counts them."""

    def __init__(self, *own_options):
        self.own_options, self.made = own_options, []

    def __call__(self, plan, point, folder):
        self.made.append(point.number)
        return [sys.executable, str(FAKE), str(folder.config(point.number)), *self.own_options]


def run(folder, fake=None, **changes):
    """Search; return the trials, and the lines that were printed."""
    said = io.StringIO()
    changed = mock.patch.multiple(engine, point_command=fake or Fake(), POLL_SECONDS=0.02)
    no_images = mock.patch.object(searching, "require_images")
    with changed, no_images, contextlib.redirect_stdout(said):
        records = search(stated(folder, **changes))
    return records, said.getvalue().splitlines()


def states(folder):
    found = SweepFolder(folder)
    return [found.read_state(number)["state"] for number in found.numbers()]
