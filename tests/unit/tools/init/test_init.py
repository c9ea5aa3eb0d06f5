"""`bigbatch init` writes a recipe that trains on a folder of images, or says all that is wrong and writes nothing."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from error_texts import naming
from PIL import Image
from sample_images import encoded, exif, smooth_image, write
from torch import nn

from bigbatch.cli import main
from bigbatch.errors import DataError
from bigbatch.tools.init import csv_table
from bigbatch.tools.init.image_names import ImageNames
from bigbatch.tools.init.labels import Labels, read_labels
from bigbatch.tools.init.layout import find_layout, split_classes
from bigbatch.tools.init.measure import SampleStatistics, measure
from bigbatch.tools.init.recipe import recipe_text
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from bigbatch.trainer.checkpoint.weights import load_weights_
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.datasets.check import Spread
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.listed import read_listed
from bigbatch.trainer.input.order import read_index
from bigbatch.trainer.models import build_model, libraries

IMAGES = [encoded(smooth_image(seed, 50, 40)) for seed in range(24)]


def class_folders(root: Path, **counts: int) -> Path:
    """Different images, so many of each class."""
    names = [f"{name}/{number}.jpg" for name, count in counts.items() for number in range(count)]
    return write(root, dict(zip(names, IMAGES, strict=False)))


def init(*words: object) -> int:
    return main(["init", *map(str, words), "--workers", "1"])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_init_class_folders_become_a_recipe_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "my pets", cat=10, dog=5, axolotl=1)
    assert init("my pets", "--val-share", "0.3") == 0
    said = capsys.readouterr().out
    assert "class with one image (1)" in said
    assert "axolotl" in said
    for line in ("data check my-pets.json", "train --config my-pets.yaml", "predict runs/my-pets "):
        assert f"  bigbatch {line}" in said
    config = load_config(["--config", "my-pets.yaml"])
    assert (config.data.root, config.data.num_classes, config.data.image_size) == ("my-pets.json", 3, 32)
    train, val = (open_split(Path(config.data.root), split) for split in ("train", "val"))
    assert np.bincount(train.labels_N).tolist() == [1, 7, 3]  # of axolotl, cat, dog
    assert np.bincount(val.labels_N).tolist() == [0, 3, 2]
    names = [each.name(i) for each in (train, val) for i in range(len(each))]
    assert sorted(names) == sorted(map(str, Path("my pets").rglob("*.jpg")))
    assert main(["data", "check", "my-pets.json", "--workers", "1"]) == 0


def test_init_is_repeatable_and_overwrites_by_force_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "pets", cat=10, dog=5)
    assert init("pets") == 0
    written = [(tmp_path / name).read_bytes() for name in ("pets.yaml", "pets.json")]
    (tmp_path / "pets.yaml").write_text("mine\n")
    capsys.readouterr()
    assert init("pets") == 1
    said = capsys.readouterr().out
    assert "file that exists (2)" in said
    assert "--force" in said
    assert (tmp_path / "pets.yaml").read_text() == "mine\n"
    assert init("pets", "--force") == 0
    assert [(tmp_path / name).read_bytes() for name in ("pets.yaml", "pets.json")] == written
    assert init("pets", "--seed", 1, "--out", "b.yaml") == 0
    lists = [json.loads((tmp_path / name).read_text())["val"] for name in ("pets.json", "b.json")]
    assert lists[0] != lists[1]


def test_init_sets_keys_for_rotated_and_transparent_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both off if no image needs them; mean and std count the background, as training does."""
    class_folders(tmp_path / "pets", cat=4, dog=4)
    assert init("pets") == 0
    assert load_config(["--config", "pets.yaml"]).data.exif_orientation is False
    assert load_config(["--config", "pets.yaml"]).data.background is None
    half = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    half.paste((0, 0, 0, 255), (0, 0, 20, 40))
    for number in range(20):
        write(tmp_path / "logos", {f"{'ab'[number % 2]}/{number}.png": encoded(half, "PNG")})
    opaque = Image.new("RGBA", (40, 40), (0, 0, 0, 255))
    write(
        tmp_path / "logos",
        {"a/20.png": encoded(opaque, "PNG"), "b/21.jpg": encoded(opaque.convert("RGB"), exif=exif(8))},
    )
    assert init("logos") == 0
    text, config = (tmp_path / "logos.yaml").read_text(), load_config(["--config", "logos.yaml"])
    assert "exif_orientation: true # 1 of 22 images state a rotation" in text
    assert "background: white # 20 of 22 images are partly transparent" in text
    trained = read_listed(Path("logos.json"), "train")
    num_half = sum(int(Path(name).stem) < 20 for name in trained.paths)
    assert config.data.mean == pytest.approx([0.5 * num_half / len(trained)] * 3, abs=1e-3)
    main(["data", "check", "logos.json", "--workers", "1"])
    assert "data.background: white" in capsys.readouterr().out


def test_init_like_timm_fine_tunes_its_model(tmp_path: Path) -> None:
    """Model, weights, mean, std and size are timm's, the last layer is new; nothing is downloaded."""
    pytest.importorskip("timm")
    write(tmp_path, {f"pets/{'ab'[n % 2]}/{n}.jpg": encoded(smooth_image(n, 250, 240)) for n in range(8)})
    assert init("pets", "--like", "timm:resnet10t.c3_in1k") == 0
    config = load_config(["--config", "pets.yaml"])
    assert (config.model.name, config.model.weights) == ("timm:resnet10t", "timm:resnet10t.c3_in1k")
    assert (config.model.new_head, config.data.image_size, config.data.num_classes) == (True, 176, 2)
    assert (config.data.mean, config.data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert config.optimizer.lr_factors == {"fc.*": 1.0, "*": 0.1}


@pytest.mark.long
def test_init_like_timm_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps from weights that timm downloaded earlier: only the last layer is new."""
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("test_resnet").state_dict()
    torch.save(theirs, tmp_path / "weights.pth")
    monkeypatch.setattr(libraries, "_timm_files", lambda name: ([tmp_path / "weights.pth"], ""))
    class_folders(tmp_path / "pets", cat=8, dog=8)
    assert init("pets", "--like", "timm:test_resnet.r160_in1k") == 0
    sizes = [f"--batch.{name}=4" for name in ("global_batch_size", "microbatch_size", "bn_span")]
    short = ["--run.epochs=1", "--schedule.warmup_epochs=0", "--run.log_every_steps=1", "--data.image_size=64"]
    slow = ["--schedule.base_lr=1e-9", "--optimizer.ema_decay=null", "--optimizer.ema_every_steps=null"]
    assert main(["train", "--config", "pets.yaml", "--quiet", *sizes, *short, *slow]) == 0
    (newest,) = list_checkpoints(Path("runs/pets/checkpoints"))
    ours = load_checkpoint(newest.path)["model"]
    assert newest.step >= 2
    assert ours["fc.weight"].shape == (2, theirs["fc.weight"].shape[1])
    kept = [name for name in ours if name.endswith("weight") and not name.startswith("fc.")]
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in kept)


def test_init_like_a_run_starts_from_its_weights(tmp_path: Path) -> None:
    class_folders(tmp_path / "pets", cat=8, dog=8)
    options = {"width": 4, "pool_first": False}
    size = ["--data.image_size=32", "--data.num_classes=5", "--data.mean=[0.1,0.2,0.3]"]
    words = [f"--model.options.{name}={as_yaml(value)}" for name, value in options.items()]
    config = load_config(["--config=quickstart", *size, *words])
    model = build_model("resnet9", num_classes=5, norm=nn.BatchNorm2d, **options)
    state = {"step": 0, "config": dump_config(config), "model": model.state_dict()}
    save_checkpoint(Path("run/checkpoints"), state, step=0, top1=0.5, keep=1)
    Path("run/config.yaml").write_text(dump_config(config))
    assert init("pets", "--like", "run") == 0
    recipe = load_config(["--config", "pets.yaml"])
    assert (recipe.model.name, recipe.model.options) == ("resnet9", config.model.options)
    assert Path(recipe.model.weights or "") == next(Path("run/checkpoints").iterdir())
    assert (recipe.model.new_head, recipe.data.num_classes, recipe.data.mean) == (True, 2, (0.1, 0.2, 0.3))
    assert recipe.optimizer.lr_factors == {"linear.*": 1.0, "*": 0.1}
    fresh = build_model("resnet9", num_classes=2, norm=nn.BatchNorm2d, **options)
    load_weights_(fresh, Path(recipe.model.weights or ""), config=recipe, new_head=True)
    first = next(iter(model.state_dict()))
    assert torch.equal(fresh.state_dict()[first], model.state_dict()[first])


@pytest.mark.parametrize("like", ["no", "timm:no-such-model", "pets"])
def test_init_like_nothing_known_is_refused(tmp_path: Path, like: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    class_folders(tmp_path / "pets", cat=4, dog=4)
    assert init("pets", "--like", like) == 1
    said = capsys.readouterr()
    assert ("--like" in said.err) or "is not a run folder" in said.err
    assert not (tmp_path / "pets.yaml").exists()


def test_init_leaves_splits_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "pets/train", cat=4, dog=4)
    class_folders(tmp_path / "pets/val", cat=1, dog=1)
    assert init("pets") == 0
    assert "  bigbatch predict runs/pets pets/val/cat/0.jpg\n" in capsys.readouterr().out
    assert load_config(["--config", "pets.yaml"]).data.root == "pets"
    assert not (tmp_path / "pets.json").exists()
    assert main(["data", "pack", "pets", "packed", "--workers", "1"]) == 0
    assert init("packed") == 0
    assert "  bigbatch predict runs/packed IMAGE.jpg\n" in capsys.readouterr().out
    (tmp_path / "pets/val/dog/0.jpg").rename(tmp_path / "pets/train/dog/9.jpg")
    (tmp_path / "pets/val/dog").rmdir()
    capsys.readouterr()
    assert init("pets", "--force") == 1
    assert "class that val lacks (1)" in capsys.readouterr().out


def test_init_tells_all_at_once_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(class_folders(tmp_path / "pets", cat=4), {f"cat/bad{i}.png": b"no image" for i in range(5)})
    (tmp_path / "pets/dog").mkdir()
    (tmp_path / "pets.json").write_text("kept")
    assert init("pets") == 1
    said = capsys.readouterr().out
    for kind in ("unusable image", "class without images (1)", "file that exists (1)", "nothing written: 7 problem"):
        assert kind in said
    assert not (tmp_path / "pets.yaml").exists()
    assert (tmp_path / "pets.json").read_text() == "kept"


def test_init_leaves_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(class_folders(tmp_path / "pets", cat=6, dog=6), {f"cat/bad{i}.png": b"no image" for i in range(5)})
    (tmp_path / "pets/empty").mkdir()
    assert init("pets", "--leave-out") == 0
    said = capsys.readouterr().out
    assert "left out" in said
    assert "12 of 17 decoded: sides of" in said, "five are no images"
    assert "class without images (1)" in said
    text = (tmp_path / "pets.json").read_text()
    assert "empty" not in text
    assert "bad" not in text
    assert text.count(".jpg") == 12
    write(tmp_path / "pets", {"eel/bad.png": b"", "eel/worse.png": b""})
    assert init("pets", "--leave-out", "--force") == 1
    assert "class without usable images (1)" in capsys.readouterr().out


def test_init_names_images_that_no_loader_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pets = write(
        class_folders(tmp_path / "pets", cat=6, dog=6), {"dog/old/x.jfif": IMAGES[12], "dog/._0.jpg": b"macOS"}
    )
    write(pets, {"dog/y.bmp": b"BM", "cat/old/z.TIFF": b"II"})
    assert init("pets") == 1
    said = capsys.readouterr().out
    assert "image left out, .bmp (1): save it as JPEG, PNG or WebP" in said
    assert "image left out, .tiff (1)" in said
    assert init("pets", "--leave-out") == 0
    assert "images 11 to train and 2 to validate" in capsys.readouterr().out
    write(pets, {"labels.csv": b"".join(b"cat/%d,cat\ndog/%d,dog\n" % (i, i) for i in range(6))})
    assert init("pets", "--labels", "pets/labels.csv", "--force") == 1
    assert "image left out, .bmp (1)" in capsys.readouterr().out


def test_init_table_of_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {f"images/{i}.jpg": IMAGES[i] for i in range(12)}
    table = "id,breed\n" + "".join(f"{i},{'cat' if i % 2 else 'dog'}\n" for i in range(12))
    write(tmp_path / "pets", files | {"labels.csv": table.encode()})
    assert init("pets") == 0
    assert "images with labels from labels.csv, columns 'id' and 'breed'; 2 classes" in capsys.readouterr().out
    train = open_split(tmp_path / "pets.json", "train")
    found = {Path(train.name(i)).stem: train.classes[train.labels_N[i]] for i in range(len(train))}
    assert len(found) == 10
    assert all(label == ("cat" if int(name) % 2 else "dog") for name, label in found.items())


def test_init_hostile_names_lead_nowhere_and_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path,
        {"secret.jpg": IMAGES[0], "pets/a.jpg": IMAGES[1], "pets/b.jpg": IMAGES[2], "pets/c\n\x1b[31m.jpg": b""},
    )
    lines = ["a.jpg,cat", "b.jpg,dog", "../secret.jpg,cat", f"{tmp_path}/secret.jpg,cat", "x/../../secret.jpg,cat"]
    lines += ["\x1b[2Jgone.jpg,cat", "b.jpg,bird"]
    (tmp_path / "pets/labels.csv").write_text("file,label\n" + "\n".join(lines) + "\n")
    assert init("pets") == 1
    said = capsys.readouterr().out
    assert "label without an image (4)" in said
    assert "image without a label (1)" in said
    assert "image with two labels (1)" in said
    assert "\x1b" not in said
    assert "c\\n\\x1b[31m.jpg" in said
    (tmp_path / "pets/labels.csv").write_text("file,label\na.jpg,cat\x1b[31m\nb.jpg,dog\n")
    assert init("pets", "--leave-out") == 1
    said = capsys.readouterr().out
    assert "class with an unprintable name (1)" in said
    assert "\x1b" not in said


def test_init_refuses_an_output_before_it_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "pets", {"cat/bad.jpg": b"no image"})
    with pytest.raises(SystemExit) as ended:
        init("pets", "--out", "sub/no/pets.yaml")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "--out sub/no/pets.yaml is not possible: sub/no: there is no such folder" in said.err
    assert "bad.jpg" not in said.out


@pytest.mark.parametrize("name", ["it's ours", "-pets", "pets\n\x1b[31m\udcff"])
def test_init_next_line_is_what_a_shell_reads(
    name: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for split in ("train", "val"):
        class_folders(tmp_path / name / split, cat=1, dog=1)
    assert init(f"./{name}", "--out", "x.yaml") == 0
    said = capfdbinary.readouterr().out.decode()
    assert "\x1b" not in said
    (line,) = (line for line in said.splitlines() if "bigbatch predict" in line)
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, check=True)
    words = shown.stdout.split(b"\n", 3)
    assert words[:3] == [b"bigbatch", b"predict", b"runs/x"]
    assert Path(os.fsdecode(words[3]).removesuffix("\n")) == Path(name) / "val/cat/0.jpg"
    assert not words[3].startswith(b"-")


def read(folder: Path, table: bytes, images: list[str], *, columns: tuple[str, str] | None = None) -> Labels:
    (folder / "t.csv").write_bytes(table)
    return read_labels({folder / "t.csv": ""}, ImageNames(folder, images), columns=columns)


@pytest.mark.parametrize(
    "table",
    [
        "a.jpg,cat\nsub/b.png,dog\n",
        "image;class\na.jpg;cat\nb;dog\n",
        "\ufeffname\tkind\r\na\tcat\r\n\r\nsub/b\tdog\r\n",
        'n,k\n"./a.jpg"," cat "\nb.png,dog\na.jpg,cat\n',
    ],
)
def test_labels_of_many_forms(tmp_path: Path, table: str) -> None:
    found = read(tmp_path, table.encode(), ["a.jpg", "sub/b.png"])
    assert found.classes == {"a.jpg": "cat", "sub/b.png": "dog"}
    assert not any(found.faults.values())
    assert (found.columns[tmp_path / "t.csv"] == "no line of names") == table.startswith("a.jpg")


def test_labels_name_by_column_and_never_two_images_at_once(tmp_path: Path) -> None:
    table = b"n,kind,file\n1,cat,x/a.jpg\n2,dog,a.jpg\n3,,y/a.jpg\n"
    found = read(tmp_path, table, ["x/a.jpg", "y/a.jpg"], columns=("file", "kind"))
    assert found.classes == {"x/a.jpg": "cat"}
    assert {kind: len(cases) for kind, cases in found.faults.items() if cases} == {
        "label without an image": 1,
        "image without a label": 1,
        "line without a label": 1,
    }


@pytest.mark.parametrize(
    ("table", "columns", "says"),
    [
        (b"", None, "empty"),
        (b"\xff\xfe,\n", None, "UTF-8"),
        (b'a.jpg,"cat\n', None, "CSV"),
        (b"a.jpg\n", None, "one column"),
        (b"file,label\na.jpg,cat\n", ("file", "kind"), "'kind'"),
        (b"id,label\n1,cat\n", None, "--columns"),
    ],
)
def test_labels_that_are_none(tmp_path: Path, table: bytes, columns: tuple[str, str] | None, says: str) -> None:
    with pytest.raises(DataError, match=naming(tmp_path / "t.csv", says)):
        read(tmp_path, table, ["a.jpg"], columns=columns)
    with pytest.raises(DataError, match=naming("gone.csv")):
        read_labels({tmp_path / "gone.csv": ""}, ImageNames(tmp_path, ["a.jpg"]))


def test_labels_that_are_too_long_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_table, "LIST_BYTES", 100)
    with pytest.raises(DataError, match=naming(tmp_path / "t.csv", "101 bytes", "move it away")):
        read(tmp_path, bytes(101), ["a.jpg"])


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["a.jpg", "b.jpg"], "--labels"),
        (["a.jpg", "x.csv", "y.csv"], "--labels"),
        (["train/cat/a.jpg"], "val"),
        (["val/cat/a.jpg"], "train"),
        (["train-0-of-1.parquet"], "data prepare huggingface"),
        (["shard-0.tar"], "*train*.tar"),
        (["train/0.tar"], "none for val"),
        ([], "folder"),
        (["."], "folder"),
    ],
)
def test_look_refuses_what_it_cannot_read(tmp_path: Path, files: list[str], says: str) -> None:
    if files == ["."]:
        (tmp_path / "pets").touch()
    else:
        write(tmp_path / "pets", dict.fromkeys(files, b""))
    with pytest.raises(DataError, match=naming(tmp_path / "pets", says)):
        find_layout(tmp_path / "pets", leave_out=False)


def test_look_at_folders_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(class_folders(tmp_path / "pets", cat=3, dog=3), {"t.csv": b"cat/0.jpg,cat\n"})
    listed = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return listed(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    for words in ([], ["--labels", "pets/t.csv"]):
        assert init("pets", *words) == 1
        said = capsys.readouterr().out
        assert "folder that cannot be listed (1)" in said
        assert "Permission denied" in said


@pytest.mark.parametrize("folders", [("cat", "dog"), ("train/cat", "train/dog", "val/cat", "val/dog")])
def test_look_refuses_columns_of_no_table(tmp_path: Path, folders: tuple[str, ...]) -> None:
    write(tmp_path, {f"{folder}/0.jpg": IMAGES[0] for folder in folders})
    with pytest.raises(DataError, match=naming("--columns", tmp_path, "no table")):
        find_layout(tmp_path, columns=("image", "label"), leave_out=False)


def test_init_takes_any_folders_for_classes_on_request(tmp_path: Path) -> None:
    write(class_folders(tmp_path / "traffic", train=3, test=3), {"log.csv": b"file,label\ntrain/0.jpg,x\n"})
    assert init("traffic") == 1
    assert init("traffic", "--labels", "folders") == 0
    assert {name: len(paths) for name, paths in json.loads(Path("traffic.json").read_text())["train"].items()} == {
        "test": 2,
        "train": 2,
    }


def test_init_splits_by_other_names_are_listed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pets = class_folders(tmp_path / "pets/Training", cat=3, dog=2, eel=2)
    class_folders(pets.parent / "Validation", cat=1, dog=1)
    write(pets.parent, {"Testing/cat/0.jpg": IMAGES[20]})
    assert init("pets") == 0
    said = capsys.readouterr().out
    assert "class folders of Training and Validation; 3 classes, images 7 to train and 2 to validate" in said
    assert "class that val lacks (1): used for training only" in said
    assert "image that is not read (1)" in said
    content = json.loads(Path("pets.json").read_text())
    assert content["made"] == {}
    assert content["val"] == {"cat": ["Validation/cat/0.jpg"], "dog": ["Validation/dog/0.jpg"]}
    assert content["train"]["dog"] == ["Training/dog/0.jpg", "Training/dog/1.jpg"]
    write(pets.parent, {"Validation/fox/0.jpg": IMAGES[21]})
    assert init("pets", "--force") == 1
    assert "class that train lacks (1)" in capsys.readouterr().out


def test_init_gives_one_reason_for_a_class_in_two_unicode_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for folder, splits in (("same", ("train", "val")), ("other", ("Train", "Valid"))):
        files = {f"{splits[0]}/{composed}/0.jpg": IMAGES[0], f"{splits[1]}/{decomposed}/0.jpg": IMAGES[1]}
        write(tmp_path / folder, files | {f"{split}/tea/{n}.jpg": IMAGES[n + 2] for n, split in enumerate(splits)})
        assert init(folder) == 1
        said = capsys.readouterr().out
        assert "problem" in said
        assert "class with two spellings (1): rename one, so that the class has one spelling everywhere" in said
        assert "('cafe\\u0301' and 'caf\\xe9')" in said
        assert "nothing written: 1 problem(s)" in said


def test_split_is_of_names_and_seed_alone() -> None:
    by_class = {
        name: [f"{name}/{i}" for i in range(count)] for name, count in {"a": 40, "b": 7, "c": 2, "d": 1}.items()
    }
    splits = split_classes(by_class, val_share=0.25, seed=0)
    assert {name: len(paths) for name, paths in splits["val"].items()} == {"a": 10, "b": 2, "c": 1, "d": 0}
    for name, paths in by_class.items():
        assert sorted(splits["train"][name] + splits["val"][name]) == sorted(paths)
    assert split_classes({k: v[::-1] for k, v in by_class.items()}, val_share=0.25, seed=0) == splits
    assert split_classes(by_class, val_share=0.25, seed=1) != splits
    # four images more move at most one of the others out of the validation set
    more = split_classes({"a": [*by_class["a"], *(f"new/{i}" for i in range(4))]}, val_share=0.25, seed=0)
    assert len({*splits["val"]["a"]} - {*more["val"]["a"]}) <= 3
    assert {*more["train"]["a"]} >= {*splits["train"]["a"]} - {*more["val"]["a"]}


def png(*colours: tuple[int, int, int], side: int) -> bytes:
    """Equal stripes of these colours."""
    pixels = np.repeat(np.array(colours, np.uint8)[:, None, :], side, axis=1)
    return encoded(Image.fromarray(np.repeat(pixels, side // len(colours), axis=0)), "PNG")


def test_measure_against_a_closed_form(tmp_path: Path) -> None:
    """Two images of other sizes count alike: red is 0, 1 in one and 0.2, 0.2 in the other."""
    write(tmp_path / "train", {"a/0.png": png((0, 51, 9), (255, 51, 9), side=2), "b/0.png": png((51, 51, 9), side=8)})
    write(tmp_path / "val", {"a/0.png": png((200, 200, 200), side=4), "b/0.png": b""})
    splits = {split: read_index(tmp_path, split) for split in ("train", "val")}
    found = measure(splits, max_images=100, seed=0)
    assert found.mean == pytest.approx((0.35, 0.2, 9 / 255))
    assert found.std == pytest.approx((np.std([0, 1, 0.2, 0.2]), 0, 0), abs=1e-9)
    assert (found.num_images, found.num_averaged, found.short_side_pixels) == (4, 2, Spread(2, 4, 8))
    assert [*found.faults["val"]] == [1]
    assert "val/b/0.png" in found.faults["val"][1]


def test_init_of_a_constant_channel_keeps_it_so(tmp_path: Path) -> None:
    for number in range(4):
        write(
            tmp_path / "cells", {f"{name}/{number}.png": png((number, 51, 0), (255, 51, 0), side=40) for name in "ab"}
        )
    assert init("cells") == 0
    data = load_config(["--config", "cells.yaml"]).data
    assert data.mean[1:] == (0.2, 0)
    assert data.std[0] == pytest.approx(0.5, abs=0.01)
    assert data.std[1:] == (1, 1)
    assert "# the same; 1 for a channel that is the same everywhere" in Path("cells.yaml").read_text()


def test_measure_takes_a_sample_by_seed(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", a=10, b=10)
    splits = {"train": read_index(tmp_path, "train")}
    one, same, other = (measure(splits, max_images=5, seed=seed) for seed in (0, 0, 1))
    assert one.num_averaged == 5
    assert one == same != other


def test_measure_of_nothing_usable(tmp_path: Path) -> None:
    write(tmp_path / "train", {"a/0.png": b"no", "b/0.png": b"no"})
    with pytest.raises(DataError, match=naming("train/a/0.png")):
        measure({"train": read_index(tmp_path, "train")}, max_images=5, seed=0)


@pytest.mark.parametrize(
    ("num_train", "sizes"), [(2048, (256, 128, 128)), (2047, (128, 64, 64)), (100, (16, 8, 8)), (5, (4, 2, 2))]
)
def test_recipe_has_steps_enough(num_train: int, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    text = recipe_of("imagenette", num_train=num_train)
    (tmp_path / "mine.yaml").write_text(text)
    config = load_config(["--config", "mine.yaml"])
    assert (config.batch.global_batch_size, config.batch.microbatch_size, config.batch.bn_span) == sizes
    # the linear scaling rule
    assert config.schedule.base_lr / 6.0 == pytest.approx(sizes[0] / 256)
    assert num_train // sizes[0] >= 1
    assert (config.data.mean, config.data.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize(("side", "size"), [(224, 224), (223, 192), (20, 32)])
def test_recipe_enlarges_no_more_than_it_must(side: int, size: int, tmp_path: Path) -> None:
    text = recipe_of("imagenet/nus_resnet50_512", short_side=side)
    (tmp_path / "mine.yaml").write_text(text)
    assert load_config(["--config", "mine.yaml"]).data.image_size == size


def test_recipe_from_weights_normalises_as_they_expect_and_says_whose_size_it_has() -> None:
    text = recipe_of("finetune", short_side=300)
    assert "\n  mean" not in text
    assert "\n  std" not in text
    assert "\n  image_size: 224 # the base's; the median of the shorter sides is 300 pixels" in text


def recipe_of(like: str, *, num_train: int = 10**5, short_side: int = 200) -> str:
    sides = Spread(8, short_side, 1000)
    measured = SampleStatistics(100, 100, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), sides, sides, {})
    counts = {"train": num_train, "val": 10}
    return recipe_text(like, measured, root="my images: all", num_classes=3, counts=counts, seed=0)


@pytest.mark.parametrize(
    "words",
    [
        ["--val-share", "0"],
        ["--val-share", "1"],
        ["--samples", "0"],
        ["--seed", "-1"],
        ["--columns", "one"],
        *(["--out", name] for name in ("mine.json", "mine", "", ".", "/")),
    ],
)
def test_init_options_that_make_no_sense(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["init", str(tmp_path), *words])


@pytest.mark.parametrize(
    ("classes", "words", "says"),
    [
        ({}, (), "no images (1)"),
        ({"cat": 3}, (), "fewer than two classes (1)"),
        ({"cat": 1, "dog": 1}, (), "no validation images (1)"),
        ({"1": 4, "01": 4, "2": 4}, (), "'01' and '1'"),
        ({"Cat": 4, "cat": 4, "dog": 4}, (), "class with two spellings (1)"),
        ({"cat": 3, "dog": 3}, ("--out", f"{'x' * 300}.yaml"), "x.yaml: cannot be written (File name too long)"),
    ],
)
def test_init_refuses_what_makes_no_recipe(
    classes: dict[str, int], words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").mkdir()
    class_folders(tmp_path / "set", **classes)
    assert init("set", *words) == 1
    assert says in "".join(capsys.readouterr())


def test_init_leaves_no_class_without_images_to_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "pets", cat=2, dog=2)
    assert init("pets") == 0
    for paths in json.loads((tmp_path / "pets.json").read_text())["val"].values():
        write(tmp_path / "pets", dict.fromkeys(paths, b"no image"))
    capsys.readouterr()
    assert init("pets", "--leave-out", "--force") == 1
    assert "no validation images (1)" in capsys.readouterr().out


@pytest.mark.long
def test_init_to_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flat folder and a table, one rank, and images that training has not seen."""
    noise = np.random.default_rng(0).integers(0, 100, (70, 48, 40, 3), dtype=np.uint8)
    noise[::2, :, :, 0] += 150  # every second one is red, the others blue
    noise[1::2, :, :, 2] += 150
    files = {f"{i}.webp": encoded(Image.fromarray(pixels), "WEBP") for i, pixels in enumerate(noise)}
    table = "".join(f"{i}.webp,{('red', 'blue')[i % 2]}\n" for i in range(64))
    unseen = [files.pop(f"{i}.webp") for i in range(64, 70)]
    write(tmp_path / "paint", files | {"t.csv": table.encode()})
    write(tmp_path, {f"new{i}.webp": data for i, data in enumerate(unseen)})
    assert init("paint") == 0
    keys = ["--model.options.width=8", "--data.loader=torchvision", "--run.epochs=12", "--run.eval_every_epochs=12"]
    assert main(["train", "--config", "paint.yaml", *keys]) == 0
    capsys.readouterr()
    assert main(["predict", "runs/paint", "--json", *(f"new{i}.webp" for i in range(6))]) == 0
    answers = [json.loads(line)["classes"][0]["class"] for line in capsys.readouterr().out.splitlines()]
    assert answers == ["red", "blue"] * 3
