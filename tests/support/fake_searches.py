"""Searches whose trials are fake_train.py instead of a training, for the tests of searching."""

import json
import sys
from pathlib import Path

import pytest

from bigbatch.trainer.tune.search import rounds
from bigbatch.trainer.tune.search.coarse_to_fine import search
from bigbatch.trainer.tune.search.experiment import Search

FAKE = Path(__file__).with_name("fake_train.py")
SPACE = "schedule.base_lr=log:1:64"


@pytest.fixture(autouse=True)
def poll_often(monkeypatch):
    monkeypatch.setattr(rounds, "POLL_SECONDS", 0.02)


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
        "launch": (),
    }
    return Search(**(settings | changes))


class Fake:
    """Makes commands of the stand-in, and counts them."""

    def __init__(self, *own_options):
        self.own_options, self.made = own_options, []

    def __call__(self, options, **kwargs):
        self.made.append(options)
        return [sys.executable, str(FAKE), *self.own_options, *options]


def run(folder, fake=None, **changes):
    said = []
    return search(stated(folder, **changes), say=said.append, make_argv=fake or Fake()), said


def trials(folder):
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
