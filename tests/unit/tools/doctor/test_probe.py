"""What the doctor measures: syncs, arithmetic, a real probe of generated images, and the whole command."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from small_run import CPU
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.tools.doctor.exchange import IMAGES, ORDERS, append, orders
from bigbatch.tools.doctor.measure import (
    WITH_LOOPS,
    flops_per_image,
    make_step,
    measure_pinning,
    measure_update,
    peak_flops,
)
from bigbatch.tools.doctor.probe import _Probe, remake_splits, with_synthetic
from bigbatch.tools.doctor.profile import PREPARE, REPLAYED, REST, FindSyncs
from bigbatch.trainer.build.input import Split, Splits
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.config.batch import Division
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import lookup
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.base import LoaderSetup
from bigbatch.trainer.input.loaders.resident import ResidentLoader
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.step.cuda_graph import Work
from bigbatch.trainer.step.loop import TrainStep

SMALL = {
    "data.loader": "torchvision",
    "data.image_size": 16,
    "data.bind_numa": False,
    "model.options.width": 2,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 4,
    "batch.bn_span": 4,
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Probe of a config with 40 generated images and 16 images a step."""
    root = tmp_path_factory.mktemp("shapes") / "set"
    write_dataset(root, train_per_class=4, val_per_class=1, side_pixels=(32, 40))
    return ["--config", "quickstart", f"--data.root={root}", *(f"--{key}={value}" for key, value in SMALL.items())]


def slow_step(images_BF: Tensor, weight_FK: Tensor) -> float:
    logits_BK = images_BF @ weight_FK
    logits_BK.sum().backward()
    return logits_BK.max().item()


def test_item_in_a_step_is_found_with_its_line() -> None:
    with FindSyncs(CPU) as syncs:
        for _ in range(2):
            slow_step(torch.ones(2, 3), torch.ones(3, 4, requires_grad=True))
    lines, first = inspect.getsourcelines(slow_step)
    number = first + next(index for index, line in enumerate(lines) if ".item()" in line)
    assert list(syncs.found.values()) == [2]
    found = next(iter(syncs.found))
    assert found.startswith(f"tests/unit/tools/doctor/test_probe.py:{number} (slow_step): reads a number")


def test_ranks_with_unequal_shares_warm_up_in_the_same_number_of_steps() -> None:
    """Steps are collective. Of four microbatches the first of three ranks takes two."""
    taken, division = [], Division(4, 3)
    for rank in range(3):
        probe = SimpleNamespace(
            config=SimpleNamespace(data=SimpleNamespace(prefetch_batches=2)),
            plan=SimpleNamespace(division=division, microbatches=division.of(rank)),
            _streams={IMAGES: None},
            _step_seconds={IMAGES: 1.0},
            _timed=lambda stream, number: taken.append(number),
        )
        _Probe._warm_up(cast(Any, probe), IMAGES, seconds=1.0, flushes=True)
    assert taken == [2, 2, 2]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x_N: x_N[x_N > 0], "indexing with a mask"),
        (lambda x_N: x_N.nonzero(), "nonzero()"),
        (lambda x_N: x_N.unique(), "unique()"),
        (lambda x_N: x_N.masked_select(x_N > 0), "masked_select()"),
        (lambda x_N: float(x_N[0]), "reads a number"),
        (lambda x_N: (x_N * 2).sum().backward(), None),
        (lambda x_N: x_N.register_hook(in_backward) and (x_N * 2).sum().backward(), "(in_backward): reads a number"),
    ],
)
def test_syncs_find_what_else_waits(work: Any, words: str | None) -> None:
    """Plain work does not wait."""
    with FindSyncs(CPU) as syncs:
        work(torch.ones(3, requires_grad=True))
    assert len(syncs.found) == (0 if words is None else 1)
    assert all(words in place for place in syncs.found)


def in_backward(gradient: Tensor) -> Tensor:
    return gradient * (2.0 if gradient.sum() > 0 else 1.0)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda there, here: there.cpu(), "copies to the host, as .cpu()"),
        (lambda there, here: here.copy_(there), "copies to the host, as .cpu()"),
        (lambda there, here: there.__setitem__(0, 1.0), "copies from the host, as x[0] = 1.0"),
        (lambda there, here: there.copy_(here), "copies from the host, as x[0] = 1.0"),
        (lambda there, here: here.to("cuda"), "copies from the host, as x[0] = 1.0"),
        (lambda there, here: there.copy_(here, non_blocking=True), None),
        (lambda there, here: here.to("cuda", non_blocking=True), None),
        (lambda there, here: there[0].fill_(1.0), None),
        (lambda there, here: there.to(torch.float64), None),
    ],
)
def test_syncs_are_copies_that_a_gpu_makes_the_host_wait_for(
    work: Callable[[Tensor, Tensor], object], words: str | None
) -> None:
    """Uses tensors with a device and no values, so that no GPU is needed."""
    with FakeTensorMode():
        there, here = torch.zeros(3, device="cuda"), torch.zeros(3)
        with FindSyncs(torch.device("cuda")) as syncs:
            work(there, here)
    assert len(syncs.found) == (0 if words is None else 1)
    assert all(words in place for place in syncs.found)


def test_syncs_on_a_gpu_are_of_its_own_tensors_only() -> None:
    with FindSyncs(torch.device("cuda")) as syncs:
        slow_step(torch.ones(2, 3), torch.ones(3, 4, requires_grad=True))
        torch.ones(3)[torch.ones(3) > 0].cpu()
    assert not syncs.found


def test_flops_of_an_image_are_those_of_the_formula() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    reducer = SimpleNamespace(is_active=True, zero_grad=model.zero_grad)
    prepared = SimpleNamespace(
        images_BCHW=torch.ones(2, 3, 6, 6), targets=torch.tensor([1, 2]), labels_B=torch.tensor([1, 2])
    )
    convolution, matrix = 2 * 4 * 3 * 9 * 6 * 6, 2 * 4 * 6 * 6 * 5
    # forward and the weights' gradients of both; the image needs no gradient, what enters the matrix does
    parts: Any = SimpleNamespace(model=model, reducer=reducer, precision=SimpleNamespace(forward=nullcontext))
    assert flops_per_image(parts, prepared) == 2 * convolution + 3 * matrix  # type: ignore[arg-type]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_peak_is_that_of_a_processor() -> None:
    assert 1e8 < peak_flops(CPU, precision="fp32", seconds=0.01) < 1e14


def test_half_written_orders_wait_and_orders_end_with_the_doctor(tmp_path: Path) -> None:
    append(tmp_path / ORDERS, {"what": "steps", "seconds": 1.0})
    with (tmp_path / ORDERS).open("a") as file:
        file.write('{"what": "en')
    assert list(orders(tmp_path, is_running=lambda: False)) == [{"what": "steps", "seconds": 1.0}]


def test_generated_tensors_take_the_place_of_any_loader() -> None:
    for name in ("quickstart", "cifar10", "imagenette"):
        config = load_config(["--config", name])
        generated = with_synthetic(config)
        assert generated.data.loader == "synthetic"
        assert (generated.batch, generated.model) == (config.batch, config.model)


def parts_of(name: str) -> tuple[Any, Any]:
    """Parts of a config of that optimizer, with gradients, and its settings."""
    config = load_config(["--config", "quickstart", f"--optimizer.name={name}"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    precision = SimpleNamespace(masters=dict(model.named_parameters()))
    return config.optimizer, SimpleNamespace(model=model, precision=precision, communicator=SimpleNamespace(device=CPU))


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_update_by_tensor_is_the_fused_one(name: str) -> None:
    """The fused one is tested against an oracle: here both make the same three steps, at a rate that moves weights."""
    settings, parts = parts_of(name)
    steps = [make_step(settings, parts, is_fused=is_fused, lr=0.5) for is_fused in (True, False)]
    ends = []
    for step, weights in steps:
        for _ in range(3):
            step()
        ends.append(weights)
    for name, before in parts.model.named_parameters():
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(ends[0][name], before)


def test_always_on_is_measured_or_has_its_reason() -> None:
    settings, parts = parts_of("sgd")
    found = measure_update(settings, parts, seconds=0.001)
    assert found["turns"] >= 3
    assert found["fused_seconds"] > 0
    assert found["times"] > 0
    assert "optimizer.name=lars " in measure_update(replace(settings, name="lars"), parts, seconds=0.001)["why"]
    assert "optimizer.sharded=True " in measure_update(replace(settings, sharded=True), parts, seconds=0.001)["why"]
    assert "nothing is copied" in measure_pinning(10, CPU, seconds=0.001)["why"]


def test_resident_set_is_not_read_again_for_a_part_of_a_step() -> None:
    loader = ResidentLoader.__new__(ResidentLoader)
    unset: Any = dict.fromkeys(("source", "crop", "image_size", "device", "data"))
    loader._setup = LoaderSetup(**unset, microbatch_size=512)
    splits = Splits(Split(9, loader, None), Split(3, loader, None))
    words = ["--batch.global_batch_size=32", "--batch.microbatch_size=32", "--batch.bn_span=32"]
    config = load_config(["--config", "cifar10", *words])  # whose folder is not there
    train, _ = remake_splits(splits, config, cast(Communicator, None))
    assert (train.num_samples, cast(ResidentLoader, train.loader)._setup.microbatch_size) == (9, 32)


@pytest.fixture
def probe(options: list[str]) -> Iterator[_Probe]:
    config = load_config(options)
    communicator, tuned = join_job(config, ALONE)
    torch.set_num_threads(1)
    probe = _Probe(config, communicator, tuned)
    yield probe
    probe.close()
    communicator.close()


@pytest.mark.long
def test_probe_measures_the_steps_of_training(probe: _Probe) -> None:
    before = {name: tensor.clone() for name, tensor in probe.parts.model.named_parameters()}
    for batches in ("images", "tensors", "images"):
        found = probe.steps(batches=batches, seconds=0.02, flushes=True)
        assert found["images"] == 16
        assert found["steps"] >= 1
        assert 0 <= found["wait_seconds"] < found["seconds"]
        assert found["peak_bytes"] > 50e6  # torch alone takes more
        assert found["exposed_seconds"] == pytest.approx(0.0, abs=1e-3), "one rank waits for no other"
    assert all(torch.equal(tensor, before[name]) for name, tensor in probe.parts.model.named_parameters())
    profile = probe.profile(batches="images", seconds=0.02)
    assert sum(profile["phases"].values()) == pytest.approx(profile["seconds"], rel=0.01)
    assert {"wait for images", PREPARE, "forward", "backward", "update", REST} <= profile["phases"].keys()
    assert profile["operators"][0][1] > 0
    assert profile["busy_share"] is None
    assert profile["syncs"] == {}  # the hot path has none
    assert probe.input(seconds=0.1)["loader_images_per_second"] > 0
    assert probe.steps(batches="images", seconds=0.02, flushes=False)["images"] == 16  # continues after the input alone
    estimate, roof = probe.estimate(seconds=0.01), probe.roofline(seconds=0.01)
    assert 0 < estimate["flops_per_image"] < roof["peak_flops"]
    always = probe.always(seconds=0.02)
    json.dumps([profile, estimate, roof, always, probe.facts])
    values = {"batch.global_batch_size": 8, "batch.microbatch_size": 2, "batch.bn_span": 2}
    assert probe.shrink(values=values, seconds=0.02) == {}
    assert probe.steps(batches="images", seconds=0.02, flushes=False)["images"] == 8


@pytest.mark.slow
def test_captured_step_tells_no_parts(probe: _Probe) -> None:
    class Captured:
        def close(self) -> None: ...

        def __call__(self, work: Work, microbatches: Iterator[Prepared]) -> Tensor:
            transport = probe.communicator.transport
            batches, timeline, transport.timeline = list(microbatches), transport.timeline, None
            with patch.object(probe.train_step, "_span", nullcontext):  # as a replayed graph, which enters no function
                result = work(batches)
            transport.timeline = timeline
            return result

    probe.parts = replace(probe.parts, graphs=Captured())
    probe.train_step = TrainStep(probe.plan, probe.parts)
    assert probe.steps(batches="images", seconds=0.02, flushes=False)["exposed_seconds"] is None
    assert probe.profile(batches="images", seconds=0.02)["phases"].keys() == {"wait for images", REPLAYED}


def doctor(*words: str) -> list[str]:
    return [sys.executable, "-m", "bigbatch", "doctor", *words]


QUICK = ("--quick", "--within", "280", "--seconds", "0.05", "--limit", "200", "--only", "prefetch")


@pytest.mark.long
def test_whole_examination(options: list[str], tmp_path: Path) -> None:
    """On two ranks; the tests that follow have one."""
    files = ["--json", str(tmp_path / "found.json"), "--out", str(tmp_path / "out.yaml")]
    words = doctor(*options, *QUICK, "--ranks", "2", *files, f"--run.directory={tmp_path / 'run'}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("limited by", "Where the step's time goes", "the same again: noise", "syncs: no operator"):
        assert text in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["is_complete"]
    assert found["machine"]["world_size"] == 2
    assert {row["candidate"]["name"] for row in found["rows"]} == {"prefetch"}
    assert all(row["measured"]["turns"] == 3 for row in found["rows"])
    assert found["rates"]["turns"] in (1, 3)
    assert found["is_noisy"] is (found["spread"] > 0.2)
    recommended = load_config(["--config", str(tmp_path / "out.yaml")])
    config = load_config(options)
    assert recommended.batch.global_batch_size == config.batch.global_batch_size
    assert all(lookup(recommended, key) == value for key, value in found["advice"].items())
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_config_that_cannot_be_measured_is_an_error_as_in_training(options: list[str], tmp_path: Path) -> None:
    words = doctor(*options, *QUICK, f"--data.root={tmp_path / 'nowhere'}", "--json", str(tmp_path / "found.json"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert f"bigbatch: {tmp_path}/nowhere/train: " in done.stderr
    assert not (tmp_path / "found.json").exists()


@pytest.mark.long
def test_ctrl_c_prints_what_was_found_and_leaves_no_process(options: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        doctor(*options, *QUICK),
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},  # it may keep a rate
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a shell runs behind
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("measuring the noise" in line for line in lines)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=200) == 130
    assert "limited by" in rest
    assert "stopped before the end" in rest
    deadline = time.monotonic() + 60
    while probes_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not probes_of(process.pid)


def probes_of(pid: int) -> list[str]:
    """The processes of this doctor that run."""
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in running.splitlines() if "doctor probe" in line and line.endswith(f" {pid}")]
