"""Ranks forked from one process that has imported torch: a real rank's imports cost four times its tiny job.

Each is a process of its own, with torchrun's variables and with files for its output, and ends as it would end alone.
Tests in which the launcher matters start their jobs by the launcher.
"""

import gc
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOAD = (
    "tests.support.no_collection",
    "pytest",
    "bigbatch.trainer.train",
    "bigbatch.trainer.inference.evaluate",
    "torch._dynamo",
    "torchvision.models",
    "torch.utils.tensorboard",
    "nvidia.dali.plugin.pytorch",
    "bigbatch.comm.several_ranks",
    "bigbatch.comm.backends.tcp",
    "bigbatch.comm.algorithms.shared",
    "bigbatch.trainer.input.loaders.dali",
    "bigbatch.trainer.input.loaders.pillow",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "torch.utils.serialization.config",
)
"""Half of the work of a tiny job is to import these. A run's plot, which would be most of the rest, is not drawn.

Garbage collection, which the first turns off, would look at all of it again and again.
"""
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "MPI_LOCAL",
    "SLURM",
    "TORCHELASTIC",
    "GLOO_",
    "BIGBATCH_",
)
"""How the names of a launcher's variables begin."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOAD))


def clean_environ() -> dict[str, str]:
    """This process's variables without those of launchers, and without what breaks up the lines of ranks."""
    return {name: v for name, v in os.environ.items() if not name.startswith((*LAUNCHED, "PYTHONUNBUFFERED"))}


def start_scripts(argv: Sequence[str], *, num_ranks: int, cwd: Path | None = None) -> "list[subprocess.Popen[str]]":
    """Ranks of a script without a launcher, each an interpreter that ends as a user's does."""
    return [
        subprocess.Popen(
            [sys.executable, *argv],
            cwd=cwd,
            env=clean_environ() | place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place in places(num_ranks)
    ]


def free_port() -> int:
    """A free port: no process listens on it now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def places(num_ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun would give to each rank of a job on this host."""
    job = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
    job |= {"MASTER_PORT": free_port(), "BIGBATCH_SECRET": "of these tests"}
    return [{name: str(v) for name, v in {**job, "RANK": r, "LOCAL_RANK": r}.items()} for r in range(num_ranks)]


def start_rank(
    target: str,
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    has_children: bool = False,
) -> BaseProcess:
    """Fork a process that calls target, "module:function", with arguments; its result is the exit code.

    One that starts processes by multiprocessing has_children; the tests wait for its end then, so it must have one.
    """
    everything = (target, list(arguments), {**clean_environ(), **environ}, stdout, stderr)
    process = _context.Process(target=_live, args=everything, daemon=not has_children)  # none outlives the tests
    process.start()
    return process


def _live(target: str, arguments: list[str], environ: dict[str, str], stdout: Path, stderr: Path) -> None:
    gc.freeze()  # or its first whole collection looks at all modules, and copies their memory
    gc.enable()
    os.environ.clear()
    os.environ.update(environ)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):  # of the fork server, whose variables may be PYTHONUNBUFFERED
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    plot: Any = ModuleType("bigbatch.trainer.report.plot")  # in place of the module, which imports matplotlib
    plot.plot_run = lambda *arguments, **options: None
    sys.modules[plot.__name__] = plot
    sys.argv = [target, *arguments]
    module, _, name = target.partition(":")
    function: Callable[..., int] = getattr(import_module(module), name)
    try:
        code = function(*arguments)
    except SystemExit:
        raise
    except BaseException:  # pytest's own, too, where nothing was raised
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as bigbatch's own command ends a rank


def bigbatch(*command: str) -> int:
    """What `bigbatch` runs; a process alone is told of one core, as threads that wait for each other outweigh a tiny
    model.
    """
    from bigbatch.cli import main

    if "RANK" not in os.environ and hasattr(os, "sched_setaffinity"):
        os.sched_getaffinity = lambda _: {0}  # not bound to it: it may be busy
    return main(command)


def exit_codes(ranks: Sequence[BaseProcess], *, timeout_seconds: float) -> list[int] | None:
    """Minus the signal's number for a rank that was killed; None, and all killed, when time runs out."""
    deadline = time.monotonic() + timeout_seconds
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        return None if None in codes else [code for code in codes if code is not None]
    finally:
        for process in ranks:
            process.kill()
