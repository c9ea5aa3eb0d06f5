"""`bigbatch diff` finds where two runs part, of runs whose difference is known."""

from pathlib import Path

import pytest

from bigbatch.tools.replay.diff import main
from tests.laws.jobs import Forked, alone, copy_of, forked, records, run, train_command

RECORDED: dict[str, object] = {
    "run.digest_every_steps": 1,
    "run.digest_layers": '["layer3.*", linear]',
    "run.checkpoint_every_steps": 1,
    "run.keep_checkpoints": 100,
    "run.compare_every_steps": 0,
    "run.epochs": 1,
}
"""Five steps of 32 images."""


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff") / "base"
    run(alone(train_command(data, folder, RECORDED)))
    return folder


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *, code: int) -> list[str]:
    capsys.readouterr()
    assert main([str(a), str(b)]) == code
    return capsys.readouterr().out.splitlines()


def test_diff_of_equal_runs_is_none_and_of_another_order_begins_with_the_images(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(base, base, capsys, code=0) == [
        "the 5 steps that both recorded are equal, the last is 5",
        "the 5 checkpoint(s) of the same steps are equal, the last is of step 5",
    ]
    # the same weights to begin with, so that images alone can differ
    weights = {"model.weights": base / "checkpoints" / "step-00000003"}
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, seed in ((one, 0), (other, 1)):
        run(alone(train_command(data, folder, {**RECORDED, **weights, "run.seed": seed})))
    lines = diff(one, other, capsys, code=5)
    assert lines[0] == "config: run.seed=1 (was 0)"
    assert lines[1].startswith("step 1: the images of the global batch differ at 32 of 32 indices, first at index 0: ")
    assert "another order" in lines[2]
    assert "run.seed" in lines[2]
    assert "checkpoint of step 1: model." in lines[3]


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({}, "job: world_size is 1 in "),
        # a batch norm over 16 images instead of 8 leaves these alone, and changes the first gradient
        pytest.param({"batch.bn_span": 16, "batch.microbatch_size": 16}, "config: batch.bn_span=16 (was 8)"),
    ],
)
def test_diff_finds_the_images_equal_however_the_batch_lies(
    settings: dict[str, object], fact: str, base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train_command(data, tmp_path, {**RECORDED, **settings})
    run(alone(command) if settings else forked(command, ranks=2))
    capsys.readouterr()
    main([str(base), str(tmp_path)])  # sums are rounded in another order, which may come to the same bits
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(fact) for line in lines), lines
    (where,) = [line for line in lines if line.startswith(("step ", "the 5 steps "))]
    assert "the images of the global batch differ" not in where
    for one, other in zip(records(base, "digests"), records(tmp_path, "digests"), strict=True):
        assert (one["places"], one["positions"]) == (other["places"], other["positions"])
    if "batch.bn_span" in settings:
        assert where.startswith("step 1: images are equal; ")
        assert " gradients differ, first that of " in where


def test_diff_finds_the_step_after_a_bit_flipped(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On rank 1 after step 3: of what all make of their images in step 4, that rank's alone is another."""
    recorded = RECORDED | {"run.digest_values": '["layer3.*", linear.weight]'}
    command = train_command(data, tmp_path / "healthy", recorded)
    run(forked(command, ranks=2))
    faulty = ("3", "1", *train_command(data, tmp_path / "faulty", recorded))
    run(Forked(faulty, ranks=2, target="tests.laws.ranks_flip:main"))
    lines = diff(tmp_path / "healthy", tmp_path / "faulty", capsys, code=5)
    assert lines[0].startswith("step 4: images are equal; ")
    assert lines[0].endswith("; in microbatches 2, 3 (of 0 to 3), computed by rank 1")
    assert lines[1].startswith("likely cause: rank 1 computes other values from the same images: a bit")
    assert lines[2].startswith("step 4: layer3.")
    assert " of microbatch 2: " in lines[2]
    assert lines[3].startswith("checkpoint of step 4: model.")
    for line in lines[2:]:
        assert "units in the last place apart" in line


def test_diff_names_the_place_of_one_image_and_the_element_of_its_activation(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files of one class change names: steps differ from the first on that has one of the two."""
    swapped = copy_of(data, tmp_path)
    folder = min((swapped / "train").iterdir())
    one, other, *_ = sorted(folder.iterdir())
    one.rename(aside := folder / "aside")
    other.rename(one)
    aside.rename(other)
    recorded = RECORDED | {"run.digest_values": "[linear]", "run.digest_layers": "[linear]"}
    for name, root in (("one", data), ("other", swapped)):
        run(alone(train_command(root, tmp_path / name, recorded)))
    first = next(
        record["step"]
        for record in records(tmp_path / "one", "digests")
        if {0, 1} & set(record["positions"])  # classes come by name, and so do their files
    )
    lines = diff(tmp_path / "one", tmp_path / "other", capsys, code=5)
    where = lines[1]
    assert where.startswith(f"step {first}: the images of the global batch differ at ")
    assert where.endswith(("image 0 of the split in both", "image 1 of the split in both"))
    assert lines[2].startswith("likely cause: another way to decode, crop or change the same images, or other files")


@pytest.mark.long
def test_diff_finds_single_microbatches_equal_on_other_ranks(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        run(forked(train_command(data, folder, {**RECORDED, "run.reproducible": "true"}), ranks=ranks))
        first = next(r for r in records(folder, "digests") if r["step"] == 1)
        assert first["ranks"] == ([0] * 4 if ranks == 1 else [0, 0, 1, 2])
        words = [*first["activations"].values(), *first["gradients before the sum"].values()]
        assert all(len(set(four)) == 4 for four in words), "each microbatch has images of its own"
    assert "the 5 steps that both recorded are equal, the last is 5" in diff(
        tmp_path / "1", tmp_path / "3", capsys, code=0
    )
