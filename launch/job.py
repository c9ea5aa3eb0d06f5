"""What a launcher starts: a bigbatch command on some ranks of some hosts."""

import re
from dataclasses import dataclass

from bigbatch.trainer.errors import ConfigError


@dataclass(frozen=True)
class JobSpec:
    """A command for all ranks. hosts maps each host to its number of ranks; empty: all on this host."""

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[tuple[str, int], ...] = ()
    oversubscribe: bool = False
    """More ranks than cores on a host: ranks that wait give up their core."""


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """'n0:8,n1:8' -> (('n0', 8), ('n1', 8)); ':1' may be left out.

    Raises: ConfigError for anything else, so that no host name can be taken for an option.
    """
    hosts = []
    for part in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d+))?", part)
        if not match or match[2] == "0":
            raise ConfigError(f"--hosts {text!r}: {part!r} is not of the form HOST:RANKS, such as n0:8,n1:8")
        hosts.append((match[1], int(match[2] or 1)))
    return tuple(hosts)


def make_job(
    command: tuple[str, ...], *, num_ranks: int | None, hosts: tuple[tuple[str, int], ...], num_cores: int
) -> JobSpec:
    """Check the numbers. Raises: ConfigError."""
    slots = sum(count for _, count in hosts)
    total = num_ranks if num_ranks is not None else slots or 1
    if total < 1 or (hosts and total > slots):
        raise ConfigError(f"--ranks {total} is not between 1 and the {slots or 'available'} slots of --hosts")
    if not command:
        raise ConfigError("nothing to start: put a bigbatch command behind --, such as -- train --config quickstart")
    return JobSpec(command, total, hosts, oversubscribe=not hosts and total > num_cores)
