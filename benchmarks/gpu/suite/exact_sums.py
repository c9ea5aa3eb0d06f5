"""The price of run.reproducible's sums of integers, and the digests of one step by several numbers of virtual ranks."""

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from benchmarks.gpu.suite.context import Context, Found
from benchmarks.gpu.suite.job import Contestant, Job, contestant, rates_in_turn, settings_for
from benchmarks.record import ratios
from bigbatch.trainer.observe.replicas import digest

EXACT, FP32, USUAL = "sums of integers", "sums of fp32, deterministic kernels", "sums of fp32"
RATIO, DIFFERENT = f"{EXACT} / {FP32}, time", "digests unlike the first"
REPRODUCIBLE = {"run.reproducible": True}
MICROBATCH = 4
SMALL_NET: dict[str, Any] = {
    "model.name": "resnet9",
    "model.options": {"width": 16},
    "data.image_size": 32,
    "batch.microbatch_size": MICROBATCH,
    "batch.bn_span": MICROBATCH,
    **REPRODUCIBLE,
}
"""Settings with which thousands of microbatches take only seconds."""


def measure(context: Context) -> Found:
    """Measure eager steps with both sums in turn, then compare the weights after one step of the same images."""
    found = Found()
    rates = measure_rates(context)
    for name, values in rates.items():
        found.add(name, values, unit="images/s")
    found.add(RATIO, ratios(rates[FP32], rates[EXACT]), unit="ratio")
    counts = (2, 4) if context.is_small else (8, 64, 2048)
    digests = {count: digest_of_a_step(context, virtual_ranks=count, most=counts[-1]) for count in counts}
    found.add(DIFFERENT, [sum(each != digests[counts[0]] for each in digests.values())], unit="digests")
    found.tables["digests"] = [{"virtual ranks": count, "digest": each} for count, each in digests.items()]
    return found


def measure_rates(context: Context) -> dict[str, Any]:
    """Measure images/s of all three. The first job made asks torch for deterministic kernels; flags switch them off."""
    size = context.size
    contestants: dict[str, Contestant] = {}
    settings = settings_for(size, batch=size.batch, precision=context.precision)
    with ExitStack() as stack:
        for name, changes in ((EXACT, REPRODUCIBLE), (FP32, {}), (USUAL, {})):
            made: Contestant = stack.enter_context(closing(contestant(settings | changes)))
            exact = contestants.get(EXACT, made)
            contestants[name] = replace(
                made, flags=exact.flags if name == FP32 else replace(made.flags, deterministic=name != USUAL)
            )
        return dict(rates_in_turn(contestants, size=size, device=context.device))


def digest_of_a_step(context: Context, *, virtual_ranks: int, most: int) -> str:
    """Return a digest of all weights and statistics after a step that virtual_ranks ranks would share."""
    batch = MICROBATCH * most
    settings = settings_for(context.size, batch=batch, precision="fp32") | SMALL_NET
    with closing(Job({**settings, "batch.virtual_ranks": virtual_ranks})) as job:
        job.run(1)
        parts = job.parts
        values = digest([*parts.model.parameters(), parts.statistics.running_N]).tolist()
    return f"{sum((2 * place + 1) * value for place, value in enumerate(values)) % 2**64:016x}"
