"""The input measured on its own: known costs give known rates, and a run does not notice that it was measured."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_images import encoded, smooth_image, with_bad_tables, write

from bigbatch.errors import DataError
from bigbatch.trainer import train
from bigbatch.trainer.augment.crops import center_crop
from bigbatch.trainer.build import job
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.loaders import pillow
from bigbatch.trainer.input.loaders.encoded import ImageLoader, as_batch, make_image_loader
from bigbatch.trainer.input.loaders.probe import NUM_KEPT, probe_input
from bigbatch.trainer.input.loaders.synthetic import SyntheticLoader
from bigbatch.trainer.input.order import eval_requests, read_index
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.input.reading import EncodedBatch
from bigbatch.trainer.input.report import InputWait, MeasuredInput, hints, input_settings, limiting_stage, slowest_stage

SIZE = 8
CPU = torch.device("cpu")
DATA = encoded(smooth_image(0, width=48, height=36))


class Clock:
    """A clock that advances only by stated costs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Parts:
    """A loader of two stages, and what comes after it; each costs so many seconds per batch of B images."""

    def __init__(self, *, read: float, decode: float, copy: float, augment: float, num_images: int = 4) -> None:
        self.costs = {"read": read, "decode": decode, "copy": copy, "augment": augment}
        self.num_images = num_images
        self.clock = Clock()
        self.asked: list[int] = []
        self.num_loads = 0
        self.bad = SimpleNamespace(reasons={})
        part: Any = self
        self.loader = ImageLoader(part, SimpleNamespace(decode=self._decode))

    def requests(self) -> Iterator[Request]:
        self.num_loads += 1
        return (Request(epoch, np.arange(self.num_images), np.ones(self.num_images, bool)) for epoch in range(500))

    def read(self, requests: Any) -> Iterator[EncodedBatch]:
        for request in requests:
            self.asked.append(request.epoch)
            self.clock.now += self.costs["read"]
            yield self._encoded(request)

    def interrupt(self) -> None:
        """Nothing is read ahead."""

    def _decode(self, batches: Iterator[EncodedBatch]) -> Iterator[Batch]:
        for batch in batches:
            self.clock.now += self.costs["decode"]
            yield as_batch(batch, torch.zeros(self.num_images, SIZE, SIZE, 3, dtype=torch.uint8))

    def _encoded(self, request: Request) -> EncodedBatch:
        B = self.num_images
        labels_B, boxes_B4 = np.zeros(B, np.int64), np.zeros((B, 4), np.int32)
        return EncodedBatch(
            *(request, list(range(B)), [DATA] * B, ["0.jpg"] * B, boxes_B4, request.valid_B, labels_B),
            *(request.valid_B, SIZE, ()),
        )

    def copy(self, batch: Batch) -> torch.Tensor:
        self.clock.now += self.costs["copy"]
        return batch.images_BCHW.to("meta")  # a device that every machine has, besides its CPU

    def __call__(self, batch: Batch) -> Batch:
        self.clock.now += self.costs["augment"]
        return batch

    def probe(self, *, seconds: float, num_fill: int = 2) -> Any:
        prepare: Any = self
        return probe_input(
            self.loader, self.requests, prepare=prepare, seconds=seconds, num_fill=num_fill, clock=self.clock
        )


def test_probe_rates_are_those_of_known_costs() -> None:
    parts = Parts(read=0.002, decode=0.006, copy=0.001, augment=0.004)
    probe = parts.probe(seconds=1.0)
    expected = {"loader": 4 / 0.008, "read": 4 / 0.002, "decode": 4 / 0.006, "copy": 4 / 0.001, "augment": 4 / 0.004}
    assert probe.rates == pytest.approx(expected)
    assert slowest_stage(probe.rates) == "decode"
    assert probe.sizes == ((36, 48),) * 4 * NUM_KEPT
    assert 0.75 < parts.clock.now < 1.1


def test_probe_batches_that_take_longer_than_the_time_are_counted_once() -> None:
    read, decode, copy, augment = 100.0, 70.0, 50.0, 30.0
    parts = Parts(read=read, decode=decode, copy=copy, augment=augment)
    assert parts.probe(seconds=1.0).rates == pytest.approx(
        {"loader": 4 / 170, "read": 4 / 100, "decode": 4 / 70, "copy": 4 / 50, "augment": 4 / 30}
    )
    # two batches in each part; besides, two are read for the decoder, and one is copied for augmentation
    two_each = 2 * (read + decode) + 2 * read + 2 * decode + 2 * copy + 2 * augment
    assert parts.clock.now == two_each + 2 * read + copy


def test_probe_reading_is_measured_on_images_not_read_before() -> None:
    parts = Parts(read=0.01, decode=0.01, copy=0.01, augment=0.01)
    parts.probe(seconds=1.0)
    again = [epoch for number, epoch in enumerate(parts.asked) if epoch in parts.asked[:number]]
    assert len(again) == NUM_KEPT, "those that the decoder is fed with"
    assert sorted(set(parts.asked)) == list(range(len(set(parts.asked))))
    assert len(set(parts.asked)) > 25


def test_probe_requests_begin_anew_where_they_are_few() -> None:
    parts = Parts(read=0.0001, decode=0.0001, copy=0.01, augment=0.01)
    parts.probe(seconds=1.0)
    assert parts.num_loads > 2
    assert len(parts.asked) > 1000


def test_probe_a_loader_that_reads_nothing_has_neither_read_nor_decode_nor_copy() -> None:
    loader = SyntheticLoader(num_classes=2, image_size=lambda epoch: SIZE, microbatch_size=4, device=CPU)
    prepare = PrepareBatch(normalize=lambda images_BCHW: images_BCHW / 255, device=CPU)
    requests = Parts(read=0, decode=0, copy=0, augment=0).requests
    probe = probe_input(loader, requests, prepare=prepare, seconds=0.02, num_fill=2)
    assert probe is not None
    assert (*(probe.rates[stage] for stage in ("read", "decode", "copy")), probe.sizes) == (None, None, None, ())
    assert probe.rates["loader"] > 0
    assert slowest_stage(probe.rates) == "augment"


@pytest.fixture
def index(tmp_path: Path) -> Any:
    files = {f"train/{number % 2}/{number}.jpg": encoded(smooth_image(number)) for number in range(8)}
    return read_index(write(tmp_path, files), "train")


def image_loader(index: Any, **changed: Any) -> ImageLoader:
    settings = {
        "crop": center_crop(),
        "image_size": SIZE,
        "microbatch_size": 4,
        "num_threads": 2,
        "prefetch_batches": 2,
    }
    return make_image_loader("torchvision", index, **{**settings, "patience_seconds": 0.0, **changed})


def epoch() -> Iterator[Request]:
    return eval_requests(num_samples=8, microbatch_size=4, rank=0, world_size=1)


def probed(loader: ImageLoader, **clock: Any) -> Any:
    prepare = PrepareBatch(normalize=lambda images_BCHW: images_BCHW / 255, device=CPU)
    return probe_input(loader, epoch, prepare=prepare, seconds=0.3, num_fill=4, **clock)


class Ticking(Clock):
    """Continues a little with each look: what costs nothing has a rate, too."""

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


def quickstart(root: Path) -> Config:
    return train.load_config(["--config", "quickstart", f"--data.root={root}", "--data.loader=torchvision"])


@pytest.mark.parametrize(
    ("stage", "advice"), [("read", "pack the images into shards"), ("decode", "raise data.num_threads (1 now")]
)
def test_probe_a_slow_source_and_a_heavy_decoder_are_found(
    stage: str, advice: str, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name = (type(index), "read") if stage == "read" else (pillow, "decoded_box")
    fast, clock = getattr(where, name), Ticking()

    def slow(*arguments: Any) -> Any:
        with lock:
            clock.now += 0.05
        return fast(*arguments)

    lock = threading.Lock()
    monkeypatch.setattr(where, name, slow)
    probe = probed(image_loader(index), clock=clock)
    rates = probe.rates
    # 50 ms for each; at least one is counted, and up to three batches of four that were ready before
    assert 0 < rates[stage] <= (1 + 3 * 4) / 0.05
    assert rates[stage] < min(rates["decode" if stage == "read" else "read"], rates["augment"])
    assert rates["copy"] is None
    assert slowest_stage(rates) == stage
    waited = InputWait(wait_fraction=0.9, compute_images_per_second=1e9, steps=100)
    settings = input_settings(quickstart(tmp_path), sizes=probe.sizes, num_cores=2, is_on_gpu=False, is_packed=False)
    assert advice in hints(waited, MeasuredInput((rates,), settings), was_probed=True)[0]


def threads_of_loaders() -> set[threading.Thread]:
    """All but the process's clock, and the stores of earlier tests, which may end meanwhile."""
    return {each for each in threading.enumerate() if each.name not in ("bigbatch-store", "awake-clock")}


def test_probe_a_probed_loader_is_as_before(index: Any) -> None:
    loader, before = image_loader(index), threads_of_loaders()
    fresh = [batch.images_BCHW.clone() for batch in loader.load(epoch())]
    under_way = loader.load(epoch())
    next(under_way)
    assert probed(loader) is not None
    assert list(under_way) == [], "the iterator of an earlier load has ended"
    assert threads_of_loaders() == before
    assert all(torch.equal(a.images_BCHW, b) for a, b in zip(loader.load(epoch()), fresh, strict=True))


@pytest.mark.parametrize("damage", [b"hello", None])  # seen by its header, or only by the decoder
def test_probe_bad_images_are_left_to_training(damage: bytes | None, index: Any) -> None:
    path = Path(index.name(5))
    path.write_bytes(damage or with_bad_tables(path.read_bytes()))
    assert probed(image_loader(index)) is None
    skipping = image_loader(index, max_skipped=1)
    assert probed(skipping) is not None
    assert skipping.reader.bad.reasons == {}
    assert [len(batch.replaced) for batch in skipping.load(epoch())] == [0, 1]
    too_few = image_loader(index, max_skipped=0)
    assert probed(too_few) is None
    with pytest.raises(DataError, match=r"data\.max_skipped=0"):
        list(too_few.load(epoch()))


TINY = {
    "data.image_size": 32,
    "data.bind_numa": "false",
    "model.options.width": 2,
    "batch.global_batch_size": 32,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.epochs": 1,
    "run.log_every_steps": 1,
    "run.eval_every_epochs": 10,
    "schedule.warmup_epochs": 1,
}


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny data set; runs in this process leave its threads and memory as they are."""
    monkeypatch.setattr(job, "set_up_process", lambda communicator, **_: None)
    write_dataset(tmp_path / "shapes", train_per_class=10, val_per_class=2, side_pixels=(36, 48))
    return tmp_path / "shapes"


def run(root: Path, *, probe_seconds: float, loader: str = "torchvision", **overrides: object) -> RunDir:
    folder = root.parent / f"{loader}-{probe_seconds:g}"
    more = {"data.root": root, "run.directory": folder, "data.loader": loader, "data.probe_seconds": probe_seconds}
    keys = {**TINY, **more, **{key.replace("__", "."): value for key, value in overrides.items()}}
    assert train.main(["--config", "quickstart", *(f"--{key}={value}" for key, value in keys.items())]) == 0
    return RunDir(folder)


def state(rundir: RunDir) -> dict[str, Any]:
    """Every tensor of the newest checkpoint, and its step."""
    newest = load_checkpoint(list_checkpoints(rundir.checkpoints)[-1].path)
    momentum = {
        f"momentum {number}": values["momentum_buffer"] for number, values in newest["optimizer"]["state"].items()
    }
    return {"step": torch.tensor(newest["step"]), **newest["model"], **momentum}


def of_kind(rundir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(rundir.metrics) if record["kind"] == kind]


@pytest.mark.long
@pytest.mark.parametrize("loader", ["torchvision", "dali"])
def test_probe_a_run_does_not_notice_the_probe(loader: str, shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if loader == "dali":
        pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    without = run(shapes, probe_seconds=0, loader=loader)
    assert "the input alone" not in capsys.readouterr().out
    measured = run(shapes, probe_seconds=0.2, loader=loader)
    ours, theirs = state(measured), state(without)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert of_kind(without, "input") == []
    (record,) = of_kind(measured, "input")
    assert record["step"] == 0
    rates = {name.removesuffix("_images_per_second"): rate for name, rate in record.items() if name.endswith("second")}
    assert rates.pop("copy") is None
    assert min(rates.values()) > 0
    assert record["slowest_stage"] == min(("read", "decode", "augment"), key=lambda stage: rates[stage])
    check_summary(measured, loader_rate=rates["loader"], limit=limiting_stage({**rates, "copy": None}))
    check_summary(without, loader_rate=None, limit=None)
    printed = capsys.readouterr().out
    assert f"the input alone: {rates['loader']:,.0f} images/s" in printed
    assert [line for line in printed.splitlines() if line.startswith("skipped ")] == []


def check_summary(rundir: RunDir, *, loader_rate: float | None, limit: str | None) -> None:
    summary = json.loads(rundir.summary.read_text())
    assert (summary["loader_images_per_second"], summary["input_limit"]) == (loader_rate, limit)
    for record in (summary, *of_kind(rundir, "train")):
        # images / (seconds - wait), from images / seconds and wait / seconds
        both, wait = record["images_per_second"], record["input_wait_fraction"]
        assert record["compute_images_per_second"] == pytest.approx(both / (1 - wait))


@pytest.mark.long
def test_probe_a_resumed_run_is_probed_and_a_finished_one_is_not(shapes: Path) -> None:
    run(shapes, probe_seconds=0.1)
    run(shapes, probe_seconds=0.1)
    rundir = run(shapes, probe_seconds=0.1, run__epochs=2)
    assert [record["step"] for record in of_kind(rundir, "input")] == [0, 3]
