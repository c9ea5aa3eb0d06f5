"""The benchmarks of the input run, state their conditions, and clean up."""

import argparse
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_process import run_benchmark
from PIL import Image

from benchmarks import record
from benchmarks.input import contestants, decode
from bigbatch.trainer.input.order import read_index

ROOT = Path(__file__).resolve().parents[3]

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


def test_spread_and_the_cpu_have_one_definition():
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
    for name in ("spread", "_?cpu_name", "write_record"):
        assert [file for file, text in texts.items() if re.search(rf"^def {name}\(", text, re.M)] == ["record.py"]
    # a script beside a folder of the same name hides it
    assert not [path for path in (ROOT / "benchmarks").glob("*.py") if path.with_suffix("").exists()]


def test_record_goes_to_its_file_or_to_standard_output(tmp_path, capsys):
    record.write_record(tmp_path / "new/out.json", {"x": 1.23456789})
    record.write_record(None, {"x": 1.23456789})
    assert json.loads((tmp_path / "new/out.json").read_text()) == json.loads(capsys.readouterr().out) == {"x": 1.23457}
    assert record.version_of("no-such-distribution") is None


@linux
@pytest.mark.parametrize(
    ("parse", "argv", "message"),
    [
        *(
            (decode.parse, ["x", f"--{name}", "0"], rf"--{name}: '0': give a whole number, at least 1")
            for name in ("pictures", "image-size", "threads", "batch", "batches", "repetitions")
        ),
        (decode.parse, ["x", "--threads", "9999"], "--threads 9999: this process may use"),
        (decode.parse, ["x", "--device-id", "99"], r"--device-id 99: torch finds \d+ CUDA devices"),
        (decode.parse, ["x", "--contestants", "nobody"], "invalid choice: 'nobody'"),
    ],
)
def test_arguments_that_are_impossible_and_what_is_said_of_them(parse, argv, message, capsys):
    """The catalogue of the benchmarks' messages: the one test that holds their wording."""
    with pytest.raises(SystemExit):
        parse(argv)
    assert re.search(message, capsys.readouterr().err)


def test_load_is_read_before_the_work(monkeypatch):
    """The benchmark's own load would else be told as that of others."""
    done = []

    def stop(*args, **kwargs):
        assert done == ["conditions"]
        raise InterruptedError

    def conditions(options):
        done.append("conditions")
        return {}

    monkeypatch.setattr(sys, "argv", ["script", "x"])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(decode.torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(decode, "conditions", conditions)
    monkeypatch.setattr(decode, "read_index", stop)
    with pytest.raises(InterruptedError):
        decode.main()


# --- decode ---


@pytest.mark.parametrize("threads", [1, 3, 4, 8, 16])
def test_rate_of_a_worker_pool_is_not_changed_by_bursts(threads, monkeypatch):
    """All workers finish at the same moment, once a second: each one's rate is a batch per second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    work = contestants.Work(None, image_size=1, batch=1, threads=threads, batches_per_thread=10)

    def bursts():
        for number in range(work.total_batches):
            clock.now += number % threads == 0
            yield number

    assert decode.seconds_of(bursts(), work) * threads == work.batches
    # what workers have ahead of their consumer lies behind the timed batches
    ahead = work.prefetch_batches * threads
    assert work.total_batches - work.fill_batches - work.batches >= ahead


def test_limit_has_one_threads_work():
    work = contestants.Work(None, image_size=1, batch=1, threads=8, batches_per_thread=10)
    made, left_out = contestants.make_contestants(work, names=["limit_pillow_whole_picture"])
    assert left_out == {}
    assert made["limit_pillow_whole_picture"].work.batches == 10


def test_contestants_all_draw_from_one_subset(images):
    index = read_index(images, "train")
    small = decode.subset(index, number=5)
    assert len(small) == len(set(small.paths)) == 5
    assert small.paths == decode.subset(index, number=5).paths
    assert all(small.classes[label] == Path(path).parent.name for label, path in zip(small.labels_N, small.paths))  # noqa: B905
    assert decode.subset(index, number=999).paths == index.paths
    known = decode.read_all(small)
    num_bytes = sum((images / "train" / path).stat().st_size for path in small.paths)
    assert known == {"pictures": 5, "bytes": num_bytes, "mean_bytes": num_bytes / 5, "mean_megapixels": 0.0048}


class FakeJpeg(SimpleNamespace):
    """simplejpeg by way of Pillow: decodes RGB only, and counts the images that wait."""

    def decode_jpeg(self, data, colorspace, min_height, min_width):
        with self.lock:
            self.calls += 1
        path = self.folder / f"{threading.get_ident()}-{time.monotonic_ns()}"
        path.write_bytes(data)
        image = Image.open(path)
        if image.format != "JPEG" or image.mode == "CMYK":
            raise ValueError("colorspace is not supported")
        return np.array(image.convert(colorspace))


@pytest.fixture
def simplejpeg(tmp_path, monkeypatch):
    folder = tmp_path / "seen"
    folder.mkdir()
    module = FakeJpeg(lock=threading.Lock(), calls=0, folder=folder)
    monkeypatch.setitem(sys.modules, "simplejpeg", module)
    return module


def test_simplejpeg_keeps_batches_in_flight(images, simplejpeg):
    work = contestants.Work(read_index(images, "train"), image_size=8, batch=2, threads=1, batches_per_thread=1)
    batches = contestants.simplejpeg_threads(work)(0)
    assert next(batches).shape == (2, 8, 8, 3)
    deadline = time.monotonic() + 200
    while simplejpeg.calls < 2 * (1 + work.prefetch_batches) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert simplejpeg.calls == 2 * (1 + work.prefetch_batches)  # nobody asked for more than one batch
    assert len(list(batches)) == work.total_batches - 1


def test_simplejpeg_leaves_to_pillow_what_it_cannot_decode(images, simplejpeg):
    Image.new("CMYK", (80, 60), (0, 255, 255, 0)).save(images / "train/0/0.jpg")
    for path in sorted((images / "train").glob("*/*.jpg"))[1:]:
        Image.new("RGB", (80, 60), (255, 0, 0)).save(path, "PNG")
    work = contestants.Work(read_index(images, "train"), image_size=8, batch=4, threads=2, batches_per_thread=1)
    batches = list(contestants.simplejpeg_threads(work)(0))
    assert len(batches) == work.total_batches
    assert np.stack(batches)[..., 0].min() > 200  # red, all of them


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
