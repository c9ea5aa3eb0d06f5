"""Speed, memory, largest batch and accuracy of ResNets on images of 32 pixels, by precision: one table.

    python -m benchmarks.gpu.precision --data data/cifar10 --out benchmarks/results/precision-h200.json
    python -m benchmarks.gpu.precision --small --data data/cifar10 --out benchmarks/results/precision-cpu-small.json

Every measurement is a process of its own (precision_case.py tells what it measures); speeds are repeated in turn, each
precision once before any of them twice. A speed-up is of neighbours: fp32's in the same turn. Accuracy is the top-1 of
`bigbatch train --config cifar10` with that model and precision after --epochs, for each of --seeds, on DATA as that
config describes it; without --data there is none. Beside --out it writes a table (.md). What --out
holds already is not measured again, so an interrupted run continues. --small: sizes for a CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.precision_case import settings
from benchmarks.record import at_least, conditions, spread, write_record
from benchmarks.record import run as run_main
from bigbatch.comm.connect import choose_device
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ConfigError
from bigbatch.trainer.config.optimizer import require_hardware
from bigbatch.trainer.config.sections import RESNETS
from bigbatch.trainer.folder.folder import RunDir, writing
from bigbatch.trainer.report.summary import device_name
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

SMALL = {"models": ["resnet18"], "batch": 64, "steps": 3, "untimed": 1, "epochs": 1, "memory_mb": 2000}
CASE = (sys.executable, "-m", "benchmarks.gpu.precision_case")
FREE = ("out", "data", "small")
"""Options that may differ between a run and its continuation."""
WARMUP_SHARE = 5 / 24
"""Share of the epochs, as in the config."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, and write the record and the table."""
    options = parse(argv)
    device = choose_device(ALONE)
    record = start_record(options, device)
    for precision, reason in record["left_out"].items():
        print(f"{precision} is left out: {reason}", file=sys.stderr)
    known = {key_of(each) for each in record["measurements"]}
    for asked in plan(options, left_out=record["left_out"]):
        if key_of(asked) not in known:
            record["measurements"].append({**asked, **measure(asked, options)})
            write_record(options.out, record)
            print(record["measurements"][-1], file=sys.stderr, flush=True)
    record["rows"] = make_rows(record["measurements"])
    text = table(record)
    write_record(options.out, record)
    with writing(path := options.out.with_suffix(".md")):
        path.write_text(text)
    print(text)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--data", type=Path, help="folder with train/<class>/ and val/<class>/ of images of 32 pixels")
    add("--models", nargs="+", choices=RESNETS, default=list(RESNETS), help="default: all")
    add("--precisions", nargs="+", choices=tuple(COMPUTE_DTYPES), default=list(COMPUTE_DTYPES), help="default: all")
    add("--batch", type=at_least(1), default=512, help="images of a step, for the speed (default: %(default)s)")
    add("--steps", type=at_least(1), default=20, help="timed in each repeat (default: %(default)s)")
    add("--untimed", type=at_least(0), default=10, help="steps before those (default: %(default)s)")
    add("--repeats", type=at_least(1), default=5, help="repeats of the speed (default: %(default)s)")
    add("--epochs", type=at_least(1), default=24, help="epochs before the accuracy (default: %(default)s)")
    add("--seeds", nargs="+", type=at_least(0), default=[0], help="seeds of the accuracy (default: 0)")
    add("--train-batch", type=at_least(1), default=512, help="global batch, for the accuracy (default: %(default)s)")
    add("--memory-mb", type=at_least(1), default=500, help="for the largest batch of a CPU (default: %(default)s)")
    add("--no-largest", action="store_true", help="leave out the search for the largest batch")
    add("--small", action="store_true", help="other defaults, for a CPU: " + str(SMALL))
    if parser.parse_known_args(argv)[0].small:
        parser.set_defaults(**SMALL)
    options = parser.parse_args(argv)
    if options.data and not (options.data / "train").is_dir():
        parser.error(f"--data: {options.data / 'train'} is not there: name a prepared data set, or none")
    return options


def start_record(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Read the record of --out, or make an empty one with the present conditions."""
    facts = {**conditions(options), "device": device_name(device)}
    facts["options"] = {key: value for key, value in facts["options"].items() if key not in FREE}
    if not options.out.exists():
        left_out = {name: why for name in options.precisions if (why := why_not(name, device))}
        return {"benchmark": "precision", "conditions": facts, "left_out": left_out, "measurements": []}
    record: dict[str, Any] = json.loads(options.out.read_text())
    for key in ("options", "device", "torch", "commit"):
        if record["conditions"][key] != facts[key]:
            raise SystemExit(f"{options.out} was measured with another {key}: name another --out, or remove it")
    return record


def why_not(precision: str, device: torch.device) -> str | None:
    """Return why this device cannot be measured in that precision; None if it can."""
    if device.type == "cpu":
        return "a CPU trains in fp32 then" if precision == "tf32" else None
    try:
        require_hardware(
            precision, capability=torch.cuda.get_device_capability(device), device=torch.cuda.get_device_name(device)
        )
    except ConfigError as error:
        return str(error)
    return None


def plan(options: argparse.Namespace, *, left_out: dict[str, str]) -> Iterator[dict[str, Any]]:
    """List the measurements to make, in order."""
    precisions = [name for name in options.precisions if name not in left_out]
    for model in options.models:
        for repeat in range(options.repeats):
            for precision in precisions if repeat % 2 else precisions[::-1]:
                yield {"what": "speed", "model": model, "precision": precision, "turn": repeat}
        for precision in () if options.no_largest else precisions:
            yield {"what": "largest", "model": model, "precision": precision, "turn": 0}
        for seed in options.seeds if options.data else ():
            for precision in precisions:
                yield {"what": "accuracy", "model": model, "precision": precision, "turn": seed}


def key_of(measurement: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values that distinguish a measurement."""
    return tuple(measurement[key] for key in ("what", "model", "precision", "turn"))


def measure(asked: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    if asked["what"] == "accuracy":
        return {"top1": train(asked, options)}
    words = [asked["what"], "--model", asked["model"], "--precision", asked["precision"]]
    for key in ("batch", "steps", "untimed", "memory_mb"):
        words += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    if asked["what"] == "largest":  # libraries of a CPU may crash when its memory ends
        return {"largest": None, **json.loads(run(*CASE, *words, may_crash=True))}
    figures: dict[str, Any] = json.loads(run(*CASE, *words))
    return figures


def train(asked: dict[str, Any], options: argparse.Namespace) -> float:
    """Train, and return top-1 at the end of a run."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            **settings(asked["model"], asked["precision"]),
            "compute.mode": "eager",  # the same way in each precision
            "run.directory": folder,
            "run.seed": asked["turn"],
            "run.epochs": options.epochs,
            "run.eval_every_epochs": options.epochs,
            "schedule.warmup_epochs": options.epochs * WARMUP_SHARE,
            "data.root": options.data,
            "data.num_classes": len([each for each in (options.data / "train").iterdir() if each.is_dir()]),
            "batch.global_batch_size": options.train_batch,
            "batch.microbatch_size": options.train_batch,
        }
        words = [f"--{key}={value}" for key, value in overrides.items()]
        run(sys.executable, "-m", "bigbatch", "train", "--config", "cifar10", *words)
        return float(json.loads(RunDir(Path(folder)).summary.read_text())["top1"])


def run(*command: str, may_crash: bool = False) -> str:
    """Return the last line that a command prints; an empty object if a signal ended it and that is allowed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0 and may_crash:
        return "{}"
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}failed; the same command continues from here")
    return done.stdout.splitlines()[-1]


def make_rows(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a row for each model and precision."""
    rows = []
    for model, precision in dict.fromkeys((each["model"], each["precision"]) for each in measurements):
        of = partial(by_turn, measurements, model=model)
        speeds = of("speed", "images_per_second", precision=precision)
        base = of("speed", "images_per_second", precision="fp32")
        ratios = [speeds[turn] / base[turn] for turn in speeds if turn in base]
        top1s = list(of("accuracy", "top1", precision=precision).values())
        rows.append(
            {
                "model": model,
                "precision": precision,
                "images_per_second": spread(list(speeds.values())),
                "speedup": spread(ratios) if ratios else None,
                "peak_mb": max(of("speed", "peak_mb", precision=precision).values()),
                "largest": of("largest", "largest", precision=precision).get(0),
                "top1": spread(top1s) if top1s else None,
            }
        )
    return rows


def by_turn(
    measurements: Sequence[dict[str, Any]], what: str, key: str, *, model: str, precision: str
) -> dict[int, Any]:
    """Collect by turn a figure of a model in a precision."""
    chosen = [each for each in measurements if key_of(each)[:3] == (what, model, precision)]
    return {each["turn"]: each[key] for each in chosen}


def table(record: dict[str, Any]) -> str:
    """Write Markdown: medians, and the extremes of repeated measurements."""
    facts = record["conditions"]
    options = facts["options"]
    has_search = any(each["what"] == "largest" for each in record["measurements"])
    lines = [
        f"{facts['device']}, {facts['cpu']}, torch {facts['torch']}, commit {facts['commit']}, load average of others "
        f"{facts['load_average']:.1f}; speed and memory at {options['batch']} images a step; accuracy after "
        f"{options['epochs']} epochs. Median (smallest to largest), n = {options['repeats']} speeds.",
        "",
        "| model | precision | images/s | of fp32 | peak memory (MB) | largest microbatch | top-1 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        top1 = row["top1"]
        cells = [
            row["model"],
            row["precision"],
            show(row["images_per_second"], "{:,.0f}"),
            show(row["speedup"], "{:.2f}"),
            f"{row['peak_mb']:,.0f}",
            str(row["largest"] or ("not found" if has_search else "not searched")),
            f"{100 * top1['median']:.1f}% (n = {top1['n']})" if top1 else "not measured",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{name}: left out, {reason}" for name, reason in record["left_out"].items()]
    return "\n".join(lines) + "\n"


def show(values: dict[str, float] | None, form: str) -> str:
    if values is None:
        return "not measured"
    return form.format(values["median"]) + f" ({form.format(values['min'])} to {form.format(values['max'])})"


if __name__ == "__main__":
    run_main(main)
