"""fp32 weights that the optimizer updates: whole on every rank, or (sharded.py) a part on each."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bigbatch.comm.gradients.trained_set import require_summed
from bigbatch.trainer.optim.fused import norms_of


class WholeWeights:
    """Weights that are whole on every rank. The masters of fp32 parameters are the parameters themselves.

    Every rank calls each method. ShardedWeights has the same methods, and documents them.
    """

    def __init__(self, model: nn.Module, masters: Mapping[str, Tensor]) -> None:
        self.masters: Mapping[str, Tensor] = dict(masters)
        """fp32 tensors that the optimizer updates, by the names of the model's parameters."""
        self.replicated = self.masters
        """Masters that every rank holds whole."""
        pairs = [(p, masters[key]) for key, p in model.named_parameters() if key in masters and p is not masters[key]]
        self._half: list[Tensor] = [p for p, _ in pairs]
        self._full: list[Tensor] = [master for _, master in pairs]
        for master in self._full:
            master.grad = torch.zeros_like(master)

    def fetch_grads_(self) -> None:
        if self._half:
            require_summed(self._half, by="Precision")
            torch._foreach_copy_(grads_of(self._full), grads_of(self._half))

    @torch.no_grad()
    def publish_(self) -> None:
        if self._half:
            torch._foreach_copy_(self._half, self._full)

    def wait_for_weights(self) -> None:
        pass

    def norms(self, tensors: list[Tensor]) -> Tensor:
        return norms_of(tensors)

    def half_grads(self) -> list[Tensor]:
        return grads_of(self._half)

    def sum_parts(self, counts_N: Tensor) -> Tensor:
        return counts_N

    def whole(self) -> dict[str, Tensor]:
        return {key: master.detach() for key, master in self.masters.items()}

    @torch.no_grad()
    def load_(self, state: Mapping[str, Tensor]) -> None:
        for key, master in self.masters.items():
            master.copy_(state[key])
        self.publish_()


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.grad for t in tensors if t.grad is not None]
