"""Models with trained weights, for evaluation."""

from pathlib import Path

import torch
from torch import nn

from bigbatch.trainer.build.model import build_classifier
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.weights import LoadedWeights, load_weights_


@torch.no_grad()  # weights that a layer computes, as weight_norm does, would have a history, and could not be copied
def make_plain_model(config: Config, *, weights: Path) -> tuple[nn.Module, LoadedWeights]:
    """Make the classifier with those weights, for evaluation: in fp32, on the CPU, with torch's own batch norm.

    Raises: CheckpointError.
    """
    model = build_classifier(config, nn.BatchNorm2d)
    loaded = load_weights_(model, weights, config=config)
    return model.eval(), loaded
