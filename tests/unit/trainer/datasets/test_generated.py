"""The embedded data set: a pure function of its parameters, whole or absent, beyond a linear classifier."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from error_texts import naming
from PIL import Image

from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.datasets import generated
from bigbatch.trainer.datasets.generated import CLASSES, MANIFEST, render, write_dataset
from bigbatch.trainer.datasets.subcommands import main as data_main

SMALL = {"seed": 3, "train_per_class": 4, "val_per_class": 2, "side_pixels": (40, 56)}


@pytest.fixture(scope="module")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generated") / "nested" / "set"
    assert write_dataset(root, **SMALL)
    return root


def _bytes_by_name(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_generated_number_of_workers_and_chunking_do_not_change_a_byte(small_set, tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "CHUNK_IMAGES", 3)
    assert write_dataset(tmp_path / "set", **SMALL, num_workers=2)
    assert _bytes_by_name(tmp_path / "set") == _bytes_by_name(small_set)


def test_generated_layout_is_imagenets_with_sorted_class_folders(small_set):
    stated = json.loads((small_set / MANIFEST).read_text())
    assert {key: stated[key] for key in SMALL} == {**SMALL, "side_pixels": [40, 56]}
    assert stated["version"] == generated.DATASET_VERSION
    assert stated["classes"] == list(CLASSES)
    assert len(CLASSES) == 10
    for split, per_class in (("train", 4), ("val", 2)):
        assert sorted(os.listdir(small_set / split)) == list(CLASSES)
        assert {len(list((small_set / split / name).glob("*.JPEG"))) for name in CLASSES} == {per_class}
    assert sorted(os.listdir(small_set)) == [MANIFEST, "train", "val"]
    assert os.listdir(small_set.parent) == ["set"], "an unfinished folder was left behind"


def test_generated_images_decode_to_about_what_render_drew(small_set):
    for path in small_set.rglob("*.JPEG"):
        split, name, number = path.parts[-3], path.parts[-2], int(path.stem.split("_")[-1])
        drawn_HW3 = render(seed=3, split=split, label=CLASSES.index(name), number=number, side_pixels=(40, 56))
        with Image.open(path) as image:
            decoded_HW3 = np.asarray(image.convert("RGB"))
        assert decoded_HW3.shape == drawn_HW3.shape
        assert np.abs(decoded_HW3.astype(int) - drawn_HW3).mean() < 12  # JPEG blurs hue and noise


def test_generated_sizes_vary_within_their_bounds_and_reach_both():
    sides = [render(seed=0, split="train", label=0, number=n, side_pixels=(40, 43)).shape[:2] for n in range(40)]
    assert {side for shape in sides for side in shape} == {40, 41, 42, 43}
    assert len(set(sides)) > 8


def test_generated_no_two_images_are_equal_across_splits_labels_numbers_and_seeds():
    drawn = {
        render(seed=seed, split=split, label=label, number=number, side_pixels=(40, 40)).tobytes()
        for seed in (0, 1)
        for split in ("train", "val")
        for label in range(10)
        for number in range(5)
    }
    assert len(drawn) == 200


def test_generated_areas_of_the_shapes_have_their_closed_forms():
    u, v = np.meshgrid(np.linspace(-1.5, 1.5, 301), np.linspace(-1.5, 1.5, 301))
    rng = np.random.default_rng(0)
    area = {name: (generated.SHAPES[name](u, v, rng) < 0).mean() * 9 for name in CLASSES}
    assert area["disk"] == pytest.approx(np.pi, rel=0.01)
    assert area["square"] == pytest.approx(1.7**2, rel=0.02)
    assert area["triangle"] == pytest.approx(3 * np.sqrt(3) * 0.62**2, rel=0.02)  # from the inradius
    for name in ("stripes", "checkerboard", "spiral"):
        assert area[name] == pytest.approx(np.pi * 1.1**2 / 2, rel=0.15), "a texture covers half its patch"


def test_generated_progress_rises_to_the_total_and_a_second_call_changes_nothing(tmp_path):
    root, calls = tmp_path / "set", []
    root.mkdir()  # an empty folder is as good as none
    assert write_dataset(root, **SMALL, on_progress=lambda *call: calls.append(call))
    assert calls == [(done, 60) for done in (*range(4, 41, 4), *range(42, 61, 2))]
    times = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert not write_dataset(root, **SMALL, on_progress=lambda *_: pytest.fail("writes"))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == times


@pytest.mark.parametrize("change", [{"seed": 4}, {"train_per_class": 5}, {"side_pixels": (40, 57)}])
def test_generated_other_parameters_in_the_same_folder_are_refused(small_set, change):
    with pytest.raises(
        DataError, match=naming(small_set / MANIFEST, *(f"{key}={value}" for key, value in change.items()), "delete")
    ):
        write_dataset(small_set, **{**SMALL, **change})


def test_generated_missing_image_is_noticed(tmp_path):
    write_dataset(tmp_path / "set", **SMALL)
    next((tmp_path / "set" / "val").rglob("*.JPEG")).unlink()
    with pytest.raises(DataError, match=naming(tmp_path / "set/val", "19 of 20")):
        write_dataset(tmp_path / "set", **SMALL)


@pytest.mark.parametrize(("text", "reason"), [("{", "line 1 column 2"), ("\xff", "0xff")])
def test_generated_unreadable_manifest_is_refused(tmp_path, text, reason):
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=naming(tmp_path / MANIFEST, reason)):
        write_dataset(tmp_path, **SMALL)
    (tmp_path / MANIFEST).unlink()
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(DataError, match=naming(tmp_path / MANIFEST, "not a regular file")):
        write_dataset(tmp_path, **SMALL)


def test_generated_foreign_folder_and_plain_file_stay_untouched(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    for root in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(DataError, match=naming(root, "else")):
            write_dataset(root, **SMALL)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_generated_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def save(self, path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(DataError, match=naming(tmp_path / "set", os.strerror(errno.ENOSPC))):
        write_dataset(tmp_path / "set", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_generated_set_sweeps_up_after_runs_that_were_killed_but_not_after_one_that_writes(tmp_path):
    left = tmp_path / ".set.0123.unfinished"
    others = [tmp_path / ".other.0123.unfinished", tmp_path / ".set.yaml"]
    for folder in (left, *others):
        (folder / "train").mkdir(parents=True)
    with generated.removing_leftovers(tmp_path / "set"):
        assert write_dataset(tmp_path / "set", **SMALL)
        assert left.exists()
    assert not left.exists()
    left.mkdir()
    assert not write_dataset(tmp_path / "set", **SMALL)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "set", *others])


def test_generated_process_that_was_faster_wins(tmp_path, monkeypatch):
    root, whole = tmp_path / "set", generated._write_all

    def overtaken(folder, **kwargs):
        whole(folder, **kwargs)
        whole(root, **kwargs)

    monkeypatch.setattr(generated, "_write_all", overtaken)
    assert not write_dataset(root, **SMALL)
    assert list(tmp_path.iterdir()) == [root]


HUGE = [(key, number) for key in ("num_workers", "train_per_class", "val_per_class") for number in (10**9, 10**12)]


@pytest.mark.parametrize(("key", "value"), [("seed", -1), ("num_workers", 0), ("val_per_class", 0), *HUGE])
def test_generated_impossible_setting_is_named(tmp_path, key, value):
    with pytest.raises(ConfigError, match=naming(f"{key}={value}")):
        write_dataset(tmp_path / "set", **{**SMALL, key: value})
    assert list(tmp_path.iterdir()) == []


def _linear_accuracy(
    train_NP: np.ndarray, train_labels_N: np.ndarray, val_NP: np.ndarray, val_labels_N: np.ndarray
) -> float:
    """Best validation accuracy of multinomial logistic regression over weight decays and epochs."""
    mean_P, std_P = train_NP.mean(0), train_NP.std(0) + 1e-3
    train_NP, val_NP = (train_NP - mean_P) / std_P, (val_NP - mean_P) / std_P
    target_NK, best = np.eye(10, dtype=np.float32)[train_labels_N], 0.0
    for decay in (1e-3, 1e-1):
        weight_PK, order = np.zeros((train_NP.shape[1], 10), np.float32), np.random.default_rng(0)
        for epoch in range(10):
            for rows in np.array_split(order.permutation(len(train_NP)), len(train_NP) // 100):
                logits_NK = train_NP[rows] @ weight_PK
                odds_NK = np.exp(logits_NK - logits_NK.max(1, keepdims=True))
                error_NK = odds_NK / odds_NK.sum(1, keepdims=True) - target_NK[rows]
                gradient_PK = train_NP[rows].T @ error_NK / len(rows) + decay * weight_PK
                weight_PK -= 1e-3 * (1 - epoch / 10) * gradient_PK
            best = max(best, float(((val_NP @ weight_PK).argmax(1) == val_labels_N).mean()))
    return best


def _flat_pixels(split: str, numbers: range) -> tuple[np.ndarray, np.ndarray]:
    labels_N = np.repeat(np.arange(10), len(numbers))
    images = [
        Image.fromarray(render(seed=0, split=split, label=label, number=number)).resize((32, 32))
        for label in range(10)
        for number in numbers
    ]
    return np.stack([np.asarray(p, dtype=np.float32).ravel() for p in images]), labels_N


@pytest.mark.long
def test_generated_linear_classifier_on_pixels_fails_here_and_succeeds_on_an_easy_set():
    train_NP, train_labels_N = _flat_pixels("train", range(100))
    val_NP, val_labels_N = _flat_pixels("val", range(50))
    accuracy = _linear_accuracy(train_NP, train_labels_N, val_NP, val_labels_N)
    assert 0.12 < accuracy < 0.5  # 0.1 is chance

    # the control: the same images, each class tinted at one place of its own
    for pixels_NP, labels_N in ((train_NP, train_labels_N), (val_NP, val_labels_N)):
        for label in range(10):
            pixels_NP[labels_N == label, label * 300 : label * 300 + 150] += 120
    assert _linear_accuracy(train_NP, train_labels_N, val_NP, val_labels_N) > 0.9


def test_generate_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    calls = []
    monkeypatch.setattr(generated, "write_dataset", lambda root, **kw: calls.append((root, kw["seed"])) or True)
    assert data_main(["generate", str(tmp_path / "d"), "--seed", "4"]) == 0
    assert calls == [(tmp_path / "d", 4)]
    assert "written" in capsys.readouterr().out
