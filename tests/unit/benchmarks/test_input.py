"""The benchmarks of the input run, state their conditions, and clean up."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from benchmark_process import run_benchmark
from PIL import Image

from benchmarks import record
from benchmarks.input import contestants, decode, plot
from bigbatch.trainer.input.order import read_index

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


@pytest.fixture
def images(tmp_path):
    """A folder with train/<two classes>/<eight images>."""
    for number in range(8):
        path = tmp_path / f"set/train/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (number, 0, 0)).save(path)
    return tmp_path / "set"


# --- what all share ---


def test_spread_and_its_line():
    values = record.spread([4.0, 1.0, 2.0, 3.0, 10.0])
    assert values == {"n": 5, "median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 10.0}
    assert record.spread([7.0]) == {"n": 1, "median": 7.0, "min": 7.0, "q1": 7.0, "q3": 7.0, "max": 7.0}
    assert "3 images/s" in record.show("ours", values, unit="images/s")
    assert "(1 to 10, n = 5)" in record.show("ours", values, unit="images/s")


# --- decode ---


@pytest.mark.long
@pytest.mark.weekly
@linux
def test_decode(images, tmp_path):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    # a contestant that draws from more than the subset would meet what is no image
    index = read_index(images, "train")
    small = decode.subset(index, number=5)
    for path in {*index.paths} - {*small.paths}:
        (images / "train" / path).write_text("no image")
    options = ("--pictures", 5, "--image-size", 32, "--batch", 4, "--batches", 2, "--repetitions", 2)
    done = run_benchmark("input.decode", images, *options, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rates, facts = found["images_per_second_per_core"], found["conditions"]
    assert {*rates, *facts["left_out"]} == {*contestants.MAKERS}
    assert all(each["n"] == 2 and each["min"] > 0 for each in rates.values())
    assert {f"{ours} / {other}" for ours in ("our_dali", "our_pillow") for other in rates if ours != other} == {
        *found["ratios"]
    }
    assert found["draw_microseconds_per_image"]["n"] == 2
    assert (facts["pictures"], facts["mean_megapixels"], len(facts["pinned_cores"])) == (5, 0.0048, 1)


def test_decode_every_contestant_has_a_name_in_the_figure():
    assert {*contestants.MAKERS} <= {*plot.LABELS}


# --- conditions ---


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Path("/far/away/set"), "set"),
        (Path("../data/set"), "set"),
        (Path("data/../../set"), "set"),
        (Path("data/set"), "data/set"),
        ("/far/away/set", "set"),
        ("1/2", "1/2"),
        (None, "None"),
        (3, "3"),
        (["/far/a.yaml", "--data.root=/far/a=b", "--run.epochs=1"], "['a.yaml', '--data.root=a=b', '--run.epochs=1']"),
        (("a", "b"), "('a', 'b')"),
    ],
)
def test_conditions_tell_no_place_of_this_machine(value, shown):
    options = argparse.Namespace(option=value, out=Path("/far/out.json"))
    assert record.conditions(options)["options"] == {"option": shown}
