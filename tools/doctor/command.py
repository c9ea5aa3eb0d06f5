"""`bigbatch doctor`: its command line, progress display and output files."""

import argparse
import dataclasses
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bigbatch import __version__
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.commit import source_commit
from bigbatch.errors import FAILED, INTERRUPTED, ConfigError, DoctorError, first_line, print_line, print_lines, tell
from bigbatch.files import as_json, require_nameable, write_named, write_whole
from bigbatch.paths import PathError, as_path, expand_path
from bigbatch.tools.doctor import recorded_run
from bigbatch.tools.doctor.budget import BASE_SHARE, MIN_SECONDS, Budget
from bigbatch.tools.doctor.examine import Examination, ExaminationResults
from bigbatch.tools.doctor.exchange import IMAGES, TENSORS, ProbeChild, Probes
from bigbatch.tools.doctor.report import WIDTH, print_report
from bigbatch.tools.doctor.speedups import SPEEDUPS, part_of_step
from bigbatch.tools.simulate.cluster import PROFILE_KEYS, profile_path
from bigbatch.trainer.config.batch import divide_batch, shares, uneven
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.schema import Config, lookup, try_values
from bigbatch.trainer.folder.folder import writing
from bigbatch.trainer.step.signals import handling_stops
from bigbatch.words import decimal, whole

TURNS, SECONDS, LIMIT = (5, 3), (3.0, 0.5), (900.0, 300.0)
"""Values by default, and with --quick."""
QUICK_SECONDS = 60.0
LOAD_SECONDS, LARGE_LOAD = 0.5, 0.1
"""Seconds to measure the share of the cores that other processes use, and the share above which it is reported."""
KEPT_SPREAD = 0.05
"""Largest fraction by which equal measurements may differ if `bigbatch simulate` is to use the rate."""
MIN_WITHIN = 20.0
"""Smallest --within, in seconds: probes start several times, and each imports torch, which takes seconds."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code: 0, or 130 after Ctrl-C, which prints the results so far.

    Raises: ConfigError; DoctorError if the unchanged config cannot be measured; RunFolderError.
    """
    is_child = len(argv) == 3 and argv[2].isdecimal()  # a folder and a process id; else argv[0] is a run folder
    if is_child and argv[0] == "probe":  # arguments of a probe, started by another doctor process
        from bigbatch.tools.doctor import probe  # torch takes seconds to import

        return probe.main(argv[1:])
    if argv and not argv[0].startswith("-"):
        return recorded_run.main(argv)
    arguments, overrides = _parser().parse_known_args(argv)
    _check(arguments)
    budget = Budget(arguments.within or (QUICK_SECONDS if arguments.quick else math.inf))
    words = ["--config", arguments.config, *overrides]
    full_config = require_own_list(load_config(words, prog="bigbatch doctor"), words)
    if isinstance(why_not := try_values(full_config, {}, world_size=arguments.ranks), str):
        raise ConfigError(why_not)
    config = part_of_step(full_config, world_size=arguments.ranks)
    for path in (arguments.json, arguments.out):
        if path:
            with writing(path):
                require_nameable(path)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    print_lines(introduction(config, full_config, num_ranks=arguments.ranks))
    if budget.is_limited:
        print_line(f"time budget: {budget.seconds:g} s; measurements that do not fit are listed at the end")
    load = psutil.cpu_percent(interval=LOAD_SECONDS) / 100  # before anything is started here
    if load > LARGE_LOAD:
        print_line(
            f"other processes use {load:.0%} of this machine's {os.cpu_count()} cores: rates are lower than on an idle "
            "machine"
        )
    findings, code = ExaminationResults(), 0
    try:
        with handling_stops(signal.default_int_handler):  # no probe and no folder outlives it either
            _examine(arguments, findings, console, config=config, full_config=full_config, budget=budget)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except DoctorError as error:
        if budget.left() > MIN_SECONDS or not findings.steps:
            raise
        tell(f"{error}; --within {budget.seconds:g} is too short here: raise it to measure the rest")
        code = FAILED if arguments.out else 0
    print_report(findings, console, config=config, command=["bigbatch", "train", *words])
    _write(argv, arguments, findings, config=config, full_config=full_config, load=load)
    return code


def _write(
    argv: Sequence[str],
    arguments: argparse.Namespace,
    findings: ExaminationResults,
    *,
    config: Config,
    full_config: Config,
    load: float,
) -> None:
    """Write --json and --out, and keep a rate that a run would have for `bigbatch simulate`. Raises: RunFolderError."""
    measured = try_values(config, findings.part, world_size=arguments.ranks)
    assert isinstance(measured, Config), "a part is legal"
    is_kept = _is_rate_of_a_run(measured, findings, load=load)
    if arguments.json or is_kept:
        record = {
            "conditions": {
                "command": shlex.join(["bigbatch", "doctor", *argv]),
                "bigbatch": __version__,
                "commit": source_commit(),
                "date": time.strftime("%Y-%m-%d"),
                "cores": os.cpu_count(),
                "cpu_share_of_others": load,
            },
            # the conditions of the rates, which `bigbatch simulate` reads
            "experiment": {name: lookup(measured, key) for name, key in PROFILE_KEYS.items()},
            "spread": findings.spread,
            "is_noisy": findings.is_noisy,
            **dataclasses.asdict(findings),
        }
        data = (as_json(record, indent=1) + "\n").encode()
        if arguments.json:
            with writing(arguments.json):
                write_named(arguments.json, data)
        if is_kept and findings.machine:
            print_line(_keep(data, measured, findings.machine.device))
    if arguments.out and findings.is_complete:
        recommended = try_values(full_config, findings.advice, world_size=arguments.ranks)
        assert isinstance(recommended, Config), "candidates are legal"
        with writing(arguments.out):
            write_named(arguments.out, dump_config(recommended).encode())
        print_line(f"written: {arguments.out}")


def _is_rate_of_a_run(measured: Config, findings: ExaminationResults, *, load: float) -> bool:
    """Return whether the rate is no noise, and that of one rank that computes as a run would."""
    rates, machine = findings.rates, findings.machine
    if rates is None or machine is None or machine.world_size > 1 or measured.data.train_sizes:
        return False
    if rates.turns == 1 or findings.spread > KEPT_SPREAD or load > LARGE_LOAD:
        return False
    if not machine.is_gpu:
        return True
    from bigbatch.trainer.build.compute_mode import choose_mode  # torch takes seconds to import

    return choose_mode(measured, world_size=1).config == measured  # the doctor does not apply the rule


def _keep(data: bytes, measured: Config, device: str) -> str:
    """Write the record where `bigbatch simulate` finds it, and return a line about it."""
    try:
        if (path := profile_path(measured, device)) is None:
            return "not kept for bigbatch simulate: this user has no home"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (OSError, PathError) as error:  # no room, read-only, or a variable without a value
        return f"not kept for bigbatch simulate: {first_line(error)}"
    return f"kept for bigbatch simulate: {path}"


def introduction(config: Config, full_config: Config, *, num_ranks: int) -> str:
    batch = config.batch
    division = divide_batch(batch, world_size=num_ranks)
    text = (
        f"{config.model.name}, {config.data.image_size} pixels, {config.optimizer.precision}, loader "
        f"{config.data.loader}; a step of {batch.global_batch_size} images = {shares(division, batch.microbatch_size)}"
    )
    text += f"\n{uneven(division)}" if division.used_share < 1 else ""
    if batch.global_batch_size == full_config.batch.global_batch_size:
        return text
    return f"{text}\n(a part of the global batch of {full_config.batch.global_batch_size}, too large for so few ranks)"


def _examine(
    arguments: argparse.Namespace,
    findings: ExaminationResults,
    console: Console,
    *,
    config: Config,
    full_config: Config,
    budget: Budget,
) -> None:
    limit, numbers = arguments.limit or LIMIT[arguments.quick], count()

    def limit_seconds() -> float:
        # speedups in --only are tried without regard to the budget, and without a step there would be no result
        if arguments.only or not findings.steps:
            return limit
        return budget.limit(limit, least=MIN_SECONDS if findings.rates else BASE_SHARE * budget.seconds)

    with tempfile.TemporaryDirectory(prefix="bigbatch-doctor-") as place, _progress(console) as say:

        def start(values: Mapping[str, Any]) -> ProbeChild:
            changed = try_values(config, values, world_size=arguments.ranks)
            if isinstance(changed, str):  # illegal together with speedups that were taken
                raise DoctorError(changed)
            folder = Path(place) / str(next(numbers))
            return ProbeChild(changed, folder, num_ranks=arguments.ranks, start_seconds=limit_seconds())

        probes = Probes(start, limit_seconds=limit_seconds)
        try:
            Examination(
                config=config,
                full_config=full_config,
                batches=TENSORS if arguments.generated or config.data.loader == "synthetic" else IMAGES,
                seconds=arguments.seconds or SECONDS[arguments.quick],
                turns=TURNS[arguments.quick],
                only=tuple(arguments.only or ()),
                budget=budget,
                probes=probes,
                findings=findings,
                say=say,
            ).run()
        finally:
            probes.kill_all()


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Show progress: one changing line in a terminal, else one line per event."""
    if not console.is_terminal:
        yield lambda text: print_line(f"  {text} ...")
        return
    with console.status("") as status:
        yield status.update


def _check(arguments: argparse.Namespace) -> None:
    for name in ("seconds", "limit"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} {value:g} must be a positive number of seconds")
    if arguments.within is not None and not MIN_WITHIN <= arguments.within < math.inf:
        raise ConfigError(f"--within {arguments.within:g} must be {MIN_WITHIN:g} seconds or more")
    if read_process_env().world_size > 1:
        raise ConfigError("bigbatch doctor starts the ranks that it measures: run it once, without bigbatch launch")
    if arguments.ranks < 1:
        raise ConfigError(f"--ranks {arguments.ranks} must be 1 or more")
    for name in arguments.only or ():
        if name not in SPEEDUPS:
            raise ConfigError(f"--only {name} is not a known speedup; choose from {', '.join(SPEEDUPS)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch doctor",
        usage="bigbatch doctor --config NAME_OR_FILE [--quick] [--ranks N] [OPTION ...] [--section.key VALUE ...]\n"
        "       bigbatch doctor RUN [--json]",
        description="Find what limits a run on this machine (input, model or network), profile a step, and measure the "
        "gain of each known speedup. Each one runs in its own processes, in turns with the best config so far, and is "
        "taken if its gain exceeds the noise. At the end all taken speedups together are compared with the unchanged "
        "config. The global batch and its ghost batches never change. Trains nothing and writes no run folder; Ctrl-C "
        "prints the results so far.",
        epilog="RUN: a run folder; its records show what limits it. Examples: bigbatch doctor runs/quickstart; "
        "bigbatch doctor --config quickstart --quick; bigbatch doctor --config imagenet/resnet50_8k --ranks 8 --only "
        "workers microbatch --out faster.yaml",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, required=True, help="YAML file, or name of a packaged experiment")
    add(
        "--quick",
        action="store_true",
        help=f"{TURNS[1]} short turns instead of {TURNS[0]}, and --within {QUICK_SECONDS:g}: rough figures, fast",
    )
    add(
        "--within",
        type=decimal,
        metavar="SECONDS",
        help="time budget: a slow step is measured in part, the likeliest speedups come first, and those that do not "
        "fit are listed; speedups in --only are always tried",
    )
    add("--ranks", type=whole, default=1, help="ranks to start on this host (default: 1)")
    add("--generated", action="store_true", help="try speedups on generated tensors: the model alone, without input")
    add("--only", nargs="+", metavar="NAME", help=f"speedups out of {', '.join(SPEEDUPS)} (default: all)")
    add(
        "--seconds",
        type=decimal,
        help=f"seconds per turn, one step at least (default: {SECONDS[0]:g}, with --quick {SECONDS[1]:g})",
    )
    add(
        "--limit",
        type=decimal,
        metavar="SECONDS",
        help=f"time limit of a start or a turn (default: {LIMIT[0]:g}, with --quick {LIMIT[1]:g})",
    )
    add("--out", type=as_path, metavar="FILE.yaml", help="write the recommended config there")
    add("--json", type=as_path, metavar="FILE", help="write all measurements there")
    return parser
