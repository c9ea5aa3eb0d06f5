"""One examination, from the first probe to the advice; an interruption keeps the results so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.doctor.budget import Budget, Pace, images_in_a_step
from bigbatch.trainer.doctor.candidates import Candidate, Machine, Unmeasured, change, part_of_images
from bigbatch.trainer.doctor.probes import Probe, Probes
from bigbatch.trainer.doctor.recommend import Comparison, Greedy, Row, advice, measure_noise, noise_of
from bigbatch.trainer.doctor.speedups import find_candidates
from bigbatch.trainer.doctor.verdict import WAIT_FOR_IMAGES, WAIT_FOR_SUMS, DoctorRates, find_limit

IMAGES, TENSORS = "pictures", "tensors"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What to measure, and for how long."""

    config: Config
    whole: Config
    """The config with its full global batch; config may have a part of it."""
    batches: str
    """Whether speedups are measured on images or on tensors."""
    seconds: float
    turns: int
    only: tuple[str, ...]
    """Names of speedups to try without regard to the budget; empty for all that fit it."""
    budget: Budget = field(default_factory=Budget)


@dataclass
class Findings:
    """Results so far; None if not measured yet."""

    machine: Machine | None = None
    torch: str = ""
    steps: dict[str, Any] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    always: dict[str, Any] = field(default_factory=dict)
    """Gains of fusion and pinning, or the reason why they were not measured."""
    part: dict[str, Any] = field(default_factory=dict)
    """Values that cut a step to a part, if a whole one takes too long."""
    budget_seconds: float | None = None
    used_seconds: float = 0.0
    rates: DoctorRates | None = None
    noise: Comparison | None = None
    rows: list[Row] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    verified: Comparison | None = None
    taken: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


def examine(request: Examination, probes: Probes, findings: Findings, *, say: Callable[[str], None]) -> None:
    """Fill in the findings. say: shows progress. Raises: DoctorError if the unchanged config cannot be measured."""
    budget = request.budget
    findings.budget_seconds = budget.seconds if budget.is_limited else None

    def start(values: Any) -> Probe:
        return probes.open(values, batches=request.batches, seconds=request.seconds)

    say("starting the config as it is")
    before = budget.used()
    base = start({})
    start_seconds = budget.used() - before
    say("taking a first look at how long an image takes")
    glance = base.ask("glance")
    machine = findings.machine = _machine(base, findings)
    if budget.is_limited:
        num_images = images_in_a_step(budget, seconds_per_image=glance["seconds_per_image"])
        findings.part = _part(request, num_images, world_size=machine.world_size)
    if findings.part:
        probes.cut(base, findings.part)
    measured = change(request.config, findings.part, world_size=machine.world_size)
    assert isinstance(measured, Config), "a part is legal"
    ahead = -(-measured.data.prefetch_batches // accumulation_steps(measured.batch, world_size=machine.world_size))
    pace = Pace(
        start_seconds=start_seconds, step_seconds=0.0, turn_seconds=request.seconds, turns=request.turns, ahead=ahead
    )
    pace = _look_at(base, request, findings, pace=pace, glance=glance, say=say)
    assert findings.rates is not None
    limit = find_limit(findings.rates)
    # where images limit nothing, those that were fetched ahead do not either
    probes.flushes = not budget.is_limited or limit == "input"
    pace = replace(pace, flushes=probes.flushes)
    candidates, findings.unmeasured = find_candidates(
        measured, machine, whole=request.whole, limit=limit, only=request.only
    )
    if candidates:
        _try_all(candidates, base, start, request, findings, pace=pace, say=say)
    base.close()
    findings.is_complete = True
    findings.used_seconds = budget.used()


def _machine(base: Probe, findings: Findings) -> Machine:
    facts = dict(base.facts)
    findings.torch = facts.pop("torch")
    capability = facts.pop("capability")
    return Machine(capability=capability and tuple(capability), **facts)


def _part(request: Examination, num_images: float, *, world_size: int) -> dict[str, Any]:
    """Return the values that cut a step to that many images, if other settings allow it."""
    part = part_of_images(request.config, num_images, world_size=world_size)
    return part if isinstance(change(request.config, part, world_size=world_size), Config) else {}


def _look_at(
    base: Probe,
    request: Examination,
    findings: Findings,
    *,
    pace: Pace,
    glance: Mapping[str, float],
    say: Callable[[str], None],
) -> Pace:
    """Measure rates and time profile of the unchanged config; return the seconds that this takes."""
    assert findings.machine is not None
    reads = request.config.data.loader != "synthetic"
    batches = IMAGES if reads else TENSORS
    say("measuring whole steps, and the model alone, in turn")
    turns: list[list[dict[str, Any]]] = []
    planned = request.turns
    while len(turns) < planned:
        findings.steps = base.ask("steps", batches=batches, flushes=True)
        turns.append([findings.steps, base.ask("steps", batches=TENSORS, flushes=True)])
        if len(turns) == 1:
            pace = replace(pace, step_seconds=_seconds(turns[0][0]))
            planned = pace.look_turns(request.budget)
    # the turn of median length, whole: means of its parts would not belong together
    steps, alone = (sorted(each, key=_seconds)[len(turns) // 2] for each in zip(*turns, strict=True))
    findings.steps = steps
    if reads:
        say("measuring the input alone")
        findings.input = base.ask("input")
    say("profiling the step, and measuring options that are always on")
    findings.profile = base.ask("profile", batches=batches)
    findings.always = base.ask("always")
    roof = base.ask("roofline")
    findings.rates = DoctorRates(
        together=steps["images"] / steps["seconds"],
        input_alone=findings.input.get("loader_images_per_second"),
        model_alone=alone["images"] / alone["seconds"],
        # as the table of phases has it: of one measurement, so that verdict and table agree
        wait_share=_share(findings.profile, WAIT_FOR_IMAGES) or 0.0,
        exposed_share=_share(findings.profile, WAIT_FOR_SUMS),
        busy_share=findings.profile["busy_share"],
        flops_per_image=glance["flops_per_image"],
        peak_flops=roof["peak_flops"] * findings.machine.world_size,
    )
    return pace


def _share(profile: Mapping[str, Any], phase: str) -> float | None:
    """Return the share of a step that a phase takes; None if a captured step does not tell."""
    return None if phase not in profile["phases"] else float(profile["phases"][phase] / profile["seconds"])


def _seconds(steps: dict[str, Any]) -> float:
    return float(steps["seconds"])


def _try_all(
    candidates: Sequence[Candidate],
    base: Probe,
    start: Callable[[Any], Probe],
    request: Examination,
    findings: Findings,
    *,
    pace: Pace,
    say: Callable[[str], None],
) -> None:
    fits = partial(pace.fits, budget=request.budget)
    if not request.only and not any(fits(each.name, others=1) for each in candidates):
        findings.unmeasured += [_no_time(each, pace, request) for each in candidates]
        return
    say("measuring the noise: the config beside itself")
    findings.noise = measure_noise(base, start, turns=request.turns)
    noise = noise_of(findings.noise)
    greedy = Greedy(base, start, turns=request.turns, noise=noise)
    for number, candidate in enumerate(candidates, 1):
        if not greedy.is_new(candidate):
            continue
        if not request.only and not fits(candidate.name):
            findings.unmeasured.append(_no_time(candidate, pace, request))
            continue
        tried = describe(candidate, request.config, before=greedy.taken)
        say(f"speedup {number} of {len(candidates)}, {candidate.name}: {tried}")
        findings.rows.append(greedy.consider(candidate))
        findings.taken = dict(greedy.taken)
    if greedy.taken:
        say("comparing all taken speedups with the unchanged config")
    findings.verified = greedy.verify()
    findings.advice = dict(advice(greedy.taken, findings.verified, noise=noise))


def _no_time(candidate: Candidate, pace: Pace, request: Examination) -> Unmeasured:
    untried = describe(candidate, request.config, before={})
    return Unmeasured(
        candidate.name,
        f"{untried}: no time left, some {pace.trial(candidate.name):.0f} s are needed; ask by --only {candidate.name}",
    )


def describe(candidate: Candidate, config: Config, *, before: Mapping[str, Any]) -> str:
    """Return its keys with their values before (taken so far, or the config's) and after."""
    return ", ".join(
        f"{key} {shown(before.get(key, lookup(config, key)))} -> {shown(value)}"
        for key, value in candidate.values.items()
    )


def shown(value: object) -> str:
    """Return a value as a config states it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
