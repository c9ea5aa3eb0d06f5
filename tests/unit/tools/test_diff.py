"""The output of `bigbatch diff` for made-up runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming

from bigbatch.errors import DIFFERENT, CheckpointError, RunFolderError
from bigbatch.tools.replay.diff import describe_difference, main, read_run
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.observe.digests import digests_of_images, values_folder

ONE_UP = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()


@pytest.mark.parametrize(
    ("b", "text"),
    [
        ([[1.0, -2.0], [0.0, 4.0]], ""),
        ([[ONE_UP, -2.0], [0.0, 5.0]], "2 of 4 elements differ, first [0, 0]: 1 and 1.00000012, 1 units"),
        # a quarter more is 2^21 of the 2^23 steps from a power of two to the next
        ([[1.0, -2.5], [0.0, 4.0]], "1 of 4 elements differ, first [0, 1]: -2 and -2.5, 2,097,152 units"),
        ([[1.0, -2.0], [-0.0, 4.0]], "1 of 4 elements differ, first [1, 0]: 0 and -0, 0 units"),
    ],
)
def test_diff_of_elements_goes_by_bits(b: list[list[float]], text: str) -> None:
    told = describe_difference(torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor(b))
    assert told.startswith(text)
    assert bool(told) == bool(text)


def test_diff_of_elements_takes_scalars_integers_and_nothing() -> None:
    assert describe_difference(torch.tensor(3), torch.tensor(4)) == "1 of 1 elements differ, first []: 3 and 4"
    assert describe_difference(torch.empty(0), torch.empty(0)) == ""
    nan = torch.tensor([float("nan")])
    assert describe_difference(nan, nan.clone()) == "", "the same bits"
    assert describe_difference(float("nan"), float("nan")) == "", "two runs whose loss is no number"
    assert describe_difference(float("nan"), 1.0) == "nan and 1.0"


def batch_of(images_BCHW: torch.Tensor, labels: list[int]) -> Batch:
    size = len(labels)
    request = Request(0, torch.arange(size).numpy(), torch.ones(size, dtype=torch.bool).numpy())
    return Batch(images_BCHW, torch.tensor(labels), torch.ones(size, dtype=torch.bool), request)


def test_digests_of_images_tell_each_by_its_contents_and_label() -> None:
    images_BCHW = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    labels = [3, 1, 4, 1]
    whole = digests_of_images(batch_of(images_BCHW, labels)).tolist()
    assert len(set(whole)) == 4
    parts = [digests_of_images(batch_of(images_BCHW[i : i + 2], labels[i : i + 2])) for i in range(0, 4, 2)]
    assert torch.cat(parts).tolist() == whole
    last = images_BCHW.to(memory_format=torch.channels_last)
    assert digests_of_images(batch_of(last, labels)).tolist() == whole, "the same images"
    assert digests_of_images(batch_of(images_BCHW[[1, 0, 2, 3]], labels)).tolist() != whole
    assert digests_of_images(batch_of(images_BCHW, [3, 1, 4, 2])).tolist()[:3] == whole[:3]
    assert digests_of_images(batch_of(images_BCHW, [3, 1, 4, 2])).tolist()[3] != whole[3]


def test_diff_knows_the_job_that_made_a_step(tmp_path: Path) -> None:
    """Three ranks to step 4, two to step 6, then one."""
    run, ranks = RunDir(tmp_path), {0: 3, 4: 2, 6: 1}
    run.write_text(run.config, dump_config(load_config(["--config", "quickstart"])))
    starts = [{"kind": "start", "step": step, "job": {"world_size": size}} for step, size in ranks.items()]
    run.write_text(run.metrics, "".join(json.dumps(each) + "\n" for each in starts))
    found = read_run(tmp_path)
    assert (found.first_step, found.job) == (0, {"world_size": 1})
    expected = {(0, 4): [3], (3, 4): [3], (3, 5): [3, 2], (4, 5): [2], (4, 7): [2, 1], (6, 7): [1], (0, 9): [3, 2, 1]}
    for steps, sizes in expected.items():
        assert [job["world_size"] for job in found.jobs_between(*steps)] == sizes, steps


class Made:
    """Makes run folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, *steps: dict[str, Any], job: dict[str, Any] | None = None, seed: int = 0) -> str:
        run = RunDir(self.folder / name)
        run.write_text(run.config, dump_config(load_config(["--config", "quickstart", "--run.seed", str(seed)])))
        first = {"kind": "start", "step": 0, "job": job or {}}
        found = [{"kind": "digests", "step": number, **step} for number, step in enumerate(steps, 1)]
        run.write_text(run.metrics, "".join(json.dumps(each) + "\n" for each in (first, *found)))
        return str(run.path)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


PLACED = {"places": "aaaaaaaabbbbbbbbccccccccdddddddd", "positions": [7, 5, 9, 2]}
"""A batch of four images, by their digests and positions in the split."""


@pytest.mark.parametrize(
    ("places", "positions", "where", "cause"),
    [
        ("abdc", [7, 5, 2, 9], " at 2 of 4 indices, first at index 2: images 9 and 2 of the split", "another order of"),
        ("axcd", [7, 5, 9, 2], " at 1 of 4 indices, first at index 1: image 5 of the split in both", "another way to"),
        ("abcx", [7, 5, 9, 3], " at 1 of 4 indices, first at index 3: images 2 and 3 of the split", "other images: "),
        ("abcd", [7, 5, 9, 2], "", "other images, another order"),  # a digest of so few letters, and the same
        ("abc", [7, 5, 9], "", "other images, another order"),
    ],
)
def test_diff_names_the_first_place_of_the_batch_and_the_images_there(
    places: str, positions: list[int], where: str, cause: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"places": "".join(letter * 8 for letter in places), "positions": positions}
    assert main([made("a", step() | PLACED), made("b", step("q") | odd)]) == DIFFERENT
    found, why = capsys.readouterr().out.splitlines()
    assert found == f"step 1: the images of the global batch differ{where}"
    assert why.startswith(f"likely cause: {cause}")


def keep_values(run: str, *, rank: int, number: int = 2, **phases: dict[str, Any]) -> Path:
    folder = values_folder(RunDir(Path(run)).values, rank=rank)
    return save_checkpoint(folder, dict(phases), step=number, top1=None, keep=9)


def test_diff_names_elements_of_what_both_runs_kept_whole(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    odd = spread(layers={"conv": "ccxx", "fc": "ffxx"}, ranks=(0, 1, 2, 3))
    a, b = made("a", SPREAD, SPREAD), made("b", SPREAD, odd)
    ones = torch.ones(2, 2)
    up = torch.tensor([[1.0, 1.0], [1.0, ONE_UP]])
    # microbatches 2 and 3 are of rank 1 in the first run, of ranks 2 and 3 in the second; fc alone is kept
    keep_values(a, rank=1, activations={"fc": {2: [ones, ones], 3: [ones]}})
    keep_values(b, rank=2, activations={"fc": {2: [ones, up]}})
    assert main([a, b]) == DIFFERENT
    named = ("step 2: fc of microbatch 2: ", "1 of 4 elements", "[1, 1]: 1 and 1.00000012, 1 units")
    assert re.match(naming(*named), capsys.readouterr().out.splitlines()[-1])
    c = made("c", SPREAD, spread(layers=EQUAL, gradients="xg"))
    for run, value in ((a, ones), (c, up)):
        keep_values(run, rank=0, gradients={"a": {0: [value]}})
    assert main([a, c]) == DIFFERENT
    assert "step 2: gradient of a: 1 of 4 elements differ, first [1, 1]: 1 and 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [3, {"a": 3}, {"a": {0: 3}}, {"a": {0: [3]}}, {"a": [torch.ones(1)]}])
def test_diff_refuses_values_that_are_none(kept: Any, made: Made) -> None:
    a, b = made("a", step(), step()), made("b", step(), step(gradients="xg"))
    for run in (a, b):
        path = keep_values(run, rank=0, gradients=kept)
    with pytest.raises(CheckpointError, match="holds no values of"):
        main([a, b])
    (path / "state.pt").write_bytes(b"no")
    (RunDir(Path(a)).values / "rank-0" / path.name / "state.pt").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="truncated"):
        main([a, b])


def step(images: str = "p", gradients: str = "gg", state: str = "ss") -> dict[str, Any]:
    return {
        "images": images,
        "gradients": dict(zip("ab", gradients, strict=False)),
        "weights and state": dict(zip("ab", state, strict=False)),
    }


@pytest.mark.parametrize(
    ("odd", "lines"),
    [
        (step(images="q", gradients="xx"), ["step 2: the images of the global batch differ", "another order"]),
        (step(gradients="xg"), ["step 2: images are equal; 1 of 2 gradients differ, first that of a", "a bit"]),
        (step(gradients="xy"), ["step 2: images are equal; 2 of 2 gradients differ", "another kernel"]),
        (step(state="sx"), ["step 2: images, gradients are equal; 1 of 2 weights and state differ, first b", "a bit"]),
    ],
)
def test_diff_names_the_first_step_phase_and_tensor(
    odd: dict[str, Any], lines: list[str], made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = made("a", step(), step(), step()), made("b", step(), odd, step(images="z"))
    assert main([a, b]) == DIFFERENT
    where, cause, *_ = capsys.readouterr().out.splitlines()
    assert where.startswith(lines[0])
    assert lines[1] in cause


def spread(
    *, layers: dict[str, str], before: str = "gggg", ranks: tuple[int, ...] = (0, 0, 1, 1), **rest: str
) -> dict[str, Any]:
    """A step of four microbatches with a letter for each."""
    return {
        **step(**rest),
        "ranks": list(ranks),
        "activations": {name: list(letters) for name, letters in layers.items()},
        "gradients before the sum": {"b": list(before), "a": list("gggg")},
    }


EQUAL = {"conv": "cccc", "fc": "ffff"}
SPREAD = spread(layers=EQUAL)


@pytest.mark.parametrize(
    ("odd", "where", "cause"),
    [
        (
            spread(layers={"conv": "cccc", "fc": "fxxx"}, before="gggx"),
            ("1 of 2 activations", "that of fc;", "microbatches 1, 2, 3 ", "ranks 0, 1"),
            "another kernel",
        ),
        (
            spread(layers=EQUAL, before="ggxg", gradients="xx"),
            ("1 of 2 gradients before the sum", "that of b;", "microbatch 2 ", "by rank 1"),
            "a bit that flipped",
        ),
        (
            spread(layers={"conv": "xxxx", "fc": "xxxx"}, ranks=(0, 0, 0, 0)),
            ("2 of 2 activations", "that of conv;", "all 4 microbatches"),
            "another kernel",
        ),
        (
            spread(layers={"conv": "cxcc", "fc": "fxff"}, ranks=(0, 1, 2, 3)),
            ("2 of 2 activations", "that of conv;", "microbatch 1 ", "rank 0 in the first run, rank 1 in the second"),
            "another kernel",
        ),
        (spread(layers=EQUAL, gradients="xx"), ("2 of 2 gradients", "that of a"), "another order of the sums"),
    ],
)
def test_diff_names_layers_microbatches_and_ranks(
    odd: dict[str, Any], where: tuple[str, ...], cause: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([made("a", SPREAD, SPREAD), made("b", SPREAD, odd)]) == DIFFERENT
    found, why, advice = capsys.readouterr().out.splitlines()
    assert re.match(naming("step 2: ", *where), found)
    assert cause in why
    assert "--run.digest_values '[" in advice


def test_diff_says_what_only_one_run_recorded(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    a = made("a", SPREAD)
    for odd, line in (
        (step(), f"not compared: gradients before the sum, which only {a} recorded"),
        (SPREAD | {"activations": {}}, f"not compared: activations, which only {a} recorded"),
        (spread(layers={"fc": "ffff"}), f"not compared: activations of conv, which only {a} recorded"),
        (SPREAD | {"gradients": {}}, f"not compared: gradients, which only {a} recorded"),
    ):
        assert main([a, made("b", odd)]) == 0
        *lines, end = capsys.readouterr().out.splitlines()
        assert line in lines
        assert end == "the 1 step that both recorded is equal, the last is 1"
    half = {"activations": {}, "gradients before the sum": {"a": ["x", "x"]}, "ranks": [0, 0]}
    assert main([a, made("c", step() | half)]) == 0
    expected = f"not compared: gradients before the sum, because a step has 4 microbatches in {a}, 2 in {a[:-1]}c"
    assert expected in capsys.readouterr().out.splitlines()


def test_diff_takes_other_weights_into_account_where_no_step_before_is_recorded(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([made("a", SPREAD), made("b", spread(layers={"conv": "xxxx", "fc": "xxxx"}))]) == DIFFERENT
    assert "or other weights to begin with" in capsys.readouterr().out


def test_diff_tells_config_and_job(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    a = made("a", step(), job={"threads": 1, "torch": "2.14"})
    b = made("b", step(gradients="xy"), job={"threads": 2, "torch": "2.14"}, seed=7)
    assert main([a, b]) == DIFFERENT
    config, job, _, cause, _ = capsys.readouterr().out.splitlines()
    assert config == "config: run.seed=7 (was 0)"
    assert job == f"job: threads is 1 in {a}, 2 in {b}"
    assert cause.endswith("run.seed, threads")


def test_diff_goes_by_checkpoints_alone_where_no_digests_are(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [made(name) for name in "ab"]
    for path, value in zip(paths, (1.0, ONE_UP), strict=True):
        for number in (3, 5):
            state = {"step": number, "model": {"w": torch.tensor([[value if number == 5 else 1.0]])}}
            save_checkpoint(RunDir(Path(path)).checkpoints, state, step=number, top1=None, keep=9)
    assert main(paths) == DIFFERENT
    assert capsys.readouterr().out.startswith(
        "checkpoint of step 5: model.w: 1 of 1 elements differ, first [0, 0]: 1 and"
    )


def test_diff_of_elements_tells_close_numbers_apart() -> None:
    for dtype, text in ((torch.float16, "1 and 1.001"), (torch.bfloat16, "1 and 1.008")):
        up = torch.nextafter(torch.ones((), dtype=dtype), torch.full((), 2.0, dtype=dtype))
        assert describe_difference(torch.ones((), dtype=dtype), up).endswith(f"{text}, 1 units in the last place apart")
    big = torch.tensor(2**60)
    assert "1152921504606846976 and 1152921504606846977" in describe_difference(big, big + 1)


def test_diff_of_checkpoints_sees_numbers_and_what_only_one_has(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    states = {
        "a": {"model": {"w": torch.ones(2)}, "sums": {"ranks": "1"}, "precision": {"scale": 1.0}},
        "b": {"model": {"w": torch.ones(2)}, "sums": {"ranks": "4"}, "precision": {"scale": 2.0}},
        "c": {"model": {"w": torch.ones(2), "v": torch.ones(2)}, "precision": {"scale": 1.0}},
    }
    paths = {name: made(name) for name in states}
    for name, state in states.items():
        save_checkpoint(RunDir(Path(paths[name])).checkpoints, {"step": 3, **state}, step=3, top1=None, keep=9)
    assert main([paths["a"], paths["a"]]) == 0
    assert capsys.readouterr().out == "the 1 checkpoint(s) of the same steps are equal, the last is of step 3\n"
    assert main([paths["a"], paths["b"]]) == DIFFERENT
    assert capsys.readouterr().out == "checkpoint of step 3: precision.scale: 1.0 and 2.0\n"
    for one, other in (("a", "c"), ("c", "a")):
        with pytest.raises(RunFolderError, match=naming("only one has model.v")):
            main([paths[one], paths[other]])


def test_diff_of_equal_weights_ignores_how_often_each_run_evaluated(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {"a": ([{"step": 1, "top1": 0.5}], {"train/7": "cut off"}), "b": ([], {})}
    for name, (evaluations, skipped) in records.items():
        state = {"step": 3, "model": {"w": torch.ones(2)}, "evaluations": evaluations, "skipped": skipped}
        save_checkpoint(RunDir(Path(made(name))).checkpoints, state, step=3, top1=None, keep=9)
    assert main([str(made.folder / name) for name in records]) == 0
    assert capsys.readouterr().out == "the 1 checkpoint(s) of the same steps are equal, the last is of step 3\n"


def test_diff_of_hostile_folders_obeys_nothing_in_them(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;owned\x07"
    odd = {"images": "p", "gradients": {name: "1"}, "weights and state": {}}
    a, b = made("a", odd), made("b", odd | {"gradients": {name: "2"}})
    assert main([a, b]) == DIFFERENT
    assert "\x1b" not in capsys.readouterr().out
    for content in (b"\xff\xfe", b"a: [", b"- a", b"run: 3"):
        RunDir(Path(b)).config.write_bytes(content)
        with pytest.raises(RunFolderError, match=r"config\.yaml|no run"):
            main([a, b])


def test_diff_refuses_what_cannot_be_compared(made: Made, tmp_path: Path) -> None:
    a = made("a", step())
    with pytest.raises(RunFolderError, match=naming("nowhere", "run folder")):
        main([a, str(tmp_path / "nowhere")])
    with pytest.raises(RunFolderError, match=naming("run.digest_every_steps")):
        main([a, made("none")])
    with pytest.raises(RunFolderError, match=naming("other models", "only one has b")):
        main([a, made("c", step(gradients="g"))])
    for odd in (
        {"images": 1, "gradients": "no", "weights and state": None},
        SPREAD | {"ranks": 4},
        SPREAD | {"ranks": ["0"] * 4},
        SPREAD | {"activations": ["c"]},
        SPREAD | {"activations": {"conv": "cccc"}, "ranks": [0]},
        SPREAD | {"activations": {"conv": ["c"]}},
        SPREAD | {"ranks": [10**30] * 4},
        SPREAD | PLACED | {"positions": ["7"] * 4},
        SPREAD | PLACED | {"positions": [7]},
        SPREAD | PLACED | {"places": ["a"] * 32},
    ):
        with pytest.raises(RunFolderError, match=naming("run.digest_every_steps")):
            main([a, made("d", odd)])
    other = spread(layers={"other": "xxxx"}, gradients="g")
    with pytest.raises(RunFolderError, match=naming("other models", "only one has b")):
        main([a, made("e", other)])
