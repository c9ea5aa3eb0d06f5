"""The process or job of a probe, which measures one config with the parts and the step of training."""

import dataclasses
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.comm.tuning.conditions import device_name
from bigbatch.comm.tuning.tuned import Tuned
from bigbatch.errors import DataError, DoctorError, UserError
from bigbatch.tools.doctor.exchange import ANSWERS, CONFIG, IMAGES, TENSORS, append, orders
from bigbatch.tools.doctor.measure import backward_of, flops_per_image, measure_pinning, measure_update, peak_flops
from bigbatch.tools.doctor.profile import profile_step
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.images import stage_data
from bigbatch.trainer.build.input import Splits, measure_input
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config, try_values, with_values
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.loaders.resident import ResidentLoader
from bigbatch.trainer.input.report import describe_input, input_record
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.machine.gpu_driver import compute_capability
from bigbatch.trainer.machine.host import cores_per_rank, has_cpu_bf16, seconds_of
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.stop_request import StopRequest

ENDLESS = 2**40
"""More steps than any measurement takes."""
WARM_SECONDS, MIN_WARM, MAX_WARM = 1.0, 2, 10
"""Steps before any is timed: the first ones compile, search for kernels, and learn the order of gradients."""
FIRST_IMAGES, GROWTH, ENOUGH_SECONDS, SLOW_SECONDS = 4, 4, 0.15, 1.5
"""For estimate: first number of images and its growth; seconds that suffice for a pass, and for a first pass."""


def main(argv: Sequence[str]) -> int:
    """Measure as `bigbatch doctor` asks; argv: FOLDER and the doctor's process id. Collective over the ranks of a job.

    Raises: as `bigbatch train`; DoctorError with the first line of torch's error if something does not fit or compile.
    """
    folder, doctor = Path(argv[0]), int(argv[1])
    # the doctor checked trust before it wrote this file
    config = load_config(["--config", str(folder / CONFIG), TRUST], prog="bigbatch doctor")
    env = read_process_env()
    bind_rank(config, env)
    communicator, tuned = join_job(config, env)
    try:
        probe = _Probe(config, communicator, tuned)
        is_first = communicator.rank == 0
        if is_first:
            append(folder / ANSWERS, probe.facts)
        for order in orders(folder, is_running=lambda: not probe.stop.is_set and psutil.pid_exists(doctor)):
            what = order.pop("what")
            if what == "end":
                break
            found = getattr(probe, what)(**order)
            if is_first:
                append(folder / ANSWERS, found)
        probe.close()
    except RuntimeError as error:  # out of memory, a failed compilation, a missing kernel
        if isinstance(error, UserError):
            raise
        raise DoctorError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    communicator.close()
    return 0


def remake_splits(splits: Splits, config: Config, communicator: Communicator) -> Splits:
    """Return both splits in microbatches of another size; images in memory are not read again."""
    if all(isinstance(split.loader, ResidentLoader) for split in splits):
        return Splits(
            *(
                dataclasses.replace(
                    split, loader=cast(ResidentLoader, split.loader).in_microbatches_of(config.batch.microbatch_size)
                )
                for split in splits
            )
        )
    splits.close()
    local, _ = stage_data(config, communicator.connection)
    return build_input.make_splits(local, communicator)


class _Probe:
    """Answers the doctor's orders with the parts and batches of a run: images, or tensors that are generated once."""

    def __init__(self, config: Config, communicator: Communicator, tuned: Tuned | None) -> None:
        self.communicator, self._tuned = communicator, tuned
        self.stop = StopRequest(launcher=communicator.env.agent_pid)
        local, _ = stage_data(config, communicator.connection)
        self._build(config, build_input.make_splits(local, communicator))
        fit_whitening_(self.parts.model, self.split, config=config, communicator=communicator)

    def _build(self, config: Config, splits: Splits) -> None:
        communicator, tuned = self.communicator, self._tuned
        self.config = config
        self.split, self._eval_split = splits
        plan = make_plan(config, communicator, num_samples=self.split.num_samples, first_step=0)
        parts = make_parts(config, communicator, plan=plan, tuned=tuned, train=self.split)
        # rate 0, so that weights stay: an exploding loss would change the time of a step
        self.parts: Parts = dataclasses.replace(parts, schedule=lambda step: 0.0)
        self.plan: Plan = dataclasses.replace(plan, num_steps=ENDLESS)
        self._generated_split, _ = build_input.make_splits(with_synthetic(config), communicator)
        self._streams = {IMAGES: self._open(), TENSORS: InputStream(self._generated())}
        self._num_cores = cores_per_rank(communicator.connection)
        self.train_step = TrainStep(self.plan, self.parts)
        self._numbers = count()
        self._step_seconds: dict[str, float] = {}
        self.parts.model.train()

    @property
    def facts(self) -> dict[str, Any]:
        device = self.communicator.device
        return {
            "device": device_name(device),
            "device_type": device.type,
            "torch": torch.__version__,
            "capability": compute_capability(device),
            "num_cores": self._num_cores,
            "num_threads": torch.get_num_threads(),
            "world_size": self.communicator.world_size,
            "has_cpu_bf16": device.type == "cpu" and has_cpu_bf16(),
        }

    def shrink(self, *, values: Mapping[str, Any], **_: object) -> dict[str, Any]:
        """Measure the config with these values from now on, in this process. Collective."""
        changed = try_values(self.config, values, world_size=self.communicator.world_size)
        assert isinstance(changed, Config), "the doctor has tried it"
        self._streams = {}
        splits = Splits(self.split, self._eval_split)
        if changed.batch.microbatch_size != self.config.batch.microbatch_size:
            splits = remake_splits(splits, changed, self.communicator)
        self.parts.close()
        self._build(changed, splits)
        return {}

    def estimate(self, *, seconds: float) -> dict[str, Any]:
        """Return the floating-point operations and approximate seconds per image, before any whole step. Collective."""
        device, prepared = self.communicator.device, self.parts.prepare(next(self._generated()))
        size = len(prepared.labels_B)
        # on a GPU few images take as long as many
        number = size if device.type != "cpu" else min(size, FIRST_IMAGES)
        start = time.perf_counter()
        flops = flops_per_image(self.parts, prepared)
        taken, counted = self._agreed(time.perf_counter() - start), 1
        if device.type != "cpu" or taken < SLOW_SECONDS:
            taken = 0.0  # a first pass also loads libraries, finds kernels and allocates memory
        while taken == 0.0 or (taken < ENOUGH_SECONDS and counted < size):
            backward = partial(backward_of, self.parts, prepared, num_images=number)
            backward()  # warms up
            taken, counted = self._agreed(seconds_of(backward, device)), number
            number = min(size, GROWTH * number)
        return {"flops_per_image": flops, "seconds_per_image": taken / counted}

    def steps(self, *, batches: str, seconds: float, flushes: bool) -> dict[str, Any]:
        """Time whole updates together, for about that many seconds, after a warm-up. Collective.

        flushes: first use up the batches that were prefetched during another probe's turn.
        """
        stream, reducer = self._streams[batches], self.parts.reducer
        self._warm_up(batches, seconds=seconds, flushes=flushes)
        # steps are collective: all ranks must run the same number of them
        number = int(self._agreed(max(1, round(seconds / self._step_seconds[batches]))))
        stream.take_wait_seconds()
        reducer.exposed.take_seconds()
        taken = self._timed(stream, number)
        mine = {
            "seconds": taken / number,
            "wait_seconds": stream.take_wait_seconds() / number,
            "exposed_seconds": reducer.exposed.take_seconds() / number,
            "peak_bytes": peak_bytes(self.communicator.device),
            "failure": stream.failure.reason if stream.failure else None,
        }
        ranks = self.communicator.gather(mine)
        if failures := [each["failure"] for each in ranks if each["failure"]]:
            raise DataError(failures[0])
        self._step_seconds[batches] = max(each["seconds"] for each in ranks)
        return {
            "steps": number,
            "images": self.plan.global_batch_size,
            "seconds": self._step_seconds[batches],
            "wait_seconds": max(each["wait_seconds"] for each in ranks),
            # None if a CUDA graph hides it
            "exposed_seconds": (
                sum(each["exposed_seconds"] for each in ranks) / len(ranks) if not self.parts.is_captured else None
            ),
            "peak_bytes": max(each["peak_bytes"] for each in ranks),
        }

    def input(self, *, seconds: float) -> dict[str, Any]:
        """Measure the loader without a model; {} if it meets a bad image. Collective."""
        self._streams[IMAGES] = InputStream(iter(()))  # a loader has one iterator at a time
        config = dataclasses.replace(self.config, data=dataclasses.replace(self.config.data, probe_seconds=seconds))
        measured = measure_input(config, self.communicator, self.split, plan=self.plan, prepare=self.parts.prepare)
        self._streams[IMAGES] = self._open()
        if measured is None:
            return {}
        return {
            "line": describe_input(measured.ranks),
            "ranks": measured.ranks,
            "settings": dataclasses.asdict(measured.settings),
            **input_record(measured.rates, step=0),
        }

    def profile(self, *, batches: str, seconds: float) -> dict[str, Any]:
        """Profile the step on the first rank. Collective."""
        self._warm_up(batches, seconds=seconds, flushes=False)
        number = int(self._agreed(max(1, round(seconds / self._step_seconds[batches]))))
        return profile_step(
            partial(self._timed, self._streams[batches]),
            self.communicator,
            num_steps=number,
            is_captured=self.parts.is_captured,
        )

    def roofline(self, *, seconds: float) -> dict[str, Any]:
        device, precision = self.communicator.device, self.config.optimizer.precision
        return {"peak_flops": peak_flops(device, precision=precision, seconds=seconds)}

    def always(self, *, seconds: float) -> dict[str, Any]:
        """Measure the gain of options that are always on, on this rank: the fused update, and pinned copies."""
        batch = next(self._generated())
        return {
            "update": measure_update(self.config.optimizer, self.parts, seconds=seconds / 2),
            "pinning": measure_pinning(batch.images_BCHW.nbytes, self.communicator.device, seconds=seconds / 2),
        }

    def close(self) -> None:
        """Close the loaders and the parts."""
        self.parts.close()
        self.split.loader.close()
        self._eval_split.loader.close()

    def _open(self) -> InputStream:
        return InputStream(build_input.train_batches(self.config, self.split, plan=self.plan))

    def _generated(self) -> Iterator[Batch]:
        split = self._generated_split
        return build_input.train_batches(self.config, split, plan=self.plan)

    def _warm_up(self, batches: str, *, seconds: float, flushes: bool) -> None:
        """Warm up: first until step times settle; later only until prefetched batches are used up."""
        stream = self._streams[batches]
        # the steps for which batches were prefetched during another probe's turn
        division = self.plan.division
        # by the share of the last rank, the smallest: ranks take the same number of steps
        ahead = -(-self.config.data.prefetch_batches // len(division.of(division.world_size - 1)))
        if batches in self._step_seconds:
            self._timed(stream, ahead if flushes else 0)
            return
        # a warm model needs one step with the other kind of batches, to learn its seconds
        self._timed(stream, 0 if self._step_seconds else MIN_WARM - 1)
        taken = self._timed(stream, 1)
        more = int(self._agreed(min(MAX_WARM, min(WARM_SECONDS, 2 * seconds) // taken)))
        self._step_seconds[batches] = self._timed(stream, more) / more if more else taken

    def _agreed(self, number: float) -> float:
        """Return the first rank's number on all ranks."""
        return float(self.communicator.gather(number)[0])

    def _timed(self, stream: InputStream, num_steps: int) -> float:
        """Return the seconds of that many steps, to the end of the device's work."""

        def run() -> None:
            for _ in range(num_steps):
                if self.stop.is_set:
                    raise KeyboardInterrupt
                self.train_step(next(self._numbers), stream)

        return seconds_of(run, self.communicator.device)


def with_synthetic(config: Config) -> Config:
    """Return the config with tensors that are generated once instead of images."""
    size = config.batch.global_batch_size
    data = {"data.loader": "synthetic", "data.num_synthetic_samples": size, "data.crop": "resized"}
    return with_values(config, {**data, "data.crop_area_min": 1.0})


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors took on a GPU, or this process on a CPU, since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts it in KiB
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
