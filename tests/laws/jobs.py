"""Real jobs on a tiny data set, in processes of their own: started by the launchers that users have, or forked."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from all_augmentations import ALL_AUGMENTATIONS
from forked_ranks import exit_codes, places, start_rank
from torch import Tensor

from bigbatch.comm.rendezvous.ports import free_port
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.k8s_manifest import jobset
from bigbatch.launch.launchers.mpirun import mpirun_argv
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.folder.folder import RunDir, read_records

NUM_CLASSES = 10
TRAIN_PER_CLASS = 16
VAL_PER_CLASS = 7
TIMEOUT_SECONDS = 240
"""Time limit of a job: many times what it needs, as other tests may use the cores."""

TINY = {
    "data.probe_seconds": 0,
    "data.image_size": 32,
    "data.eval_crop_fraction": 1.0,
    "model.options.width": 4,
    "batch.global_batch_size": 32,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.log_every_steps": 1,
    "run.epochs": 2,
    "schedule.warmup_epochs": 1,
    "comm.algorithm": "hierarchical",  # by name: auto could measure, and choose by noise
}

MOMENTUM = 0.9
SGD = {
    "optimizer.name": "sgd",
    "optimizer.momentum": MOMENTUM,
    "optimizer.options.nesterov": "true",
    "schedule.base_lr": 1e-5,
    "schedule.end_lr": 0,
    "schedule.warmup_epochs": 0,
    "run.epochs": 1,
    "run.checkpoint_every_steps": 1,
    "run.keep_checkpoints": 100,
}
"""Hardly moves the weights, so that each step's gradient is that of the same model in all runs, and keeps
every step's momentum. Five steps."""

AUGMENTED = {
    "data.train_sizes": "[[0,24],[1,32]]",
    **{f"augment.{key}": value for key, value in ALL_AUGMENTATIONS.items()},
}
"""All that can be done to training images."""


def held(run: Path, *, reports: int, until: Path) -> dict[str, object]:
    """Settings of a job that waits for a file in the step after so many reports, or in the one after that."""
    return {
        "optimizer.loss": "tests.laws.held_loss.loss",
        "optimizer.loss_options": json.dumps({"run": str(run), "reports": reports, "until": str(until)}),
        "optimizer.label_smoothing": 0,
    }


ROUNDING = 2e-5
"""Sums of fp32 in another order, relative to the whole gradient (2e-6 was measured)."""


def train_command(data: Path, run: Path, overrides: dict[str, object]) -> list[str]:
    """The quick start's config on the tiny data set; TINY's width is of its own model alone."""
    settings = {**TINY, "data.root": data, "run.directory": run, **overrides}
    if "model.name" in overrides and "model.options.width" not in overrides:
        del settings["model.options.width"]
    return ["train", "--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items())]


def mpirun(command: Sequence[str], *, ranks: int) -> list[str]:
    """The argument list that `bigbatch launch mpirun` would run."""
    job = JobSpec(tuple(command), ranks, oversubscribe=ranks > 1)
    beside = Path(sys.executable).with_name("mpirun")
    return mpirun_argv(job, mpirun=str(beside) if beside.exists() else "mpirun", is_root=os.geteuid() == 0)


@dataclass(frozen=True)
class Forked:
    """A job without a launcher: the fastest start, if the launcher does not matter."""

    command: tuple[str, ...]
    ranks: int
    target: str = "forked_ranks:bigbatch"


def forked(command: Sequence[str], *, ranks: int) -> Forked:
    """`bigbatch` with this command on so many ranks."""
    return Forked(tuple(command), ranks)


Job = Sequence[str] | Forked
"""What run() takes: an argument list, or ranks to fork."""


def alone(command: Sequence[str]) -> Forked:
    """The same as one process."""
    return forked(command, ranks=1)


class ForkedJob:
    """Ranks that run, their output in log; used as a launcher's process is."""

    def __init__(self, job: Forked, log: Path, *, stderr: Path | None = None, **environ: str) -> None:
        self._job, self._log, self._stderr, self._environ = job, log, stderr or log, environ
        self._places = places(job.ranks) if job.ranks > 1 else [{}]
        self.ranks = [self._start(place) for place in self._places]

    def _start(self, place: dict[str, str], target: str = "") -> BaseProcess:
        environ, command = {**self._environ, **place}, self._job.command
        return start_rank(target or self._job.target, command, environ=environ, stdout=self._log, stderr=self._stderr)

    def join_again(self, rank: int, *, target: str = "", **environ: str) -> BaseProcess:
        """Start a rank that has ended as one that joins the others."""
        self.ranks[rank].join(TIMEOUT_SECONDS)
        return self._start({**self._places[rank], "BIGBATCH_JOINS": "1", **environ}, target)

    def poll(self) -> int | None:
        """The exit code of the first rank that failed, or 0; None while all live."""
        codes = [rank.exitcode for rank in self.ranks]
        failed = next((code for code in codes if code), None)
        return failed if failed is not None or None in codes else 0

    def wait(self, timeout: float) -> int:
        """The same once all have ended; those that have not by then are killed, and the test fails."""
        codes = exit_codes(self.ranks, timeout_seconds=timeout)
        assert codes is not None, f"the job did not end within {timeout} s"
        return next((code for code in codes if code), 0)


def run(job: Job, *, expect: int | None = 0, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run to the end; the test fails with the job's output when the exit code is another one."""
    if isinstance(job, Forked):
        done = _run_forked(job, environ)
    else:
        done = subprocess.run(
            job, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env={**os.environ, **environ}, check=False
        )
    if expect is not None:
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def _run_forked(job: Forked, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        code = ForkedJob(job, out, stderr=err, **environ).wait(timeout=TIMEOUT_SECONDS)
        stdout, stderr = (path.read_text(errors="backslashreplace") for path in (out, err))
    return subprocess.CompletedProcess(job.command, code, stdout, stderr)


def run_pods(
    command: Sequence[str], *, ranks: int = 2, restarts: int | None = None, log: Path | None = None, **variables: str
) -> list[int]:
    """Run on this host what a JobSet's two pods run, with the variables that they have; their exit codes."""
    job = JobSpec(tuple(command), ranks, num_nodes=2, image="bb", device="cpu", restarts=restarts)
    (replicated,) = jobset(job, name="job")["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    stated = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    master = container["command"][container["command"].index("--master") + 1]
    here = {master: f"127.0.0.1:{free_port()}", "bigbatch": f"{sys.executable}"}
    pods = []
    for index in range(2):
        words = [here.get(word, word).replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        environ = {**os.environ, **stated, "BIGBATCH_SECRET": "of the job", "BIGBATCH_INTERFACE": "lo", **variables}
        environ["BIGBATCH_HOST"] = f"pod-{index}"
        argv = [words[0], "-m", "bigbatch", *words[1:]]
        with log.open("ab") if log else nullcontext() as output:
            pods.append(subprocess.Popen(argv, env=environ, stdout=output, stderr=output))
    try:
        return [pod.wait(timeout=TIMEOUT_SECONDS) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()


def message(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line that bigbatch printed for the user, on however many ranks."""
    return only_message(done.stderr + done.stdout)


def only_message(text: str) -> str:
    """The same, in all that a job printed."""
    assert "Traceback" not in text, text
    lines = {line[line.index("bigbatch: ") :] for line in text.splitlines() if "bigbatch: " in line}
    assert len(lines) == 1, text
    return lines.pop()


def fails(job: Job, **environ: str) -> str:
    """Run a command that must fail with exit code 1; its message."""
    return message(run(job, expect=1, **environ))


def copy_of(data: Path, tmp_path: Path) -> Path:
    """A data set to damage."""
    return Path(shutil.copytree(data, tmp_path / "data"))


def cut_back(whole: Path, resumed: Path, *, num_checkpoints: int) -> int:
    """Copy a finished run as it was when it had so many checkpoints, all of which it keeps; the step of the last."""
    shutil.copytree(whole, resumed)
    (resumed / "summary.json").unlink()
    checkpoints = list_checkpoints(resumed / "checkpoints")
    for later in checkpoints[num_checkpoints:]:
        shutil.rmtree(later.path)
    return checkpoints[num_checkpoints - 1].step


def start(job: Job, log: Path) -> "subprocess.Popen[bytes] | ForkedJob":
    """Run in the background, output to log; a launcher in a process group of its own."""
    if isinstance(job, Forked):
        return ForkedJob(job, log)
    return subprocess.Popen(job, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)


def wait_until(condition: Callable[[], bool], *, process: "subprocess.Popen[bytes] | ForkedJob", log: Path) -> None:
    """Poll until the condition holds; fail with the log when the process ends or time runs out before."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert process.poll() is None, f"the job ended before it was disturbed:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"nothing happened for {TIMEOUT_SECONDS} s:\n{log.read_text()}"
        time.sleep(0.02)


def rank_pids(parent: int) -> list[int]:
    """Processes below parent that run bigbatch, oldest first."""
    found = []
    for each in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):
            words = each.cmdline()
            found += [each.pid] if "bigbatch" in words and "mpirun" not in words[0] else []
    return sorted(found)


def kill_rank(process: "subprocess.Popen[bytes] | ForkedJob") -> None:
    """SIGKILL the youngest rank of a job."""
    if isinstance(process, ForkedJob):
        process.ranks[-1].kill()
    else:
        os.kill(rank_pids(process.pid)[-1], signal.SIGKILL)


def have_ended(pids: Sequence[int], *, within_seconds: float = 10) -> bool:
    """All of the processes are gone; a launcher can end a moment before its ranks do."""
    deadline = time.monotonic() + within_seconds
    while any((Path("/proc") / str(pid)).exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def newest_step(run: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    found = list_checkpoints(run / "checkpoints")
    return found[-1].step if found else 0


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Those of metrics.jsonl that are train, eval or skipped."""
    return [record for record in read_records(RunDir(run).metrics) if record["kind"] == kind]


def steps(run: Path) -> list[int]:
    """Return the steps of the reports."""
    return [record["step"] for record in records(run, "train")]


def final_state(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, weights and optimizer state, and learning rates, by name."""
    state = load_checkpoint(list_checkpoints(run / "checkpoints")[-1].path)
    tensors = {f"model/{name}": value for name, value in state["model"].items()}
    for index, values in state["optimizer"]["state"].items():
        tensors.update({f"optimizer/{index}/{k}": v for k, v in values.items() if isinstance(v, Tensor)})
    groups = state["optimizer"]["param_groups"]
    return tensors | {f"optimizer/lr of group {n}": torch.as_tensor(group["lr"]) for n, group in enumerate(groups)}


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ, first {different[0]}"


def step_gradients(run: Path) -> list[Tensor]:
    """The summed gradient of every step, out of the momentum of each checkpoint: g = v - momentum * previous v."""
    gradients, previous = [], torch.zeros(())
    for checkpoint in list_checkpoints(run / "checkpoints"):
        states = load_checkpoint(checkpoint.path)["optimizer"]["state"]
        momentum_N = torch.cat([states[i]["momentum_buffer"].flatten() for i in sorted(states)])
        gradients.append(momentum_N - MOMENTUM * previous)
        previous = momentum_N
    return gradients


def gradient_distance(
    ours: list[Tensor], theirs: list[Tensor], *, choose: Callable[[list[float]], float] = statistics.median
) -> float:
    """Distance of two runs' gradients as a share of their length: the median over steps.

    The median, because at some steps rounding decides a tie in a max-pool and moves one element's gradient.
    """
    return choose([float((one - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True)])


def statistics_distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Distance of all batch-norm statistics as a share of their length."""
    names = sorted(name for name in theirs if "running_" in name)
    one, other = (torch.cat([state[name].flatten() for name in names]) for state in (ours, theirs))
    return float((one - other).norm() / other.norm())
