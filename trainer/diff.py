"""`bigbatch diff`: the first step, tensor and element in which two runs differ, and why that may be."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from bigbatch.errors import RunFolderError, first_line, printable
from bigbatch.exit_codes import FAILED
from bigbatch.trainer.run.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.run.digests import PHASES
from bigbatch.trainer.run.folder import RunDir, read_records
from bigbatch.trainer.run.resume import changes

KEY = "run.digest_every_steps"
INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""Whose order is that of floating-point numbers of their size, but for the sign."""
DIGITS = {torch.float64: 17, torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}
"""By which any two numbers of a kind can be told apart."""
SEEN_TO = ("step", "config", "gradient_order", "sums")
"""Of a checkpoint: what says how it was made, and is compared elsewhere."""
Value = Tensor | int | float | str
CAUSES = {
    "pictures": "other pictures, another order of them, or another way to decode, crop or change them",
    "gradients": "another kernel, another number of threads, or another order of the sums over ranks",
    "weights and state": "another update of the same gradients: the optimizer, its rate, or a bit that flipped",
}


@dataclass(frozen=True)
class Run:
    """Holds what two runs are compared by."""

    path: Path
    digests: Mapping[int, Mapping[str, Any]]
    """By step."""
    job: Mapping[str, Any]
    config: str


@dataclass(frozen=True)
class Parting:
    """Says where two runs first differ: names are of the tensors that do, of num_tensors in that phase."""

    step: int
    phase: str
    names: Sequence[str]
    num_tensors: int

    def __str__(self) -> str:
        """Say it in a line."""
        before = PHASES[: PHASES.index(self.phase)]
        equal = f"{', '.join(before)} are equal; " if before else ""
        if self.phase == "pictures":
            return f"step {self.step}: the pictures of the global batch differ"
        what = "gradient of " if self.phase == "gradients" else ""
        return (
            f"step {self.step}: {equal}{what}{self.names[0]} is the first of {len(self.names)} of {self.num_tensors} "
            f"{self.phase} that differ"
        )


def main(argv: Sequence[str]) -> int:
    """Compare; return 0 where nothing differs, FAILED else. Raises: RunFolderError; CheckpointError."""
    arguments = _make_parser().parse_args(argv)
    a, b = (read_run(Path(name)) for name in (arguments.a, arguments.b))
    told = _changes(a, b)
    for key, text in told.items():
        _say(f"config: {key}={text}")
    facts = {key: (a.job.get(key), b.job.get(key)) for key in {**a.job, **b.job} if a.job.get(key) != b.job.get(key)}
    for key, (ours, theirs) in facts.items():
        _say(f"job: {key} is {ours} in {a.path}, {theirs} in {b.path}")
    steps = sorted(a.digests.keys() & b.digests.keys())
    parting = find_parting(a, b, steps=steps)
    if parting:
        _say(str(parting))
        _say(f"likely cause: {_cause(parting, [*told, *facts])}")
    elif steps:
        _say(f"the {len(steps)} steps that both recorded are equal, the last is {steps[-1]}")
    is_found = show_elements(a, b, from_step=parting.step if parting else 0)
    if not steps and is_found is None:
        raise RunFolderError(
            f"{a.path} and {b.path} have neither digests of the same step nor checkpoints of one: train both with "
            f"--{KEY} 1"
        )
    return FAILED if parting or is_found else 0


def read_run(path: Path) -> Run:
    """Read what a run recorded. Raises: RunFolderError where there is no run."""
    rundir = RunDir(path)
    try:
        config = rundir.config.read_text()
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} holds no run ({first_line(error)}): name a run folder") from error
    digests: dict[int, Mapping[str, Any]] = {}
    job: Mapping[str, Any] = {}
    for record in read_records(rundir.metrics):
        if record["kind"] == "digests" and _is_whole(record):
            digests[int(record["step"])] = record
        elif record["kind"] == "start":
            job = found if isinstance(found := record.get("job"), dict) else {}
    return Run(path, digests, job, config)


def _changes(a: Run, b: Run) -> dict[str, str]:
    try:
        return changes(a.config, b.config)
    except (ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RunFolderError(
            f"{a.path} and {b.path}: a config.yaml is none that bigbatch wrote ({first_line(error)})"
        ) from error


def _say(text: str) -> None:
    """Print a line whose words may come out of files of others."""
    print(printable(text))


def _is_whole(record: Mapping[str, Any]) -> bool:
    kinds = {phase: str if phase == "pictures" else dict for phase in PHASES} | {"step": int}
    return all(isinstance(record.get(name), kind) for name, kind in kinds.items())


def find_parting(a: Run, b: Run, *, steps: Sequence[int]) -> Parting | None:
    """Return where they first differ among these steps; None where they do not.

    Raises: RunFolderError where they digested other tensors.
    """
    for step in steps:
        for phase in PHASES:
            ours, theirs = a.digests[step][phase], b.digests[step][phase]
            if phase == "pictures":
                if ours != theirs:
                    return Parting(step, phase, [], 0)
                continue
            if odd := ours.keys() ^ theirs.keys():
                raise RunFolderError(
                    f"{a.path} and {b.path} are of other models or optimizers: only one has {min(odd)}"
                )
            if names := [name for name in ours if ours[name] != theirs[name]]:
                return Parting(step, phase, names, len(ours))
    return None


def show_elements(a: Run, b: Run, *, from_step: int) -> bool | None:
    """Print the first element that differs in the first checkpoints of one step from there on; tell if there is one.

    None without such checkpoints.
    """
    ours, theirs = ({c.step: c.path for c in list_checkpoints(RunDir(run.path).checkpoints)} for run in (a, b))
    common = sorted(step for step in ours.keys() & theirs.keys() if step >= from_step)
    for step in common:
        one, other = (dict(_values(load_checkpoint(path[step]))) for path in (ours, theirs))
        if odd := one.keys() ^ other.keys():
            raise RunFolderError(f"{a.path} and {b.path} are of other models or optimizers: only one has {min(odd)}")
        for name, value in one.items():
            if text := describe_difference(value, other[name]):
                _say(f"checkpoint of step {step}: {name}: {text}")
                return True
    if common:
        _say(f"the {len(common)} checkpoint(s) of the same steps are equal, the last is of step {common[-1]}")
    return False if common else None


def describe_difference(a: Value, b: Value) -> str:
    """Say how many elements differ in their bits, and which is the first; empty where none does."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b else f"{a!r} and {b!r}"
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
    if a.dtype in INTEGERS:
        steps = (_ordered(a.flatten()[first]) - _ordered(b.flatten()[first])).abs()
        ulps = f", {int(steps):,} units in the last place apart"
    digits = DIGITS.get(a.dtype)
    values = " and ".join(f"{value:.{digits}g}" if digits else str(value) for value in (ours, theirs))
    return f"{len(odd_N):,} of {a.numel():,} elements differ, first {place}: {values}{ulps}"


def _ordered(value: Tensor) -> Tensor:
    """Number floating-point values as they lie on the line, neighbours by one."""
    integers = INTEGERS[value.dtype]
    number = value.contiguous().view(integers).to(torch.int64)
    return torch.where(number < 0, torch.iinfo(integers).min - number, number)


def _values(state: Any, name: str = "") -> Iterator[tuple[str, Value]]:
    """Go through a checkpoint's weights, then all else, by names."""
    if isinstance(state, Value):
        yield name, state
    elif isinstance(state, dict):
        for key in sorted(state, key=lambda key: key != "model"):
            if name or key not in SEEN_TO:
                yield from _values(state[key], f"{name}.{key}".strip("."))
    elif isinstance(state, list | tuple):
        for index, each in enumerate(state):
            yield from _values(each, f"{name}.{index}")


def _cause(parting: Parting, differing: Sequence[str]) -> str:
    cause = CAUSES[parting.phase]
    if differing:
        return f"{cause}; what differs is said above: {', '.join(differing)}"
    if len(parting.names) == 1 and parting.num_tensors > 1:
        return f"a bit that flipped, as one tensor alone differs, and config and job are the same; else {cause}"
    return f"{cause}; config and job are the same, so it may differ from run to run, or between machines"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch diff",
        description="Find where two runs part: the first step, phase and tensor by the digests that they recorded "
        f"(--{KEY} N), and the first element by their checkpoints. The exit code is 0 where nothing differs, else "
        f"{FAILED}.",
        epilog="example: bigbatch diff runs/one runs/other",
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a run folder")
    return parser
