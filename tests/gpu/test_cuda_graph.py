"""Steps that are captured as CUDA graphs, on a GPU; their bits are compared on a CPU in tests/unit."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from gpu_ranks import over_nccl
from optimizer_settings import FP16
from torch import Tensor, nn

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ComputeError, DataError
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Parts, Plan

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, str]] = {
    "lars fp32": {},
    "lars outside bf16": {"options.momentum_form": "lr_outside", "precision": "bf16"},
    "lars sharded fp16": {"sharded": "true", **FP16},
    "sgd fp16": {"name": "sgd", "bias_lr_factor": "4.0", "clip_norm": "1.0", **FP16},
    "lamb bf16": {"name": "lamb", "precision": "bf16"},
    "muon bf16": {
        "name": "muon",
        "options.newton_schulz_precision": "bf16",
        "precision": "bf16",
    },
    "adamw fp32": {"name": "adamw", "ema_decay": "0.5", "ema_every_steps": "3"},
}
LARGEST_DIFFERENCE = 0.02
"""Relative to the change of the weights. A stale rate causes a third and more."""


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernels that add in any order would make as much of a difference, in fp32 after eight steps."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def make_run(
    tmp_path: Path,
    settings: dict[str, str],
    *,
    is_captured: bool,
    nccl: bool,
    num_microbatches: int = 1,
    words: tuple[str, ...] = (),
) -> tuple[Plan, Parts]:
    config = load_config(
        [
            *("--config", "quickstart", f"--run.directory={tmp_path}", "--comm.algorithm=native", "--run.epochs=12"),
            *(f"--batch.global_batch_size={32 * num_microbatches}", "--batch.microbatch_size=32", "--batch.bn_span=16"),
            *("--schedule.base_lr=0.5", "--schedule.warmup_epochs=8", "--compute.cudnn_benchmark=false"),
            f"--compute.cuda_graph={str(is_captured).lower()}",
            *(f"--optimizer.{key}={value}" for key, value in settings.items()),
            *words,
        ]
    )
    communicator, tuned = join_job(config, ALONE)
    if nccl:
        communicator = over_nccl(communicator)
    plan = make_plan(config, communicator, num_samples=32 * num_microbatches, first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=tuned)
    parts.model.train()
    return plan, parts


def batches(sizes: tuple[int, ...], *, error: str = "") -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        images = torch.randint(0, 256, (32, 3, size, size), dtype=torch.uint8, generator=generator)
        labels, valid = torch.randint(0, 10, (32,), generator=generator), torch.ones(32, dtype=torch.bool)
        images = images.contiguous(memory_format=torch.channels_last).cuda()  # no wait for the copy within a step
        yield Batch(images, labels, valid, Request(0, np.arange(32), np.ones(32, bool)))
    if error:
        raise DataError(error)


def weights_of(parts: Parts) -> Tensor:
    return torch.cat([master.detach().flatten().double() for master in parts.precision.masters.values()])


def way_of(plan: Plan, parts: Parts, *, sizes: tuple[int, ...]) -> Tensor:
    """Return the change of the weights by these steps; replays wait for nothing."""
    before, train_step = weights_of(parts), TrainStep(plan, parts)
    each_size = tuple(size for size in sizes for _ in plan.microbatches)
    stream, seen = InputStream(iter([*batches(each_size)])), dict.fromkeys(sizes, 0)
    for step, size in enumerate(sizes):
        is_replay = parts.is_captured and seen[size] > WARM_UP_STEPS  # the first one is captured before
        seen[size] += 1
        torch.cuda.set_sync_debug_mode("error" if is_replay else "default")
        try:
            train_step(step, stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert train_step.window.sums_3[2] == plan.global_batch_size * len(sizes)
    assert train_step.window.finite_steps == len(sizes)
    return weights_of(parts) - before


def require_same_way(
    tmp_path: Path,
    settings: dict[str, str],
    *,
    sizes: tuple[int, ...] = (32,) * 8,
    change: Callable[[Parts], object] = lambda parts: None,
    nccl: bool = False,
    num_microbatches: int = 1,
    words: tuple[str, ...] = (),
    is_compiled: bool = False,
) -> None:
    """Compare captured steps with eager ones. is_compiled: the captured ones are compiled, too."""
    ways = []
    for is_captured in (False, True):
        compiled = ("--compute.compile=default",) if is_captured and is_compiled else ()
        plan, parts = make_run(
            tmp_path,
            settings,
            is_captured=is_captured,
            nccl=nccl,
            num_microbatches=num_microbatches,
            words=(*words, *compiled),
        )
        change(parts)
        ways.append(way_of(plan, parts, sizes=sizes))
        parts.close()  # first: NCCL waits for graphs that have captured its sums
        if nccl:
            parts.communicator.transport.backend.close()
    at_once, replayed = ways
    assert at_once.norm() > 0
    assert (replayed - at_once).norm() < LARGEST_DIFFERENCE * at_once.norm()


@pytest.mark.parametrize("name", CASES)
def test_graph_replays_steps_the_same_way_without_host_syncs(name: str, tmp_path: Path) -> None:
    require_same_way(tmp_path, CASES[name])


@pytest.mark.parametrize("name", ["lars fp32", "lars sharded fp16"])
def test_graph_captures_sums_of_nccl(name: str, tmp_path: Path) -> None:
    require_same_way(tmp_path, CASES[name], nccl=True)


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("name", ["lars fp32", "lars sharded fp16", "sgd fp16"])
def test_graph_of_several_microbatches(name: str, num_microbatches: int, tmp_path: Path) -> None:
    require_same_way(tmp_path, CASES[name], nccl=True, num_microbatches=num_microbatches)


def test_graph_keeps_the_bits_of_a_reproducible_run(tmp_path: Path) -> None:
    """The rates of these steps are multiples of 1/16: fp32 holds them."""
    ends = []
    try:
        for is_captured in (False, True):
            plan, parts = make_run(
                tmp_path,
                {},
                is_captured=is_captured,
                nccl=False,
                num_microbatches=3,
                words=("--run.reproducible=true",),
            )
            way_of(plan, parts, sizes=(32,) * 8)
            ends.append(torch.cat([weights_of(parts), parts.statistics.running_N.double()]))
            parts.close()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*ends)


def test_graph_of_each_size_of_images(tmp_path: Path) -> None:
    require_same_way(tmp_path, CASES["lars sharded fp16"], sizes=(*(32,) * 5, *(48,) * 5, 32, 48))


@pytest.mark.long
@pytest.mark.timeout(900)  # compiling takes minutes
@pytest.mark.parametrize(("nccl", "num_microbatches"), [(False, 1), (True, 2)])
def test_compiled_and_captured_step_goes_the_way_of_the_eager_one(
    nccl: bool, num_microbatches: int, tmp_path: Path
) -> None:
    """The whole step of ResNet-50 that a large job takes by default, at 224 x 224, with two ghost batches."""
    model = ("--model.name=resnet50", "--model.options={}", "--data.image_size=224", "--schedule.base_lr=0.05")
    require_same_way(
        tmp_path, {}, sizes=(224,) * 6, words=model, nccl=nccl, num_microbatches=num_microbatches, is_compiled=True
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_graph_with_dropout_draws_what_it_draws_at_once(num_microbatches: int, tmp_path: Path) -> None:
    def drop_images(parts: Parts) -> None:
        parts.model.register_forward_pre_hook(lambda model, args: (F.dropout(args[0], 0.5),))

    require_same_way(tmp_path, {}, change=drop_images, num_microbatches=num_microbatches)


def test_graph_replay_of_a_failed_input_changes_nothing(tmp_path: Path) -> None:
    plan, parts = make_run(tmp_path, {}, is_captured=True, nccl=False)
    num_good = WARM_UP_STEPS + 2
    source = batches((32,) * num_good, error="the disk is gone")
    stream, train_step = InputStream(source), TrainStep(plan, parts)
    for step in range(num_good):
        train_step(step, stream)
    before, statistics_before_N = weights_of(parts), parts.statistics.running_N.clone()
    train_step(num_good, stream)
    assert stream.failure is not None
    assert torch.equal(weights_of(parts), before)
    assert torch.equal(parts.statistics.running_N, statistics_before_N)


def test_graph_of_a_step_that_reads_the_device_ends_in_one_line(tmp_path: Path) -> None:
    def read(model: nn.Module, args: object, logits_BK: Tensor) -> None:
        logits_BK.sum().item()

    plan, parts = make_run(tmp_path, {}, is_captured=True, nccl=False)
    parts.model.register_forward_hook(read)
    stream, train_step = InputStream(batches((32,) * 8)), TrainStep(plan, parts)
    for step in range(WARM_UP_STEPS):
        train_step(step, stream)
    with pytest.raises(ComputeError, match=naming("32 x 3 x 32 x 32", "item", "compute.cuda_graph=false")):
        train_step(WARM_UP_STEPS, stream)
    assert torch.randn(3, device="cuda").isfinite().all()  # the process can continue drawing
