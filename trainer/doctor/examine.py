"""One examination, from the first probe to the advice; what was found so far stays when it is cut short."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.doctor.candidates import Candidate, Machine, Unmeasured
from bigbatch.trainer.doctor.probes import Probe, Probes
from bigbatch.trainer.doctor.recommend import Comparison, Greedy, Row, advice, measure_noise, noise_of
from bigbatch.trainer.doctor.speedups import find_candidates
from bigbatch.trainer.doctor.verdict import DoctorRates, find_limit

IMAGES, TENSORS = "pictures", "tensors"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Says what to do, and how long."""

    config: Config
    whole: Config
    """With its own global batch, of which config may have a part."""
    batches: str
    """pictures, or tensors, on which speedups are measured."""
    seconds: float
    turns: int
    only: tuple[str, ...]


@dataclass
class Findings:
    """Holds what is known; None for what is not yet."""

    machine: Machine | None = None
    torch: str = ""
    steps: dict[str, Any] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    rates: DoctorRates | None = None
    noise: Comparison | None = None
    rows: list[Row] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    verified: Comparison | None = None
    taken: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


def examine(request: Examination, probes: Probes, findings: Findings, *, say: Callable[[str], None]) -> None:
    """Fill in the findings. say: what goes on. Raises: DoctorError where the config itself cannot be measured."""

    def start(values: Any) -> Probe:
        return probes.open(values, batches=request.batches, seconds=request.seconds)

    say("starting the config as it is")
    base = start({})
    _look_at(base, request, findings, say=say)
    assert findings.machine is not None
    assert findings.rates is not None
    candidates, findings.unmeasured = find_candidates(
        request.config,
        findings.machine,
        whole=request.whole,
        limit=find_limit(findings.rates),
        only=request.only,
    )
    if candidates:
        _try_all(candidates, base, start, request, findings, say=say)
    base.close()
    findings.is_complete = True


def _look_at(base: Probe, request: Examination, findings: Findings, *, say: Callable[[str], None]) -> None:
    """Measure the config as it is: its rates, and where its time goes."""
    facts = dict(base.facts)
    findings.torch = facts.pop("torch")
    capability = facts.pop("capability")
    machine = findings.machine = Machine(capability=capability and tuple(capability), **facts)
    reads = request.config.data.loader != "synthetic"
    batches = IMAGES if reads else TENSORS
    say("measuring whole steps, and the model alone, in turn")
    turns = [[base.ask("steps", batches=each) for each in (batches, TENSORS)] for _ in range(request.turns)]
    # the turn of median length, whole: means of its parts would not belong together
    steps, alone = (sorted(each, key=_seconds)[len(turns) // 2] for each in zip(*turns, strict=True))
    findings.steps = steps
    if reads:
        say("measuring the input alone")
        findings.input = base.ask("input")
    say("looking at where the step's time goes")
    findings.profile = base.ask("profile", batches=batches)
    roof = base.ask("roofline")
    findings.rates = DoctorRates(
        together=steps["images"] / steps["seconds"],
        input_alone=findings.input.get("loader_images_per_second"),
        model_alone=alone["images"] / alone["seconds"],
        wait_share=steps["wait_seconds"] / steps["seconds"],
        exposed_share=None if steps["exposed_seconds"] is None else steps["exposed_seconds"] / steps["seconds"],
        busy_share=findings.profile["busy_share"],
        flops_per_image=roof["flops_per_image"],
        peak_flops=roof["peak_flops"] * machine.world_size,
    )


def _seconds(steps: dict[str, Any]) -> float:
    return float(steps["seconds"])


def _try_all(
    candidates: Sequence[Candidate],
    base: Probe,
    start: Callable[[Any], Probe],
    request: Examination,
    findings: Findings,
    *,
    say: Callable[[str], None],
) -> None:
    say("measuring the noise: the config beside itself")
    findings.noise = measure_noise(base, start, turns=request.turns)
    noise = noise_of(findings.noise)
    greedy = Greedy(base, start, turns=request.turns, noise=noise)
    for number, candidate in enumerate(candidates, 1):
        if not greedy.is_new(candidate):
            continue
        change = describe(candidate, request.config, before=greedy.taken)
        say(f"speedup {number} of {len(candidates)}, {candidate.name}: {change}")
        findings.rows.append(greedy.consider(candidate))
        findings.taken = dict(greedy.taken)
    if greedy.taken:
        say("verifying all that was taken beside the config as it is")
    findings.verified = greedy.verify()
    findings.advice = dict(advice(greedy.taken, findings.verified, noise=noise))


def describe(candidate: Candidate, config: Config, *, before: Mapping[str, Any]) -> str:
    """Show its keys, from what was taken before, or the config states, to what is tried."""
    return ", ".join(
        f"{key} {shown(before.get(key, lookup(config, key)))} -> {shown(value)}"
        for key, value in candidate.values.items()
    )


def shown(value: object) -> str:
    """Show a value as a config states it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
