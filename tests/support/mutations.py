"""What an attacker or a bad disk makes of a valid file: cuts, flips, insertions and values that trip parsers."""

from random import Random

TOKENS = (
    *(b"", b"\0", b"\n", b"\r", b"\t", b" ", b"'", b'"', b"\\", b"%", b"#", b"&", b"*", b"!", b"|", b">", b"-", b"--"),
    *(b"{", b"}", b"[", b"]", b":", b",", b"[]", b"{}", b"null", b"true", b"~", b"NaN", b"Infinity", b"-Infinity"),
    *(b"0", b"-1", b"1e400", b"-0.0", b"9" * 25, b"9" * 5000, b"0x10", b"1_000", b"0.1", b"1:30", b"2026-13-45"),
    *("\u0661\u0662".encode(), "\u00b2".encode(), "\u2028".encode(), b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b"../", b"/", b"~/", b"../../../../tmp/x", b"$(touch x)", b"`touch x`", b";touch x", b"\x1b[31m", b"%s%n"),
    *(b"!!python/object/apply:os.system [touch x]", b"<<: *a", b"&a [*a]", b"[" * 2000, b'{"a":' * 2000, b"- " * 500),
)
"""Texts that some parser somewhere takes for more than text."""


KINDS = ("cut", "drop", "repeat", "flip", "swap", "insert", "insert")
MOST_EDITS = 4


def mutate(data: bytes, draw: Random) -> bytes:
    """Edit valid bytes one to four times, at any place."""
    for _ in range(draw.randint(1, MOST_EDITS)):
        data = _edit(data, draw)
    return data


def _edit(data: bytes, draw: Random) -> bytes:
    kind, token = draw.choice(KINDS), draw.choice(TOKENS)
    first, last = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    if kind == "cut":
        return data[:first]
    if kind == "drop":
        return data[:first] + data[last:]
    if kind == "repeat":
        return data[:last] + data[first:]
    if kind == "flip" and first < len(data):
        return data[:first] + bytes([data[first] ^ (1 << draw.randint(0, 7))]) + data[first + 1 :]
    if kind == "swap":
        return data[:first] + token + data[first + len(token) :]
    return data[:first] + token + data[first:]
