"""Options of sbatch that pass through, and those that do not."""

import shlex

import pytest
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.jobs.validation import SET_BY_SCRIPT
from bigbatch.launch.launchers.slurm_script import directives
from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")


def test_sbatch_options_stand_in_the_script_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        *("exclusive", "dependency=afterok:12:13?afterany:14", "mail-type=END,FAIL", "mail-user=me@example.org"),
        *("licenses=matlab@db:2", "switches=1@24:00:00", "hint=nomultithread", "mem-per-gpu=60G", "gres=gpu:a100:8"),
        *("nodelist=n[1-3,7]", "begin=now+1hour", "exclusive=user", "time-min=30"),
    ]
    words = [word for each in asked for word in ("--sbatch", each)]
    assert main(["slurm", "--dry-run", *words, "--", *TRAIN]) == 0
    head = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert [line for line in head if line.startswith("#SBATCH ")][-len(asked) :] == [
        f"#SBATCH --{word}" for word in asked
    ]


@pytest.mark.parametrize("key", [*directives(JobSpec(TRAIN, 1)), *(f"--{key}" for key in SET_BY_SCRIPT)])
def test_sbatch_option_of_ours_is_refused_by_its_name(key: str) -> None:
    name = key.removeprefix("--").partition("=")[0]
    with pytest.raises(LaunchOptionError, match=naming(f"--sbatch {name}:", "sets it itself: ")):
        JobSpec(TRAIN, 1, sbatch=((name, "4"),))


@pytest.mark.parametrize(
    ("key", "named"), [("mem", "--memory"), ("time", "--time"), ("exc", "exclude"), ("ntasks-per", "ntasks-per-")]
)
def test_sbatch_option_of_ours_says_what_to_use(key: str, named: str) -> None:
    """Also where it is the beginning of one, which sbatch takes for the whole."""
    with pytest.raises(LaunchOptionError, match=naming(f"--sbatch {key}", named)):
        JobSpec(TRAIN, 1, sbatch=((key, "4"),))


@pytest.mark.parametrize("key", ["", "p", "--exclusive", "-p", "Exclusive", "a b", "a\nb", "x;y", "$(id)", "mail_user"])
def test_sbatch_option_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(LaunchOptionError, match="--sbatch") as caught:
        JobSpec(TRAIN, 1, sbatch=((key, None),))
    assert len(str(caught.value).splitlines()) == 1


@given(value=st.text(max_size=8) | st.sampled_from(["a b", "it's", '"', "a\nb", "a#b", "$(x)", "`x`", "\\", "-x", ""]))
def test_sbatch_value_is_one_plain_word_or_refused(value: str) -> None:
    try:
        job = JobSpec(TRAIN, 1, sbatch=(("comment", value),))
    except LaunchOptionError as error:
        assert "--sbatch comment=" in str(error)  # noqa: PT017
        return
    line = directives(job)[-1]
    assert line.isascii()
    assert line.isprintable()
    assert shlex.split(line, comments=True) == [line] == [f"--comment={value}"]


@pytest.mark.parametrize("text", ["many", "8.5", "a100:", ":8", "a100:x", "a b:8", "a100:-1", "-1"])
def test_sbatch_gpus_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(LaunchOptionError, match="--gpus-per-node"):
        main(["slurm", "--dry-run", f"--gpus-per-node={text}", "--", *TRAIN])
