"""`python -m faults run`: draw trials from a seed, do them, and shrink what fails."""

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from bigbatch.errors import SOME_FAILED, EmulationError, FaultError, print_line, print_lines
from bigbatch.files import open_named, open_to_append
from bigbatch.paths import as_path
from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import ClusterPlan
from bigbatch.tools.emulate.state import state_root
from bigbatch.words import whole
from faults.experiment import TIMEOUT_SECONDS, Laboratory, Score
from faults.job import ask, prepare
from faults.rank import source_commit
from faults.table import format_campaign
from faults.trial import KINDS, SHAPES, Trial, draw, parse, simpler

MAX_RANKS = max(nodes * ranks for nodes, ranks in SHAPES)
MAX_NODES = max(nodes for nodes, _ in SHAPES)
MAX_SHRINKING = 12
"""Trials that may be spent on making one that fails simpler."""


def main(argv: Sequence[str]) -> int:
    """Do the trials; return 0 where all promises were kept, else SOME_FAILED. Raises: FaultError."""
    arguments = _parser().parse_args(argv)
    kinds = _read_kinds(arguments.kinds)
    _check(arguments)
    root = state_root(os.environ)
    max_nodes = arguments.nodes
    if max_nodes > 1 and not arguments.dry_run and (reason := _why_no_nodes(root)):
        print_line(f"one node, and no faults of links: {reason}", file=sys.stderr)
        max_nodes = 1
    trials = _trials(arguments, kinds=kinds, max_nodes=max_nodes)
    if arguments.dry_run:
        print_lines("\n".join(map(str, trials)))
        return 0
    conditions = _conditions(arguments)
    with _open(arguments.out) as out, tempfile.TemporaryDirectory(prefix="bigbatch-faults-") as folder:
        _write(out, {"conditions": conditions})
        laboratory = Laboratory(prepare(), Path(folder), timeout_seconds=arguments.timeout)
        scores = _do_all(trials, laboratory, jobs=arguments.jobs, out=out)
        failed = _first_of_each([score for score in scores if score.broken])
        for score in failed if arguments.shrink else []:
            _say_smallest(shrink(score, laboratory.score))
    print_lines(format_campaign(conditions, [score.record() for score in scores]))
    return SOME_FAILED if failed else 0


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name:10} {kind.what}; then the job {kind.outcome}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m faults run",
        description="Disturb short runs at random moments, and compare what happens with what is promised. Each "
        "trial trains 15 steps on generated images on some ranks (on this machine, or in emulated nodes), strikes "
        "one rank or the link of a node in a drawn step and phase, waits for the end, starts the same command again,\n"
        "and compares the weights in the end with those of an undisturbed run. Printed: when the others named the "
        "rank that was struck, when steps continued, how many were lost, and what was left behind.",
        epilog=f"kinds of faults, and what becomes of the job:\n{kinds}\n\nexample: python -m faults run --seed 7 "
        "--trials 20 --kinds kill,stop --out faults.jsonl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seed", type=whole, default=0, help="of all draws (default: 0)")
    add("--trials", type=whole, default=20, metavar="N", help="how many to draw (default: 20)")
    add("--trial", metavar="TRIAL", help="only this one: its number, or what was printed of it, kind=...,phase=...")
    add("--kinds", default=",".join(KINDS), help="such as kill,stop (default: all)")
    add("--ranks", type=whole, default=4, help=f"at most so many, 2 to {MAX_RANKS} (default: 4)")
    add(
        "--nodes",
        type=whole,
        default=MAX_NODES,
        help=f"at most so many, emulated; 1: none (default: {MAX_NODES})",
    )
    add("--jobs", type=whole, default=1, help="trials at a time; more disturb each other's times (default: 1)")
    add(
        "--timeout",
        type=whole,
        default=int(TIMEOUT_SECONDS),
        metavar="SECONDS",
        help=f"comm.timeout_seconds of the runs; a busy machine needs more (default: {TIMEOUT_SECONDS:g})",
    )
    add(
        "--out",
        type=as_path,
        metavar="FILE",
        help="write conditions and trials there, a line of JSON each, and\n"
        "what was said where a promise was broken to FILE.broken.txt",
    )
    add("--no-shrink", dest="shrink", action="store_false", help="do not look for the smallest trial that still fails")
    add("--dry-run", action="store_true", help="print the trials instead of doing them")
    return parser


def _read_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise FaultError(f"--kinds: {unknown[0]!r} is not a kind of fault; choose among {', '.join(KINDS)}")
    return kinds


def _check(arguments: argparse.Namespace) -> None:
    for name, low, high in (
        ("ranks", 2, MAX_RANKS),
        ("nodes", 1, MAX_NODES),
        ("trials", 1, 100_000),
        ("jobs", 1, 16),
        ("timeout", 4, 40),
    ):
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise FaultError(f"--{name} {value} is not between {low} and {high}")


def _trials(arguments: argparse.Namespace, *, kinds: Sequence[str], max_nodes: int) -> list[Trial]:
    """Return those that were asked for. Raises: FaultError."""
    if arguments.trial is not None and not arguments.trial.isdecimal():
        trial = parse(arguments.trial)
        if trial.nodes > max_nodes:
            raise FaultError(f"--trial: nodes={trial.nodes}, but there are at most {max_nodes} here")
        return [trial]
    if max_nodes == 1 and all(KINDS[kind].needs_namespaces for kind in kinds):
        raise FaultError(f"--kinds {','.join(kinds)}: these can only be where nodes are emulated")
    numbers = range(arguments.trials) if arguments.trial is None else [int(arguments.trial)]
    return [draw(arguments.seed, k, kinds=kinds, max_ranks=arguments.ranks, max_nodes=max_nodes) for k in numbers]


def _why_no_nodes(root: Path) -> str | None:
    """Say why no cluster can be emulated here; None where one can."""
    name = f"faults-{os.getpid()}-0"
    try:
        clusters.up(ClusterPlan(name, (1, 1), None), root=root, environ=os.environ)
    except EmulationError as error:
        return str(error)
    clusters.down(name, root=root)
    return None


def _conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": arguments.seed,
        "trials at a time": arguments.jobs,
        "comm.timeout_seconds": arguments.timeout,
        "commit": ask(prepare(), source_commit),
        "cores": os.cpu_count(),
        "load average at the start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "ranks at most": arguments.ranks,
        "torch": metadata.version("torch"),
    }


def _open(path: Path | None) -> BinaryIO:
    try:
        return open_named(Path(os.devnull) if path is None else path)
    except OSError as error:
        raise FaultError(f"--out {path}: {error.strerror}; name a file that can be written") from error


def _write(out: BinaryIO, record: Mapping[str, Any]) -> None:
    out.write((json.dumps(record) + "\n").encode())
    out.flush()


def _keep_said(out: BinaryIO, score: Score) -> None:
    """Add the ranks' output of a trial that broke a promise, apart from the records: it depends on the machine."""
    if out.name != os.devnull:
        with open_to_append(Path(f"{out.name}.broken.txt")) as file:
            file.write(
                f"--- {score.trial}: {'; '.join(score.broken)}\n{score.said}\n".encode(errors="backslashreplace")
            )


def _do_all(trials: Sequence[Trial], laboratory: Laboratory, *, jobs: int, out: BinaryIO) -> list[Score]:
    """Do the trials, several at a time, and say of each how it went."""
    lock, num_done = threading.Lock(), 0

    def do(trial: Trial) -> Score:
        nonlocal num_done
        found = laboratory.score(trial)
        with lock:
            num_done += 1
            print_line(f"[{num_done}/{len(trials)}] {describe(found)}")
            _write(out, found.record())
            if found.broken:
                _keep_said(out, found)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(do, trials))
        except BaseException:
            laboratory.end()
            pool.shutdown(cancel_futures=True)
            raise


def describe(score: Score) -> str:
    """Return a line: the trial, and what was kept or broken."""
    trial = score.trial
    where = f"{trial.phase}, step {trial.step}, rank {trial.rank} of {trial.ranks} on {trial.nodes} node(s)"
    words = []
    if score.detected_seconds is not None:
        words.append(f"named after {score.detected_seconds:.1f} s")
    if score.resumed_seconds is not None:
        words.append(f"stepping again after {score.resumed_seconds:.1f} s, {score.steps_lost} steps lost")
    if score.is_equal:
        words.append("equal bits")
    text = f"{trial.kind}: {where}, {trial.backend}: {', '.join(words) or 'nothing to say'}"
    if score.broken:
        text += (
            f"\n  BROKEN: {'; '.join((*score.broken, *score.left_behind))}\n  python -m faults run --trial '{trial}'"
        )
    return text


def _first_of_each(failed: Sequence[Score]) -> list[Score]:
    """Keep one of those that broke the same promises by the same kind of fault."""
    return list({(score.trial.kind, score.broken): score for score in reversed(failed)}.values())


def shrink(score: Score, again: Callable[[Trial], Score]) -> Score:
    """Return the smallest trial found that breaks a promise that this one breaks: fewer ranks, earlier, the first."""
    smallest, tried = score, {score.trial}
    while len(tried) <= MAX_SHRINKING:
        candidate = next((each for each in simpler(smallest.trial) if each not in tried), None)
        if candidate is None:
            break
        tried.add(candidate)
        found = again(candidate)
        if set(found.broken) & set(score.broken):
            smallest = found
    return smallest


def _say_smallest(score: Score) -> None:
    print_line(f"smallest trial found that breaks this: python -m faults run --trial '{score.trial}'")
    print_lines(f"  {'; '.join(score.broken)}\n{score.said}")
