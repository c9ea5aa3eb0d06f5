"""A list of images is read as folders are, and names nothing outside of its folder."""

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest
from error_texts import naming
from sample_images import encoded, smooth_image, write

from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.config.dotted import names_list
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.datasets.check import check_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input import listed as listed_images
from bigbatch.trainer.input.data_root import DataRoot, open_split
from bigbatch.trainer.input.listed import keep_list, write_list

SPLITS = {"train": {"b": ["x/3.jpg"], "a": ["2.jpg", "1.jpg"]}, "val": {"b": [], "a": ["x/4.jpg"]}}


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A list beside the folder of its images."""
    names = [path for by_class in SPLITS.values() for paths in by_class.values() for path in paths]
    write(tmp_path / "images", {name: encoded(smooth_image(i, 40, 30)) for i, name in enumerate(names)})
    write_list(tmp_path / "mine.json", tmp_path / "images", SPLITS, seed=3)
    return tmp_path / "mine.json"


def test_listed_images_are_sorted_by_class_and_name(listed: Path) -> None:
    train, val = open_split(listed, "train"), open_split(listed, "val", classes=("a", "b"))
    folder = listed.parent / "images"
    assert [train.name(i) for i in range(len(train))] == [f"{folder}/{name}" for name in ("1.jpg", "2.jpg", "x/3.jpg")]
    assert (train.classes, train.labels_N.tolist()) == (("a", "b"), [0, 0, 1])
    # classes are those of both splits: a class of one image has none to validate with
    assert (val.classes, val.labels_N.tolist()) == (("a", "b"), [0])
    assert DataRoot(listed).classes("train") == ("a", "b")
    assert train.read(2) == (folder / "x/3.jpg").read_bytes()
    assert json.loads(listed.read_text())["made"] == {"seed": 3}


def test_listed_images_and_list_move_together(tmp_path: Path, listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_list(Path("mine.json"), Path("images"), SPLITS)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("mine.json", "images"):
        (tmp_path / name).rename(moved / name)
    monkeypatch.chdir("/")
    assert open_split(moved / "mine.json", "train").read(0)


def compare(argv: list[str]) -> None:
    """Load the experiment as a command that reads images."""
    require_own_list(load_config(argv), argv)


def test_listed_images_of_a_run_stay_its_own(tmp_path: Path, listed: Path) -> None:
    """A list with a training and a validation image exchanged never replaces that of a run."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / "config.yaml").write_text(f"data: {{root: {listed}}}\n")
    keep_list(DataConfig(root=str(listed)), run, is_resumed=False)
    copy = run / "images.json"
    record = copy.read_bytes()
    assert load_config(["--config", str(run)]).data.root == str(listed)
    write_list(
        listed,
        tmp_path / "images",
        {"train": {"b": ["x/3.jpg"], "a": ["2.jpg", "x/4.jpg"]}, "val": {"a": ["1.jpg"], "b": []}},
    )
    with pytest.raises(DataError, match=naming(listed, f"--data.root {copy}", "another run.directory")):
        compare(["--config", str(run)])
    with mock.patch.object(listed_images, "read_plain", side_effect=AssertionError("read by each rank of a training")):
        assert load_config(["--config", str(run)]).data.root == str(listed)
    for root in (listed, copy):
        assert load_config(["--config", str(run), f"--data.root={root}"]).data.root == str(root)
    for data, option in ((DataConfig(root=str(listed)), "root"), (DataConfig(root="x", list=str(listed)), "list")):
        with pytest.raises(DataError, match=naming(listed, f"--data.{option} {copy}", "another run.directory")):
            keep_list(data, run, is_resumed=True)
    assert copy.read_bytes() == record
    keep_list(DataConfig(root=str(copy)), run, is_resumed=True)
    assert copy.read_bytes() == record
    keep_list(DataConfig(root=str(listed)), run, is_resumed=False)  # a run from step 0
    assert copy.read_bytes() != record
    copy.unlink()
    with pytest.raises(DataError, match=naming(copy, "missing", "restore it", "--run.resume")):
        keep_list(DataConfig(root=str(listed)), run, is_resumed=True, was_listed=True)
    with pytest.raises(DataError, match=naming(copy, "missing", "restore it", "--data.root")):
        compare(["--config", str(run)])  # the original may list other images now
    for words in (["--data.root", str(listed)], ["--data.loader", "synthetic"], ["--run.directory", "another"]):
        compare(["--config", str(run), *words])
    (run / "config.yaml").write_text(f"data: {{root: x, list: {listed}}}\n")
    with pytest.raises(DataError, match=naming(copy, "missing", "--data.list")):
        compare(["--config", str(run), "--data.root", "y"])
    compare(["--config", str(run), "--data.list", str(listed)])
    (run / "config.yaml").write_text(f"data: {{root: {listed}}}\n")
    assert load_config(["--config", str(run)]).data.root == str(listed)


def test_run_that_went_on_with_a_folder_no_longer_reads_its_list(tmp_path: Path, listed: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "images.json").write_bytes(listed.read_bytes())
    (tmp_path / "config.yaml").write_text("data: {root: other}\n")
    assert load_config(["--config", str(tmp_path)]).data.root == "other"
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/train-0.tar").touch()
    assert load_config(["--config", str(tmp_path), f"--data.root={tmp_path}/shards"]).data.list is None


def test_a_list_is_told_from_addresses_and_classes_and_stands_beside_none() -> None:
    roots = ("pets.json", "runs/a/images.json", "data/pets", "class:mine.Images:ann.json", "s3://bucket/a.json")
    assert [names_list(root) for root in roots] == [True, True, False, False, False]
    for root in ("class:mine.Images", "s3://bucket/a"):
        with pytest.raises(ConfigError, match=naming("data.list=a.json", f"data.root={root}", "null")):
            DataRoot(root, listed="a.json")


def test_listed_images_are_checked_and_packed(tmp_path: Path, listed: Path) -> None:
    report = check_dataset(listed)
    assert report.problems == ()
    assert {split: facts.num_images for split, facts in report.splits.items()} == {"train": 3, "val": 1}
    pack(listed, tmp_path / "packed", recipe=PackRecipe(10**6, None, 90))
    for split in SPLITS:
        packed, source = open_split(tmp_path / "packed", split), open_split(listed, split)
        assert packed.labels_N.tolist() == source.labels_N.tolist()
        assert [packed.read(i) for i in range(len(packed))] == [source.read(i) for i in range(len(source))]


@pytest.mark.parametrize("wrong", ["/etc/passwd", "x/../../secret.jpg", "a\0.jpg", "a/\udfff1.jpg", "", None], ids=repr)
def test_listed_path_that_leads_out_is_refused(listed: Path, wrong: object) -> None:
    content = json.loads(listed.read_text())
    content["val"]["a"].append(wrong)
    listed.write_text(json.dumps(content))
    for read in (lambda: open_split(listed, "train"), lambda: DataRoot(listed).classes("train")):
        with pytest.raises(DataError, match=naming(listed, repr(wrong), "--force")):
            read()


@pytest.mark.parametrize(
    "path", ["a/..", "../a", "..", "a/./../b", "a//..//b", "..a/b", "a../b", "a/...", "./a", "a..b"]
)
def test_listed_path_leads_out_if_a_part_of_it_is_two_dots(path: str) -> None:
    assert listed_images._leads_out(path) == (".." in PurePosixPath(path).parts)
    assert not hasattr(listed_images, "PurePosixPath"), "6 microseconds for each of a million paths"


def test_listed_class_with_two_spellings_is_refused(listed: Path) -> None:
    content = json.loads(listed.read_text())
    content["val"]["A"] = content["val"].pop("b")
    content["train"]["01"] = content["train"]["1"] = []
    listed.write_text(json.dumps(content))
    with pytest.raises(DataError, match=naming(listed, "'01' and '1'", "rename one")):
        open_split(listed, "train")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"version": True}, "version True"),
        ({"train": {"a": "1.jpg"}}, "not a list"),
        ({"train": ["1.jpg"]}, "not a list"),
        ({"folder": 3}, "not a list"),
        ({"folder": "gone"}, "gone"),
        ({"val": {"a": []}}, "no image for val"),
    ],
)
def test_listed_wrongly_says_how(listed: Path, change: dict[str, Any], says: str) -> None:
    listed.write_text(json.dumps(json.loads(listed.read_text()) | change))
    with pytest.raises(DataError, match=naming(listed, says)):
        open_split(listed, "val")


@pytest.mark.parametrize("text", ["", "[]", "{}", "\xff", pytest.param("[" * 200_000, id="deep")])
def test_listed_nothing_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=naming("mine.json", "not a list of images")):
        open_split(tmp_path / "mine.json", "train")


def test_listed_class_that_is_there_twice_is_refused(listed: Path) -> None:
    """JSON's reader would keep the last, and lose the images of the first."""
    listed.write_text(listed.read_text().replace('"b": [', '"a": ['))
    with pytest.raises(DataError, match=naming(listed, "'a'", "2 times")):
        open_split(listed, "train")


def test_listed_name_of_bytes_that_are_no_text_is_read(listed: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    (listed.parent / "images/1.jpg").rename(listed.parent / "images" / name)
    listed.write_text(json.dumps(json.loads(listed.read_text()) | {"train": {"a": [name], "b": []}}))
    assert open_split(listed, "train").read(0)


def test_listed_other_classes_and_an_unreadable_list(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=naming(listed, "c")):
        open_split(listed, "val", classes=("a", "b", "c"))

    def refuse(path: Path, *, most: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listed_images, "read_plain", refuse)
    with pytest.raises(DataError, match=naming(listed, "Permission denied")):
        open_split(listed, "val")
