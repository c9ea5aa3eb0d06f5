"""The report on a trial: promises kept and broken, tables, the smallest trial."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from error_texts import naming
from faults.__main__ import main
from faults.campaign import describe, shrink
from faults.experiment import Score, judge, lost_ranks
from faults.table import format_campaign, read_records
from faults.trial import Trial

from bigbatch.errors import REFUSED, FaultError

KILL = Trial("kill", "backward", 6, 1, 1, 3, "gloo")
LOST = "bigbatch: rank 0: all-reduce of batch-norm statistics failed after 2.0 s; no answer from rank 1 on host (gloo)"


@dataclass
class PlayedRank:
    """What a trial sees of a rank."""

    said: list[tuple[float, str]]
    ended: float | None = 110.0


@dataclass
class PlayedJob:
    """A job in which rank 1 of 3 is struck at 100 s, after 5 steps."""

    trial: Trial | None = KILL
    said: str = LOST
    said_at: float = 103.0
    exit_codes: list[int] = field(default_factory=lambda: [1, -9, 1])
    stepping: tuple[float, int] | None = (204.0, 4)
    struck: tuple[float, int] = (100.0, 5)
    started: float = 200.0
    is_hung: bool = False

    @property
    def ranks(self) -> list[PlayedRank]:
        """All say the same."""
        return [PlayedRank([(90.0, "bigbatch: rank 1 is late"), (self.said_at, self.said)]) for _ in self.exit_codes]

    @property
    def survivors(self) -> list[PlayedRank]:
        """All but the one that is struck."""
        return [rank for number, rank in enumerate(self.ranks) if self.trial and number not in self.trial.struck]

    def text(self) -> str:
        """All that was said."""
        return self.said


WELL = PlayedJob(None, "", exit_codes=[0, 0, 0])


def judged(
    trial: Trial = KILL, *, again: PlayedJob | None = WELL, left: tuple[str, ...] = (), **changed: object
) -> Score:
    """The score of a trial that goes as promised, but for what is changed."""
    is_equal = bool(changed.pop("is_equal", True))
    return judge(trial, PlayedJob(trial, **changed), again, is_equal=is_equal, left=left, named_within_seconds=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(("done", "is_kept"), [(15, True), (14, False)])
def test_score_of_a_stop_in_the_last_evaluation_may_find_the_run_done(done: int, is_kept: bool) -> None:
    """The run has 15 steps; a stop before the last one must be obeyed."""
    trial = replace(KILL, kind="term", phase="evaluation", step=13)
    nothing_left = replace(WELL, stepping=None)
    score = judged(trial, again=nothing_left, said="the end", exit_codes=[0, 0, 0], struck=(100.0, done))
    assert (score.broken == ()) == is_kept


def test_score_of_a_trial_that_goes_as_promised() -> None:
    score = judged()
    assert score.broken == ()
    assert (score.detected_seconds, score.ended_seconds, score.resumed_seconds) == (3.0, 10.0, 4.0)
    assert (score.is_named, score.steps_lost, score.is_equal) == (True, 1, True)
    assert "named after 3.0 s, stepping again after 4.0 s, 1 steps lost, equal bits" in describe(score)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"said": "bigbatch: something failed"}, "no rank named it"),
        ({"said_at": 95.0}, "no rank named it"),
        ({"said_at": 100.0 + 21}, "named after more than 20 s"),
        ({"said": LOST.replace("rank 1 on host", "rank 1 on host, 2 on host")}, "innocent ranks were named"),
        ({"is_hung": True}, "the job hung"),
        ({"exit_codes": [0, -9, 1]}, "a rank ended as if nothing had happened"),
        ({"struck": (100.0, 13)}, "more than 8 steps lost"),
        ({"is_equal": False}, "other bits in the end"),
        ({"left": ("process 7",)}, "something was left behind"),
        ({"again": replace(WELL, exit_codes=[1, 0, 0])}, "the same command did not continue"),
        (
            {"trial": replace(KILL, kind="term"), "said": "SIGTERM: will save a checkpoint"},
            "exit codes [1, -9, 1] instead of 130",
        ),
        ({"trial": replace(KILL, kind="pause"), "again": None}, "the job did not continue"),
    ],
)
def test_score_of_a_trial_that_breaks_a_promise(changed: dict, broken: str) -> None:
    score = judged(**changed)
    assert broken in score.broken
    assert f"--trial '{score.trial}'" in describe(score)


def test_score_of_a_run_that_had_nothing_left_to_do() -> None:
    score = judged(replace(KILL, phase="close", step=15), again=replace(WELL, stepping=None), struck=(100.0, 15))
    assert (score.broken, score.steps_lost) == ((), 0)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        (LOST, {1}),
        ("no answer from rank 12 on n0, 3 on n1, 4 on a host that has not met", {12, 3, 4}),
        ("no answer from the job's key-value store, which runs beside rank 0", {0}),
        ("rank 2: the last barrier failed after 8.0 s; all ranks still answer (tcp)", set()),
    ],
)
def test_lost_ranks_are_read_from_a_verdict(line: str, ranks: set[int]) -> None:
    assert lost_ranks(line) == ranks


def test_shrinking_finds_the_smallest_trial_that_breaks_the_same() -> None:
    """Here three ranks hang from step 3 on, in whatever phase."""

    def again(trial: Trial) -> Score:
        return Score(trial, broken=("the job hung",) if trial.ranks >= 3 and trial.step >= 3 else ("no rank named it",))

    large = replace(KILL, nodes=2, ranks_per_node=2, rank=3, phase="update", step=12)
    smallest = shrink(again(large), again).trial
    assert (smallest.ranks, smallest.nodes) == (3, 1)
    assert smallest.step < large.step
    assert again(smallest).broken == ("the job hung",)


def test_tables_of_a_campaign(tmp_path: Path) -> None:
    file = tmp_path / "faults.jsonl"
    scores = [judged(), judged(said_at=107.0), judged(is_equal=False), judged(replace(KILL, kind="stop", rank=0))]
    lines = [{"conditions": {"seed": 7}}, *(score.record() for score in scores)]
    file.write_text("\n".join(map(json.dumps, lines)))
    text = format_campaign(*read_records(file))
    assert "4 trials. Conditions: seed 7." in text
    kill = next(line for line in text.splitlines() if line.startswith("| kill |"))
    assert kill == "| kill | 3 | 3/3 | 3.0, at most 7.0 | 10.0, at most 10.0 | 4.0, at most 4.0 | 1 | 2/3 | 3/3 | 2/3 |"
    assert "| stop, rank 0 | 1 | 0/1 | 3.0, at most 3.0 |" in text, "as they named rank 1, too"
    assert "| other bits in the end | 1 | kill |" in text


@pytest.mark.parametrize("content", ["", "x", '{"seed": 1}', '{"conditions": {}}\n{"kind": "kill"}'])
def test_file_that_no_campaign_wrote_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(FaultError, match=naming("file", "faults run --out")):
        read_records(tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "9"], ("--ranks 9", "2 and 4")),
        (["--trials", "0"], ("--trials 0", "1 and")),
        (["--nodes", "4"], ("--nodes 4", "1 and 3")),
        (["--kinds", "kill,melt"], ("'melt' is not a kind", "segfault")),
        (["--kinds", "cut", "--nodes", "1", "--dry-run"], ("cut", "nodes are emulated")),
        (["--trial", f"{replace(KILL, nodes=3, ranks_per_node=1)}", "--nodes", "1"], ("nodes=3", "at most 1")),
    ],
)
def test_campaign_that_cannot_be_is_refused_in_a_line(
    options: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options]) == REFUSED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words), said


def test_dry_run_prints_the_trials_of_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seed", "7", "--trials", "5", "--dry-run"]) == 0
    all_five = capsys.readouterr().out.splitlines()
    assert len(all_five) == 5
    assert main(["run", "--seed", "7", "--trial", "3", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == all_five[3:4]
