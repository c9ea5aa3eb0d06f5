"""Draw the core in time order, and the tables of parts beside it, as the code has them.

.venv/bin/python -m benchmarks.core_and_parts --plot docs/core-and-parts.png
"""

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path

from bigbatch.comm.algorithms.by_name import ALGORITHMS
from bigbatch.comm.connect import TRANSPORTS
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.trainer.augment.pipeline import AUGMENTATIONS
from bigbatch.trainer.build.input import LOADERS
from bigbatch.trainer.build.optimizer import NATIVE
from bigbatch.trainer.build.plan import SCHEDULES
from bigbatch.trainer.config.checks import LOGGERS
from bigbatch.trainer.input.data_root import FORMS
from bigbatch.trainer.models import MODELS
from bigbatch.trainer.observe.observer import OBSERVERS
from bigbatch.trainer.recovery import RECOVERIES

CORE = (
    ("launch", "start the ranks of a job"),
    ("trainer/train.py", "load the config, meet the other ranks"),
    ("trainer/run.py", "prepare, build a run, run it, recover"),
    ("trainer/build_run.py", "data, model, optimizer, reducer, observers"),
    ("trainer/loop.py", "steps, reports, evaluations, checkpoints"),
    ("trainer/input", "read, decode, crop, prepare a batch"),
    ("trainer/step/loop.py", "forward, backward, wait for sums, update"),
    ("comm/gradients", "fuse gradients, start their sums"),
    ("comm/communicator.py", "all-reduce over the ranks"),
)
"""Core: place and purpose, in time order."""


def tables() -> dict[int, tuple[str, Mapping[str, object]]]:
    """Return the tables of parts: number of the box of CORE that loads from it -> its title and entries."""
    return {
        0: ("launchers", LAUNCHERS),
        1: ("transports (comm.backend)", TRANSPORTS),
        2: ("recoveries (run.heal)", RECOVERIES),
        3: ("optimizers, models, schedules", {**NATIVE, **MODELS, **SCHEDULES}),
        4: ("observers and loggers", {**OBSERVERS, **LOGGERS}),
        5: ("loaders, forms of data, augmentations", {**LOADERS, **FORMS, **AUGMENTATIONS}),
        8: ("algorithms (comm.algorithm)", ALGORITHMS),
    }


def draw(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 13), ylim=(0, len(CORE)))
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.45", "facecolor": "#dce9f7", "edgecolor": "#1f5f99"}
    part_box = {"boxstyle": "round,pad=0.45", "facecolor": "#f6efdc", "edgecolor": "#997a1f"}
    for number, (place, purpose) in enumerate(CORE):
        height = len(CORE) - number - 0.5
        axes.text(2.7, height, f"{place}\n{purpose}", ha="center", va="center", fontsize=11, bbox=box)
        if number:
            axes.annotate("", (2.7, height + 0.32), (2.7, height + 0.68), arrowprops={"arrowstyle": "->"})
    for number, (title, table) in tables().items():
        height, names = len(CORE) - number - 0.5, [name.rpartition(".")[2] for name in table]
        lines = textwrap.wrap(", ".join(names), width=66)
        axes.text(6.2, height, "\n".join((f"{title}:", *lines)), va="center", fontsize=9.5, bbox=part_box)
        axes.annotate("", (5.95, height), (5.15, height), arrowprops={"arrowstyle": "->", "linestyle": "--"})
    axes.set_title("Core, in time order, and the parts that it loads by name (dashed)", fontsize=13)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, required=True, help="image to write")
    draw(parser.parse_args().plot)


if __name__ == "__main__":
    main()
