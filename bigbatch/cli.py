"""The one command: `bigbatch SUBCOMMAND`. Imports nothing heavy before it knows what to do."""

import errno
import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from bigbatch import __version__
from bigbatch.cores import bound_spinning
from bigbatch.errors import (
    CRASHED,
    DISK_FULL,
    FAILED,
    INTERRUPTED,
    PIPE_CLOSED,
    REFUSED,
    UserError,
    notes_of,
    or_nearest,
    print_traceback,
    printable,
    tell,
)
from bigbatch.groups import GROUPS, load_command
from bigbatch.parts import missing
from bigbatch.paths import work_folder

if TYPE_CHECKING:
    from bigbatch.comm.rendezvous.environ import ProcessEnv

Command = Callable[[Sequence[str]], int]
"""Takes the words behind the command's name, and returns the exit code."""
EXIT_SPACING_SECONDS = 0.3

HELP, VERSION = ("-h", "--help"), "--version"
NO_VALUE = re.compile("--[^=]+=--")
"""Matches words such as --name=--, on which argparse fails before Python 3.13."""

UNUSABLE_PATH = (errno.EACCES, errno.ENAMETOOLONG, errno.EFBIG)
"""Errors of tests whether a path exists, and of files above their size limit; main() reports the path."""

GROUP = "bigbatch.groups"
"""Module of the groups of commands: a group's name is the first word of its commands."""

COMMANDS = {
    "init": ("bigbatch.tools.init.command", "examine your own images and write a recipe for them"),
    "train": ("bigbatch.trainer.train", "train one experiment, alone or as one rank of a job"),
    "evaluate": (
        "bigbatch.trainer.inference.evaluate",
        "measure the accuracy of a checkpoint, or of other weights, on the validation images",
    ),
    "predict": (
        "bigbatch.trainer.inference.predict",
        "predict the classes of images, with a checkpoint or other weights",
    ),
    "export": (
        "bigbatch.trainer.inference.export",
        "write a run's weights for torchvision, timm, ONNX or torch.export",
    ),
    "verify": (
        "bigbatch.tools.mlperf.verify",
        "compare runs with MLPerf's rules and reference convergence; write MLPerf's log",
    ),
    "diff": ("bigbatch.tools.replay.diff", "find the first step, tensor and element in which two runs differ"),
    "replay": (
        "bigbatch.tools.replay.replay",
        "compute a step of a run again in one process; name the first rank, microbatch and tensor that differ",
    ),
    "config": (GROUP, "show an experiment with all values, compare two, list the packaged ones"),
    "tune": (GROUP, "find good values: learning rate, global batch, loss scale, or any keys by a search"),
    "launch": (
        "bigbatch.launch.start",
        "start a command on several ranks: Slurm, mpirun, torchrun, Kubernetes, emulated nodes",
    ),
    "preflight": (
        "bigbatch.tools.preflight.entry",
        "compare the nodes of a job before training; bigbatch launch preflight starts it",
    ),
    "sweep": (
        "bigbatch.experiments.sweep",
        "train the cases, values, seeds and numbers of ranks of a file, and compare them",
    ),
    "report": (
        "bigbatch.experiments.report.publish",
        "compare runs by any key; scaling efficiency and its causes; time and cost to an accuracy",
    ),
    "simulate": (
        "bigbatch.tools.simulate.command",
        "predict a recipe on a cluster: time, efficiency and its causes, cost",
    ),
    "explain": ("bigbatch.tools.explain.command", "name the ranks that made a job hang, from torch's flight recorder"),
    "comm": (GROUP, "time all-reduces by size, verify sums; choose algorithm and fusion plan for a cluster"),
    "doctor": (
        "bigbatch.tools.doctor.command",
        "find what limits a run on this machine, and measure each known speedup",
    ),
    "data": ("bigbatch.trainer.datasets.subcommands", "prepare, check and pack data sets; generate a small one"),
    "completion": ("bigbatch.completion", "print a script that completes commands and keys in bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the process's exit code: 0, or one of bigbatch.errors."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    bound_spinning()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A message may name a file that is not UTF-8; and Python -u would write a line in parts, with lines of
            # other ranks between them.
            stream.reconfigure(errors="backslashreplace", line_buffering=True, write_through=False)
    code = _flush_streams(_exit_code_of(arguments))
    _record_end(code)  # first: mpirun may end this rank while it waits for the others
    _end_connections(code)
    worker = _rank_of_job()
    # a thread that still waits for a dead file system: the interpreter's teardown would wait for it
    is_held = any(thread.name.startswith("bigbatch-") and not thread.daemon for thread in threading.enumerate())
    if worker is not None or is_held:
        sys.stdout.flush()
        sys.stderr.flush()
        if worker is not None and code and worker.launcher == "openmpi":
            # one after the other: mpirun may crash or hang if several exit at once (docs/decisions/039)
            time.sleep(worker.rank % 10 * EXIT_SPACING_SECONDS)
        # Skip the interpreter's teardown, in which background threads of gloo, MPI or DALI may abort: a good run must
        # exit with 0, and a failed rank must not wait for its peers or for a dead file system. All files are closed.
        os._exit(code)
    return code


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed (>&-, a daemon) on /dev/null; else files would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _flush_streams(code: int) -> int:
    """Flush stdout and stderr; return code, or, if it is 0 and stdout cannot be written, that error's code.

    Unwritable output is dropped: the interpreter would try again when it ends, and exit with another code.
    """
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            if number == 1 and not code:
                code = _report_error(error)
    return code


def _exit_code_of(arguments: list[str]) -> int:
    """Run the command line; return the exit code, also after an exception."""
    try:
        command = _find_command(arguments)
        return command if isinstance(command, int) else command(arguments[1:])
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich has noticed the closed pipe
            return PIPE_CLOSED
        if not ended.code:  # argparse has printed its help, and ignores a broken pipe
            if _is_pipe_closed():
                return PIPE_CLOSED
            _record_end(0)
        raise
    except (KeyboardInterrupt, Exception) as error:
        return _report_error(error)


def _is_pipe_closed() -> bool:
    """Return whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _find_command(arguments: list[str]) -> Command | int:
    """Return the main function of a subcommand; else print help, version or a refusal, and return the exit code."""
    if not arguments or arguments[0] in HELP:
        print(usage())
        return 0 if arguments else REFUSED
    if arguments[0] == VERSION:
        print(f"bigbatch {__version__}")
        return 0
    if unknown := find_unknown(arguments[:2]):
        tell(unknown)
        return REFUSED
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the job's own command follows it
    if valueless := next((word for word in own if NO_VALUE.fullmatch(word)), None):
        tell(f"{valueless}: -- is not a value: give another, or leave the option out")
        return REFUSED
    work_folder()  # torch's libraries do not load in a folder that was deleted
    name = arguments[0]
    if name in GROUPS:
        return GROUPS[name].main
    command: Command = load_command(COMMANDS[name][0]).main
    return command


def _record_end(code: int) -> None:
    """Record the first rank's exit code for `bigbatch launch mpirun`."""
    environ = import_module("bigbatch.comm.rendezvous.environ")
    with suppress(UserError):
        import_module("bigbatch.comm.rendezvous.exit_record").record_end(environ.read_process_env(), code)


def find_unknown(command: Sequence[str]) -> str | None:
    """Return a message on the first unknown word of a command, with the nearest known one; None if all are known."""
    name, *rest = command
    known: Collection[str] = (*COMMANDS, *HELP, VERSION)
    if name in GROUPS and rest and not rest[0].startswith("-"):
        name, known = rest[0], GROUPS[name].commands
    if name in known:
        return None
    choice = [each for each in known if not each.startswith("-")]
    return f"{name} is not a subcommand{or_nearest(name, choice)}; choose one of {', '.join(choice)}"


def usage() -> str:
    lines = [f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        (
            f"bigbatch {__version__}: train ImageNet with very large batches on clusters of GPUs",
            "",
            "usage: bigbatch SUBCOMMAND [OPTION ...]      (more: bigbatch SUBCOMMAND --help)",
            "",
            *lines,
            "",
            "first run:",
            "  bigbatch data generate data/shapes",
            "  bigbatch launch mpirun --ranks 2 -- train --config quickstart",
        )
    )


def _report_error(error: BaseException) -> int:
    """Print the exception, in one line if the user can fix it, else with a traceback; return the exit code."""
    if isinstance(error, KeyboardInterrupt):  # a Ctrl-C may come while torch is imported
        tell("interrupted", *notes_of(error))
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) or isinstance(error.__cause__, BrokenPipeError):
        return PIPE_CLOSED
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("bigbatch."):
        error = missing(str(error.name))
    if isinstance(error, UserError):
        tell(*error.args, *notes_of(error))
        return error.exit_code
    if isinstance(error, OSError) and error.errno in UNUSABLE_PATH and error.filename:
        path = printable(os.fsdecode(error.filename))
        tell(f"{path}: cannot be used ({error.strerror}); name another path, or check its permissions")
        return FAILED
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where = printable(os.fsdecode(error.filename)) if error.filename else "a file, or the output,"
        tell(f"{where} cannot be written ({error.strerror}): free some disk")
        return FAILED
    print_traceback(error)  # and return: main() still has to leave the job as a rank must
    return CRASHED


def _end_connections(code: int) -> None:
    """End MPI after success; else tell the connected ranks that this one fails, so that none waits until its limit."""
    if connections := sys.modules.get("bigbatch.comm.connection"):
        connections.abort_all(code) if code else connections.end_mpi()


def _rank_of_job() -> "ProcessEnv | None":
    """Return this process's place in a job of several ranks, if it has read the environment to join one."""
    environ = sys.modules.get("bigbatch.comm.rendezvous.environ")
    if environ is None:
        return None
    try:
        env: ProcessEnv = environ.read_process_env()
    except UserError:  # the launcher's variables are invalid, and the user was told so
        return None
    return env if env.world_size > 1 else None
