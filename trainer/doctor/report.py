"""Report of an examination: a verdict, tables and recommended options."""

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbatch.errors import printable, printable_lines
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.doctor import verdict
from bigbatch.trainer.doctor.examine import Findings, describe, shown
from bigbatch.trainer.doctor.recommend import Comparison, Row, noise_of
from bigbatch.trainer.input.remedies import InputSettings
from bigbatch.trainer.input.report import MeasuredInput, Waited, hints

WIDTH = 100
"""Width of a report that goes to a file."""


def print_report(findings: Findings, console: Console, *, config: Config, command: Sequence[str]) -> None:
    """Print all results so far. command: the words of `bigbatch train` to which the advice is added."""

    def say(text: str = "") -> None:
        console.print(Text(printable_lines(text)))

    if findings.rates:
        for line in (*part_lines(findings, config), *verdict.explain(findings.rates), *input_hints(findings)):
            say(line)
        say()
        console.print(_phases(findings))
        console.print(_operators(findings))
        for line in (*sync_lines(findings), *always_lines(findings)):
            say(line)
        say()
    if findings.rows:
        console.print(_speedups(findings, config))
        for line in notes(findings, config):
            say(line)
        say()
    for line in advice_lines(findings, command=command):
        say(line)
    if findings.unmeasured:
        say("\nnot measured:")
        for each in findings.unmeasured:
            say(f"  {each.name}: {each.why}")
    if findings.budget_seconds is not None and findings.is_complete:
        say(f"\nended after {findings.used_seconds:.0f} of {findings.budget_seconds:g} s")


def input_hints(findings: Findings) -> list[str]:
    """Return hints for a run that waits for images, in the words of a run's summary."""
    rates, found = findings.rates, findings.input
    if not rates or not found:
        return []
    settings = InputSettings(**{**found["settings"], "augmentations": tuple(found["settings"]["augmentations"])})
    waited = Waited(
        wait_fraction=rates.wait_share,
        compute_images_per_second=rates.together / max(1e-9, 1 - rates.wait_share),
        steps=findings.steps["steps"],
    )
    return hints(waited, MeasuredInput(tuple(found["ranks"]), settings), was_probed=True)


def sync_lines(findings: Findings) -> list[str]:
    """Return lines on the host's waits in a step."""
    found = findings.profile["syncs"]
    if not found:
        return ["syncs: no operator of the step makes the host wait for the device"]
    would = "makes" if findings.machine and findings.machine.is_gpu else "would make, on a GPU,"
    return [f"syncs: {would} the host wait:", *(f"  {times} x {place}" for place, times in found.items())]


def notes(findings: Findings, config: Config) -> Iterator[str]:
    """Return notes on the conditions of the table and its empty cells."""
    for row in findings.rows:
        if row.failure:
            yield f"failed: {describe(row.candidate, config, before=row.before)}: {row.failure}"
    assert findings.noise is not None
    yield (
        f"gain: median of {findings.noise.turns} turns beside the best before it, and half of their range; counted "
        f"above {noise_of(findings.noise):.1%}, by which the config differs from itself"
    )
    for name, note in dict.fromkeys((row.candidate.name, row.candidate.note) for row in findings.rows):
        if note:
            yield f"{name} {note}"


def advice_lines(findings: Findings, *, command: Sequence[str]) -> list[str]:
    """Return lines with the options to add, or that none is worth it."""
    if not findings.is_complete:
        return ["stopped before the end: the figures above are all there are, and nothing is recommended"]
    if findings.advice:
        assert findings.verified is not None
        options = [word for key, value in findings.advice.items() for word in (f"--{key}", shown(value))]
        return [
            f"recommended: {_gain(findings.verified)} together, measured beside the config as it is:",
            f"  {shlex.join([*command, *options])}",
        ]
    if findings.taken:
        beside = "it failed" if findings.verified is None else f"{_gain(findings.verified)}, within the noise"
        return [f"keep the config as it is: speedups that help one by one do not help together ({beside})"]
    if not findings.rows and findings.budget_seconds is not None:
        return [
            f"no speedup fitted into {findings.budget_seconds:g} s: name some with --only, or give a longer --within"
        ]
    return ["keep the config as it is: no known speedup that could be measured here beats the noise"]


def _phases(findings: Findings) -> Table:
    table = Table("part of a step", "ms", "%", title="Where the step's time goes (first rank)")
    seconds = findings.profile["seconds"]
    for name, part in findings.profile["phases"].items():
        table.add_row(name, f"{1000 * part:,.1f}", f"{part / seconds:.1%}")
    table.add_row("the whole step", f"{1000 * seconds:,.1f}", "100.0%")
    _to_the_right(table)
    return table


def _operators(findings: Findings) -> Table:
    table = Table("operator, without what it calls", "ms in a step", title="Operators that take most time")
    for name, seconds in findings.profile["operators"]:
        table.add_row(Text(printable(name[:70])), f"{1000 * seconds:,.1f}")
    _to_the_right(table)
    return table


def _speedups(findings: Findings, config: Config) -> Table:
    table = Table("speedup", "now -> tried", "images/s", "gain", "memory", "", title="Known speedups, tried in turn")
    if findings.noise:
        table.add_row("none", "the same again: noise", *_figures(findings.noise), "")
    for row in findings.rows:
        figures = _figures(row.measured) if row.measured else ("", "", "")
        table.add_row(
            row.candidate.name,
            Text(printable(describe(row.candidate, config, before=row.before))),
            *figures,
            Text(_outcome(row)),
        )
    _to_the_right(table, first=2, last=4)
    return table


def _figures(found: Comparison) -> tuple[str, str, str]:
    return f"{found.images_per_second:,.0f}", _gain(found), f"{found.peak_bytes / 1e9:.2f} GB"


def _gain(found: Comparison) -> str:
    return f"{100 * found.gain:+.1f}% ± {100 * found.spread:.1f}"


def _outcome(row: Row) -> str:
    if row.is_taken:
        return "taken"
    return "" if row.measured else "failed"


def _to_the_right(table: Table, *, first: int = 1, last: int = -1) -> None:
    columns = table.columns[first : last + 1 if last >= 0 else None]
    for column in columns:
        column.justify = "right"
        column.no_wrap = True


def part_lines(findings: Findings, config: Config) -> list[str]:
    """Return lines on the measured part of a step, if a whole one takes too long."""
    part, batch = findings.part, config.batch
    if not part:
        return []
    text = f"measured on a part: steps of {part['batch.global_batch_size']} images instead of {batch.global_batch_size}"
    if part["batch.microbatch_size"] == batch.microbatch_size:
        return [f"{text}, since slow ones would leave no time"]
    return [
        f"{text}, microbatches of {part['batch.microbatch_size']} instead of {batch.microbatch_size}, ghost batches of "
        f"{part['batch.bn_span']} instead of {batch.bn_span}, since slow steps would leave no time; rates of whole "
        "microbatches are higher"
    ]


def always_lines(findings: Findings) -> list[str]:
    """Return lines on options that are always on, and their gain here."""
    found, update = findings.always, findings.profile.get("phases", {}).get("update")
    if not found:
        return []
    share = "" if update is None else f"; the whole update is {update / findings.profile['seconds']:.1%} of a step"
    fused, pinned = found["update"], found["pinning"]
    lines = ["always on:"]
    if "why" in fused:
        lines.append(f"  fused update: not measured, {fused['why']}")
    else:
        lines.append(
            f"  fused update: {1000 * fused['fused_seconds']:.2f} ms, tensor by tensor "
            f"{1000 * fused['unfused_seconds']:.2f} ms, {fused['times']:.1f} times as long (median of {fused['turns']} "
            f"turns){share}"
        )
    if "why" in pinned:
        lines.append(f"  pinned memory: {pinned['why']}")
    else:
        lines.append(
            f"  pinned memory: a microbatch's {pinned['bytes'] / 1e6:,.1f} MB to the device in "
            f"{1000 * pinned['pinned_seconds']:.2f} ms, from pageable memory, for which the host waits, in "
            f"{1000 * pinned['pageable_seconds']:.2f} ms"
        )
    return lines
