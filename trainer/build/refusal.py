"""What a model refuses at its first forward, in a line: images too small, one value per channel, another size."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigError, UserError
from bigbatch.trainer.config.dotted import words_of
from bigbatch.trainer.machine.memory import is_out_of_memory

OF_A_DEVICE = re.compile(r"\b(CUDA|CUDNN|cuDNN|CUBLAS|NCCL|HIP)")
"""What torch names in a RuntimeError that may not come again: a device or its driver has failed."""


def explain_refusal_(model: nn.Module, *, name: str) -> None:
    """Let the first model(...) raise ConfigError if the forward fails, and then be as before. In place.

    Errors that are for a user already, of a lack of memory, or of a device stay as they are. model.forward must not be
    compiled yet, and the model not be copied before.
    """
    forward = model.forward

    def first(images_BCHW: Tensor) -> Any:
        try:
            logits_BK = forward(images_BCHW)
        except Exception as error:  # others' code may raise anything, and is to be told of it here
            if isinstance(error, UserError) or is_out_of_memory(error) or _is_of_a_device(error):
                raise
            count, _, height, width = images_BCHW.shape
            raise ConfigError(
                f"model.name={name} cannot compute {count} images of {height} x {width}: {words_of(error)}; choose "
                "another data.image_size, batch.microbatch_size or batch.bn_span, or model.options that go with them"
            ) from error
        del model.forward
        return logits_BK

    model.forward = first


def _is_of_a_device(error: Exception) -> bool:
    is_torchs = isinstance(error, RuntimeError)
    return isinstance(error, torch.AcceleratorError) or (is_torchs and OF_A_DEVICE.search(str(error)) is not None)
