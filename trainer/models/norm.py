"""Ghost batch norm, whose running statistics do not depend on ranks and microbatches."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from bigbatch.trainer.models.spread_norm import RankGroup

NormFactory: TypeAlias = Callable[[int], nn.Module]
"""Builds the norm layer for a number of channels."""


def ghost_momentum(ghost_index: int, *, momentum: float, ghosts_per_step: int) -> float:
    """Compute the momentum of one ghost batch that makes all ghost batches of a step weigh the same.

    Updates r <- (1 - b_k) r + b_k stat_k for k = 0..K-1 leave stat_k with weight b_k prod_{j>k} (1 - b_j).
    That is m / K for every k when b_k = m / (K - (K-1-k) m): the later updates keep the share
    prod_{j>k} (1 - b_j) = 1 - (K-1-k) m / K. What stays of the old value is then exactly 1 - m.
    """
    num_later = ghosts_per_step - 1 - ghost_index
    return momentum / (ghosts_per_step - num_later * momentum)


class NormalizeGhosts(torch.autograd.Function):
    """Normalises each ghost batch by torch's own kernel, which writes into the ghost batch's slice of the result.

    The bits are those of F.batch_norm of each ghost batch alone, whatever the number of ghost batches in a microbatch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        images_BCHW: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        running_mean_C: Tensor,
        running_var_C: Tensor,
        momenta: Sequence[float],
        eps: float,
    ) -> Tensor:
        """Normalise len(momenta) ghost batches, and update the running statistics with each in turn."""
        moments_G2C = weight_C.new_empty(len(momenta), 2, len(weight_C))
        normalized_BCHW = torch.empty_like(images_BCHW)
        ghosts = zip(*_ghosts(len(momenta), images_BCHW, normalized_BCHW), moments_G2C, momenta, strict=True)
        for ghost_BCHW, result_BCHW, moments_2C, momentum in ghosts:
            torch.native_batch_norm(
                ghost_BCHW,
                weight_C,
                bias_C,
                running_mean_C,
                running_var_C,
                True,
                momentum,
                eps,
                out=(result_BCHW, *moments_2C),
            )
        ctx.save_for_backward(images_BCHW, weight_C, moments_G2C)
        ctx.eps = eps
        return normalized_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of images, weight and bias; the last two are sums from the last ghost batch on."""
        images_BCHW, weight_C, moments_G2C = ctx.saved_tensors
        grad_images_BCHW = torch.empty_like(images_BCHW)
        totals: list[Tensor] = []
        ghosts = zip(*_ghosts(len(moments_G2C), images_BCHW, grad_BCHW, grad_images_BCHW), moments_G2C, strict=True)
        for ghost_BCHW, ghost_grad_BCHW, result_BCHW, moments_2C in reversed([*ghosts]):
            images_grad_BCHW, *sums = torch.ops.aten.native_batch_norm_backward(
                ghost_grad_BCHW, ghost_BCHW, weight_C, None, None, *moments_2C, True, ctx.eps, [True] * 3
            )
            result_BCHW.copy_(images_grad_BCHW)  # torch's backward kernel takes no output tensor
            totals = [total_C.add_(sum_C) for total_C, sum_C in zip(totals, sums, strict=True)] if totals else sums
        return grad_images_BCHW, *totals, None, None, None, None


def _ghosts(count: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.chunk(count) for tensor in tensors]


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Normalises groups of exactly bn_span samples, taken in sample order (Hoffer et al. 2017).

    After ghosts_per_step (K) ghost batches the running statistics are (1-m) * old + m * mean of the K ghost statistics.
    K is their number in a step, or in a microbatch if MicrobatchStatistics gathers them.
    Statistics are computed and kept in the dtype of the weights (fp32) for half-precision input too.
    group: ranks that share each ghost batch, an equal part each; None if this rank holds it whole. Forward and
    backward are then collectives of the group.
    num_batches_tracked stays as it is (one kernel per layer saved): only momentum=None would read it.
    """

    def __init__(
        self,
        num_features: int,
        *,
        bn_span: int,
        ghosts_per_step: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        group: "RankGroup | None" = None,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.bn_span = bn_span
        self.group = group
        self.part_size = bn_span // group.num_ranks if group else bn_span
        """Samples of a ghost batch on this rank."""
        self.ghosts_per_step = ghosts_per_step
        self.weigh_ghosts()
        # Not in the state_dict: a checkpoint is taken between steps, where it is 0.
        self.ghost_index = 0
        self.gathered: tuple[Tensor, Tensor] | None = None
        """Buffers for mean and variance from MicrobatchStatistics, used instead of the running ones."""
        self.is_frozen = False
        """Whether training uses the running statistics, as evaluation does."""

    def weigh_ghosts(self) -> None:
        """Compute the momentum of each ghost batch from that of a step: Python numbers, so no forward waits."""
        assert self.momentum is not None
        self._weighed, count = self.momentum, self.ghosts_per_step
        self._momenta = [ghost_momentum(k, momentum=self.momentum, ghosts_per_step=count) for k in range(count)]

    def train(self, mode: bool = True) -> "GhostBatchNorm2d":
        return super().train(mode and not self.is_frozen)

    def joins_relu(self, images_BCHW: Tensor) -> bool:
        """Return whether compiled code normalises all ghost batches by one set of kernels, also with ReLU."""
        return images_BCHW.is_cuda and self.training and self.group is None and self.part_size > 1

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalise each ghost batch separately; in eval mode, plain batch norm with running statistics."""
        if not self.training:
            return super().forward(images_BCHW)
        if is_compiling() and self.joins_relu(images_BCHW):
            return normalize_views((self, images_BCHW), has_relu=False)
        momenta = self.take_momenta(images_BCHW.shape)
        running_C = self.gathered or (self.running_mean, self.running_var)
        if len(momenta) == 1:  # not split: backward of a split copies, even of one part
            return self._normalize_ghost(images_BCHW, *running_C, momentum=momenta[0])
        return self._normalize_ghosts(images_BCHW, *running_C, momenta=momenta)

    def _normalize_ghosts(self, images_BCHW: Tensor, mean_C: Any, var_C: Any, *, momenta: list[float]) -> Tensor:
        # not if a compiler fuses the kernels, nor on a GPU, where cuDNN's write no slices (docs/decisions/003)
        is_eager_cpu = images_BCHW.device.type == "cpu" and not is_compiling()
        if self.group is None and is_eager_cpu:
            normalized: Tensor = NormalizeGhosts.apply(
                images_BCHW, self.weight, self.bias, mean_C, var_C, momenta, self.eps
            )
            return normalized
        ghosts = zip(images_BCHW.split(self.part_size), momenta, strict=True)
        return torch.cat([self._normalize_ghost(ghost, mean_C, var_C, momentum=momentum) for ghost, momentum in ghosts])

    def take_momenta(self, shape: torch.Size) -> list[float]:
        """Return the momentum of each ghost batch of the next images, of shape (B, C, H, W). Raises: as _misfit."""
        num_ghosts, rest = divmod(shape[0], self.part_size)
        first, end = self.ghost_index, self.ghost_index + num_ghosts
        if num_ghosts == 0 or rest or end > self.ghosts_per_step or self.bn_span * shape[2] * shape[3] == 1:
            raise self._misfit(*shape)
        if self.momentum != self._weighed:
            self.weigh_ghosts()
        self.ghost_index = end % self.ghosts_per_step
        return self._momenta[first:end]

    def _misfit(self, num_samples: int, _: int, height: int, width: int) -> ValueError:
        """Return the error for a batch that is not a multiple of this rank's part of bn_span, or exceeds the step.

        Also for ghost batches of one value per channel, which has no variance.
        """
        if self.bn_span * height * width == 1:
            return ValueError(
                f"Expected more than 1 value per channel when training, got {num_samples} images of 1 x 1 pixel with "
                "batch.bn_span=1: set a larger batch.bn_span or data.image_size"
            )
        num_ghosts, rest = divmod(num_samples, self.part_size)
        if num_ghosts == 0 or rest:
            shared = f" / {self.group.num_ranks} ranks" if self.group else ""
            return ValueError(f"batch of {num_samples} samples is not a multiple of bn_span {self.bn_span}{shared}")
        return ValueError(
            f"{num_ghosts} ghost batches after {self.ghost_index} do not fit into a step of "
            f"ghosts_per_step {self.ghosts_per_step}"
        )

    def _normalize_ghost(self, ghost_BCHW: Tensor, mean_C: Any, var_C: Any, *, momentum: float) -> Tensor:
        if self.group is None:
            return F.batch_norm(
                ghost_BCHW, mean_C, var_C, self.weight, self.bias, training=True, momentum=momentum, eps=self.eps
            )
        running = {"running_mean_C": mean_C, "running_var_C": var_C}
        return self.group.normalize(ghost_BCHW, self.weight, self.bias, **running, momentum=momentum, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bn_span={self.bn_span}, ghosts_per_step={self.ghosts_per_step}"


def norm_relu(norm: nn.Module, relu: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Compute relu(norm(images)); as one operation if norm can join them."""
    if can_join(images_BCHW, norm):
        return normalize_views((norm, images_BCHW), has_relu=True)
    result_BCHW: Tensor = relu(norm(images_BCHW))
    return result_BCHW


def can_join(images_BCHW: Tensor, *norms: nn.Module) -> bool:
    """Return whether normalize_views can take such images with each of the norms."""
    return is_compiling() and all(isinstance(norm, GhostBatchNorm2d) and norm.joins_relu(images_BCHW) for norm in norms)


class JoinedSequential(nn.Sequential):
    """Runs its layers in turn; in compiled code a layer before a ReLU together with that by norm_relu."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return _joined(self, images_BCHW) if is_compiling() else super().forward(images_BCHW)


def _joined(sequence: nn.Sequential, images_BCHW: Tensor) -> Tensor:
    layers = [*sequence]
    while layers:
        layer = layers.pop(0)
        is_before_relu = len(layers) > 0 and type(layers[0]) is nn.ReLU
        images_BCHW = norm_relu(layer, layers.pop(0), images_BCHW) if is_before_relu else layer(images_BCHW)
    return images_BCHW


def normalize_views(*terms: tuple[Any, Tensor], has_relu: bool) -> Tensor:
    """Compute the sum of norm(images) over terms, norms and images that can_join; has_relu: with ReLU."""
    from bigbatch.trainer.models import ghost_view

    return ghost_view.normalize_views(*terms, has_relu=has_relu)


def flatten_running_statistics(model: nn.Module) -> Tensor:
    """Move all running means and variances of model into one flat fp32 tensor and return it (may be empty).

    Those of frozen norms stay where they are. The buffers become views of it, so one operation on it changes them all;
    it may run between forward and backward. Call after model.to(...), which would replace the views.
    """
    slots = _slots(model)
    buffers = [getattr(norm, name) for norm, name in slots]
    devices = [tensor.device for tensor in (*buffers, *model.parameters())]
    none = torch.empty(0, device=devices[0] if devices else None)
    statistics_N = torch.cat([none, *(buffer.float() for buffer in buffers)])
    views = statistics_N.split([buffer.numel() for buffer in buffers])
    for (norm, name), view in zip(slots, views, strict=True):
        # .data gives each view its own version counter. Autograd saves the buffers, though backward does not
        # read them in training, and backward would refuse to run after a change through a shared counter.
        setattr(norm, name, view.data)
    return statistics_N


def _slots(model: nn.Module) -> list[tuple[_BatchNorm, str]]:
    """List norms that are not frozen, and names of their running statistics, in the order of the flat tensor."""
    return [
        (norm, name)
        for norm in model.modules()
        # averaging a frozen one over ranks would only add rounding errors
        if isinstance(norm, _BatchNorm) and norm.track_running_stats and not getattr(norm, "is_frozen", False)
        for name in ("running_mean", "running_var")
    ]


class MicrobatchStatistics:
    """Passes the statistics of all norms, in one tensor, to take after each training forward of model.

    statistics_N: from flatten_running_statistics. The norms write the mean over a microbatch's ghost batches into
    other buffers, and start again in each microbatch. So forward is the same program for all microbatches of a step,
    and torch.compile and a CUDA graph capture it once. A block may also run again in backward, while the statistics
    are sent to other ranks. Only model(...) calls take, not model.forward(...).
    The norms' ghosts_per_step must be those of a microbatch.
    take: called with the mean over each microbatch's ghost batches, like statistics_N, and the momentum of the norms.
    unseen: fills the buffers after take, so that it marks a norm that the next forward skips; None: nothing does.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics_N: Tensor,
        *,
        take: Callable[[Tensor, float], object],
        unseen: float | None = None,
    ) -> None:
        # never read: with momentum 1 the first ghost batch overwrites them
        self._gathered_N = torch.full_like(statistics_N, unseen or 0.0)
        slots = _slots(model)
        sizes = [getattr(norm, name).numel() for norm, name in slots]
        self._take = take
        self._unseen = unseen
        self._momentum = 0.0
        views = [view.data for view in self._gathered_N.split(sizes)]
        # each norm has two slots in a row, mean and variance
        norms = [norm for norm, _ in slots[::2]]
        for norm, mean_C, var_C in zip(norms, views[::2], views[1::2], strict=True):
            assert isinstance(norm, GhostBatchNorm2d)
            assert norm.momentum is not None
            self._momentum = norm.momentum  # the same in all
            norm.momentum = 1.0  # the first ghost batch of a microbatch replaces what is there
            norm.weigh_ghosts()
            norm.gathered = mean_C, var_C
        model.register_forward_hook(self._hand_over)

    def _hand_over(self, model: nn.Module, _inputs: object, _logits: object) -> None:
        if not (model.training and self._gathered_N.numel()):
            return
        self._take(self._gathered_N, self._momentum)
        if self._unseen is not None:
            self._gathered_N.fill_(self._unseen)
