"""What runs in a rank of a trial: `bigbatch train`, struck by a fault at a known step and phase.

The fault is put around functions of the training from outside, so that nothing of it is in the code that users run.
All of this happens in processes forked from one that has imported torch already: a rank is there in a moment.
"""

import ctypes
import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

from bigbatch.comm.rendezvous.environ import without_identity
from bigbatch.files import write_whole
from bigbatch.tools.emulate import namespaces
from faults.trial import KINDS, STEP, Trial

PRELOAD = (
    "faults.rank",
    "bigbatch.trainer.train",
    "bigbatch.comm.several_ranks",
    "bigbatch.comm.backends.tcp",
    "bigbatch.comm.algorithms.shared",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchvision",
    "PIL.JpegImagePlugin",
)
"""Imported once, before ranks are forked."""
PR_SET_PDEATHSIG = 1
MS_RDONLY, MS_REMOUNT = 1, 32
FULL_DISK_BYTES = 20_000
"""No file may grow larger: less than a checkpoint, more than the texts of a run."""
SLOWDOWN = 10
STRUCK, STEPPING = "struck", "stepping"
"""Files in which a rank says when the fault struck it, and when it began its first step."""
PAUSE_SECONDS = 2.0
"""How long a paused rank or a cut link is away, or a write takes longer: less than the job's time limit."""
JUMP_SECONDS = -3600.0
BIT = 1 << 22
"""The highest of an fp32's mantissa: what it changes is large, and finite."""
GO = "go"
"""The file that lets a rank continue whose link the campaign has changed meanwhile."""


@dataclass(frozen=True)
class Place:
    """Node and environment of a process of a trial."""

    variables: dict[str, str]
    """Variables as torchrun sets them."""
    folder: Path
    """Folder of the job, for the rank's output and the files STRUCK, STEPPING and GO; inside the trial's."""
    keeper: int | None = None
    """Keeper of the emulated cluster, if there is one."""
    node: int = 0

    @property
    def rank(self) -> int:
        """Return the rank."""
        return int(self.variables["RANK"])


def live(place: Place, command: tuple[str, ...], trial: Trial | None, born: Connection) -> NoReturn:
    """Become a rank that runs a bigbatch command, disturbed by the trial if there is one; born gets its process id."""
    _die_with_parent()
    if place.keeper is not None:
        namespaces.enter_cluster(place.keeper)
        if child := os.fork():
            born.send(child)
            _end_as(os.waitpid(child, 0)[1])
        _die_with_parent()
        namespaces.enter_node(place.keeper, place.node)
    else:
        born.send(os.getpid())
    if trial is not None and trial.kind == "read-only" and trial.rank == place.rank:
        if os.geteuid() != 0:
            namespaces.become_root()
        namespaces.unshare(namespaces.NEWNS)  # others see none of its mounts
        namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SLAVE)
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(place.folder / f"{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    variables = without_identity() | place.variables
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    sys.argv = ["bigbatch", *command]
    from bigbatch.cli import main

    _watch(trial, place)
    code = main(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Leave nothing behind where the campaign itself is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL)  # the number of the signal is of no interest
    os._exit(code)


class Fault:
    """Strikes its rank once, the first time that it is in the phase at the step or later."""

    def __init__(self, trial: Trial | None, place: Place) -> None:
        self.trial = trial if trial is not None and place.rank == trial.rank else None
        self.place, self.is_first = place, place.rank == 0
        self.step = 0
        """The one under way, or done last; counted from 1."""
        self.extra_seconds = 0.0
        self.parts: Any = None
        """Parts of the training, from its first step on."""
        self.wrong_gradients = 0
        """How many more calls of backward begin with a gradient that has a flipped bit."""

    def reach(self, phase: str) -> None:
        """Say that the rank is in the phase; where it is the trial's, this may not return."""
        trial = self.trial
        if trial is not None and phase == trial.phase and self.step >= trial.step:
            self.trial = None
            done = self.step - 1 if phase in STEP else self.step
            _mark(self.place.folder / STRUCK, f"{time.monotonic()} {done}")
            _strike(trial, self)

    def before(self, owner: Any, name: str, phase: str) -> None:
        """Reach the phase each time before a function is called."""
        function = getattr(owner, name)

        def at_phase(*arguments: Any, **options: Any) -> Any:
            self.reach(phase)
            return function(*arguments, **options)

        setattr(owner, name, at_phase)


def _mark(path: Path, text: str) -> None:
    write_whole(path, text.encode())


def _strike(trial: Trial, fault: Fault) -> None:
    """Do what the kind says."""
    own = {"kill": signal.SIGKILL, "truncated": signal.SIGKILL, "flipped": signal.SIGKILL}
    own |= {"stop": signal.SIGSTOP, "pause": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
    if trial.kind in own:
        os.kill(os.getpid(), own[trial.kind])
    elif trial.kind in ("store killed", "store stopped"):
        (store,) = (each for each in psutil.Process().children() if "store_process" in " ".join(each.cmdline()))
        (store.kill if trial.kind == "store killed" else store.suspend)()
    elif trial.kind == "segfault":
        ctypes.string_at(0)
    elif trial.kind == "memory":
        raise MemoryError("injected by a trial of faults")
    elif trial.kind == "exception":
        # of a kind that no handler catches: torch.save reports a full disk by RuntimeError
        raise ArithmeticError("injected by a trial of faults")
    elif trial.kind == "gil":
        ctypes.PyDLL(None).sleep(3600)
    elif trial.kind == "slow":
        fault.extra_seconds = SLOWDOWN - 1
    elif trial.kind == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
    elif trial.kind == "read-only":
        _make_read_only(fault.place.folder.parent / "run")
    elif trial.kind == "slow storage":
        time.sleep(PAUSE_SECONDS)
    elif KINDS[trial.kind].is_audited:
        fault.wrong_gradients = 1 if trial.kind == "local bit" else sys.maxsize
    elif trial.kind.endswith(" bit"):
        _flip_bit(fault.parts, trial.kind)
    elif trial.kind == "clock":
        _jump()
    elif trial.kind == "deleted":
        (fault.place.folder.parent / "data" / "train").rename(fault.place.folder.parent / "deleted")
    else:
        assert KINDS[trial.kind].needs_nodes
        while not (fault.place.folder / GO).exists():
            time.sleep(0.005)


def _make_read_only(folder: Path) -> None:
    """Let this process find nothing but a read-only mount where the folder was; others see it as ever."""
    namespaces.mount(str(folder), str(folder), flags=namespaces.MS_BIND)
    namespaces.mount("", str(folder), flags=MS_REMOUNT | namespaces.MS_BIND | MS_RDONLY)


def _flip_bit(parts: Any, kind: str) -> None:
    """Flip a bit of the last weight, which a classifier ends with, of its gradient, or of its momentum."""
    import torch

    weight = list(parts.precision.masters.values())[-1]
    flipped = {
        "weight bit": lambda: weight,
        "gradient bit": lambda: weight.grad,
        "state bit": lambda: next(v for v in parts.optimizer.state[weight].values() if v.shape == weight.shape),
    }[kind]()
    flipped.data.view(torch.int32)[0] ^= BIT


def _jump() -> None:
    """Let this process read another time of day. What measures how long something takes reads another clock."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + JUMP_SECONDS
    time.time_ns = lambda: nanoseconds() + int(JUMP_SECONDS * 1e9)


def _watch(trial: Trial | None, place: Place) -> None:
    """Put the fault around the training's functions."""
    import torch
    import torch.nn.functional as F

    from bigbatch.comm.connection import Connection
    from bigbatch.comm.rendezvous.job_control import JobControl
    from bigbatch.trainer.checkpoint.saving import CheckpointSaver
    from bigbatch.trainer.inference import accuracy
    from bigbatch.trainer.report import plot
    from bigbatch.trainer.step.loop import Steps, TrainStep

    # nodes share the machine's cores: threads that wait for each other would outweigh a tiny model
    os.sched_getaffinity = lambda _: {0}
    # a plot takes longer than all steps
    plot.plot_run = lambda *arguments, **options: None
    fault = Fault(trial, place)
    fault.reach("start")
    fault.before(JobControl, "gather_text", "meeting")
    fault.before(Steps, "report", "report")
    fault.before(accuracy, "predict", "evaluation")
    fault.before(Connection, "close", "close")
    if not fault.is_first:
        fault.before(CheckpointSaver, "start", "checkpoint")
    torch.save = _around_saving(fault, torch.save)
    F.cross_entropy = _around_backward(fault, F.cross_entropy)
    TrainStep.__call__ = _around_step(fault, TrainStep.__call__)  # type: ignore[method-assign]


def _around_saving(fault: Fault, save: Callable[..., None]) -> Callable[..., None]:
    """Strike the rank that writes, beside its steps, when the bytes are written, and their file has no name yet."""

    def saving(*arguments: Any, **options: Any) -> None:
        if fault.trial is not None and fault.trial.kind in ("full disk", "read-only", "slow storage"):
            fault.reach("checkpoint")
        save(*arguments, **options)
        fault.reach("checkpoint")

    return saving


def _around_backward(fault: Fault, cross_entropy: Callable[..., Any]) -> Callable[..., Any]:
    """Strike behind the forward, and within the backward."""
    import torch

    def backward_begins(gradient: Any) -> Any:
        fault.reach("backward")
        if not fault.wrong_gradients:
            return gradient
        fault.wrong_gradients -= 1
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[0] ^= BIT
        return flipped

    def loss_of(*arguments: Any, **options: Any) -> Any:
        loss = cross_entropy(*arguments, **options)
        if loss.requires_grad:  # else it is an evaluation's
            fault.reach("forward")
            loss.register_hook(backward_begins)
        return loss

    return loss_of


def _around_step(fault: Fault, step: Callable[..., None]) -> Callable[..., None]:
    """Count steps, and slow them down where that is the fault."""
    begun: list[int] = []

    def stepping(train_step: Any, number: int, *arguments: Any) -> None:
        fault.step = number + 1
        if not begun:
            begun.append(number)
            fault.parts = train_step.parts
            fault.before(train_step.parts.reducer, "wait", "sum")
            fault.before(train_step.parts.precision, "update_", "update")
            if fault.is_first:
                _mark(fault.place.folder / STEPPING, f"{time.monotonic()} {number}")
        start = time.monotonic()
        step(train_step, number, *arguments)
        time.sleep(fault.extra_seconds * (time.monotonic() - start))

    return stepping


def write_data(root: Path) -> str:
    """Write the images of all trials."""
    from bigbatch.trainer.datasets.generated import write_dataset

    write_dataset(root, train_per_class=12, val_per_class=2, side_pixels=(32, 36))
    return ""


def digest_of(run: Path) -> str:
    """Return the SHA-256 of the newest checkpoint's step, weights and optimizer state."""
    import torch

    from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint

    state = load_checkpoint(list_checkpoints(run / "checkpoints")[-1].path)
    digest = hashlib.sha256(str(state["step"]).encode())

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(str((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            digest.update(str(value).encode())

    add([state["model"], state["optimizer"], state["precision"], state["average"]])
    return digest.hexdigest()


def source_commit() -> str:
    """Return the commit of the code that is tried; empty where there is none."""
    from bigbatch.comm.tuning import commit

    return commit.source_commit() or ""


def shared_memory_of(keeper: int, node: int) -> str:
    """Return the names in a node's /dev/shm."""
    namespaces.enter_cluster(keeper)
    namespaces.enter(f"/proc/{keeper}/fd/{namespaces.node_fd(node, 'mnt')}")
    return " ".join(sorted(os.listdir("/dev/shm")))


def answer(function: Callable[..., str], arguments: tuple[Any, ...], to: Connection) -> NoReturn:
    """Call one of the functions above in a separate process, and send its result."""
    _die_with_parent()
    to.send(function(*arguments))
    to.close()
    os._exit(0)


def damage(run: Path, *, kind: str) -> None:
    """Truncate the newest checkpoint's state, or flip a bit in its middle."""
    newest = max(run.glob("checkpoints/step-*/state.pt"))
    content = bytearray(newest.read_bytes())
    if kind == "truncated":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    write_whole(newest, bytes(content))


def put_back(folder: Path) -> None:
    """Bring back the images that were deleted."""
    deleted = folder / "deleted"
    if deleted.exists():
        shutil.move(deleted, folder / "data" / "train")
