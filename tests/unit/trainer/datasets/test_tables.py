"""Image data sets of Hugging Face's, as `datasets` saves them and as Parquet, become class folders and a recipe."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming
from PIL import Image
from sample_images import encoded, smooth_image

from bigbatch.cli import main
from bigbatch.errors import DataError
from bigbatch.tools.init.layout import find_layout
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.tables import find_tables, unpack_tables

pa = pytest.importorskip("pyarrow")
ipc, parquet = pytest.importorskip("pyarrow.ipc"), pytest.importorskip("pyarrow.parquet")

KINDS = ("JPEG", "PNG", "WEBP")
IMAGES = [encoded(smooth_image(seed, 40, 40), KINDS[seed % 3]) for seed in range(12)]
CLASSES = ("cat", "guinea pig")
FEATURES = {
    "image": {"_type": "Image"},
    "boxes": [{"_type": "Value"}],
    "label": {"_type": "ClassLabel", "names": CLASSES},
}


def table(*numbers: int, features: object = FEATURES) -> pa.Table:
    """Rows of IMAGES, whose classes take turns."""
    columns = {
        "image": [{"bytes": IMAGES[number], "path": f"{number}.bin"} for number in numbers],
        "boxes": [[1]] * len(numbers),
        "label": [number % 2 for number in numbers],
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table(columns).replace_schema_metadata(metadata)


def save(folder: Path, *tables: pa.Table) -> None:
    """Write tables as Dataset.save_to_disk does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, rows in zip(names, tables, strict=True):
        with ipc.new_stream(str(folder / name), rows.schema) as stream:
            stream.write_table(rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))


def unpacked(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def prepare(*words: object) -> int:
    return main(["data", "prepare", "huggingface", *map(str, words)])


def unpack(folder: Path, **changes: Any) -> list[Any]:
    tables = find_tables(folder)
    assert tables is not None
    options = {"columns": None, "on_progress": lambda *_: None, "leave_out": False}
    return unpack_tables(folder, tables, folder.with_name("unpacked"), **(options | changes))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_tables_that_datasets_saved_become_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, numbers in {"train": (0, 1, 2, 3), "validation": (4, 5), "test": (6, 7)}.items():
        save(tmp_path / "pets" / split, table(*numbers[:2]), *([table(*numbers[2:])] if numbers[2:] else []))
    (tmp_path / "pets/dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    with pytest.raises(DataError, match=naming("pets", "data prepare huggingface")):
        find_layout(tmp_path / "pets", leave_out=False)
    assert prepare("out", "--archives", "pets") == 0
    said = capsys.readouterr().out
    assert "other splits (1)" in said
    assert "next: bigbatch init out" in said
    assert main(["init", "out", "--workers", "1"]) == 0
    assert "images 4 to train and 2 to validate" in capsys.readouterr().out
    assert load_config(["--config", "out.yaml"]).data.num_classes == 2
    assert unpacked(tmp_path / "out") == {
        "train/cat/000000-000001.jpg": IMAGES[0],
        "train/guinea pig/000000-000002.png": IMAGES[1],
        "train/cat/000001-000001.webp": IMAGES[2],
        "train/guinea pig/000001-000002.jpg": IMAGES[3],
        "val/cat/000000-000001.png": IMAGES[4],
        "val/guinea pig/000000-000002.webp": IMAGES[5],
    }


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"], ["", None]),
        (["data/train-0-of-1.parquet", "data/valid-0-of-1.parquet"], ["train/", "val/"]),
        (["train/0000.parquet", "validation/0000.parquet"], ["train/", "val/"]),
        (["pets.parquet", "pets2.parquet"], ["", ""]),
    ],
)
def test_tables_of_parquet_find_their_splits(names: list[str], prefixes: list[str | None], tmp_path: Path) -> None:
    for number, name in enumerate(names):
        path = tmp_path / "pets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table(2 * number, 2 * number + 1), path)
    unpack(tmp_path / "pets")
    found = {data: path.rpartition("/")[0] for path, data in unpacked(tmp_path / "unpacked").items()}
    assert found == {
        IMAGES[2 * number + kind]: f"{prefix}{CLASSES[kind]}"
        for number, prefix in enumerate(prefixes)
        for kind in (0, 1)
        if prefix is not None
    }


def test_tables_that_do_not_say_their_columns_are_told(tmp_path: Path) -> None:
    rows = pa.table({"pixels": IMAGES[:2], "kind": ["cat", "dog"]})
    save(tmp_path / "pets", rows)
    with pytest.raises(DataError, match=naming("data-00000", "pixels, kind", "--columns")):
        unpack(tmp_path / "pets")
    with pytest.raises(DataError, match=naming("data-00000", "'label'", "pixels, kind")):
        unpack(tmp_path / "pets", columns=("pixels", "label"))
    assert not (tmp_path / "unpacked").exists()
    assert [finding.cases for finding in unpack(tmp_path / "pets", columns=("pixels", "kind"))] == [(), ()]
    assert {*unpacked(tmp_path / "unpacked")} == {"cat/000000-000001.jpg", "dog/000000-000002.png"}
    with pytest.raises(DataError, match=naming("unpacked", "exists")):
        unpack(tmp_path / "pets", columns=("pixels", "kind"))


def test_tables_sweep_up_after_runs_that_were_killed(tmp_path: Path) -> None:
    save(tmp_path / "saved", table(0, 1))
    (tmp_path / ".unpacked.0123.unfinished/images").mkdir(parents=True)
    unpack(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "unpacked"]


def test_tables_hostile_rows_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(IMAGES[0])
    cells = [
        ({"bytes": None, "path": str(tmp_path / "secret.jpg")}, "cat"),
        ({"bytes": encoded(Image.new("RGB", (4, 4)), "GIF"), "path": None}, "cat"),
        ({"bytes": IMAGES[0], "path": None}, "../.."),
        ({"bytes": IMAGES[0], "path": None}, None),
        (None, "cat"),
        ({"bytes": IMAGES[1], "path": "../../x.png"}, "dog"),
    ]
    save(tmp_path / "pets", pa.table({"image": [cell for cell, _ in cells], "label": [label for _, label in cells]}))
    found, _ = unpack(tmp_path / "pets", columns=("image", "label"))
    assert "row 1: image holds {'bytes': None, 'path': '/" in found.cases[0]
    assert max(map(len, found.cases)) < 250
    assert (found.is_problem, len(found.cases)) == (True, 5)
    assert {*unpacked(tmp_path / "unpacked")} == {"dog/000000-000006.png"}


def test_tables_that_are_damaged_or_of_no_training_split_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "pets", table(0, 1))
    file = tmp_path / "pets/data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(DataError, match=naming("data-00000", "damaged")):
        unpack(tmp_path / "pets")
    file.unlink()
    with pytest.raises(DataError, match=naming("data-00000", "damaged")):
        unpack(tmp_path / "pets")
    for text in ("{", "{}", '{"_data_files": 3}'):
        (tmp_path / "pets/state.json").write_text(text)
        with pytest.raises(DataError, match=naming("state.json", "datasets")):
            find_tables(tmp_path / "pets")
    (tmp_path / "pets/state.json").write_text('{"_data_files": [3, {}, {"filename": "../x.arrow"}]}')
    with pytest.raises(DataError, match=naming("pets", "no row")):
        unpack(tmp_path / "pets")
    for split in ("a", "b"):
        save(tmp_path / "parts" / split, table(0))
    (tmp_path / "parts/dataset_dict.json").write_text('{"splits": ["a", "b", "../pets"]}')
    with pytest.raises(DataError, match=naming("parts", "a, b", "train")):
        find_tables(tmp_path / "parts")
    save(tmp_path / "elsewhere", pa.table({"image": [{"bytes": None, "path": "a.jpg"}], "label": ["cat"]}))
    with pytest.raises(DataError, match=naming("elsewhere", "no row", "'path': 'a.jpg'")):
        unpack(tmp_path / "elsewhere", columns=("image", "label"))
    assert find_tables(tmp_path) is None
    assert prepare("t", "--archives", tmp_path) == 1
    with pytest.raises(SystemExit, match="2"):
        prepare("t", "--archives", tmp_path, "--columns", "one")


@pytest.mark.parametrize(("names", "classes"), [({"cat": 0}, {"0", "1"}), ([None, "dog"], {"dog"}), (["cat"], {"cat"})])
def test_tables_names_of_another_kind_name_nothing(names: object, classes: set[str], tmp_path: Path) -> None:
    features = FEATURES | {"label": {"_type": "ClassLabel", "names": names}}
    save(tmp_path / "pets", table(0, 1, features=features))
    unpack(tmp_path / "pets", leave_out=True)
    assert {path.parent.name for path in (tmp_path / "unpacked").rglob("*.*")} == classes


def test_tables_that_no_reader_can_follow_are_refused_by_name(tmp_path: Path) -> None:
    deep = "[" * 100_000
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/dataset_dict.json").write_text(deep)
    with pytest.raises(DataError, match=naming("dataset_dict.json", "datasets")):
        find_tables(tmp_path / "deep")
    save(tmp_path / "untold", table(0, 1).replace_schema_metadata({"huggingface": deep}))
    with pytest.raises(DataError, match=naming("data-00000", "--columns")):
        unpack(tmp_path / "untold")
    images = pa.array(IMAGES[:2])
    save(tmp_path / "twice", pa.Table.from_arrays([images, images, pa.array(["a", "b"])], ["x", "x", "y"]))
    with pytest.raises(DataError, match=naming("data-00000", "several columns 'x'")):
        unpack(tmp_path / "twice", columns=("x", "y"))
    no_text = pa.array([b"\xff", b"\xfe"]).cast(pa.string(), safe=False)
    save(tmp_path / "bytes", pa.Table.from_arrays([images, no_text], ["x", "y"]))
    with pytest.raises(DataError, match=naming("data-00000", "damaged")):
        unpack(tmp_path / "bytes", columns=("x", "y"))


def test_tables_without_pyarrow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "pets", table(0, 1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=naming("data-00000", "'.[huggingface]'")):
        unpack(tmp_path / "pets")
