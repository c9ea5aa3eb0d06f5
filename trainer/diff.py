"""`bigbatch diff`: the first step, tensor and element in which two runs differ, and why that may be."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from bigbatch.errors import RunFolderError, first_line, printable
from bigbatch.exit_codes import FAILED
from bigbatch.trainer.run.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.run.digests import BY_MICROBATCH, PHASES
from bigbatch.trainer.run.folder import RunDir, read_records
from bigbatch.trainer.run.microbatch_digests import ACTIVATIONS, BEFORE_SUM
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
    ACTIVATIONS: "another kernel in this layer or before it, or another number of threads",
    BEFORE_SUM: "another kernel, another number of threads, or another loss",
    "gradients": "another kernel, another number of threads, or another order of the sums over ranks",
    "weights and state": "another update of the same gradients: the optimizer, its rate, or a bit that flipped",
}
OF_SUMS = "another order of the sums (ranks, algorithm, fusion plan), another wire, or a bit that flipped on its way"
"""The cause where gradients are equal before their sum, and not after it."""
MOST_NAMED = 4
"""Of layers, microbatches or ranks."""


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
    equal: Sequence[str] = ()
    """Phases before it that both recorded."""
    microbatches: Sequence[int] = ()
    """In which a tensor differs, in a phase that tells."""
    num_microbatches: int = 0
    ranks: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Of each run, those that computed these microbatches; none of a run of one rank."""

    def __str__(self) -> str:
        """Say it in a line."""
        equal = f"{', '.join(self.equal)} are equal; " if self.equal else ""
        if self.phase == "pictures":
            return f"step {self.step}: the pictures of the global batch differ"
        what = "gradient of " if self.phase in (BEFORE_SUM, "gradients") else ""
        return (
            f"step {self.step}: {equal}{what}{self.names[0]} is the first of {len(self.names)} of {self.num_tensors} "
            f"{self.phase} that differ{self._where()}"
        )

    def _where(self) -> str:
        if not self.microbatches:
            return ""
        if len(self.microbatches) == self.num_microbatches:
            return f", in all {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        plural = "es" if len(self.microbatches) > 1 else ""
        listed = _listed(self.microbatches)
        return f", in microbatch{plural} {listed} of 0 to {self.num_microbatches - 1}{_computed_by(self.ranks)}"

    @property
    def odd_rank(self) -> int | None:
        """Return the rank whose microbatches differ, where others' do not and both runs have it."""
        ours, theirs = self.ranks
        return ours[0] if self._is_partial and len(ours) == 1 and list(ours) == list(theirs) else None

    @property
    def _is_partial(self) -> bool:
        return 0 < len(self.microbatches) < self.num_microbatches


def _listed(things: Sequence[object]) -> str:
    more = f" and {len(things) - MOST_NAMED} more" if len(things) > MOST_NAMED else ""
    return ", ".join(map(str, things[:MOST_NAMED])) + more


def _computed_by(ranks: tuple[Sequence[int], Sequence[int]]) -> str:
    ours, theirs = (f"rank{'s' if len(each) > 1 else ''} {_listed(each)}" if each else "one rank" for each in ranks)
    if not any(ranks):
        return ""
    return f" ({ours})" if ours == theirs else f" ({ours} in the first run, {theirs} in the second)"


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
    for line in not_compared(a, b, steps=steps):
        _say(line)
    if parting:
        _say(str(parting))
        _say(f"likely cause: {_cause(parting, [*told, *facts], is_step_before_equal=parting.step - 1 in steps)}")
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
    """Tell whether it has what it must have; the digests of single microbatches are not in all records."""
    kinds = {phase: str if phase == "pictures" else dict for phase in PHASES if phase not in BY_MICROBATCH}
    if not all(isinstance(record.get(name), kind) for name, kind in {**kinds, "step": int}.items()):
        return False
    ranks, phases = record.get("ranks", []), [record.get(phase, {}) for phase in BY_MICROBATCH]
    if not isinstance(ranks, list) or not all(isinstance(each, int) for each in ranks):
        return False
    if not all(isinstance(phase, dict) for phase in phases):
        return False
    return all(isinstance(words, list) and len(words) == len(ranks) for phase in phases for words in phase.values())


def find_parting(a: Run, b: Run, *, steps: Sequence[int]) -> Parting | None:
    """Return where they first differ among these steps; None where they do not.

    Raises: RunFolderError where they digested other tensors.
    """
    for step in steps:
        ours, theirs = a.digests[step], b.digests[step]
        _require_same_tensors(a, b, step=step)
        equal: list[str] = []
        for phase in PHASES:
            if phase == "pictures":
                if ours[phase] != theirs[phase]:
                    return Parting(step, phase, [], 0)
                equal.append(phase)
                continue
            pairs = _pairs(ours, theirs, phase=phase)
            if names := [name for name, (one, other) in pairs.items() if one != other]:
                found = Parting(step, phase, names, len(pairs), equal)
                return _with_microbatches(found, ours, theirs) if phase in BY_MICROBATCH else found
            if pairs:
                equal.append(phase)
    return None


def _require_same_tensors(a: Run, b: Run, *, step: int) -> None:
    for phase in ("gradients", "weights and state"):
        ours, theirs = a.digests[step][phase], b.digests[step][phase]
        if ours and theirs and (odd := ours.keys() ^ theirs.keys()):
            raise RunFolderError(f"{a.path} and {b.path} are of other models or optimizers: only one has {min(odd)}")


def _pairs(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, phase: str) -> dict[str, tuple[Any, Any]]:
    """Give both digests of each tensor of a phase, in the first run's order; none where they cannot be compared."""
    one, other = ours.get(phase, {}), theirs.get(phase, {})
    if not one or not other or (phase in BY_MICROBATCH and len(ours["ranks"]) != len(theirs["ranks"])):
        return {}
    # of layers each run has those that it was asked for
    names = [name for name in one if name in other] if phase == ACTIVATIONS else {**one, **other}
    none = [""] * len(ours.get("ranks", []))  # no microbatch of that run had a gradient of it
    return {name: (one.get(name, none), other.get(name, none)) for name in names}


def _with_microbatches(found: Parting, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Parting:
    pairs = _pairs(ours, theirs, phase=found.phase)
    count = len(ours["ranks"])
    odd = [k for k in range(count) if any(pairs[name][0][k] != pairs[name][1][k] for name in found.names)]
    ranks = [sorted({run["ranks"][k] for k in odd}) if len(set(run["ranks"])) > 1 else [] for run in (ours, theirs)]
    return replace(found, microbatches=odd, num_microbatches=count, ranks=(ranks[0], ranks[1]))


def not_compared(a: Run, b: Run, *, steps: Sequence[int]) -> Iterator[str]:
    """Say what only one of them recorded, as the first of these steps has it."""
    if not steps:
        return
    ours, theirs = a.digests[steps[0]], b.digests[steps[0]]
    for phase in PHASES[1:]:
        one, other = ours.get(phase, {}), theirs.get(phase, {})
        if bool(one) != bool(other):
            yield f"not compared: {phase}, which {a.path if one else b.path} alone recorded"
        elif not one:
            continue
        elif phase in BY_MICROBATCH and len(ours["ranks"]) != len(theirs["ranks"]):
            yield (
                f"not compared: {phase}, as a step has {len(ours['ranks'])} microbatches in {a.path}, "
                f"{len(theirs['ranks'])} in {b.path}"
            )
        elif phase == ACTIVATIONS:
            for run, names in ((a, [n for n in one if n not in other]), (b, [n for n in other if n not in one])):
                if names:
                    yield f"not compared: {phase} of {_listed(names)}, which {run.path} alone recorded"


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


def _cause(parting: Parting, differing: Sequence[str], *, is_step_before_equal: bool) -> str:
    cause = CAUSES[parting.phase]
    if parting.phase == "gradients" and BEFORE_SUM in parting.equal:
        cause = OF_SUMS
    elif parting.phase not in ("pictures", "weights and state") and not is_step_before_equal:
        before = (
            f"before it, as nothing is compared of step {parting.step - 1}" if parting.step > 1 else "to begin with"
        )
        cause += f", or other weights {before}"
    if parting.odd_rank is not None:
        cause = (
            f"rank {parting.odd_rank} alone computes something else of the same pictures: a bit that flipped in its "
            f"weights, its processor, its memory; else {cause}"
        )
    if differing:
        return f"{cause}; what differs is said above: {', '.join(differing)}"
    is_told_by_one = parting.phase != ACTIVATIONS and parting.odd_rank is None  # the last layer may differ alone
    if is_told_by_one and len(parting.names) == 1 and parting.num_tensors > 1:
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
