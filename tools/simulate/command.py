"""`bigbatch simulate`: predict a recipe's time and cost on a cluster without starting it."""

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bigbatch.errors import LaunchOptionError, first_line, or_nearest, print_line
from bigbatch.files import replacing_named, write_named
from bigbatch.launch.jobs.validation import parse_minutes
from bigbatch.launch.tables import Table, show_table, stdout_console
from bigbatch.paths import as_path, expand_path
from bigbatch.tools.simulate import show
from bigbatch.tools.simulate.cluster import Rate, cluster_names, kept_rate, load_cluster, read_profile
from bigbatch.tools.simulate.network import ALGORITHMS, BY_SIZE
from bigbatch.tools.simulate.run import RESTART_SECONDS, Failures
from bigbatch.tools.simulate.scaling import IMAGES, PredictedPoint, Scenario, simulate_scaling
from bigbatch.tools.simulate.shapes import shape_of
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.folder.folder import writing
from bigbatch.words import decimal

PROG = "bigbatch simulate"
MAX_COUNTS = 64
MAX_DEVICES = 1_000_000
CHOICES = (*ALGORITHMS, BY_SIZE)
UNITS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0}
"""Hours of each unit of a deadline."""
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m?)?", re.ASCII)
"""Several units, such as 2h30 or 1d2h30m."""


def main(argv: Sequence[str]) -> int:
    """Print the answer, and write the requested files; return 0."""
    parser = _parser()
    arguments, overrides = parse_beside_keys(parser, argv)
    if arguments.config and arguments.named:
        parser.error(f"{arguments.config} and --config {arguments.named} both name a recipe: keep one")
    arguments.config = arguments.config or arguments.named
    if not arguments.config:
        parser.error("CONFIG is missing: a recipe, such as imagenet/resnet50_64k")
    if not arguments.cluster:
        parser.error(f"--cluster is missing: a YAML file, or one of {', '.join(cluster_names())}")
    return _simulate(arguments, overrides, asked=shlex.join(["bigbatch", "simulate", *argv]))


def _simulate(arguments: argparse.Namespace, overrides: Sequence[str], *, asked: str) -> int:
    scenario = _scenario(arguments, overrides)
    counts = read_counts(arguments.gpus, per_node=scenario.cluster.network.devices_per_node)
    hours = None if arguments.deadline is None else read_hours(arguments.deadline)
    files = [path for path in (arguments.json, arguments.html, arguments.plot, arguments.trace) if path]
    if len(set(files)) < len(files):
        raise LaunchOptionError(f"{max(files, key=files.count)} is named twice: give each output its own file")
    points, refused = simulate_scaling(scenario, counts)
    price = scenario.cluster.price_per_device_hour
    if arguments.price is not None:
        price = _above_0("--price", arguments.price)
    scaling, further = show.scaling_table(points, price=price), [show.run_table(points)]
    if len(points) > 1:
        further.insert(0, show.loss_table(points))
    comparisons = _comparison(arguments.compare, scenario, counts)
    findings = show.findings(points, model=scenario.config.model.name, deadline_hours=hours)
    findings += [line for point in points if arguments.advise for line in show.advice(scenario, point)]
    findings += [f"left out: {show.gpus(count)}: {why}" for count, why in refused.items()]
    console = stdout_console()
    for line in show.assumptions(scenario):
        print_line(line)
    for table in (scaling, *(further if arguments.tables else []), *comparisons):
        show_table(table, console)
    for line in findings:
        print_line(line)
    tables = [scaling, *further, *comparisons]
    page = partial(show.page, scenario, points, tables=tables, findings=findings, asked=asked)
    _write(arguments, scenario, points, page=page)
    return 0


def _scenario(arguments: argparse.Namespace, overrides: Sequence[str]) -> Scenario:
    config = load_config(["--config", arguments.config, *overrides], prog=PROG)
    shape_of(config.model)
    cluster = load_cluster(arguments.cluster)
    if arguments.rate is not None and arguments.profile:
        raise LaunchOptionError("--rate and --profile both state a device's rate: keep one")
    rate = None
    if arguments.profile:
        rate = read_profile(arguments.profile, config)
    elif arguments.rate is not None:
        rate = Rate(config.model.name, config.batch.microbatch_size, _above_0("--rate", arguments.rate), "--rate")
    elif arguments.cluster in cluster_names() or all(each.model != config.model.name for each in cluster.rates):
        rate = kept_rate(config, cluster.device)  # the user's own file comes first
    if arguments.input_rate is not None:
        _above_0("--input-rate", arguments.input_rate)
    failures = None
    if arguments.failure_hours is not None:
        restart = _above_0("--restart-seconds", arguments.restart_seconds)
        failures = Failures(_above_0("--failure-hours", arguments.failure_hours), restart)
    return Scenario(
        config,
        cluster,
        rate=rate,
        algorithm=arguments.algorithm,
        num_images=max(1, round(_above_0("--images", arguments.images))),
        input_images_per_second=arguments.input_rate,
        failures=failures,
    )


def _comparison(algorithms: str | None, scenario: Scenario, counts: Sequence[int]) -> list[Table]:
    if algorithms is None:
        return []
    names = [name.strip() for name in algorithms.split(",")]
    for name in names:
        if name not in CHOICES:
            choice = f"{or_nearest(name, CHOICES)}; choose among {', '.join(CHOICES)}"
            raise LaunchOptionError(f"--compare {name} is not an algorithm{choice}")
    columns = {name: simulate_scaling(replace(scenario, algorithm=name), counts)[0] for name in names}
    return [show.comparison_table("A step, by algorithm", columns)]


def _write(
    arguments: argparse.Namespace, scenario: Scenario, points: Sequence[PredictedPoint], *, page: Callable[..., str]
) -> None:
    title = f"{arguments.config} on {scenario.cluster.name}, simulated"
    makers = {
        arguments.json: lambda: (
            show.as_json(scenario, points, price=arguments.price or scenario.cluster.price_per_device_hour) + "\n"
        ),
        arguments.trace: lambda: show.trace(points[-1]) + "\n",
        arguments.html: lambda: page(title=title),
    }
    written = [path for path in makers if path]
    for path in written:
        with writing(path):
            write_named(path, makers[path]().encode())
    if arguments.plot:
        figure = show.draw(points, title=title)
        try:
            with writing(arguments.plot), replacing_named(arguments.plot) as file:
                figure.savefig(file, format=arguments.plot.suffix[1:] or None)
        except ValueError as error:  # no such format
            raise LaunchOptionError(f"--plot {arguments.plot}: {first_line(error)}") from error
        written.append(arguments.plot)
    if written:
        print_line(f"written: {', '.join(map(str, written))}")


def _above_0(option: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise LaunchOptionError(f"{option} {value:g} must be a number above 0")
    return value


def read_counts(text: str, *, per_node: int) -> list[int]:
    """Parse numbers of devices: 8,16 or 8..2048, which doubles from the first; `per_node` replaces an empty text."""
    if not text:
        return [per_node * 2**i for i in range(9)]
    counts: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= MAX_DEVICES:
            raise LaunchOptionError(
                f"--gpus {word} is not a number from 1 to {MAX_DEVICES:,}, nor a range such as 8..2048"
            )
        while first < last:
            counts.append(first)
            first *= 2
        counts.append(last)
    if len(set(counts)) > MAX_COUNTS:
        raise LaunchOptionError(f"--gpus names {len(set(counts))} numbers, more than {MAX_COUNTS}")
    return sorted(set(counts))


def read_hours(text: str) -> float:
    """Parse a time such as 90s, 6.6m, 1h, 2h30 or 2d, or Slurm's 2:30:00 or 1-12; a number alone means hours."""
    if re.search(r"\d[:-]", text):
        return parse_minutes(text, option="--deadline") / 60
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    hours = float(found[1]) * UNITS[found[2] or "h"] if found else 0.0
    if several := None if found else DURATION.fullmatch(text):
        hours = sum(int(several[place] or 0) * UNITS[unit] for place, unit in enumerate("dhm", 1))
    if not 0 < hours < 1e6:
        raise LaunchOptionError(f"--deadline {text} is not a time: write 90s, 30m, 1h, 2h30 or 2d")
    return hours


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} CONFIG --cluster NAME [--gpus N,N..M] [OPTION ...] [--section.key VALUE ...]",
        description="Simulate a recipe's step on a cluster: its gradients, fusion plan and algorithms as events. "
        "Predicts step time, efficiency and the causes of its loss, run time, GPU-hours, and 90% intervals. Prints its "
        "assumptions first; docs/simulate.md states the errors on published step times.",
        epilog="example: bigbatch simulate imagenet/resnet50_64k --cluster dgx_a100 --gpus 8..2048 --deadline 1h",
        allow_abbrev=False,
    )
    add = parser.add_argument
    recipe = "a recipe as for train; --section.key overrides it"
    add("config", type=expand_path, nargs="?", metavar="CONFIG", help=recipe)
    add("--config", dest="named", type=expand_path, metavar="CONFIG", help="the recipe, instead of the first argument")
    add("--cluster", type=expand_path, metavar="NAME", help=f"a YAML file, or one of {', '.join(cluster_names())}")
    add("--gpus", default="", metavar="N,N..M", help="numbers, such as 8..2048, doubling (default: 1 to 256 nodes)")
    add("--algorithm", choices=CHOICES, help="instead of the recipe's; auto and hybrid mean the fastest known")
    add("--rate", type=decimal, help="images/s of one device at the recipe's microbatch, that you measured")
    stored = "rate that bigbatch doctor --json FILE measured (default: the one that doctor kept)"
    add("--profile", type=as_path, metavar="FILE", help=stored)
    add("--input-rate", type=decimal, help="images/s that the loaders of one node deliver, instead of the cluster's")
    add("--images", type=decimal, default=IMAGES, help=f"images of an epoch (default: ImageNet's {IMAGES:,})")
    add("--price", type=decimal, help="price of a GPU for an hour, in any currency: adds the cost")
    add("--deadline", metavar="TIME", help="time limit, such as 1h: names the cheapest number of GPUs within it")
    add("--failure-hours", type=decimal, help="mean time between failures of a node: adds what restarts cost")
    seconds = f"time from a failure to the first new step (default: {RESTART_SECONDS:g})"
    add("--restart-seconds", type=decimal, default=RESTART_SECONDS, help=seconds)
    add("--compare", metavar="A,B", help=f"algorithms side by side: {', '.join(CHOICES)}")
    add("--advise", action="store_true", help="search a better fusion plan for each, and try fp16 on the wire")
    add("--tables", action="store_true", help="also print the losses and the hours of the run")
    add("--json", type=as_path, metavar="FILE", help="all figures, also energy, and bytes and messages sent")
    add("--html", type=as_path, metavar="FILE", help="write all results as one page, like bigbatch report")
    add("--plot", type=as_path, metavar="FILE", help="plot of images per second and GPU, PNG or SVG")
    add("--trace", type=as_path, metavar="FILE", help="trace of the largest step, for ui.perfetto.dev")
    return parser
