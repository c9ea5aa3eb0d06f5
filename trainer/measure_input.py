"""Measures what a run's input delivers on its own, on all ranks."""

from dataclasses import asdict
from functools import partial

import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer import build_input
from bigbatch.trainer.config import Config
from bigbatch.trainer.data.probe import Probe, probe_input
from bigbatch.trainer.host import cores_per_rank
from bigbatch.trainer.input_report import PARTS, MeasuredInput, Rates, input_settings
from bigbatch.trainer.loop import Plan


def measure_input(
    config: Config, communicator: Communicator, split: build_input.Split, *, plan: Plan
) -> MeasuredInput | None:
    """What the training input delivers on its own, on all ranks at once; None where no step is to come. Collective."""
    if config.data.probe_seconds == 0 or plan.first_step == plan.num_steps:
        return None
    num_cores = cores_per_rank(communicator)  # after which all ranks start together
    probe = probe_input(
        split.loader,
        partial(build_input.train_requests, config, communicator, split, plan=plan),
        prepare=build_input.make_prepare(config, communicator),
        seconds=config.data.probe_seconds,
        num_fill=2 * config.data.prefetch_batches,
    )
    rates = sum_rates(probe, communicator)
    if probe is None or rates is None:
        return None
    is_on_gpu = communicator.device.type == "cuda"
    return MeasuredInput(rates, input_settings(config, sizes=probe.sizes, num_cores=num_cores, is_on_gpu=is_on_gpu))


def sum_rates(probe: Probe | None, communicator: Communicator) -> Rates | None:
    """Of all ranks together; None where one of them could not measure. Collective."""
    mine = asdict(probe.rates) if probe else {}
    values = [*(mine.get(part) or 0.0 for part in PARTS), float(probe is None)]
    all_6 = torch.tensor(values, dtype=torch.float64, device=communicator.device)
    *sums, num_failed = communicator.sum_(all_6, label="rates of the input alone").tolist()
    # all ranks have the same stages; one that there is not has no rate on any
    return None if num_failed else {part: rate or None for part, rate in zip(PARTS, sums, strict=True)}
