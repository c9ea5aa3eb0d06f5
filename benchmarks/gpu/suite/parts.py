"""The parts of the command in order of value, and how one of them is measured and kept in the record."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.suite import checks, cifar, exact_sums, kernels, prototypes, recipes, scripts, steps, training
from benchmarks.gpu.suite.context import SMALL, Context, Found, Size
from benchmarks.gpu.suite.device import device_conditions, device_name
from benchmarks.gpu.suite.report import compare_case, page
from benchmarks.record import conditions, write_record
from bigbatch.errors import UserError

FOLDERS = ("data", "cifar", "vision", "airbench", "seeds")
LOST = 3
"""Exit code of a part that lost speed."""


@dataclass(frozen=True)
class Part:
    """A case of the record, with its seconds on an H100."""

    measure: Callable[[Context], Found]
    likely: int
    """Seconds: the part does not begin if less is left."""
    most: int
    """Seconds after which the part is ended."""


def parts_of(size: Size) -> dict[str, Part]:
    """List parts by name, best first."""
    batches = {batch: partial(training.measure_local_batch, batch=batch) for batch in size.local_batches}
    first = {f"small_batches/{batch}": Part(batches.pop(batch), 60, 150) for batch in (256, 32) if batch in batches}
    own_steps = {f"recipes/{name}": partial(recipes.measure, name=name) for name in recipes.recipes()}
    found = {
        "calibration": Part(training.measure_calibration, 40, 100),
        "quickstart": Part(checks.measure_quickstart, 40, 120),
        "tests": Part(checks.measure_tests, 150, 400),
        "training/generated": Part(training.measure_generated, 110, 240),
        **first,
        "kernels": Part(kernels.measure, 60, 150),
        **{
            f"prototypes/{name}": Part(partial(prototypes.measure, name=name), *prototypes.seconds_of(name))
            for name in prototypes.names()
        },
        "recipes/resnet50_8k": Part(own_steps.pop("recipes/resnet50_8k"), 90, 240),
        "decode": Part(scripts.measure_decode, 45, 100),
        "training/pictures": Part(training.measure_images, 80, 200),
        "evaluation": Part(training.measure_evaluation, 45, 120),
        "cifar": Part(cifar.measure, 85, 240),
        "reducer": Part(scripts.measure_reducer, 30, 60),
        "lars": Part(scripts.measure_lars, 25, 60),
        "exact_sums": Part(exact_sums.measure, 60, 200),
        "sanitizer/streams": Part(checks.measure_streams, 30, 60),
        "sanitizer/memory": Part(checks.measure_memory, 40, 90),
        "steps": Part(steps.measure, 120, 300),
        "startup": Part(checks.measure_startup, 150, 400),
        "inference": Part(scripts.measure_inference, 90, 240),
        "recompute": Part(scripts.measure_recompute, 60, 200),
        **{f"small_batches/{batch}": Part(measure, 50, 150) for batch, measure in batches.items()},
        **{name: Part(measure, 90, 240) for name, measure in own_steps.items()},
        "feed": Part(checks.measure_feed, 90, 240),
        "doctor": Part(checks.measure_doctor, 60, 180),
        "precisions": Part(scripts.measure_precisions, 250, 900),
    }
    return found if size.name != SMALL.name else {name: Part(each.measure, 20, 300) for name, each in found.items()}


def run_part(name: str, *, options: argparse.Namespace, device: torch.device, size: Size, path: Path) -> None:
    """Measure a part and keep it. Ends the process with LOST if it lost speed, and 1 if it failed."""
    if size.name == SMALL.name:
        torch.set_num_threads(1)
    try:
        entry = _measure(name, options=options, device=device, size=size)
    except UserError as error:
        sys.exit(str(error))
    for what, why in entry["left_out"].items():
        print(f"{what}: {why}")
    _keep(name, entry, options=options, path=path, empty=empty_record(device, size))
    if entry["failure"]:
        sys.exit(entry["failure"])


def empty_record(device: torch.device, size: Size) -> dict[str, Any]:
    """Make the record of a device without any case. Its command measures all of them again."""
    command = "python -m benchmarks.gpu.day --again" + " --small" * (size.name == "small")
    return {"command": command, "benchmark": "gpu", "device": device_name(device), "size": size.name, "cases": {}}


def _measure(name: str, *, options: argparse.Namespace, device: torch.device, size: Size) -> dict[str, Any]:
    facts, start = conditions(options), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bigbatch-gpu-") as scratch:
        folders = {key: getattr(options, key) for key in FOLDERS}
        context = Context(size=size, device=device, scratch=Path(scratch), **folders)
        found = parts_of(size)[name].measure(context)
    # after measuring, so that clocks and temperature are those under load
    facts |= device_conditions(device)
    facts |= {"date": datetime.now(timezone.utc).isoformat(timespec="minutes"), "seconds": time.monotonic() - start}
    return {**vars(found), "conditions": facts | found.conditions}


def _keep(name: str, entry: dict[str, Any], *, options: argparse.Namespace, path: Path, empty: dict[str, Any]) -> None:
    """Store a case in the record; a slower one in a file beside it, so that the next run compares with the better."""
    record = read_record(path) or empty
    last = read_record((options.against or path.parent) / path.name) if options.guard else None
    before = (last or empty)["cases"].get(name)
    compared = [] if before is None else compare_case(before, entry)
    for each in compared:
        print(each)
    if any(each.has_lost for each in compared):
        beside = path.with_name(f"{path.stem}-lost.json")
        lost = read_record(beside) or empty
        write_record(beside, {**lost, "cases": {**lost["cases"], name: entry}})
        print(f"lost speed; written to {beside}: where the loss is meant, measure again without --guard")
        sys.exit(LOST)
    if entry["figures"] or name not in record["cases"]:
        record["cases"][name] = entry
        write_record(path, record)
        path.with_suffix(".md").write_text(page(record))


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if there is none. Raises: UserError."""
    try:
        return dict(json.loads(path.read_text())) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a record ({error}): move it away, or fetch it again") from error
