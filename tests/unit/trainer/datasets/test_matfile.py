"""The reader of MAT 5 files: against files of another writer, a writer of ten lines, and the real class list."""

import base64
import csv
import random
import struct
import zlib

import pytest
from error_texts import naming
from mat_writer import cell, element, file_of, matrix, number, struct_array, text
from sample_images import REAL_DATA

from bigbatch.errors import DataError
from bigbatch.trainer.datasets.matfile import read_struct_array

FIELDS = ("ILSVRC2012_ID", "WNID", "num_children")

# scipy.io.savemat(..., do_compression=True): an array "other", then "synsets" with ImageNet's eight fields, three
# classes (kit numbers 1, 448, 449) and two groups of classes
BY_SCIPY = """
TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IEZyaSBOb3YgMjAgMTU6MTY6NDAgMjAyNgAAAAAAAAAAAAAA
AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAAMAAAAHic42NgYAgAYjYg5oDSIMAK5TMCMTOUBonll2SkFgFp
TiCWYEAHH+yhDAcAiwQEPA8AAABtAQAAeJzjY2BgeMHFwMAGpDmAmIkBAlihfBDNCMXsQFxcmVecWlIMFGdhEISKdwCxp09wWJCzkYGhUbynC8iA
cD8IDQfl+UUpxcgC6Tn5xSgCeaW58ckZmTkpRal5YAEUDsyMvNSS+IzUzPSMEqiWkqLEzLz4zNzE9NRiBj6goAUDwj9saP5hRMIgwAkVh4AP9iD9
Dkj6WbDo50TSLwDl5xkYGRpamltYQsXR3YHNHHY0c0D87MyS+LT8CgZy3AGMRoZEBXCwKhxeid0dpIUHRL8BAf0MaPqpZS/Z+gOmOFBmf40DBenA
1NjMwswEyR8GBMxhQTGHhSE5PyN/NP4HMP4FKIl/QxMTA3OU+CdUDrCimQPil6TmJWdA9ZPqjtF0AAUUlwMCFKQDCDDE4Q9i00F6UX5pAQNx5Qgj
in5GhgpKww/odXT/Y9PPhKZfAK79gz2yOZTWywOWjhhEKE4HRjjcMZoOSHEH5ekAAOIRZbY=
"""


def read(data, name="synsets", fields=FIELDS):
    return read_struct_array(data, name=name, fields=fields, origin="kit: meta.mat")


def rows(*values):
    return [dict(zip(FIELDS, row, strict=True)) for row in values]


def test_read_struct_array_a_file_of_another_writer():
    expected = rows((1, "n02119789", 0), (448, "n02536864", 0), (449, "n01440764", 0))
    expected += rows((4, "n00000001", 2), (5, "n00000002", 2))
    assert read(base64.b64decode(BY_SCIPY)) == expected


def test_read_struct_array_scipy_agrees(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    (tmp_path / "x.mat").write_bytes(base64.b64decode(BY_SCIPY))
    synsets = scipy_io.loadmat(str(tmp_path / "x.mat"), squeeze_me=True)["synsets"]
    assert read(base64.b64decode(BY_SCIPY)) == [{field: row[field] for field in FIELDS} for row in synsets]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_read_struct_array_both_byte_orders_plain_and_compressed(order, is_compressed):
    table = [(7, "n01440764", 0), (1.5, "ä€", 3)]
    body = struct_array("synsets", FIELDS, table, order=order)
    assert read(file_of(body, order=order, is_compressed=is_compressed)) == rows(*table)


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [
        *((1, "b", -3), (2, "B", 200), (3, "h", -300), (4, "H", 60_000), (5, "i", -70_000), (6, "I", 1 << 31)),
        *((7, "f", 0.25), (9, "d", 0.1), (12, "q", -(1 << 40)), (13, "Q", 1 << 63)),
    ],
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_read_struct_array_numbers_in_every_type_that_they_may_be_stored_in(kind, code, value, order):
    stored = element(kind, struct.pack(order + code, value), order=order)
    body = struct_array("x", ("a",), [(cell(6, stored, order=order),)], order=order)
    assert read(file_of(body, order=order), "x", ("a",)) == [{"a": value}]


@pytest.mark.parametrize(
    ("kind", "codec"), [(1, "ascii"), (2, "latin-1"), (4, "utf-16"), (16, "utf-8"), (17, "utf-16")]
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_read_struct_array_texts_in_every_encoding(kind, codec, order):
    words = "tench" if codec == "ascii" else "crème"
    suffix = {"<": "-le", ">": "-be"}[order] if codec == "utf-16" else ""
    stored = element(kind, words.encode(codec + suffix), order=order)
    body = struct_array("x", ("a",), [(cell(4, stored, order=order),)], order=order)
    assert read(file_of(body, order=order), "x", ("a",)) == [{"a": words}]


def test_read_struct_array_the_real_list_of_classes():
    meta = REAL_DATA.parent / "imagenet-meta/classes.csv"
    if not meta.is_file():
        pytest.skip("the real class list is not here; name the folder beside it in BIGBATCH_REAL_DATA")
    with open(meta, newline="") as file:
        expected = {int(row["ilsvrc2012_id"]): row["wnid"] for row in csv.DictReader(file)}
    table = [(number, wnid, 0) for number, wnid in sorted(expected.items())]
    found = read(file_of(struct_array("synsets", FIELDS, table), is_compressed=True))
    assert {row["ILSVRC2012_ID"]: row["WNID"] for row in found} == expected


GOOD = struct_array("synsets", FIELDS, [(1, "n01440764", 0)])
HDF5 = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ("MATLAB 5",)),
        (b"<html>404</html>" * 20, ("MATLAB 5",)),
        (HDF5 + bytes(512), ("MATLAB 5",)),
        (file_of(b""), ("'synsets'",)),
        (file_of(struct_array("others", FIELDS, [(1, "n01440764", 0)])), ("'synsets'",)),
        (file_of(matrix(6, (1, 1), "synsets", element(9, bytes(8)))), ("'synsets'",)),
        (file_of(struct_array("synsets", ("WNID", "num_children"), [("n01440764", 0)])), ("'ILSVRC2012_ID'",)),
        (file_of(struct_array("synsets", FIELDS, [(1, "n01440764")])), ("2 values", "1 elements", "3 fields")),
        (file_of(struct_array("synsets", FIELDS, [(number(1, 2), "n01440764", 0)])), ("read",)),
        (file_of(struct_array("synsets", FIELDS, [(cell(4, element(99, b"ab")), "n01440764", 0)])), ("99",)),
        (file_of(struct_array("synsets", FIELDS, [(text("a", b"\xff\xfe"), "n01440764", 0)])), ("utf-8",)),
        (file_of(element(15, zlib.compress(GOOD)[:40])), ("byte 0", "cut")),
        (file_of(element(15, b"not compressed")), ("decompress",)),
        (file_of(GOOD)[:-20], ("byte 0", "cut")),
    ],
)
def test_read_struct_array_what_is_wrong_is_said(data, parts):
    with pytest.raises(DataError, match=naming("kit: meta.mat", *parts, "official")):
        read(data)


def test_read_struct_array_a_cut_never_passes_for_the_whole():
    whole = file_of(struct_array("synsets", FIELDS, [(1, "n01440764", 0), (2, "n02102040", 0)]))
    for num_bytes in range(len(whole)):
        with pytest.raises(DataError):
            read(whole[:num_bytes])


def test_read_struct_array_a_byte_that_changed_is_read_or_refused_in_one_line():
    """It was seen to crash scipy's loadmat."""
    whole, draw = file_of(struct_array("synsets", FIELDS, [(1, "n01440764", 0), (2, "n02102040", 0)])), random.Random(0)
    refused = []
    for _ in range(3000):
        data = bytearray(whole)
        data[draw.randrange(128, len(whole))] = draw.randrange(256)
        try:
            read(bytes(data))
        except DataError as error:
            refused.append(str(error))
    assert 300 < len(refused) < 2700
    assert not any("\n" in line for line in refused)


def test_read_struct_array_a_number_of_elements_that_is_only_claimed_costs_nothing():
    claimed = struct_array("synsets", FIELDS, [(1, "n01440764", 0)]).replace(
        struct.pack("<2i", 1, 1), struct.pack("<2i", 1 << 30, 1), 1
    )
    with pytest.raises(DataError, match=naming("kit: meta.mat", "3 values", "1073741824 elements", "3 fields")):
        read(file_of(claimed))


def test_read_struct_array_no_bomb_is_unpacked(monkeypatch):
    monkeypatch.setattr("bigbatch.trainer.datasets.matfile.MAX_BYTES", 1 << 16)
    bomb = file_of(element(1, bytes(1 << 20)) + GOOD, is_compressed=True)
    with pytest.raises(DataError, match=naming("kit: meta.mat", "byte 0", "cut")):
        read(bomb)
