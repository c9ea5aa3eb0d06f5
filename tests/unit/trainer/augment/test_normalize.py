"""Normalisation on the device against its formula."""

import torch

from bigbatch.trainer.input.prepare_batch import Normalize


def test_normalize_is_the_formula() -> None:
    images_BCHW = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8).to(memory_format=torch.channels_last)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    normalized = Normalize(mean=mean, std=std, device=torch.device("cpu"), dtype=torch.float32)(images_BCHW)
    for c in range(3):
        expected = (images_BCHW[:, c].double() / 255 - mean[c]) / std[c]
        assert torch.allclose(normalized[:, c].double(), expected, atol=1e-6)
    assert normalized.is_contiguous(memory_format=torch.channels_last)
