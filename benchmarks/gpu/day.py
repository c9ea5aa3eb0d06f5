"""Every figure of one GPU by one command: the parts in order of value, within the time that the machine is lent for.

    python -m benchmarks.gpu.day --minutes 14 --vision vision/references/classification --airbench cifar10-airbench
    python -m benchmarks.gpu.day --minutes 14        # continues with what the first call did not reach
    python -m benchmarks.gpu.day --dry-run           # what would run, and for how long
    python -m benchmarks.gpu.day --small             # does it all work? No figure of it means anything

Leave the machine alone meanwhile. Each part is a process with a limit of its own, and written into gpu-NAME.json of
this GPU when it is done; one that fails ends no other. A part with a result of this commit and GPU is skipped.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.suite.context import FULL, SMALL, Size
from benchmarks.gpu.suite.device import file_stem
from benchmarks.gpu.suite.limits import run_within
from benchmarks.gpu.suite.parts import LOST, empty_record, parts_of, read_record, run_part
from benchmarks.gpu.suite.report import TARGETS, number
from benchmarks.record import at_least, table
from bigbatch.comm.connect import choose_device
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.errors import INTERRUPTED, UserError, print_line

HEAD = ("part", "s", "figure", "target", "result")
FEW_ROUNDS = 3
"""Turns of each contestant if --minutes are stated."""
UNHURRIED = 4
"""Factor of a part's limit without --minutes: there are more turns, and the GPU may be slower."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended, or why it did not begin."""

    words: str
    seconds: float | None = None
    is_bad: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, compare; return 1 if a part failed, met its limit or lost speed."""
    options = parse(argv)
    try:
        device = choose_device(ALONE)
        size = size_of(options, device)
        names = choose_parts(options.only, list(parts_of(size)))
        if options.list:
            print("\n".join(names))
            return 0
        for folder in (options.out, options.logs):  # before any long work
            make_folder(folder)
        day = Day(options, device=device, size=size)
    except UserError as error:
        sys.exit(f"day.py: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = day.run(names)
    print(day.summary())
    return code


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="day.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=math.inf, help="begin nothing that does not fit, end by then (default: all)")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of the records (default: %(default)s)")
    add("--logs", type=Path, default=Path("runs/gpu-logs"), help="folder of the parts' output (default: %(default)s)")
    add("--only", nargs="+", metavar="PART", help="such as steps, or small_batches for all of these (default: all)")
    add("--again", action="store_true", help="also parts with a result of this commit and GPU")
    add("--list", action="store_true", help="name the parts and end")
    add("--dry-run", action="store_true", help="say what would run, and end")
    add("--small", action="store_true", help="small on a GPU, too: does everything work?")
    add("--rounds", type=at_least(1), help=f"turns of each contestant (default: 7; {FEW_ROUNDS} with --minutes)")
    add("--guard", action="store_true", help="measure all again, and fail if a figure lost more than 5%%")
    add("--against", type=Path, help="folder of the last record (default: --out)")
    add("--data", type=Path, help="images as of ImageNet, train and val, in class folders or shards")
    add("--cifar", type=Path, help="CIFAR-10 in class folders")
    add("--vision", type=Path, help="references/classification of a checkout of torchvision")
    add("--airbench", type=Path, help="checkout of KellerJordan/cifar10-airbench")
    add("--seeds", type=at_least(1), default=3, help="seeds of the race on CIFAR-10 (default: %(default)s)")
    options = parser.parse_args(argv)
    if not options.minutes > 0:  # nan, too
        parser.error(f"--minutes {options.minutes:g} must be above 0")
    if options.against is not None and not options.guard:
        parser.error("--against is what --guard compares with: give both")
    return options


def size_of(options: argparse.Namespace, device: torch.device) -> Size:
    """Return the size of the measurements: small without a GPU, or if asked for."""
    if options.small or device.type == "cpu":
        return SMALL
    rounds = options.rounds or (FULL.rounds if math.isinf(options.minutes) else FEW_ROUNDS)
    return replace(FULL, rounds=rounds)


def choose_parts(only: list[str] | None, names: list[str]) -> list[str]:
    """Return the parts of --only, by name or by its part before the slash. Raises: UserError for an unknown word."""
    for word in only or ():
        if not any(name == word or name.startswith(f"{word}/") for name in names):
            raise UserError(f"--only {word}: there is no such part; the parts are {', '.join(names)}")
    return [n for n in names if only is None or n in only or n.partition("/")[0] in only]


def make_folder(folder: Path) -> None:
    """Make a folder for results. Raises: UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name a folder by --out and --logs") from error


class Day:
    """The parts' outcomes on one device, beside its record."""

    def __init__(self, options: argparse.Namespace, *, device: torch.device, size: Size) -> None:
        self.options, self.device, self.size, self.parts = options, device, size, parts_of(size)
        self.path: Path = options.out / f"{file_stem(device, size=size.name)}.json"
        self.record = read_record(self.path) or empty_record(device, size)
        self.outcomes: dict[str, Outcome] = {}
        self._end = time.monotonic() + 60 * options.minutes
        if options.against is not None and not (options.against / self.path.name).exists():
            raise UserError(
                f"--against {options.against} has no {self.path.name}: name the folder of an earlier record"
            )

    def run(self, names: Sequence[str]) -> int:
        """Run the parts one after the other; return the exit code."""
        try:
            for name in names:
                self.outcomes[name] = Outcome("interrupted", is_bad=True)
                self.outcomes[name] = self._outcome(name)
                print_line(f"{name}: {self.outcomes[name].words}", file=sys.stderr)
        except KeyboardInterrupt:
            for name in names:
                self.outcomes.setdefault(name, Outcome("not begun: interrupted"))
            return INTERRUPTED
        return 1 if any(each.is_bad for each in self.outcomes.values()) else 0

    def _outcome(self, name: str) -> Outcome:
        """Run a part, unless it has a result or the time is too short; return its outcome."""
        part, left = self.parts[name], self._end - time.monotonic()
        if self._has_result(name):
            return Outcome(f"has a result of commit {source_commit()}")
        if left < part.likely:
            return Outcome(f"not begun: takes about {part.likely} s, and {max(0, left):.0f} s are left")
        limit = UNHURRIED * part.most if math.isinf(left) else min(part.most, left)
        if self.options.dry_run:
            return Outcome(f"would run: about {part.likely} s, at most {limit:.0f} s")
        print_line(f"== {name}, at most {limit:.0f} s", file=sys.stderr)
        log, start = self.options.logs / f"{name.replace('/', '-')}.log", time.monotonic()
        work = partial(run_part, name, options=self.options, device=self.device, size=self.size, path=self.path)
        code = run_within(work, seconds=limit, log=log, fork=self.device.type == "cpu")
        self.record = read_record(self.path) or self.record
        return replace(self._ended(name, code, limit=limit, log=log), seconds=time.monotonic() - start)

    def _has_result(self, name: str) -> bool:
        case = self.record["cases"].get(name, {})
        is_known = bool(case.get("figures")) and case["conditions"]["commit"] == source_commit()
        return is_known and not case.get("failure") and not self.options.again and not self.options.guard

    def _ended(self, name: str, code: int | None, *, limit: float, log: Path) -> Outcome:
        """Describe how a part ended, by its exit code; None: its limit ended it."""
        if code is None:
            return Outcome(f"stopped after its {limit:.0f} s: {log}", is_bad=True)
        if code:
            words = "lost speed" if code == LOST else f"failed, exit code {code}"
            return Outcome(f"{words}: {last_line(log)} ({log})", is_bad=True)
        case = self.record["cases"][name]
        left_out = "; ".join(f"{what}: {why}" for what, why in case["left_out"].items())
        if case["figures"]:
            return Outcome(f"passed; {left_out}" if left_out else "passed")
        return Outcome(f"left out: {left_out}")

    def summary(self) -> str:
        """Write a table with a row for each target, or for a part without one its first figure."""
        rows = [row for name, outcome in self.outcomes.items() for row in self._rows(name, outcome)]
        note = "" if self.size.name == FULL.name else "Small size: no figure means anything.\n\n"
        return f"{note}{table(HEAD, rows)}\n\n{self.path}"

    def _rows(self, name: str, outcome: Outcome) -> list[list[str]]:
        figures = self.record["cases"].get(name, {}).get("figures", {})
        begin = [name, "" if outcome.seconds is None else f"{outcome.seconds:.0f}"]
        if not figures or outcome.is_bad or self.options.dry_run:
            return [[*begin, "", "", outcome.words]]
        rows = [[*begin, *each] for each in self._judged(name)]
        if rows:
            return rows
        what, figure = next(iter(figures.items()))
        return [[*begin, f"{what}: {number(figure['median'])} {figure['unit']}", "", outcome.words]]

    def _judged(self, name: str) -> list[tuple[str, str, str]]:
        """List figure, target and verdict of the targets that this device's figures can meet."""
        found = []
        for target in TARGETS if self.size.name == FULL.name else ():
            value = target.value(self.record["cases"])
            if target.figure[0] == name and target.device in self.record["device"] and value is not None:
                verdict = "met" if target.is_met(value) else "MISSED"
                found.append((f"{target.words}: {number(value)}", target.bound, verdict))
        return found


def last_line(log: Path) -> str:
    """Return the last line of a part's output, which states the error."""
    lines: list[Any] = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")


if __name__ == "__main__":
    sys.exit(main())
