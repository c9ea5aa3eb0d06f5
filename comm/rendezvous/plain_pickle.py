"""Read pickles of plain data without executing code, in memory proportional to their length."""

import io
import pickle
import re
from typing import Any, NoReturn

_PLAIN = re.compile(
    rb"(?:"
    rb"[N\x88\x89(\]})tlaesud\x85-\x87\x94]"  # None, bools; marks, lists, dicts, tuples; remember
    rb"|\x80."  # protocol
    rb"|[Kqh].|M..|J....|G.{8}"  # integers of 1, 2 and 4 bytes, remember and recall, a float
    rb"|j..[\x00-\x3f]\x00|r..[\x00-\x3f]\x00"  # the same, with larger numbers: remembering takes memory by its number
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9})"  # longer integers
    rb"|\x95.{8}"  # frame
    rb")*",
    re.S,
)
_TEXTS = {ord("X"): 4, 0x8C: 1}
"""Opcode of a text -> size of its length field in bytes."""
_PROTOCOL, _STOP = b"\x80", ord(".")
_CALLS = b"cibBoRQP\x81\x82\x83\x84\x92\x93"
"""Opcodes that import, build or call objects."""


class NotPlain(ValueError):
    """The bytes are not a pickle of plain data; the message says what they are."""


class RunsCode(NotPlain):
    """Reading the pickle would have called functions."""


def load_plain(data: bytes) -> Any:
    """Read a pickle of dicts, lists, tuples, texts, numbers, bools and None. Raises: NotPlain.

    All opcodes are checked before any is executed.
    """
    _check(data)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes raise almost anything
        raise NotPlain(f"it is damaged: {str(error) or type(error).__name__}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _check(data: bytes) -> None:
    """Check all opcodes up to STOP. Raises: NotPlain for one that makes anything but plain data."""
    if data[:1] != _PROTOCOL:
        raise NotPlain("it is no pickle" if data else "it is empty")
    at = 0
    while True:
        run = _PLAIN.match(data, at)
        at = run.end() if run else at
        if at >= len(data):
            raise NotPlain("it is cut off")
        operation = data[at]
        if operation == _STOP:
            return
        if operation in _CALLS:
            raise RunsCode("it would run code as it is read, and data alone is expected")
        if operation not in _TEXTS:
            raise NotPlain("it holds more than plain data, or is cut off")
        start = at + 1 + _TEXTS[operation]
        at = start + int.from_bytes(data[at + 1 : start], "little")
