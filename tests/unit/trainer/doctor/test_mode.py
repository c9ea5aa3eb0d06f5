"""How compute.mode=auto chooses: modes in closed form, played rates and clocks, its file, and trials that go wrong."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from error_texts import naming
from spoiled_records import NO_RECORDS, spoil
from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import DoctorError, RunFolderError
from bigbatch.trainer.build import compiled as build_compiled
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.doctor import budget
from bigbatch.trainer.doctor import command as doctor_command
from bigbatch.trainer.doctor import mode as doctor_mode
from bigbatch.trainer.doctor.exchange import ProbeChild
from bigbatch.trainer.doctor.mode import ChosenMode, choose_mode, graph_hint
from bigbatch.trainer.doctor.mode_trials import MIN_FREE, ModeTrials, TrialStep, relative_distance, take_step
from bigbatch.trainer.doctor.modes import (
    BOUNDS,
    GRADIENT_BOUNDS,
    Mode,
    Modes,
    Trial,
    best_and_next,
    disagreement,
    find_modes,
    merge_ranks,
)
from bigbatch.trainer.memory import out_of_memory

CPU = torch.device("cpu")
SMALL = ("--data.image_size=8", "--model.options.width=2", "--compute.cpu_threads=1", "--comm.timeout_seconds=300")
EIGHTS = (
    *("--batch.global_batch_size=32", "--batch.microbatch_size=8", "--batch.bn_span=8"),
    "--compute.mode_keeps=[compute.cuda_graph]",
)
"""Four microbatches of a ghost batch each, which auto may join and compile."""
KEEPS_NOTHING = "--compute.mode_keeps=[]"


def config_of(*words: str, name: str = "quickstart") -> Config:
    return load_config(["--config", name, *words])


def quickstart(*words: str) -> Config:
    return config_of(*SMALL, *EIGHTS, *words)


def one_rank() -> Communicator:
    return connect(env=ALONE, device=CPU)


# --- the modes ---


@pytest.mark.parametrize(
    ("num_gpus", "sizes"),
    [(8, [32, 64, 128, 256, 512]), (64, [32, 64, 128, 256, 512]), (512, [32, 64, 128]), (2048, [32])],
)
def test_mode_candidates_of_jia_on_any_number_of_gpus(num_gpus: int, sizes: list[int]) -> None:
    """A rank's share of 65,536 is 8192, 1024, 128 and 32 images; a tried microbatch has 512 at most."""
    modes = find_modes(config_of(name="imagenet/jia_resnet50_64k"), world_size=num_gpus)
    twice = 2 if num_gpus <= 64 else 1  # a run's step of several of the largest is tried with two
    assert modes == Modes(Mode(32), tuple(sizes), twice * sizes[-1], can_compile=True, leaves_graph_out=True)
    assert all(65_536 // num_gpus % size == 0 for size in sizes)


@pytest.mark.parametrize(
    ("words", "sizes", "captures", "compiles"),
    [
        ((), (8, 16, 32), True, True),
        (("--batch.global_batch_size=24",), (8, 24), True, True),  # 3 microbatches: 2 do not divide them
        (("--compute.mode_keeps=[batch.microbatch_size]",), (8,), True, True),
        (("--compute.mode_keeps=[compute.compile, compute.cuda_graph]",), (8, 16, 32), False, False),
        (("--compute.compile=default",), (8, 16, 32), True, False),
        (("--compute.cuda_graph=true",), (8, 16, 32), False, True),
        (("--run.digest_every_steps=1",), (8,), False, True),  # digests are of each microbatch
        (("--run.digest_every_steps=1", "--run.digest_layers=[conv*]"), (8,), False, False),
        (("--run.noise_scale_every_steps=1",), (8,), False, True),
        (("--data.train_sizes=[[0, 8]]",), (8, 16, 32), True, True),
        (("--data.train_sizes=[[0, 8], [1, 16]]", "--run.epochs=2"), (8, 16, 32), False, True),
        (("--optimizer.name=shampoo", "--optimizer.options.eps=1e-6"), (8, 16, 32), False, True),
        (("--batch.bn_span=16",), (8,), False, False),  # two ranks share a ghost batch
        (("--batch.virtual_ranks=4",), (8,), True, True),  # whose microbatches are those of four ranks
    ],
)
def test_mode_keeps_what_is_stated_and_what_others_forbid(
    words: tuple[str, ...], sizes: tuple[int, ...], captures: bool, compiles: bool
) -> None:
    world_size = 2 if "--batch.bn_span=16" in words else 1
    config = quickstart(KEEPS_NOTHING, *words, *(("--batch.global_batch_size=64",) if world_size == 2 else ()))
    modes = find_modes(config, world_size=world_size)
    assert (modes.sizes, modes.can_capture, modes.can_compile) == (sizes, captures, compiles)


def test_mode_keeps_what_the_user_states(tmp_path: Path) -> None:
    assert config_of(name="imagenet/resnet50_8k").compute.mode_keeps == ()
    stated = config_of("--batch.microbatch_size=128", "--compute.compile=null", name="imagenet/resnet50_8k")
    assert stated.compute.mode_keeps == ("batch.microbatch_size", "compute.compile")
    own = tmp_path / "own.yaml"
    own.write_text("base: imagenet/resnet50_8k\ncompute:\n  cuda_graph: false\n")
    assert config_of(name=str(own)).compute.mode_keeps == ("compute.cuda_graph",)
    own.write_text("base: imagenet/resnet50_8k\ncompute:\n  cuda_graph: false\n  mode_keeps: []\n")
    assert config_of(name=str(own)).compute.mode_keeps == ()
    assert config_of("--compute.compile=null", name=str(own)).compute.mode_keeps == ("compute.compile",)


# --- the search ---


def search(modes: Modes, rates: Mapping[Mode, float | str]) -> tuple[Mode, list[Mode]]:
    """The best mode where each has that rate, or that refusal; and all that were tried, in their order."""
    tried: dict[Mode, Trial] = {}
    while True:
        best, mode = best_and_next(modes, tried)
        if mode is None:
            return best, list(tried)
        found = rates[mode]
        tried[mode] = Trial(refusal=found) if isinstance(found, str) else Trial(found)


ALL = Modes(Mode(8), (8, 16, 32), 32, can_capture=True, can_compile=True)
CAPTURED, BOTH = Mode(16, cuda_graph=True), Mode(16, "default", cuda_graph=True)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        # a microbatch that gains nothing ends the sizes; graph and compile come on top of the best
        ({Mode(8): 100.0, Mode(16): 150.0, Mode(32): 151.0, CAPTURED: 300.0, BOTH: 400.0}, BOTH),
        ({Mode(8): 100.0, Mode(16): 150.0, Mode(32): "out of memory", CAPTURED: 300.0, BOTH: "wrong"}, CAPTURED),
        ({Mode(8): 100.0, Mode(16): 150.0, Mode(32): 90.0, CAPTURED: "no", Mode(16, "default"): 152.0}, Mode(16)),
        ({Mode(8): "it crashed"}, Mode(8)),
    ],
)
def test_mode_search_takes_the_fastest_that_is_right(rates: dict[Mode, float | str], expected: Mode) -> None:
    best, tried = search(ALL, rates)
    assert best == expected
    assert tried == list(rates), "each once, and nothing else"


def test_mode_of_all_ranks_is_that_of_the_slowest() -> None:
    assert merge_ranks([Trial(30.0), Trial(20.0), Trial(25.0)]) == Trial(20.0)
    refused = [Trial(30.0), Trial(refusal="out of memory"), Trial(refusal="later")]
    assert merge_ranks(refused) == Trial(refusal="rank 1: out of memory")
    assert merge_ranks([Trial(refusal="alone", is_cut=True)]) == Trial(refusal="alone", is_cut=True)


@pytest.mark.parametrize("precision", BOUNDS)
def test_mode_agrees_within_the_bound_of_law_1(precision: str) -> None:
    loss, gradients = BOUNDS[precision], GRADIENT_BOUNDS[precision]
    assert disagreement(loss=loss, gradients=gradients, precision=precision) == ""
    for factor in (1.001, float("inf"), float("nan")):
        assert disagreement(loss=factor * loss, gradients=0.0, precision=precision).startswith("its loss ")
        assert disagreement(loss=0.0, gradients=factor * gradients, precision=precision).startswith("its gradient ")


def test_mode_distance_is_relative_to_the_eager_gradient() -> None:
    theirs_N = torch.tensor([3.0, 4.0])
    assert relative_distance(theirs_N, theirs_N) == 0.0
    assert relative_distance(1.5 * theirs_N, theirs_N) == pytest.approx(0.5)
    assert relative_distance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_distance(theirs_N, torch.zeros(2)) == float("inf")
    assert relative_distance(torch.tensor([float("nan"), 0.0]), theirs_N) != 0.0


# --- the choice of a job ---


class Played:
    """Trials with known rates, that take so many seconds of a played clock; the limits that they were given."""

    def __init__(
        self, rates: Mapping[Mode, float | str], *, seconds: float = 5.0, compile_seconds: float = 5.0
    ) -> None:
        self.rates, self.seconds, self.compile_seconds, self.now = rates, seconds, compile_seconds, 0.0
        self.limits: dict[Mode, float] = {}
        self.is_closed = False

    def start(self, config: Config, *, modes: Modes, device: torch.device) -> "Played":
        return self

    def __call__(self, mode: Mode, *, limit_seconds: float, meet: Callable[[], object]) -> Trial:
        meet()
        self.limits[mode] = limit_seconds
        found = self.rates.get(mode, "hangs")
        seconds = self.compile_seconds if mode.compile else self.seconds
        if found == "hangs" or seconds > limit_seconds:
            self.now += limit_seconds
            return Trial(refusal="hangs", is_cut=True)
        self.now += seconds
        return Trial(refusal=found) if isinstance(found, str) else Trial(found)

    def close(self) -> None:
        self.is_closed = True


SIZES = {Mode(8): 100.0, Mode(16): 180.0, Mode(32): 250.0}
COMPILED = {**SIZES, Mode(32, "default"): 2950.0}
LONG, MEDIUM, SHORT = 1_000_000, 4192, 32
"""Images of an epoch: at 100 images/s, 12 epochs take 120,000 s, 503 s, and 4 s."""


def choose(config: Config, played: Played, folder: Path | None, **options: Any) -> ChosenMode:
    return choose_mode(
        config,
        one_rank(),
        num_samples=options.pop("num_samples", LONG),
        kept=options.pop("kept", None),
        folder=folder,
        measures=lambda communicator: True,
        start_trials=played.start,
        clock=lambda: played.now,
        **options,
    )


def test_mode_is_measured_once_and_taken_again(tmp_path: Path) -> None:
    played = Played(COMPILED)
    first = choose(quickstart(), played, tmp_path)
    (path,) = tmp_path.iterdir()
    assert re.search(naming("compute.mode auto: microbatch 32, compiled", "2,950", "8: 100", "20 s", path), first.note)
    assert played.is_closed
    chosen = first.config
    assert (chosen.batch.microbatch_size, chosen.compute.compile, chosen.compute.cuda_graph) == (32, "default", False)
    assert (chosen.compute.mode, chosen.compute.compile_fallback) == ("eager", True)
    assert replace(chosen, batch=quickstart().batch, compute=quickstart().compute) == quickstart()
    untried = Played({})
    again = choose(quickstart(), untried, tmp_path)
    assert (again.config, again.text, untried.limits) == (first.config, first.text, {})
    assert str(path) in again.note
    (tmp_path / "run.json").write_text(first.text)  # of a run that is resumed, where the cache is gone
    path.unlink()
    assert choose(quickstart(), untried, None, kept=tmp_path / "run.json").config == first.config
    # nor does a run that was started by its folder measure anything
    assert choose(first.config, untried, tmp_path) == ChosenMode(first.config)


@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer.precision=bf16",),
        ("--run.digest_every_steps=1",),
        ("--data.image_size=16",),
        ("--model.options.width=4",),
        ("--batch.global_batch_size=64",),
        ("--compute.mode_keeps=[compute.compile]",),
        ("--batch.microbatch_size=16", "--compute.mode_keeps=[]"),
    ],
)
def test_mode_of_another_experiment_is_not_taken(words: tuple[str, ...], tmp_path: Path) -> None:
    choose(quickstart(), Played(COMPILED), tmp_path)
    other = Played({**COMPILED, Mode(64): 260.0})
    choose(quickstart(*words), other, tmp_path)
    assert other.limits
    assert len(list(tmp_path.iterdir())) == 2
    again = Played({})
    choose(quickstart("--schedule.base_lr=0.5", "--optimizer.weight_decay=0", "--run.seed=1"), again, tmp_path)
    assert not again.limits, "these change no speed"


def test_mode_of_another_gpu_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose(quickstart(), Played(COMPILED), tmp_path)
    monkeypatch.setattr(doctor_mode, "device_name", lambda device: "NVIDIA H200")
    other = Played(SIZES)
    (tmp_path / "run.json").write_text(first.text)
    found = choose(quickstart(), other, tmp_path, kept=tmp_path / "run.json")
    assert "is ignored (it is of another GPU, job or config: gpus ['cpu, driver '] there" in found.note
    assert found.config.compute.compile is None


@pytest.mark.parametrize(
    "spoiled",
    [
        *NO_RECORDS,
        *(spoil(lambda record, key=key: record.pop(key)) for key in ("mode", "needs_seconds")),
        *(
            spoil(lambda record, changed=changed: record.update(changed))
            for changed in (
                *({"format": "bigbatch compute mode 1"}, {"is_cut": "yes"}, {"mode": None}, {"keys": "x" * 100_000}),
                *({"needs_seconds": "soon"}, {"needs_seconds": float("nan")}, {"date": "2026-01-01\n0: all is well"}),
                *({"images_per_second": {"mode": mode, "stated": 1.0}} for mode in (float("nan"), "fast")),
                *({"images_per_second": odd} for odd in ({"mode": 1.0, "stated": 0.0}, [])),
            )
        ),
        *(
            spoil(lambda record, changed=changed: record["mode"].update(changed))
            for changed in (
                *({"microbatch_size": size} for size in (12, True, 10**30)),
                *({"compile": odd} for odd in ("__import__('os')", ["default"])),
                *({"cuda_graph": True}, {"cuda_graph": 0}, {"shell": "rm"}),
            )
        ),
    ],
)
def test_mode_file_that_is_damaged_is_named_and_measured_anew(
    spoiled: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    first = choose(quickstart(), Played(COMPILED), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoiled(path.read_bytes()))
    again = Played(COMPILED)
    found = choose(quickstart(), again, tmp_path)
    assert f"{path} is ignored (" in found.note
    assert "\n" not in found.note
    assert len(found.note) < 1000
    assert again.limits
    assert found.config == first.config
    untried = Played({})
    assert choose(quickstart(), untried, tmp_path).config == first.config
    assert not untried.limits


def test_mode_trial_that_hangs_is_cut_and_tried_once_more(tmp_path: Path) -> None:
    """It gets all of the time that is left, and the last start's answer holds."""
    hangs = Played(SIZES)
    first = choose(quickstart(), hangs, tmp_path)
    assert hangs.now == budget.MAX_SECONDS
    assert hangs.limits[Mode(8)] == budget.FIRST_SECONDS, "it starts the process"
    assert hangs.limits[Mode(16)] == (budget.MAX_SECONDS - 5) / 2
    assert first.config.batch.microbatch_size == 32
    assert first.note.endswith("; microbatch 32, compiled refused: hangs")
    slower = Played({mode: rate / 2 for mode, rate in SIZES.items() if isinstance(rate, float)})
    second = choose(quickstart(), slower, tmp_path)
    assert "tried once more" in second.note
    assert json.loads(second.text)["images_per_second"]["mode"] == 250.0, "what was faster stays"
    third = Played({})
    choose(quickstart(), third, tmp_path)
    assert not third.limits


@pytest.mark.slow
def test_mode_that_was_chosen_is_named_when_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "fits_memory", lambda *args, **options: True)
    stated = quickstart(f"--run.directory={tmp_path}")
    chosen = choose(stated, Played(COMPILED), None)
    eager = replace(stated, compute=replace(stated.compute, mode="eager"))
    for config, text, is_named in (
        (chosen.config, chosen.text, True),
        (eager, chosen.text, False),
        (chosen.config, "{", False),
        (chosen.config, "[]", False),
    ):
        (tmp_path / "mode.json").write_text(text)
        line = out_of_memory.explain(config, "out of memory", world_size=1, device=CPU)
        assert ("--compute.mode eager" in line) == is_named


def test_mode_search_ends_in_time(tmp_path: Path) -> None:
    slow = Played({**COMPILED, Mode(64): 300.0}, seconds=55.0)
    found = choose(quickstart("--batch.global_batch_size=64"), slow, tmp_path)
    assert list(slow.limits) == [Mode(8), Mode(16), Mode(32), Mode(64)]
    assert found.config.batch.microbatch_size == 32
    tried = ("eager, microbatch 64 refused: hangs", "microbatch 32, compiled not tried", "60 s", "38 s", "240 s")
    assert re.search(naming(*tried), found.note)


def test_mode_trials_take_a_tenth_of_the_run_and_of_several_ranks_half_of_the_timeout() -> None:
    for rate, most in ((100.0, 200.0), (1000.0, 20.0), (10.0, budget.MAX_SECONDS), (0.0, budget.MAX_SECONDS)):
        assert budget.TrialTime(200_000).allowed(rate)[0] == most
    time = budget.TrialTime(budget.MIN_IMAGES, 30.0)
    assert time.first_limit(Mode(8)) == 30.0
    assert time.allowed(100.0) == (30.0, "half of comm.timeout_seconds")
    assert budget.TrialTime(budget.MIN_IMAGES).first_limit(Mode(8, "default")) == budget.MAX_SECONDS, "it compiles"


def test_mode_of_a_short_run_is_as_stated_without_a_trial(tmp_path: Path) -> None:
    untried = Played({})
    for is_dry_run in (False, True):
        found = choose(quickstart(), untried, tmp_path, num_samples=SHORT, is_dry_run=is_dry_run)
        assert found.config == quickstart()
        assert re.search(naming("eager, microbatch 8, as stated", "384 images", "50,000"), found.note)
    most = budget.MIN_IMAGES // (12 * 32) * 32
    assert choose(quickstart(), untried, tmp_path, num_samples=most).config == quickstart()
    assert (untried.limits, list(tmp_path.iterdir())) == ({}, [])
    longer = Played(SIZES)
    choose(quickstart(), longer, None, num_samples=most + 32)
    assert longer.limits

    long = choose(quickstart(), Played(COMPILED), tmp_path)
    assert choose(quickstart(), untried, tmp_path, num_samples=SHORT).config == long.config, "it costs nothing"
    (tmp_path / "mode.json").write_text(long.text)
    kept = choose(quickstart(), untried, None, kept=tmp_path / "mode.json", num_samples=SHORT)
    assert kept.config == long.config


def test_mode_of_few_images_on_several_ranks_hints_at_a_graph() -> None:
    assert "with 32 images of each GPU in a step, compute.cuda_graph=true" in graph_hint(Mode(32), images_per_rank=32)
    config = quickstart(KEEPS_NOTHING, "--batch.global_batch_size=64")
    assert find_modes(config, world_size=2).leaves_graph_out
    for words in (
        ("--compute.mode_keeps=[compute.cuda_graph]",),
        ("--optimizer.name=shampoo", "--optimizer.options.eps=1e-6"),
    ):
        stated = quickstart(KEEPS_NOTHING, "--batch.global_batch_size=64", *words)
        assert not find_modes(stated, world_size=2).leaves_graph_out, words
    assert not find_modes(config, world_size=1).leaves_graph_out
    assert graph_hint(Mode(32, cuda_graph=True), images_per_rank=32) == graph_hint(Mode(64), images_per_rank=256) == ""


def test_mode_of_a_run_of_medium_length_leaves_the_compilation_to_a_longer_one(tmp_path: Path) -> None:
    played = Played(COMPILED)
    medium = choose(quickstart(), played, tmp_path, num_samples=MEDIUM)
    assert list(played.limits) == list(SIZES)
    assert played.now < budget.SHARE_OF_RUN * 503
    assert medium.config.batch.microbatch_size == 32
    assert re.search(naming("; microbatch 32, compiled not tried", "60 s", "35 s", "of 50 s, 10%"), medium.note)
    assert json.loads(medium.text)["needs_seconds"] == 15.0 + budget.EXTRA_SECONDS["compile"]
    untried = Played({})
    for num_samples in (SHORT, MEDIUM):
        again = choose(quickstart(), untried, tmp_path, num_samples=num_samples)
        assert (again.config, untried.limits) == (medium.config, {}), "there is no more time than then"
    played = Played(COMPILED, seconds=20.0, compile_seconds=100.0)
    long = choose(quickstart(), played, tmp_path)
    assert played.limits[Mode(32, "default")] == budget.MAX_SECONDS - 60.0, "a compilation gets all that is left"
    assert "tried once more, since a trial was cut short or left out" in long.note
    assert long.config.compute.compile == "default"
    assert choose(quickstart(), untried, tmp_path).config == long.config


def test_mode_trial_that_fails_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    found = choose(quickstart(), Played({Mode(8): "CUDA-capable device(s) is/are busy"}), tmp_path)
    assert found.config == quickstart("--compute.mode=eager")
    (path,) = tmp_path.iterdir()
    refused = "eager, microbatch 8 refused: CUDA-capable device(s) is/are busy"
    assert re.search(naming("eager, microbatch 8, as stated, since its trial failed", path, refused), found.note)
    untried = Played({})
    assert choose(quickstart(), untried, tmp_path).config == found.config
    assert not untried.limits
    path.unlink()
    choose(quickstart(), Played({}), tmp_path)  # cut
    assert choose(quickstart(), Played(SIZES), tmp_path).config.batch.microbatch_size == 32, "tried once more"
    path.unlink()
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    found = choose(quickstart(), Played(COMPILED), in_the_way / "modes")
    assert found.config.batch.microbatch_size == 32
    assert "not stored" in found.note


def test_mode_auto_measures_nothing_where_it_means_eager(tmp_path: Path) -> None:
    config = quickstart()
    assert choose_mode(config, one_rank(), num_samples=LONG, kept=None, folder=tmp_path) == ChosenMode(config), "a CPU"
    untried = Played({})
    eager = quickstart("--compute.mode=eager")
    assert choose(eager, untried, tmp_path) == ChosenMode(eager)
    same_bits = quickstart("--run.reproducible=true")
    assert choose(same_bits, untried, tmp_path).config == same_bits
    alone = quickstart("--batch.global_batch_size=8", "--compute.mode_keeps=[compute.compile, compute.cuda_graph]")
    found = choose(alone, untried, tmp_path)
    assert (found.config, untried.limits) == (alone, {})
    assert "no other mode fits these settings" in found.note


def test_mode_of_a_dry_run_is_what_would_be_measured(tmp_path: Path) -> None:
    untried = Played({})
    found = choose(quickstart(), untried, tmp_path, is_dry_run=True)
    assert re.search(
        naming("eager, microbatch 8, microbatch 16, microbatch 32, compiled, ", "10%", "240 s"), found.note
    )
    assert (found.config, untried.limits, list(tmp_path.iterdir())) == (quickstart(), {}, [])
    choose(quickstart(), Played(COMPILED), tmp_path)
    assert choose(quickstart(), untried, tmp_path, is_dry_run=True).config.batch.microbatch_size == 32


# --- trials ---


class PlayedChild:
    """A process that answers orders by a function, which may raise what ProbeChild does."""

    num_started = 0
    orders: ClassVar[list[Mode]] = []
    pauses = True
    """A mode that fails before it is warm is not paused."""

    def __init__(self, answer: Callable[[Mode], dict[str, Any]], config: Config, folder: Path, **options: Any) -> None:
        PlayedChild.num_started += 1
        self.answer = answer
        assert options["command"] == "mode"

    def ask(self, what: str, *, limit_seconds: float, mode: Any = None, **details: Any) -> dict[str, Any]:
        if what == "try":
            self.mode = Mode(**mode)
            PlayedChild.orders.append(self.mode)
            return {"is_ready": True} if self.pauses else self.answer(self.mode)
        assert what == "time"
        return self.answer(self.mode)

    def kill(self) -> None:
        pass


RIGHT = {"images_per_second": 10.0, "loss": 0.0, "gradients": 0.0, "free_share": 0.5}


def trials_of(config: Config, answer: Callable[[Mode], dict[str, Any]]) -> ModeTrials:
    PlayedChild.num_started, PlayedChild.orders = 0, []
    modes = find_modes(config, world_size=1)
    return ModeTrials(config, modes=modes, device=CPU, start=partial(PlayedChild, answer))


def test_mode_trial_that_crashes_is_named_and_another_process_goes_on() -> None:
    def answer(mode: Mode) -> dict[str, Any]:
        if mode.cuda_graph:
            raise DoctorError("CUDA error: an illegal memory access was encountered\nmore")
        return RIGHT

    trials = trials_of(quickstart(), answer)
    order = [Mode(8), Mode(16, cuda_graph=True), Mode(16)]
    found = [trials(mode, limit_seconds=60.0, meet=list) for mode in order]
    assert [trial.refusal for trial in found] == ["", "CUDA error: an illegal memory access was encountered", ""]
    assert not found[1].is_cut
    assert PlayedChild.num_started == 2
    assert PlayedChild.orders == [*order[:2], Mode(8), Mode(16)], "the stated mode again, to compare with"
    trials.close()


@pytest.mark.parametrize("fails", ["", "early", "late"])
def test_mode_trial_is_timed_once_all_ranks_are_warm(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks meet once for each trial, also for one that fails: the others would wait."""
    events: list[str] = []

    def answer(mode: Mode) -> dict[str, Any]:
        events.append("answered")
        if fails:
            raise DoctorError("a crash")
        return RIGHT

    monkeypatch.setattr(PlayedChild, "pauses", fails != "early")
    trials = trials_of(quickstart(), answer)
    trial = trials(Mode(8), limit_seconds=60.0, meet=lambda: events.append("met"))
    assert events == (["answered", "met"] if fails == "early" else ["met", "answered"])
    assert trial == (Trial(refusal="a crash") if fails else Trial(10.0))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({**RIGHT, "gradients": 0.5}, "its gradient differs from the stated mode's by 0.5, above 0.01"),
        ({**RIGHT, "loss": float("nan")}, "its loss or that of the stated mode is not finite"),
        ({**RIGHT, "free_share": MIN_FREE / 2}, "it leaves 5% of the memory free, less than 10%"),
        ({"failure": "out of memory"}, "out of memory"),
    ],
)
def test_mode_trial_is_refused_with_the_reason(answer: dict[str, Any], words: str) -> None:
    stated = {**RIGHT, "loss": float("inf"), "gradients": float("nan"), "free_share": 0.0}
    trials = trials_of(quickstart(), lambda mode: answer if mode != Mode(8) else stated)
    assert trials(Mode(8), limit_seconds=60.0, meet=list) == Trial(10.0), "it needs no finite step, nor free memory"
    assert trials(Mode(16), limit_seconds=60.0, meet=list) == Trial(refusal=words)
    trials.close()


@pytest.mark.long
def test_mode_trials_in_a_real_process() -> None:
    config = quickstart()
    trials = ModeTrials(config, modes=find_modes(config, world_size=1), device=CPU)
    for mode in (Mode(8), Mode(16)):
        trial = trials(mode, limit_seconds=300.0, meet=list)
        assert trial.images_per_second > 0, trial.refusal
    trials.close()


@pytest.mark.parametrize("name", ["mode", "probe"])
def test_run_folder_may_have_the_name_of_a_trial_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([name], [name, "--json"]):
        with pytest.raises(RunFolderError, match=naming(name)):
            doctor_command.main(words)


def test_mode_trial_is_cut_at_its_limit() -> None:
    """A real process, which cannot have started by then, and is gone after."""
    started: list[ProbeChild] = []

    def start(*arguments: Any, **options: Any) -> ProbeChild:
        started.append(ProbeChild.__new__(ProbeChild))
        ProbeChild.__init__(started[-1], *arguments, **options)
        return started[-1]

    modes = find_modes(quickstart(), world_size=1)
    trials = ModeTrials(quickstart(), modes=modes, device=CPU, start=start)
    trial = trials(Mode(8), limit_seconds=0.2, meet=list)
    assert trial.is_cut
    assert re.search(naming("took longer than", "was ended"), trial.refusal)
    assert started[0]._process.exit_code() is not None
    trials.close()


@pytest.fixture(scope="module")
def eager() -> TrialStep:
    return take_step(quickstart(), Mode(8), num_images=32, device=CPU)


@pytest.mark.parametrize("size", [16, 32])
def test_mode_of_a_larger_microbatch_is_the_same_step(size: int, eager: TrialStep) -> None:
    step = take_step(quickstart(), Mode(size), num_images=32, device=CPU)
    assert disagreement(**step.distances(eager), precision="fp32") == ""
    assert step.figures["images_per_second"] > 0
    assert step.gradients_N.norm() > 0


def test_mode_with_another_order_of_sums_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates another convolution algorithm: it rounds otherwise, and a few ReLUs decide otherwise."""

    def compile_rounded_(model: nn.Module, *, mode: str | None) -> None:
        generator = torch.Generator().manual_seed(0)

        def round_otherwise(module: nn.Module, images: Any, out_BCHW: torch.Tensor) -> torch.Tensor:
            length = out_BCHW.detach().square().mean().sqrt()
            return out_BCHW + 2e-6 * length * torch.empty_like(out_BCHW).normal_(generator=generator)

        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(round_otherwise)

    monkeypatch.setattr(build_compiled, "compile_regions_", compile_rounded_)
    monkeypatch.setattr(build_compiled, "compile_failure", lambda first_call: "")
    config = quickstart("--data.image_size=32", "--model.options.width=8")
    stated, other = (take_step(config, Mode(8, how), num_images=64, device=CPU) for how in (None, "default"))
    assert disagreement(**other.distances(stated), precision="fp32") == ""


def test_mode_that_computes_another_update_is_refused(eager: TrialStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates wrong code of a compiler: logits that are 1% too large, with which training works as well."""

    def compile_wrong_(model: nn.Module, *, mode: str | None) -> None:
        model.register_forward_hook(lambda module, images, logits_BK: 1.01 * logits_BK)

    monkeypatch.setattr(build_compiled, "compile_regions_", compile_wrong_)
    monkeypatch.setattr(build_compiled, "compile_failure", lambda first_call: "")
    wrong = take_step(quickstart(), Mode(8, "default"), num_images=32, device=CPU)
    trials = trials_of(quickstart(), lambda mode: {**RIGHT, **(wrong if mode.compile else eager).distances(eager)})
    assert trials(Mode(8), limit_seconds=60.0, meet=list).images_per_second > 0
    refused = trials(Mode(8, "default"), limit_seconds=60.0, meet=list)
    assert re.search(naming("differs from", "above 2e-05"), refused.refusal)
    assert wrong.distances(eager)["gradients"] > 100 * BOUNDS["fp32"]
    trials.close()


@pytest.mark.long
def test_mode_with_other_draws_is_another_update() -> None:
    """A larger microbatch draws its dropout at once, so that auto leaves such models eager."""
    config = config_of(
        "--model.name=alexnet_bn", "--data.image_size=63", "--compute.cpu_threads=1", *EIGHTS, "--data.crop=resized"
    )
    one, other = (take_step(config, Mode(size), num_images=16, device=CPU) for size in (8, 16))
    assert other.distances(one)["gradients"] > 1000 * BOUNDS["fp32"]
