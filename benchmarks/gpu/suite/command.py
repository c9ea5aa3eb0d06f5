"""The command line of the suite, and its record."""

import argparse
import gc
import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import at_least
from benchmarks.gpu.suite import cifar, evaluation, scripts, small_batches, starting, steps, training
from benchmarks.gpu.suite.context import FULL, SMALL, Context, Found, Size
from benchmarks.gpu.suite.device import device_conditions, device_name, file_stem
from benchmarks.gpu.suite.guard import compare_case
from benchmarks.gpu.suite.report import page
from benchmarks.record import conditions, write_record
from bigbatch.comm.connection import choose_device
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import UserError

DESCRIPTION = "All measurements on the GPU at hand; at a small size on the CPU where there is none."


def cases_of(size: Size) -> dict[str, Callable[[Context], Found]]:
    """List cases by name, in the order in which they run."""
    return {
        "training/generated": training.measure_generated,
        "steps": steps.measure,
        **small_batches.cases(size.local_batches),
        "startup": starting.measure,
        "inference": scripts.measure_inference,
        "recompute": scripts.measure_recompute,
        "evaluation": evaluation.measure,
        "training/pictures": training.measure_images,
        "cifar": cifar.measure,
    }


def main() -> int:
    """Measure, write, compare; return 1 if a case failed or lost speed."""
    options = parse()
    try:
        device = choose_device(ALONE)
        size = size_of(options, device)
        names = choose_cases(options.only, list(cases_of(size)))
        if options.list:
            print("\n".join(names))
            return 0
        try:  # before any long work
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {options.out}: {error.strerror}; name a folder") from error
        stem = file_stem(device, size=size.name)
        suite = Suite(options, device=device, size=size, path=options.out / f"{stem}.json")
    except UserError as error:
        sys.exit(f"run.py: {error}")
    code = suite.run(names)
    print(page(suite.record))
    return code


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="run.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of the records (default: %(default)s)")
    add("--only", nargs="+", metavar="CASE", help="such as steps, or small_batches for all of these (default: all)")
    add("--list", action="store_true", help="name the cases and end")
    add("--small", action="store_true", help="small on a GPU, too: does everything work?")
    add("--minutes", type=float, help="start no further case after so long, and say how to go on")
    add(
        "--rounds",
        type=at_least(1),
        help="turns of each contestant (default: 7), where the machine is lent for minutes",
    )
    add("--guard", action="store_true", help="fail where a figure lost more than 5%% against the last record")
    add("--against", type=Path, help="folder of the last record (default: --out)")
    add("--data", type=Path, help="images as of ImageNet, train and val, in class folders or shards")
    add("--cifar", type=Path, help="CIFAR-10 in class folders")
    add("--vision", type=Path, help="references/classification of a checkout of torchvision")
    add("--airbench", type=Path, help="checkout of KellerJordan/cifar10-airbench")
    add("--seeds", type=at_least(1), default=5, help="seeds of the race on CIFAR-10 (default: %(default)s)")
    options = parser.parse_args()
    if options.against is not None and not options.guard:
        parser.error("--against is what --guard compares with: give both")
    return options


def size_of(options: argparse.Namespace, device: torch.device) -> Size:
    """Return the size of the measurements: small without a GPU, or if asked for."""
    size = SMALL if options.small or device.type == "cpu" else FULL
    return size if options.rounds is None else replace(size, rounds=options.rounds)


def choose_cases(only: list[str] | None, names: list[str]) -> list[str]:
    """Return the cases of --only, by name or the part before the slash. Raises: UserError for an unknown word."""
    for word in only or ():
        if not any(name == word or name.startswith(f"{word}/") for name in names):
            raise UserError(f"--only {word}: there is no such case; the cases are {', '.join(names)}")
    return [n for n in names if only is None or n in only or n.partition("/")[0] in only]


class Suite:
    """The record of one device, with messages on its changes."""

    def __init__(self, options: argparse.Namespace, *, device: torch.device, size: Size, path: Path) -> None:
        self.options, self.device, self.size, self.path = options, device, size, path
        empty = {"benchmark": "gpu", "device": device_name(device), "size": size.name, "cases": {}}
        self.record: dict[str, Any] = read_record(path) or empty
        self.last = read_record((options.against or path.parent) / path.name)
        if options.against is not None and self.last is None:
            raise UserError(f"--against {options.against} has no {path.name}: name the folder of an earlier record")
        self.failed: list[str] = []

    def run(self, names: list[str]) -> int:
        """Run the cases one after the other; return the exit code."""
        start = time.monotonic()
        if self.options.guard and self.last is None:
            say(f"no earlier results of {self.record['device']}: these are the first, and nothing is compared")
        for number, name in enumerate(names):
            if self.options.minutes is not None and time.monotonic() - start > 60 * self.options.minutes:
                say(f"--minutes {self.options.minutes:g} are over; go on by --only {shlex.join(names[number:])}")
                break
            self._run_case(name)
        if self.failed:
            say(f"failed: {', '.join(self.failed)}")
        return 1 if self.failed else 0

    def _run_case(self, name: str) -> None:
        say(f"== {name}")
        start = time.monotonic()
        try:
            entry = self._measure(name)
        except Exception as error:  # the others have their own conditions, and hours of measuring are not discarded
            if not isinstance(error, UserError):
                traceback.print_exc()
            say(f"== {name} failed: {error}")
            self.failed.append(name)
            return
        finally:
            gc.collect()  # frees reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        for what, why in entry["left_out"].items():
            say(f"   {what}: {why}")
        self._keep(name, entry)
        say(f"== {name}: {time.monotonic() - start:.0f} s")

    def _measure(self, name: str) -> dict[str, Any]:
        facts = conditions(self.options)
        with tempfile.TemporaryDirectory(prefix="bigbatch-gpu-") as scratch:
            folders = {key: getattr(self.options, key) for key in ("data", "cifar", "vision", "airbench", "seeds")}
            context = Context(size=self.size, device=self.device, scratch=Path(scratch), **folders)
            found = cases_of(self.size)[name](context)
        # after measuring, so that clocks and temperature are those under load
        facts |= device_conditions(self.device)
        facts["date"] = datetime.now(timezone.utc).isoformat(timespec="minutes")
        return {**vars(found), "conditions": facts | found.conditions}

    def _keep(self, name: str, entry: dict[str, Any]) -> None:
        """Keep a case in the record; write a slower one beside it, so the next guard still has the better figures."""
        before = (self.last or {"cases": {}})["cases"].get(name) if self.options.guard else None
        compared = [] if before is None else compare_case(before, entry)
        for each in compared:
            say(f"   {each}")
        if any(each.has_lost for each in compared):
            self.failed.append(name)
            beside = self.path.with_name(f"{self.path.stem}-lost.json")
            lost = read_record(beside) or {**self.record, "cases": {}}
            write_record(beside, {**lost, "cases": {**lost["cases"], name: entry}})
            say(f"   written to {beside}; where the loss is meant, measure again without --guard")
        elif entry["figures"] or name not in self.record["cases"]:
            self.record["cases"][name] = entry
            write_record(self.path, self.record)
            self.path.with_suffix(".md").write_text(page(self.record))


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if there is none. Raises: UserError."""
    try:
        return dict(json.loads(path.read_text())) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no record ({error}): move it away, or fetch it again") from error


def say(line: str) -> None:
    """Print on standard error: the report is on standard output."""
    print(line, file=sys.stderr, flush=True)
