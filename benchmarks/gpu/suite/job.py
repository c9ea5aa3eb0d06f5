"""The parts and training step of a config, and the rates of several contestants in turn."""

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.suite.context import Size
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import make_communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.transport import make_transport
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.sections import SCALED
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.machine.host import wait_for
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS
from bigbatch.trainer.step.loop import TrainStep

CONFIG = "imagenet/resnet50_8k"
COMPILED: dict[str, Any] = {"compute.compile": "default"}
CAPTURED = {**COMPILED, "compute.cuda_graph": True}
"""The fastest step of bigbatch: compiled, and in one CUDA graph."""
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Flags:
    """Process-wide settings of a config or a peer, which take effect at its turn.

    They use torch's older switches only, like the trainer (docs/decisions/042): its compiler fails on a mix of both.
    """

    cudnn_benchmark: bool = field(default_factory=lambda: torch.backends.cudnn.benchmark)
    convolutions_in_tf32: bool = field(default_factory=lambda: torch.backends.cudnn.allow_tf32)
    products: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def switch(self) -> None:
        """Set torch's process-wide flags to these values."""
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.use_deterministic_algorithms(self.deterministic)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that newer switches exist
            torch.backends.cudnn.allow_tf32 = self.convolutions_in_tf32
            torch.set_float32_matmul_precision(self.products)


AS_TORCH_STARTS = Flags()


@dataclass(frozen=True)
class Contestant:
    """Trains that many steps of a batch."""

    run: Callable[[int], object]
    batch: int
    close: Callable[[], None] = lambda: None
    flags: Flags = field(default_factory=Flags)


def settings_for(size: Size, *, batch: int, precision: str) -> dict[str, Any]:
    """Return overrides of imagenet/resnet50_8k: that model on generated tensors, one microbatch a step."""
    return {
        "model.name": size.model,
        "data.loader": "synthetic",
        "data.num_synthetic_samples": 1000 * batch,
        "data.num_classes": size.num_classes,
        "data.image_size": size.image_size,
        "batch.global_batch_size": batch,
        "batch.microbatch_size": batch,
        "batch.bn_span": batch,
        "schedule.base_lr": 0.1,
        "schedule.warmup_epochs": 0,
        "schedule.decay_epochs": None,
        "compute.cpu_threads": 1 if size.name == "small" else None,
        **in_precision(precision),
    }


def in_precision(precision: str) -> dict[str, Any]:
    """Return the settings of the precision, with the loss scale that fp16 needs."""
    scale = ("optimizer.loss_scale", "optimizer.loss_scale_growth_steps")
    values = (65536.0, 2000) if precision in SCALED else (None, None)
    return {"optimizer.precision": precision, **dict(zip(scale, values, strict=True))}


def as_options(settings: Settings) -> list[str]:
    """Write settings for the command line."""
    return [f"--{key}={as_yaml(value)}" for key, value in settings.items()]


class Job:
    """Trains one rank, step by step, without reports, evaluations and checkpoints."""

    def __init__(self, settings: Settings, *, config: str = CONFIG, with_nccl: bool = False) -> None:
        """Build the job. with_nccl: sums go through NCCL, as on a cluster; a world of one leaves them out otherwise.

        Raises: ConfigError; DataError.
        """
        experiment = load_config(["--config", config, *as_options(settings)])
        communicator, tuned = join_job(experiment, ALONE)
        if with_nccl:
            control = JobControl(ALONE, timeout_seconds=communicator.connection.control.timeout_seconds)
            nccl = TorchDistributedBackend(ALONE, control, library="nccl", device=communicator.device)
            connection = Connection(ALONE, control, nccl, communicator.connection.topology)
            transport = make_transport(connection, device=communicator.device)
            communicator = make_communicator(transport, "native", wire=communicator.wire)
        self.config, self.communicator = experiment, communicator
        self.train_split, self.eval_split = build_input.make_splits(experiment, communicator)
        self.plan = make_plan(experiment, communicator, num_samples=self.train_split.num_samples, first_step=0)
        self.parts = make_parts(experiment, communicator, plan=self.plan, tuned=tuned)
        self._stream = InputStream(build_input.train_batches(experiment, self.train_split, plan=self.plan))
        self._train_step = TrainStep(self.plan, self.parts)
        self._step = 0

    def run(self, steps: int) -> None:
        """Run that many further steps."""
        self.parts.model.train()
        for _ in range(steps):
            self._train_step(self._step, self._stream)
            self._step += 1

    def run_reading_the_loss(self, steps: int) -> None:
        """Run the same, waiting on the host for each step's loss, as many training scripts do."""
        for _ in range(steps):
            self.run(1)
            self._train_step.window.sums_3.tolist()

    def close(self) -> None:
        """Stop background work, release the parts, leave the job."""
        self.parts.close()
        self.train_split.loader.close()
        self.eval_split.loader.close()
        self.communicator.close()
        if "torch._dynamo" in sys.modules:  # something was compiled
            torch._dynamo.reset()  # else the next batch size counts as a dynamic shape


def contestant(
    settings: Settings, *, config: str = CONFIG, reads_loss: bool = False, with_nccl: bool = False
) -> Contestant:
    """Make our step with those settings. Raises: ConfigError; DataError."""
    job = Job(settings, config=config, with_nccl=with_nccl)
    run = job.run_reading_the_loss if reads_loss else job.run
    return Contestant(run, job.plan.global_batch_size, job.close)


def seconds_of(action: Callable[[], object], *, device: torch.device) -> float:
    """Time a call until the device is done with it."""
    wait_for(device)
    start = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - start


def turn(each: Contestant, *, steps: int, device: torch.device) -> float:
    """Measure images per second over that many steps."""
    each.flags.switch()
    return steps * each.batch / seconds_of(lambda: each.run(steps), device=device)


def rates_in_turn(
    contestants: Mapping[str, Contestant], *, size: Size, device: torch.device
) -> dict[str, Sequence[float]]:
    """Measure images/s of each, interleaved, so that a slow spell affects all alike; the first round is discarded.

    On a GPU, which captures after some steps, a turn is long enough for a replay, at the small size too.
    """
    steps = size.steps if device.type == "cpu" else max(size.steps, WARM_UP_STEPS + 2)
    rounds = [
        {name: turn(each, steps=steps, device=device) for name, each in contestants.items()}
        for _ in range(size.rounds + 1)
    ]
    return {name: [each[name] for each in rounds[1:]] for name in contestants}
