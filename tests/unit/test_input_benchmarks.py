"""The benchmarks of the input run, state their conditions, and clean up."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bigbatch.trainer.data.imagenet import read_index

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/input"))  # scripts that import each other by their plain names

import record  # noqa: E402
import startup  # noqa: E402


def run(script, *options):
    command = [sys.executable, str(ROOT / "benchmarks/input" / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_spread_and_its_line():
    values = record.spread([4.0, 1.0, 2.0, 3.0, 10.0])
    assert values == {"n": 5, "median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 10.0}
    assert record.spread([7.0]) == {"n": 1, "median": 7.0, "min": 7.0, "q1": 7.0, "q3": 7.0, "max": 7.0}
    assert "3 images/s" in record.show("ours", values, unit="images/s")
    assert "(1 to 10, n = 5)" in record.show("ours", values, unit="images/s")


def test_the_made_tree_is_a_data_set(tmp_path):
    startup.build_tree(tmp_path, num_pictures=2500)
    index = read_index(tmp_path, "train")
    counts = np.bincount(index.labels_N)
    assert (len(index.paths), len(index.classes)) == (2500, 1000)
    assert (counts[:500] == 3).all()
    assert (counts[500:] == 2).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_startup(tmp_path):
    done = run("startup.py", "--num", 2000, "--repetitions", 2, "--scratch", tmp_path, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["conditions"]["options"]["num"] == "2000"
    assert found["results"]["read_index_seconds"]["n"] == 2
    assert 0 < found["results"]["read_index_seconds"]["min"] < 60
    assert found["results"]["peak_memory_mb"]["median"] > found["results"]["peak_memory_of_read_index_mb"]["median"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert run("startup.py", "--num", 10).returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="binds processes to cores")
def test_decode(tmp_path):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    for number in range(8):
        path = tmp_path / f"set/train/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (number, 0, 0)).save(path)
    small = ("--image-size", 32, "--batch", 4, "--batches", 2, "--repetitions", 2)
    done = run("decode.py", tmp_path / "set", *small, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rates = found["images_per_second_per_core"]
    assert {*rates, *found["conditions"]["left_out"]} == {
        *("our_dali", "our_folder", "bare_dali", "torchvision", "simplejpeg", "limit_pillow_whole_picture")
    }
    assert all(each["n"] == 2 and each["min"] > 0 for each in rates.values())
    assert {f"{ours} / {other}" for ours in ("our_dali", "our_folder") for other in rates if ours != other} == {
        *found["ratios"]
    }
    assert run("decode.py", tmp_path / "set", "--threads", 9999).returncode == 2
