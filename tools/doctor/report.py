"""Report of an examination: the limit, tables and recommended options."""

import shlex
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from bigbatch.errors import printable, printable_lines
from bigbatch.tools.doctor import limit as doctor_limit
from bigbatch.tools.doctor.examine import ExaminationResults, describe
from bigbatch.tools.doctor.recommend import SpeedComparison
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.input.report import InputSettings, InputWait, MeasuredInput, hints

WIDTH = 100
"""Width of a report that goes to a file."""
Part = str | Table
RIGHT = partial(Column, justify="right", no_wrap=True)
"""A column of figures."""


def print_report(findings: ExaminationResults, console: Console, *, config: Config, command: Sequence[str]) -> None:
    """Print all results so far. command: the words of `bigbatch train` to which the advice is added."""
    parts: list[Part] = []
    if findings.rates:
        parts += [*_limits(findings, findings.rates, config), ""]
    elif step := findings.steps:
        rate = step["images"] / step["seconds"]
        parts.append(f"whole steps: {rate:,.0f} images/s ({step['images']} images in {step['seconds']:.1f} s)")
    if findings.rows:
        parts += [*_speedups(findings, config), ""]
    parts += _advice(findings, command=command)
    if findings.unmeasured:
        parts += ["\nnot measured:", *(f"  {each.name}: {each.why}" for each in findings.unmeasured)]
    if findings.budget_seconds is not None and findings.is_complete:
        parts.append(f"\nended after {findings.used_seconds:.0f} of {findings.budget_seconds:g} s")
    for part in parts:
        console.print(Text(printable_lines(part)) if isinstance(part, str) else part)


def _limits(findings: ExaminationResults, rates: doctor_limit.DoctorRates, config: Config) -> Iterator[Part]:
    """Yield the limit, the tables of phases and operators, and the operators that make the host wait."""
    if part := findings.part:
        batch = config.batch
        text = (
            f"measured on a part: steps of {part['batch.global_batch_size']} images instead of "
            f"{batch.global_batch_size}"
        )
        if part["batch.microbatch_size"] == batch.microbatch_size:
            yield f"{text}, since slow ones would leave no time"
        else:
            yield (
                f"{text}, microbatches of {part['batch.microbatch_size']} instead of {batch.microbatch_size}, ghost "
                f"batches of {part['batch.bn_span']} instead of {batch.bn_span}, since slow steps would leave no time; "
                "rates of whole microbatches are higher"
            )
    yield from doctor_limit.explain(rates)
    if found := findings.input:  # the same hints as in a run's summary
        settings = InputSettings(**{**found["settings"], "augmentations": tuple(found["settings"]["augmentations"])})
        waited = InputWait(
            wait_fraction=rates.wait_share,
            compute_images_per_second=rates.together / max(1e-9, 1 - rates.wait_share),
            steps=findings.steps["steps"],
        )
        yield from hints(waited, MeasuredInput(tuple(found["ranks"]), settings), was_probed=True)
    yield ""
    phases = Table("part of a step", RIGHT("ms"), RIGHT("%"), title="Where the step's time goes (first rank)")
    seconds = findings.profile["seconds"]
    for name, taken in (*findings.profile["phases"].items(), ("the whole step", seconds)):
        phases.add_row(name, f"{1000 * taken:,.1f}", f"{taken / seconds:.1%}")
    operators = Table("operator (self time)", RIGHT("ms in a step"), title="Operators that take most time")
    for name, taken in findings.profile["operators"]:
        operators.add_row(Text(printable(name[:70])), f"{1000 * taken:,.1f}")
    yield from (phases, operators)
    if syncs := findings.profile["syncs"]:
        would = "makes" if findings.machine and findings.machine.is_gpu else "would make, on a GPU,"
        yield f"syncs: {would} the host wait:"
        yield from (f"  {times} x {place}" for place, times in syncs.items())
    else:
        yield "syncs: no operator of the step makes the host wait for the device"
    if findings.always:
        yield from _always(findings)


def _always(findings: ExaminationResults) -> Iterator[str]:
    update = findings.profile["phases"].get("update")
    share = "" if update is None else f"; the whole update is {update / findings.profile['seconds']:.1%} of a step"
    fused, pinned = findings.always["update"], findings.always["pinning"]
    yield "always on:"
    yield "  fused update: " + (
        f"not measured, {fused['why']}"
        if "why" in fused
        else f"{1000 * fused['fused_seconds']:.2f} ms, tensor by tensor {1000 * fused['unfused_seconds']:.2f} ms, "
        f"{fused['times']:.1f} times as long (median of {fused['turns']} turns){share}"
    )
    yield "  pinned memory: " + (
        pinned["why"]
        if "why" in pinned
        else f"a microbatch's {pinned['bytes'] / 1e6:,.1f} MB to the device in {1000 * pinned['pinned_seconds']:.2f} "
        f"ms, from pageable memory, for which the host waits, in {1000 * pinned['pageable_seconds']:.2f} ms"
    )


def _speedups(findings: ExaminationResults, config: Config) -> Iterator[Part]:
    """Yield the table of speedups, and notes on its conditions and empty cells."""
    assert findings.noise is not None
    figures = map(RIGHT, ("images/s", "gain", "memory"))
    table = Table("speedup", "now -> tried", *figures, "", title="Known speedups, tried in turn")
    table.add_row("none", "the same again: noise", *_figures(findings.noise), "")
    failures = []
    for row in findings.rows:
        tried = describe(row.candidate, config, before=row.before)
        table.add_row(
            row.candidate.name,
            Text(printable(tried)),
            *(_figures(row.measured) if row.measured else ("", "", "")),
            "taken" if row.is_taken else "" if row.measured else "failed",
        )
        if row.failure:
            failures.append(f"failed: {tried}: {row.failure}")
    yield table
    yield from failures
    yield (
        f"gain: median of {findings.noise.turns} turns against the best before it, and half of their range; it "
        f"counts above {findings.noise.noise:.1%}, the noise of the config against itself"
    )
    for name, note in dict.fromkeys((row.candidate.name, row.candidate.note) for row in findings.rows):
        if note:
            yield f"{name} {note}"


def _advice(findings: ExaminationResults, *, command: Sequence[str]) -> Iterator[str]:
    """Yield the options to add, or a line that recommends none."""
    if not findings.is_complete:
        yield "stopped before the end: the figures above are all there are, and nothing is recommended"
    elif findings.is_noisy:
        yield (
            "nothing is recommended: this machine is busy, and the rates above are noise, as --json says. Equal "
            f"measurements differ by {findings.spread:.0%}: end other processes, and run doctor again"
        )
    elif findings.advice:
        assert findings.verified is not None
        options = [word for key, value in findings.advice.items() for word in (f"--{key}", as_yaml(value))]
        yield f"recommended: {_gain(findings.verified)} together, measured against the unchanged config:"
        yield f"  {shlex.join([*command, *options])}"
    elif findings.taken:
        beside = "it failed" if findings.verified is None else f"{_gain(findings.verified)}, within the noise"
        yield f"keep the config as it is: speedups that help one by one do not help together ({beside})"
    elif not findings.rows and findings.budget_seconds is not None:
        yield f"no speedup fitted into {findings.budget_seconds:g} s: name some with --only, or give a longer --within"
    else:
        yield "keep the config as it is: no known speedup that could be measured here beats the noise"


def _figures(found: SpeedComparison) -> tuple[str, str, str]:
    return f"{found.images_per_second:,.0f}", _gain(found), f"{found.peak_bytes / 1e9:.2f} GB"


def _gain(found: SpeedComparison) -> str:
    return f"{100 * found.gain:+.1f}% ± {100 * found.spread:.1f}"
