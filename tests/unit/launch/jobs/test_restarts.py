"""When a job starts again, and on which hosts; with stand-ins for what runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.fit_hosts import on_remaining_hosts
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.restarts import describe_restarts, may_restart, run_with_restarts
from bigbatch.launch.jobs.spec import JobSpec

TRAIN = ("train", "--config", "quickstart")


class Played:
    """A job whose starts end with these codes; a code with a checkpoint has saved one of that step before."""

    def __init__(self, folder: Path, *ends: int | tuple[int, int] | Ended) -> None:
        self.folder, self.ends = folder, list(ends)
        self.started: list[JobSpec] = []
        self.said: list[str] = []

    def start(self, job: JobSpec) -> Ended:
        self.started.append(job)
        end = self.ends.pop(0)
        if isinstance(end, tuple):
            (self.folder / f"checkpoints/step-{end[1]:08d}").mkdir(parents=True)
            end = end[0]
        return end if isinstance(end, Ended) else Ended(end, was_asked=False)

    def run(
        self,
        *,
        restarts: int | None,
        is_python: bool = False,
        hosts: tuple[tuple[str, int], ...] = (),
        **others: object,
    ) -> int:
        command = ("own.py",) if is_python else (*TRAIN, f"--run.directory={self.folder}")
        job = JobSpec(command, 4, restarts=restarts, is_python=is_python, hosts=hosts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bigbatch.launch.jobs.restarts.tell", self.said.append)
            return run_with_restarts(self.start, job, **others).code  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "of_ours", "of_script"),
    [
        *((code, True, True) for code in (6, 7, 134, 137, 143)),
        # what 1 means in a user's script is not known
        *((0, False, False), (1, False, True), (2, False, False), (5, False, True), (130, False, False)),
    ],
)
def test_restarts_follow_the_promise_of_the_codes(code: int, of_ours: bool, of_script: bool) -> None:
    assert (may_restart(code, is_python=False), may_restart(code, is_python=True)) == (of_ours, of_script)


def test_job_that_may_go_on_says_what_resumes_it(tmp_path: Path) -> None:
    played = Played(tmp_path, (6, 4))
    assert played.run(restarts=None) == 6
    (said,) = played.said
    assert all(part in said for part in (str(tmp_path / "checkpoints/step-00000004"), "--restarts 3"))
    mended_first = Played(tmp_path, 1)
    assert mended_first.run(restarts=None) == 1
    assert not mended_first.said


def test_restarts_end_where_as_many_in_a_row_saved_nothing_new(tmp_path: Path) -> None:
    """Each newer checkpoint allows as many again."""
    played = Played(tmp_path, 137, (137, 4), 137, (137, 8), 137, 139, 0)
    assert played.run(restarts=2) == 139
    assert len(played.started) == 6
    assert "from the beginning" in played.said[0]
    assert "2 restart(s) that saved no newer checkpoint" in played.said[-1]


def test_restarts_take_the_checkpoint_before_a_damaged_one_for_no_newer(tmp_path: Path) -> None:
    """Storage that damages whatever is saved at step 8 would else have a job start for ever."""
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    number_of_starts = 0

    def start(job: JobSpec) -> Ended:
        nonlocal number_of_starts
        number_of_starts += 1
        newest = tmp_path / "checkpoints/step-00000008"
        if newest.exists():
            newest.rename(newest.with_name(f"damaged-{number_of_starts}"))
        else:
            newest.mkdir()
        return Ended(137 if number_of_starts < 20 else 0, was_asked=False)

    job = JobSpec((*TRAIN, f"--run.directory={tmp_path}"), 1, restarts=3)
    assert run_with_restarts(start, job).code == 137
    assert number_of_starts == 4, "the first saves step 8, and the others nothing after it"


def test_restarts_end_with_who_asked_to_stop(tmp_path: Path) -> None:
    """A second Ctrl-C ends ranks by signals, too."""
    played = Played(tmp_path, Ended(137, was_asked=True), 0)
    assert played.run(restarts=2) == 137


@pytest.mark.parametrize("code", [130, 138])
def test_restarts_go_on_with_what_is_left_and_grow_again_when_called(code: int, tmp_path: Path) -> None:
    """A job that is called back has lost nothing: it counts as no restart, also where it did not listen yet (138)."""
    recalled = Ended(code, was_asked=False, for_restart=True)
    played = Played(tmp_path, 6, recalled, 0)
    sizes = iter((2, 4))  # each asked for once
    assert played.run(restarts=1, refit=lambda job: replace(job, num_ranks=next(sizes))) == 0
    assert [job.num_ranks for job in played.started] == [4, 2, 4]
    assert "2 of 4 ranks" in played.said[0]


@pytest.mark.parametrize(("left", "num_starts"), [((("n0", 1),), 2), ((("n0", 1), ("n1", 1)), 1)])
def test_restarts_take_a_host_that_is_away_for_a_loss_whatever_the_code(
    left: tuple[tuple[str, int], ...], num_starts: int, tmp_path: Path
) -> None:
    """mpirun ends with 1 then, as with a rank whose config is wrong."""
    played = Played(tmp_path, 1, 0)
    played.run(restarts=1, hosts=(("n0", 1), ("n1", 1)), refit=lambda job: replace(job, hosts=left))
    assert len(played.started) == num_starts


# --- hosts that are left ---


def test_hosts_left_are_those_that_answer_with_ranks_that_share_the_batch() -> None:
    """512 images in microbatches of 128: up to 4 ranks."""
    job = JobSpec(TRAIN, 4, hosts=(("n0", 1), ("n1", 1), ("n2", 1), ("n3", 1)))
    left = on_remaining_hosts(job, answers=lambda host: host != "n1")
    assert (left.hosts, left.num_ranks) == ((("n0", 1), ("n2", 1), ("n3", 1)), 3)
    assert on_remaining_hosts(job, answers=lambda host: True) == job


@pytest.mark.parametrize("options", [(), ("--batch.microbatch_size", "64", "--batch.bn_span", "128")])
def test_hosts_left_that_cannot_share_the_batch_are_said(options: tuple[str, ...]) -> None:
    """None is left, or one where a ghost batch lies on two ranks."""
    job = JobSpec((*TRAIN, *options), 2, hosts=(("n0", 1), ("n1", 1)))
    with pytest.raises(LaunchOptionError, match=naming("n0")):
        on_remaining_hosts(job, answers=lambda host: bool(options) and host == "n1")


@pytest.mark.parametrize(
    ("words", "joins", "said"),
    [
        (TRAIN, 0, ["# after a lost rank all start again, up to 3 time(s) in a row without a newer checkpoint"]),
        (("comm", "bench"), 0, ["# after a lost rank all start again, up to 3 time(s) in all"]),
        (
            TRAIN,
            3,
            [
                "# a lost rank starts again, to join the others, up to 3 time(s) in each start of the job",
                "# after a failure that ends all ranks all start again, up to 3 time(s) in a row "
                "without a newer checkpoint",
            ],
        ),
    ],
)
def test_dry_run_tells_how_often_what_starts_again(words: tuple[str, ...], joins: int, said: list[str]) -> None:
    assert describe_restarts(JobSpec(words, 2, restarts=3), joins=joins).splitlines() == said
    assert describe_restarts(JobSpec(words, 2), joins=joins) == ""
