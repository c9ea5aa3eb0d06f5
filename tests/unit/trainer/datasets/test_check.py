"""`bigbatch data check` sees what is wrong with a data set, and judges an image as the loaders do."""

import csv
import errno
import io
import json
import os
import re
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import sample_images
from error_texts import naming
from image_loaders import COMMON_SETTINGS, made_loaders
from PIL import Image
from rich.console import Console
from sample_images import REAL_DATA, encoded, exif, png_of, with_bad_tables, write

from bigbatch.cli import main
from bigbatch.errors import DataError
from bigbatch.trainer.augment.crops import center_crop
from bigbatch.trainer.datasets.check import CheckReport, Spread, check_dataset, imagenet_finding, list_folder
from bigbatch.trainer.datasets.check_image import TRAITS, examine
from bigbatch.trainer.datasets.check_report import finding_lines, print_report, write_json
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input.formats import open_image
from bigbatch.trainer.input.order import eval_requests, read_index


def image(seed, width=60, height=40):
    return sample_images.smooth_image(seed, width, height)


def png(width, height, pixels, *, depth):
    """An RGB PNG written by hand; Pillow writes none of 16 bits."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return png_of((b"IHDR", header), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))


def deep_png():
    values = np.random.default_rng(0).integers(0, 65536, (3, 4, 3), dtype=np.uint16)
    return values, png(4, 3, b"".join(b"\0" + row.astype(">u2").tobytes() for row in values), depth=16)


def damaged_png(data):
    middle = len(data) // 2
    return data[:middle] + bytes(50) + data[middle + 50 :]


def damaged_webp(data):
    return data[:25] + b"\xff" * 60 + data[85:]


def good_files():
    """Three classes; 2 + 3 + 4 images in train, one each in val; all different."""
    names = [f"train/{'abc'[label]}/{number}.JPEG" for label in range(3) for number in range(label + 2)]
    names += [f"val/{name}/0.JPEG" for name in "abc"]
    return {name: encoded(image(seed)) for seed, name in enumerate(names)}


def summary(findings):
    return [(finding.where, finding.kind, len(finding.cases)) for finding in findings]


def test_check_a_good_data_set(tmp_path, capsys):
    files = good_files() | {"train/a/0.JPEG": encoded(image(90, 300, 200)), "val/a/0.JPEG": encoded(image(91, 9, 8))}
    report = check_dataset(write(tmp_path, files))
    train, val = report.splits["train"], report.splits["val"]
    assert report.problems == report.remarks == ()
    assert (train.num_images, val.num_images) == (9, 3)
    assert (train.num_classes, val.num_classes) == (3, 3)
    assert (train.per_class, val.per_class) == (Spread(2, 3.0, 4), Spread(1, 1.0, 1))
    assert train.num_bytes == sum(len(data) for name, data in files.items() if name.startswith("train"))
    assert (train.short_side_pixels, train.long_side_pixels) == (Spread(40, 40.0, 200), Spread(60, 60.0, 300))
    assert (val.short_side_pixels, val.long_side_pixels) == (Spread(8, 40.0, 40), Spread(9, 60.0, 60))
    assert train.forms == {"JPEG RGB": 9}
    assert main(["data", "check", str(tmp_path), "--workers", "1"]) == 0
    assert "fit for training; 12 images decoded in " in capsys.readouterr().out.splitlines()[-1]


SEVERAL = {"save_all": True, "append_images": [image(1)]}
TRAITED = {  # (file name, content, its traits)
    "plain": ("0.JPEG", encoded(image(0)), []),
    "plain png": ("0.png", encoded(image(0), "PNG"), []),
    "progressive": ("0.jpg", encoded(image(0), progressive=True), ["progressive JPEG"]),
    "grey": ("0.jpg", encoded(image(0).convert("L")), ["grayscale"]),
    "cmyk": ("0.jpg", encoded(image(0).convert("CMYK")), ["CMYK"]),
    "png as jpeg": ("0.JPEG", encoded(image(0), "PNG"), ["named as another format"]),
    "jpeg as png": ("0.PNG", encoded(image(0)), ["named as another format"]),
    "rotated": ("0.jpg", encoded(image(0), exif=exif(6)), ["EXIF rotation"]),
    "upright": ("0.jpg", encoded(image(0), exif=exif(1)), []),
    "orientation 0": ("0.jpg", encoded(image(0), exif=exif(0)), []),
    "bad exif": ("0.jpg", encoded(image(0), exif=b"Exif\0\0nonsense"), []),
    "16 bit": ("0.png", deep_png()[1], ["16 bit"]),
    "palette": ("0.png", encoded(image(0).convert("P"), "PNG"), ["palette"]),
    "alpha": ("0.png", encoded(image(0).convert("RGBA"), "PNG"), ["transparency"]),
    "grey alpha": ("0.png", encoded(image(0).convert("LA"), "PNG"), ["grayscale", "transparency"]),
    "key colour": ("0.png", encoded(image(0), "PNG", transparency=(1, 2, 3)), ["transparency"]),
    "webp": ("0.webp", encoded(image(0), "WEBP"), []),
    "webp as jpeg": ("0.jpeg", encoded(image(0), "WEBP"), ["named as another format"]),
    "webp alpha": ("0.webp", encoded(image(0).convert("RGBA"), "WEBP"), []),
    "animated": ("0.webp", encoded(image(0), "WEBP", **SEVERAL), ["several images in one file"]),
    "several": ("0.jpg", encoded(image(0), "MPO", **SEVERAL), ["several images in one file"]),
}


@pytest.mark.parametrize("decode", [True, False])
def test_check_traits_are_remarks(tmp_path, decode):
    files = {f"train/a/{kind}/{name}": data for kind, (name, data, _) in TRAITED.items()}
    write(tmp_path, {**files, "val/a/0.jpg": encoded(image(7))})
    report = check_dataset(tmp_path, decode=decode)
    assert report.problems == ()
    found = {finding.kind: finding for finding in report.remarks if finding.kind in TRAITS}
    assert found.keys() == TRAITS.keys(), "every trait has a case"
    for trait, finding in found.items():
        cases = [f"{tmp_path}/train/a/{kind}/{name}" for kind, (name, _, traits) in TRAITED.items() if trait in traits]
        assert finding.cases == tuple(sorted(cases))
        assert (finding.where, finding.meaning) == ("train", TRAITS[trait])
    assert sum(report.splits["train"].forms.values()) == len(TRAITED)


def test_check_16_bits_become_the_upper_8():
    values, data = deep_png()
    np.testing.assert_array_equal(np.asarray(open_image(data, path="deep").convert("RGB")), values >> 8)


BAD = {  # (content, kind, without decoding too)
    "empty": (b"", "empty file", True),
    "html": (b"\n <!doctype html><title>404</title>", "HTML or XML instead of an image", True),
    "text": (b"no image", "neither JPEG, PNG nor WebP", True),
    "gif": (encoded(image(0), "GIF"), "neither JPEG, PNG nor WebP", True),
    "cut off": (encoded(image(0))[:-200], "cut off image", True),
    "cut off png": (encoded(image(0), "PNG")[:-100], "cut off image", True),
    "PNG without its end": (encoded(image(0), "PNG")[:-12], "cut off image", True),
    "PNG without its last sum": (encoded(image(0), "PNG")[:-16], "cut off image", True),
    "PNG with a bad IEND": (encoded(image(0), "PNG")[:-1] + b"?", "cut off image", True),
    "bad tables": (with_bad_tables(encoded(image(0))), "damaged image", False),
    "PNG damaged inside": (damaged_png(encoded(image(0), "PNG")), "damaged image", False),
    "16 bit grey": (encoded(Image.new("I;16", (5, 5)), "PNG"), "unsupported image", True),
    "cut off webp": (encoded(image(0), "WEBP")[:-10], "cut off image", True),
    "webp header": (encoded(image(0), "WEBP")[:16], "cut off image", True),
    "damaged webp": (damaged_webp(encoded(image(0), "WEBP", lossless=True)), "damaged image", False),
    "only a header": (encoded(image(0))[:30], "cut off image", True),
    "far too large": (png(20_000, 20_000, b"", depth=8), "unsupported image", True),
}


def paths_of(problems):
    """Kind of problem -> paths, each with its reason in one line."""
    assert all("\n" not in case for problem in problems for case in problem.cases)
    return {problem.kind: {case.partition(": ")[0] for case in problem.cases} for problem in problems}


@pytest.mark.parametrize("decode", [True, False])
def test_check_a_bad_image_is_a_problem_and_does_not_end_the_check(tmp_path, decode):
    names = {kind: f"train/b/{kind}.JPEG" for kind in BAD}
    write(tmp_path, good_files() | {names[kind]: data for kind, (data, _, _) in BAD.items()})
    report = check_dataset(tmp_path, decode=decode)
    expected = {}
    for kind, (_, problem, is_seen_undecoded) in BAD.items():
        if decode or is_seen_undecoded:
            expected.setdefault(problem, set()).add(f"{tmp_path}/{names[kind]}")
    assert paths_of(report.problems) == expected
    assert report.splits["train"].num_images == 9 + len(BAD)
    assert sum(report.splits["train"].forms.values()) == 9 + len(BAD) - sum(map(len, expected.values()))


@pytest.mark.parametrize("name", ["torchvision", "dali"])
def test_check_the_judgement_is_that_of_the_loaders(tmp_path, name):
    images = {kind: data for kind, (data, _, _) in BAD.items()} | {kind: data for kind, (_, data, _) in TRAITED.items()}
    files = {f"train/a/{kind}.jpg": data for kind, data in images.items()}
    index = read_index(write(tmp_path, files | {"val/a/0.jpg": encoded(image(7))}), "train")
    requests = eval_requests(num_samples=len(index), microbatch_size=1, rank=0, world_size=1)
    with made_loaders(name, COMMON_SETTINGS | {"crop": center_crop(), "image_size": 32, "microbatch_size": 1}) as make:
        loader = make(index, max_skipped=len(BAD))
        refused = {index.name(bad.position) for batch in loader.load(requests) for bad in batch.replaced}
    problems = paths_of(check_dataset(tmp_path).problems)
    assert refused == set().union(*problems.values()) == {f"{tmp_path}/train/a/{kind}.jpg" for kind in BAD}


def test_check_files_that_cannot_be_read(tmp_path):
    write(tmp_path, good_files())
    (tmp_path / "train/a/folder.jpg").mkdir()
    (tmp_path / "val/c/gone.jpg").symlink_to(tmp_path / "nowhere")
    report = check_dataset(tmp_path)
    assert summary(report.problems) == [("train", "unreadable file", 1), ("val", "unreadable file", 1)]
    assert re.search(naming("train/a/folder.jpg", os.strerror(errno.EISDIR), "replace"), report.problems[0].cases[0])
    assert re.search(naming("val/c/gone.jpg", os.strerror(errno.ENOENT)), report.problems[1].cases[0])


def test_check_the_same_image_twice(tmp_path):
    files = good_files()
    files["val/b/0.JPEG"] = files["train/c/3.JPEG"] = files["train/a/0.JPEG"]  # leakage
    files["train/b/0.JPEG"] = files["train/c/0.JPEG"]  # two labels
    files["train/b/1.JPEG"] = files["train/b/2.JPEG"]
    report = check_dataset(write(tmp_path, files))
    assert summary(report.problems) == [("train and val", "same image in train and val", 1)]
    assert report.problems[0].cases == (
        f"{tmp_path}/train/a/0.JPEG = {tmp_path}/train/c/3.JPEG = {tmp_path}/val/b/0.JPEG",
    )
    assert {(finding.kind, finding.cases) for finding in report.remarks} == {
        ("same image in several classes", (f"{tmp_path}/train/b/0.JPEG = {tmp_path}/train/c/0.JPEG",)),
        ("same image twice", (f"{tmp_path}/train/b/1.JPEG = {tmp_path}/train/b/2.JPEG",)),
    }


def test_check_bad_files_are_no_duplicates(tmp_path):
    report = check_dataset(write(tmp_path, good_files() | {"train/a/0.JPEG": b"", "val/a/0.JPEG": b""}))
    assert {finding.kind for finding in report.problems} == {"empty file"}
    assert report.remarks == ()


def test_check_classes_that_differ_or_are_empty(tmp_path):
    write(tmp_path, good_files() | {"train/d/0.jpg": encoded(image(50)), "val/e/0.jpg": encoded(image(51))})
    (tmp_path / "train/f").mkdir()
    (tmp_path / "val/f").mkdir()
    assert {(finding.where, finding.kind, finding.cases) for finding in check_dataset(tmp_path).problems} == {
        ("train", "class that val lacks", (f"{tmp_path}/train/d",)),
        ("val", "class that train lacks", (f"{tmp_path}/val/e",)),
        ("train", "class without images", (f"{tmp_path}/train/f",)),
        ("val", "class without images", (f"{tmp_path}/val/f",)),
    }


def test_check_names_a_class_that_cannot_be_printed(tmp_path):
    write(tmp_path, good_files() | {f"{split}/x\x1b[31m/0.jpg": encoded(image(50)) for split in ("train", "val")})
    kind = "class with an unprintable name"
    found = [(finding.where, finding.cases) for finding in check_dataset(tmp_path).problems if finding.kind == kind]
    assert found == [("train", ("x\x1b[31m",)), ("val", ("x\x1b[31m",))]


def test_check_remarks_on_unequal_classes_and_says_what_to_type(tmp_path):
    counts = (("a", 7), ("b", 2))
    write(tmp_path, {f"train/{name}/{n}.png": encoded(image(n), "PNG") for name, k in counts for n in range(k)})
    (remark,) = (each for each in check_dataset(tmp_path).remarks if each.kind == "unequal classes")
    assert remark.cases == ("a has 7 images, b has 2 images: 3.5 times as many",)
    assert "data.balance: 1" in remark.meaning
    assert "{weight: balanced}" in remark.meaning
    (tmp_path / "train/a/6.png").unlink()
    (tmp_path / "train/a/5.png").unlink()
    assert not [each for each in check_dataset(tmp_path).remarks if each.kind == "unequal classes"]


def test_check_what_is_no_data_set_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    for name, is_what in {"fifo.json": "neither a folder nor a list", "gone": "does not exist"}.items():
        with pytest.raises(DataError, match=naming(tmp_path / name, is_what, "bigbatch init")):
            check_dataset(tmp_path / name)


def test_check_of_a_missing_list_advises_no_option_of_a_training(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path / "flowers.json")]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path}/flowers.json: the list of images is missing; restore it, or run `bigbatch init FOLDER`" in said
    assert "--data.root" not in said


def test_check_splits_that_are_not_there(tmp_path, capsys):
    with pytest.raises(DataError, match=naming(tmp_path, "train/", "val/")):
        check_dataset(tmp_path)
    (tmp_path / "val").mkdir()
    report = check_dataset(tmp_path)
    assert summary(report.problems) == [(str(tmp_path), "missing split", 1), ("val", "no class folders", 1)]
    assert main(["data", "check", str(tmp_path), "--workers", "1"]) == 1
    assert "NOT fit for training: 2 problem(s); 0 images" in capsys.readouterr().out


def test_check_folders_that_cannot_be_listed(tmp_path, monkeypatch):
    write(tmp_path, good_files())
    real_scandir, locked = os.scandir, [f"{tmp_path}/train/b"]

    def scandir(folder):  # a mode would not stop root
        if str(folder) in locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return real_scandir(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    problems = check_dataset(tmp_path).problems
    assert ("train", "folder that cannot be listed", 1) in summary(problems)
    assert re.search(naming(tmp_path / "train/b", os.strerror(errno.EACCES)), str(problems))
    locked.append(f"{tmp_path}/train")
    with pytest.raises(DataError, match=naming(f"{tmp_path}/train:", os.strerror(errno.EACCES))):
        check_dataset(tmp_path)


def test_check_images_are_those_of_the_loaders_and_the_rest_is_named(tmp_path):
    strays = {
        "train/readme.txt",
        "train/.hidden/a.jpg",
        "train/a/list.csv",
        "train/a/inner/._b.jpg",
        "train/b/.DS_Store",
    }
    odd = {
        "train/a/B.JPG": encoded(image(60)),
        "train/b/ü.png": encoded(image(61), "PNG"),
        "train/a/inner/b.jfif": encoded(image(62)),
    }
    write(tmp_path, good_files() | odd | dict.fromkeys(strays, b"stray"))
    images = list_folder(tmp_path / "train").images
    index = read_index(tmp_path, "train")
    assert [images.name(position) for position in range(len(images))] == [
        index.name(position) for position in range(len(index.paths))
    ]
    assert images.labels_N.tolist() == index.labels_N.tolist()
    assert images.classes == index.classes
    assert images.read(2) == Path(index.name(2)).read_bytes()
    report = check_dataset(tmp_path)
    found = {case for finding in report.remarks if finding.kind == "other files" for case in finding.cases}
    assert found == {f"{tmp_path}/{name}" for name in strays - {"train/.hidden/a.jpg"}}
    assert ("train", "folder below a class", 1) in summary(report.remarks)
    assert summary(report.problems) == [("train", "image left out, hidden", 1)]


def test_check_images_that_are_left_out_are_problems(tmp_path, capsys):
    left_out = ("train/a/x.gif", "train/a/inner/y.BMP", "val/b/z.bmp", "val/loose.jpg")
    write(tmp_path, good_files() | dict.fromkeys(left_out, b"left out"))
    (tmp_path / "val/a/circle").symlink_to("..")
    problems = check_dataset(tmp_path, decode=False).problems
    assert sorted(summary(problems)) == [
        ("train", "image left out, .bmp", 1),
        ("train", "image left out, .gif", 1),
        ("val", "image left out, .bmp", 1),
        ("val", "image left out, behind a broken or circular link", 1),
        ("val", "image left out, in no class folder", 1),
    ]
    cases = {case for finding in problems for case in finding.cases}
    assert cases == {f"{tmp_path}/{name}" for name in (*left_out, "val/a/circle")}
    assert main(["data", "check", str(tmp_path), "--workers", "1"]) == 1
    assert "y.BMP" in capsys.readouterr().out


def test_check_classes_with_two_spellings_are_a_problem(tmp_path):
    write(
        tmp_path,
        {name.replace("val/a", "val/A1").replace("train/a", "train/a1"): f for name, f in good_files().items()},
    )
    (finding,) = (each for each in check_dataset(tmp_path).problems if each.kind == "class with two spellings")
    assert finding.cases == ("'A1' and 'a1'",)


def test_check_packed_images(tmp_path):
    """Damaged after they were packed: one inside, one altogether."""
    files = {f"train/{'aab'[number % 3]}/{number:03}.jpg": encoded(image(number)) for number in range(120)}
    files |= {"train/a/007.jpg": encoded(image(7), "PNG"), "train/a/006.jpg": encoded(image(206))}
    files |= {"val/a/0.jpg": files["train/a/000.jpg"], "val/b/0.jpg": encoded(image(200))}
    pack(write(tmp_path / "folder", files), tmp_path / "packed", recipe=PackRecipe())
    path = tmp_path / "packed/train/shard-000000.tar"
    content = path.read_bytes().replace(files["train/b/005.jpg"], with_bad_tables(files["train/b/005.jpg"]))
    path.write_bytes(content.replace(files["train/a/006.jpg"], b"x" * len(files["train/a/006.jpg"])))
    (tmp_path / "packed/val/notes.txt").write_text("stray")
    report = check_dataset(tmp_path / "packed")
    assert replace(check_dataset(tmp_path / "packed", num_workers=2), seconds=report.seconds) == report
    assert summary(report.problems) == [
        ("train", "unreadable file", 1),
        ("train", "damaged image", 1),
        ("train and val", "same image in train and val", 1),
    ]
    assert report.problems[0].cases[0].startswith(f"{path}: image 00000004: is not the image that index.npy")
    assert report.problems[1].cases[0].startswith(f"{path}: image 00000081: cannot be decoded")
    assert [finding.cases for finding in report.remarks] == [(f"{tmp_path}/packed/val/notes.txt",)]
    facts = report.splits["train"]
    assert (facts.num_images, facts.per_class, facts.forms) == (
        120,
        Spread(40, 60.0, 80),
        {"JPEG RGB": 117, "PNG RGB": 1},
    )


@dataclass(frozen=True)
class Fake:
    """Images that never lay on a disk."""

    classes: tuple[str, ...]
    labels_N: np.ndarray

    def __len__(self):
        return len(self.labels_N)


WNIDS = tuple(f"n{number:08d}" for number in range(1000))


@pytest.mark.parametrize(
    ("split", "classes", "counts", "cases"),
    [
        ("val", WNIDS, [50] * 1000, ()),
        ("train", WNIDS, [1281] * 999 + [1448], ()),  # 1,281,167
        ("val", WNIDS, [10] * 1000, ()),  # ImageNet-V2
        ("train", WNIDS, [1281] * 1000, ("1,281,000 images instead of 1,281,167",)),
        ("val", WNIDS, [11] * 1000, ("11,000 images instead of 50,000 or 10,000",)),
        *(("val", WNIDS, [n] * 998 + [n - 1, n + 1], (f"n00000998: {n - 1}", f"n00000999: {n + 1}")) for n in (50, 10)),
        ("val", WNIDS[:999], [5] * 999, ()),
        ("val", ("dog", *WNIDS[:999]), [5] * 1000, ()),
    ],
)
def test_check_the_counts_of_imagenet(split, classes, counts, cases):
    finding = imagenet_finding(split, Fake(classes, np.repeat(np.arange(len(classes)), counts)))
    assert not finding.is_problem
    assert all(found.startswith(case) for found, case in zip(finding.cases, cases, strict=True))


def bad_set(root):
    return write(root, good_files() | {f"train/c/{number}.JPEG": b"" for number in range(3)})


def test_check_the_command_names_the_first_and_writes_all(tmp_path, capsys):
    bad_set(tmp_path / "set")
    out = tmp_path / "report.json"
    assert main(["data", "check", str(tmp_path / "set"), "--workers", "1", "--no-decode", "--json", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["train", "val"]
    assert re.match(r"images +9 +3$", lines[1])
    at = lines.index("problem  train: empty file (3)")
    assert lines[at + 1].startswith(f"         {tmp_path}/set/train/c/0.JPEG: ")
    assert lines[at + 1].endswith("   and 2 more")
    assert "NOT fit for training: 3 problem(s); 12 images read, not decoded, in" in lines[-1]
    written = json.loads(out.read_text())
    assert [case.split(":")[0][-len("c/0.JPEG") :] for case in written["problems"][0]["cases"]] == [
        f"c/{number}.JPEG" for number in range(3)
    ]
    assert written["splits"]["train"]["forms"] == {"JPEG RGB": 6}
    assert written["splits"]["train"]["num_pictures"] == 9
    assert written["decoded"] is False


def shown(report: CheckReport, **options):
    stream = io.StringIO()
    print_report(report, console=Console(file=stream, width=100, **options))
    return stream.getvalue()


def test_check_a_terminal_gets_a_table_and_a_pipe_gets_none(tmp_path):
    report = check_dataset(bad_set(tmp_path))
    plain, fancy = shown(report), shown(report, force_terminal=True)
    assert plain.isascii()
    assert "\x1b[" not in plain
    assert "│" in fancy
    assert "\x1b[31mproblem  train: empty file (3)" in fancy


@pytest.mark.skipif(os.name != "posix", reason="file names are text here")
def test_check_a_file_name_that_is_no_text(tmp_path):
    path = os.fsencode(tmp_path) + b"/train/a/\xff.jpg"
    write(tmp_path, good_files())
    try:
        Path(os.fsdecode(path)).write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes no such name")
    report = check_dataset(tmp_path)
    assert "\\udcff.jpg: " in "".join(finding_lines(report.problems))
    write_json(report, tmp_path / "report.json")
    assert "\udcff.jpg" in json.loads((tmp_path / "report.json").read_text())["problems"][0]["cases"][0]


def test_check_a_report_that_cannot_be_written(tmp_path, capsys):
    write(tmp_path / "set", good_files())
    out = str(tmp_path / "nowhere/report.json")
    assert main(["data", "check", str(tmp_path / "set"), "--workers", "1", "--json", out]) == 1
    assert re.search(naming("nowhere/report.json", os.strerror(errno.ENOENT)), capsys.readouterr().err)


def test_check_real_images_are_what_their_list_says():
    manifest = REAL_DATA / "manifest.csv"
    if not manifest.is_file():
        pytest.skip(f"no {manifest}; name a folder with manifest.csv and train/ in BIGBATCH_REAL_DATA")
    rows = {row["file"]: row for row in csv.DictReader(manifest.read_text().splitlines())}
    report = check_dataset(REAL_DATA, decode=False)
    assert report.problems == ()
    found = {finding.kind: set() for finding in report.remarks}
    for finding in report.remarks:
        found[finding.kind] |= {Path(case).name for case in finding.cases}
    assert found == {
        "progressive JPEG": {name for name, row in rows.items() if row["progressive"] == "1"},
        "grayscale": {name for name, row in rows.items() if row["mode"] == "L"},
        "EXIF rotation": {name for name, row in rows.items() if int(row["exif_orientation"]) > 1},
    }
    for name, row in list(rows.items())[::10]:
        data = (REAL_DATA / row["split"] / row["wnid"] / name).read_bytes()
        size, form, _ = examine(data, path=name, decode=True, max_pixels=50_000_000)
        assert (size, form) == ((int(row["height"]), int(row["width"])), f"JPEG {row['mode']}")
    for split, facts in report.splits.items():
        assert facts.num_bytes == sum(int(row["bytes"]) for row in rows.values() if row["split"] == split)
