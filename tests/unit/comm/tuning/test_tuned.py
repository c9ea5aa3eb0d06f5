"""The stored file of comm tune, and its refusals."""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from error_texts import naming
from spoiled_records import NO_RECORDS, Spoiled, spoil

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.tuning.tuned import (
    Tuned,
    default_path,
    fingerprint,
    make_cluster,
    read_tuned,
    require_writable,
    write_tuned,
)
from bigbatch.errors import TunedError

GROUPS = ((0, 1), (2, 3))
FACTS = {"backend": "tcp", "wire_dtype": None, "device": "cpu", "reduce_dtype": "fp32", "buffers": "torch"}
CLUSTER = make_cluster(GROUPS, **FACTS)
TENSORS = (TensorSpec("fc.weight", 1000, 4, "float32"), TensorSpec("conv.weight", 2000, 4, "float32"))
TUNED = Tuned(
    cluster=CLUSTER,
    model="small",
    tensors=TENSORS,
    table=HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "ring"))),
    sizes=PlanSizes(8000, 12_000, 4000),
    command="bigbatch comm tune --config small",
    evidence={"ready_seconds": {"fc.weight": 0.5}},
)


def test_tuned_file_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new/tuned.json"
    for tuned in (TUNED, dataclasses.replace(TUNED, sizes=PlanSizes(1, 2, None), evidence={})):
        write_tuned(tuned, path)
        assert read_tuned(path) == tuned
    assert [p.name for p in path.parent.iterdir()] == ["tuned.json"]  # nothing half-written beside it
    tuned.require_cluster(CLUSTER, path=path)
    tuned.require_model(TENSORS[::-1], path=path)  # the order of parameters is not a difference


@pytest.mark.parametrize(
    ("groups", "changed", "fact", "there", "here"),
    [
        (((0, 1),), {}, "world_size", "4", "2"),
        (((0, 1, 2), (3,)), {}, "group_sizes", "2+2", "3+1"),
        (((0, 2), (1, 3)), {}, "placement", "block", "scattered"),
        (GROUPS, {"backend": "gloo"}, "backend", "tcp", "gloo"),
        (GROUPS, {"wire_dtype": "float16"}, "comm.wire_dtype", "null", "float16"),
        (GROUPS, {"buffers": "registered"}, "comm.buffers", "torch", "registered"),
        (GROUPS, {"device": "NVIDIA H200"}, "device", "cpu", "NVIDIA H200"),
    ],
)
def test_tuned_file_of_another_cluster_is_refused(
    groups: Any, changed: dict[str, Any], fact: str, there: str, here: str
) -> None:
    other = make_cluster(groups, **FACTS | changed)
    named = naming("a.json", f" {fact} {there} there", f" {here} here", "bigbatch comm tune --config small")
    with pytest.raises(TunedError, match=named):
        TUNED.require_cluster(other, path=Path("a.json"))


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "is_refused"),
    [
        ("float32", None, False),
        ("float32", "float32", False),
        ("float32", "float16", True),
        ("bfloat16", None, True),
        ("bfloat16", "float32", True),
        ("float64", "float16", False),
    ],
)
def test_tuned_file_of_other_sums_is_refused_where_half_precision_travels(
    dtype: str, wire_dtype: str | None, is_refused: bool, tmp_path: Path
) -> None:
    """A file of sums that were rounded at each hop."""
    path = tmp_path / "a.json"
    here = make_cluster(GROUPS, **FACTS | {"wire_dtype": wire_dtype})
    there = dataclasses.replace(here, reduce_dtype="wire")
    write_tuned(dataclasses.replace(TUNED, cluster=there, tensors=(TensorSpec("a", 10, 2, dtype),)), path)
    read_tuned(path).require_cluster(there, path=path)
    if not is_refused:
        read_tuned(path).require_cluster(here, path=path)
        return
    with pytest.raises(TunedError, match=naming(path, "comm.reduce_dtype wire there, fp32 here", "bigbatch comm tune")):
        read_tuned(path).require_cluster(here, path=path)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (TENSORS[:1], ("conv.weight", "this model's")),
        ((*TENSORS, TensorSpec("bias", 1, 4, "float32")), (" bias ", "that model's")),
        ((TENSORS[0], TensorSpec("conv.weight", 2001, 4, "float32")), ("conv.weight", "2000 float32", "2001 float32")),
        ((TENSORS[0], TensorSpec("conv.weight", 2000, 2, "float16")), ("conv.weight", "2000 float32", "2000 float16")),
    ],
)
def test_tuned_file_of_another_model_is_refused(tensors: tuple[TensorSpec, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(TunedError, match=naming("a.json", *named, "bigbatch comm tune --config small", " --config")):
        TUNED.require_model(tensors, path=Path("a.json"))
    TUNED.require_cluster(CLUSTER, path=Path("a.json"))


def test_placement() -> None:
    def placement(*groups: tuple[int, ...]) -> str:
        return make_cluster(groups, **FACTS).placement

    assert placement((0, 1), (2, 3)) == placement((2, 3), (0, 1)) == placement((0,), (1,)) == "block"
    assert placement((0, 2), (1, 3)) == placement((0, 1, 3), (2,)) == "scattered"


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        *((each, ()) for each in (*NO_RECORDS, lambda data: b"no JSON", lambda data: b'"text"')),
        (spoil(lambda record: record.update(format="bigbatch comm tune 2")), ("form", "'bigbatch comm tune 1'")),
        (spoil(lambda record: record.pop("table")), ("damaged", "'table'")),
        (
            spoil(lambda record: record.update(table=[[5, "ring"]])),
            ("damaged", "hybrid table", "up_to_bytes=null"),
        ),
        (spoil(lambda record: record.update(fusion={"buffer": 1})), ("damaged", "'buffer'")),
        (spoil(lambda record: record.update(cluster={})), ("damaged", "'group_sizes'")),
        (spoil(lambda record: record.update(tensors=[])), ("damaged", "tensors", "fingerprint")),
    ],
)
def test_tuned_file_that_is_damaged_is_refused(spoiled: Spoiled, named: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_tuned(TUNED, path)
    path.write_bytes(spoiled(path.read_bytes()))
    with pytest.raises(TunedError, match=naming(path, *named, "bigbatch comm tune")):
        read_tuned(path)


def test_tuned_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(
        TunedError, match=naming("read", tmp_path / "absent.json", "No such file or directory", "bigbatch comm tune")
    ):
        read_tuned(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(TunedError, match=naming("write", tmp_path / "file", "File exists", "--output")):
        write_tuned(TUNED, tmp_path / "file/a.json")
    (tmp_path / "a.json").mkdir()
    with pytest.raises(TunedError, match=naming("write", tmp_path / "a.json", "Is a directory", "--output")):
        write_tuned(TUNED, tmp_path / "a.json")
    assert {p.name for p in tmp_path.iterdir()} == {"file", "a.json"}  # nothing half-written


def test_file_in_a_folder_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root may write anywhere
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=denied))
    with pytest.raises(TunedError, match=naming("write", tmp_path / "a.json", "Permission denied", "--output")):
        require_writable(tmp_path / "a.json")


def test_tuned_file_is_one_per_cluster_and_model() -> None:
    uneven = make_cluster(((0, 1, 2), (3,)), **FACTS)
    assert str(default_path(CLUSTER, "small", TENSORS)).startswith("tuned/small-tcp-2x2-")
    assert str(default_path(uneven, "small", TENSORS)).startswith("tuned/small-tcp-3+1-")
    paths = {
        default_path(CLUSTER, "small", TENSORS),
        default_path(CLUSTER, "small", TENSORS[:1]),
        default_path(dataclasses.replace(CLUSTER, wire_dtype="float16"), "small", TENSORS),
    }
    assert len(paths) == 3
    assert fingerprint(TENSORS) == fingerprint(TENSORS[::-1])
