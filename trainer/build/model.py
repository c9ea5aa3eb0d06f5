"""Build the classifier of a config, for training or evaluation."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.errors import ConfigError, UserError
from bigbatch.trainer.config.batch import ghosts_per_microbatch, ranks_per_ghost
from bigbatch.trainer.config.checks import is_foreign_model
from bigbatch.trainer.config.dotted import as_line
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.prepare_batch import memory_format
from bigbatch.trainer.machine.host import is_out_of_memory
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, NormFactory

DEVICE_NAMES = re.compile(r"\b(CUDA|CUDNN|cuDNN|CUBLAS|NCCL|HIP)")
"""Names in a RuntimeError of torch by which a device or its driver has failed, not the model: it may not recur."""

MIXED_DTYPES = re.compile("dtype|scalar type|Input type", re.IGNORECASE)
"""Words by which torch refuses tensors of several dtypes in one operation."""


def make_model(config: Config, communicator: Communicator, *, exposed: ExposedTime | None = None) -> nn.Module:
    """Make the classifier in fp32, on the device, the same weights on every rank. Collective. Raises: ConfigError.

    exposed: counts the time that training waits for the other ranks of a ghost batch.
    """
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    group, num_ranks = None, ranks_per_ghost(config.batch)
    if num_ranks > 1:
        from bigbatch.comm.gradients.group_gather import make_group_gather
        from bigbatch.trainer.models.spread_norm import RankGroup

        exposed, what = exposed or ExposedTime(), "batch-norm statistics"
        gather = make_group_gather(communicator.transport, group_size=num_ranks, exposed=exposed, what=what)
        group = RankGroup(num_ranks, gather)
    norm = partial(
        GhostBatchNorm2d, bn_span=config.batch.bn_span, ghosts_per_step=ghosts_per_microbatch(config.batch), group=group
    )
    # drawn on the CPU: its generator gives the same weights on every device
    model = build_classifier(config, norm)
    if config.model.init is not None or config.model.linear_std is not None:
        from bigbatch.trainer.models.initialization import initialize_

        initialize_(model, config.model.init, linear_std=config.model.linear_std)
    if is_foreign_model(config.model.name):
        from bigbatch.trainer.models.foreign import require_logits_

        require_logits_(model, name=config.model.name, num_classes=config.data.num_classes)
    if config.compute.compile is None:  # set_up_compute_ tries a compiled model, and reports its failure
        explain_refusal_(model, name=config.model.name)
    if config.model.frozen or not any(parameter.requires_grad for parameter in model.parameters()):
        from bigbatch.trainer.models.frozen import freeze_

        freeze_(model, config.model.frozen or ())  # raises ConfigError if nothing is left to train
    return model.to(device=communicator.device, memory_format=memory_format(config.compute))  # type: ignore[call-overload]


def build_classifier(config: Config, norm: NormFactory) -> nn.Module:
    """Build the classifier of a config in fp32, on the CPU, with norm's layers as batch norms. Raises: ConfigError."""
    model = config.model
    if is_foreign_model(model.name):
        from bigbatch.trainer.models.foreign import make_foreign

        return make_foreign(model.name, num_classes=config.data.num_classes, norm=norm, options=model.options or {})
    options = dict(model.options or {})
    if "whitening_eps" in options:
        options["is_whitened"] = options.pop("whitening_eps") is not None
    if "zero_gamma" in options:
        options["zero_init_residual"] = options.pop("zero_gamma")
    return build_model(model.name, num_classes=config.data.num_classes, norm=norm, **options)


def explain_refusal_(model: nn.Module, *, name: str) -> None:
    """Make the first model(...) raise ConfigError if the forward fails; later calls are unchanged. In place.

    UserError, out-of-memory errors and errors of a device stay as they are. Call it before model.forward is compiled,
    and do not copy the model before its first call.
    """
    forward = model.forward

    def first(images_BCHW: Tensor) -> Any:
        try:
            logits_BK = forward(images_BCHW)
        except Exception as error:  # foreign code may raise anything; it is reported here
            if isinstance(error, UserError) or is_out_of_memory(error) or _is_of_device(error):
                raise
            raise _refusal(error, images_BCHW, name=name) from error
        del model.forward
        return logits_BK

    model.forward = first


def _is_of_device(error: Exception) -> bool:
    is_named = isinstance(error, RuntimeError) and DEVICE_NAMES.search(str(error)) is not None
    return isinstance(error, torch.AcceleratorError) or is_named


def _refusal(error: Exception, images_BCHW: Tensor, *, name: str) -> ConfigError:
    count, _, height, width = images_BCHW.shape
    dtype = str(images_BCHW.dtype).removeprefix("torch.")
    remedy = (
        "choose another data.image_size, batch.microbatch_size or batch.bn_span, or model.options that go with them"
    )
    if MIXED_DTYPES.search(str(error)):
        remedy = f"images and weights are {dtype} here (optimizer.precision): make buffers and constants so, too"
    return ConfigError(
        f"model.name={name} cannot compute {count} images of {height} x {width}: {as_line(error)}; {remedy}"
    )


def require_sizes(config: Config, model: nn.Module, *, logits: Callable[[int, int], Tensor]) -> None:
    """Raise ConfigError if the model refuses one of data.train_sizes, which a run would reach only after epochs.

    Computes two images of each size in evaluation mode, which changes no statistics and draws nothing from the run's
    generators. Call it before the model is compiled. logits: logits_of_noise of the model.
    """
    was_training, is_explained = model.training, "forward" in vars(model)
    model.eval()
    with torch.no_grad():
        for size in sorted({size for _, size in config.data.train_sizes or ()}):
            if "forward" not in vars(model):
                explain_refusal_(model, name=config.model.name)
            logits(2, size)
    model.train(was_training)
    if is_explained and "forward" not in vars(model):
        explain_refusal_(model, name=config.model.name)


def is_whitened(config: Config) -> bool:
    """Return whether the model has a whitening convolution, whose weights the data give at the start of a run."""
    return (config.model.options or {}).get("whitening_eps") is not None and config.model.weights is None
