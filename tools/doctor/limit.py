"""Find what limits a run: images, other ranks, kernel launches by the host, or the device's arithmetic."""

from dataclasses import dataclass

WAIT_FOR_IMAGES, WAIT_FOR_SUMS = "wait for images", "wait for the sums of gradients"
"""Phases of a step, as the table shows them."""
LARGE_SHARE = 0.05
"""Share of a step: a shorter wait is not a limit."""
BUSY = 0.85
"""Share of the time in which a GPU works; with a lower share the host launches kernels too slowly."""
FAST_INPUT = 2.0
"""Multiple of the model's rate: an input that alone is faster than this is not the limit, even if steps wait for it."""
CONTENDED = 0.9
"""Input and model compete for cores if together they reach less than this share of the slower one's rate."""


@dataclass(frozen=True, kw_only=True)
class DoctorRates:
    """Holds the rates of all ranks together, in images per second, and shares of a step."""

    together: float
    input_alone: float | None
    """None if nothing is read, or it could not be measured."""
    model_alone: float
    """Rate on tensors that are generated once, sums over ranks included."""
    wait_share: float
    """Share of a step that waits for images."""
    exposed_share: float | None
    """Share of a step that waits for sums over ranks; None if a CUDA graph hides it."""
    busy_share: float | None
    """Share of a step in which the GPU works; None on a CPU."""
    flops_per_image: float
    peak_flops: float
    """Operations per second of all ranks, at their measured best."""
    turns: int = 1
    spread: float = 0.0
    """Half of the distance between the extreme rates over the turns, together or of the model alone, as a fraction."""

    @property
    def roofline_share(self) -> float:
        """Return the model's arithmetic rate as a share of the devices' measured peak."""
        return self.model_alone * self.flops_per_image / self.peak_flops


def limiting_wait(
    wait_share: float, exposed_share: float, *, input_alone: float | None, model_alone: float | None
) -> str | None:
    """Return what the longer wait of a step is for: "input", "cores" or "network"; None if both are below LARGE_SHARE.

    input_alone, model_alone: rates in images/s, None if unknown; a wait for an input that is fast alone is for cores.
    """
    if max(wait_share, exposed_share) < LARGE_SHARE:
        return None
    if exposed_share > wait_share:
        return "network"
    return "cores" if input_alone and model_alone and input_alone > FAST_INPUT * model_alone else "input"


def find_limit(rates: DoctorRates) -> str:
    """Return what limits the rate: the longer wait, as limiting_wait; else "launch" or "compute"."""
    rates_alone = {"input_alone": rates.input_alone, "model_alone": rates.model_alone}
    if wait := limiting_wait(rates.wait_share, rates.exposed_share or 0.0, **rates_alone):
        return wait
    return "launch" if rates.busy_share is not None and rates.busy_share < BUSY else "compute"


def explain(rates: DoctorRates) -> list[str]:
    """Return the limit as text: its cause, each part's rate alone, and the distance from the roofline."""
    sums = "; a captured step does not show the waits for sums over ranks"
    if rates.exposed_share is not None:
        sums = f", {rates.exposed_share:.1%} for sums over ranks"
    words = {
        "input": f"the input: steps wait {rates.wait_share:.0%} of their time for images",
        "cores": f"the cores: steps wait {rates.wait_share:.0%} of their time for images, although the input alone is "
        f"{(rates.input_alone or 0) / rates.model_alone:,.0f} times as fast as the model; both use the same cores, so "
        "lower compute.cpu_threads, or give each rank more cores",
        "network": f"communication: steps wait {rates.exposed_share or 0:.0%} of their time for sums over ranks; "
        "`bigbatch comm tune` measures links and algorithms",
        "launch": f"the host: the GPU works {rates.busy_share or 0:.0%} of the time, and otherwise waits "
        "for kernel launches",
        "compute": f"the model's own work: {rates.wait_share:.1%} of a step waits for images{sums}",
    }
    alone = "" if rates.input_alone is None else f"the input alone {rates.input_alone:,.0f}, "
    size, unit = (1e12, "TFLOP/s") if rates.peak_flops >= 1e12 else (1e9, "GFLOP/s")
    lines = [
        f"limited by {words[find_limit(rates)]}",
        f"images/s: {alone}the model alone (on generated tensors) {rates.model_alone:,.0f}, together "
        f"{rates.together:,.0f}",
        f"roofline: the model alone does {rates.roofline_share:.1%} of the {rates.peak_flops / size:,.1f} {unit} that "
        "were measured here at best, in large matrices and convolutions",
    ]
    if rates.input_alone is not None and find_limit(rates) != "cores":
        share = rates.together / min(rates.model_alone, rates.input_alone)
        if share < CONTENDED:
            lines.append(
                f"together they reach {share:.0%} of the slower one: input and model compete for the same cores"
            )
    return lines
