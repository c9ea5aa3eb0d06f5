"""The search for DDP's buckets by a played clock, and a script's own DDP on one rank."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bigbatch.comm.algorithms.hybrid import MeasuredTimes
from bigbatch.errors import UserError
from bigbatch.tools.measure.ddp_buckets import (
    ROUNDS,
    Candidate,
    Measured,
    Turn,
    explain,
    gain,
    make_candidates,
    search,
    tune_script,
)

STATED, LARGE = Candidate(), Candidate((("bucket_cap_mb", 100),))
LISTED = Candidate((("bucket_cap_mb_list", (1, 25)),))
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range({models}):
    model = DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=3)
    for step in range(int(sys.argv[1])):
        model(torch.ones(1, 2)).sum().backward()
"""


def hooked(candidate: Candidate) -> Candidate:
    return Candidate(candidate.buckets, has_hook=True)


def played(seconds: dict[Candidate, float]) -> tuple[list[Candidate], Measured]:
    turns = []

    def turn(candidate: Candidate) -> Turn:
        turns.append(candidate)
        yield
        return seconds[candidate]

    running = search([each for each in seconds if not each.has_hook], turn)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return turns, end.value


def test_candidates_are_sizes_that_the_gradients_fill_and_one_more() -> None:
    assert make_candidates(30 << 20, has_list=False) == [
        STATED,
        *(Candidate((("bucket_cap_mb", cap),)) for cap in (5, 25, 100)),
    ]
    assert [len(make_candidates(size, has_list=True)) for size in (1, 30 << 20, 1 << 40)] == [3, 7, 9]


def test_search_times_the_fastest_anew_beside_the_scripts_own_and_with_the_hook() -> None:
    seconds = {STATED: 0.3, LARGE: 0.2, LISTED: 0.25, hooked(LARGE): 0.1}
    turns, measured = played(seconds)
    assert turns[:6] == [STATED, LARGE, LISTED, LISTED, LARGE, STATED], "a drift affects all equally"
    assert len(turns) == 2 * 3 * ROUNDS
    assert list(measured) == [STATED, LARGE, hooked(LARGE)]
    assert all(measured[each].seconds == (seconds[each],) * ROUNDS for each in measured)
    lines = explain(measured)
    assert lines[-2].startswith("buckets: bucket_cap_mb 100, first bucket 100 MiB: 33.3% faster")
    assert lines[-1].startswith("hook: pays, 50.0% faster")


def test_search_that_finds_nothing_better_says_so() -> None:
    lines = explain(played({STATED: 0.2, LARGE: 0.3, hooked(STATED): 0.2})[1])
    assert [line.split(":")[1].strip() for line in lines[-2:]] == ["keep what the script states", "does not pay"]


def test_a_first_bucket_is_printed_with_the_argument_that_gives_it() -> None:
    lines = explain(played({STATED: 0.2, LISTED: 0.1, hooked(LISTED): 0.2})[1])
    assert lines[-2].endswith("50.0% faster: DistributedDataParallel(..., bucket_cap_mb_list=[1, 25])")


@pytest.mark.parametrize(
    ("slow", "fast", "expected"),
    [
        ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), 0.1),
        ((1.0, 1.0, 1.0), (0.999, 0.999, 0.999), 0.0),
        ((0.8, 1.0, 1.2), (0.7, 0.9, 1.1), 0.0),
        ((0.9, 0.9), (1.0, 1.0), 0.0),
    ],
)
def test_gain_counts_beyond_noise_alone(slow: tuple[float, ...], fast: tuple[float, ...], expected: float) -> None:
    assert gain(MeasuredTimes(slow), MeasuredTimes(fast)) == pytest.approx(expected)


def test_script_that_ends_itself_with_an_error_keeps_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for code in (2, "no such data set"):
        script.write_text(f"raise SystemExit({code!r})")
        with pytest.raises(SystemExit) as ended:
            tune_script(script, [], steps=1, say=lambda line: None)
        assert ended.value.code == code
    script.write_text("raise SystemExit(0)")
    with pytest.raises(UserError, match="made no DistributedDataParallel"):
        tune_script(script, [], steps=1, say=lambda line: None)


@pytest.mark.parametrize(
    ("models", "steps", "told"), [(1, 5, "ended before all was measured"), (2, 5, "wraps two models")]
)
def test_script_that_cannot_be_tuned_is_told(models: int, steps: int, told: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(models=models))
    before = DistributedDataParallel.__init__, DistributedDataParallel.forward
    try:
        with pytest.raises(UserError, match=told):
            tune_script(script, [str(steps)], steps=1, say=lambda line: None)
    finally:
        dist.destroy_process_group()
    assert (DistributedDataParallel.__init__, DistributedDataParallel.forward) == before


STEP = "        model(torch.ones(1, 2)).sum().backward()\n"
CATCHING = f"        try:\n    {STEP}        except:\n            pass\n"
COMPILED = STEP.replace("model(", "torch.compile(model, backend='eager')(")


@pytest.mark.parametrize("step", [CATCHING, COMPILED], ids=["catches every error", "compiled"])
def test_script_of_another_form_is_measured_all_the_same(step: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(models=1).replace(STEP, step))
    try:
        lines = tune_script(script, ["150"], steps=1, say=lambda line: None)
    finally:
        dist.destroy_process_group()
    assert [line.split(":")[0] for line in lines[-2:]] == ["buckets", "hook"]
