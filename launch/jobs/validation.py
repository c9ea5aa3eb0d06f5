"""Check and parse a job's words, so that no script, argument list or manifest can misread them."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from bigbatch.comm.rendezvous.environ import STOPPED_VARIABLE, is_identity
from bigbatch.comm.rendezvous.launcher import expand_hostlist
from bigbatch.errors import LaunchError, LaunchOptionError, shortened
from bigbatch.files import TEXT_BYTES, read_plain

UNLIMITED = 2**32 - 1
"""Slurm's number of minutes for no time limit."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._+@-]*"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"

SUBDOMAIN = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
"""Name of a Kubernetes object: RFC 1123."""

SET_BY_SCRIPT = {
    "job-name": "use --name",
    "nodes": "use --nodes",
    "ntasks": "use --ranks",
    **dict.fromkeys(("ntasks-per-node", "ntasks-per-gpu"), "use --ranks-per-node"),
    "cpus-per-task": "use --cpus-per-rank",
    **dict.fromkeys(("gpus", "gpus-per-node"), "use --gpus-per-node, such as a100:8"),
    "mem": "use --memory",
    **dict.fromkeys(("time", "partition", "account", "qos", "reservation", "constraint", "exclude", "array"), ""),
    **dict.fromkeys(("output", "error"), "use --logs"),
    "signal": "use --stop-seconds",
    **dict.fromkeys(("requeue", "no-requeue"), "use --stop-seconds 0 for a job that ends at its limit"),
    **dict.fromkeys(("export", "export-file"), "use --env for more variables"),
    "wait": "use --wait",
    "chdir": "submit from that folder",
    "test-only": "use --dry-run",
    **dict.fromkeys(("open-mode", "parsable", "wrap", "input", "help", "usage", "version"), "leave it out"),
}
"""sbatch options that our scripts set -> what to do instead; empty: use our option of the same name."""

SBATCH_VALUE = r"[A-Za-z0-9][A-Za-z0-9._/+@=:,%()\[\]|&*!?~^-]*"
"""No blanks, quotes, # or \\: Slurm reads an #SBATCH line without a shell, with its own quotes."""


def check_array(value: str) -> None:
    for part in value.partition("%")[0].split(","):
        limits, _, step = part.partition(":")
        first, _, last = limits.partition("-")
        if last and int(last) < int(first):
            raise LaunchOptionError(f"--array {value!r}: the range {part} holds no number; write {last}-{first}")
        if step and not int(step):
            raise LaunchOptionError(f"--array {value!r}: the range {part} never ends; state a step of at least 1")
    if re.search("%0+$", value):
        raise LaunchOptionError(f"--array {value!r} lets no job run: state at least %1, or leave it out")


def check_exclude(value: str) -> None:
    try:
        hosts = expand_hostlist(value)
    except LaunchError as error:
        raise LaunchOptionError(f"--exclude {error}") from error
    for host in hosts:
        if not re.fullmatch(NAME, host, re.ASCII):
            raise LaunchOptionError(f"--exclude {shortened(value)}: {shortened(host)} is not a valid node name")


def check_command_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a job's command. Raises: LaunchOptionError if no script could pass one on."""
    for word in words:
        _check_characters(word, what=f"{word!r} of the command")
    return words


def check_environment(pairs: tuple[tuple[str, str], ...]) -> None:
    for name, value in pairs:
        if not re.fullmatch(VARIABLE, name, re.ASCII):
            raise LaunchOptionError(f"--env {name!r} must be of the form NAME=VALUE, such as NCCL_DEBUG=INFO")
        _refuse_rank_variable(name)
        _check_characters(value, what=f"the value of --env {name}")


def check_forwarded(pairs: tuple[tuple[str, str | None], ...]) -> None:
    for name, secret in pairs:
        if not re.fullmatch(VARIABLE, name, re.ASCII):
            raise LaunchOptionError(f"--env {name!r} must be of the form NAME=VALUE or NAME, such as NCCL_DEBUG=INFO")
        _refuse_rank_variable(name)
        if secret is not None and not re.fullmatch(SUBDOMAIN, secret, re.ASCII):
            raise LaunchOptionError(
                f"--env {name}@{secret}: {secret!r} is not a valid name of a Secret, such as {name}@bigbatch"
            )


def _refuse_rank_variable(name: str) -> None:
    """Refuse a variable that states a process's rank: with one value, each rank would train alone."""
    if is_identity(name) and name not in (STOPPED_VARIABLE, "MASTER_ADDR", "MASTER_PORT"):  # one value for all ranks
        raise LaunchOptionError(f"--env {name}: the launcher sets it, with another value on each rank: leave it out")


def _check_characters(text: str, *, what: str) -> None:
    if "\0" in text or "\r" in text:
        raise LaunchOptionError(f"{what} contains a NUL or carriage return, which no script can pass on: remove it")


def check_sbatch(options: tuple[tuple[str, str | None], ...]) -> None:
    """Raise LaunchOptionError if a key is no sbatch option, if our scripts set it, or if Slurm could misread its value.

    sbatch accepts abbreviated names, so abbreviations of our options are refused, too.
    """
    for key, value in options:
        if not re.fullmatch(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)*", key, re.ASCII):
            raise LaunchOptionError(
                f"--sbatch {key!r} must be the long name of an option of sbatch without its --, such as "
                "dependency=afterok:1234"
            )
        if ours := next((name for name in sorted(SET_BY_SCRIPT, key=len) if name.startswith(key)), None):
            whole = "" if ours == key else f", which sbatch reads as {ours}"
            raise LaunchOptionError(
                f"--sbatch {key}{whole}: bigbatch launch slurm sets it itself: {SET_BY_SCRIPT[ours] or f'use --{ours}'}"
            )
        if value is not None and not re.fullmatch(SBATCH_VALUE, value, re.ASCII):
            raise LaunchOptionError(
                f"--sbatch {key}={value!r} must begin with a letter or digit and hold no blank, quote, #, $, ; or \\, "
                "such as dependency=afterok:1234"
            )


def check_pod(words: tuple[str, ...]) -> None:
    names = [word.partition("=")[0] for word in words]
    for name in names:
        if names.count(name) > 1:
            raise LaunchOptionError(f"--pod {name} is stated {names.count(name)} times: state it once")
        if name.startswith(("label.jobset.sigs.k8s.io/", "label.batch.kubernetes.io/")):
            raise LaunchOptionError(f"--pod {name}: Kubernetes sets this label itself: leave it out")


def parse_sbatch(words: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse KEY=VALUE words, or KEY for an option without a value; check_sbatch checks them."""
    split = (word.partition("=") for word in words)
    return tuple((key, value if equals else None) for key, equals, value in split)


def parse_environment(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, mark, value in (word.partition("=") for word in words) if mark)


def parse_forwarded(words: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse the other words of --env: NAME -> (NAME, None), NAME@SECRET -> (NAME, SECRET)."""
    split = (word.partition("@") for word in words if "=" not in word)
    return tuple((name, secret if mark else None) for name, mark, secret in split)


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Read 'n0:8,n1:8' -> (('n0', 8), ('n1', 8)); ':1' may be left out.

    Raises: LaunchOptionError for anything else, so that no host name can be taken for an option.
    """
    hosts = []
    for part in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d{1,9}))?", part, re.ASCII)
        if not match or (match[2] and int(match[2]) == 0):
            raise LaunchOptionError(f"--hosts {text!r}: {part!r} is not of the form HOST:RANKS, such as n0:8,n1:8")
        hosts.append((match[1], int(match[2] or 1)))
    return tuple(hosts)


def parse_master(text: str) -> tuple[str, int]:
    """Read 'n0:29500' -> ('n0', 29500), and '[::1]:29500' -> ('::1', 29500). Raises: LaunchOptionError."""
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):(\d{1,5})", text, re.ASCII)
    if not match or not 0 < int(match[2]) < 65536:
        raise LaunchOptionError(f"--master {text!r} is not of the form HOST:PORT, such as n0:29500")
    return match[1].strip("[]"), int(match[2])


def read_hostfile(path: Path) -> tuple[tuple[str, int], ...]:
    """Read lines 'n0 slots=8' (Open MPI, whose max_slots is left out; Kubernetes' operator), 'n0:8' or 'n0'.

    Raises: LaunchOptionError naming the file and the line.
    """
    try:
        if path.is_fifo() and path.is_symlink():  # <(COMMAND), a link in /dev/fd, whose end comes
            with path.open("rb") as pipe:
                text = pipe.read(TEXT_BYTES)
        else:
            text = read_plain(path, most=TEXT_BYTES)
        lines = [line.partition("#")[0].strip() for line in text.decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchOptionError(f"--hostfile {str(path)!r} cannot be read: {reason}") from error
    hosts: list[tuple[str, int]] = []
    for number, line in enumerate(lines, start=1):
        word = re.sub(r"\s+slots\s*=\s*", ":", re.sub(r"\s+max[-_]slots\s*=\s*\d+", "", line))
        try:
            hosts += parse_hosts(word) if word else ()
        except LaunchOptionError as error:
            raise LaunchOptionError(
                f"--hostfile {str(path)!r}, line {number}: {line!r} is not of the form HOST slots=RANKS: n0 slots=8"
            ) from error
    if not hosts:
        raise LaunchOptionError(f"--hostfile {str(path)!r} names no host; write lines such as: n0 slots=8")
    return tuple(hosts)


def parse_gpus(text: str) -> tuple[str | None, int]:
    """Read '8' -> (None, 8), 'a100:8' -> ('a100', 8). Raises: LaunchOptionError."""
    kind, _, number = text.rpartition(":")
    if not re.fullmatch(r"\d{1,9}", number, re.ASCII) or text.startswith(":"):
        raise LaunchOptionError(
            f"--gpus-per-node {text!r} must be a number, or a type and a number, such as 8 or a100:8"
        )
    return kind or None, int(number)


def parse_minutes(text: str, *, option: str = "--time") -> int:
    """Read Slurm's forms of a time: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; seconds round up to a minute.

    UNLIMITED and INFINITE, in letters of any case, are UNLIMITED. Raises: LaunchOptionError.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return UNLIMITED
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not match:
        raise LaunchOptionError(f"{option} {text!r} must be minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED, such as 2:00:00")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    total = int(days or 0) * 1440 + hours * 60 + minutes + math.ceil(seconds / 60)
    if not total:
        raise LaunchOptionError(f"{option} {text!r} is not a time; leave it out for the limit of the partition")
    return total


def format_minutes(minutes: int) -> str:
    """Return Slurm's form D-HH:MM:SS, or HH:MM:SS below one day."""
    if minutes == UNLIMITED:
        return "UNLIMITED"
    days, rest = divmod(minutes, 1440)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock
