"""The sharded update: each rank updates its part of every fusion buffer, and keeps the state of that part only."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.optim.matrices import Part
from bigbatch.trainer.step.exact_norms import exact_norms
from bigbatch.trainer.step.shard_layout import ShardLayout


class ShardedWeights:
    """Weights of a model that are updated in parts, one per rank; with the methods of WholeWeights.

    The parameters become views of flat buffers that are laid out like the reducer's gradients. fp32 parts are updated
    in place; half-precision ones have fp32 masters and gradients. reducer: made with scatter; if it also has a grid,
    the update has the same bits on any number of ranks.
    behind_forward: publish_ does not wait for the all-gathers. Each module of the model waits, before its forward, for
    the buffers of its own weights. All other code that reads or writes weights calls wait_for_weights first.
    Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), stages 1 and 2 without freeing gradient buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: Mapping[str, Tensor],
        reducer: GradientReducer,
        communicator: Communicator,
        *,
        behind_forward: bool = False,
    ) -> None:
        """Move the model's parameters into the buffers. Raises: ConfigError, as ShardLayout."""
        self.communicator, self.exposed, self._is_exact = communicator, reducer.exposed, reducer.grid is not None
        self.layout = ShardLayout(model, reducer.plan, communicator)
        own_part = self.layout.scatter_gather.own_part
        self.buffers = communicator.allocate_all([(grads_N.numel(), grads_N.dtype) for grads_N in reducer.buffers])
        with torch.no_grad():  # before own_part below: its parts are views of these buffers
            for name, parameter in self.layout.parameters.items():
                view = self.layout.whole(name, self.buffers)
                view.copy_(masters[name])
                parameter.data = view
        self._parts = [own_part(buffer_N) for buffer_N in self.buffers]
        self._grads = [own_part(buffer_N) for buffer_N in reducer.buffers]
        self.flat_masters = [part_M if part_M.dtype == torch.float32 else part_M.float() for part_M in self._parts]
        """fp32 masters of this rank's part of each buffer."""
        self._flat_grads = [
            grads_M if grads_M.dtype == torch.float32 else torch.zeros_like(full_M)
            for grads_M, full_M in zip(self._grads, self.flat_masters, strict=True)
        ]
        self.masters: Mapping[str, Tensor] = {name: self._master(name) for name in self.layout.parameters}
        """This rank's pieces of the masters, by the names of the model's parameters."""
        self.replicated: Mapping[str, Tensor] = {}
        self._gathers: list[InFlight] = []
        self._num_awaited = 0
        self._behind_forward = behind_forward
        if behind_forward:
            self._wait_before_forward(model)
        self.load_(masters)

    def _master(self, name: str) -> Tensor:
        master = Part(self.layout.piece(name, self.flat_masters))
        master.whole_shape = self.layout.parameters[name].size()
        master.grad = self.layout.piece(name, self._flat_grads)
        return master

    def _wait_before_forward(self, model: nn.Module) -> None:
        """Let each module wait for the all-gathers of its own weights before its forward."""
        layout = self.layout
        gather_of = {p: layout.order.index(layout.pieces[name].buffer) + 1 for name, p in layout.parameters.items()}
        for module in model.modules():
            last = max((gather_of.get(p, 0) for p in module.parameters(recurse=False)), default=0)
            if last:
                module.register_forward_pre_hook(lambda *_, num_gathers=last: self.wait_for_weights(num_gathers))

    @torch.no_grad()
    def fetch_grads_(self) -> None:
        """Copy half-precision gradients of this rank's parts into fp32."""
        half = [(f, g) for f, g in zip(self._flat_grads, self._grads, strict=True) if f is not g]
        if half:
            torch._foreach_copy_([f for f, _ in half], [g for _, g in half])

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the masters into this rank's parts, and start to gather all parts; wait_for_weights waits for these."""
        half = [(p, f) for p, f in zip(self._parts, self.flat_masters, strict=True) if p is not f]
        if half:
            torch._foreach_copy_([p for p, _ in half], [f for _, f in half])
        self._gathers = [
            self.layout.scatter_gather.start_all_gather(self.buffers[index], label=f"all-gather of weights {index}")
            # all start before the first wait, so they run one after another without a gap on the wire
            for index in self.layout.order
        ]
        self._num_awaited = 0
        if not self._behind_forward:
            self.wait_for_weights()

    def wait_for_weights(self, num_gathers: int | None = None) -> None:
        """Wait for the first num_gathers all-gathers of publish_; without a number, for all of them.

        Raises: PeerLostError naming the gather.
        """
        last = len(self._gathers) if num_gathers is None else num_gathers
        if self._num_awaited < last:
            with self.exposed.measure(self.buffers):
                self._gathers[last - 1].wait()  # and so for all before it
            self._num_awaited = last

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """Return the norms (N) of whole tensors: squares of pieces add up over ranks in fp64. Collective.

        With a grid, squares are summed as integers: the same bits for any division into pieces.
        """
        if self._is_exact:
            max_elements = max(p.numel() for p in self.layout.parameters.values())
            return exact_norms(tensors, max_elements=max_elements, all_maxima=self._all_maxima, all_sums=self._all_sums)
        # norms of pieces do not add up, their squares do; the norm of an empty piece is 0
        return self._all_sums(torch.stack(torch._foreach_norm(tensors)).double().square_()).sqrt_().float()

    def _all_maxima(self, peaks_N: Tensor) -> Tensor:
        peaks_PN = peaks_N.new_zeros(self.communicator.world_size * len(peaks_N))
        self.layout.scatter_gather.own_part(peaks_PN).copy_(peaks_N)
        with self.exposed.measure([peaks_PN]):
            self.layout.scatter_gather.all_gather_(peaks_PN, label="all-gather of largest numbers")
        return peaks_PN.view(-1, len(peaks_N)).amax(dim=0)

    def _all_sums(self, squares_N: Tensor) -> Tensor:
        with self.exposed.measure([squares_N]):
            return self.communicator.sum_(squares_N, label="all-reduce of norms")

    def half_grads(self) -> list[Tensor]:
        """List the half-precision gradients of this rank's parts, without padding."""
        grads = [self.layout.piece(name, self._grads) for name in self.layout.pieces]
        return [grads_M for grads_M in grads if grads_M.dtype != torch.float32]

    def sum_parts(self, counts_N: Tensor) -> Tensor:
        """Sum counts_N over ranks. Collective."""
        return self.communicator.sum_(counts_N, label="all-reduce of counts")

    def whole(self) -> dict[str, Tensor]:
        """Return every master, gathered, on the host. Collective."""
        return self.layout.gather(self.flat_masters)

    @torch.no_grad()
    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts into the masters, and publish them. Collective."""
        for name, master in self.masters.items():
            master.copy_(self.layout.piece_of(name, state[name]))
        self.publish_()
        self.wait_for_weights()
