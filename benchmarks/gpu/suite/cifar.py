"""CIFAR-10 to 94%: our recipe's training beside airbench94's, on the same images, in turn."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.suite import checks, scripts
from benchmarks.gpu.suite.context import Context, Found
from benchmarks.gpu.suite.images import small_images
from benchmarks.record import ratios
from bigbatch.errors import ConfigError
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.formats import open_image

RECIPE = "cifar10_10epochs"
SCRIPTS = ("legacy/airbench94.py", "airbench94.py")
"""Path of the script in a checkout, since March 2025 and before."""
CHILD = Path(__file__).with_name("airbench_child.py")
TINY = checks.TINY | {
    "run.epochs": 9,
    "optimizer.precision": "fp32",
    "optimizer.loss_scale": None,
    "optimizer.loss_scale_growth_steps": None,
}


def measure(context: Context) -> Found:
    """Race each seed in fresh processes. Seconds are of training with its evaluation, not of reading images."""
    found = Found()
    root = context.cifar or (small_images(context.scratch, side=32) if context.is_small else None)
    if root is None:
        found.left_out["cifar"] = "needs CIFAR-10 in class folders: name the folder by --cifar"
        return found
    script, why_not = find_script(context)
    if script is None:
        found.left_out["airbench94"] = why_not
    else:
        as_tensors(root, context.scratch / "cifar10")
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "airbench94": []}
    for seed in range(1 if context.is_small else context.seeds):
        runs["ours"].append(train(context, root, seed=seed))
        if script is not None:
            runs["airbench94"].append(airbench(script, context.scratch, seed=seed))
    describe(found, **runs)
    return found


def describe(found: Found, *, ours: list[dict[str, Any]], airbench94: list[dict[str, Any]]) -> None:
    """Describe times and accuracies; ratios of the two for each seed."""
    for name, runs in ((RECIPE, ours), ("airbench94", airbench94)):
        for key, unit in (("seconds", "s"), ("first_seconds", "s"), ("process_seconds", "s"), ("top1", "share")):
            if values := [run[key] for run in runs if key in run]:
                found.add(f"{name} {key}", values, unit=unit)
    for key in ("seconds", "first_seconds") if airbench94 else ():
        ratio = ratios([run["seconds"] for run in ours], [run[key] for run in airbench94])
        found.add(f"{RECIPE} seconds / airbench94 {key}", ratio, unit="ratio")


def train(context: Context, root: Path, *, seed: int) -> dict[str, Any]:
    """Train our recipe in a separate process; return its summary's seconds and accuracy, and the process's seconds."""
    folder = context.scratch / f"ours-{seed}"
    # the recipe's own mode: a first start with auto would measure others
    settings = {"data.root": str(root), "run.directory": str(folder), "run.seed": seed, "compute.mode": "eager"}
    settings |= TINY if context.is_small else {}
    start = time.perf_counter()
    summary = scripts.train(RECIPE, settings)
    seconds = time.perf_counter() - start
    return {"seconds": summary["seconds"], "process_seconds": seconds, "top1": summary["top1"]}


def find_script(context: Context) -> tuple[Path | None, str]:
    """Find airbench94.py, or why it does not take part. Raises: ConfigError if --airbench is no such checkout."""
    if context.airbench is None:
        return None, "needs a checkout of KellerJordan/cifar10-airbench: name it by --airbench"
    found = [context.airbench / name for name in SCRIPTS if (context.airbench / name).is_file()]
    if not found:
        raise ConfigError(f"--airbench {context.airbench} holds neither {' nor '.join(SCRIPTS)}")
    return (found[0], "") if context.device.type == "cuda" else (None, "airbench94 runs on CUDA alone")


def airbench(script: Path, folder: Path, *, seed: int) -> dict[str, Any]:
    """Run airbench94 by its own clock: first_seconds of its warm-up run, seconds of the next one; its accuracy."""
    command = [sys.executable, str(CHILD), str(script.resolve()), str(seed)]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def as_tensors(root: Path, folder: Path) -> None:
    """Write train.pt and test.pt as airbench94 keeps them: images (N, 32, 32, 3) uint8, labels, names of the classes.

    Shuffled, as the archive is and class folders are not: it takes its whitening from the first 5,000.
    """
    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train.pt"), ("val", "test.pt")):
        source = open_split(root, split)
        order_N = np.random.default_rng(0).permutation(len(source))
        images = [
            np.asarray(open_image(source.read(position), path=source.name(position)).convert("RGB"))
            for position in order_N.tolist()
        ]
        content = {
            "images": torch.from_numpy(np.stack(images)),
            "labels": torch.from_numpy(source.labels_N[order_N]),
            "classes": list(source.classes),
        }
        torch.save(content, folder / name)
