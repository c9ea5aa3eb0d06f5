"""Describe the findings about a job that hangs: a headline for each, and the last operation of each rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from bigbatch.cells import columns
from bigbatch.comm.rendezvous.recording import Operation, ProcessGroup
from bigbatch.errors import printable
from bigbatch.tools.explain.culprits import ABSENT, CYCLE, DIFFERS, HELD, LATE, STUCK, UNEVEN, UNSTARTED, Culprit
from bigbatch.tools.explain.recorded_job import RecordedJob
from bigbatch.words import count, listed, spans

MAX_NAMED = 8
"""Most ranks that are named one by one."""
MAX_FRAMES = 3
MAX_PARTS = 3
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/torch/")
"""Parts of file names that do not belong to the job's own code."""
HEAD = ("rank", "group", "last begun", "last ended", "now", "where")


def headline(finding: Culprit) -> str:
    """Return one sentence: the ranks, what is wrong with them, and the operation with its group."""
    names, many = name_ranks(finding.ranks), len(finding.ranks) > 1
    if finding.group is None or finding.operation is None:
        return f"{names} left no dump: dead, or the dump is elsewhere"
    what = f"{describe(finding.operation)} of {_group(finding.group)}"
    num_others = len(finding.waiting)
    others, wait = count(num_others, "other"), "wait" if num_others > 1 else "waits"
    have, are = ("have", "are") if many else ("has", "is")
    if finding.kind == ABSENT:
        return f"{names} left no dump: dead, or the dump is elsewhere; {others} {wait} in {what}"
    if finding.kind == LATE and finding.operation.is_message:
        return f"{names} {have} not posted the counterpart of {what}"
    if finding.kind == LATE:
        return f"{names} {have} not begun {what}, in which {others} {wait}"
    if finding.kind == UNEVEN:
        return f"{names} {have} begun fewer collectives than others, and no rank waits; the next is {what}"
    if finding.kind == UNSTARTED and finding.operation.is_message:
        of = "the counterpart of " if finding.waiting else ""
        return f"{names} {have} queued {of}{what}, and the GPU has not started it, but the peer's GPU has"
    if finding.kind == UNSTARTED:
        return (
            f"{names} {have} queued {what}, and the GPU has not started it, but has on {others}: "
            "the GPU is busy with something else, or faulty"
        )
    if finding.kind == HELD and finding.operation.is_message:
        return f"{names} {are} still in {what}, which its peer has completed"
    if finding.kind == HELD:
        return f"{names} {are} still in {what}, which {others} {'have' if num_others > 1 else 'has'} completed"
    if finding.kind == STUCK and not many:
        return f"{names} waits in {what}, and no other rank of its group is known"
    if finding.kind == STUCK:
        everyone = "both ranks" if len(finding.ranks) == 2 else f"all {len(finding.ranks)} ranks"
        verb = "started" if all(each.state == "started" for each in finding.theirs.values()) else "begun"
        return (
            f"no rank is behind: {everyone} have {verb} {what}, and none completes it: look at the network and the GPUs"
        )
    waits = _each(finding.theirs, "in")
    if finding.kind == CYCLE:
        return f"{names} wait for each other: {waits}"
    assert finding.kind == DIFFERS
    return _differing(finding, names, what)


def nothing_wrong(job: RecordedJob) -> str:
    """Return a sentence that nothing is wrong, and for which operations that holds."""
    short = [rank for rank, recording in job.recordings.items() if not recording.is_whole]
    kept = ""
    if short:
        kept = f", of what is kept: {name_ranks(short)} began more than a recorder holds (TORCH_FR_BUFFER_SIZE)"
    return f"nothing is wrong: all {len(job.ranks)} ranks have ended all that they began, and begun the same{kept}"


def _differing(finding: Culprit, names: str, what: str) -> str:
    assert finding.operation is not None
    assert finding.group is not None
    if finding.operation.is_message:
        return f"{names} disagree on the size or type of {what}"
    number = f"number {finding.operation.number} of {_group(finding.group)}"
    if not finding.waiting:
        return f"{names} differ, and no majority says which one is wrong: {_each(finding.theirs, 'calls')}"
    calls = {describe(each, is_numbered=False) for each in finding.theirs.values()}
    what = " or ".join(sorted(calls)[:MAX_PARTS])
    most = describe(finding.operation, is_numbered=False)
    verb = "call" if len(finding.ranks) > 1 else "calls"
    return f"{names} {verb} {what} as {number}, where {len(finding.waiting)} of the others call {most}"


def describe_last_operation(job: RecordedJob, rank: int) -> str:
    """Return a rank's last operation, or the one it waits in, and where the job's code called it."""
    if rank not in job.recordings:
        return f"rank {rank}: no dump"
    operation = _last(job, rank)
    if operation is None:
        return f"rank {rank}: it has begun nothing that its recorder kept"
    does = "it waits in" if rank in job.waiting else "the last that it began, and ended, is"
    where = called_at(operation)
    group = _group(job.group_of(rank, operation))
    return f"rank {rank}: {does} {describe(operation)} of {group}{f', called at {where}' if where else ''}"


def describe(operation: Operation, *, is_numbered: bool = True) -> str:
    parts = [f"{each.name} {_shapes(each)}".rstrip() for each in operation.parts]
    if parts and operation.kind == "coalesced":
        what = f"{operation.name} of {listed(parts, most=MAX_PARTS)}"
    else:
        what = f"{operation.name} {_shapes(operation)}".rstrip()
    what = printable(what)
    kind = "message" if operation.is_message else "collective"
    return f"{kind} {operation.number} ({what})" if is_numbered else what


def called_at(operation: Operation, *, most: int = MAX_FRAMES) -> str:
    """Return the innermost lines of the job's own code, the innermost first; of any code if there are none."""
    frames = [*operation.frames] or [frame for part in operation.parts[:1] for frame in part.frames]
    python = [each for each in frames if not str(each.get("filename", "??")).startswith("??")]
    own = [each for each in python if not any(mark in str(each["filename"]) for mark in LIBRARIES)]
    chosen = (own or python)[:most]
    return printable(" < ".join(f"{each['filename']}:{each.get('line')} {each.get('name')}" for each in chosen))


def table(job: RecordedJob, group: ProcessGroup | None) -> str:
    """Return a table of the ranks' states in group, or else in their last operation's; equal states share a line."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in job.ranks:
        rows.setdefault(_row(job, rank, group), []).append(rank)
    lines = [HEAD, *((spans(ranks), *row) for row, ranks in rows.items())]
    return "\n".join(columns(lines))


def _row(job: RecordedJob, rank: int, group: ProcessGroup | None) -> tuple[str, ...]:
    if rank not in job.recordings:
        return ("-", "-", "-", "no dump", "-")
    operation = _last(job, rank)
    if operation is None:
        return ("-", "-", "-", "nothing begun", "-")
    if group is None or rank not in group.ranks:
        group = job.group_of(rank, operation)
    begun, ended = last_numbers(job, rank, group)
    now = "waits for nothing"
    if rank in job.waiting:
        waits_in = job.group_of(rank, operation)
        of = "" if waits_in is group else f" of group {printable(waits_in.name)}"
        kind = "message " if operation.is_message else ""
        now = f"{kind}{operation.number}{of} {printable(operation.name)}: {printable(operation.state)}"
    name = printable(group.name)
    numbers = ("-" if each is None else str(each) for each in (begun, ended))
    return (name, *numbers, now, called_at(operation, most=1) or "-")


def last_numbers(job: RecordedJob, rank: int, group: ProcessGroup) -> tuple[int | None, int | None]:
    """Return the numbers of a rank's last begun and last ended collective of a group; None if there is none."""
    mine = [each for each in job.recordings[rank].collectives if job.group_of(rank, each) is group]
    ended = [each.number for each in mine if each.is_over]
    return (mine[-1].number if mine else None), (ended[-1] if ended else None)


def _last(job: RecordedJob, rank: int) -> Operation | None:
    operations = job.recordings[rank].operations
    return job.waiting.get(rank) or (operations[-1] if operations else None)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence, each with the word rank, so that a search finds it; many ranks as spans."""
    if len(ranks) > MAX_NAMED:
        return f"{len(ranks)} ranks ({spans(ranks)})"
    names = [f"rank {rank}" for rank in ranks]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def record(job: RecordedJob, findings: Sequence[Culprit]) -> dict[str, Any]:
    return {
        "culprits": list(findings[0].ranks) if findings else [],
        "findings": [_finding_record(each) for each in findings],
        "ranks": {str(rank): _rank_record(job, rank) for rank in job.ranks},
    }


def _finding_record(finding: Culprit) -> dict[str, Any]:
    group, operation = finding.group, finding.operation
    return {
        "kind": finding.kind,
        "ranks": list(finding.ranks),
        "said": headline(finding),
        "group": group and {"name": group.name, "description": group.description, "ranks": list(group.ranks)},
        "operation": operation and _operation_record(operation),
        "others": list(finding.waiting),
    }


def _rank_record(job: RecordedJob, rank: int) -> dict[str, Any]:
    if rank not in job.recordings:
        return {"has_dump": False}
    operation = _last(job, rank)
    last = operation and {"group": operation.group.name, **_operation_record(operation)}
    groups = {job.group_of(rank, each) for each in job.recordings[rank].collectives}
    numbers = {group.name: last_numbers(job, rank, group) for group in sorted(groups, key=lambda each: each.name)}
    return {
        "has_dump": True,
        "waits": rank in job.waiting,
        "last": last,
        "groups": {name: {"last_begun": begun, "last_ended": ended} for name, (begun, ended) in numbers.items()},
    }


def _operation_record(operation: Operation) -> dict[str, Any]:
    return {
        "number": operation.number,
        "name": operation.name,
        "is_message": operation.is_message,
        "state": operation.state,
        "is_over": operation.is_over,
        "input_sizes": operation.sizes[0],
        "output_sizes": operation.sizes[1],
        "types": sorted({*operation.types[0], *operation.types[1]}),
        "called_at": called_at(operation),
    }


def _each(operations: Mapping[int, Operation], verb: str) -> str:
    some = list(operations.items())
    words = [f"rank {rank} {verb} {describe(each)} of group {printable(each.group.name)}" for rank, each in some]
    return "; ".join(words[:MAX_NAMED])


def _group(group: ProcessGroup) -> str:
    about = f"{group.description}, " if group.description not in ("", "undefined") else ""
    return printable(f"process group {group.name} ({about}{count(len(group.ranks), 'rank')})")


def _shapes(operation: Operation) -> str:
    """Return sizes and types; the outputs' only if they differ."""
    inputs, outputs = (" ".join(str(list(each)) for each in sizes[:MAX_PARTS]) for sizes in operation.sizes)
    sizes = " -> ".join(dict.fromkeys(text for text in (inputs, outputs) if text))
    return f"{sizes} {'/'.join(sorted({*operation.types[0], *operation.types[1]}))}".strip()
