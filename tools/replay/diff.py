"""`bigbatch diff`: find the first step, tensor and element in which two runs differ, and a likely cause."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import DIFFERENT, CheckpointError, RunFolderError, first_line, print_line
from bigbatch.files import TEXT_BYTES, read_plain
from bigbatch.paths import as_path
from bigbatch.tools.replay.difference import Difference, find_places, likely_cause
from bigbatch.trainer.checkpoint.checkpoint import checkpoint_path, list_checkpoints, load_checkpoint
from bigbatch.trainer.checkpoint.resume import changes
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.observe.digests import (
    ACTIVATIONS,
    BEFORE_SUM,
    BY_MICROBATCH,
    IMAGES,
    PHASES,
    PLACE_LETTERS,
    STATE,
    SUMMED,
    values_folder,
)
from bigbatch.words import count, listed

KEY = "run.digest_every_steps"
NOT_COMPARED = ("step", "config", "gradient_order", "sums", "classes", "evaluations", "skipped")
"""Keys of a checkpoint that say how it was made, which main() compares by other files, or what the run recorded."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a floating-point type -> integer type of that size: read as one, positive numbers keep their order."""
DIGITS = {torch.float64: 17, torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}
"""Decimal digits that distinguish any two numbers of a type."""
Value = Tensor | int | float | str
"""Type of the values in a checkpoint."""


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run that are compared."""

    path: Path
    digests: Mapping[int, Mapping[str, Any]]
    """Step -> digests."""
    job: Mapping[str, Any]
    """Job of the last start."""
    config: str
    starts: Sequence[tuple[int, Mapping[str, Any]]] = ()
    """(steps done before it, job) of each start, in order; the first step is above 0 after another run's checkpoint."""

    @property
    def first_step(self) -> int:
        return min((step for step, _ in self.starts), default=0)

    def jobs_between(self, first_step: int, last_step: int) -> list[Mapping[str, Any]]:
        """Return the jobs that made the steps after first_step up to last_step, in order."""
        ends = [step for step, _ in self.starts[1:]] + [last_step]
        made = zip(self.starts, ends, strict=False)
        return [job for (begin, job), end in made if max(begin, first_step) < min(end, last_step)]


def main(argv: Sequence[str]) -> int:
    """Compare two runs; return 0 if they are equal, else DIFFERENT. Raises: RunFolderError; CheckpointError."""
    arguments = _make_parser().parse_args(argv)
    a, b = map(read_run, (arguments.a, arguments.b))
    try:
        changed = changes(a.config, b.config)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{a.path} and {b.path}: a config.yaml is not valid ({first_line(error)}): name folders of runs"
        ) from error
    for key, text in changed.items():
        print_line(f"config: {key}={text}")
    facts = {key: (a.job.get(key), b.job.get(key)) for key in {**a.job, **b.job} if a.job.get(key) != b.job.get(key)}
    for key, (ours, theirs) in facts.items():
        print_line(f"job: {key} is {ours} in {a.path}, {theirs} in {b.path}")
    steps = sorted(a.digests.keys() & b.digests.keys())
    difference = find_difference(a, b, steps=steps)
    for line in not_compared(a, b, steps=steps):
        print_line(line)
    if difference:
        print_line(str(difference))
        cause = likely_cause(difference, [*changed, *facts], is_step_before_equal=difference.step - 1 in steps)
        print_line(f"likely cause: {cause}")
        for line in describe_values(a, b, difference):
            print_line(line)
    elif steps:
        are = "is" if len(steps) == 1 else "are"
        print_line(f"the {count(len(steps), 'step')} that both recorded {are} equal, the last is {steps[-1]}")
    is_found = show_elements(a, b, from_step=difference.step if difference else 0)
    if not steps and is_found is None:
        raise RunFolderError(
            f"{a.path} and {b.path} have neither digests of the same step nor checkpoints of one: train both with "
            f"--{KEY} 1"
        )
    return DIFFERENT if difference or is_found else 0


def read_run(path: Path) -> RecordedRun:
    """Return the records of a run. Raises: RunFolderError if the folder has no run."""
    rundir = RunDir(path)
    try:
        config = read_plain(rundir.config, most=TEXT_BYTES).decode()
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} has no run ({first_line(error)}): name a run folder") from error
    digests: dict[int, Mapping[str, Any]] = {}
    starts: list[tuple[int, Mapping[str, Any]]] = []
    for record in read_records(rundir.metrics):
        if record["kind"] == "digests" and _is_whole(record):
            digests[int(record["step"])] = record
        elif record["kind"] == "start":
            job = found if isinstance(found := record.get("job"), dict) else {}
            starts.append((int(record["step"]) if isinstance(record.get("step"), int) else 0, job))
    return RecordedRun(path, digests, starts[-1][1] if starts else {}, config, starts)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether a record has all required keys; digests of single microbatches are optional."""
    kinds = {phase: str if phase == IMAGES else dict for phase in PHASES if phase not in BY_MICROBATCH}
    if not all(isinstance(record.get(name), kind) for name, kind in {**kinds, "step": int}.items()):
        return False
    places, positions = record.get("places", ""), record.get("positions", [])
    if not isinstance(places, str) or not _are_numbers(positions) or len(places) != PLACE_LETTERS * len(positions):
        return False
    ranks, phases = record.get("ranks", []), [record.get(phase, {}) for phase in BY_MICROBATCH]
    if not _are_numbers(ranks) or not all(isinstance(phase, dict) for phase in phases):
        return False
    return all(isinstance(words, list) and len(words) == len(ranks) for phase in phases for words in phase.values())


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(each, int) and abs(each) < 1 << 63 for each in values)


def find_difference(a: RecordedRun, b: RecordedRun, *, steps: Sequence[int]) -> Difference | None:
    """Return the first difference among these steps; None if there is none.

    Raises: RunFolderError if the runs have digests of different tensors.
    """
    for step in steps:
        ours, theirs = a.digests[step], b.digests[step]
        for phase in (SUMMED, STATE):
            if ours[phase] and theirs[phase]:
                _require_same_names(a, b, ours[phase], theirs[phase])
        equal: list[str] = []
        for phase in PHASES:
            if phase == IMAGES:
                if ours[phase] != theirs[phase]:
                    return Difference(step, phase, [], 0, places=find_places(ours, theirs))
                equal.append(phase)
                continue
            pairs = _pairs(ours, theirs, phase=phase)
            if names := [name for name, (one, other) in pairs.items() if one != other]:
                found = Difference(step, phase, names, len(pairs), equal)
                if phase not in BY_MICROBATCH:
                    return found
                count = len(ours["ranks"])
                odd = [k for k in range(count) if any(pairs[name][0][k] != pairs[name][1][k] for name in names)]
                ranks = [
                    sorted({run["ranks"][k] for k in odd}) if len(set(run["ranks"])) > 1 else []
                    for run in (ours, theirs)
                ]
                return replace(found, microbatches=odd, num_microbatches=count, ranks=(ranks[0], ranks[1]))
            if pairs:
                equal.append(phase)
    return None


def _require_same_names(a: RecordedRun, b: RecordedRun, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    if odd := one.keys() ^ other.keys():
        raise RunFolderError(f"{a.path} and {b.path} are of other models or optimizers: only one has {min(odd)}")


def _pairs(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, phase: str) -> dict[str, tuple[Any, Any]]:
    """Return both runs' digests of each tensor of a phase, in the first run's order; {} if they are not comparable."""
    one, other = ours.get(phase, {}), theirs.get(phase, {})
    if not one or not other or (phase in BY_MICROBATCH and len(ours["ranks"]) != len(theirs["ranks"])):
        return {}
    # run.digest_layers may differ between the runs
    names = [name for name in one if name in other] if phase == ACTIVATIONS else {**one, **other}
    none = [""] * len(ours.get("ranks", []))  # of a parameter without a gradient in that run
    return {name: (one.get(name, none), other.get(name, none)) for name in names}


def not_compared(a: RecordedRun, b: RecordedRun, *, steps: Sequence[int]) -> Iterator[str]:
    """Yield a line for each phase or layer that cannot be compared, judged by the first of these steps."""
    if not steps:
        return
    ours, theirs = a.digests[steps[0]], b.digests[steps[0]]
    for phase in PHASES[1:]:
        one, other = ours.get(phase, {}), theirs.get(phase, {})
        if bool(one) != bool(other):
            yield f"not compared: {phase}, which only {a.path if one else b.path} recorded"
        elif not one:
            continue
        elif phase in BY_MICROBATCH and len(ours["ranks"]) != len(theirs["ranks"]):
            yield (
                f"not compared: {phase}, because a step has {count(len(ours['ranks']), 'microbatch')} in {a.path}, "
                f"{len(theirs['ranks'])} in {b.path}"
            )
        elif phase == ACTIVATIONS:
            for run, names in ((a, [n for n in one if n not in other]), (b, [n for n in other if n not in one])):
                if names:
                    yield f"not compared: {phase} of {listed(names)}, which only {run.path} recorded"


def describe_values(a: RecordedRun, b: RecordedRun, difference: Difference) -> Iterator[str]:
    """Yield a line on the first differing element of the difference's tensors that both runs kept (run.digest_values).

    If they kept none, the line says how to keep it. Raises: CheckpointError for damaged files.
    """
    if difference.phase not in (ACTIVATIONS, BEFORE_SUM, SUMMED):
        return
    for microbatch in difference.microbatches or (0,):
        ours, theirs = (_values_of(run, difference, microbatch) for run in (a, b))
        for name in difference.names:
            for one, other in zip(ours.get(name, ()), theirs.get(name, ()), strict=False):
                if text := describe_difference(one, other):
                    where = f" of microbatch {microbatch}" if difference.num_microbatches > 1 else ""
                    yield f"step {difference.step}: {difference.named(name)}{where}: {text}"
                    return
    yield f"to see its elements: train both again with --run.digest_values '[{difference.names[0]}]'"


def _values_of(run: RecordedRun, difference: Difference, microbatch: int) -> dict[str, list[Tensor]]:
    """Return a run's kept tensors of the difference's phase and a microbatch: name -> tensors, in order of outputs."""
    is_summed = difference.phase == SUMMED  # the first rank stores these
    rank = 0 if is_summed else run.digests[difference.step]["ranks"][microbatch]
    path = checkpoint_path(values_folder(RunDir(run.path).values, rank=rank), step=difference.step)
    if not path.exists():
        return {}
    kept = load_checkpoint(path).get(difference.phase, {})
    if isinstance(kept, dict) and all(isinstance(of_name, dict) for of_name in kept.values()):
        found = {name: of_name[microbatch] for name, of_name in kept.items() if microbatch in of_name}
        if all(isinstance(each, list) and all(isinstance(t, Tensor) for t in each) for each in found.values()):
            return found
    raise CheckpointError(f"{path} holds no values of run.digest_values: remove it, and compare again")


def show_elements(a: RecordedRun, b: RecordedRun, *, from_step: int) -> bool | None:
    """Print the first differing element of the common checkpoints from from_step on; return whether there is one.

    Returns None if there are no such checkpoints.
    """
    ours, theirs = ({c.step: c.path for c in list_checkpoints(RunDir(run.path).checkpoints)} for run in (a, b))
    common = sorted(step for step in ours.keys() & theirs.keys() if step >= from_step)
    for step in common:
        one, other = (dict(_values(load_checkpoint(path[step]))) for path in (ours, theirs))
        _require_same_names(a, b, one, other)
        for name, value in one.items():
            if text := describe_difference(value, other[name]):
                print_line(f"checkpoint of step {step}: {name}: {text}")
                return True
    if common:
        print_line(f"the {len(common)} checkpoint(s) of the same steps are equal, the last is of step {common[-1]}")
    return False if common else None


def _values(state: Any, name: str = "") -> Iterator[tuple[str, Value]]:
    """Yield name and value of a checkpoint's weights, then of all other state."""
    if isinstance(state, Value):
        yield name, state
    elif isinstance(state, dict):
        for key in sorted(state, key=lambda key: key != "model"):
            if name or key not in NOT_COMPARED:
                yield from _values(state[key], f"{name}.{key}".strip("."))
    elif isinstance(state, list | tuple):
        for index, each in enumerate(state):
            yield from _values(each, f"{name}.{index}")


def describe_difference(a: Value, b: Value) -> str:
    """Return as text how many elements differ in their bits, and the first of them; empty if none differs."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return "" if a == b or (a != a and b != b) else f"{a!r} and {b!r}"
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f"{a!r} and {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype}"
    if not a.numel():
        return ""
    bits_a, bits_b = (x.flatten().view(torch.uint8).view(x.numel(), -1) for x in (a, b))
    if torch.equal(bits_a, bits_b):
        return ""
    odd_N = (bits_a != bits_b).any(dim=1).nonzero().flatten()
    first = int(odd_N[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    ours, theirs = (x.flatten()[first].item() for x in (a, b))
    ulps = ""
    if a.dtype in DIGITS:
        steps = (_ordered(a.flatten()[first]) - _ordered(b.flatten()[first])).abs()
        ulps = f", {int(steps):,} units in the last place apart"
    digits = DIGITS.get(a.dtype)
    values = " and ".join(f"{value:.{digits}g}" if digits else str(value) for value in (ours, theirs))
    return f"{len(odd_N):,} of {a.numel():,} elements differ, first {place}: {values}{ulps}"


def _ordered(value: Tensor) -> Tensor:
    """Map floating-point values to integers in the same order; neighbouring values differ by one."""
    integers = INTEGERS[value.dtype.itemsize]
    number = value.contiguous().view(integers).to(torch.int64)
    return torch.where(number < 0, torch.iinfo(integers).min - number, number)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch diff",
        description="Find the first difference of two runs: step, phase and tensor by the digests that they recorded "
        f"(--{KEY} N), and the first element by their checkpoints. The exit code is 0 if nothing differs, "
        f"{DIFFERENT} if something does, and 1 if they cannot be compared.",
        epilog="example: bigbatch diff runs/one runs/other",
    )
    for name in ("a", "b"):
        parser.add_argument(name, type=as_path, metavar=name.upper(), help="a run folder")
    return parser
