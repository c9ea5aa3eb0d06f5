"""Input patch whitening: a fixed 3x3 convolution that takes the covariance out of the images' patches.

Source: David Page, "How to Train Your ResNet", part 8: filters V / sqrt(L + eps) of the eigenvectors V and eigenvalues
L of the covariance of 3x3 patches; a learned 1x1 convolution follows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 3
PATCH = 3 * SIDE**2
"""Number of values in a patch (K below), and of channels after whitening."""
PORTION_PIXELS = 2**20
"""Pixels whose patches are in memory at the same time; a patch is 28 numbers of float64."""


class PatchWhitening(nn.Module):
    """Turns images into 27 channels. The weights are a buffer: saved with the others, never trained, always fp32.

    Until they are fitted to images, each channel is one value of the patch.
    """

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(PATCH).view(PATCH, 3, SIDE, SIDE))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return (B, 27, H, W), in the dtype of the images."""
        return F.conv2d(images_BCHW, self.weight.to(images_BCHW.dtype), padding=SIDE // 2)


def patch_sums(images_BCHW: Tensor) -> Tensor:
    """Sum the outer product of (patch, 1) with itself over all patches of uint8 images: (28, 28), float64.

    Sums of such sums are exact in any order: they are whole numbers below 2**53 for up to 10**11 patches.
    """
    height, width = images_BCHW.shape[2:]
    total = torch.zeros(PATCH + 1, PATCH + 1, dtype=torch.float64, device=images_BCHW.device)
    for portion_BCHW in images_BCHW.split(max(1, PORTION_PIXELS // (height * width))):
        patches_BKL = F.unfold(portion_BCHW.double().contiguous(), SIDE)
        # with a 1 behind each patch, one product gives second moments, sums and the count
        patches_BKL = torch.cat([patches_BKL, torch.ones_like(patches_BKL[:, :1])], dim=1)
        total += torch.einsum("bkl,bml->km", patches_BKL, patches_BKL)
    return total


def whitening_filters(sums: Tensor, *, std: Sequence[float], eps: float) -> Tensor:
    """Return filters from patch_sums of bytes, for images divided by 255 and std: (27, 3, 3, 3), float64, on the CPU.

    The direction of the largest eigenvalue comes first; the largest number of each filter, by magnitude, is positive.
    Filtered patches have the covariance diag(L / (L + eps)).
    """
    sums = sums.cpu()
    count, mean_K = sums[-1, -1], sums[:-1, -1] / sums[-1, -1]
    # unfold has the 9 pixels of a channel side by side
    scale_K = 1 / (255 * torch.tensor(std, dtype=torch.float64)).repeat_interleave(SIDE**2)
    covariance_KK = (sums[:-1, :-1] / count - mean_K.outer(mean_K)) * scale_K.outer(scale_K)
    values_K, vectors_KK = torch.linalg.eigh(covariance_KK)
    # rounding can leave the smallest eigenvalues just below 0
    filters_KK = vectors_KK.T / (values_K.clamp(min=0) + eps).sqrt()[:, None]
    # the sign of an eigenvector is arbitrary, and libraries differ in it
    largest_K1 = filters_KK.gather(1, filters_KK.abs().argmax(1, keepdim=True))
    # eigh returns the eigenvalues in ascending order
    return (filters_KK * largest_K1.sign()).flip(0).view(PATCH, 3, SIDE, SIDE)
