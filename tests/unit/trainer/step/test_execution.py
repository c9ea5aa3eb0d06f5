"""A run with captured and replayed steps ends with the bits of an eager one."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from optimizer_settings import FP16
from recorded_graph import RecordedCapture
from small_run import Recorder, num_alive, train
from torch import Tensor, nn

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ComputeError, ConfigError, DataError, UserError
from bigbatch.trainer.build.compute import require_capturable
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.optim.fused import norms_of
from bigbatch.trainer.report.progress import describe, describe_briefly
from bigbatch.trainer.report.summary import speed
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS, CudaGraphExecution, Cut
from bigbatch.trainer.step.plan import Parts, Plan

NUM_STEPS = 8
CASES: dict[str, dict[str, str]] = {
    "lars fp32": {},
    "lars outside bf16": {"options.momentum_form": "lr_outside", "precision": "bf16"},
    "sgd fp16": {"name": "sgd", "bias_lr_factor": "4.0", **FP16},
    "lamb bf16": {"name": "lamb", "precision": "bf16", "clip_norm": "0.5"},
    "adamw fp32": {"name": "adamw", "ema_decay": "0.5", "ema_every_steps": "3"},
    "lion fp16": {"name": "lion", **FP16},
    "muon bf16": {"name": "muon", "options.newton_schulz_precision": "bf16", "precision": "bf16"},
}


def make_run(
    tmp_path: Path, settings: dict[str, str], *, num_microbatches: int = 1, words: tuple[str, ...] = ()
) -> tuple[Plan, Parts]:
    """The rates of the schedule, of 4 steps up and 4 down, have few digits: fp32 holds them as fp64 does."""
    schedule = {"name": "one_cycle", "base_lr": "0.25", "warmup_epochs": "4", "end_lr": "0.0"}
    arguments = [
        *(
            "--config",
            "quickstart",
            f"--run.directory={tmp_path}",
            "--model.options.width=2",
            "--comm.algorithm=native",
        ),
        *(f"--run.epochs={NUM_STEPS}", "--run.log_every_steps=3", "--run.eval_every_epochs=4"),
        *(f"--batch.global_batch_size={8 * num_microbatches}", "--batch.microbatch_size=8", "--batch.bn_span=4"),
        "--data.bind_numa=false",
        *(f"--schedule.{key}={value}" for key, value in schedule.items()),
        *(f"--optimizer.{key}={value}" for key, value in settings.items()),
        *words,
    ]
    config = load_config(arguments)
    communicator, tuned = join_job(config, ALONE)
    torch.set_num_threads(1)  # for a few pixels, more only wait for each other
    plan = make_plan(config, communicator, num_samples=8 * num_microbatches, first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=tuned)
    if hasattr(parts.optimizer, "norms"):
        # LARS as on a GPU: on a CPU it goes by portions, for which the host reads its scales
        parts.optimizer.norms = lambda tensors: norms_of(tensors)
    return plan, parts


def batches(sizes: tuple[int, ...] = (16,) * NUM_STEPS, *, error: str = "") -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        images = torch.randint(0, 256, (8, 3, size, size), dtype=torch.uint8, generator=generator)
        yield Batch(
            images.contiguous(memory_format=torch.channels_last),
            torch.randint(0, 10, (8,), generator=generator),
            torch.ones(8, dtype=torch.bool),
            Request(0, np.arange(8), np.ones(8, bool)),
        )
    if error:
        raise DataError(error)


class Outcome:
    """The final state of a run, and its reports."""

    def __init__(self, plan: Plan, parts: Parts, source: Iterator[Batch]) -> None:
        recorder = Recorder()
        self.error = ""
        try:
            self.totals = train(plan, parts, recorder, source)
        except UserError as error:
            self.error = str(error)
        state = parts.optimizer.state_dict()
        self.tensors = {
            **parts.precision.model_state(),
            **{f"statistics of {name}": t for name, t in parts.average_state(NUM_STEPS).items()},
            **{f"{i} {k}": t for i, kept in state["state"].items() for k, t in kept.items()},
        }
        self.rates = [group["lr"] for group in state["param_groups"]]
        self.scale = parts.precision.state_dict()
        kept = ("step", "loss", "top1", "loss_scale", "overflow_steps", "grad_norm", "underflow_fraction", "lr")
        self.records = [{key: record[key] for key in kept} for record in recorder.records]
        self.whole_records = recorder.records


def require_same_bits(ours: Outcome, theirs: Outcome) -> None:
    assert ours.records == theirs.records
    assert (ours.rates, ours.scale, ours.error) == (theirs.rates, theirs.scale, theirs.error)
    assert ours.tensors.keys() == theirs.tensors.keys()
    odd = [name for name, t in ours.tensors.items() if not torch.equal(t, theirs.tensors[name])]
    assert odd == []


def captured(capture: RecordedCapture, parts: Parts, **others: Any) -> CudaGraphExecution:
    return CudaGraphExecution(capture, optimizer=parts.optimizer, **others)


def run_both(
    tmp_path: Path,
    settings: dict[str, str],
    make_batches: Callable[[], Iterator[Batch]] = batches,
    change: Callable[[Parts], object] = lambda parts: None,
    *,
    num_steps: int = NUM_STEPS,
    num_microbatches: int = 1,
    words: tuple[str, ...] = (),
) -> tuple[Outcome, Outcome, RecordedCapture]:
    outcomes, capture = [], RecordedCapture()
    for is_captured in (False, True):
        plan, parts = make_run(tmp_path, settings, num_microbatches=num_microbatches, words=words)
        change(parts)
        if is_captured:
            parts = replace(parts, graphs=captured(capture, parts))
        outcomes.append(Outcome(replace(plan, num_steps=num_steps), parts, make_batches()))
    return outcomes[0], outcomes[1], capture


@pytest.mark.parametrize("name", CASES)
def test_cuda_graph_replays_end_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Warm-up and decay of the rate, label smoothing, ghost batches, loss scale, clipping, the average of weights."""
    at_once, replayed, capture = run_both(tmp_path, CASES[name])
    require_same_bits(replayed, at_once)
    assert {type(rate) for rate in replayed.rates} == {float}, "as checkpoints keep them"
    assert len({record["loss"] for record in at_once.records}) == len(at_once.records) > 3
    assert (capture.num_warm_ups, capture.num_captures) == (WARM_UP_STEPS, 1)
    assert capture.num_replays == NUM_STEPS - WARM_UP_STEPS, "the capture counts as no step"
    if "fp16" in name:
        assert len({record["loss_scale"] for record in at_once.records}) > 1


@pytest.mark.parametrize("name", ["lars outside bf16", "sgd fp16"])
def test_cuda_graph_of_several_microbatches_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Gradients add up, half ones in fp32; each microbatch has its own share in the running statistics."""
    num_microbatches = 3

    def source() -> Iterator[Batch]:
        return batches((16,) * NUM_STEPS * num_microbatches)

    at_once, replayed, capture = run_both(tmp_path, CASES[name], source, num_microbatches=num_microbatches)
    require_same_bits(replayed, at_once)
    assert len({record["loss"] for record in at_once.records}) == len(at_once.records) > 3
    assert (capture.num_warm_ups, capture.num_captures) == (WARM_UP_STEPS, 2)
    assert capture.num_replays == num_microbatches * (NUM_STEPS - WARM_UP_STEPS)


def read_sums_as_on_a_gpu(parts: Parts) -> None:
    """After all have come, by the thread that captures."""
    parts.reducer.grid_sums._reads_on_arrival = False


def test_cuda_graph_keeps_the_bits_of_a_reproducible_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums on the grid: of gradients, statistics and losses. With one law for both, any division has these bits."""
    # as on a GPU, where the host does not look whether numbers are out of range
    monkeypatch.setattr(torch, "aminmax", lambda steps_N: (math.inf,))

    def source() -> Iterator[Batch]:
        return batches((16,) * NUM_STEPS * 3)

    try:
        at_once, replayed, capture = run_both(
            tmp_path,
            CASES["sgd fp16"],
            source,
            read_sums_as_on_a_gpu,
            num_microbatches=3,
            words=("--run.reproducible=true",),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    require_same_bits(replayed, at_once)
    assert capture.num_replays == 3 * (NUM_STEPS - WARM_UP_STEPS)
    assert {record["grid_underflow_fraction"] for record in replayed.whole_records} == {None}
    assert None not in {record["grid_underflow_fraction"] for record in at_once.whole_records}


@pytest.mark.parametrize(("num_microbatches", "num_captures"), [(1, 1), (16, 2)])
def test_cuda_graph_serves_all_microbatches_but_the_last(num_microbatches: int, num_captures: int) -> None:
    total, ends = torch.zeros(()), torch.zeros(())

    def work(microbatches: Iterable[tuple[Prepared, bool]]) -> Tensor:
        for prepared, is_last in microbatches:
            total.add_(prepared.images_BCHW.sum())
            if is_last:
                ends.add_(1)
        return total

    def draw(step: int) -> Iterator[tuple[Prepared, bool]]:
        for index in range(num_microbatches):
            images_BCHW = torch.full((1, 1, 1, 1), float(step * num_microbatches + index))
            yield Prepared(images_BCHW, torch.zeros(1), torch.zeros(1)), index == num_microbatches - 1

    capture, weight = RecordedCapture(), nn.Parameter(torch.zeros(1))
    graphs = CudaGraphExecution(capture, optimizer=torch.optim.SGD([weight], lr=1.0))
    for step in range(NUM_STEPS):
        graphs(work, draw(step))
    count = NUM_STEPS * num_microbatches
    assert (total, ends) == (count * (count - 1) / 2, NUM_STEPS), "each microbatch once, in each step one update"
    assert capture.num_captures == num_captures
    assert capture.num_replays == num_microbatches * (NUM_STEPS - WARM_UP_STEPS)


def test_cuda_graph_skips_an_overflow_like_any(tmp_path: Path) -> None:
    settings, num_microbatches = CASES["sgd fp16"] | {"loss_scale": str(2**23)}, 2

    def source() -> Iterator[Batch]:
        return batches((16,) * NUM_STEPS * num_microbatches)

    at_once, replayed, _ = run_both(tmp_path, settings, source, num_microbatches=num_microbatches)
    require_same_bits(replayed, at_once)
    assert at_once.records[0]["overflow_steps"] < at_once.records[-1]["overflow_steps"] < NUM_STEPS


def test_cuda_graph_draws_dropout_anew_in_each_replay(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    num_microbatches = 2

    def drop_images(parts: Parts) -> None:
        def drop(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
            seen.append(F.dropout(args[0], 0.5) if module.training else args[0])
            return (seen[-1],)

        parts.model.register_forward_pre_hook(drop)

    num_batches = NUM_STEPS * num_microbatches
    at_once, replayed, capture = run_both(
        tmp_path, {}, lambda: batches((16,) * num_batches), drop_images, num_microbatches=num_microbatches
    )
    require_same_bits(replayed, at_once)
    patterns = [(dropped == 0).flatten() for dropped in seen[:num_batches]]
    assert all(not torch.equal(patterns[0], other) for other in patterns[1:])
    assert capture.num_replays == num_batches - WARM_UP_STEPS * num_microbatches


def test_cuda_graph_is_captured_for_each_size_of_images(tmp_path: Path) -> None:
    """data.train_sizes; and back again, when nothing is captured again."""
    sizes = (*(16,) * 4, *(24,) * 5, 16, 24, 16)

    def source() -> Iterator[Batch]:
        return batches(sizes)

    settings = {**FP16, "clip_norm": "1.0"}
    at_once, replayed, capture = run_both(tmp_path, settings, source, num_steps=len(sizes))
    require_same_bits(replayed, at_once)
    assert (capture.num_warm_ups, capture.num_captures) == (2 * WARM_UP_STEPS, 2)
    assert capture.num_replays == len(sizes) - 2 * WARM_UP_STEPS


def test_cuda_graph_leaves_the_weights_of_the_last_good_step_at_a_failed_input(tmp_path: Path) -> None:
    """One microbatch of two is there of the step that fails."""
    num_good, num_microbatches = 4, 2
    sizes = (16,) * (num_good * num_microbatches + 1)
    at_once, replayed, capture = run_both(
        tmp_path, {}, lambda: batches(sizes, error="the disk is gone"), num_microbatches=num_microbatches
    )
    require_same_bits(replayed, at_once)
    assert capture.num_captures == min(num_microbatches, 2)
    assert at_once.error == f"the disk is gone. The run stopped after step {num_good}."


@pytest.mark.long
def test_cuda_graph_is_gone_with_its_parts(tmp_path: Path) -> None:
    before = num_alive("_Recording")
    plan, parts = make_run(tmp_path, {})
    parts = replace(parts, graphs=captured(RecordedCapture(), parts))
    train(plan, parts, Recorder(), batches())
    assert num_alive("_Recording") == before + 1
    parts.close()
    assert num_alive("_Recording") == before


def test_cuda_graph_reports_nothing_that_replays_do_not_tell(tmp_path: Path) -> None:
    at_once, replayed, _ = run_both(tmp_path, {})
    names = ("exposed_communication_fraction", "wire_wait_fraction", "straggler_fraction")
    assert {record[name] for record in replayed.whole_records for name in names} == {None}
    assert None not in {record[name] for record in at_once.whole_records for name in names}
    found = speed(replayed.totals, None, global_batch_size=8)
    assert found["exposed_communication_fraction"] is found["straggler_fraction"] is None
    assert "exposed communication unknown" in describe(replayed.whole_records[0])
    assert "exposed unknown" in describe_briefly(replayed.whole_records[0])


def broken_by(change: Callable[[], object], tmp_path: Path) -> str:
    def break_model(parts: Parts) -> None:
        def hook(module: nn.Module, args: Any, logits_BK: Tensor) -> None:
            if module.training and torch.utils._python_dispatch._get_current_dispatch_mode():
                change()

        parts.model.register_forward_hook(hook)

    return run_both(tmp_path, {}, change=break_model)[1].error


def test_cuda_graph_refuses_a_step_that_reads_the_device(tmp_path: Path) -> None:
    error = broken_by(lambda: torch.ones(()).item(), tmp_path)
    line = "'raise RuntimeError(\"operation not permitted when stream is capturing\")'"
    assert re.search(naming("compute.cuda_graph=true: ", "8 x 3 x 16 x 16", line), error)


class BrokenCapture(RecordedCapture):
    """Fails at its end for what failed before, as torch.cuda.graph does."""

    def __init__(self, first: Exception) -> None:
        super().__init__()
        self._first = first

    def __call__(self, work: Callable[[Cut], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        try:
            raise self._first
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("first", "told", "kind"),
    [
        (DataError("bad image"), "bad image", DataError),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory", torch.OutOfMemoryError),
        (ValueError(), "ValueError in 'raise self._first'", ComputeError),
    ],
)
def test_cuda_graph_tells_the_first_error_of_a_capture(
    first: Exception, told: str, kind: type[Exception], tmp_path: Path
) -> None:
    plan, parts = make_run(tmp_path, {})
    parts = replace(parts, graphs=captured(BrokenCapture(first), parts))
    with pytest.raises(kind, match=naming(told)):
        train(plan, parts, Recorder(), batches())


def test_cuda_graph_replays_are_all_watched(tmp_path: Path) -> None:
    plan, parts = make_run(tmp_path, {})
    calls: list[None] = []
    graphs = captured(RecordedCapture(), parts, watch=lambda: calls.append(None))
    train(plan, replace(parts, graphs=graphs), Recorder(), batches())
    assert len(calls) == NUM_STEPS - WARM_UP_STEPS


class Place:
    """What require_capturable looks at of a communicator."""

    def __init__(self, device: str, backend: str) -> None:
        self.device = torch.device(device)
        self.backend = type("Backend", (), {"name": backend})()


def test_require_capturable_refuses_a_backend_of_the_host() -> None:
    place: Any = Place("cuda", "gloo")
    named = ("gloo", "compute.cuda_graph to false", "comm.backend to nccl")
    with pytest.raises(ConfigError, match=naming("compute.cuda_graph=True ", *named)):
        require_capturable(place)
    for backend in ("single", "nccl"):
        taken: Any = Place("cuda", backend)
        require_capturable(taken)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("--comm.timeline_steps=[1,2]", "comm.timeline_steps=[1, 2] "),
        ("--optimizer.name=schedulefree.AdamWScheduleFree", "optimizer.name=schedulefree.AdamWScheduleFree"),
    ],
)
def test_cuda_graph_refuses_settings_that_no_capture_has(override: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming("compute.cuda_graph=True", key)):
        load_config(["--config", "quickstart", "--compute.cuda_graph=true", override])


def test_cuda_graph_is_not_used_without_the_key(tmp_path: Path) -> None:
    assert make_run(tmp_path, {})[1].graphs is None


def test_cuda_graph_ends_the_run_at_once_without_a_gpu(tmp_path: Path) -> None:
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}", "--compute.cuda_graph=true"])
    communicator, tuned = join_job(config, ALONE)
    plan = make_plan(config, communicator, num_samples=1024, first_step=0)
    with pytest.raises(ConfigError, match=naming("compute.cuda_graph=True ", "GPU", "compute.cuda_graph to false")):
        make_parts(config, communicator, plan=plan, tuned=tuned)
