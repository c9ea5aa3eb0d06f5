"""The parts of benchmarks/gpu that need no GPU: guard, record, targets, roofline, peers; slow: all cases, small."""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from gpu_suite import run_small
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import day
from benchmarks.gpu.suite import (
    checks,
    cifar,
    exact_sums,
    job,
    limits,
    parts,
    roofline,
    starting,
    steps,
    torchvision_peer,
    training,
)
from benchmarks.gpu.suite.context import FULL, SMALL, Context, Found, Size
from benchmarks.gpu.suite.device import file_stem
from benchmarks.gpu.suite.guard import compare_case
from benchmarks.gpu.suite.report import page
from benchmarks.gpu.suite.targets import TARGETS, Target
from benchmarks.record import ratios
from bigbatch.errors import ConfigError, UserError
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.shards import open_split
from bigbatch.trainer.models import build_model
from bigbatch.trainer.step.precision import set_tf32

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
        ("images/s", 1000.0, 951.0, False, 0.049),
        ("images/s", 1000.0, 950.0, False, 0.05),
        ("images/s", 1000.0, 949.0, True, 0.051),
        ("images/s", 1000.0, 2000.0, False, -1.0),
        ("TFLOP/s", 1000.0, 949.0, True, 0.051),
        ("s", 1000.0, 1049.0, False, 0.049),
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


def test_guard_does_not_watch_ratios_and_new_figures() -> None:
    assert compare_case(case(a=(2.0, "ratio"), b=(0.9, "share")), case(a=(1.0, "ratio"), c=(1.0, "s"))) == []


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


def test_results_are_written_as_they_arrive(run: Any, tmp_path: Path) -> None:
    def so_far() -> float:
        (path,) = tmp_path.glob("gpu-small-*.json")
        return read(path)["a"]

    code, command = run({"a": 10.0, "b": so_far})
    assert (code, read(command.path)) == (0, {"a": 10.0, "b": 10.0})
    assert command.path.with_suffix(".md").exists()


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
def test_part_of_a_gpu_begins_in_a_new_interpreter(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = limits.run_within(partial(print, "begun"), seconds=100, log=log, fork=False)
    assert (code, log.read_text()) == (0, "begun\n")


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


@pytest.mark.slow
def test_guard_compares_with_another_folder(run: Any, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    _, command = run({"a": 1000.0})
    command.path.rename(before / command.path.name)
    assert run({"a": 900.0}, "--guard", "--against", str(before))[0] == 1


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


def test_part_without_figures_replaces_none(run: Any) -> None:
    _, command = run({"a": 10.0, "b": None})
    assert words(command) == {"a": "passed", "b": "left out: rate: needs --airbench"}
    _, command = run({"a": None, "b": 20.0}, "--again")
    assert read(command.path) == {"a": 10.0, "b": 20.0}
    assert run({"a": None}, "--guard")[0] == 1


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ([], "cuda", FULL),
        ([], "cpu", SMALL),
        (["--small"], "cuda", SMALL),
        (["--rounds", "2", "--minutes", "14"], "cuda", replace(FULL, rounds=2)),
        (["--minutes", "14"], "cuda", replace(FULL, rounds=3)),
    ],
)
def test_size_is_the_machines_and_turns_are_the_users(options: list[str], device: str, expected: Size) -> None:
    assert day.size_of(day.parse(options), torch.device(device)) == expected


def test_parts_are_chosen_by_name_or_group() -> None:
    names = ["steps", "small_batches/16", "small_batches/32", "training/pictures"]
    assert day.choose_parts(None, names) == names
    assert day.choose_parts(["small_batches", "steps"], names) == names[:3]
    assert day.choose_parts(["small_batches/32"], names) == ["small_batches/32"]
    with pytest.raises(UserError, match=naming("--only small:", ", ".join(names))):
        day.choose_parts(["small"], names)


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


def test_junit_report_is_counted(tmp_path: Path) -> None:
    report, found = tmp_path / "tests.xml", Found()
    tests = '<testcase name="a"/><testcase classname="t" name="b"><failure message="broken"/></testcase>'
    tests += '<testcase name="c"><error/></testcase><testcase name="d"><skipped message="why"/></testcase>'
    report.write_text(f"<testsuites><testsuite>{tests}</testsuite></testsuites>")
    checks.describe_tests(found, report)
    assert [found.median(name) for name in ("failed", "passed", "skipped")] == [2, 1, 1]
    assert found.tables["failed tests"][0] == {"test": "t::b", "message": "broken"}


def test_record_of_small_and_of_full_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.suite.device.device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert file_stem(CPU, size="full") == "gpu-nvidia-h100-80gb-hbm3"
    assert file_stem(CPU, size="small") == "gpu-small-nvidia-h100-80gb-hbm3"


# --- what is made of the figures ---


def test_targets_in_closed_form() -> None:
    ratio = Target("", ("x", "a"), over=("y", "b"), least=0.9)
    cases = {"x": case(a=(90.0, "images/s")), "y": case(b=(100.0, "images/s"))}
    assert ratio.value(cases) == 0.9
    assert ratio.is_met(0.9)
    assert not ratio.is_met(0.899)
    assert ratio.value({"x": cases["x"]}) is None
    assert not Target("", ("x", "a"), most=15).is_met(15.1)


def test_targets_are_of_cases_that_there_are() -> None:
    from benchmarks.gpu.suite.context import FULL

    names = set(parts.parts_of(FULL))
    assert {where[0] for each in TARGETS for where in (each.figure, each.over) if where} <= names


def test_page_shows_targets_for_the_full_size_alone() -> None:
    small_batches = {"small_batches/32": case(eager=(800.0, "images/s"))}
    small_batches["small_batches/256"] = case(eager=(1000.0, "images/s"))
    record = {"device": "GPU", "size": "full", "cases": small_batches}
    assert "| images/s at 32 per GPU, of those at 256, eager | at least 0.9 | 0.8 | NO |" in page(record)
    assert "800" in page(record)
    assert "800" not in page({**record, "size": "small"})


def test_table_of_steps_in_closed_form() -> None:
    found = Found()
    found.add("first", [100.0], unit="images/s")
    found.add("second", [150.0], unit="images/s")
    rows = steps.make_table(found, ["first", "second"], roofline=1000.0, flops=2e10)
    assert [list(row.values()) for row in rows] == [["first", 100, None, 2, 0.1], ["second", 150, 1.5, 3, 0.15]]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", pytest.param("resnet50", marks=pytest.mark.long)])
def test_flops_are_those_that_torch_counts(model: str) -> None:
    layers = roofline.layers_of(model, batch=2, image_size=64, num_classes=10)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        net = build_model(model, num_classes=10, norm=nn.BatchNorm2d)
        net(torch.empty(2, 3, 64, 64)).sum().backward()
    assert sum(layer.flops for layer in layers) == counter.get_total_flops()


def test_step_at_its_shortest_is_bound_by_arithmetic_or_by_memory() -> None:
    layer = roofline.Layer((1, 2, 4, 4), (8, 2, 1, 1), (1, 8, 4, 4))
    flops, elements = 3 * 2 * (8 * 4 * 4 * 2), 3 * (32 + 16 + 128)
    assert (layer.flops, layer.elements) == (flops, elements)
    slow_memory = roofline.shortest_seconds([layer, layer], flops_per_s=1e12, bytes_per_s=1.0, element_bytes=2)
    assert slow_memory == 2 * 2 * elements
    assert roofline.shortest_seconds([layer], flops_per_s=1.0, bytes_per_s=1e12, element_bytes=2) == flops


def test_contestants_take_turns_with_their_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, clock = [], iter([5.0, 5.0, 1.0, 2.0])

    def seconds_of(action: Any, *, device: torch.device) -> float:
        action()
        return next(clock)

    def make(name: str, *, benchmark: bool) -> job.Contestant:
        def run(steps: int) -> None:
            seen.append((name, steps, torch.backends.cudnn.benchmark))

        return job.Contestant(run, batch=10, flags=job.Flags(cudnn_benchmark=benchmark))

    monkeypatch.setattr(job, "seconds_of", seconds_of)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    rates = job.rates_in_turn({"a": make("a", benchmark=True), "b": make("b", benchmark=False)}, size=SMALL, device=CPU)
    assert seen == 2 * [("a", 1, True), ("b", 1, False)]
    assert rates == {"a": [10.0], "b": [5.0]}
    assert ratios(rates["a"], rates["b"]) == [2.0]


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


@pytest.mark.slow
def test_steps_are_tried_on_a_gpu_on_top_of_those_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[dict[str, Any]] = []

    def contestant(settings: dict[str, Any], **options: Any) -> job.Contestant:
        if settings["optimizer.precision"] == "tf32":
            raise ConfigError("needs a GPU of compute capability 8.0")
        tried.append(settings)
        return job.Contestant(lambda steps: None, batch=1)

    monkeypatch.setattr(steps, "contestant", contestant)
    found, on_gpu = Found(), Context(size=SMALL, device=torch.device("cuda"), scratch=tmp_path)
    with steps.ExitStack() as stack:
        made = steps.make_contestants(on_gpu, found, stack=stack)
    assert found.left_out == {"TF32": "not available: needs a GPU of compute capability 8.0"}
    assert list(made) == [step.name for step in steps.STEPS if step.name != "TF32"]
    for settings in tried:
        load_config(["--config", "imagenet/resnet50_8k", *job.as_options(settings)])  # keys and values are legal
    assert [settings["optimizer.name"] for settings in tried][:2] == 2 * ["torch.optim.SGD"]
    assert [settings["compute.channels_last"] for settings in tried] == 3 * [False] + 5 * [True]
    last = {"optimizer.name": "lars", "optimizer.precision": "bf16", **job.CAPTURED}
    assert last.items() <= tried[-1].items()


def test_steps_of_small_on_a_cpu_are_not_compiled(tmp_path: Path) -> None:
    assert not training.fastest(context(tmp_path), precision="bf16").keys() & job.CAPTURED.keys()
    on_gpu = Context(size=SMALL, device=torch.device("cuda"), scratch=tmp_path)
    settings = training.fastest(on_gpu, precision="fp16")
    assert {**job.CAPTURED, "optimizer.loss_scale": 65536.0}.items() <= settings.items()


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

SCRIPT = """
def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args{scaler}):
    assert args.clip_grad_norm is None and args.print_freq and len(data_loader) == 3
    print("Epoch: [0]")
    for image, target in data_loader:
        criterion(model(image), target).backward()
        optimizer.step()
"""


def context(tmp_path: Path, **folders: Path) -> Context:
    return Context(size=SMALL, device=CPU, scratch=tmp_path, **folders)


@pytest.fixture
def batches() -> Iterator[torchvision_peer.Batches]:
    def endless() -> torchvision_peer.Batches:
        while True:
            yield torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])

    yield endless()
    sys.modules.pop("train", None)


@pytest.mark.long
def test_script_of_a_checkout_is_run(
    tmp_path: Path, batches: torchvision_peer.Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(scaler=", model_ema=None, scaler=None"))
    told = context(tmp_path, vision=tmp_path)
    peer = torchvision_peer.peer(told, batches, num_classes=10)
    peer.run(3)
    assert capsys.readouterr().out == ""
    assert peer.batch == SMALL.batch
    assert torchvision_peer.peer_name(told) == "torchvision's script"
    assert torchvision_peer.peer_name(context(tmp_path)).startswith("stand-in for")


def test_script_that_is_not_in_the_checkout_is_refused(tmp_path: Path, batches: torchvision_peer.Batches) -> None:
    told = context(tmp_path, vision=tmp_path)
    with pytest.raises(ConfigError, match=naming("--vision", tmp_path, "train.py", "references/classification")):
        torchvision_peer.peer(told, batches, num_classes=10)
    (tmp_path / "train.py").write_text(SCRIPT.format(scaler=""))
    with pytest.raises(ConfigError, match=naming("--vision", "scaler")):
        torchvision_peer.peer(told, batches, num_classes=10)
    sys.modules.pop("train")
    (tmp_path / "train.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match=naming("--vision", "train.py", "'no_such_module'")):
        torchvision_peer.peer(told, batches, num_classes=10)


def test_stand_in_does_a_step_of_sgd() -> None:
    torch.manual_seed(0)
    model, images, labels = nn.Linear(4, 6).double(), torch.randn(3, 4).double(), torch.tensor([0, 1, 5])
    weight = model.weight.detach().clone().requires_grad_()
    loss = -F.linear(images, weight, model.bias.detach()).log_softmax(1)[range(3), labels].mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchvision_peer.stand_in_epoch(model, F.cross_entropy, optimizer, [(images, labels)], CPU, 0, argparse.Namespace())
    torch.testing.assert_close(model.weight.detach(), (weight - 0.1 * gradient).detach())


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


def test_images_stay_with_their_labels(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for label, grey in enumerate((0, 100, 200)):
            folder = tmp_path / "grey" / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (32, 32), (grey,) * 3).save(folder / f"{number}.png")
    cifar.as_tensors(tmp_path / "grey", tmp_path / "tensors")
    content = torch.load(tmp_path / "tensors/train.pt")
    assert torch.equal(content["images"].float().mean((1, 2, 3)), 100.0 * content["labels"])


def test_airbench_that_cannot_take_part_says_why(tmp_path: Path) -> None:
    assert "--airbench" in cifar.find_script(context(tmp_path))[1]
    with pytest.raises(ConfigError, match=naming(f"--airbench {tmp_path} ", "legacy/airbench94.py", " airbench94.py")):
        cifar.find_script(context(tmp_path, airbench=tmp_path))
    (tmp_path / "airbench94.py").touch()
    found, reason = cifar.find_script(context(tmp_path, airbench=tmp_path))
    assert found is None
    assert "CUDA" in reason


def test_race_is_of_pairs() -> None:
    found = Found()
    ours = [{"seconds": 6.0, "process_seconds": 9.0, "top1": 0.94}, {"seconds": 4.0, "process_seconds": 8.0, "top1": 1}]
    theirs = [{"seconds": 3.0, "first_seconds": 6.0, "top1": 0.94}, {"seconds": 4.0, "first_seconds": 8.0, "top1": 1}]
    cifar.describe(found, ours=ours, airbench94=theirs)
    assert found.median("cifar10_10epochs seconds / airbench94 seconds") == 1.5
    assert found.median("cifar10_10epochs seconds / airbench94 first_seconds") == 0.75
    alone = Found()
    cifar.describe(alone, ours=ours, airbench94=[])
    assert set(alone.figures) == {f"cifar10_10epochs {key}" for key in ("seconds", "process_seconds", "top1")}


def test_steps_count_from_the_first(tmp_path: Path) -> None:
    records = [("start", 101.0), ("train", 112.5), ("train", 113.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"kind": k, "time": t}) + "\n" for k, t in records))
    assert starting.seconds_to_first_step(tmp_path, start=100.0) == 12.5
    assert starting.with_cache(tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


# --- everything ---


@pytest.mark.long
@pytest.mark.timeout(1800)  # a minute of one core
def test_parts_all_run_small_and_a_second_call_skips_them(tmp_path: Path) -> None:
    record, told = run_small(tmp_path)
    names = list(parts.parts_of(SMALL))
    assert list(record["cases"]) == names, "in order of value"
    without = {name for name, each in record["cases"].items() if not each["figures"]}
    assert without == {"sanitizer/streams", "sanitizer/memory", "feed", "doctor"}
    assert all(each["figures"] or each["left_out"] for each in record["cases"].values())
    assert record["cases"]["steps"]["tables"]["steps"][0]["step"] == "eager fp32"
    assert record["cases"]["exact_sums"]["figures"][exact_sums.DIFFERENT]["median"] == 0
    assert {"torch", "commit", "device", "date", "seconds"} <= set(record["cases"]["steps"]["conditions"])
    assert "no figure means anything" in told
    again, told = run_small(tmp_path)
    assert again["cases"]["steps"] == record["cases"]["steps"]
    assert {name for name in names if f"{name}: has a result of commit" not in told} == without
