"""Run the work of a training step on the device: eagerly, compiled, or as captured and replayed CUDA graphs."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from bigbatch.comm.rendezvous.environ import keep_compiled_code
from bigbatch.errors import ComputeError, UserError, first_line
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.machine.memory import is_out_of_memory

WARM_UP_STEPS = 3
"""Warm-up steps of each shape before its capture: cuDNN searches, the reducer orders its buffers, the optimizer
allocates its state, NCCL connects. None of this may happen within a capture."""

Work: TypeAlias = Callable[[Iterable[tuple[Prepared, bool]]], Tensor]
"""Work of a step on the device with its microbatches; true for the last one."""
Cut: TypeAlias = Callable[[], None]
"""Ends one graph within a capture, and starts the next."""


class EagerExecution:
    """Runs each kernel when Python calls it."""

    measures_waits = True
    """Whether Python sees each step, so that the reducer can measure waits, and count what its grid rounds to 0."""

    def __call__(self, work: Work, microbatches: Iterator[tuple[Prepared, bool]]) -> Tensor:
        return work(microbatches)

    def close(self) -> None:
        """Do nothing, unlike with captured graphs."""


class CudaCapture:
    """Makes CUDA graphs of one device, in memory that all share: works may be replayed in any order, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        """Run it on the stream of the capture: autograd and cuBLAS keep things by stream."""
        current = torch.cuda.current_stream(self._stream.device)
        # the work reads what was queued before it, and what comes after reads its result
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def __call__(self, work: Callable[[Cut], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        """Capture; return functions that replay the work's kernels, and the tensor of its result, which these write.

        One function for each part of the work, between its calls of cut: call all, in their order. The work itself is
        not done here, and may not wait for the device, for which each graph waits first. Other threads may go on: they
        decode and watch NCCL.
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
            # torch leaves the generator in capture, where it refuses to draw for anything else of this process
            generator = torch.cuda.default_generators[self._stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            torch.cuda.set_stream(current)  # which torch forgets where a capture fails
        return [graph.replay for graph in graphs], result


@dataclass(frozen=True)
class _Graphs:
    batch: Prepared
    """Tensors from which the work reads each microbatch in turn."""
    replays: list[Callable[[], None]]
    """The graph of any microbatch but the last, if the step has several, and the last one's with the update."""
    result: Tensor


class CudaGraphExecution:
    """Captures the work once for each shape of microbatches, and replays it from then on: one launch for each of them.

    One graph serves all microbatches but the last. The last one has its own, which goes on to the update; the first is
    cut off where the work asks for the last. So each microbatch can be drawn, and seeded, just before its replay, and
    all are read from one place. The work has to be the same in each call, and for each microbatch but the last: it
    works on the tensors and Python numbers of the capture, but for the optimizer's learning rates, which are fp32
    tensors here, warm-up included. What else changes is read from tensors that the caller writes in place, or drawn
    from the device's default generator, which the caller seeds. watch is called after the replays of a step.
    Raises: ComputeError if the work cannot be captured.
    """

    measures_waits = False

    def __init__(
        self,
        capture: CudaCapture,
        *,
        optimizer: torch.optim.Optimizer,
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        self._capture = capture
        self._optimizer = optimizer
        self._watch = watch
        self._warm_ups: Counter[object] = Counter()
        self._graphs: dict[object, _Graphs] = {}
        self._rates: list[Tensor] = []

    def __call__(self, work: Work, microbatches: Iterator[tuple[Prepared, bool]]) -> Tensor:
        """Warm up, or replay, at first after a capture: which does nothing by itself."""
        first, is_only = next(microbatches)
        microbatches = chain([(first, is_only)], microbatches)
        groups = self._optimizer.param_groups
        self._rates = self._rates or [torch.zeros((), device=first.images_BCHW.device) for _ in groups]
        for tensor, group in zip(self._rates, groups, strict=True):
            tensor.fill_(group["lr"])  # a copy from the host would have to keep its source until the device comes to it
        shape = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in _tensors_of(first))
        if self._warm_ups[shape] < WARM_UP_STEPS:
            self._warm_ups[shape] += 1
            with _rates_in_place(self._optimizer, self._rates):
                return self._capture.warm_up(lambda: work(microbatches))
        if shape not in self._graphs:
            self._graphs[shape] = self._make_graphs(work, first, has_several=not is_only)
        graphs = self._graphs[shape]
        for batch, is_last in microbatches:
            for static, tensor in zip(_tensors_of(graphs.batch), _tensors_of(batch), strict=True):
                # a replay reads the addresses of the capture, wherever this batch lies
                static.copy_(tensor)
            graphs.replays[-1 if is_last else 0]()
        self._watch()
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

        try:
            with _rates_in_place(self._optimizer, self._rates):
                replays, result = self._capture(lambda cut: work(microbatches(cut)))
        except Exception as error:
            raise _explained(error, batch) from error
        return _Graphs(static, replays, result)


Execution: TypeAlias = EagerExecution | CudaGraphExecution


def _tensors_of(batch: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    return batch.images_BCHW, batch.labels_B, batch.targets


@contextmanager
def _rates_in_place(optimizer: torch.optim.Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Within the block the optimizer's groups have their learning rates on the device; afterwards as numbers again.

    capturable: Adam of torch asks for it, fused as it is.
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
    # torch ends a failed capture with an error of its own, which hides the cause
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, UserError) or is_out_of_memory(error):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].line!r}" if frames else ""
    shape = " x ".join(map(str, batch.images_BCHW.shape))
    return ComputeError(
        f"compute.cuda_graph=true: a step of {shape} images could not be captured, {first_line(error)}{where}: "
        "set compute.cuda_graph=false"
    )


def compile_failure(first_call: Callable[[], object]) -> str:
    """Call a compiled function for the first time; return one line on why it cannot be compiled, else ""."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import, which only compiling needs
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    keep_compiled_code(torchs_own=default_cache_dir())
    try:
        first_call()
    except TorchDynamoException as error:
        said = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]  # without torch's hints
        return " ".join(said.split())[:300]
    return ""
