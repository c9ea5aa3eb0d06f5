"""compute.mode=auto of real jobs on two ranks: one choice for all, and the update of an eager run."""

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import places
from test_parallel import fork_job

from bigbatch.cli import main
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.trainer import training
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.doctor import budget
from bigbatch.trainer.doctor.mode import choose_mode
from bigbatch.trainer.doctor.modes import Mode, Trial
from tests.laws.jobs import (
    ROUNDING,
    SGD,
    final_state,
    gradient_distance,
    statistics_distance,
    step_gradients,
    train_command,
)

OF_AUTO = {
    "batch.microbatch_size": 4,
    "batch.bn_span": 4,
    "compute.mode_keeps": "[compute.compile]",
    "compute.cpu_threads": 1,
    "comm.backend": "gloo",
    "comm.interface": "lo",
    "comm.timeout_seconds": 250,
    "run.epochs": 1,
    "schedule.warmup_epochs": 0,
}
"""Each rank has four microbatches of a ghost batch; sizes are 4, 8 and 16."""
RATES = ({"4": 100.0, "8": 200.0, "16": 300.0}, {"4": 100.0, "8": 150.0, "16": 120.0})
"""Rates of each rank: the second one is slower with the largest microbatch."""
Train = Callable[..., str]


class Played:
    """Trials with the rates of this rank, by microbatch."""

    def __init__(self, rates: dict[str, float], **_: Any) -> None:
        self.rates = rates

    def __call__(self, mode: Mode, *, limit_seconds: float, meet: Callable[[], object]) -> Trial:
        rank = read_process_env().rank
        time.sleep(0.2 * rank)  # as if it compiled for longer
        ready = time.monotonic()
        meet()
        print(f"\nmode trial of {mode.microbatch_size}: {ready} {time.monotonic()}", flush=True)
        return Trial(self.rates[str(mode.microbatch_size)])

    def close(self) -> None:
        pass


def train_by_rates(rates: str, share: str, *command: str) -> int:
    """Run a command of bigbatch as on GPUs. rates: by rank and microbatch, in JSON. share: of the run's time."""
    budget.MIN_IMAGES, budget.SHARE_OF_RUN = 0, float(share)  # the runs of a test are short
    played = Played(json.loads(rates)[read_process_env().rank])
    training.choose_mode = partial(  # type: ignore[attr-defined]
        choose_mode, measures=lambda communicator: True, start_trials=lambda config, **_: played
    )
    return main(command)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=7, val_per_class=1, side_pixels=(36, 48))  # 70 images: two steps an epoch
    return root


@pytest.fixture
def train(data: Path, tmp_path: Path) -> Train:
    """Train on two ranks with a home each, in the folder run; all that was said."""

    def run(*options: str, run: str, rates: object = RATES, share: float = 1000.0) -> str:
        homes = [{"XDG_CACHE_HOME": str(tmp_path / f"home{rank}")} for rank in range(2)]
        environs = [{**place, **home} for place, home in zip(places(2), homes, strict=True)]
        command = (json.dumps(rates), str(share), *train_command(data, tmp_path / run, {**SGD, **OF_AUTO}))
        code, text = fork_job(
            "test_mode:train_by_rates",
            (*command, *options),
            environs,
            timeout_seconds=250,
        )
        assert code == 0, text
        return text

    return run


def microbatch_of(run: Path) -> int:
    return load_config(["--config", str(run), TRUST]).batch.microbatch_size


@pytest.mark.long
def test_two_ranks_choose_alike_and_train_the_same_update(train: Train, tmp_path: Path) -> None:
    text = train(run="auto")
    (path,) = (tmp_path / "home0/bigbatch/modes").iterdir()
    assert not (tmp_path / "home1").exists()
    for size in ("4", "8", "16"):
        found = [tuple(map(float, pair)) for pair in re.findall(rf"mode trial of {size}: ([\d.]+) ([\d.]+)", text)]
        assert len(found) == 2
        assert max(ready for ready, _ in found) <= min(timed for _, timed in found), (
            "no rank is timed before all are warm"
        )
    told = "compute.mode auto: eager, microbatch 8: 150 images/s of each GPU (eager, microbatch 4: 100)"
    assert text.count(told) == 1
    assert "2 ranks x 2 microbatches x 8, batch-norm span 4" in text
    assert microbatch_of(tmp_path / "auto") == 8
    assert (tmp_path / "auto/mode.json").read_text() == path.read_text()

    text = train("--compute.mode", "eager", run="eager")
    assert "compute.mode auto" not in text
    assert "2 ranks x 4 microbatches x 4, batch-norm span 4" in text
    ours, theirs = tmp_path / "auto", tmp_path / "eager"
    assert len(step_gradients(ours)) == 2
    assert 0 < gradient_distance(step_gradients(ours), step_gradients(theirs)) < ROUNDING
    assert statistics_distance(final_state(ours), final_state(theirs)) < ROUNDING

    path.rename(tmp_path / "kept.json")
    text = train(run="little", share=10.0)  # 3 s of a run of 32 images at 100 images/s
    assert "microbatch 4: 100 images/s of each GPU; measured" in text
    assert "eager, microbatch 8 not tried: it needs 5 s, and 3 s are left of 3 s, 1000% of this run's time" in text
    assert microbatch_of(tmp_path / "little") == 4
    (tmp_path / "kept.json").rename(path)

    untried = [{}, {}]  # a trial would raise
    text = train(run="again", rates=untried)
    assert f"{path}, measured " in text
    path.unlink()
    text = train("--run.epochs", "2", run="auto", rates=untried)  # continues as it began
    assert f"{tmp_path / 'auto/mode.json'}, measured " in text
    assert "batch.microbatch_size=" not in text, "nothing has changed"
    text = train("--dry-run", run="dry", rates=untried)
    assert "compute.mode auto: the first start would time eager, microbatch 4, microbatch 8, microbatch 16, for" in text
    assert not path.exists()
