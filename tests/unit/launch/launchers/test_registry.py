"""What every launcher is for the commands."""

import shlex
from dataclasses import replace

import pytest

from bigbatch.cli import main
from bigbatch.errors import JobRefused, LaunchOptionError
from bigbatch.launch.jobs.options import read_options
from bigbatch.launch.jobs.spec import JOB_OPTIONS
from bigbatch.launch.launchers.registry import LAUNCHERS, load_launcher
from bigbatch.launch.start import main as launch

TRAIN = ("train", "--config", "quickstart")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_of_the_registry_is_in_the_help_and_its_example_works(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert f"    {name} " in capsys.readouterr().out
    assert main(["launch", name, "--dry-run", *shlex.split(load_launcher(name).example)]) == 0
    assert "train" in capsys.readouterr().out


def test_launcher_that_refuses_a_misspelt_field_is_not_made() -> None:
    with pytest.raises(ValueError, match="JobSpec has no field partitoin"):
        replace(load_launcher("local"), refused={"partitoin": "leave it out"})


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name != "slurm"])
@pytest.mark.parametrize("action", ["status", "cancel"])
def test_launcher_without_a_queue_says_in_one_line_what_to_do_instead(
    name: str, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", action, "--launcher", name, "7"]) == 1
    told = capsys.readouterr().err
    assert f"--launcher {name}" in told
    assert told.endswith(f"{load_launcher(name).queue}\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize("others", [(), ("--node-rank", "1")])
def test_launcher_that_divides_by_its_ranks_is_not_asked_to_divide_by_0(others: tuple[str, ...]) -> None:
    """Contradicting numbers are reported together with a refused option."""
    with pytest.raises(JobRefused) as caught:
        launch(["slurm", "--dry-run", "--ranks", "3", "--nodes", "2", "--restarts", "1", *others, "--", *TRAIN])
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
