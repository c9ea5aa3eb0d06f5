"""Check and parse a job's words, so that no script, argument list or manifest can misread them."""

import math
import re
from collections.abc import Callable
from typing import Any

from bigbatch.comm.rendezvous.environ import STOPPED_VARIABLE, is_identity
from bigbatch.comm.rendezvous.launcher import expand_hostlist
from bigbatch.errors import LaunchError, LaunchOptionError, shortened

UNLIMITED = 2**32 - 1
"""Slurm's number of minutes for no time limit."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._+@-]*"

INTERFACE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}"
"""Name of a network interface; Linux allows 15 characters."""

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"

SPAN = "[0-9]+(?:-[0-9]+(?::[0-9]+)?)?"

LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
SUBDOMAIN = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
"""Name of a Kubernetes object: RFC 1123."""

QUALIFIED = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
KEY = rf"(?:{SUBDOMAIN}/)?{QUALIFIED}"
"""Key of a Kubernetes label, taint or resource."""

PATTERNS = {
    # field: (pattern, what to use); Slurm reads #SBATCH lines without a shell's quotes
    "name": (NAME, "letters, digits and . _ + @ -, such as resnet50-32k"),
    "partition": (f"{NAME}(?:,{NAME})*", "letters, digits and . _ + @ -, such as gpu"),
    "account": (NAME, "letters, digits and . _ + @ -, such as vision"),
    "qos": (NAME, "letters, digits and . _ + @ -, such as high"),
    "reservation": (f"{NAME}(?:,{NAME})*", "letters, digits and . _ + @ -, such as maintenance"),
    "constraint": (r"[A-Za-z0-9\[(][A-Za-z0-9._&|()*,:\[\]-]*", "names separated by & or |, such as 'a100&nvlink'"),
    "memory": (r"0|[1-9][0-9]*[KMGTkmgt]?", "a number and K, M, G or T, such as 200G"),
    "interface": (f"{INTERFACE}(?:,{INTERFACE})*", "names of interfaces separated by commas, such as eth0"),
    "gpu_type": (r"[A-Za-z0-9][A-Za-z0-9._-]*", "a type and a number, such as a100:8"),
    "mpi": (r"[a-z][a-z0-9_]*", "one that srun --mpi=list names, such as pmix"),
    "logs": (r"(?!-)[A-Za-z0-9._/+@=:-]+", "letters, digits and . _ / + @ = : -, such as logs"),
    "array": (rf"{SPAN}(?:,{SPAN})*(?:%[0-9]+)?", "numbers and ranges, such as 0-7"),
    "device": (r"cpu", "cpu, or leave it out to use GPUs"),
    "preflight": (r"off|warn|stop|exclude", "off, warn, stop or exclude"),
    "container": (r"pyxis|apptainer", "pyxis or apptainer"),
    "namespace": (LABEL, "a namespace of Kubernetes, such as vision"),
    "queue": (SUBDOMAIN, "the name of a LocalQueue, such as research"),
    "priority": (SUBDOMAIN, "the name of a PriorityClass, such as high"),
    "rdma": (f"{KEY}(?:=[1-9][0-9]{{0,3}})?", "a resource, and a number, such as rdma/hca_shared_devices_a"),
    "user": (r"[1-9][0-9]{0,9}(?::[1-9][0-9]{0,9})?", "UID or UID:GID, each at least 1, such as 1000:1000"),
    "image": (r"[A-Za-z0-9./][^\s\x00-\x1f]*", "a file or a name without blanks, such as bigbatch.sqsh"),
    # each value of these
    "modules": (r"[A-Za-z0-9][A-Za-z0-9._/+@-]*", "the name of a module, such as cuda/13.0"),
    "mounts": (
        r"[A-Za-z0-9./][^\s:,]*:/[^\s:,]*(?::[a-z+-]+)?",
        "SOURCE:TARGET without blanks, TARGET an absolute path, such as /data:/data",
    ),
    "node_selector": (f"{KEY}=(?:{QUALIFIED})?", "KEY=VALUE, such as gpu=h200"),
    "tolerations": (
        f"{KEY}(?:=(?:{QUALIFIED})?)?(?::(?:NoSchedule|PreferNoSchedule|NoExecute))?",
        "KEY[=VALUE][:EFFECT], such as nvidia.com/gpu:NoSchedule",
    ),
    "pull_secrets": (SUBDOMAIN, "the name of a Secret, such as registry"),
    "pod": (
        rf"host-network|annotation\.{KEY}=[^\x00-\x1f\x7f]{{0,4096}}|label\.{KEY}=(?:{QUALIFIED})?|spread={KEY}"
        f"|(?:service-account|runtime-class|scheduler)={SUBDOMAIN}",
        "host-network, annotation.NAME=VALUE, label.NAME=VALUE, service-account=NAME, spread=NODE_LABEL, "
        "runtime-class=NAME or scheduler=NAME",
    ),
}

MIN_VALUES = {
    "gpus_per_node": 0,
    "cpus_per_rank": 1,
    "minutes": 1,
    "stop_seconds": 0,
    "num_nodes": 1,
    "node_rank": 0,
    "restarts": 0,
}

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

OPTIONS = {
    "num_ranks": "--ranks",
    "num_nodes": "--nodes",
    "is_python": "--python",
    "minutes": "--time",
    "mounts": "--mount",
    "environment": "--env",
    "forwarded": "--env",
    "modules": "--module",
    "gpu_type": "--gpus-per-node",
    "tolerations": "--toleration",
    "pull_secrets": "--pull-secret",
}
"""Field -> option, if their names differ."""


def option(field: str) -> str:
    return OPTIONS.get(field, "--" + field.replace("_", "-"))


def check_field(field: str, value: Any) -> Any:
    """Return value, if JobSpec's field may have it. Raises: LaunchOptionError naming option, value and a legal one."""
    if value is None:
        return None
    if field in PATTERNS:
        pattern, use = PATTERNS[field]
        for word in value if isinstance(value, tuple) else (value,):
            if not re.fullmatch(pattern, word):
                raise LaunchOptionError(f"{option(field)} {word!r} is not valid. Use {use}")
    if field in MIN_VALUES and value < MIN_VALUES[field]:
        raise LaunchOptionError(f"{option(field)} {value} must be at least {MIN_VALUES[field]}")
    if field in CHECKS:
        CHECKS[field](value)
    return value


def _check_array(value: str) -> None:
    for part in value.partition("%")[0].split(","):
        limits, _, step = part.partition(":")
        first, _, last = limits.partition("-")
        if last and int(last) < int(first):
            raise LaunchOptionError(f"--array {value!r}: the range {part} holds no number; write {last}-{first}")
        if step and not int(step):
            raise LaunchOptionError(f"--array {value!r}: the range {part} never ends; state a step of at least 1")
    if re.search("%0+$", value):
        raise LaunchOptionError(f"--array {value!r} lets no job run: state at least %1, or leave it out")


def _check_exclude(value: str) -> None:
    try:
        hosts = expand_hostlist(value)
    except LaunchError as error:
        raise LaunchOptionError(f"--exclude {error}") from error
    for host in hosts:
        if not re.fullmatch(NAME, host, re.ASCII):
            raise LaunchOptionError(f"--exclude {shortened(value)}: {shortened(host)} is not a valid node name")


def _check_command(words: tuple[str, ...]) -> None:
    for word in words:
        _check_characters(word, what=f"{word!r} of the command")


def _check_environment(pairs: tuple[tuple[str, str], ...]) -> None:
    for name, value in pairs:
        if not re.fullmatch(VARIABLE, name, re.ASCII):
            raise LaunchOptionError(f"--env {name!r} must be of the form NAME=VALUE, such as NCCL_DEBUG=INFO")
        _refuse_rank_variable(name)
        _check_characters(value, what=f"the value of --env {name}")


def _check_forwarded(pairs: tuple[tuple[str, str | None], ...]) -> None:
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


def _check_sbatch(options: tuple[tuple[str, str | None], ...]) -> None:
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


def _check_pod(words: tuple[str, ...]) -> None:
    names = [word.partition("=")[0] for word in words]
    for name in names:
        if names.count(name) > 1:
            raise LaunchOptionError(f"--pod {name} is stated {names.count(name)} times: state it once")
        if name.startswith(("label.jobset.sigs.k8s.io/", "label.batch.kubernetes.io/")):
            raise LaunchOptionError(f"--pod {name}: Kubernetes sets this label itself: leave it out")


CHECKS: dict[str, Callable[[Any], None]] = {
    "array": _check_array,
    "exclude": _check_exclude,
    "command": _check_command,
    "environment": _check_environment,
    "forwarded": _check_forwarded,
    "pod": _check_pod,
    "sbatch": _check_sbatch,
}


def parse_sbatch(words: list[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse KEY=VALUE words, or KEY for an option without a value; _check_sbatch checks them."""
    split = (word.partition("=") for word in words)
    return tuple((key, value if equals else None) for key, equals, value in split)


def parse_environment(words: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, mark, value in (word.partition("=") for word in words) if mark)


def parse_forwarded(words: list[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse the other words of --env: NAME -> (NAME, None), NAME@SECRET -> (NAME, SECRET)."""
    split = (word.partition("@") for word in words if "=" not in word)
    return tuple((name, secret if mark else None) for name, mark, secret in split)


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
