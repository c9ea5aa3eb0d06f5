"""Fit a model's input whitening to the training images, once, before the first step of a run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import broadcast_parameters
from bigbatch.trainer.build.model import is_whitened
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input import order as imagenet
from bigbatch.trainer.input.base import Batch, Loader

if TYPE_CHECKING:
    from bigbatch.trainer.build.input import Split

NUM_IMAGES = 10_000
"""Number of images, as Page took; evenly spaced over the training set, which may be sorted by class."""


@torch.no_grad()
def fit_whitening_(model: nn.Module, split: "Split", *, config: Config, communicator: Communicator) -> None:
    """Set the weights of the whitening convolution, if the model has one, in place, to the same bits on all ranks.

    Weights that model.weights gave stay as they are. Collective. Raises: DataError.
    """
    if not is_whitened(config):
        return
    from bigbatch.trainer.models.whitening import PATCH, PatchWhitening, patch_sums, whitening_filters

    sums = torch.zeros(PATCH + 1, PATCH + 1, dtype=torch.float64, device=communicator.device)
    for batch in _batches(split, config=config, communicator=communicator):
        # without padding samples, which would count the last image again
        sums += patch_sums(batch.images_BCHW[batch.valid_B.to(batch.images_BCHW.device)].to(sums.device))
    communicator.sum_(sums.view(-1), label="all-reduce of patches")
    eps = (config.model.options or {})["whitening_eps"]
    filters = whitening_filters(sums, std=config.data.std, eps=eps).float().to(sums.device)
    broadcast_parameters({"whitening": filters}, communicator)  # other libraries on a rank give other last digits
    for layer in model.modules():
        if isinstance(layer, PatchWhitening):
            layer.weight.copy_(filters)


def _batches(split: "Split", *, config: Config, communicator: Communicator) -> Iterator[Batch]:
    """Yield this rank's share: whole images with loader resident (its crops are padded), else crops of epoch 0."""
    chosen_N = np.linspace(0, split.num_samples - 1, min(NUM_IMAGES, split.num_samples)).round().astype(np.int64)
    requests = imagenet.eval_requests(
        num_samples=len(chosen_N),
        microbatch_size=config.batch.microbatch_size,
        rank=communicator.rank,
        world_size=communicator.world_size,
    )
    uncropped = getattr(split.loader, "uncropped", None)
    loader: Loader = uncropped() if uncropped else split.loader
    return loader.load(replace(request, indices_B=chosen_N[request.indices_B]) for request in requests)
