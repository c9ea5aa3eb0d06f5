"""Just enough of MATLAB's file format (MAT 5) for the class list of ImageNet's development kit.

Source: "MAT-File Format", The MathWorks, chapter 1. Data only: nothing in such a file is executed. Not scipy's loadmat,
which a damaged file crashes, and which believes the sizes that a header claims (docs/decisions/048).
"""

import struct
import zlib
from collections.abc import Collection, Iterator
from math import prod

from bigbatch.errors import DataError

Value = float | int | str

MAX_BYTES = 1 << 26
"""A compressed variable is unpacked up to this (ImageNet's class list has about 2 MB)."""

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_CLASS_STRUCT, _CLASS_CHAR = 2, 4
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16-", 16: "utf-8", 17: "utf-16-", 18: "utf-32-"}
_NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}


def read_struct_array(data: bytes, *, name: str, fields: Collection[str], origin: str) -> list[dict[str, Value]]:
    """Return the elements of the struct array called name, each with its texts and single numbers in fields.

    Raises: DataError naming origin if data is no MAT 5 file, is damaged, or has no such array or field.
    """
    if len(data) < _HEADER_BYTES or data[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
        raise DataError(f"{origin}: is no MATLAB 5 file; take the one from the official archive")
    # the two bytes of the number "MI", as the machine that wrote it had them in memory
    order = "<" if data[126:128] == b"IM" else ">"
    try:
        return _find(memoryview(data)[_HEADER_BYTES:], order, name=name, fields=fields)
    except (struct.error, zlib.error, ValueError, LookupError) as error:
        raise DataError(f"{origin}: cannot be read ({error}); take the one from the official archive") from error


def _find(data: memoryview, order: str, *, name: str, fields: Collection[str]) -> list[dict[str, Value]]:
    for kind, body in _elements(data, order):
        if kind == _COMPRESSED:
            # zlib.decompress has no bound, and a small body may claim gigabytes
            unpacked = zlib.decompressobj().decompress(body, MAX_BYTES)
            kind, body = next(_elements(memoryview(unpacked), order), (0, body))
        if kind == _MATRIX:
            parts = [part for _, part in _elements(body, order)]
            if len(parts) > 2 and parts[2] == name.encode() and parts[0][0 if order == "<" else 3] == _CLASS_STRUCT:
                return _struct_array(parts, order, fields=fields)
    raise ValueError(f"no struct array {name!r}")


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield (type, body) of the data elements that lie one after the other."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        if kind >> 16:  # the small form: up to four bytes beside the type
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start = at + 8
            end = start + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > min(end, len(data)):
            raise ValueError(f"element at byte {at} is cut off")
        yield kind, data[start : start + size]
        at = end


def _struct_array(parts: list[memoryview], order: str, *, fields: Collection[str]) -> list[dict[str, Value]]:
    """Read parts: flags, dimensions, name, length of a field name, field names, a matrix per element and field."""
    num_elements = prod(struct.unpack(f"{order}{len(parts[1]) // 4}i", parts[1]))
    (length,) = struct.unpack(f"{order}i", parts[3])
    names = [bytes(parts[4][i : i + length]).split(b"\0")[0].decode() for i in range(0, len(parts[4]), length)]
    if missing := sorted(set(fields) - set(names)):
        raise ValueError(f"no field {missing[0]!r}")
    cells = parts[5:]
    if len(cells) != num_elements * len(names):
        raise ValueError(f"{len(cells)} values for {num_elements} elements of {len(names)} fields")
    columns = {field: names.index(field) for field in fields}
    return [
        {field: _value(cells[row * len(names) + column], order) for field, column in columns.items()}
        for row in range(num_elements)
    ]


def _value(matrix: memoryview, order: str) -> Value:
    """Read a text, or a single number."""
    (_, flags), _, _, (kind, body), *_ = _elements(matrix, order)
    if flags[0 if order == "<" else 3] == _CLASS_CHAR:
        codec = _TEXTS[kind]
        byte_order = "le" if order == "<" else "be"
        return bytes(body).decode(codec + byte_order if codec.endswith("-") else codec)
    (number,) = struct.unpack(f"{order}{_NUMBERS[kind]}", body)
    return int(number) if float(number).is_integer() else float(number)
