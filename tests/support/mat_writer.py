"""Writes MAT 5 files, for the tests of what reads them ("MAT-File Format", The MathWorks, chapter 1)."""

import struct
import zlib


def element(kind, body, *, order="<"):
    """A data element, padded to eight bytes."""
    return struct.pack(f"{order}II", kind, len(body)) + body + bytes(-len(body) % 8)


def matrix(array_class, shape, name, *content, order="<"):
    """miMATRIX: flags, dimensions, name, content."""
    head = element(6, struct.pack(f"{order}II", array_class, 0), order=order)
    head += element(5, struct.pack(f"{order}{len(shape)}i", *shape), order=order)
    return element(14, head + element(1, name.encode(), order=order) + b"".join(content), order=order)


def cell(array_class, content, *, order="<"):
    """An array without a name, as the value of a field."""
    return matrix(array_class, (1, 1), "", content, order=order)


def number(*values, order="<"):
    """A row of doubles."""
    return matrix(6, (1, len(values)), "", element(9, struct.pack(f"{order}{len(values)}d", *values)), order=order)


def text(words, encoded=None, *, order="<"):
    """A row of characters in UTF-8."""
    body = words.encode() if encoded is None else encoded
    return matrix(4, (1, len(words)), "", element(16, body, order=order), order=order)


def struct_array(name, fields, rows, *, order="<"):
    """A column of structs; a value is a number, a text or an array that is made already."""
    names = b"".join(field.encode().ljust(32, b"\0") for field in fields)
    length = struct.pack(f"{order}HHi", *((4, 5) if order == ">" else (5, 4)), 32)  # the small form
    content = [length, element(1, names, order=order)]
    for row in rows:
        for value in row:
            if isinstance(value, bytes):
                content.append(value)
            elif isinstance(value, str):
                content.append(text(value, order=order))
            else:
                stored = element(9, struct.pack(f"{order}d", value), order=order)
                content.append(cell(6, stored, order=order))
    return matrix(2, (len(rows), 1), name, *content, order=order)


def file_of(body, *, order="<", is_compressed=False):
    """A whole file with one element."""
    header = b"MATLAB 5.0 MAT-file".ljust(124) + (b"\x00\x01IM" if order == "<" else b"\x01\x00MI")
    if is_compressed:
        packed = zlib.compress(body)
        body = struct.pack(f"{order}II", 15, len(packed)) + packed
    return header + body
