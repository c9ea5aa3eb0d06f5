"""Real jobs of a real Slurm across emulated nodes: where ranks run, how jobs end, stop, resume and move on."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from slowed_node import slowed

from bigbatch.comm.rendezvous.launcher import expand_hostlist
from bigbatch.errors import EmulationError
from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.slurm import require_slurm, slurm_folder
from bigbatch.tools.emulate.state import EmulatedCluster, load, state_root
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.datasets.generated import write_dataset
from tests.cluster.conftest import Emulate, networks_of, processes_in, skip_unless_promised
from tests.laws.jobs import (
    TRAIN_PER_CLASS,
    VAL_PER_CLASS,
    assert_identical,
    final_state,
    held,
    newest_step,
    steps,
    train_command,
)

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240
PYTHON = shlex.quote(sys.executable)
BIGBATCH = (sys.executable, "-m", "bigbatch", "launch")
SLOW_LINK = "1mbit"
"""At which a step of LONG takes three seconds, whatever the machine."""

LONG: dict[str, object] = {
    "data.loader": "torchvision",
    "batch.global_batch_size": 16,
    "model.options.width": 8,
    "run.epochs": 4,
}
"""STEPS steps on two ranks."""

STEPS = 40
SOON_LOST: dict[str, object] = {
    "run.checkpoint_every_steps": 2,
    "comm.timeout_seconds": 14,
    "comm.warn_seconds": 3,
    "data.patience_seconds": 6,
}
"""Settings of a job that notices a lost node within seconds."""

ENDLESS = LONG | {"run.epochs": 400}
"""What is stopped before its end, however late."""


@pytest.fixture(scope="module")
def slurm(runtime_folder: Path, emulate: Emulate) -> Iterator[EmulatedCluster]:
    """Four nodes with two ranks and Slurm."""
    yield from _built(emulate, "slurm", "--nodes", "4", "--ranks-per-node", "2", "--link", "1gbit")


def _built(emulate: Emulate, name: str, *size: str) -> Iterator[EmulatedCluster]:
    root = state_root(os.environ)
    try:
        require_slurm(root / name, environ=os.environ)
    except EmulationError as error:
        if os.geteuid() != 0:
            pytest.skip(str(error))
        skip_unless_promised(str(error))
    done = emulate("up", "--name", name, *size, "--slurm")
    assert done.returncode == 0, done.stderr
    found = load(root / name)
    assert found is not None
    yield found
    assert clusters.down(name, root=root)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=TRAIN_PER_CLASS, val_per_class=VAL_PER_CLASS, side_pixels=(36, 48))
    return root


@pytest.fixture(scope="module")
def uninterrupted(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of LONG by mpirun on two nodes of a cluster without Slurm: as many threads per rank as there."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    argv = [sys.executable, "-m", "bigbatch", "launch", "emulate", "run", "--nodes", "2"]
    done = subprocess.run(
        [*argv, "--", *train_command(shapes, folder, LONG)], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# --- what a user types, and what Slurm says ---


def login(
    *words: str, name: str = "slurm", text: str = "", cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """A command on the login node, with text as its input."""
    argv = [*BIGBATCH, "emulate", "exec", "--name", name, "--", *words]
    return subprocess.run(argv, input=text, capture_output=True, text=True, cwd=cwd, timeout=PATIENCE_SECONDS)


def submit(script: str, *options: str, name: str = "slurm", cwd: Path) -> str:
    """Hand a script to sbatch, as its input; the job's number."""
    done = login("sbatch", "--parsable", *options, name=name, text=f"#!/bin/bash\n{script}", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job_facts(job: str, *, name: str = "slurm") -> dict[str, str]:
    """What scontrol shows of a job."""
    done = login("scontrol", "show", "job", job, "--oneliner", name=name)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def wait_until(is_so: Callable[[], object], *, log: Path) -> None:
    """Poll; the test fails with the job's output when time runs out."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.3)


def finish(job: str, *, name: str = "slurm") -> None:
    """Wait until a job, or all of an array, is neither queued nor running. (sbatch --wait asks rarely.)"""
    line = f'until [ -z "$(squeue --noheader --jobs {job})" ]; do sleep 0.2; done'
    assert login("sh", "-c", line, name=name).returncode == 0


def output_of(script: str, *options: str, cwd: Path) -> str:
    """Run a job to its end; return its output."""
    finish(submit(script, *options, "--output=said", cwd=cwd))
    return (cwd / "said").read_text()


def srun_train(shapes: Path, folder: Path, settings: dict[str, object]) -> str:
    """The line of a job script that starts the ranks."""
    command = [sys.executable, "-m", "bigbatch", *train_command(shapes, folder, settings)]
    return f"srun --kill-on-bad-exit=1 {shlex.join(command)}"


# --- ranks ---

WHO = """
import dataclasses, json, os, socket
from bigbatch.comm.rendezvous.environ import read_process_env
facts = dataclasses.asdict(read_process_env()) | {"here": socket.gethostname(), "folder": os.getcwd()}
print(json.dumps(facts, default=str), flush=True)
"""


def test_every_rank_knows_its_place(slurm: EmulatedCluster, tmp_path: Path) -> None:
    """And the job runs where sbatch was called, with that environment."""
    line = f"srun {PYTHON} -c {shlex.quote(WHO)}"
    text = output_of(f"echo $SLURM_JOB_ID\n{line}", "--nodes=4", "--ntasks-per-node=2", cwd=tmp_path)
    job, *lines = text.splitlines()
    said = sorted(map(json.loads, lines), key=lambda each: each["rank"])
    assert len(said) == 8
    for rank, each in enumerate(said):
        assert (each["launcher"], each["rank"], each["world_size"]) == ("srun", rank, 8)
        assert (each["local_rank"], each["local_size"]) == (rank % 2, 2)
        assert each["here"] == each["host"] == f"n{rank // 2}"
        assert each["master"] == ["n0", 20_000 + int(job)]
        assert each["folder"] == str(tmp_path)


def test_sweep_is_an_array_for_each_number_of_ranks(slurm: EmulatedCluster, shapes: Path, tmp_path: Path) -> None:
    experiment = load_config(
        train_command(shapes, tmp_path / "base", {"data.loader": "torchvision", "run.epochs": 1})[1:]
    )
    (tmp_path / "base.yaml").write_text(dump_config(experiment))
    sweep = {
        "name": "seeds",
        "config": "base.yaml",
        "options": {},
        "steps": None,
        "where": "slurm",
        "launch": {},
        "ranks_per_node": 1,
        "grid": {"ranks": [1, 2], "run.seed": [0, 1], "model.options.width": [4]},
        "seeds": 1,
        "timeout_minutes": 5,
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    command = (sys.executable, "-m", "bigbatch", "sweep", "sweep.yaml", "--folder", "out")
    done = login(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    states = [json.loads((tmp_path / f"out/points/{number}/point.json").read_text()) for number in range(4)]
    assert [state["state"] for state in states] == ["done"] * 4
    assert states[0]["job"] == states[1]["job"] != states[2]["job"] == states[3]["job"]
    summaries = [json.loads((tmp_path / f"out/points/{n}/run/summary.json").read_text()) for n in range(4)]
    assert [summary["world_size"] for summary in summaries] == [1, 1, 2, 2]
    finals = [final_state(tmp_path / f"out/points/{number}/run") for number in range(4)]
    for one, other in ((0, 1), (2, 3)):
        with pytest.raises(AssertionError, match="tensors differ"):
            assert_identical(finals[one], finals[other])


# --- ends ---


def test_exit_codes_and_messages_pass_through(slurm: EmulatedCluster, tmp_path: Path) -> None:
    done = login("sbatch", "--partition=no-such", "--wrap=true", cwd=tmp_path)
    assert done.returncode == 1
    assert "invalid partition specified: no-such" in done.stderr
    assert "bigbatch" not in done.stderr
    assert login("sh", "-c", "hostname; exit 7").stdout == "n0\n"
    assert login("sh", "-c", "exit 7").returncode == 7
    assert login("sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL
    missing = login("no-such-command")
    assert (missing.returncode, missing.stderr) == (1, "bigbatch: no-such-command: No such file or directory\n")


@pytest.fixture
def slow(slurm: EmulatedCluster, emulate: Emulate) -> Iterator[Callable[[], None]]:
    """Links at which a job continues for minutes; a call lets it finish fast."""
    assert emulate("shape", "--name", "slurm", "--link", SLOW_LINK).returncode == 0

    def release() -> None:
        assert emulate("shape", "--name", "slurm", "--link", "1gbit").returncode == 0

    yield release
    release()


def launch(*options: str, command: list[str], cwd: Path, name: str = "slurm") -> tuple[str, Path]:
    """Submit a job by `bigbatch launch slurm`, as typed on the login node; its number and its log."""
    done = login(*BIGBATCH, "slurm", *options, "--", *command, name=name, cwd=cwd)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    found = re.fullmatch(r"job (\d+); its output: (.*)", first)
    assert found, first
    return found[1], cwd / found[2]


TWO_NODES = ("--nodes", "2", "--ranks-per-node", "1")


def test_job_at_its_time_limit_is_requeued_and_ends_with_the_same_bits(
    slow: Callable[[], None], shapes: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Slurm looks for time limits twice a minute. The one that is set has not passed when it comes to Slurm, and is
    near by then: the job is asked to stop at the next look."""
    run_folder = tmp_path / "run"
    job, log = launch(
        *(*TWO_NODES, "--time", "30", "--stop-seconds", "115"),
        command=train_command(shapes, run_folder, LONG),
        cwd=tmp_path,
    )
    wait_until(lambda: len(steps(run_folder)) >= 2, log=log)
    hours, minutes, seconds = map(int, job_facts(job)["RunTime"].split(":"))
    limit = 60 * hours + minutes + (1 if seconds < 30 else 2)
    assert login("scontrol", "update", f"jobid={job}", f"timelimit={limit}").returncode == 0
    wait_until(lambda: "requeuing, as its time limit is near" in log.read_text(), log=log)
    stopped_after = newest_step(run_folder)
    assert 2 <= stopped_after < STEPS
    slow()
    # or a slow machine would be asked to stop again before its first step
    assert login("scontrol", "update", f"jobid={job}", "timelimit=30").returncode == 0
    finish(job)
    facts = job_facts(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    assert int(facts["Restarts"]) >= 1  # more where a busy machine needs half a minute to start
    assert f"resumed after step {stopped_after}" in log.read_text()
    summary = json.loads((run_folder / "summary.json").read_text())
    assert (summary["world_size"], summary["backend"], summary["steps"]) == (2, "tcp", STEPS)
    assert_identical(final_state(run_folder), final_state(uninterrupted))
    assert steps(run_folder) == steps(uninterrupted)


def test_job_that_heals_in_place_ends_well_without_a_rank_that_was_lost(
    slurm: EmulatedCluster, shapes: Path, tmp_path: Path
) -> None:
    """The first one, in the node that runs the job's script."""
    heals = {"run.heal": "in_place", "optimizer.loss": "tests.parallel.dying_loss.loss", "optimizer.label_smoothing": 0}
    job, log = launch(
        *(*TWO_NODES, "--env", "DIE=0/3/forward", "--env", f"PYTHONPATH={ROOT}"),
        command=train_command(shapes, tmp_path / "run", LONG | heals),
        cwd=tmp_path,
    )
    finish(job)
    facts = job_facts(job)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "0", "0:0"), log.read_text()
    assert steps(tmp_path / "run") == list(range(1, STEPS + 1))


def test_status_and_cancel_of_an_array_are_of_all_its_jobs(slurm: EmulatedCluster, tmp_path: Path) -> None:
    """More than the nodes can run at once."""
    script = '# run folder: null\ntrap "exit 130" USR2\necho listens\nsleep 600 & wait'
    job = submit(script, "--array=0-9", "--ntasks=2", "--nodes=1", "--output=said-%a", cwd=tmp_path)
    said = [tmp_path / f"said-{number}" for number in range(4)]
    wait_until(lambda: all(log.exists() and log.read_text() for log in said), log=said[0])
    shown = login(*BIGBATCH, "status", job, cwd=tmp_path).stdout
    assert shown.count("RUNNING") == 4
    assert f"job {job}_[4-9] (sbatch): PENDING" in shown
    shown = login(*BIGBATCH, "status", cwd=tmp_path).stdout
    assert [shown.count(f"job {job}_"), shown.count("PENDING")] == [5, 1], "each is shown once"
    done = login(*BIGBATCH, "cancel", job, cwd=tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 5), done.stderr
    finish(job)
    shown = login(*BIGBATCH, "status", job, cwd=tmp_path).stdout
    assert shown.count("130 (stopped by request") == 4, shown


@pytest.mark.alone
def test_job_changes_a_slow_node_for_another(slurm: EmulatedCluster, shapes: Path, tmp_path: Path) -> None:
    with slowed("n1"):
        job, log = launch(
            *(*TWO_NODES, "--preflight", "exclude"),
            command=train_command(shapes, tmp_path / "run", LONG | {"run.epochs": 1, "schedule.warmup_epochs": 0}),
            cwd=tmp_path,
        )
        wait_until(lambda: log.exists() and "requeuing, to run without n1" in log.read_text(), log=log)
    finish(job)
    facts, text = job_facts(job), log.read_text()
    assert (facts["JobState"], facts["ExcNodeList"], facts["Restarts"]) == ("COMPLETED", "n1", "1"), text
    assert "n1" not in expand_hostlist(facts["NodeList"])
    assert "n1: multiplies matrices at" in text
    assert "preflight: nodes: 2, no fault found, the link is not judged" in text, "after the change, no third node"
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == 2


@pytest.mark.parametrize(("errors", "code"), [(0, "0:0"), (3, "4:0")])
def test_gpus_are_tested_by_a_task_per_node(
    errors: int, code: str, slurm: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script that a job with GPUs has, without the request for them: the driver is played."""
    row = f"GPU-a, 16, 16, {errors}, Disabled"
    program = tmp_path / "nvidia-smi"
    asks = f"echo $SLURM_PROCID >> {tmp_path}/asked; echo H100, 999.1, 1, 1, 1"
    cases = f"--query-gpu=name*) {asks} ;;\n--query-gpu=uuid*) echo {row} ;;"
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "own.py").write_text("import os; open('ran-' + os.environ['SLURM_PROCID'], 'w').close()\n")
    options = ("--nodes", "2", "--ranks-per-node", "2", "--gpus-per-node", "2", "--output", "job.sh", "--python")
    assert login(*BIGBATCH, "slurm", *options, "--", "own.py", cwd=tmp_path).returncode == 0
    script = (tmp_path / "job.sh").read_text().replace("#SBATCH --gpus-per-node=2\n", "")
    (tmp_path / "logs").mkdir(exist_ok=True)
    job = submit(script.partition("\n")[2], cwd=tmp_path)
    finish(job)
    text = (tmp_path / f"logs/bigbatch-{job}.log").read_text()
    assert job_facts(job)["ExitCode"] == code, text
    assert sorted((tmp_path / "asked").read_text().split()) == ["0", "1"], "a task on each of both nodes"
    assert len(list(tmp_path.glob("ran-*"))) == (4 if not errors else 0)
    assert text.count("GPU-a: 3 uncorrected memory errors") == (2 if errors else 0)


def test_cancelled_job_saves_a_checkpoint(slow: Callable[[], None], shapes: Path, tmp_path: Path) -> None:
    script = srun_train(shapes, tmp_path / "run", ENDLESS)
    job = submit(script, "--nodes=2", "--ntasks-per-node=1", "--output=said", cwd=tmp_path)
    wait_until(lambda: len(steps(tmp_path / "run")) >= 2, log=tmp_path / "said")
    assert "2 ranks in 2 node groups, started by srun" in (tmp_path / "said").read_text()
    assert newest_step(tmp_path / "run") == 0, "none was planned before the end"
    assert login("scancel", job).returncode == 0
    finish(job)
    assert job_facts(job)["JobState"] == "CANCELLED"
    assert newest_step(tmp_path / "run") >= 2, (tmp_path / "said").read_text()


def test_suspended_job_goes_on_and_saves_when_it_is_cancelled(
    slow: Callable[[], None], shapes: Path, tmp_path: Path
) -> None:
    """Slurm stops all its processes for longer than any of its limits: no rank takes the others for lost.

    Then it is asked to stop: it continues, saves a checkpoint, and is not requeued.
    """
    run = tmp_path / "run"
    limits: dict[str, object] = {"comm.timeout_seconds": 18, "comm.warn_seconds": 18, "data.patience_seconds": 8}
    job, log = launch(*TWO_NODES, command=train_command(shapes, run, ENDLESS | limits), cwd=tmp_path)
    wait_until(lambda: len(steps(run)) >= 2, log=log)
    assert "RUNNING" in login(*BIGBATCH, "status", job, cwd=tmp_path).stdout
    assert login("scontrol", "suspend", job).returncode == 0
    time.sleep(20)
    assert job_facts(job)["JobState"] == "SUSPENDED"
    assert login(*BIGBATCH, "cancel", job, cwd=tmp_path).returncode == 0
    finish(job)
    facts = job_facts(job)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "130:0"), log.read_text()
    assert newest_step(run) >= 2, log.read_text()


def test_urgent_job_gets_the_nodes_and_gives_them_back(slurm: EmulatedCluster, tmp_path: Path) -> None:
    """The preempted job gets its signal, long before its time limit."""
    script = """
        trap 'echo told; scontrol requeue $SLURM_JOB_ID; sleep 60' USR1
        echo "attempt ${SLURM_RESTART_COUNT:-0}" >> said
        [ -n "$SLURM_RESTART_COUNT" ] || { sleep 600 & wait; }
    """
    options = ("--nodes=4", "--ntasks-per-node=2", "--output=said", "--open-mode=append")
    job = submit(script, *options, "--signal=B:USR1@5", "--time=30", "--requeue", cwd=tmp_path)
    log = tmp_path / "said"
    wait_until(lambda: log.exists() and "attempt 0" in log.read_text(), log=log)
    urgent = submit("echo urgent", *options, "--partition=urgent", cwd=tmp_path)
    finish(urgent)
    finish(job)
    # beside what bash and Slurm say of processes that were ended
    said = [line for line in log.read_text().splitlines() if line.startswith(("attempt", "told", "urgent"))]
    assert said == ["attempt 0", "told", "urgent", "attempt 1"]
    assert (job_facts(job)["JobState"], job_facts(job)["Restarts"]) == ("COMPLETED", "1")


# --- the cluster itself ---


@pytest.fixture
def mortal(runtime_folder: Path, emulate: Emulate) -> Iterator[EmulatedCluster]:
    """Two nodes with Slurm; one will die."""
    yield from _built(emulate, "mortal", "--nodes", "2", "--ranks-per-node", "1")


def test_job_goes_on_without_a_node_that_dies(
    mortal: EmulatedCluster, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its allocation, before Slurm takes the node for down, and with the same steps."""
    run, go_on = tmp_path / "run", tmp_path / "go_on"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where its loss lies
    reconfigure("mortal", r"(SlurmdTimeout)=\d+", r"\1=300")  # Slurm's default
    command = train_command(shapes, run, LONG | {"run.epochs": 2} | SOON_LOST | held(run, reports=5, until=go_on))
    job, log = launch(*TWO_NODES, "--restarts", "1", command=command, cwd=tmp_path, name="mortal")
    wait_until(lambda: newest_step(run) >= 2, log=log)
    kill_node(mortal, 1)
    go_on.touch()
    finish(job, name="mortal")
    facts, text = job_facts(job, name="mortal"), log.read_text()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), text
    assert "restarting; nodes that answer: n0\n" in text
    assert (facts["NodeList"], int(facts["NumNodes"])) == ("n0", 1), "Slurm has the other one back"
    assert re.search(r"resumed after step \d+", text)
    assert not list(tmp_path.glob("slurm_job_*"))
    assert steps(run) == list(range(1, STEPS // 2 + 1))
    assert json.loads((run / "summary.json").read_text())["world_size"] == 1


def reconfigure(name: str, pattern: str, by: str) -> None:
    """Change Slurm's settings."""
    conf = slurm_folder(state_root(os.environ) / name) / "slurm.conf"
    conf.write_text(re.sub(pattern, by, conf.read_text()))
    assert login("scontrol", "reconfigure", name=name).returncode == 0


def kill_node(cluster: EmulatedCluster, node: int) -> None:
    """SIGKILL to all of its processes."""
    for pid in processes_in(networks_of(cluster)[node]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def daemons_in(cluster: EmulatedCluster) -> list[str]:
    """Names of Slurm's processes in a cluster, sorted."""
    names = [psutil.Process(pid).name() for pid in processes_in(*networks_of(cluster))]
    return sorted(name for name in names if name in ("munged", "slurmctld", "slurmd"))


def test_slurm_goes_with_its_cluster(slurm: EmulatedCluster, emulate: Emulate, tmp_path: Path) -> None:
    done = emulate("up", "--name", "brief", "--nodes", "2", "--slurm")
    assert (done.returncode, done.stdout) == (0, "brief: nodes 2, ranks 1,1, link none, delay 0us, Slurm\n")
    brief = load(state_root(os.environ) / "brief")
    assert brief is not None
    assert daemons_in(brief) == ["munged", "slurmctld", "slurmd", "slurmd"]
    submit("srun sleep 600", "--nodes=2", name="brief", cwd=tmp_path)
    assert emulate("run", "--name", "brief", "--", "--version").stderr.endswith(
        "Slurm starts the jobs of brief: bigbatch launch emulate exec --name brief -- sbatch job.sh\n"
    )
    networks = networks_of(brief)
    assert emulate("down", "--name", "brief").stdout == "brief: removed\n"
    assert processes_in(*networks) == []
    assert len(daemons_in(slurm)) == 6, "the other one is not touched"


def test_node_that_does_not_start_is_named(
    emulate: Emulate, slurm: EmulatedCluster, tmp_path: Path, runtime_folder: Path
) -> None:
    (tmp_path / "slurmd").write_text("#!/bin/sh\n[ $2 = n1 ] && { echo fatal: no clock >&2; exit 1; }\nexit 0\n")
    (tmp_path / "slurmd").chmod(0o755)
    done = emulate("up", "--name", "lame", "--nodes", "3", "--slurm", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    log = state_root(os.environ) / "lame/slurm/slurmd.n1.log"
    assert done.stderr == f"bigbatch: n1: slurmd does not start: {log}: fatal: no clock\n"
    assert log.exists(), "for a look"
    assert "lame: ended" in emulate("status").stdout
    assert emulate("down", "--name", "lame").stdout == "lame: removed\n"


def test_root_of_a_user_namespace_is_not_root_enough(runtime_folder: Path) -> None:
    """Slurm would fail there: setgroups, Operation not permitted."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs util-linux's unshare")
    command = (*BIGBATCH, "emulate", "up", "--name", "plain", "--nodes", "2", "--slurm")
    done = subprocess.run([unshare, "--user", "--map-root-user", *command], capture_output=True, text=True)
    assert done.returncode == 1
    complaint = "--slurm needs root: Slurm sets the groups of its jobs, and no plain user may do that"
    assert done.stderr == f"bigbatch: {complaint}\n"
    assert not (state_root(os.environ) / "plain").exists()
