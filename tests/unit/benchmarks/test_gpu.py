"""The parts of benchmarks/gpu that need no GPU: guard, record, targets, roofline, peers; slow: all cases, small."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming
from gpu_suite import run_small
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import day
from benchmarks.gpu.suite import cifar, exact_sums, job, kernels, limits, parts, steps, torchvision_peer
from benchmarks.gpu.suite.context import FULL, SMALL, Context, Found
from benchmarks.gpu.suite.device import file_stem
from benchmarks.gpu.suite.report import Target, compare_case
from bigbatch.errors import ConfigError, UserError
from bigbatch.tools.doctor.profile import activities_on
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.machine.host import set_tf32
from bigbatch.trainer.models import build_model

CPU = torch.device("cpu")


def case(**medians: tuple[float, str]) -> dict[str, Any]:
    found = Found()
    for name, (median, unit) in medians.items():
        found.add(name, [0.99 * median, median, 1.01 * median], unit=unit)
    return {"conditions": {"date": "today"}, **vars(found)}


# --- guard ---


@pytest.mark.parametrize(
    ("unit", "before", "now", "has_lost", "loss"),
    [
        ("images/s", 1000.0, 950.0, False, 0.05),
        ("images/s", 1000.0, 949.0, True, 0.051),
        ("s", 1000.0, 1051.0, True, 0.051),
        ("s", 1000.0, 500.0, False, -0.5),
    ],
)
def test_guard_fails_by_a_loss_of_more_than_five_percent(
    unit: str, before: float, now: float, has_lost: bool, loss: float
) -> None:
    (found,) = compare_case(case(a=(before, unit)), case(a=(now, unit)))
    assert (found.has_lost, found.loss) == (has_lost, pytest.approx(loss))
    assert found.noise == pytest.approx(0.01), "quartiles at 0.995 and 1.005"
    assert str(found).startswith("LOST" if has_lost else "ok")


def test_guard_counts_what_is_not_measured_any_more_as_lost() -> None:
    (found,) = compare_case(case(a=(1000.0, "images/s")), case(b=(1000.0, "images/s")))
    assert found.has_lost
    assert "not measured" in str(found)


# --- the command ---


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs made-up parts into tmp_path: name -> images/s, None for no figure, an error, or what the part does."""

    def run(rates: dict[str, Any], *words: str, most: int = 60) -> tuple[int, day.Day]:
        def measured(rate: Any) -> Found:
            if isinstance(rate, Exception):
                raise rate
            if callable(rate):
                rate = rate()
            found = Found(left_out={} if rate is not None else {"rate": "needs --airbench"})
            if rate is not None:
                found.add("rate", [rate], unit="images/s")
            return found

        made = {name: parts.Part(lambda _, rate=rate: measured(rate), 1, most) for name, rate in rates.items()}
        for module in (day, parts):
            monkeypatch.setattr(module, "parts_of", lambda size: made)
        options = day.parse(["--out", str(tmp_path), "--logs", str(tmp_path / "logs"), *words])
        day.make_folder(options.logs)
        command = day.Day(options, device=CPU, size=SMALL)
        return command.run(list(rates)), command

    return run


def words(command: day.Day) -> dict[str, str]:
    return {name: each.words for name, each in command.outcomes.items()}


def read(path: Path) -> dict[str, float]:
    cases = json.loads(path.read_text())["cases"]
    return {name: each["figures"]["rate"]["median"] for name, each in cases.items() if each["figures"]}


def test_parts_with_a_result_of_this_commit_are_skipped(run: Any) -> None:
    _, command = run({"a": 10.0})
    record = json.loads(command.path.read_text())
    code, command = run({"a": 20.0, "b": 30.0})
    assert code == 0
    assert words(command) == {"a": f"has a result of commit {day.source_commit()}", "b": "passed"}
    assert read(command.path) == {"a": 10.0, "b": 30.0}
    record["cases"]["a"]["conditions"]["commit"] = "another"
    command.path.write_text(json.dumps(record))
    assert read(run({"a": 40.0})[1].path) == {"a": 40.0}
    assert read(run({"a": 50.0}, "--again")[1].path) == {"a": 50.0}


@pytest.mark.long
def test_part_beyond_its_limit_is_ended_with_its_children(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GRACE_SECONDS", 1.0)

    def endless() -> float:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that hangs
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (tmp_path / "child").write_text(str(child.pid))
        time.sleep(600)
        return 0.0

    code, command = run({"a": endless, "b": 20.0}, "--minutes", "9", most=3)
    assert code == 1
    assert words(command)["a"].startswith("stopped after its 3 s")
    assert read(command.path) == {"b": 20.0}
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def note_and_sleep(path: Path) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)


@pytest.mark.long
def test_part_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    words = {"seconds": 600, "log": tmp_path / "log", "fork": True}
    command = multiprocessing.get_context("fork").Process(
        target=limits.run_within, args=(partial(note_and_sleep, note),), kwargs=words
    )
    command.start()
    wait_until(note.exists)
    part = Path("/proc", note.read_text(), "stat")
    command.kill()
    command.join()
    wait_until(lambda: not part.exists() or part.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupt_keeps_what_was_measured(run: Any) -> None:
    def interrupt() -> float:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
        return 0.0

    code, command = run({"a": 10.0, "b": interrupt, "c": 30.0})
    assert code == day.INTERRUPTED
    assert words(command) == {"a": "passed", "b": "interrupted", "c": "not begun: interrupted"}
    assert read(command.path) == {"a": 10.0}
    assert "| b |  |  |  | interrupted |" in command.summary()


def test_part_that_does_not_fit_is_not_begun(run: Any) -> None:
    code, command = run({"a": 10.0}, "--minutes", "0.01")
    assert (code, command.path.exists()) == (0, False)
    assert words(command)["a"].startswith("not begun: takes about 1 s, and ")
    for minutes, most in ((["--minutes", "9"], 60), ([], 240)):
        _, command = run({"a": 10.0}, "--dry-run", *minutes)
        assert words(command) == {"a": f"would run: about 1 s, at most {most} s"}
    assert not command.path.exists()


@pytest.mark.long
def test_guard_keeps_the_better_record(run: Any, tmp_path: Path) -> None:
    (tmp_path / "gpu-small-other.json").write_text(json.dumps({"cases": {"a": case(rate=(9e9, "images/s"))}}))
    code, command = run({"a": 1000.0, "b": 10.0}, "--guard")
    assert code == 0, "those of another GPU are none"
    code, command = run({"a": 949.0, "b": 20.0}, "--guard")
    assert code == 1
    assert words(command)["a"].startswith("lost speed")
    assert "LOST rate" in (tmp_path / "logs/a.log").read_text()
    assert read(command.path) == {"a": 1000.0, "b": 20.0}
    assert read(command.path.with_name(f"{command.path.stem}-lost.json")) == {"a": 949.0}
    assert run({"a": 951.0}, "--guard")[0] == 0
    assert read(command.path) == {"a": 951.0, "b": 20.0}, "parts that did not run stay"
    assert run({"a": 500.0}, "--again")[0] == 0, "not asked for"


def test_guard_without_what_it_was_told_to_guard_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{file_stem(CPU, size='small')}.json"
    with pytest.raises(UserError, match=naming(tmp_path / "nowhere", path.name)):
        run({"a": 1000.0}, "--guard", "--against", str(tmp_path / "nowhere"))
    path.write_text('{"cases"')
    with pytest.raises(UserError, match=naming(path, "record")):
        run({"a": 1000.0})
    with pytest.raises(SystemExit):
        day.parse(["--against", str(tmp_path)])
    with pytest.raises(SystemExit, match=naming("--out", path, "File exists")):
        day.main(["--out", str(path)])


def test_part_that_fails_ends_no_other(run: Any, tmp_path: Path) -> None:
    code, command = run({"a": ConfigError("name it by --vision"), "b": 10.0, "c": RuntimeError("broken")})
    assert code == 1
    assert read(command.path) == {"b": 10.0}
    assert words(command)["a"].startswith("failed, exit code 1: name it by --vision (")
    assert words(command)["c"].startswith("failed, exit code 1: RuntimeError: broken (")
    assert [(tmp_path / f"logs/{name}.log").read_text().count("Traceback") for name in "ac"] == [0, 1]


def test_summary_judges_the_targets_of_this_gpu(tmp_path: Path) -> None:
    command = day.Day(day.parse(["--out", str(tmp_path)]), device=CPU, size=FULL)
    calibrated = case(**{"ResNet-50, NCHW, AMP": (2700.0, "images/s")})
    cases = {"calibration": calibrated, "quickstart": case(top1=(0.5, "share"))}
    command.record |= {"device": "NVIDIA H100 80GB HBM3", "cases": cases}
    command.outcomes = {"calibration": day.Outcome("passed", 40.0), "quickstart": day.Outcome("passed", 30.4)}
    told = command.summary()
    assert "less 2%: 2,700 | at least 2,734 | MISSED |" in told
    assert told.count("| calibration |") == 1, "the H200's target is not this card's"
    assert "| quickstart | 30 | top1: 0.5 share |  | passed |" in told


# --- what is made of the figures ---


def test_targets_in_closed_form() -> None:
    ratio = Target("", ("x", "a"), over=("y", "b"), least=0.9)
    cases = {"x": case(a=(90.0, "images/s")), "y": case(b=(100.0, "images/s"))}
    assert ratio.value(cases) == 0.9
    assert ratio.is_met(0.9)
    assert not ratio.is_met(0.899)
    assert ratio.value({"x": cases["x"]}) is None
    assert not Target("", ("x", "a"), most=15).is_met(15.1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", pytest.param("resnet50", marks=pytest.mark.long)])
def test_flops_are_those_that_torch_counts(model: str) -> None:
    layers = steps.layers_of(model, batch=2, image_size=64, num_classes=10)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        net = build_model(model, num_classes=10, norm=nn.BatchNorm2d)
        net(torch.empty(2, 3, 64, 64)).sum().backward()
    assert sum(layer.flops for layer in layers) == counter.get_total_flops()


def test_step_at_its_shortest_is_bound_by_arithmetic_or_by_memory() -> None:
    layer = steps.Layer((1, 2, 4, 4), (8, 2, 1, 1), (1, 8, 4, 4))
    flops, elements = 3 * 2 * (8 * 4 * 4 * 2), 3 * (32 + 16 + 128)
    assert (layer.flops, layer.elements) == (flops, elements)
    slow_memory = steps.shortest_seconds([layer, layer], flops_per_s=1e12, bytes_per_s=1.0, element_bytes=2)
    assert slow_memory == 2 * 2 * elements
    assert steps.shortest_seconds([layer], flops_per_s=1.0, bytes_per_s=1e12, element_bytes=2) == flops


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions and products"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "convolutions and products"),
        ("triton_poi_fused_add_threshold_backward_8", "norm, ReLU and add"),
        ("void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, float>", "norm, ReLU and add"),
        ("triton_poi_fused_max_pool2d_with_indices_backward_0", "max-pool"),
        ("max_pool_backward", "max-pool"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_of_an_h200_have_a_kind(name: str, kind: str) -> None:
    assert kernels.kind_of(name) == kind


def test_profiler_records_the_kernels_of_a_gpu() -> None:
    names = {kind: [each.name for each in activities_on(torch.device(kind))] for kind in ("cpu", "cuda")}
    assert names == {"cpu": ["CPU"], "cuda": ["CPU", "CUDA"]}


@pytest.mark.slow
def test_job_trains_by_the_real_step() -> None:
    with closing(job.Job(job.settings_for(SMALL, batch=2, precision="bf16"))) as made:
        before = [p.detach().clone() for p in made.parts.model.parameters()]
        made.run_reading_the_loss(2)
        assert made.parts.model.training
        assert made.parts.communicator.world_size == 1
        weights = list(made.parts.model.parameters())
    assert {p.dtype for p in weights} == {torch.bfloat16, torch.float32}
    assert any(not torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_flags_are_switched_so_that_torchs_compiler_can_read_them() -> None:
    before = job.Flags()
    try:
        for is_allowed in (True, False):
            set_tf32(is_allowed)
            flags = job.Flags()
            for each in (job.AS_TORCH_STARTS, flags):
                each.switch()
                found = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
                assert found == (each.convolutions_in_tf32, each.products)
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == is_allowed
    finally:
        before.switch()


# --- peers ---


def context(tmp_path: Path, **folders: Path) -> Context:
    return Context(size=SMALL, device=CPU, scratch=tmp_path, **folders)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "references/classification"),
        ("def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args): pass", "scaler"),
        ("import no_such_module", "'no_such_module'"),
    ],
)
def test_script_that_cannot_be_run_is_refused(text: str | None, reason: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "train.py").write_text(text)
    batches = iter([(torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]))])
    try:
        with pytest.raises(ConfigError, match=naming("--vision", reason)):
            torchvision_peer.peer(context(tmp_path, vision=tmp_path), batches, num_classes=10)
    finally:
        sys.modules.pop("train", None)


AIRBENCH = """
import torch
def print_training_details(variables, is_final_entry):
    raise AssertionError("replaced")
def main(run):
    data = torch.load("cifar10/train.pt")
    assert data["images"].shape[1:] == (32, 32, 3) and data["images"].dtype == torch.uint8
    for is_last in (False, True):
        total_time_seconds = 9.0 if run == "warmup" else 3.0 + is_last
        print_training_details(locals(), is_final_entry=is_last)
    return 0.94 + (0 if run == "warmup" else run) / 1000
"""


@pytest.mark.long
def test_airbench_is_driven_and_read(tmp_path: Path) -> None:
    root = tmp_path / "shapes"
    write_dataset(root, train_per_class=3, val_per_class=1, side_pixels=(32, 32))
    cifar.as_tensors(root, tmp_path / "cifar10")
    content, source = torch.load(tmp_path / "cifar10/train.pt"), open_split(root, "train")
    assert content["classes"] == list(source.classes)
    assert content["labels"].bincount().tolist() == 10 * [3]
    assert content["labels"].tolist() != sorted(content["labels"].tolist()), "whitening takes the first ones"
    assert len(torch.load(tmp_path / "cifar10/test.pt")["images"]) == 10
    script = tmp_path / "airbench94.py"
    script.write_text(AIRBENCH)
    found = cifar.airbench(script, tmp_path, seed=2)
    assert found == {"first_seconds": 9.0, "seconds": 4.0, "top1": pytest.approx(0.942)}


def test_airbench_that_cannot_take_part_says_why(tmp_path: Path) -> None:
    assert "--airbench" in cifar.find_script(context(tmp_path))[1]
    with pytest.raises(ConfigError, match=naming(f"--airbench {tmp_path} ", "legacy/airbench94.py", " airbench94.py")):
        cifar.find_script(context(tmp_path, airbench=tmp_path))
    (tmp_path / "airbench94.py").touch()
    found, reason = cifar.find_script(context(tmp_path, airbench=tmp_path))
    assert found is None
    assert "CUDA" in reason


# --- everything ---


@pytest.mark.long
@pytest.mark.weekly
@pytest.mark.timeout(1800)  # four minutes of one core
def test_parts_all_run_small_and_a_second_call_skips_them(tmp_path: Path) -> None:
    record, told = run_small(tmp_path)
    names = list(parts.parts_of(SMALL))
    assert list(record["cases"]) == names, "in order of value"
    without = {name for name, each in record["cases"].items() if not each["figures"]}
    assert without == {"sanitizer/streams", "sanitizer/memory"}
    assert all(each["figures"] or each["left_out"] for each in record["cases"].values())
    assert record["cases"]["steps"]["tables"]["steps"][0]["step"] == "eager fp32"
    assert record["cases"]["exact_sums"]["figures"][exact_sums.DIFFERENT]["median"] == 0
    assert {"torch", "commit", "device", "date", "seconds"} <= set(record["cases"]["steps"]["conditions"])
    assert "no figure means anything" in told
    again, told = run_small(tmp_path)
    assert again["cases"]["steps"] == record["cases"]["steps"]
    assert {name for name in names if f"{name}: has a result of commit" not in told} == without
