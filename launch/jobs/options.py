"""Read options of a command line or a file, and make the JobSpec from them."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.fields import GROUPS, Option
from bigbatch.launch.jobs.findings import Problems
from bigbatch.launch.jobs.spec import JOB_OPTIONS, OPTIONS, JobSpec
from bigbatch.launch.jobs.validation import check_command_words
from bigbatch.words import count

PYTHON_HELP = "COMMAND is a Python script, or -m and a module, with its arguments"

DERIVED = ("num_ranks", "hosts", "num_nodes")
"""Fields of JobSpec that make_job derives from several options."""

MAX_RANKS = 10**6
"""Limit of ranks: more than any cluster has; without it a typing error could fill this host's memory."""


def job_options() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parent.add_argument("--dry-run", action="store_true", help="print exactly what would run instead of running it")
    for title in GROUPS:
        add_options(parent.add_argument_group(title), [each for each in JOB_OPTIONS if each.group == title])
    return parent


def add_options(parser: "argparse._ActionsContainer", options: Iterable[Option]) -> None:
    for each in options:
        parser.add_argument(
            each.flag,
            action="append" if each.repeats else "store",
            type=each.kind,
            choices=each.choices,
            default=[] if each.repeats else each.default,
            metavar=each.metavar,
            help=each.help,
        )


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Write {'gpus_per_node': 8, 'env': ['a', 'b']} -> --gpus-per-node=8 --env=a --env=b; true has no value."""
    words = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            words.append(flag if each is True else f"{flag}={each}")
    return words


def read_options(stated: Mapping[str, Any], options: Iterable[Option]) -> argparse.Namespace:
    """Parse values by option as if they stood on a command line; a list as repeated options.

    Raises: LaunchOptionError with argparse's message for an illegal value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser, options)
    try:
        return parser.parse_args(
            option_words({each.name: stated[each.name] for each in options if each.name in stated})
        )
    except argparse.ArgumentError as error:
        raise LaunchOptionError(str(error)) from error


def read_job(
    arguments: argparse.Namespace,
    command: Sequence[str],
    *,
    findings: Problems,
    default_ranks: int = 1,
    is_python: bool = False,
) -> JobSpec:
    """Return the job that the options of a command line or a file state.

    Errors go into findings and their values are left out, so that other checks can still run. The job has 0 ranks if
    the stated numbers contradict each other.
    """
    import psutil  # late: it takes long to import

    fields: dict[str, Any] = {"is_python": is_python}
    for field, option in OPTIONS.items():
        if option.group and field not in DERIVED:
            value = findings.attempt(option.read, getattr(arguments, option.name))
            if value is not None:
                fields[field] = value
    if arguments.array is not None:
        fields.setdefault("array", "0")  # in place of a refused one, for {index} in the command
    words = findings.attempt(check_command_words, tuple(command)) or ()
    hosts: tuple[tuple[str, int], ...] = ()
    for option in (OPTIONS["hosts"], *OPTIONS["hosts"].also):
        hosts += findings.attempt(option.read, getattr(arguments, option.name)) or ()
    job = findings.attempt(
        make_job,
        words,
        num_ranks=arguments.ranks,
        hosts=hosts,
        num_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,  # mpirun counts no hyperthreads
        num_nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        default_ranks=default_ranks,
        **fields,
    )
    return job or JobSpec(words, 0, **fields)


def make_job(
    command: tuple[str, ...],
    *,
    num_ranks: int | None,
    hosts: tuple[tuple[str, int], ...],
    num_cores: int,
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
    default_ranks: int = 1,
    **others: Any,
) -> JobSpec:
    """Return the JobSpec. Derives the number of ranks from hosts, nodes or GPUs; refuses combinations that contradict.

    default_ranks: ranks of a node if none are stated. others: further fields. Raises: LaunchOptionError.
    """
    if not command:
        raise LaunchOptionError(
            "nothing to start: put a bigbatch command after --, such as -- train --config quickstart"
        )
    if hosts and (num_nodes is not None or ranks_per_node is not None):
        raise LaunchOptionError("--hosts already states nodes and ranks: leave out --nodes and --ranks-per-node")
    for name, value in (("--nodes", num_nodes), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise LaunchOptionError(f"{name} {value} must be at least 1")
    slots = sum(count for _, count in hosts)
    nodes = num_nodes or 1
    given = others.get("gpus_per_node") if ranks_per_node is None else ranks_per_node
    total = num_ranks if num_ranks is not None else slots or nodes * (given or default_ranks)
    if total < 1:
        raise LaunchOptionError(f"--ranks {total} must be at least 1")
    if hosts and total > slots:
        raise LaunchOptionError(f"--ranks {total} is not between 1 and the {count(slots, 'slot')} of --hosts")
    if total > MAX_RANKS:
        of_nodes = "" if num_nodes is None else f" of --nodes {num_nodes}"
        raise LaunchOptionError(f"{total} ranks{of_nodes} are more than any job has: state {MAX_RANKS} or fewer")
    if total % nodes or (ranks_per_node is not None and total != nodes * ranks_per_node):
        raise LaunchOptionError(f"--ranks {total} does not fill --nodes {nodes} evenly: state --ranks-per-node instead")
    is_shared = not hosts and num_nodes is None and total > num_cores
    return JobSpec(command, total, hosts, oversubscribe=is_shared, num_nodes=num_nodes, **others)
