"""One examination, from the first probe to the advice; an interruption keeps the results so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from bigbatch.tools.doctor.budget import STEPS_IN_BUDGET, Budget, Pace
from bigbatch.tools.doctor.exchange import IMAGES, TENSORS, Probe, Probes
from bigbatch.tools.doctor.limit import WAIT_FOR_IMAGES, WAIT_FOR_SUMS, DoctorRates, find_limit
from bigbatch.tools.doctor.recommend import Greedy, SpeedComparison, TriedSpeedup, compare
from bigbatch.tools.doctor.speedups import Candidate, Machine, Unmeasured, find_candidates, part_of_images
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.schema import Config, lookup, try_values
from bigbatch.trainer.config.strict_yaml import as_yaml

MAX_NOISE = 0.2
"""Noise above which nothing is recommended: most speedups gain less, and one that seems to gain more may not last."""


@dataclass
class ExaminationResults:
    """Results so far; None or empty if not measured yet."""

    machine: Machine | None = None
    torch: str = ""
    steps: Mapping[str, Any] = field(default_factory=dict)
    input: Mapping[str, Any] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    """Gains of fusion and pinning, or the reason why they were not measured."""
    part: dict[str, Any] = field(default_factory=dict)
    """Values that shrink the step, if a whole one takes too long."""
    budget_seconds: float | None = None
    used_seconds: float = 0.0
    rates: DoctorRates | None = None
    noise: SpeedComparison | None = None
    rows: list[TriedSpeedup] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    verified: SpeedComparison | None = None
    taken: dict[str, Any] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def spread(self) -> float:
        """Return by what fraction equal measurements differed: turns of the unchanged config, or two starts of it."""
        return max(self.rates.spread if self.rates else 0.0, self.noise.noise if self.noise else 0.0)

    @property
    def is_noisy(self) -> bool:
        return self.spread > MAX_NOISE


@dataclass(kw_only=True)
class Examination:
    """What to measure, for how long, and by which probes."""

    config: Config
    full_config: Config
    """The config with its full global batch; config may have a part of it."""
    batches: str
    """Whether speedups are measured on images or on tensors."""
    seconds: float
    turns: int
    only: tuple[str, ...]
    """Names of speedups to try without regard to the budget; empty for all that fit it."""
    budget: Budget
    probes: Probes
    findings: ExaminationResults
    say: Callable[[str], None]
    """Shows progress."""

    def run(self) -> None:
        """Fill in the findings. Raises: DoctorError if the unchanged config cannot be measured."""
        budget, findings, probes = self.budget, self.findings, self.probes
        findings.budget_seconds = budget.seconds if budget.is_limited else None
        self.say("starting the config as it is")
        before = budget.used()
        base = self._start({})
        start_seconds = budget.used() - before
        self.say("estimating the seconds of an image")
        estimate = base.ask("estimate")
        facts = dict(base.ask("facts"))
        findings.torch, capability = facts.pop("torch"), facts.pop("capability")
        machine = findings.machine = Machine(capability=capability and tuple(capability), **facts)
        ranks = machine.world_size
        if budget.is_limited:
            # the most images per rank and step for which an examination's many steps fit
            num_images = budget.seconds / STEPS_IN_BUDGET / estimate["seconds_per_image"]
            part = part_of_images(self.config, num_images, world_size=ranks)
            findings.part = part if isinstance(try_values(self.config, part, world_size=ranks), Config) else {}
        if findings.part:
            base.ask("shrink", values=findings.part)
            probes.part = findings.part
        measured = try_values(self.config, findings.part, world_size=ranks)
        assert isinstance(measured, Config), "a part is legal"
        pace = Pace(
            start_seconds=start_seconds,
            step_seconds=0.0,
            turn_seconds=self.seconds,
            turns=self.turns,
            ahead=-(-measured.data.prefetch_batches // accumulation_steps(measured.batch, world_size=ranks)),
        )
        pace, rates = self._measure_base(base, machine, pace=pace, flops_per_image=estimate["flops_per_image"])
        findings.rates, limit = rates, find_limit(rates)
        # if the input is no limit, prefetched images do not matter either
        probes.flushes = not budget.is_limited or limit == "input"
        candidates, findings.unmeasured = find_candidates(
            measured, machine, full_config=self.full_config, limit=limit, only=self.only
        )
        if candidates:
            self._try_all(candidates, base, pace=replace(pace, flushes=probes.flushes))
        base.close()
        findings.is_complete = True
        findings.used_seconds = budget.used()

    def _start(self, values: Mapping[str, Any]) -> Probe:
        return self.probes.open(values, batches=self.batches, seconds=self.seconds)

    def _measure_base(
        self, base: Probe, machine: Machine, *, pace: Pace, flops_per_image: float
    ) -> tuple[Pace, DoctorRates]:
        """Measure rates and time profile of the unchanged config; return pace with its step seconds, and the rates."""
        findings = self.findings
        reads = self.config.data.loader != "synthetic"
        batches = IMAGES if reads else TENSORS
        self.say("measuring whole steps, and the model alone, in turn")
        turns: list[list[Mapping[str, Any]]] = []
        planned = self.turns
        while len(turns) < planned:
            findings.steps = base.ask("steps", batches=batches, flushes=True)
            turns.append([findings.steps, base.ask("steps", batches=TENSORS, flushes=True)])
            if len(turns) == 1:
                pace = replace(pace, step_seconds=findings.steps["seconds"])
                planned = pace.base_turns(self.budget)
        speeds = [[turn["images"] / turn["seconds"] for turn in kind] for kind in zip(*turns, strict=True)]
        # all figures of the turn of median length: medians of single figures would not belong together
        steps, alone = (
            sorted(each, key=lambda turn: float(turn["seconds"]))[len(turns) // 2] for each in zip(*turns, strict=True)
        )
        findings.steps = steps
        if reads:
            self.say("measuring the input alone")
            findings.input = base.ask("input")
        self.say("profiling the step, and measuring options that are always on")
        profile = findings.profile = base.ask("profile", batches=batches)
        findings.always = base.ask("always")
        roof = base.ask("roofline")
        # from the profile, as the table of phases shows them, so that limit and table agree
        shares = {phase: float(seconds / profile["seconds"]) for phase, seconds in profile["phases"].items()}
        rates = DoctorRates(
            together=steps["images"] / steps["seconds"],
            input_alone=findings.input.get("loader_images_per_second"),
            model_alone=alone["images"] / alone["seconds"],
            wait_share=shares.get(WAIT_FOR_IMAGES, 0.0),
            exposed_share=shares.get(WAIT_FOR_SUMS),
            busy_share=profile["busy_share"],
            flops_per_image=flops_per_image,
            peak_flops=roof["peak_flops"] * machine.world_size,
            turns=len(turns),
            spread=max((max(each) - min(each)) / 2 / median(each) for each in speeds),
        )
        return pace, rates

    def _try_all(self, candidates: Sequence[Candidate], base: Probe, *, pace: Pace) -> None:
        budget, findings = self.budget, self.findings

        def leave_out(candidate: Candidate) -> None:
            name, untried = candidate.name, describe(candidate, self.config, before={})
            why = f"no time left: it needs about {pace.trial(name):.0f} s; name it by --only {name}"
            findings.unmeasured.append(Unmeasured(name, f"{untried}: {why}"))

        if not self.only and not any(pace.fits(each.name, budget, others=1) for each in candidates):
            for each in candidates:
                leave_out(each)
            return
        self.say("measuring the noise: the config against itself")
        again = self._start({})  # another process, with separate memory and threads
        findings.noise = compare(base, again, turns=self.turns)
        again.close()
        noise = findings.noise.noise
        greedy = Greedy(base, self._start, turns=self.turns, noise=noise)
        for number, candidate in enumerate(candidates, 1):
            if not greedy.is_new(candidate):
                continue
            if not self.only and not pace.fits(candidate.name, budget):
                leave_out(candidate)
                continue
            tried = describe(candidate, self.config, before=greedy.taken)
            self.say(f"speedup {number} of {len(candidates)}, {candidate.name}: {tried}")
            findings.rows.append(greedy.consider(candidate))
            findings.taken = greedy.taken
        if greedy.taken:
            self.say("comparing all taken speedups with the unchanged config")
        findings.verified = greedy.verify()
        is_worth = findings.verified is not None and findings.verified.is_worth(noise=noise)
        if is_worth and not findings.is_noisy:
            findings.advice = greedy.taken


def describe(candidate: Candidate, config: Config, *, before: Mapping[str, Any]) -> str:
    """Return its keys with their values before (taken so far, or the config's) and after."""
    return ", ".join(
        f"{key} {as_yaml(before.get(key, lookup(config, key)))} -> {as_yaml(value)}"
        for key, value in candidate.values.items()
    )
