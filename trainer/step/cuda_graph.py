"""Run the work of a training step as captured and replayed CUDA graphs."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from bigbatch.errors import CaptureFailed, ComputeError, UserError, first_line
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.machine.host import is_out_of_memory

WARM_UP_STEPS = 3
"""Eager steps of each shape before its capture: in them cuDNN chooses algorithms, the reducer orders its buffers, the
optimizer allocates its state, NCCL connects. None of this may happen within a capture."""

Work: TypeAlias = Callable[[Iterable[tuple[Prepared, bool]]], Tensor]
"""Computes a step on the device from pairs (microbatch, whether it is the step's last)."""
Cut: TypeAlias = Callable[[], None]
"""Ends the current graph of a capture, and starts the next one."""


class CudaCapture:
    """Captures CUDA graphs on one device, which share one memory pool: replay them in any order, never concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the capture's stream, since autograd and cuBLAS keep state per stream; return its result."""
        current = torch.cuda.current_stream(self._stream.device)
        # the work reads what was queued before it, and what comes after reads its result
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def __call__(self, work: Callable[[Cut], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        """Capture work; return functions that replay its kernels, and the result tensor, which the replays write.

        The work calls cut to end one graph and start the next; call the functions, one per graph, in their order.
        Capturing computes nothing. Each graph waits for the device before it starts; the work itself must not wait for
        it. Other threads may continue meanwhile: they decode images and watch NCCL.
        """
        current, graphs, capturing = torch.cuda.current_stream(self._stream.device), [], ExitStack()

        def cut() -> None:
            capturing.close()
            graph = torch.cuda.CUDAGraph()
            capturing.enter_context(
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            )
            graphs.append(graph)

        try:
            with capturing:
                cut()
                result = work(cut)
        except BaseException:
            # after a failed capture torch leaves the generator in capture mode, in which it refuses any other draw
            generator = torch.cuda.default_generators[self._stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            torch.cuda.set_stream(current)  # torch does not restore it if a capture fails
        return [graph.replay for graph in graphs], result


@dataclass(frozen=True)
class _Graphs:
    batch: Prepared
    """Static tensors to which each microbatch is copied before its replay."""
    replays: list[Callable[[], None]]
    """Replay of a microbatch before the last, if the step has several, and of the last one with the update."""
    result: Tensor


@dataclass(eq=False)
class CudaGraphExecution:
    """Captures the work once for each shape of microbatches, then replays it: one launch per microbatch.

    One graph serves all microbatches but the last; another one serves the last and the update. The capture ends the
    first when the work asks for the last microbatch. So each microbatch can be drawn, and its random numbers seeded,
    just before its replay, and all are copied to the same static tensors. The work must be the same in each call, and
    for each microbatch but the last: replays use the tensors and Python numbers of the capture. Only the optimizer's
    learning rates may change: they are fp32 tensors here, also during warm-up. Everything else that changes must be
    in tensors that the caller writes in place, or drawn from the device's default generator, which the caller seeds.
    gather: returns the texts of all ranks. watch is called after the replays of a step.
    Raises: CaptureFailed, on all ranks, if one of them cannot capture the work; nothing has changed then.
    """

    capture: CudaCapture
    _: KW_ONLY
    optimizer: torch.optim.Optimizer
    gather: Callable[[str], Sequence[str]] = lambda text: [text]
    watch: Callable[[], object] = lambda: None
    _warm_ups: Counter[object] = field(default_factory=Counter, init=False)
    _graphs: dict[object, _Graphs] = field(default_factory=dict, init=False)
    _rates: list[Tensor] = field(default_factory=list, init=False)

    def __call__(self, work: Work, microbatches: Iterator[tuple[Prepared, bool]]) -> Tensor:
        """Run a step: eagerly during warm-up, later by replays. The first replay follows a capture."""
        first, is_only = next(microbatches)
        microbatches = chain([(first, is_only)], microbatches)
        groups = self.optimizer.param_groups
        self._rates = self._rates or [torch.zeros((), device=first.images_BCHW.device) for _ in groups]
        for tensor, group in zip(self._rates, groups, strict=True):
            tensor.fill_(group["lr"])  # a copy from the host would need its source until the device has read it
        shape = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in _tensors_of(first))
        if self._warm_ups[shape] < WARM_UP_STEPS:
            self._warm_ups[shape] += 1
            with _rates_in_place(self.optimizer, self._rates):
                return self.capture.warm_up(lambda: work(microbatches))
        if shape not in self._graphs:
            self._graphs[shape] = self._make_graphs(work, first, has_several=not is_only)
        graphs = self._graphs[shape]
        for batch, is_last in microbatches:
            for static, tensor in zip(_tensors_of(graphs.batch), _tensors_of(batch), strict=True):
                # a replay reads the addresses of the capture, wherever this batch lies
                static.copy_(tensor)
            graphs.replays[-1 if is_last else 0]()
        self.watch()
        return graphs.result

    def close(self) -> None:
        """Destroy the graphs: NCCL does not close while one has captured its sums."""
        self._graphs.clear()

    def _make_graphs(self, work: Work, batch: Prepared, *, has_several: bool) -> _Graphs:
        static = Prepared(*(tensor.clone() for tensor in _tensors_of(batch)))

        def microbatches(cut: Cut) -> Iterator[tuple[Prepared, bool]]:
            if has_several:
                yield static, False
                cut()
            yield static, True

        failure, graphs = "", None
        try:
            with _rates_in_place(self.optimizer, self._rates):
                graphs = _Graphs(static, *self.capture(lambda cut: work(microbatches(cut))))
        except Exception as error:
            explained = _explained(error, batch)
            if not isinstance(explained, ComputeError):
                raise explained from error
            failure = str(explained)
        failures = self.gather(failure)
        if graphs is not None and not any(failures):
            return graphs
        self._graphs.clear()
        rank, failure = next((rank, each) for rank, each in enumerate(failures) if each)
        raise CaptureFailed(f"rank {rank}: {failure}" if len(failures) > 1 else failure)


def _tensors_of(batch: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    return batch.images_BCHW, batch.labels_B, batch.targets


@contextmanager
def _rates_in_place(optimizer: torch.optim.Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Put the learning rates of the optimizer's groups on the device for the block; restore the numbers afterwards.

    Sets capturable, too: torch's Adam requires it, even fused.
    """
    own = [dict(group) for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, own, strict=True):
            group.update(kept)


def _explained(error: BaseException, batch: Prepared) -> BaseException:
    """Return the error to raise for a failed capture: the first one, which causes the others."""
    # torch ends a failed capture with another error, which hides the cause
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, UserError) or is_out_of_memory(error):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].line!r}" if frames else ""
    shape = " x ".join(map(str, batch.images_BCHW.shape))
    return ComputeError(
        f"compute.cuda_graph=true: a step of {shape} images could not be captured, {first_line(error)}{where}"
    )
