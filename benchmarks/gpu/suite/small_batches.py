"""Images per second by local batch: on many GPUs the global batch leaves little to each."""

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.job import CAPTURED, COMPILED, contestant, rates_in_turn, settings_for
from bigbatch.errors import UserError

MODES: dict[str, dict[str, Any]] = {"eager": {}, "compile": COMPILED, "cuda_graph": CAPTURED}


def measure(context: Context, *, batch: int) -> Found:
    """Measure a local batch in every mode, in turn. On a GPU even a world of one sums through NCCL."""
    found, contestants = Found(), {}
    with ExitStack() as stack:
        for mode, settings in MODES.items():
            if settings and not context.compiles:
                found.left_out[mode] = TOO_LONG
            else:
                everything = settings_for(context.size, batch=batch, precision=context.precision) | settings
                try:
                    made = contestant(everything, with_nccl=context.device.type == "cuda")
                except UserError as error:
                    found.left_out[mode] = f"not available: {error}"
                    continue
                contestants[mode] = stack.enter_context(closing(made))
        rates = rates_in_turn(contestants, size=context.size, device=context.device)
    for mode, values in rates.items():
        found.add(mode, values, unit="images/s")
    return found


def cases(local_batches: tuple[int, ...]) -> dict[str, partial[Found]]:
    """List one case for each local batch, so that each is written at its end."""
    return {f"small_batches/{batch}": partial(measure, batch=batch) for batch in local_batches}
