"""Gradients summed over all ranks while backward still runs."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bigbatch.comm.backends.base import Done, InFlight, dtype_name, require_type
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import Start, begin_alike_
from bigbatch.comm.gradients.buffer_sums import GridSums, PlainSums
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, FusionPlan, PlanSizes, TensorSpec, round_up
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.trained_set import TrainedSet
from bigbatch.errors import CommError


class GradientReducer:
    """Sums the gradients of parameters over all ranks, each fusion buffer as soon as backward has filled it.

    The gradients live in the fusion buffers (`p.grad` is a view), so nothing is copied in or out. Buffers
    are started in the order of the plan on every rank. Gradients are summed: divide the loss by the global
    batch size. average=True averages them over the ranks instead, as DistributedDataParallel does. Use:

        reducer = GradientReducer(model.named_parameters(), communicator)
        loss.backward(); reducer.wait(); optimizer.step(); reducer.zero_grad()

    With accumulation set `reducer.is_active = False` for all microbatches of a step but the last.
    With a grid gradients are summed on it, as int64 of twice the bytes: their sums are the same bits in any order, by
    any algorithm and fusion plan, on any number of ranks and microbatches, if fold() follows each microbatch but the
    last, so that gradients of two microbatches are added on the grid alone. Its num_terms counts those of all ranks.
    threshold_bytes, buffer_bytes and first_buffer_bytes: see PlanSizes. The order in which gradients become ready
    is guessed (last parameter first) and learned in the first step; afterwards all ranks use rank 0's order. Take
    references to gradients or buffers only then, as a CUDA graph does. The order determines the rounding of sums: a
    resumed run that must end with the same bits passes `order` of the earlier reducer.
    With scatter each rank gets its own part of each sum and nothing else (own_part of each of `buffers`), by the
    reduce-scatter of ScatterGather; buffers are then filled up to a multiple of the ranks. With scatter and a grid
    tensors and parts begin at multiples of PART_ALIGN elements.
    All ranks must start from the same weights: the reducer refuses ranks with other weights than most,
    weights="broadcast" copies rank 0's to all, "unchecked" does neither.
    A parameter without a gradient counts as zero; unused="error" makes wait() refuse it. Waits are added to exposed,
    which other code may add to.
    Do not change the trained parameters while the reducer lives: wait(), or backward if it reaches one first, refuses
    by name a parameter that was frozen, unfrozen, cast, moved, resized or replaced. The step() of an optimizer refuses
    parameters that no reducer sums, if it also updates summed ones. After such a change, close() this reducer and make
    another one. Give it the frozen parameters, too: it drops their gradients.
    All ranks must call the same methods. After a failed backward, wait() and zero_grad() prepare the next one.
    Raises: TypeError for an argument of another type; ValueError for two parameters of one name, or one on another
    device than the communicator's, or one of another reducer that is not closed, or nothing to reduce; CommError where
    ranks have different parameters, other weights, or another choice of them; RuntimeError from a backward that adds to
    a gradient already on its way.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        communicator: Communicator,
        *,
        threshold_bytes: int = DEFAULT_SIZES.threshold_bytes,
        buffer_bytes: int = DEFAULT_SIZES.buffer_bytes,
        first_buffer_bytes: int | None = None,
        order: Sequence[str] | None = None,
        learn_order: bool = True,
        unused: Literal["zero", "error"] = "zero",
        scatter: bool = False,
        grid: Grid | None = None,
        weights: Start = "equal",
        average: bool = False,
        exposed: "ExposedTime | None" = None,
    ) -> None:
        require_type(communicator, Communicator, what="communicator", legal="what connect() returns")
        self._communicator = communicator
        self._what = "reduce-scatter" if scatter else "all-reduce"
        self.grid = grid
        self._sums = GridSums(grid, communicator, scatter=scatter) if grid else PlainSums(communicator, scatter=scatter)
        # a reduce-scatter needs equal parts
        self._multiple = communicator.world_size * self._sums.align if scatter else 1
        is_narrow = communicator.wire.dtype is not None
        exact = replace(communicator.wire, dtype=None, predivide=1.0)
        self._exactly = communicator.with_algorithm(communicator.algorithm, wire=exact) if is_narrow else communicator
        self._trained = TrainedSet(named_parameters, device=communicator.device)
        self._parameters = self._trained.parameters
        self._sizes = PlanSizes(threshold_bytes, buffer_bytes, first_buffer_bytes)
        self._unused = unused
        self._divisor = communicator.world_size if average else 1
        choices = f"{self._sizes} {learn_order} {order}\n{grid}\nweights {weights}\naverage {average}"
        # before any buffer: ranks that differ would wait for each other, or sum the wrong buffers
        communicator.agree("the parameters to reduce", f"{describe(self._parameters)}\n{choices}")
        begin_alike_(self._parameters, communicator, weights=weights)
        self.is_active = True
        self.exposed = ExposedTime() if exposed is None else exposed
        # None: there is nothing to learn, or it is learned already
        self._learned: list[str] | None = [] if learn_order and order is None else None
        self._num_started = 0
        self._last: InFlight = Done()
        """The one started last: a backend runs them one after another, so all are done when it is."""
        self._missing: list[set[str]] = []
        guessed = list(reversed(self._parameters))  # backward finishes the last layer first
        if order is not None and sorted(order) != sorted(self._parameters):
            odd = ", ".join(sorted(set(order) ^ set(self._parameters))[:3])
            raise ValueError(f"order must name each parameter once; {odd or 'some'} is in only one of both")
        self.order = guessed if order is None else list(order)
        """The gradients in the order in which they become ready: for the next reducer of the same run."""
        self.buffers: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        """Views of the buffers, separate from the gradients: others may change their memory, as model.to() does."""
        self._buffer_of: dict[str, int] = {}
        self._lay_out(self._make_plan(self.order))
        self._start_over()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name, parameter in self._parameters.items()
        ]
        self._trained.watch()

    def _make_plan(self, order: Sequence[str]) -> FusionPlan:
        tensors = [tensor_spec(name, self._parameters[name]) for name in order]
        travelling = [replace(each, element_bytes=self._sums.element_bytes or each.element_bytes) for each in tensors]
        return self._sizes.plan(travelling, align=self._sums.align)

    def _lay_out(self, plan: FusionPlan) -> None:
        """Place each gradient, with its value, in the buffers of a plan."""
        former = self.buffers
        self.plan = plan
        sizes = [
            (round_up(buffer.num_elements, self._multiple), self._parameters[buffer.tensors[0].name].dtype)
            for buffer in plan.buffers
        ]
        self.buffers = self._communicator.allocate_all(sizes)
        self._sums.lay_out([count for count, _ in sizes])
        for index, (buffer, buffer_N) in enumerate(zip(plan.buffers, self.buffers, strict=True)):
            for tensor, first in buffer.places():
                p = self._parameters[tensor.name]
                # with the parameter's own strides: channels-last stays so
                self._views[tensor.name] = buffer_N[first:].as_strided(p.size(), dense_strides(p))
                self._buffer_of[tensor.name] = index
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                # a new layout must not lose what was summed: this is between wait() and the optimizer's step
                self._views[name].copy_(parameter.grad)
            parameter.grad = self._views[name].detach()
        for buffer_N in former:
            self._communicator.release(buffer_N)

    def _start_over(self) -> None:
        self._missing = [{tensor.name for tensor in buffer.tensors} for buffer in self.plan.buffers]
        self._num_started = 0
        self._last = Done()

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        index = self._buffer_of[name]
        # its buffer has been started: adding now would change a sum under way
        if index < self._num_started:
            raise RuntimeError(
                f"backward reached {name} while its gradient is being summed over ranks: call wait() after the last "
                "microbatch of a step, and set is_active = False for the others"
            )
        self._copy_into_buffer(name)
        if not self.is_active:
            return
        self._communicator.timeline.mark(name)
        if self._learned is not None:
            self._learned.append(name)
        self._missing[index].discard(name)
        # in the plan's order, even where a later buffer is full first: all ranks must start the same ones
        while self._num_started < len(self.buffers) and not self._missing[self._num_started]:
            self._start_next()

    def _is_in_buffer(self, name: str) -> bool:
        gradient = self._parameters[name].grad
        return gradient is not None and gradient.data_ptr() == self._views[name].data_ptr()

    def _copy_into_buffer(self, name: str) -> None:
        """Copy a gradient that was replaced or moved into its buffer; one set to None counts as zero."""
        if self._is_in_buffer(name):
            return
        self._trained.require_unchanged([name])  # a gradient of another dtype or shape has no place there
        parameter, view = self._parameters[name], self._views[name]
        view.zero_() if parameter.grad is None else view.copy_(parameter.grad.detach())
        parameter.grad = view.detach()

    def _start_next(self) -> None:
        index = self._num_started
        for name in self._missing[index]:  # these gradients took no part in this backward
            self._copy_into_buffer(name)
        label = f"{self._what} of buffer {index} ({self.plan.buffers[index]})"
        self._last = self._sums.start(index, self.buffers[index], label=label)
        self._num_started += 1

    def fold(self) -> None:
        """Add a microbatch's gradients to the sums on the grid, and set them to zero; without a grid, do nothing."""
        self._sums.fold_(self.buffers)

    def count_underflow(self, is_wanted: bool) -> None:
        """Count the numbers that the grid rounds to 0 from now on, or stop it; without a grid, do nothing."""
        self._sums.counts_underflow = is_wanted

    @property
    def grid_sums(self) -> GridSums:
        """Return the sums on the grid, with their counts; a buffer beyond the grid was infinite, like an overflow."""
        assert isinstance(self._sums, GridSums), "only of a reducer with a grid"
        return self._sums

    def start_extra(self, tensor_N: Tensor, *, label: str) -> None:
        """Sum one more flat tensor over all ranks, in place and in its own precision, with this step's gradients.

        It stays a sum, also if gradients are averaged.
        """
        self._last = self._exactly.start(tensor_N, label=label)

    def wait(self) -> None:
        """Return when every gradient is the sum, or the average, over all ranks.

        Raises: PeerLostError naming the buffer and the missing ranks; CommError, naming the parameter, on a rank where
        the trained parameters have changed since it was made; RuntimeError for unused ones with unused="error".
        """
        if self._unused == "error" and (unused := set().union(*self._missing[self._num_started :])):
            raise RuntimeError(
                f"backward gave no gradient to {', '.join(sorted(unused))}: freeze what the loss does not use by "
                'requires_grad_(False), or pass unused="zero" to count it as zero'
            )
        while self._num_started < len(self.buffers):
            self._start_next()
        self._last = self._sums.start_counts() or self._last
        with self.exposed.measure(self.buffers):
            self._last.wait()
        self._sums.read_(self.buffers)
        if self._divisor != 1:
            for buffer_N in self.buffers:
                buffer_N.div_(self._divisor)
        unreached = set().union(*self._missing)
        self._start_over()
        # after the sums, so that no other rank waits: refuse what differs from what the optimizer would read
        self._trained.require_unchanged()
        self._trained.require_in_model(unreached)
        if lost := next((name for name in self._parameters if not self._is_in_buffer(name)), None):
            raise CommError(
                f"the gradient of {lost} was replaced between backward and wait(), while it was being summed over "
                "ranks: change gradients after wait(), or keep is_active = False until wait()"
            )
        if self._learned is not None:
            self._apply_order(self._learned)
            self._learned = None

    def _apply_order(self, learned: Sequence[str]) -> None:
        """Lay the buffers out again in the order in which rank 0's gradients became ready. Collective."""
        unseen = [name for name in reversed(self._parameters) if name not in set(learned)]
        # dict.fromkeys: a parameter may get its gradient in several passes; the first one counts
        self.order = self._communicator.gather_text("\n".join((*dict.fromkeys(learned), *unseen)))[0].split("\n")
        plan = self._make_plan(self.order)
        if plan != self.plan:
            self._lay_out(plan)
            self._start_over()

    def zero_grad(self) -> None:
        """Set all gradients to zero: one fill per buffer. Raises: RuntimeError while they are being summed."""
        if self._num_started:
            raise RuntimeError(
                "zero_grad() while gradients are being summed over ranks: call wait() after backward, before the "
                "optimizer's step"
            )
        for buffer_N in self.buffers:
            buffer_N.zero_()
        self._sums.zero_()

    def close(self) -> None:
        """Remove the hooks from the parameters; gradients stay in place, except those of weights frozen since."""
        for hook in self._hooks:
            hook.remove()
        self._trained.close()
        for buffer_N in self.buffers:
            self._communicator.release(buffer_N)
        self._sums.release()


def tensor_spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    """Return the facts of a gradient that fusion needs."""
    return TensorSpec(name, parameter.numel(), parameter.element_size(), dtype_name(parameter.dtype))


def describe(parameters: Mapping[str, nn.Parameter]) -> str:
    """List names, shapes and dtypes of parameters, a line each, in their order."""
    return "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items())


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides, without gaps between its elements: a buffer has no room for these."""
    return torch.empty_like(tensor, device="meta").stride()


class ExposedTime:
    """Counts the seconds that the update waited for communication: what backward did not hide.

    On a GPU the wait is on the device, so it is timed by events and read only when asked for.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self, buffers: list[Tensor]) -> Iterator[None]:
        """Time a block that waits for these buffers."""
        if not (buffers and buffers[0].is_cuda):
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
        elif torch.cuda.is_current_stream_capturing():  # a replay records no times
            yield
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(buffers[0].device))
            yield
            end.record(torch.cuda.current_stream(buffers[0].device))
            self.add_events(begin, end)

    def add_events(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Count the device time between two events once it is known; those that are known already are folded."""
        self._events.append((start, end))
        # folded as they end, or a run that never asks would keep one pair of events per step
        while self._events and self._events[0][1].query():
            self._fold(*self._events.popleft())

    def take_seconds(self) -> float:
        """Return the seconds since the last call. Waits for the device on a GPU: call it only when reporting."""
        while self._events:
            self._events[0][1].synchronize()
            self._fold(*self._events.popleft())
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _fold(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds += start.elapsed_time(end) / 1e3
