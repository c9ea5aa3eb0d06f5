"""Small models of another package, as far as a config knows: by their import paths."""

import warnings

from torch import Tensor, nn
from torch.nn.utils import prune


class WithBatchNorm(nn.Module):
    """Two convolutions with torch's own batch norm, of another eps and momentum than ours has."""

    def __init__(self, num_classes: int, *, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=4),
            nn.BatchNorm2d(width, eps=1e-3, momentum=0.2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3),
            nn.BatchNorm2d(width, eps=1e-3, momentum=0.2),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.layers(images_BCHW).mean((2, 3)))
        return logits_BK


class WithAttention(nn.Module):
    """Attention over patches, with layer norm: it reads out_proj's weights without calling it."""

    def __init__(self, num_classes: int, *, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        tokens_BTD = self.norm(self.patches(images_BCHW).flatten(2).transpose(1, 2))
        seen_BTD, _ = self.attention(tokens_BTD, tokens_BTD, tokens_BTD, need_weights=False)
        logits_BK: Tensor = self.head((tokens_BTD + seen_BTD).mean(1))
        return logits_BK


class UsedInAnotherOrder(nn.Module):
    """Layers that are made from the last to the first."""

    def __init__(self, num_classes: int, *, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, num_classes)
        self.hidden = nn.Conv2d(width, width, 3)
        self.first = nn.Conv2d(3, width, 3, stride=4)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.hidden(self.first(images_BCHW).relu()).relu().mean((2, 3)))
        return logits_BK


COMPUTED = {
    "weight_norm": lambda layer: nn.utils.parametrizations.weight_norm(layer),
    "old_weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "spectral_norm": lambda layer: nn.utils.parametrizations.spectral_norm(layer),
    "old_spectral_norm": lambda layer: nn.utils.spectral_norm(layer),
    "orthogonal": lambda layer: nn.utils.parametrizations.orthogonal(layer),
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


class WithComputedWeights(nn.Module):
    """A convolution and a linear layer that compute their weights from others, by torch's own ways."""

    def __init__(self, num_classes: int, *, how: str = "weight_norm", width: int = 4) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm is deprecated
            self.convolution = COMPUTED[how](nn.Conv2d(3, width, 3, stride=4))
            self.norm = nn.BatchNorm2d(width)
            self.head = COMPUTED[how](nn.Linear(width, num_classes))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.head(self.norm(self.convolution(images_BCHW)).relu().mean((2, 3)))
        return logits_BK
