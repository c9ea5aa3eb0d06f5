"""The scripts of benchmarks/gpu as cases: each runs in a separate process and leaves its record."""

import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu.inference import FORMS
from benchmarks.gpu.suite.context import TOO_LONG, Context, Found


def measure_inference(context: Context) -> Found:
    """Measure forward alone, folded, in half precision, channels-last and compiled, beside torchvision's model."""
    size, found = context.size, Found()
    options = ["--device", context.device.type, "--rounds", str(size.rounds), *_net(context)]
    if context.is_small:
        options += ["--batches", str(size.batch), "--half", "bf16"]
    if not context.compiles:
        options += ["--only", *(form.name for form in FORMS if not form.compile)]
        found.left_out["compiled"] = TOO_LONG
    record = run_script("inference", options, context)
    found.conditions["precision"] = f"fp32, then {record['conditions']['options']['half']}"
    for each in record["batch_sizes"]:
        for name, form in each["forms"].items():
            figure = f"{name}, batch {each['batch_size']}"
            found.figures[figure] = {"unit": "images/s", **form["images_per_second"]}
            for key, what in (("gain", form.get("gain_over")), ("over_torchvision", "torchvision")):
                if key in form:
                    found.figures[f"{figure} / {what}"] = {"unit": "ratio", **form[key]}
    return found


def measure_recompute(context: Context) -> Found:
    """Measure the curve of memory against time, from no recomputed block to all."""
    size, found = context.size, Found()
    options = ["--batch", str(size.batch), "--repetitions", str(size.rounds), *_net(context)]
    if context.is_small:
        options += ["--blocks", "0", "2"]
    rows, record = [], run_script("recompute", options, context)
    found.conditions |= {
        "precision": record["conditions"]["options"]["precision"],
        "clock": record["conditions"]["clock"],
    }
    for point in record["curve"]:
        found.figures[f"{point['recomputed_blocks']} blocks"] = {"unit": "images/s", **point["images_per_second"]}
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


def run_script(name: str, options: list[str], context: Context) -> dict[str, Any]:
    """Run a script; return its record. Its output goes to standard error at once."""
    out = context.scratch / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", *options, "--out", str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def _net(context: Context) -> list[str]:
    return ["--model", context.size.model, "--image-size", str(context.size.image_size)]
