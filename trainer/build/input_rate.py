"""Measure the input rate of all ranks without training, before the first step."""

from functools import partial

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.trainer.build.input import Split, train_requests
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.loaders.probe import ProbedInput, probe_input
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.input.report import MeasuredInput, Rates, input_settings
from bigbatch.trainer.machine.host import cores_per_rank
from bigbatch.trainer.step.plan import Plan


def measure_input(
    config: Config, communicator: Communicator, split: Split, *, plan: Plan, prepare: PrepareBatch
) -> MeasuredInput | None:
    """Return the input rate, measured on all ranks; None if a rank met a bad image. Collective."""
    num_cores = cores_per_rank(communicator.connection)  # a collective: after it, all ranks start the probe together
    probe = probe_input(
        split.loader,
        partial(train_requests, config, split, plan=plan),
        prepare=prepare,
        seconds=config.data.probe_seconds,
        num_fill=2 * config.data.prefetch_batches,
    )
    # a rank that could not measure calls it too: it is a collective
    ranks = gather_rates(probe, communicator.connection)
    if probe is None or ranks is None:
        return None
    is_on_gpu = communicator.device.type == "cuda"
    is_packed = not isinstance(split.index, ImageIndex)
    settings = input_settings(config, sizes=probe.sizes, num_cores=num_cores, is_on_gpu=is_on_gpu, is_packed=is_packed)
    return MeasuredInput(ranks, settings)


def gather_rates(probe: ProbedInput | None, connection: Connection) -> tuple[Rates, ...] | None:
    """Return the rates of every rank, in rank order; None if a rank could not measure. Collective."""
    rates = connection.gather(probe and probe.rates)
    return None if None in rates else tuple(rates)
