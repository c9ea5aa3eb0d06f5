"""Files of others are read through bigbatch/files.py, which limits their size: checked in the sources of all modules.

A module that reads a file in another way stands in ALLOWED with the reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_calls import calls, calls_by_file, name_and_owner

from bigbatch.files import LINES_BYTES, RECORD_BYTES, open_plain, read_end, read_lines, read_plain

ALLOWED = {
    "bigbatch/files.py": "the one place",
    **dict.fromkeys(
        (
            *("bigbatch/boot.py", "comm/rendezvous/ports.py", "launch/jobs/ranks_here.py"),
            *("tools/emulate/cluster.py", "tools/emulate/slurm.py"),
            *("trainer/machine/host.py", "trainer/machine/kernel_files.py", "trainer/machine/limits.py"),
            "trainer/machine/numa.py",
        ),
        "the kernel's files",
    ),
    **dict.fromkeys(
        (
            *("comm/rendezvous/places.py", "comm/tuning/commit.py", "launch/launchers/k8s_manifest.py"),
            *("tools/simulate/shapes.py", "trainer/config/packaged.py"),
        ),
        "files of this package",
    ),
    "launch/jobs/validation.py": "the output of a command, up to a limit",
    "trainer/checkpoint/checkpoint.py": "after a check of its size",
    "trainer/checkpoint/weights.py": "safetensors, whose library maps the file and limits its header",
    "trainer/inference/formats.py": "what it has just written",
}
METHODS = ("read_text", "read_bytes")
FUNCTIONS = ("safe_open", "load_file", "fromfile", "loadtxt", "ZipFile")
BY_MODULE = {"np": ("load",), "torch": ("load",), "Image": ("open",), "tarfile": ("open",), "gzip": ("open",)}
IN_MEMORY = ("BytesIO", "(file)", "(file,")
"""Sources of what was read already, or opened by open_plain."""


def readers(source: str) -> Iterator[str]:
    """Return each call that reads a file by its path."""
    return calls(source, _reads)


def _reads(call: ast.Call) -> bool:
    function, text = call.func, ast.unparse(call)
    name, owner = name_and_owner(call)
    if any(each in text for each in IN_MEMORY):
        return False
    if name == "open" and owner not in (*BY_MODULE, "os"):  # a mode, or none, after a path
        modes = [word.value for word in (*call.args, *(each.value for each in call.keywords)) if _is_mode(word)]
        return "r" in "".join(modes) or (isinstance(function, ast.Name) and not modes)
    if isinstance(function, ast.Attribute) and name in (*METHODS, *BY_MODULE.get(owner, ())):
        return True
    return name in FUNCTIONS


def _is_mode(word: ast.expr) -> bool:
    return isinstance(word, ast.Constant) and isinstance(word.value, str) and set(word.value) <= set("rwaxbt+")


def test_files_are_read_in_one_place() -> None:
    found = calls_by_file(readers)
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set(), "these read nothing any more"


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text()",
        "path.read_bytes()",
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "np.load(path)",
        "Image.open(path)",
        "torch.load(path, weights_only=True)",
    ],
)
def test_reader_sees_a_reader(source: str) -> None:
    assert len(list(readers(source))) == 1


@pytest.mark.parametrize(
    "source", ["open(path, 'xb')", "read_text(path)", "np.load(io.BytesIO(data))", "root.open(split)", "os.open(a, b)"]
)
def test_reader_lets_others_pass(source: str) -> None:
    assert list(readers(source)) == []


def sparse(path: Path, num_bytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def test_large_file_is_refused_with_size_and_limit(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a", RECORD_BYTES + 1)
    with pytest.raises(OSError, match=r"it has 16,777,217 bytes and may have 16,777,216: name another"):
        read_plain(path)
    with pytest.raises(OSError, match="may have 5:"), open_plain(path, most=5):
        pass
    assert len(read_plain(sparse(path, RECORD_BYTES))) == RECORD_BYTES


def test_file_that_claims_to_be_empty_is_limited() -> None:
    assert Path("/proc/self/maps").stat().st_size == 0
    with pytest.raises(OSError, match="may have 100:"):
        read_plain("/proc/self/maps", most=100)


def test_long_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"first\nsecond")
    assert list(read_lines(path)) == [b"first\n", b"second"]
    with path.open("r+b") as file:
        file.truncate(2 << 30)
    lines = read_lines(path)
    assert next(lines) == b"first\n"
    with pytest.raises(OSError, match="one of its lines has 16,777,217 bytes"):
        next(lines)
    with pytest.raises(OSError, match="may have 17,179,869,184"):
        next(read_lines(sparse(path, LINES_BYTES + 1)))


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"start\nend\xff\n")
    assert read_end(path, start=6) == "end\ufffd\n"
    with sparse(path, 2 << 30).open("ab") as file:
        file.write(b"the reason\n")
    text = read_end(path)
    assert len(text) == RECORD_BYTES
    assert text.endswith("the reason\n")
