"""Build loss and metrics of a config; user_score.py builds those that are not cross-entropy."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch.trainer.config.optimizer import CROSS_ENTROPY
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.step.score import Score

if TYPE_CHECKING:
    from bigbatch.trainer.build.input import Split


def make_loss(
    config: Config, device: torch.device, *, train: "Split | None" = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the training loss: a sum over a microbatch's images. Raises: ConfigError for an unfit loss.

    train: the split whose labels scale the weights of classes; None: a trial without data, which has none.
    """
    optimizer = config.optimizer
    if optimizer.loss == CROSS_ENTROPY:
        weight_K = None
        if train is not None and optimizer.loss_options:
            from bigbatch.trainer.build.user_score import class_weights

            weight_K = class_weights(config, train, device)
        return partial(F.cross_entropy, weight=weight_K, label_smoothing=optimizer.label_smoothing, reduction="sum")
    from bigbatch.trainer.build.user_score import make_user_loss

    own = make_user_loss(config, device)
    return lambda logits_BK, targets: own(logits_BK, targets).sum()


def make_score(config: Config, device: torch.device) -> Score:
    """Return loss and metrics of an evaluation. Raises: ConfigError for an unfit loss or metric."""
    if config.optimizer.loss == CROSS_ENTROPY and not config.run.metrics:
        return Score()
    from bigbatch.trainer.build.user_score import make_user_score

    return make_user_score(config, device)
