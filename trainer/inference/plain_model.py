"""Models with trained weights, for evaluation: `bigbatch.load_model`."""

from pathlib import Path

import torch
from torch import nn

from bigbatch.errors import CheckpointError
from bigbatch.paths import as_path
from bigbatch.trainer.build.model import build_classifier
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.checkpoint.weights import LoadedWeights, load_weights_
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.folder.folder import RunDir, load_run_config


def load_model(run: str | Path, *, checkpoint: str | Path | None = None, trust_code: bool = False) -> nn.Module:
    """Return the trained model of a run folder, in evaluation mode: fp32, on the CPU, with torch's own batch norm.

    It maps images (B, 3, H, W), divided by 255 and normalized by data.mean and data.std of the run's config, to logits
    (B, K). Its attribute class_names lists the K names; None if the checkpoint has none. checkpoint: a folder, such as
    runs/quickstart/checkpoints/step-00000144; None: the newest. trust_code is --trust-code. Prints nothing, and draws
    no numbers from torch's default generators.
    Raises: bigbatch.errors.UserError, such as CheckpointError for a run without a checkpoint.
    """
    rundir = RunDir(as_path(str(run)))
    trust = [TRUST] if trust_code else []
    config = load_run_config(rundir, trust, prog="bigbatch.load_model", imports=["model.name"])
    if checkpoint is None:
        found = list_checkpoints(rundir.checkpoints)
        if not found:
            raise CheckpointError(f"{rundir.checkpoints} holds no checkpoint: train the run first, or give checkpoint=")
        checkpoint = found[-1].path
    with torch.random.fork_rng(devices=[]):
        model, loaded = make_plain_model(config, weights=as_path(str(checkpoint)))
    model.class_names = loaded.classes  # type: ignore[assignment]
    return model


@torch.no_grad()  # weights that a layer computes, as weight_norm does, would have a history, and could not be copied
def make_plain_model(config: Config, *, weights: Path) -> tuple[nn.Module, LoadedWeights]:
    """Make the classifier with those weights, for evaluation: in fp32, on the CPU, with torch's own batch norm.

    Raises: CheckpointError.
    """
    model = build_classifier(config, nn.BatchNorm2d)
    loaded = load_weights_(model, weights, config=config)
    return model.eval(), loaded
