"""Cases of the benchmarks: clusters, programs and their sizes; and their commands. Pure."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WITHOUT_HOOKS = "ours tuned,ours fp16,ddp,horovod"


@dataclass(frozen=True)
class Case:
    """A job on an emulated cluster, or directly on this machine if it has no link."""

    name: str
    module: str
    """Module in benchmarks.comm."""
    options: tuple[str, ...] = ()
    ranks_per_node: str = "2,2,2,2"
    link: str = ""
    place: str = "block"
    seconds: int = 60
    """About how long it takes, for the user and for the time limit."""
    is_long: bool = False
    """True if it runs only with --long."""

    def command(self, out: Path) -> list[str]:
        """List the words of its command; the record is written to out."""
        program = ["-m", f"benchmarks.comm.{self.module}", "--out", str(out), *self.options]
        if not self.link:
            return [sys.executable, *program]
        setting = {key: getattr(self, key) for key in ("ranks_per_node", "link", "place")}
        nodes = self.ranks_per_node.count(",") + 1
        emulate = ["launch", "emulate", "run", "--nodes", str(nodes), "--ranks-per-node", self.ranks_per_node]
        emulate += ["--link", self.link, "--place", self.place, "--launcher", "mpirun", "--python", "--"]
        labels = ["--case", self.name, "--setting", json.dumps(setting)]
        return [sys.executable, "-m", "bigbatch", *emulate, *program, *labels]


CASES = (
    Case("gradients-resnet50-1gbit", "gradients", link="1gbit", seconds=205),
    Case("gradients-resnet50-1gbit-cyclic", "gradients", link="1gbit", place="cyclic", seconds=225),
    Case(
        "gradients-alexnet_bn-1gbit",
        "gradients",
        ("--model", "alexnet_bn", "--contestants", WITHOUT_HOOKS),
        link="1gbit",
        seconds=305,
    ),
    Case(
        "gradients-resnet50-200mbit",
        "gradients",
        ("--contestants", WITHOUT_HOOKS, "--tune-seconds", "15"),
        link="200mbit",
        seconds=415,
    ),
    Case("reducer-overhead", "reducer_overhead", seconds=25),
    *(
        Case(
            f"scaling-{model}-{link}-{nodes}",
            "scaling",
            ("--model", model, "--weak", f"{weak}", "--strong", f"{2 * weak}", "--repetitions", "5"),
            ranks_per_node=",".join("1" * nodes),
            link=link,
            seconds=60 + 60 * weak * nodes,
            is_long=True,
        )
        for model, weak in (("resnet50", 1), ("alexnet_bn", 6))
        for link in ("1gbit", "400mbit")
        for nodes in (2, 4)
    ),
)


def choose_cases(*, long: bool, only: Sequence[str]) -> list[Case]:
    """Choose cases: named ones (by any part of the name), long ones included. Raises: ValueError if there is none."""
    chosen = [c for c in CASES if (any(word in c.name for word in only) if only else long or not c.is_long)]
    if not chosen:
        names = ", ".join(case.name for case in CASES)
        raise ValueError(f"--only {','.join(only)}: no case has such a name; there are {names}")
    return chosen
