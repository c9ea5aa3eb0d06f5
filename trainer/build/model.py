"""Build the classifier of a config, for training or evaluation."""

from functools import partial
from pathlib import Path

from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.group_gather import make_group_gather
from bigbatch.comm.gradients.reducer import ExposedTime
from bigbatch.trainer.build.compute import memory_format
from bigbatch.trainer.build.refusal import explain_refusal_
from bigbatch.trainer.config.batch import accumulation_steps, ghosts_per_microbatch, ranks_per_ghost
from bigbatch.trainer.config.model import is_foreign_model
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import BatchConfig
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.foreign import make_foreign, require_logits_
from bigbatch.trainer.models.freezing import freeze_
from bigbatch.trainer.models.initialization import initialize_
from bigbatch.trainer.models.norm import (
    GhostBatchNorm2d,
    NormFactory,
)
from bigbatch.trainer.models.spread_norm import RankGroup
from bigbatch.trainer.run.weights import load_weights_
from bigbatch.trainer.step.seeding import seed_weights


def make_model(config: Config, communicator: Communicator, *, exposed: ExposedTime | None = None) -> nn.Module:
    """Make the classifier in fp32, on the device, the same weights on every rank. Collective. Raises: ConfigError.

    exposed: counts the time that training waits for the other ranks of a ghost batch.
    """
    seed_weights(config.run.seed)
    accumulation = accumulation_steps(config.batch, world_size=communicator.world_size)
    norm = partial(
        GhostBatchNorm2d,
        bn_span=config.batch.bn_span,
        ghosts_per_step=accumulation * ghosts_per_microbatch(config.batch),
        group=_rank_group(config.batch, communicator, exposed=exposed or ExposedTime()),
    )
    # drawn on the CPU: its generator gives the same weights on every device
    model = _build_model(config, norm)
    initialize_(model, config.model.init, linear_std=config.model.linear_std)
    if is_foreign_model(config.model.name):
        require_logits_(model, name=config.model.name, num_classes=config.data.num_classes)
    if config.compute.compile is None:  # else it is tried before the first step, and a failure is told then
        explain_refusal_(model, name=config.model.name)
    freeze_(model, config.model.frozen or ())
    return model.to(device=communicator.device, memory_format=memory_format(config.compute))  # type: ignore[call-overload]


def _rank_group(batch: BatchConfig, communicator: Communicator, *, exposed: ExposedTime) -> RankGroup | None:
    """Return the group of ranks that share a ghost batch with this one; None if it holds whole ones. Collective."""
    num_ranks = ranks_per_ghost(batch)
    if num_ranks == 1:
        return None
    gather = make_group_gather(communicator, group_size=num_ranks, exposed=exposed, what="batch-norm statistics")
    return RankGroup(num_ranks, gather)


def make_plain_model(config: Config, *, weights: Path) -> tuple[nn.Module, tuple[str, ...] | None]:
    """Make the classifier with those weights, for evaluation: in fp32, on the CPU, with torch's own batch norm.

    Also returns the names of the classes that these weights were trained on; None if they come without.
    Raises: CheckpointError.
    """
    model = _build_model(config, nn.BatchNorm2d)
    taken = load_weights_(model, weights, config=config)
    return model.eval(), taken.classes


def _build_model(config: Config, norm: NormFactory) -> nn.Module:
    model = config.model
    if is_foreign_model(model.name):
        return make_foreign(model.name, num_classes=config.data.num_classes, norm=norm, options=model.options or {})
    options = dict(model.options or {})
    if "whitening_eps" in options:
        options["is_whitened"] = options.pop("whitening_eps") is not None
    if "zero_gamma" in options:
        options["zero_init_residual"] = options.pop("zero_gamma")
    return build_model(model.name, num_classes=config.data.num_classes, norm=norm, **options)
