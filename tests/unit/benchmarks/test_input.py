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
from error_texts import naming
from PIL import Image

from benchmarks import record
from benchmarks.input import contestants, decode, startup, storage
from bigbatch.trainer.input.order import read_index
from bigbatch.trainer.input.shards import PackedIndex, open_split

ROOT = Path(__file__).resolve().parents[3]

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


@pytest.fixture
def images(tmp_path):
    """A folder with train/<two classes>/<eight pictures>."""
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
        (startup.parse, ["--repetitions", "0"], "--repetitions: '0': give a whole number, at least 1"),
        (startup.parse, ["--num", "10"], "--num: '10': give a whole number, at least 1000"),
        *(
            (storage.parse, ["/", "--split", "tmp", f"--{name}", "0"], f"--{name}: '0': give a whole number")
            for name in ("shard-mb", "threads", "batch")
        ),
        (storage.parse, ["/", "--repetitions", "4"], "--repetitions: '4': give a whole number, at least 5"),
        (storage.parse, ["/", "--split", "none"], "/none: no such folder"),
        (storage.parse, ["/", "--split", "usr", "--scratch", "/proc"], "--scratch /proc: lies on another file system"),
    ],
)
def test_arguments_that_are_impossible_and_what_is_said_of_them(parse, argv, message, capsys):
    """The catalogue of the benchmarks' messages: the one test that holds their wording."""
    with pytest.raises(SystemExit):
        parse(argv)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("script", "argv", "work"),
    [
        (decode, ["x"], "read_index"),
        (startup, [], "build_class_folders"),
        (storage, [str(ROOT), "--split", "tests"], "make_layouts"),
    ],
    ids=["decode", "startup", "storage"],
)
def test_load_is_read_before_the_work(script, argv, work, tmp_path, monkeypatch):
    """The benchmark's own load would else be told as that of others."""
    done = []

    def stop(*args, **kwargs):
        assert done == ["conditions"]
        raise InterruptedError

    def conditions(options):
        done.append("conditions")
        return {}

    scratch = [] if script is decode else ["--scratch", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["script", *argv, *scratch])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(decode.torch, "set_num_threads", lambda number: None)
    for module in (decode, storage, record):
        monkeypatch.setattr(module, "conditions", conditions)
    monkeypatch.setattr(script, work, stop)
    if script is storage and os.stat(tmp_path).st_dev != os.stat(ROOT).st_dev:
        pytest.skip("the temporary folder lies on another file system")
    with pytest.raises(InterruptedError):
        script.main()


# --- startup ---


def test_tree_that_is_made_is_a_data_set(tmp_path):
    startup.build_class_folders(tmp_path, num_images=2500)
    index = read_index(tmp_path, "train")
    counts = np.bincount(index.labels_N)
    assert (len(index.paths), len(index.classes)) == (2500, 1000)
    assert (counts[:500] == 3).all()
    assert (counts[500:] == 2).all()


def test_shards_that_are_made_are_a_packed_data_set(tmp_path):
    num_shards = startup.build_packed(tmp_path, num_images=5000)
    source = open_split(tmp_path, "train")
    assert isinstance(source, PackedIndex)
    assert (len(source), len(source.classes)) == (5000, 1000)
    assert (np.bincount(source.labels_N) == 5).all()
    assert num_shards > 1
    assert f"shard-{num_shards - 1:06d}.tar: picture 00004999" in source.name(4999)
    shards = list((tmp_path / "train").glob("shard-*.tar"))
    assert sum(path.stat().st_size for path in shards) > 5000 * startup.IMAGE_BYTES
    assert sum(path.stat().st_blocks * 512 for path in shards) < 1e6  # holes take no room
    assert source.read(4999) == source.read(0) == startup.an_image()


@pytest.mark.long
@pytest.mark.weekly
@linux
def test_startup(tmp_path):
    options = ("--num", 2000, "--repetitions", 2, "--scratch", tmp_path)
    done = run_benchmark("input.startup", *options, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["conditions"]["options"]["num"] == "2000"
    assert found["conditions"]["file_system"]
    assert set(found["results"]) == {"read_index", "open_split"}
    for figures in found["results"].values():
        assert figures["list_seconds"]["n"] == 2
        assert 0 < figures["list_seconds"]["min"] < figures["first_batch_seconds"]["min"] < 60
        assert figures["peak_memory_mb"]["median"] > figures["added_peak_memory_mb"]["median"] >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.long
def test_startup_process_that_fails_says_why(tmp_path, capfd):
    with pytest.raises(SystemExit, match=naming("startup.py", "read_index", "with 1,")):
        startup.measure_fresh("read_index", tmp_path / "none")
    said = capfd.readouterr().err
    assert said.startswith(f"startup.py: {tmp_path}/none/train: ")
    assert "Traceback" not in said


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
    """simplejpeg by way of Pillow: decodes RGB only, and counts the pictures that wait."""

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
    # a contestant that draws from more than the subset would meet what is no picture
    index = read_index(images, "train")
    small = decode.subset(index, number=5)
    for path in {*index.paths} - {*small.paths}:
        (images / "train" / path).write_text("no picture")
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


# --- storage ---


@pytest.mark.long
@linux
def test_storage(images, tmp_path):
    options = ("--scratch", tmp_path, "--repetitions", 5, "--batch", 4, "--out", tmp_path / "out.json")
    done = run_benchmark("input.storage", images, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rates, facts = found["pictures_per_second"], found["conditions"]
    assert {*rates, *facts["left_out"]} == {"cold", "warm"}
    for state in rates:
        assert {*rates[state]} == {"class_folders", "packed"}
        assert all(each["n"] == 5 and each["min"] > 0 for each in rates[state].values())
        assert found["ratios"][state]["n"] == 5
    assert found["cached_share_before"]["warm"]["class_folders"]["min"] == 1
    if "cold" in rates:
        assert found["cached_share_before"]["cold"]["class_folders"]["max"] <= storage.MOST_CACHED
    assert facts["pictures"] == facts["files"]["class_folders"] == 8
    assert facts["files"]["packed"] == 1
    assert facts["bytes"]["class_folders"] == sum(path.stat().st_size for path in images.glob("train/*/*"))
    assert facts["file_system"]
    assert {path.name for path in tmp_path.iterdir()} == {"set", "out.json"}


@linux
def test_storage_pages_that_were_read_are_in_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    assert storage.pages_in_memory(str(path)).tolist() == [True] * 25
    (tmp_path / "empty").touch()
    assert storage.cached_share([str(path), str(tmp_path / "empty")]) == 1
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    storage.evict([str(path)])
    if record.file_system(tmp_path).startswith(("ext", "xfs", "btrfs")):
        assert storage.cached_share([str(path)]) == 0


@linux
def test_storage_leaves_out_cold_where_nothing_can_be_dropped(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    monkeypatch.setattr(storage, "evict", lambda paths: None)
    left_out = storage.why_not_cold({"packed": storage.Layout(None, (str(path),))})
    assert left_out["cold"].startswith("posix_fadvise leaves 100% of packed in memory")
    monkeypatch.setattr(storage, "evict", lambda paths: path.write_bytes(b""))
    assert storage.why_not_cold({"packed": storage.Layout(None, (str(path),))}) == {}


def test_storage_reads_both_layouts_in_the_same_new_order_each_round(images):
    index = read_index(images, "train")
    seen = []

    class Source:
        labels_N = index.labels_N
        __len__ = staticmethod(lambda: 8)
        name, sizes, close = index.name, index.sizes, index.close

        def read(self, position):
            seen.append(position)
            return index.read(position)

    files = tuple(index.full_path(position) for position in range(8))
    for number in (0, 0, 1):
        turn = storage.read_all(storage.Layout(Source(), files), number=number, threads=1, batch=4)
        assert turn.rate > 0
    assert seen[:8] == seen[8:16] != seen[16:]
    assert sorted(seen[:8]) == sorted(seen[16:]) == list(range(8))
