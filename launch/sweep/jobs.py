"""The command that runs one point, and the arrays that run many under Slurm."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from bigbatch.launch.jobs.spec import INDEX
from bigbatch.launch.sweep.folder import SweepFolder
from bigbatch.launch.sweep.plan import Sweep
from bigbatch.launch.sweep.points import Point

BIGBATCH = (sys.executable, "-m", "bigbatch")


def point_command(sweep: Sweep, point: Point, folder: SweepFolder) -> list[str]:
    """What runs a point in the foreground."""
    train = ["--", "train", "--config", str(folder.config(point.number))]
    options = launch_words(sweep.launch)
    if sweep.where == "emulated":
        size = ["--nodes", str(point.nodes), "--ranks-per-node", str(point.ranks_per_node)]
        return [*BIGBATCH, "launch", "emulate", "run", *size, *options, *train]
    return [*BIGBATCH, "launch", sweep.where, "--ranks", str(point.ranks), *options, *train]


def arrays(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Points that one array of Slurm can run: those with as many ranks, fewest first."""
    found: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.ranks, point.number)):
        found.setdefault(point.ranks, []).append(point)
    return found


def array_words(sweep: Sweep, points: Sequence[Point], folder: SweepFolder, *, name: str) -> list[str]:
    """The words behind `bigbatch launch` that submit such points under that name; their time limit is their end."""
    numbers = ",".join(str(point.number) for point in points)
    size = ["--nodes", str(points[0].nodes), "--ranks-per-node", str(points[0].ranks_per_node)]
    own = ["--array", numbers, "--name", name, "--logs", str(folder.logs), "--stop-seconds", "0"]
    if "time" not in sweep.launch:
        own += ["--time", str(math.ceil(sweep.timeout_minutes))]
    train = ["--", "train", "--config", str(folder.path / "points" / INDEX / "config.yaml")]
    return ["slurm", *size, *own, *launch_words(sweep.launch), *train]


def launch_words(options: dict[str, Any]) -> list[str]:
    """{'gpus_per_node': 8, 'env': [a, b]} -> --gpus-per-node=8 --env=a --env=b; true is an option without a value."""
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            words.append(option if each is True else f"{option}={each}")
    return words
