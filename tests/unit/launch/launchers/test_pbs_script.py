"""The script for PBS, run by the real bash with stand-ins for PBS: quoting, the secret, signals, exit codes."""

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_launchers import left_by
from pbs_stubs import JOB, PbsStubs

from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.pbs_script import directives, pbs_script

TRAIN = ("train", "--config", "quickstart")
NODES = JobSpec(TRAIN, 4, num_nodes=2)
SCRIPT = pbs_script(NODES)
SELECT = "-l select=1:mpiprocs=8"
NASTY = ["a b", "it's", '"', "a\nb", "; touch x", "$(touch x)", "`touch x`", "$1", '"$1"', "\\", "#c", "-x", "", "é"]


@pytest.fixture
def stubs(tmp_path: Path) -> PbsStubs:
    return PbsStubs(tmp_path)


def test_pbs_script_starts_the_launcher_of_each_node_once(stubs: PbsStubs) -> None:
    code, log = stubs.run(SCRIPT)
    assert code == 0, log
    for rank in range(2):
        start = ["launch", "local", "--nodes", "2", "--node-rank", str(rank), "--master", f"n0:{20000 + int(JOB)}"]
        assert stubs.argv(rank) == [*start, "--ranks-per-node", "2", "--", *TRAIN]


def test_pbs_script_gives_the_ranks_words_and_variables_whatever_they_hold(stubs: PbsStubs) -> None:
    pairs = tuple((f"V{number}", value) for number, value in enumerate(NASTY))
    job = JobSpec((*TRAIN, *NASTY), 2, num_nodes=2, environment=pairs, device="cpu")
    code, log = stubs.run(pbs_script(job))
    assert code == 0, log
    for rank in range(2):
        assert stubs.argv(rank)[-len(NASTY) :] == NASTY
        assert [stubs.variables(rank)[name] for name, _ in pairs] == NASTY
        assert stubs.variables(rank)["BIGBATCH_DEVICE"] == "cpu"
    assert not list(stubs.folder.rglob("x"))


@pytest.mark.long
@settings(max_examples=20)
@given(words=st.lists(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]))))
def test_pbs_script_lets_no_word_reach_the_shell(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    stubs = PbsStubs(tmp_path_factory.mktemp("stubs"))
    job = JobSpec((*TRAIN, *words), 2, num_nodes=2, environment=(("WORDS", " ".join(words)),))
    assert stubs.run(pbs_script(job))[0] == 0
    assert stubs.argv(1)[len(stubs.argv(1)) - len(words) :] == words
    assert stubs.variables(1)["WORDS"] == " ".join(words)


def test_pbs_script_hands_on_a_secret_that_only_its_owner_can_read(stubs: PbsStubs) -> None:
    secrets = []
    for _ in range(2):
        code, log = stubs.run(SCRIPT)
        assert code == 0
        first, second = (stubs.variables(rank)["BIGBATCH_SECRET"] for rank in range(2))
        assert first == second
        assert re.fullmatch("[0-9a-f]{64}", first)
        assert first not in log + SCRIPT + "".join(stubs.told("tmrsh.argv"))
        secrets.append(first)
    assert secrets[0] != secrets[1]
    assert set(stubs.told("modes")) == {"600"}
    assert [path.name for path in stubs.folder.glob("logs/*/*")] == ["node-1.log"], "and goes with the job"


def test_pbs_script_takes_over_nothing_that_describes_another_job(stubs: PbsStubs) -> None:
    others = left_by("torchrun") | left_by("mpirun") | {"OMP_NUM_THREADS": "64", "NCPUS": "64"}
    stubs.run(SCRIPT, **others)
    for rank in range(2):
        assert not others.keys() & stubs.variables(rank).keys()
        assert stubs.variables(rank)["BIGBATCH_SITE_FILE"] == ""
        assert stubs.variables(rank)["BIGBATCH_STOP_SECONDS"] == "120"


@pytest.mark.parametrize(
    ("codes", "code"), [("0 0", 0), ("3 0", 3), ("0 7", 7), ("6 3", 3), ("3 6", 3), ("6 6", 6), ("6 137", 137)]
)
def test_pbs_script_ends_with_the_code_of_the_rank_that_failed(stubs: PbsStubs, codes: str, code: int) -> None:
    ended, log = stubs.run(SCRIPT, STUB_CODES=codes)
    assert ended == code
    assert log.splitlines()[-1].endswith(f"ended with exit code {code}")
    other = codes.split()[1]
    assert (f"n1 ended with exit code {other}: {stubs.folder}/logs/bigbatch-77/node-1.log" in log) == (other != "0")


def test_pbs_script_that_is_asked_has_all_nodes_save_and_stop(stubs: PbsStubs) -> None:
    code, log = stubs.run(SCRIPT, sends=signal.SIGUSR1, STUB_WAITS="0 1")
    assert code == 130
    assert sorted(stubs.told("asked")) == ["0", "1"]
    assert "submit it again" in log


@pytest.mark.parametrize("again", range(5))
def test_pbs_script_that_pbs_ends_leaves_it_to_pbs_to_ask(stubs: PbsStubs, again: int) -> None:
    """PBS sends SIGTERM to all processes of the first node; a second one would end its ranks before they have saved.

    bash itself lost the exit code in one of three, where this one and the ranks get the signal together.
    """
    code, _ = stubs.run(SCRIPT, sends=signal.SIGTERM, STUB_WAITS="0")
    assert code == 130
    assert stubs.told("asked") == ["0"]
    assert not [word for word in (stubs.folder / "tmrsh.argv").read_text().split("\0") if "kill" in word]


def test_pbs_script_asks_by_its_own_clock_before_the_time_limit(stubs: PbsStubs) -> None:
    code, _ = stubs.run(SCRIPT, STUB_WAITS="0 1", STUB_IS_OVER="1")
    assert code == 130
    (slept,) = stubs.told("slept")
    assert 3475 <= int(slept) <= 3480  # 01:00:00 less 120 s, and what the start took


def test_pbs_script_without_a_time_limit_says_so(stubs: PbsStubs) -> None:
    code, log = stubs.run(SCRIPT, STUB_LIMIT="")
    assert (code, "no time limit" in log, stubs.told("slept")) == (0, True, [])


def test_pbs_script_whose_limit_is_the_end_has_no_clock(stubs: PbsStubs) -> None:
    code, _ = stubs.run(pbs_script(JobSpec(TRAIN, 2, num_nodes=2, stop_seconds=0)))
    assert (code, stubs.told("slept")) == (0, [])
    assert "BIGBATCH_STOP_SECONDS" not in stubs.variables(0)


def test_pbs_script_on_other_hosts_than_asked_for_starts_nothing(stubs: PbsStubs) -> None:
    (stubs.folder / "nodefile").write_text("n0\nn0\nn0\nn0\n")
    code, log = stubs.run(SCRIPT)
    assert code == 1
    assert "1 hosts, and not 2" in log
    assert not (stubs.folder / "argv-0").exists()


def test_pbs_script_of_one_node_keeps_to_it(stubs: PbsStubs) -> None:
    (stubs.folder / "nodefile").write_text("n0\nn0\n")
    code, _ = stubs.run(pbs_script(JobSpec(TRAIN, 2)))
    assert code == 0
    assert stubs.argv(0) == ["launch", "local", "--ranks-per-node", "2", "--", *TRAIN]
    assert not stubs.told("tmrsh.argv")


def test_pbs_script_outside_of_a_job_says_how_to_submit_it(stubs: PbsStubs) -> None:
    code, said = stubs.run(SCRIPT, PBS_JOBID="")
    assert code == 2
    assert "qsub" in said


def test_pbs_script_finds_the_programs_of_pbs(stubs: PbsStubs) -> None:
    """As where only /etc/pbs.conf knows them."""
    programs = stubs.folder / "exec/bin"
    programs.mkdir(parents=True)
    for name in ("pbs_tmrsh", "qstat"):
        (stubs.folder / name).rename(programs / name)
    conf = stubs.folder / "pbs.conf"
    conf.write_text(f"PBS_SERVER=server\nPBS_EXEC={stubs.folder}/exec\n")
    code, log = stubs.run(SCRIPT)
    assert (code, "no pbs_tmrsh" in log, (stubs.folder / "argv-0").exists()) == (1, True, False)
    assert stubs.run(SCRIPT, PBS_CONF_FILE=str(conf))[0] == 0


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        # what pbs_resources(7B) and qsub(1B) of OpenPBS say
        ({}, SELECT),
        ({"num_nodes": 2, "cpus_per_rank": 3}, "-l select=2:ncpus=12:mpiprocs=4"),
        ({"gpus_per_node": 8}, "-l select=1:mpiprocs=8:ngpus=8"),
        ({"memory": "200g"}, "-l select=1:mpiprocs=8:mem=200gb"),
        ({"memory": "64000"}, "-l select=1:mpiprocs=8:mem=64000mb"),
        ({"minutes": 2190}, "-l walltime=36:30:00"),
        ({"minutes": 5}, "-l walltime=00:05:00"),
        ({"partition": "gpu@server"}, "-q gpu@server"),
        ({"account": "vision"}, "-A vision"),
        ({"logs": "/scratch/logs"}, "-o /scratch/logs/"),
        ({"qsub": (("W", "depend=afterok:12"),)}, "-W depend=afterok:12"),
        ({"qsub": (("chunk", "gpu_model=a100"), ("chunk", "host=n1"))}, SELECT + ":gpu_model=a100:host=n1"),
    ],
)
def test_pbs_directives_are_what_the_manual_has(fields: dict[str, object], line: str) -> None:
    asked = directives(JobSpec(TRAIN, 8, **fields))  # type: ignore[arg-type]
    assert line in asked
    assert asked[0:2] == ["-S /bin/bash", "-N bigbatch"]


def test_pbs_place_is_stated_once() -> None:
    assert "-l place=scatter" in directives(NODES)
    exclusive = directives(JobSpec(TRAIN, 4, num_nodes=2, qsub=(("l", "place=scatter:excl"),)))
    assert [line for line in exclusive if "place" in line] == ["-l place=scatter:excl"]
