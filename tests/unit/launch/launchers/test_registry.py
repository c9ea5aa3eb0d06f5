"""What every launcher is for the commands, and a launcher that is known only by the registry."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import pytest

from bigbatch.cli import main
from bigbatch.errors import JobRefused, LaunchOptionError
from bigbatch.launch.jobs.options import JOB_OPTIONS, read_options
from bigbatch.launch.jobs.spec import JobSpec, refuse
from bigbatch.launch.launchers.base import Launcher, Queue, command_line
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.launch.start import main as launch

TRAIN = ("train", "--config", "quickstart")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_of_the_registry_is_in_the_help_and_its_example_works(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert f"    {name} " in capsys.readouterr().out
    assert main(["launch", name, "--dry-run", *shlex.split(LAUNCHERS[name].example)]) == 0
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_refuses_options_that_exist(name: str) -> None:
    """A misspelt field would refuse nothing."""
    assert LAUNCHERS[name].refused.keys() <= {field.name for field in fields(JobSpec)}


@pytest.mark.parametrize("name", [name for name, each in LAUNCHERS.items() if isinstance(each.queue, str)])
@pytest.mark.parametrize("action", ["status", "cancel"])
def test_launcher_without_a_queue_says_in_one_line_what_to_do_instead(
    name: str, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", action, "--launcher", name, "7"]) == 1
    told = capsys.readouterr().err
    assert f"--launcher {name}" in told
    assert told.endswith(f"{LAUNCHERS[name].queue}\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", ["torchrun", "flux", "k8s"])
def test_launcher_that_ends_all_ranks_refuses_to_heal_in_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", name, "--dry-run", "--", *TRAIN, "--run.heal", "in_place"]) == 2
    told = capsys.readouterr().err
    assert f"--run.heal in_place: a job of {name} that has lost a rank " in told
    assert told.endswith("or use bigbatch launch local, mpirun or slurm\n")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the commands asked of a launcher called fake."""
    asked: list[object] = []

    def start(job: JobSpec, *, environ: Mapping[str, str], options: argparse.Namespace) -> int:
        asked.append((job.command, job.num_ranks, "PATH" in environ, options.wing))
        return 7

    def cancel(jobs: Sequence[str], now: bool) -> None:
        asked.append(("cancel", *jobs, now))

    fake = Launcher(
        name="fake",
        help="start ranks by magic",
        default_ranks="4",
        passes="none",
        example="--wing left -- train",
        refused={"logs": "look into the stars"},
        dry_run=lambda job, environ: command_line(["fly", *job.command], [("A", "b c")]),
        start=start,
        queue=Queue(status=lambda jobs: asked.append(("status", *jobs)), cancel=cancel),
        add_options=lambda parser: parser.add_argument("--wing") and None,
        count_ranks=lambda: 4,
    )
    monkeypatch.setitem(LAUNCHERS, "fake", fake)
    return asked


def test_launcher_that_is_new_is_a_subcommand_with_its_own_options(calls: list[object]) -> None:
    assert main(["launch", "fake", "--wing", "left", "--", *TRAIN]) == 7
    assert main(["launch", "fake", "--ranks", "2", "--", *TRAIN]) == 7
    assert calls == [(TRAIN, 4, True, "left"), (TRAIN, 2, True, None)]


def test_launcher_that_divides_by_its_ranks_is_not_asked_to_divide_by_0(
    calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contradicting numbers are reported together with a refused option."""

    def dry_run(job: JobSpec, environ: Mapping[str, str]) -> str:
        refuse(job, launcher="fake", refused=LAUNCHERS["fake"].refused)
        return f"fly {8 // job.ranks_per_node}"

    monkeypatch.setitem(LAUNCHERS, "fake", replace(LAUNCHERS["fake"], dry_run=dry_run))
    for others in ([], ["--logs", "logs"]):
        with pytest.raises(JobRefused) as caught:
            launch(["fake", "--dry-run", "--ranks", "3", "--nodes", "2", *others, "--", *TRAIN])
        assert len(caught.value.findings) == 1 + bool(others)


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"cpus_per_rank": "many"}, ("--cpus-per-rank", "'many'")),
        ({"cpus_per_rank": 8.5}, ("--cpus-per-rank", "'8.5'")),
        ({"container": "docker"}, ("--container", "'docker'", "apptainer")),
        ({"env": ["A=b", True]}, ("--env",)),
    ],
)
def test_options_of_a_file_are_refused_by_name_and_value(stated: dict[str, object], told: tuple[str, ...]) -> None:
    with pytest.raises(LaunchOptionError) as caught:
        read_options(stated, JOB_OPTIONS)
    assert all(word in str(caught.value) for word in told)
