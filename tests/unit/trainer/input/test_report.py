"""What is said about the input: rates by hand, and advice that is true for the settings of the run."""

import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from all_augmentations import ALL_AUGMENTATIONS
from error_texts import naming

from bigbatch.trainer.build.input import gather_rates
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.loaders.probe import ProbedInput
from bigbatch.trainer.input.report import (
    InputSettings,
    InputWait,
    MeasuredInput,
    Rates,
    describe_input,
    hints,
    input_record,
    input_settings,
    limiting_stage,
    merge_rates,
    pixels_left,
    slowest_stage,
)
from bigbatch.trainer.machine import host

RATES = {"loader": 812.0, "read": 5000.0, "decode": 850.0, "copy": None, "augment": 9000.0}
FAST = {"loader": 3000.0, "read": 5000.0, "decode": 3100.0, "copy": None, "augment": 9000.0}
SETTINGS = InputSettings(
    loader="torchvision",
    num_threads=4,
    num_cores=16,
    is_on_gpu=False,
    is_packed=False,
    stage=None,
    bind_numa=True,
    precision="bf16",
    augmentations=(),
    max_side=448,
    pixels_left=0.5,
)
WAITED = InputWait(wait_fraction=0.66, compute_images_per_second=2400.0, steps=1000)


def told(waited: InputWait, rates: Rates, **changed: object) -> list[str]:
    """The hints of a run on one rank."""
    return hints(waited, MeasuredInput((rates,), replace(SETTINGS, **changed)), was_probed=True)


def test_input_report_record_names_every_rate_and_the_slowest_stage() -> None:
    assert slowest_stage(RATES) == "decode"
    assert input_record(RATES, step=7) == {
        "step": 7,
        "loader_images_per_second": 812.0,
        "read_images_per_second": 5000.0,
        "decode_images_per_second": 850.0,
        "copy_images_per_second": None,
        "augment_images_per_second": 9000.0,
        "slowest_stage": "decode",
    }
    assert re.search(naming("812 images/s", "read 5,000", "decode 850", "augment 9,000"), describe_input([RATES]))


def test_input_report_a_stage_limits_a_loader_that_is_not_far_slower() -> None:
    """Reading and decoding that share the threads make half of their rate alone; a sixth has another cause."""
    assert limiting_stage({**RATES, "loader": 425.0}) == "decode"
    odd = {**RATES, "loader": 340.0, "read": 2200.0, "decode": 2600.0}
    assert limiting_stage(odd) is None
    assert "no stage explains that" in describe_input([odd])
    assert "explains" not in describe_input([RATES])
    (text,) = told(WAITED, odd)
    assert re.search(naming("the input limits this run", "340 images/s", "2,400", "no stage explains that"), text)
    assert "slowest stage" not in text


def rates_of(loader: float, **changed: float) -> Rates:
    return {**RATES, "loader": loader, **changed}


def test_input_report_ranks_in_lock_step_are_as_fast_as_the_slowest_one() -> None:
    ranks = [rates_of(1336, read=60, augment=900), rates_of(57, decode=100), rates_of(1400, augment=800)]
    assert merge_rates(ranks) == {"loader": 171, "read": 180, "decode": 300, "copy": None, "augment": 2400}
    assert merge_rates([RATES]) == RATES


@pytest.mark.parametrize(
    ("loaders", "said"),
    [
        ([1336, 57], "; rank 1 is the slowest: 57 images/s, the median rank 1,336"),
        ([1000, 69, 100, 700], "; rank 1 is the slowest: 69 images/s, the median rank 700"),
        ([699, 1000, 1000], "; rank 0 is the slowest: 699 images/s, the median rank 1,000"),
        ([701, 1000, 1000], ""),
        ([425], ""),
    ],
)
def test_input_report_a_rank_far_behind_is_named(loaders: list[float], said: str) -> None:
    ranks = [rates_of(loader, augment=1e6) for loader in loaders]
    assert describe_input(ranks).partition(")")[2] == said
    (text,) = hints(
        replace(WAITED, compute_images_per_second=9000), MeasuredInput((*ranks,), SETTINGS), was_probed=True
    )
    if 3 * min(loaders) < 850:  # decoding is so much faster than that rank's loader that it does not explain it
        assert "slowest stage" not in text
        assert text.endswith(said)
    else:
        assert f"decoding is its slowest stage ({850 * len(ranks):,}){said}: " in text


def test_input_report_pixels_left_by_hand() -> None:
    assert pixels_left([(100, 200), (400, 400)], max_side=100) == (20_000 + 10_000) / (20_000 + 160_000)
    assert pixels_left([(300, 60)], max_side=100) == 1


@pytest.mark.parametrize(("wait", "is_hinted"), [(0.05, False), (0.051, True)])
def test_input_report_hint_is_for_those_who_wait(wait: float, is_hinted: bool) -> None:
    waited = replace(WAITED, wait_fraction=wait)
    assert bool(told(waited, RATES)) is is_hinted
    assert bool(hints(waited, None, was_probed=True)) is is_hinted


PACKED = {"is_packed": True}
GPU = {"is_on_gpu": True}
CUTOUT = "augment.cutout_size"
NAMED = re.compile(
    r"(?:raise |lower )?(?:data|augment|optimizer)\.\w+(?:=dali)?|short-side \d+|data pack`|more cores|/dev/shm"
)
"""What a hint may advise: a key, a command, or cores."""


def run_with(slow: str) -> tuple[InputWait, Rates]:
    """Waits and rates of a run with one slow stage, or with none, whose parts compete ("share")."""
    if slow in ("read", "decode"):
        return WAITED, {**RATES, "decode": 3000.0, slow: 800.0}
    if slow == "share":
        return replace(WAITED, wait_fraction=0.12), FAST
    return replace(WAITED, wait_fraction=0.0), {**FAST, "copy": 9000.0, slow: 3200.0}


@pytest.mark.parametrize(
    ("slow", "changed", "expected"),
    [
        ("decode", {}, "raise data.num_threads, short-side 448"),
        ("decode", {"num_threads": 16}, "short-side 448"),
        ("decode", {"num_threads": 20, **PACKED}, "more cores"),
        ("decode", PACKED, "raise data.num_threads"),
        ("decode", {"pixels_left": 0.81}, "raise data.num_threads"),
        ("decode", {**GPU, **PACKED}, "raise data.num_threads, data.loader=dali"),
        ("decode", {"loader": "dali", **GPU, **PACKED}, "raise data.num_threads"),
        ("read", {}, "data pack`, data.stage"),
        ("read", PACKED, "data.stage"),
        ("read", {"stage": "/a", **PACKED}, "data.stage, /dev/shm"),
        ("read", {"stage": "/dev/shm/a", **PACKED}, "more cores"),
        ("read", {"stage": "/dev/shm/a", "num_threads": 1, **PACKED}, "raise data.num_threads"),
        # steps never wait for these: reading and decoding are ahead meanwhile
        ("copy", GPU, "data.loader=dali"),
        ("copy", {"bind_numa": False, **GPU}, "data.bind_numa, data.loader=dali"),
        ("augment", {}, "more cores"),
        ("augment", {"augmentations": (CUTOUT,)}, CUTOUT),
        ("augment", {"augmentations": (CUTOUT, "augment.mix")}, f"{CUTOUT}, augment.mix"),
        ("augment", {"precision": "fp32", "augmentations": (CUTOUT,), **GPU}, f"{CUTOUT}, optimizer.precision"),
        ("augment", GPU, ""),
        ("share", PACKED, "more cores"),
        ("share", {"pixels_left": 0.5}, "short-side 448, more cores"),
        ("share", {"num_threads": 20, **PACKED}, "lower data.num_threads, more cores"),
        ("share", {"num_threads": 16, **GPU, **PACKED}, "data.loader=dali, more cores"),
        # a GPU whose threads have cores to spare does not compete: the storage was slower than when it was measured
        ("share", {"is_remote": True, **GPU, **PACKED}, "data.cache_dir, data.cache_gb"),
        ("share", {"stage": "/scratch/i", **GPU, **PACKED}, "data.stage, /dev/shm"),
        ("share", {"num_threads": 15, **GPU}, "data pack`, data.stage"),
        ("share", {"stage": "/dev/shm/i", **GPU, **PACKED}, "raise data.num_threads"),
    ],
)
def test_input_report_advises_what_the_settings_leave(slow: str, changed: dict[str, object], expected: str) -> None:
    (text,) = told(*run_with(slow), **changed)
    assert ", ".join(NAMED.findall(text)) == expected


@pytest.mark.parametrize(
    ("slow", "figures"),
    [
        ("decode", ("66%", "812 images/s", "2,400", "decoding", "(800)")),
        ("augment", ("75%", "3,200", "2,400", "augmentation on the device")),
        ("share", ("12%", "3,000 images/s", "2,400", "compete")),
    ],
)
def test_input_report_states_its_figures(slow: str, figures: tuple[str, ...]) -> None:
    (text,) = told(*run_with(slow))
    assert re.search(naming(*figures), text)


@pytest.mark.parametrize("stage", ["copy", "augment"])
def test_input_report_a_stage_within_the_step_is_told_from_half_of_its_time_on(stage: str) -> None:
    waited, rates = run_with(stage)
    assert told(waited, {**rates, stage: 4800.0}) == []
    assert told(waited, {**rates, stage: 4700.0}) != []
    (within_noise,) = told(waited, {**rates, stage: 2300.0})
    assert " takes 100% of " in within_noise


def test_input_report_waiting_steps_are_limited_by_a_stage_that_works_ahead() -> None:
    """A run can be slow for two reasons."""
    for augment in (3000.0, 600.0):
        waiting, augmenting = told(WAITED, {**RATES, "augment": augment})
        assert "decoding is its slowest stage (850)" in waiting
        assert "augmentation on the device takes" in augmenting


def test_input_report_the_first_batch_of_a_short_run_is_no_reason_for_a_hint() -> None:
    assert told(replace(WAITED, wait_fraction=0.14, steps=10), FAST) == []
    assert told(replace(WAITED, wait_fraction=0.16, steps=10), FAST) != []


@pytest.mark.parametrize(
    ("was_probed", "why"), [(False, "data.probe_seconds=1 does"), (True, "the measurement met an")]
)
def test_input_report_what_was_not_measured_is_not_explained(was_probed: bool, why: str) -> None:
    (text,) = hints(WAITED, None, was_probed=was_probed)
    (of_healed,) = hints(WAITED, None, was_probed=was_probed, is_healed=True)
    assert of_healed.endswith("the job was interrupted since its start, and did not measure again")
    assert text.startswith(f"steps wait 66% of their time for images; what limits the input was not measured: {why}")


@pytest.mark.parametrize("loader", ["resident", "synthetic"])
def test_input_report_loaders_that_do_not_work_ahead_say_so(loader: str) -> None:
    rates = {"loader": 3000.0, "read": None, "decode": None, "copy": None, "augment": 9000.0}
    (text,) = told(WAITED, rates, loader=loader)
    assert f"data.loader={loader} makes each batch within its step" in text
    assert slowest_stage(rates) == "augment"


def test_input_report_settings_are_those_of_the_config(tmp_path: Path) -> None:
    words = [
        "data.num_threads=3",
        "augment.cutout_size=8",
        "augment.mixup_alpha=0.2",
        "data.train_sizes=[[0,32],[2,64]]",
    ]
    config = load_config(["--config", "quickstart", f"--data.root={tmp_path}", *(f"--{word}" for word in words)])
    settings = input_settings(config, sizes=[(256, 256)], num_cores=5, is_on_gpu=True, is_packed=False)
    assert settings.augmentations == ("augment.cutout_size", "augment.mixup_alpha")
    assert (settings.num_threads, settings.num_cores, settings.is_packed) == (3, 5, False)
    assert (settings.max_side, settings.pixels_left) == (128, 0.25)
    assert input_settings(config, sizes=[], num_cores=5, is_on_gpu=True, is_packed=False).pixels_left == 1


def test_input_report_every_augmentation_is_known() -> None:
    words = [f"--augment.{key}={value}" for key, value in ALL_AUGMENTATIONS.items()]
    config = load_config(["--config", "quickstart", *words])
    native = [field.name for field in fields(config.augment) if field.name != "custom"]
    assert native == [*ALL_AUGMENTATIONS], "a new key gets its row there"
    settings = input_settings(config, sizes=[], num_cores=1, is_on_gpu=False, is_packed=False)
    costly = [key for key in ALL_AUGMENTATIONS if key != "randaugment_magnitude"]
    assert settings.augmentations == tuple(f"augment.{key}" for key in costly)


def test_every_augmentation_stands_in_the_pages_table() -> None:
    page = (Path(__file__).parents[4] / "docs/input.md").read_text()
    named = re.findall(r"`augment\.(\w+): ", "".join(re.findall(r"^\| (`augment\..*?) \|", page, re.M)))
    assert [name for name in named if name != "custom"] == [*ALL_AUGMENTATIONS]


MINE = ProbedInput({"loader": 100.0, "read": None, "decode": 300.0, "copy": None, "augment": 500.0}, ())


def ranks(*others: object) -> SimpleNamespace:
    """A communicator of this rank and of others whose values are given."""
    return SimpleNamespace(gather=lambda value: [value, *others])


def test_input_report_rates_of_all_ranks_are_known_or_none() -> None:
    theirs = {**MINE.rates, "loader": 7.0}
    assert gather_rates(MINE, ranks(theirs)) == (MINE.rates, theirs)
    assert gather_rates(MINE, ranks(None)) is None
    assert gather_rates(None, ranks(MINE.rates)) is None


@pytest.mark.parametrize(
    ("others", "cores"),
    [
        ([], 6),
        (["here [0, 1, 2, 3, 4, 5]"], 3),
        (["there [0, 1, 2, 3, 4, 5]"], 6),
        (["here [0, 1, 2, 3, 4, 5]"] * 9, 1),
    ],
)
def test_input_report_cores_per_rank(others: list[str], cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: list(range(6)))
    monkeypatch.setattr(host, "boot_id", lambda: "")  # where the system does not tell
    communicator = SimpleNamespace(env=SimpleNamespace(host="here"), gather=lambda text: [text, *others])
    assert host.cores_per_rank(communicator) == cores
