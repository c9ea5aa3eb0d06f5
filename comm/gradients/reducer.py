"""Gradients summed over all ranks while backward still runs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from bigbatch.comm.backends.base import HALF, InFlight, dtype_name, require_type
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, FusionPlan, PlanSizes, TensorSpec, round_up
from bigbatch.comm.gradients.readiness import Passes, Readiness
from bigbatch.comm.gradients.same_start import STARTS, Start, require_same_start_
from bigbatch.comm.gradients.trained_set import TrainedSet
from bigbatch.comm.gradients.written import WrittenVersions, untraced, versions, was_written
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.comm.communicator import Communicator
    from bigbatch.comm.gradients.grid import Grid
    from bigbatch.comm.gradients.grid_sums import GridSums
    from bigbatch.comm.transport import Transport

REACHED_TWICE = (
    "call wait() after the last backward of a step, and set is_active = False on this reducer for all others, such as "
    "earlier microbatches, or the backward of another network through this one (GAN). Activation checkpoints: "
    "use_reentrant=False"
)
"""Remedies for a gradient that backward adds to after its sum has started."""
SUMMED_TWICE = (
    "the gradients are sums over ranks already: a second wait() or synchronize() without backward or zero_grad() "
    "before it would sum them again; call it once per step"
)
ZEROED_EARLY = "zero_grad() while gradients are summed over ranks: call wait() after backward, before optimizer.step()"
UNUSED = 'freeze what the loss does not use by requires_grad_(False), or pass unused="zero" to count it as zero'


class GradientReducer:
    """Sums the gradients of parameters over all ranks, each fusion buffer as soon as backward has filled it.

    The gradients live in the fusion buffers (`p.grad` is a view), so nothing is copied in or out. Every rank starts the
    buffers in the order of the plan. Gradients are summed: divide the loss by the global batch size. Use:

        reducer = GradientReducer(model.named_parameters(), communicator)
        loss.backward(); reducer.wait(); optimizer.step(); reducer.zero_grad()

    With accumulation set `reducer.is_active = False` for all microbatches of a step but the last.
    threshold_bytes, buffer_bytes, first_buffer_bytes: see PlanSizes.
    order: the order in which gradients become ready, which determines the rounding of sums. A resumed run that must end
    with the same bits passes `order` of the earlier reducer. None: last parameter first.
    learn_order: without order, all ranks learn from rank 0's first step in which order gradients become ready, and how
    often backward adds to each. The sums of that step start in wait(). Gradient buffers may move at its end; capture a
    CUDA graph only after that.
    unused: "zero": a parameter without a gradient counts as zero; "error": wait() refuses it.
    scatter: each rank gets only its own part of each sum (own_part of each of `buffers`), see ScatterGather.
    grid: a fixed-point grid on which the sums are exact, see GridSums.
    weights: "equal": an error names ranks whose weights differ; "broadcast": all get rank 0's; "unchecked": neither.
    average: average the gradients over the ranks, as DistributedDataParallel does.
    exposed: adds up the time of waits; other code may add to it.
    Pass frozen parameters, too: the reducer drops their gradients. Do not freeze, unfreeze, cast, move, resize or
    replace trained parameters while the reducer is open: wait(), or a backward that reaches one first, raises an error
    that names it. After such a change, close() the reducer and make another one.
    Side effect: step() of optimizers refuses gradients not summed since backward, and parameters that no reducer sums.
    With several open reducers on one connection all sums start in wait(): see OperationOrder. To start them during
    backward, give one reducer the parameters of all models.
    All ranks must call the same methods. After a failed backward, wait() and zero_grad() prepare the next one.
    Raises: TypeError for an argument of a wrong type; ValueError if two parameters have one name, if one is on another
    device, of a dtype that is not summed, or in another open reducer, or if there is nothing to reduce; CommError if
    ranks differ in parameters, weights or arguments; RuntimeError from a backward that changes a gradient under way.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        communicator: "Communicator",
        *,
        threshold_bytes: int = DEFAULT_SIZES.threshold_bytes,
        buffer_bytes: int = DEFAULT_SIZES.buffer_bytes,
        first_buffer_bytes: int | None = None,
        order: Sequence[str] | None = None,
        learn_order: bool = True,
        unused: Literal["zero", "error"] = "zero",
        scatter: bool = False,
        grid: "Grid | None" = None,
        weights: Start = "equal",
        average: bool = False,
        exposed: ExposedTime | None = None,
    ) -> None:
        from bigbatch.comm.communicator import Communicator  # loaded already, by connect()

        require_type(communicator, Communicator, what="communicator", legal="what connect() returns")
        self._communicator = communicator
        self._what = "reduce-scatter" if scatter else "all-reduce"
        self.grid = grid
        self._start_sum = communicator.start
        if scatter:
            halves = load("bigbatch.comm.gradients.scatter_gather.ScatterGather")
            self._start_sum = halves(communicator).start_reduce_scatter
        self._exact: GridSums | None = None
        if grid:
            self._exact = load("bigbatch.comm.gradients.grid_sums.GridSums")(grid, communicator, scatter=scatter)
        self._align = self._exact.align if self._exact else 1
        self._multiple = communicator.world_size * self._align if scatter else 1  # a reduce-scatter: equal parts
        self._exactly = communicator
        if communicator.wire.dtype is not None:
            exact = replace(communicator.wire, dtype=None, predivide=1.0)
            self._exactly = communicator.with_algorithm(communicator.algorithm, wire=exact)
        dtypes = (torch.float32, *HALF) if grid else communicator.transport.backend.capabilities.dtypes
        self._trained = TrainedSet(named_parameters, device=communicator.device, dtypes=dtypes)
        self._parameters = self._trained.parameters
        self._sizes = PlanSizes(threshold_bytes, buffer_bytes, first_buffer_bytes)
        self._unused, self._divisor = unused, communicator.world_size if average else 1
        given = self._parameters | self._trained.frozen
        described = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in given.items())
        choices = f"{self._sizes} {learn_order} {order}\n{grid}\nweights {weights}\naverage {average}"
        # compared before any sum: ranks that differ would wait for each other, or sum the wrong buffers
        communicator.agree("the parameters to reduce", f"{described}\n{len(self._parameters)} trained\n{choices}")
        if unused not in ("zero", "error"):
            raise ValueError(f'unused={unused!r} is unknown; choose "zero" or "error"')
        if weights not in STARTS:
            raise ValueError(f"weights={weights!r} is unknown; choose one of {', '.join(STARTS)}")
        if communicator.world_size > 1:
            require_same_start_(given, communicator, weights=weights)
        self.is_active = True
        self.exposed = ExposedTime() if exposed is None else exposed
        self._ready = Readiness(self._parameters, learns=learn_order and order is None)
        self._written = WrittenVersions()
        self._places, self.plan = _Places(self._trained, communicator.transport), FusionPlan(())
        # averaging twice changes nothing (all ranks hold the same average), so a second wait() is harmless
        self._repeats = average and not scatter
        self._holds = False
        """Whether backward has begun this step, and sums may not have started."""
        self._last = InFlight()
        """The sum started last: a backend runs sums one after another, so all are done when it is."""
        self._summed: list[int] | None = None
        """Versions of the buffers after wait(), while backward has brought no gradient since."""
        self._lay_out(_first_order(self._parameters, order))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name, parameter in self._parameters.items()
        ]
        self._trained.watch()
        self._operations = communicator.transport.connection.order
        self._whose = self._operations.open(self)

    def _lay_out(self, order: list[str]) -> None:
        """Plan the buffers for this order of readiness, and move each gradient with its value there. Collective."""
        self.order = order
        """Names of gradients in the order in which they become ready: argument of the run's next reducer."""
        tensors = [tensor_spec(name, self._parameters[name]) for name in order]
        if self._exact:
            tensors = [replace(each, element_bytes=self._exact.element_bytes) for each in tensors]
        plan = self._sizes.plan(tensors, align=self._align)
        if plan != self.plan:
            self.plan, self.buffers = plan, self._places.lay_out(plan, multiple=self._multiple)
            self._described = [str(buffer) for buffer in plan.buffers]
            if self._exact:
                self._exact.lay_out([len(buffer_N) for buffer_N in self.buffers])
            self._start_over()

    def _start_over(self) -> None:
        self._ready.start_over(self.plan)
        self._written.start_over()
        self._num_started = 0
        self._holds, self._last = False, InFlight()

    @untraced
    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        index = self._places.buffer_of[name]
        # its buffer has been started: adding now would change a sum under way
        if index < self._num_started:
            self._written.start_over()  # this error suffices: wait() then prepares the next step
            raise RuntimeError(f"backward reached {name} while its gradient is summed over ranks: {REACHED_TWICE}")
        if not self._places.hold(name):
            self._places.take(name)
        self._summed = None
        self._trained.has_unsummed = True
        self._ready.reached.add(name)
        if not self.is_active:
            self._written.start_over()
            return
        if (timeline := self._communicator.transport.timeline) is not None:
            timeline.mark(name)
        self._written.note_backward(index, self.buffers)
        self._ready.add(name, index=index)
        self._holds = True
        if self._ready.is_learning or not self._operations.has_one_reducer:
            return
        # in the plan's order, even if a later buffer is full first: all ranks must start the same sums
        while self._num_started < len(self.buffers) and not self._ready.missing[self._num_started]:
            self._start_next()

    def _start_next(self) -> None:
        index, buffer_N = self._num_started, self.buffers[self._num_started]
        self._written.check(index, buffer_N)
        for name in self._ready.missing[index]:  # these gradients took no part in this backward
            if not self._places.hold(name):
                self._places.take(name)
                self._written.note_own(index, buffer_N)
        label = f"{self._what} of buffer {index}{self._whose} ({self._described[index]})"
        start = partial(self._exact.start, index) if self._exact else self._start_sum
        is_early = self._divisor != 1 and self._averages_early(buffer_N)
        # data: another version counter, so that the sum does not count as a change by the script
        self._last = start(buffer_N.data.div_(self._divisor) if is_early else buffer_N.data, label=label)
        self._num_started += 1  # after an error wait() starts it again, or fails, too

    def _averages_early(self, buffer_N: Tensor) -> bool:
        """Return whether to divide a buffer before its sum, which could overflow."""
        return buffer_N.dtype == torch.float16 and not self._exact

    def start_held(self) -> None:
        """Start the sums of this step that are not started, if backward has begun the step. See OperationOrder."""
        if self._holds:
            self._holds = False  # first: each start asks again
            while self._num_started < len(self.buffers):
                self._start_next()

    def fold(self) -> None:
        """Add a microbatch's gradients to the exact sums, and set them to zero; without a grid, do nothing."""
        if self._exact:
            # set to None and not reached: the place has an earlier gradient
            for name in [name for name in self._parameters if not self._places.hold(name)]:
                self._places.take(name)
            self._exact.fold_(self.buffers)

    @property
    def grid_sums(self) -> "GridSums":
        """Return the exact sums, with their counts; a term out of the grid's range makes a buffer infinite."""
        assert self._exact is not None, "only of a reducer with a grid"
        return self._exact

    def start_extra(self, tensor_N: Tensor, *, label: str) -> None:
        """Start to sum one more flat tensor over all ranks, in its own precision; it is not averaged. See wait()."""
        self._last = self._exactly.start(tensor_N, label=label)

    @untraced
    def wait(self) -> None:
        """Return when every gradient is the sum, or the average, over all ranks.

        Raises: PeerLostError naming the buffer and the missing ranks; CommError naming a parameter or gradient that the
        script changed; RuntimeError for unused parameters with unused="error", and for a second call on the same sums.
        """
        self._require_open()
        # detected by version counters of tensors, not by hooks: a rank without images has no backward, but zeroes them
        is_summed = self._summed == versions(self.buffers) and all(map(self._places.hold, self._parameters))
        if is_summed and not self._repeats:
            raise RuntimeError(SUMMED_TWICE)
        unreached = self._parameters.keys() - self._ready.reached
        if unreached and self._unused == "error":
            raise RuntimeError(f"backward gave no gradient to {', '.join(sorted(unreached))}: {UNUSED}")
        self._holds = True  # also on a rank without a backward
        self.start_held()
        changed = [f"buffer {k} ({self._described[k]})" for k in self._written.changed(self.buffers)]
        if self._exact:
            self._last = self._exact.start_counts() or self._last
        if self._operations.is_compared and not torch.cuda.is_current_stream_capturing():
            self._operations.compare()
        with self.exposed.measure(self.buffers):
            self._last.wait()
        if self._exact:
            self._exact.read_(self.buffers)
        if self._divisor != 1:
            for buffer_N in [each for each in self.buffers if not self._averages_early(each)]:
                buffer_N.div_(self._divisor)
        passes = self._ready.passes() if self._ready.is_learning else None
        self._start_over()
        self._trained.has_unsummed = False
        # after the all-reduces, so that other ranks do not hang; a replaced parameter would not get the summed gradient
        self._trained.require_unchanged()
        if unreached:
            self._trained.require_in_model(unreached)
        lost = [name for name in self._parameters if not self._places.hold(name)]
        if lost or changed:
            raise was_written(lost, changed)
        if passes is not None:
            self._learn(self._communicator.gather(passes if self._communicator.rank == 0 else None)[0])
        self._summed = versions(self.buffers)

    def _learn(self, passes: Passes) -> None:
        self._ready.learn(passes)
        self._lay_out([name for name, _ in passes])
        self._start_over()

    @untraced
    def zero_grad(self) -> None:
        """Set all gradients to zero: one fill per buffer. Raises: RuntimeError while they are being summed."""
        self._require_open()
        if self._num_started:
            raise RuntimeError(ZEROED_EARLY)
        for buffer_N in self.buffers:
            buffer_N.zero_()
        for name, parameter in self._parameters.items():
            if not self._places.hold(name):  # replaced after wait(), such as clipped out of place
                parameter.grad = None
        if self._exact:
            self._exact.zero_()
        self._trained.has_unsummed = False
        if self._ready.reached:  # by a backward that no wait() followed, such as another network's
            self._start_over()

    def discard(self) -> None:
        """Forget a backward whose sums never run, such as one within a capture that failed; then zero_grad()."""
        self._start_over()

    def _require_open(self) -> None:
        if not self._hooks:
            raise RuntimeError("this GradientReducer or DistributedOptimizer is closed: make a new one, on all ranks")

    def close(self) -> None:
        """Remove the hooks; gradients stay in place, except those of parameters that were frozen since.

        A second call does nothing; wait() and zero_grad() then raise RuntimeError. `buffers` is empty then.
        """
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._operations.close(self)
        self._trained.close()
        self._places.release()
        if self._exact:
            self._exact.release()
        self.buffers = []


class _Places:
    """Places of gradients in fusion buffers: each parameter's gradient is a view of its place."""

    def __init__(self, trained: TrainedSet, transport: "Transport") -> None:
        self._trained, self._transport = trained, transport
        self._buffers: list[Tensor] = []
        self.buffer_of: dict[str, int] = {}
        self._views: dict[str, Tensor] = {}
        """Separate from p.grad, whose memory other code may change, as model.to() does."""

    def lay_out(self, plan: FusionPlan, *, multiple: int) -> list[Tensor]:
        """Place each gradient in new buffers, padded to a multiple of `multiple` elements. Collective."""
        parameters, former = self._trained.parameters, self._buffers
        sizes = [(round_up(b.num_elements, multiple), parameters[b.tensors[0].name].dtype) for b in plan.buffers]
        # data: with a version counter of its own, since tensors of one allocation share one
        self._buffers = [buffer_N.data for buffer_N in self._transport.allocate(*sizes)]
        for index, (buffer, buffer_N) in enumerate(zip(plan.buffers, self._buffers, strict=True)):
            for tensor, first in buffer.places():
                p = parameters[tensor.name]
                # with the parameter's strides: a channels-last gradient stays channels-last
                self._views[tensor.name] = buffer_N[first:].as_strided(p.size(), dense_strides(p))
                self.buffer_of[tensor.name] = index
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                # a new layout must not lose what was summed: this is between wait() and the optimizer's step
                self._views[name].copy_(parameter.grad)
            parameter.grad = self._views[name].detach()
        for buffer_N in former:
            self._transport.release(buffer_N)
        return self._buffers

    def hold(self, name: str) -> bool:
        gradient = self._trained.parameters[name].grad
        return gradient is not None and gradient.data_ptr() == self._views[name].data_ptr()

    def take(self, name: str) -> None:
        """Copy a gradient that was replaced or moved into its buffer; None counts as zero."""
        self._trained.require_unchanged([name])  # a gradient of another dtype or shape has no place there
        parameter, view = self._trained.parameters[name], self._views[name]
        view.zero_() if parameter.grad is None else view.copy_(parameter.grad.detach())
        parameter.grad = view.detach()

    def release(self) -> None:
        """Free the buffers. Collective."""
        for buffer_N in self._buffers:
            self._transport.release(buffer_N)
        self._buffers, self._views = [], {}


def _first_order(parameters: dict[str, nn.Parameter], order: Sequence[str] | None) -> list[str]:
    """Return the stated order, or a guess: backward finishes the last layer first."""
    if order is None:
        return list(reversed(parameters))
    if sorted(order) != sorted(parameters):
        odd = ", ".join(sorted(set(order) ^ set(parameters))[:3])
        raise ValueError(f"order must name each parameter once; {odd or 'some'} is in only one of both")
    return list(order)


def tensor_spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    """Return the facts of a gradient that fusion needs."""
    return TensorSpec(name, parameter.numel(), parameter.element_size(), dtype_name(parameter.dtype))


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides, with gaps between its elements removed: a buffer has no gaps."""
    return torch.empty_like(tensor, device="meta").stride()
