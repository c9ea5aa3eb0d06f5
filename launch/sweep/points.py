"""The points of a sweep: every combination of its values, each a complete experiment. Pure but for reading configs."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError, LaunchOptionError
from bigbatch.launch.jobs.spec import parse_hosts, read_hostfile
from bigbatch.launch.sweep.plan import Sweep
from bigbatch.paths import as_path
from bigbatch.trainer.config.batch import accumulation_steps, largest_divisor
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.strict_yaml import as_yaml

SPECIAL = ("ranks", "scaling")
"""Keys of a grid that no experiment has."""


@dataclass(frozen=True)
class Point:
    """A point is one run of a sweep."""

    number: int
    values: dict[str, Any]
    """Of the grid."""
    repeat: int
    ranks: int
    ranks_per_node: int
    nodes: int
    config: Config
    of_machine: tuple[str, ...] = ()
    """Keys whose values this machine gave: a sweep goes on with those that it was begun with."""

    def describe(self) -> str:
        """Write its values in one line."""
        return describe_values(self.values) + (f", repeat {self.repeat}" if self.repeat else "")


def describe_values(values: dict[str, Any]) -> str:
    """Write them in one line, as an experiment states them."""
    return ", ".join(f"{key}={as_yaml(value)}" for key, value in values.items())


def make_points(sweep: Sweep, *, folder: Path) -> list[Point]:
    """Make all points, in the order of the grid, repeats last; their run folders lie in folder.

    In strong scaling the experiment's global batch is that of any number of ranks; in weak scaling each rank has one
    of its microbatches. A microbatch or batch-norm span that does not fit a rank's share becomes the largest that does.
    Raises: LaunchOptionError with a line for each reason why points cannot be trained.
    """
    base = load_config(["--config", sweep.config], prog="bigbatch sweep")
    if sweep.steps is not None and sweep.options.get("data.loader", base.data.loader) != "synthetic":
        raise LaunchOptionError(
            f"steps: {sweep.steps} are of generated tensors: set data.loader: synthetic in options, or steps: null"
        )
    points: list[Point] = []
    wrong: dict[str, list[str]] = {}
    for number, (values, repeat) in enumerate(_combinations(sweep)):
        try:
            points.append(_make_point(sweep, base, number=number, values=values, repeat=repeat, folder=folder))
        except (ConfigError, LaunchOptionError) as error:
            wrong.setdefault("; ".join(map(str, error.args)), []).append(f"{number} ({describe_values(values)})")
    if wrong:
        num_wrong = sum(map(len, wrong.values()))
        lines = [f"  point {each[0]}{_and_more(len(each) - 1)}: {error}" for error, each in wrong.items()]
        raise LaunchOptionError(f"{num_wrong} of {len(points) + num_wrong} points cannot be trained:", *lines)
    return points


def _and_more(count: int) -> str:
    return f" and {count} more" if count else ""


def _combinations(sweep: Sweep) -> Iterator[tuple[dict[str, Any], int]]:
    for repeat in range(sweep.repeats):
        for values in itertools.product(*sweep.grid.values()):
            yield dict(zip(sweep.grid, values, strict=True)), repeat


def _make_point(sweep: Sweep, base: Config, *, number: int, values: dict[str, Any], repeat: int, folder: Path) -> Point:
    ranks = values["ranks"]
    per_node = min(ranks, sweep.ranks_per_node)
    if ranks % per_node:
        raise LaunchOptionError(
            f"{ranks} ranks do not fill nodes of {per_node}; take a multiple, or other ranks_per_node"
        )
    stated = {**sweep.options, **{key: value for key, value in values.items() if key not in SPECIAL}}
    for key in ("batch.microbatch_size", "batch.global_batch_size", "batch.bn_span", "run.seed"):
        least = 0 if key == "run.seed" else 1
        if key in stated and (type(stated[key]) is not int or stated[key] < least):
            raise LaunchOptionError(f"{key}={as_yaml(stated[key])} must be a whole number from {least} on")
    microbatch = stated.get("batch.microbatch_size", base.batch.microbatch_size)
    is_weak = values.get("scaling") == "weak"
    total = microbatch * ranks if is_weak else stated.get("batch.global_batch_size", base.batch.global_batch_size)
    span = stated.get("batch.bn_span", base.batch.bn_span)
    fitted = _fit(total, ranks=ranks, microbatch_size=microbatch, bn_span=span)
    own = {
        **fitted,
        "run.directory": str(folder / "points" / str(number) / "run"),
        "run.seed": stated.get("run.seed", base.run.seed) + repeat,
    }
    threads = {}
    if base.compute.cpu_threads is None and "compute.cpu_threads" not in stated:
        threads = _same_threads(sweep)
    if sweep.steps is not None:
        own |= {"run.epochs": 1, "data.num_synthetic_samples": sweep.steps * total}
    config = load_config(["--config", sweep.config, *_options({**stated, **own, **threads})], prog="bigbatch sweep")
    accumulation_steps(config.batch, world_size=ranks)
    nodes = count_nodes(sweep.where, sweep.launch, ranks=ranks, ranks_per_node=per_node)
    return Point(number, values, repeat, ranks, per_node, nodes, config, of_machine=tuple(threads))


def _same_threads(sweep: Sweep) -> dict[str, Any]:
    """Return the threads that a CPU gives each rank of the most crowded point: with more, fewer ranks seem faster.

    Of this host alone, as it alone is known; a GPU takes no notice.
    """
    if sweep.where != "local":
        return {}
    most = max(min(ranks, sweep.ranks_per_node) for ranks in sweep.grid["ranks"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"compute.cpu_threads": max(1, cores // most)}


def count_nodes(where: str, launch: dict[str, Any], *, ranks: int, ranks_per_node: int) -> int:
    """Count nodes on which so many ranks run: mpirun fills one host after the other. Raises: LaunchOptionError."""
    if where not in ("local", "mpirun"):
        return ranks // ranks_per_node
    hosts = parse_hosts(str(launch["hosts"])) if "hosts" in launch else ()
    hosts += read_hostfile(as_path(str(launch["hostfile"]))) if "hostfile" in launch else ()
    before = itertools.accumulate((slots for _, slots in hosts), initial=0)
    return len({host for (host, _), taken in zip(hosts, before, strict=False) if taken < ranks}) or 1


def _fit(total: int, *, ranks: int, microbatch_size: int, bn_span: int) -> dict[str, Any]:
    """Return batch, microbatch and batch-norm span of this many ranks. Raises: LaunchOptionError."""
    if total % ranks:
        raise LaunchOptionError(f"a batch of {total} is no whole number of pictures for each of {ranks} ranks")
    microbatch = largest_divisor(total // ranks, microbatch_size)
    span = bn_span if bn_span % microbatch_size == 0 and bn_span > microbatch_size else None
    return {
        "batch.global_batch_size": total,
        "batch.microbatch_size": microbatch,
        "batch.bn_span": span or largest_divisor(microbatch, bn_span),
    }


def _options(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={as_yaml(value)}" for key, value in values.items()]
