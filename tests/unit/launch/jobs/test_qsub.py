"""Options of qsub that pass through, and those that do not."""

import shlex

import pytest
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.qsub import OURS, check_qsub, name_passed
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.pbs_script import directives

TRAIN = ("train", "--config", "quickstart")


def test_qsub_options_stand_in_the_script_as_they_are() -> None:
    passed = (("l", "filesystems=home:eagle"), ("W", "depend=afterok:12,afterany:13"), ("m", "abe"), ("P", "vision"))
    assert directives(JobSpec(TRAIN, 1, qsub=passed))[-4:] == [
        "-l filesystems=home:eagle",
        "-W depend=afterok:12,afterany:13",
        "-m abe",
        "-P vision",
    ]


@pytest.mark.parametrize("name", OURS)
def test_qsub_option_of_ours_is_refused_and_says_what_to_use(name: str) -> None:
    key, _, rest = name.partition("=")
    with pytest.raises(LaunchOptionError, match=naming(f"--qsub {name}:", "use ")):
        check_qsub(((key, f"{rest}=1" if rest else "1"),))


def test_qsub_states_no_option_of_the_script_twice() -> None:
    """But for place, which goes before ours."""
    job = JobSpec(TRAIN, 1, minutes=5, partition="gpu", account="vision")
    stated = [line[1:].split(" ", 1) for line in directives(job)]
    named = {name_passed(f"{key}={value}") for key, value in stated} - {"l=place"}
    assert named <= OURS.keys()


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("", ("letter", "l=filesystems=home")),
        ("-l=a=b", ("'-l'", "letter")),
        ("t=0-7", ("'t'", "letter")),  # Torque's
        ("depend=afterok:1", ("'depend'", "letter")),
        ("m", ("'m'", "value")),
        ("m=", ("'m='", "value")),
        ("m=a b", ("'m=a b'", "no blank")),
        ("M=$(id)", ("no blank",)),
        ("l=walltime", ("--time",)),
        ("l=home", ("l=NAME=VALUE",)),
        ("chunk=a100", ("chunk=NAME=VALUE",)),
        ("l=a=1,walltime=9", ("of its own",)),
        ("chunk=a=1:ncpus=9", ("of its own",)),
        ("chunk=a=1+1", ("of its own",)),
        ("l=place=pack", ("scatter", "l=place=scatter:excl")),
        ("l=place=scattered", ("scatter",)),
    ],
)
def test_qsub_option_that_is_none_is_refused_in_one_line(word: str, named: tuple[str, ...]) -> None:
    key, mark, value = word.partition("=")
    with pytest.raises(LaunchOptionError, match=naming("--qsub", *named)) as caught:
        JobSpec(TRAIN, 1, qsub=((key, value if mark else None),))
    assert len(str(caught.value).splitlines()) == 1


@given(value=st.text(max_size=8) | st.sampled_from(["a b", "it's", '"', "a\nb", "a#b", "$(x)", "`x`", "\\", "-x", ""]))
def test_qsub_value_is_one_plain_word_or_refused(value: str) -> None:
    try:
        job = JobSpec(TRAIN, 1, qsub=(("M", value),))
    except LaunchOptionError as error:
        assert str(error).startswith(("--qsub 'M=", '--qsub "M='))  # noqa: PT017
        return
    line = directives(job)[-1]
    assert line.isascii()
    assert line.isprintable()
    assert shlex.split(line, comments=True) == ["-M", value]
