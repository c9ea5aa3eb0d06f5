"""The benchmarks that train or evaluate: what they run, and the figures they make of it."""

import json

import pytest
from benchmark_process import run_benchmark

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
