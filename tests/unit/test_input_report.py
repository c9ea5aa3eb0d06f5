"""What is said about the input: rates by hand, and advice that is true for the settings of the run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigbatch.trainer import host, measure_input
from bigbatch.trainer.config_file import load_config
from bigbatch.trainer.data.probe import InputRates, Probe
from bigbatch.trainer.input_report import (
    InputSettings,
    MeasuredInput,
    Waited,
    describe_input,
    hint,
    input_record,
    input_settings,
    pixels_left,
    slowest_stage,
)
from bigbatch.trainer.metrics import MetricsLog
from bigbatch.trainer.progress import Lines, rows
from bigbatch.trainer.rundir import RunDir, read_records

RATES = {"loader": 812.0, "read": 5000.0, "decode": 850.0, "copy": None, "augment": 9000.0}
SETTINGS = InputSettings(
    loader="torchvision",
    num_threads=4,
    num_cores=16,
    is_on_gpu=False,
    is_packed=False,
    stage=None,
    bind_numa=True,
    precision="bf16",
    augmentations=(),
    max_side=448,
    pixels_left=0.5,
)
WAITED = Waited(wait_fraction=0.66, compute_images_per_second=2400.0, steps=1000)
SHRINK = "shrink the pictures once by `bigbatch data pack --max-side 448` (50% of their pixels are left)"
THREADS = "raise data.num_threads (4 now; each rank may use 16 cores)"
CORES = "give each rank more cores (16 now)"


def advice(slowest: str, **changed: object) -> str:
    """The remedies of a run whose input is limited by that stage."""
    rates = {**RATES, "decode": 3000.0, "copy": 4000.0, slowest: 800.0}
    text = hint(WAITED, MeasuredInput(rates, replace(SETTINGS, **changed)))
    finding, _, remedies = (text or "").partition("is its slowest stage (800)")
    assert "steps wait 66% of their time" in finding
    assert "alone the input delivers 812 images/s, the model takes 2,400" in finding
    return remedies.removeprefix(": ")


def test_record_names_every_rate_and_the_slowest_stage() -> None:
    assert slowest_stage(RATES) == "decode"
    assert input_record(RATES, step=7) == {
        "step": 7,
        "loader_images_per_second": 812.0,
        "read_images_per_second": 5000.0,
        "decode_images_per_second": 850.0,
        "copy_images_per_second": None,
        "augment_images_per_second": 9000.0,
        "slowest_stage": "decode",
    }
    assert (
        describe_input(RATES)
        == "the input alone: 812 images/s (each stage alone: read 5,000, decode 850, augment 9,000)"
    )


def test_record_with_a_stage_that_is_not_there_is_logged(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    log = MetricsLog(rundir, from_step=0)
    log.write("input", input_record(RATES, step=0))
    log.close()
    assert list(read_records(rundir.metrics)) == [{"kind": "input", **input_record(RATES, step=0)}]


def test_pixels_left_by_hand() -> None:
    assert pixels_left([(100, 200), (400, 400)], max_side=100) == (20_000 + 10_000) / (20_000 + 160_000)
    assert pixels_left([(300, 60)], max_side=100) == 1


@pytest.mark.parametrize(("wait", "is_hinted"), [(0.05, False), (0.051, True)])
def test_hint_is_for_those_who_wait(wait: float, is_hinted: bool) -> None:
    text = hint(replace(WAITED, wait_fraction=wait), MeasuredInput(RATES, SETTINGS))
    assert (text is not None) is is_hinted


def test_hint_on_slow_decoding() -> None:
    assert hint(WAITED, MeasuredInput(RATES, SETTINGS)) == (
        "the input limits this run, steps wait 66% of their time for pictures: alone the input delivers 812 images/s, "
        f"the model takes 2,400; decoding is its slowest stage (850): {THREADS}, or {SHRINK}"
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, f"{THREADS}, or {SHRINK}"),
        ({"num_threads": 16}, SHRINK),
        ({"num_threads": 20, "is_packed": True}, CORES),
        ({"is_packed": True}, THREADS),
        ({"pixels_left": 0.81}, THREADS),
        ({"is_on_gpu": True, "is_packed": True}, f"{THREADS}, or decode on the GPU by data.loader=dali"),
        ({"is_on_gpu": True, "is_packed": True, "loader": "dali"}, THREADS),
    ],
)
def test_advice_on_decoding(changed: dict[str, object], expected: str) -> None:
    assert advice("decode", **changed) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "pack the pictures into shards by `bigbatch data pack`, and copy those near the GPU by data.stage"),
        (
            {"is_packed": True},
            "copy the shards near the GPU: name a folder of each node's own disk or memory in data.stage",
        ),
        (
            {"is_packed": True, "stage": "/scratch/imagenet"},
            "name a faster folder than /scratch/imagenet in data.stage, such as one in /dev/shm",
        ),
        ({"is_packed": True, "stage": "/dev/shm/imagenet"}, CORES),
        (
            {"is_packed": True, "stage": "/dev/shm/imagenet", "num_threads": 1},
            "raise data.num_threads (1 now; each rank may use 16 cores)",
        ),
    ],
)
def test_advice_on_reading(changed: dict[str, object], expected: str) -> None:
    assert advice("read", **changed) == expected


@pytest.mark.parametrize(
    ("stage", "changed", "expected"),
    [
        ("copy", {"is_on_gpu": True}, "decode on the GPU by data.loader=dali"),
        (
            "copy",
            {"is_on_gpu": True, "bind_numa": False},
            "set data.bind_numa to true, or decode on the GPU by data.loader=dali",
        ),
        ("augment", {}, CORES),
        ("augment", {"augmentations": ("augment.cutout_size",)}, "leave out some of augment.cutout_size"),
        ("augment", {"is_on_gpu": True, "precision": "fp32"}, "set optimizer.precision to bf16"),
        ("augment", {"is_on_gpu": True}, ""),
    ],
)
def test_advice_on_the_device(stage: str, changed: dict[str, object], expected: str) -> None:
    assert advice(stage, **changed) == expected


FAST = {"loader": 3000.0, "read": 5000.0, "decode": 3100.0, "copy": None, "augment": 9000.0}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"is_packed": True}, CORES),
        ({"pixels_left": 0.5}, f"{SHRINK}, or {CORES}"),
        ({"is_packed": True, "num_threads": 20}, f"lower data.num_threads to 16 (20 now), or {CORES}"),
        ({"is_packed": True, "is_on_gpu": True}, f"decode on the GPU by data.loader=dali, or {CORES}"),
    ],
)
def test_parts_that_are_fast_alone_compete_for_cores(changed: dict[str, object], expected: str) -> None:
    waited = replace(WAITED, wait_fraction=0.12)
    assert hint(waited, MeasuredInput(FAST, replace(SETTINGS, **changed))) == (
        "steps wait 12% of their time for pictures, though alone the input delivers 3,000 images/s, the model takes "
        f"2,400: the two compete for the same cores: {expected}"
    )


def test_the_first_batch_of_a_short_run_is_no_reason_for_a_hint() -> None:
    measured = MeasuredInput(FAST, SETTINGS)
    assert hint(replace(WAITED, wait_fraction=0.14, steps=10), measured) is None
    assert hint(replace(WAITED, wait_fraction=0.16, steps=10), measured) is not None


def test_what_was_not_measured_is_not_explained() -> None:
    text = hint(WAITED, None)
    assert text is not None
    assert text.endswith("what limits the input was not measured: data.probe_seconds=1 does that")


@pytest.mark.parametrize("loader", ["resident", "synthetic"])
def test_loaders_that_do_not_work_ahead_say_so(loader: str) -> None:
    rates = {"loader": 3000.0, "read": None, "decode": None, "copy": None, "augment": 9000.0}
    text = hint(WAITED, MeasuredInput(rates, replace(SETTINGS, loader=loader)))
    assert text is not None
    assert f"data.loader={loader} makes each batch within its step" in text
    assert slowest_stage(rates) == "augment"


def test_settings_are_those_of_the_config(tmp_path: Path) -> None:
    words = [
        "data.num_threads=3",
        "augment.cutout_size=8",
        "augment.mixup_alpha=0.2",
        "data.train_sizes=[[0,32],[2,64]]",
    ]
    config = load_config(["--config", "quickstart", f"--data.root={tmp_path}", *(f"--{word}" for word in words)])
    settings = input_settings(config, sizes=[(256, 256)], num_cores=5, is_on_gpu=True)
    assert settings.augmentations == ("augment.cutout_size", "augment.mixup_alpha")
    assert (settings.num_threads, settings.num_cores, settings.is_packed) == (3, 5, False)
    assert (settings.max_side, settings.pixels_left) == (128, 0.25)
    assert input_settings(config, sizes=[], num_cores=5, is_on_gpu=True).pixels_left == 1
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").write_text("")
    assert input_settings(config, sizes=[], num_cores=5, is_on_gpu=True).is_packed


def ranks(*others: list[float]) -> SimpleNamespace:
    """A communicator of this rank and of others whose values are given."""
    total = torch.tensor(others, dtype=torch.float64).sum(0)
    return SimpleNamespace(device=torch.device("cpu"), sum_=lambda tensor_N, label: tensor_N + total)


def test_rates_are_sums_over_ranks() -> None:
    mine = Probe(InputRates(loader=100.0, read=None, decode=300.0, copy=None, augment=500.0), ())
    summed = measure_input.sum_rates(mine, ranks([1.0, 0, 3, 0, 5, 0], [10.0, 0, 30, 0, 50, 0]))
    assert summed == {"loader": 111, "read": None, "decode": 333, "copy": None, "augment": 555}


def test_a_rank_that_could_not_measure_leaves_none() -> None:
    mine = Probe(InputRates(loader=100.0, read=None, decode=300.0, copy=None, augment=500.0), ())
    assert measure_input.sum_rates(mine, ranks([0.0, 0, 0, 0, 0, 1])) is None
    assert measure_input.sum_rates(None, ranks([100.0, 0, 300, 0, 500, 0])) is None


@pytest.mark.parametrize(
    ("others", "cores"),
    [
        ([], 6),
        (["here [0, 1, 2, 3, 4, 5]"], 3),
        (["there [0, 1, 2, 3, 4, 5]"], 6),
        (["here [0, 1, 2, 3, 4, 5]"] * 9, 1),
    ],
)
def test_cores_per_rank(others: list[str], cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: list(range(6)))
    communicator = SimpleNamespace(env=SimpleNamespace(host="here"), gather_text=lambda text: [text, *others])
    assert host.cores_per_rank(communicator) == cores


def test_a_list_of_the_summary_has_a_line_for_each_entry(capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"loader_images_per_second": 812.5, "input_limit": None, "skipped": ["a [1]: cut off", "b: empty"]}
    Lines().finish(summary)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in printed] == [
        ["loader_images_per_second", "812.5 images/s"],
        ["input_limit", "not measured"],
        ["skipped", "a [1]: cut off"],
        ["skipped", "b: empty"],
    ]
    assert rows({"skipped": []}) == []
