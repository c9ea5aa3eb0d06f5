"""A whole step on a GPU that is played: what its streams wait for, and which copies go between it and the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_settings import FP16
from recorded_gpu import GPU, RecordedGpu
from recorded_ranks import first_rank
from stream_order import require_every_wait

from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.observe.replicas import digest, replicas
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS
from bigbatch.trainer.step.loop import TrainStep

RANK_SIZE = 4
"""Images of a rank and step."""


def batches() -> Iterator[Batch]:
    """Yield batches in page-locked memory, as a loader does."""
    while True:
        images = torch.empty((RANK_SIZE, 16, 16, 3), dtype=torch.uint8, pin_memory=True)
        images.numpy().fill(7)
        yield Batch(
            images.permute(0, 3, 1, 2),
            torch.arange(RANK_SIZE),
            torch.ones(RANK_SIZE, dtype=torch.bool),
            Request(0, np.arange(RANK_SIZE), np.ones(RANK_SIZE, bool)),
        )


@contextmanager
def run(
    gpu: RecordedGpu, folder: Path, *, num_steps: int = 3, library: str = "nccl", **settings: str
) -> Iterator[None]:
    """Some steps of the first of four ranks, as a config makes them, after the one that learns the gradients' order."""
    with first_rank(algorithm="native", library=library) as communicator:
        arguments = [
            *(
                "--config",
                "quickstart",
                f"--run.directory={folder}",
                "--model.options.width=2",
                "--data.bind_numa=false",
            ),
            *(f"--batch.global_batch_size={4 * RANK_SIZE}", f"--batch.microbatch_size={RANK_SIZE}"),
            *("--batch.bn_span=4", "--comm.threshold_bytes=8192", "--comm.buffer_bytes=8192"),
            *(f"--{key}={value}" for key, value in settings.items()),
        ]
        config = load_config(arguments)
        plan = make_plan(config, communicator, num_samples=64, first_step=0)
        step = TrainStep(plan, make_parts(config, communicator, plan=plan, tuned=None))
        stream = InputStream(batches())
        step(0, stream)
        gpu.copies.clear()
        gpu.trace.judge_from_here()
        for number in range(1, num_steps):
            step(number, stream)
        step.parts.precision.wait_for_weights()
        for weight in step.parts.model.parameters():
            weight.detach().sum()  # as an evaluation or a checkpoint reads them
        digest(replicas(step.parts, done=num_steps).values())
        yield
        step.parts.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedGpu]:
    """One that this thread uses."""
    played = RecordedGpu(monkeypatch)
    with played.running():
        yield played


CASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "by way of the host": {"library": "gloo"},
    "sharded": {"optimizer.sharded": "true"},
    "captured": {"compute.cuda_graph": "true", "num_steps": WARM_UP_STEPS + 2},
    "sharded, captured": {"optimizer.sharded": "true", "compute.cuda_graph": "true", "num_steps": WARM_UP_STEPS + 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] if case == "sharded, captured" else []) for case in CASES]
)
def test_step_waits_for_what_it_must(gpu: RecordedGpu, tmp_path: Path, case: str) -> None:
    with run(gpu, tmp_path, **CASES[case]):
        # the sharded update starts all its gathers at once, each of which waits for the same; and what watches a replay
        # gives the GPU nothing to do but to write a number, which the host reads at any time
        require_every_wait(gpu.trace, by_place=" submit" if "sharded" in case or "captured" in case else None)


COPIES = {
    ("from the host", "copy"),  # the images' bytes
    ("from the host", "on_device"),  # their labels
    ("to the host", "submit"),  # how far the GPU has come
}
"""All that go between host and GPU in a step: in which way, and in which function."""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{**FP16, "ema_decay": "0.5", "ema_every_steps": "1"}, {"sharded": "true"}])
def test_step_copies_nothing_but_what_is_listed(gpu: RecordedGpu, tmp_path: Path, settings: dict[str, str]) -> None:
    with run(gpu, tmp_path, **{f"optimizer.{key}": value for key, value in settings.items()}):
        assert [copy for copy in gpu.copies if copy.is_blocking] == []
        assert {(copy.way, copy.place.split()[1]) for copy in gpu.copies} == COPIES


def test_a_copy_that_the_host_waits_for_is_seen(gpu: RecordedGpu) -> None:
    there_N, here_N = torch.zeros(3, device=GPU), torch.zeros(3)
    ways: list[Callable[[], object]] = [
        lambda: there_N.cpu(),
        lambda: there_N.tolist(),
        lambda: float(there_N[0]),
        lambda: bool(there_N[0] > 0),
        lambda: here_N.copy_(there_N, non_blocking=True),  # not locked
        lambda: there_N.copy_(here_N),
        lambda: there_N.__setitem__(0, 1.0),
        lambda: torch.tensor([1.0], device=GPU),
        lambda: there_N[torch.tensor([0])],
    ]
    for way in ways:
        gpu.copies.clear()
        way()
        assert {copy.is_blocking for copy in gpu.copies} == {True}
