"""The benchmarks that train or evaluate: what they run, and the figures they make of it."""

import json

import pytest
from benchmark_process import run_benchmark

from benchmarks.input import feed
from bigbatch.trainer.datasets.generated import write_dataset

TINY = {
    "data.image_size": 32,
    "data.loader": "torchvision",
    "data.probe_seconds": 0.1,
    "model.options.width": 4,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.log_every_steps": 1,
    "run.epochs": 1,
    "schedule.warmup_epochs": 0,
}
OPTIONS = ["--config", "quickstart", *(text for key, value in TINY.items() for text in (f"--{key}", str(value)))]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=8, val_per_class=3)
    return root


def test_feed_compares_runs_of_one_repetition():
    common = {"device": "cpu", "precision": "fp32", "loader": "dali", "world_size": 2}
    rates = dict.fromkeys(feed.UNITS, 1.0)
    summaries = {
        "real": [common | rates | {"images_per_second": rate} for rate in (90.0, 50.0, 30.0)],
        "generated": [common | {"images_per_second": rate} for rate in (100.0, 50.0, 60.0)],
    }
    found = feed.describe(summaries)
    assert found["real / generated"] == {"n": 3, "median": 0.9, "min": 0.5, "q1": 0.7, "q3": 0.95, "max": 1.0}
    assert found["real"]["images_per_second"]["median"] == 50.0
    assert found["generated_images_per_second"]["max"] == 100.0


@pytest.mark.long
@pytest.mark.weekly
def test_feed(shapes, tmp_path):
    out = tmp_path / "feed.json"
    done = run_benchmark("input.feed", shapes, "--ranks", 1, "--repetitions", 1, "--out", out, "--", *OPTIONS)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["conditions"]["images"] == 80
    assert 0 < found["real"]["input_wait_fraction"]["median"] < 1
    assert found["real"]["loader_images_per_second"]["median"] > 0
    assert found["real / generated"]["median"] > 0


@pytest.mark.long
@pytest.mark.weekly
def test_wait_for_a_late_server_is_measured_beside_the_disk(tmp_path):
    out = tmp_path / "latency.json"
    done = run_benchmark("input.s3_latency", "--ranks", 1, "--repetitions", 1, "--epochs", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["input_wait_fraction"]
    assert all(0 < found[where]["median"] < 1 for where in ("s3", "disk"))
