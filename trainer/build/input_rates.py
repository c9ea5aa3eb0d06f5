"""Measure the input rate of a run without training, on all ranks."""

import json
from functools import partial

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.loaders.probe import ProbedInput, probe_input
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.input.remedies import input_settings
from bigbatch.trainer.input.report import MeasuredInput, Rates
from bigbatch.trainer.machine.host import cores_per_rank
from bigbatch.trainer.step.plan import Plan


def measure_input(
    config: Config, communicator: Communicator, split: build_input.Split, *, plan: Plan, prepare: PrepareBatch
) -> MeasuredInput | None:
    """Return the input rate without training, measured on all ranks; None if no step follows. Collective."""
    if config.data.probe_seconds == 0 or plan.first_step == plan.num_steps:
        return None
    num_cores = cores_per_rank(communicator)  # after which all ranks start together
    probe = probe_input(
        split.loader,
        partial(build_input.train_requests, config, communicator, split, plan=plan),
        prepare=prepare,
        seconds=config.data.probe_seconds,
        num_fill=2 * config.data.prefetch_batches,
    )
    # also where this rank has nothing: the others wait for it here
    ranks = gather_rates(probe, communicator)
    if probe is None or ranks is None:
        return None
    is_on_gpu = communicator.device.type == "cuda"
    return MeasuredInput(ranks, input_settings(config, sizes=probe.sizes, num_cores=num_cores, is_on_gpu=is_on_gpu))


def gather_rates(probe: ProbedInput | None, communicator: Communicator) -> tuple[Rates, ...] | None:
    """Return the rates of every rank, in rank order; None if a rank could not measure. Collective."""
    texts = communicator.gather_text(json.dumps(probe.rates) if probe else "")
    return tuple(json.loads(text) for text in texts) if all(texts) else None
