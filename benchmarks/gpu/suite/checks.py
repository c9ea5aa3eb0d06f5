"""Cases that check bigbatch: the quick start, tests marked gpu, sanitizers, the doctor, training from files, starts."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.images import small_images
from benchmarks.gpu.suite.job import COMPILED, Settings, as_options, in_precision, settings_for
from benchmarks.gpu.suite.scripts import bigbatch, run_script, train
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.input.loaders import dali

ROOT = Path(__file__).resolve().parents[3]
ITS_OWN = "tests/gpu/test_benchmarks.py"
"""The suite's own test, which would run these parts inside one of them."""
PLUGINS = {"xdist": ("-n", "8", "--dist", "worksteal"), "pytest_timeout": ("--timeout", "150")}
"""Options by the package that brings them."""
NO_GPU = "needs a GPU"
TINY: dict[str, Any] = {
    "batch.global_batch_size": 10,
    "batch.microbatch_size": 10,
    "batch.bn_span": 10,
    "model.options.width": 2,
    "data.num_threads": 1,
    "data.probe_seconds": 0,
    "compute.cpu_threads": 1,
}
SHAPES = {
    "data.loader": "synthetic",
    "data.image_size": 32,
    "run.epochs": 1,
    "schedule.warmup_epochs": 0.5,
    "compute.mode": "eager",
}
SEARCHES = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
STARTS = 3
"""Most rounds of starts: each takes a minute or more."""


def measure_quickstart(context: Context) -> Found:
    """Train the quick start for two epochs on the embedded data set, from files."""
    found, root = Found(), context.scratch / "shapes"
    if context.is_small:
        root = small_images(context.scratch)
    else:
        bigbatch("data", "generate", str(root))
    settings: dict[str, Any] = {
        "data.root": str(root),
        "data.loader": "dali" if dali.is_installed() else "torchvision",
        "data.num_threads": len(os.sched_getaffinity(0)),
        "run.epochs": 2,
        "schedule.warmup_epochs": 0.4,
        "run.directory": str(context.scratch / "quickstart"),
    }
    summary = train("quickstart", settings | (TINY if context.is_small else {}))
    found.add("top-1 after two epochs", [summary["top1"]], unit="share")
    found.add("seconds", [summary["seconds"]], unit="seconds")
    found.conditions["loader"] = settings["data.loader"]
    return found


def measure_tests(context: Context) -> Found:
    """Run every test marked gpu; without a GPU collect a file of them."""
    found, report = Found(), context.scratch / "tests.xml"
    if importlib.util.find_spec("pytest") is None:
        found.left_out["tests"] = "needs pytest"
        return found
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-o", f"cache_dir={context.scratch}", "--tb=short"]
    command += ["--continue-on-collection-errors", f"--junitxml={report}"]
    environ = {**os.environ, "BIGBATCH_EXPECT_GPU": "1", "OMP_NUM_THREADS": "1"}
    if context.device.type != "cuda":
        command += ["--collect-only", "tests/gpu/test_saving.py"]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        found.add("collected", [sum(map(int, re.findall(r"\.py: (\d+)$", done.stdout, re.MULTILINE)))], unit="tests")
        found.left_out["tests"] = f"{NO_GPU}: one file is collected"
        return found
    for module, words in PLUGINS.items():
        command += words if importlib.util.find_spec(module) else []
    subprocess.run([*command, f"--ignore={ITS_OWN}", "tests"], cwd=ROOT, env=environ)
    describe_tests(found, report)
    return found


def describe_tests(found: Found, report: Path) -> None:
    """Count the results of a JUnit report, and list the tests that failed."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = [each for each in cases if each.find("skipped") is not None]
    found.add("failed", [len(bad)], unit="tests")
    found.add("passed", [len(cases) - len(bad) - len(skipped)], unit="tests")
    found.add("skipped", [len(skipped)], unit="tests")
    found.tables["failed tests"] = [
        {"test": f"{each.get('classname')}::{each.get('name')}", "message": next(iter(each)).get("message", "")[:120]}
        for each in bad
    ]


def measure_streams(context: Context) -> Found:
    """Train under torch's CUDA sanitizer, which finds kernels that do not wait for each other."""
    return train_under([], {"TORCH_CUDA_SANITIZER": "1"}, {"data.num_synthetic_samples": 1024}, context)


def measure_memory(context: Context) -> Found:
    """Train under compute-sanitizer, which finds accesses outside of allocated memory."""
    if (tool := next(filter(None, map(shutil.which, SEARCHES)), None)) is None:
        return Found(left_out={"compute-sanitizer": "is not on this machine"})
    settings = {"data.num_synthetic_samples": 512, "model.options.width": 4, "compute.cudnn_benchmark": False}
    return train_under([tool, "--tool", "memcheck", "--error-exitcode", "9"], {}, settings, context)


def train_under(tool: list[str], environ: dict[str, str], settings: dict[str, Any], context: Context) -> Found:
    """Train briefly under a tool that ends the process with an exit code if it finds something."""
    found = Found()
    if context.device.type != "cuda":
        found.left_out["sanitizer"] = NO_GPU
        return found
    start = time.perf_counter()
    train(
        "quickstart", {**SHAPES, **settings, "run.directory": str(context.scratch / "run")}, tool=tool, environ=environ
    )
    found.add("seconds without a finding", [time.perf_counter() - start], unit="seconds")
    return found


def measure_doctor(context: Context) -> Found:
    """Time the doctor's quick examination of the recipe for ResNet-50 on generated images."""
    found = Found()
    small: list[str] = []
    if context.is_small:
        settings = settings_for(context.size, batch=context.size.batch, precision=context.precision)
        settings["data.num_synthetic_samples"] = None  # as in the recipe
        small = ["--within", "20", *as_options(settings)]
    start = time.perf_counter()
    words = "doctor --config imagenet/resnet50_8k --data.loader synthetic --quick"
    bigbatch(*words.split(), *small, "--json", str(context.scratch / "doctor.json"))
    found.add("seconds", [time.perf_counter() - start], unit="seconds")
    return found


def measure_feed(context: Context) -> Found:
    """Train ResNet-50 from the user's files beside generated images, by the whole command."""
    found = Found()
    root = context.data or (small_images(context.scratch) if context.is_small else None)
    if root is None:
        found.left_out["feed"] = "needs a data set: name its folder by --data"
        return found
    batch = dict.fromkeys(("batch.global_batch_size", "batch.microbatch_size", "batch.bn_span"), context.size.batch)
    epoch = {"run.epochs": 1, "schedule.warmup_epochs": 1, "schedule.decay_epochs": None, "compute.mode": "eager"}
    small: dict[str, Any] = {}
    if context.is_small:
        small = {"model.name": context.size.model, "data.image_size": context.size.image_size, "compute.cpu_threads": 1}
        small |= {"data.loader": "torchvision", **in_precision(context.precision)}
    options = [str(root), "--ranks", "1", "--repetitions", "1", "--", "--config", "imagenet/resnet50_8k"]
    record = run_script("benchmarks.input.feed", [*options, *as_options(batch | epoch | small)], context)
    found.figures["input wait"] = {"unit": "share", **record["real"]["input_wait_fraction"]}
    found.figures["images from files"] = {"unit": "images/s", **record["real"]["images_per_second"]}
    found.figures["files / generated"] = {"unit": "ratio", **record["real / generated"]}
    return found


def measure_startup(context: Context) -> Found:
    """Start fresh processes of `bigbatch train`. Cold: an empty cache; warm: the one that the cold start filled."""
    found = Found()
    rounds = range(min(STARTS, context.size.rounds))
    found.add("eager", [first_step(context, {}, name=f"eager-{number}") for number in rounds], unit="s")
    if not context.compiles:
        found.left_out["compile"] = TOO_LONG
    else:
        turns = ("cold", "warm")
        seconds = [
            [first_step(context, COMPILED, name=f"{turn}-{number}", cache=f"cache-{number}") for turn in turns]
            for number in rounds
        ]
        for turn, values in zip(turns, zip(*seconds, strict=True), strict=True):
            found.add(f"compile, {turn} cache", values, unit="s")
    return found


def first_step(context: Context, settings: Settings, *, name: str, cache: str = "cache") -> float:
    """Measure seconds from starting the process to the report of its first step."""
    size, folder = context.size, context.scratch / "starting" / name
    whole = {
        **settings_for(size, batch=size.batch, precision=context.precision),
        **settings,
        "compute.mode": "eager",  # the stated mode
        "data.num_synthetic_samples": 2 * size.batch,
        "run.directory": str(folder),
        "run.epochs": 1,
        "run.log_every_steps": 1,
        "run.eval_every_epochs": 1,
        "run.eval_offset_epochs": 0,
        "run.divergence_steps": None,
    }
    command = [sys.executable, "-m", "bigbatch", "train", "--config", "imagenet/resnet50_8k", *as_options(whole)]
    start = time.time()
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(context.scratch / cache)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    return next(float(each["time"]) for each in read_records(RunDir(folder).metrics) if each["kind"] == "train") - start
