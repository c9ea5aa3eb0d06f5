"""The other benchmarks' scripts as cases: each runs in this process with its record in the case's folder."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.images import like_imagenet, small_images
from benchmarks.gpu.suite.job import Settings, as_options
from bigbatch.trainer.config.sections import RESNETS

DECODED = 2000
"""Number of images that are generated for the decoders without --data."""


def measure_inference(context: Context) -> Found:
    """Measure forward alone, folded, in half precision, channels-last and compiled, beside torchvision's model."""
    size, found = context.size, Found()
    options = ["--device", context.device.type, "--rounds", str(size.rounds), *_net(context)]
    if context.is_small:
        options += ["--batches", str(size.batch), "--half", "bf16"]
    if not context.compiles:
        from benchmarks.gpu.inference import FORMS

        options += ["--only", *(form.name for form in FORMS if not form.compile)]
        found.left_out["compiled"] = TOO_LONG
    record = run_script("benchmarks.gpu.inference", options, context)
    found.conditions["precision"] = f"fp32, then {record['conditions']['options']['half']}"
    for each in record["batch_sizes"]:
        for name, form in each["forms"].items():
            figure = f"{name}, batch {each['batch_size']}"
            found.keep(figure, form["images_per_second"], unit="images/s")
            for key, what in (("gain", form.get("gain_over")), ("over_torchvision", "torchvision")):
                if key in form:
                    found.keep(f"{figure} / {what}", form[key], unit="ratio")
    return found


def measure_recompute(context: Context) -> Found:
    """Measure the curve of memory against time, from no recomputed block to all."""
    size, found = context.size, Found()
    options = ["--batch", str(size.batch), "--repetitions", str(size.rounds), *_net(context)]
    if context.is_small:
        options += ["--blocks", "0", "2", "--precision", context.precision]
    rows, record = [], run_script("benchmarks.gpu.recompute", options, context)
    found.conditions |= {
        "precision": record["conditions"]["options"]["precision"],
        "clock": record["conditions"]["clock"],
    }
    for point in record["curve"]:
        found.keep(f"{point['recomputed_blocks']} blocks", point["images_per_second"], unit="images/s")
        peak_bytes = point["peak_bytes"]
        rows.append(
            {
                "blocks": point["recomputed_blocks"],
                "kept for backward, GB": point["kept_bytes"] / 1e9,
                "peak, GB": None if peak_bytes is None else peak_bytes / 1e9,
                "time, of 0 blocks": point["relative_time"]["median"],
            }
        )
    found.tables["curve"] = rows
    return found


def measure_decode(context: Context) -> Found:
    """Measure images/s per core of our loaders, DALI's own and torchvision's, decoded on the GPU if there is one."""
    made = small_images if context.is_small else lambda scratch: like_imagenet(scratch, num_images=DECODED)
    root, found = context.data or made(context.scratch), Found()
    rounds, cores = min(2, context.size.rounds), len(os.sched_getaffinity(0))
    options = [str(root), "--threads", str(min(8, cores)), "--batches", str(rounds), "--repetitions", str(rounds)]
    if context.device.type == "cuda":
        options += ["--device-id", "0"]
    if context.is_small:
        options += ["--image-size", "32", "--batch", "2", "--contestants", "our_pillow"]
    else:
        options += ["--contestants", "our_dali", "our_pillow", "bare_dali", "torchvision"]
    record = run_script("benchmarks.input.decode", options, context)
    found.left_out |= record["conditions"]["left_out"]
    for name, rate in record["images_per_second_per_core"].items():
        found.keep(name, rate, unit="images/s/core")
    for name, ratio in record["ratios"].items():
        found.keep(name, ratio, unit="ratio")
    return found


def measure_reducer(context: Context) -> Found:
    """Measure steps with the gradient reducer beside steps without, eager and in a CUDA graph."""
    found, turns = Found(), 1 if context.is_small else 10
    options = ["--device", context.device.type, "--repetitions", str(turns), "--steps", str(min(5, context.size.steps))]
    options += ["--batch", "2", "--image-size", "32"] if context.is_small else []
    record = run_script("benchmarks.comm.reducer_overhead", options, context)
    for kind, result in record["results"].items():
        found.keep(f"{kind}, with the reducer", result["reducer_seconds"], unit="s")
        found.keep(f"{kind}, with / without", result["ratio"], unit="ratio")
    return found


def measure_lars(context: Context) -> Found:
    """Measure LARS steps over all weights beside other implementations and SGD."""
    found, model = Found(), "resnet9" if context.is_small else context.size.model
    options = ["--device", context.device.type, "--models", model, "--repeats", str(10 if not context.is_small else 1)]
    options += ["--bandwidth-mb", "1"] if context.is_small else []
    results = run_script("benchmarks.largebatch.lars_step", options, context)["models"][model]
    found.left_out |= results["left_out"]
    for name, values in results["milliseconds"].items():
        found.keep(name, {key: each if key == "n" else each / 1e3 for key, each in values.items()}, unit="s")
    for name, values in results["share_of_bandwidth"].items():
        found.keep(f"{name}, share of bandwidth", values, unit="share")
    return found


def measure_precisions(context: Context) -> Found:
    """Measure training steps of five depths at 32 pixels by precision."""
    found, options = Found(), ["--no-largest", "--repeats", str(min(3, context.size.rounds))]
    if context.is_small:
        words = "--small --steps 1 --untimed 0 --batch 32 --precisions fp32 --models"
        options += [*words.split(), context.size.model]
    else:
        options += ["--models", *RESNETS]
    record = run_script("benchmarks.gpu.precision", options, context)
    found.left_out |= record["left_out"]
    for row in record["rows"]:
        found.keep(f"{row['model']} {row['precision']}", row["images_per_second"], unit="images/s")
        found.keep(f"{row['model']} {row['precision']} / fp32", row["speedup"], unit="ratio")
    return found


def run_script(module: str, options: Sequence[str], context: Context) -> dict[str, Any]:
    """Run a benchmark's main; return its record."""
    out = context.scratch / f"{module}.json"
    import_module(module).main(["--out", str(out), *options])
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def bigbatch(*words: str, tool: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
    """Run a command of bigbatch in a process of its own, its output to standard error."""
    command = [*tool, sys.executable, "-m", "bigbatch", *words]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **(environ or {})})


def train(config: str, settings: Settings, **how: Any) -> dict[str, Any]:
    """Train in a process of its own, its folder among the settings; return its summary. how: as bigbatch takes it."""
    bigbatch("train", "--config", config, *as_options(settings), **how)
    summary: dict[str, Any] = json.loads((Path(settings["run.directory"]) / "summary.json").read_text())
    return summary


def _net(context: Context) -> list[str]:
    return ["--model", context.size.model, "--image-size", str(context.size.image_size)]
