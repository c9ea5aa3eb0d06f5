"""What queue systems have in common: a job is a script that a person may keep and edit, handed to a program."""

import argparse
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import IO

from bigbatch.comm.rendezvous.environ import IDENTITY_VARIABLES
from bigbatch.errors import JobRefused, SchedulerError, print_line
from bigbatch.files import is_stream, replacing_named
from bigbatch.launch.jobs.foreground import one_line
from bigbatch.paths import as_path
from bigbatch.trainer.run.folder import writing

FOREIGN_VARIABLES = fill(
    " ".join(re.sub(r"(\w+)\*", r"${!\1@}", name) for name in IDENTITY_VARIABLES), width=110, break_on_hyphens=False
).replace("\n", " \\\n  ")
"""Of the shell that submits: they describe another job. For bash, which finds all that begin with a prefix."""


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """Add what becomes of the script, and whether the end of the job is waited for."""
    parser.add_argument("--output", type=as_path, metavar="FILE", help="write the script there; do not submit it")
    parser.add_argument("--force", action="store_true", help="--output: write over a file that was edited")
    parser.add_argument("--wait", action="store_true", help="until the job has ended, with its exit code")


def write_script(path: Path, script: str, *, force: bool) -> None:
    """Write the script, which nobody else can read. Raises: JobRefused where another one is there; RunFolderError."""
    data = script.encode("utf-8", "surrogateescape")
    with writing(path):
        if not force and path.exists() and path.read_bytes() != data:
            raise JobRefused(
                [
                    f"--output {path}: it is there, and not what these options make, as after you have edited it: name "
                    "another file, or add --force to write over it"
                ]
            )
        with replacing_named(path) as file:
            if not is_stream(path):
                os.fchmod(file.fileno(), 0o600)  # it may hold values of --env
            file.write(data)


def hand_over(
    argv: Sequence[str], script: str, *, environ: Mapping[str, str] | None, number: str, hint: str, wait: bool
) -> tuple[str, subprocess.Popen[bytes]]:
    """Hand a script to a program that prints the job's number; return it, and the program, which may go on waiting.

    number: the pattern of its line, whose first group is returned. What else the program says is shown on stderr, or
    told by the error, with the hint what to look at. wait: the program ends as the job does.
    Raises: SchedulerError where the program refuses the job, or is not there.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
    except FileNotFoundError as error:
        raise not_installed(argv[0]) from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # it has ended before it read all, and says why
        stdin.write(script.encode(errors="surrogateescape"))
    said: list[str] = []  # by a site's wrapper around it
    # line by line: one that waits writes the number and goes on until the job ends
    for line in process.stdout:
        text = line.decode(errors="replace")
        if found := re.fullmatch(number, text.rstrip("\n"), re.ASCII):
            for each in said:
                say(each)
            reader = threading.Thread(target=_pass_on, args=(process.stderr,), name=f"bigbatch-{argv[0]}")
            reader.start()
            if not wait:  # it has ended
                reader.join()
            return found[1], process
        said.append(text)
    words = one_line("".join(said) + process.stderr.read().decode(errors="replace"))
    process.wait()
    raise SchedulerError(f"{argv[0]} refused the job: {words}; {hint}")


def say(text: str) -> None:
    """Show a line of somebody else's on stderr."""
    print_line(text.rstrip(), file=sys.stderr)


def not_installed(program: str) -> SchedulerError:
    """Make the error of a host without the queue system's programs."""
    return SchedulerError(
        f"{program} is not installed here: do this on a login node of the cluster; --dry-run prints the script anywhere"
    )


def _pass_on(errors: IO[bytes]) -> None:
    """Show what the program warns of, as it comes."""
    for line in errors:
        say(line.decode(errors="replace"))
