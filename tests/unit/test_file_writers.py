"""Only bigbatch/files.py writes files, and it follows no link: checked in the sources of all modules.

A module that opens a file to write in another way stands in ALLOWED with the reason.
"""

import ast
from collections.abc import Iterator

import pytest
from source_calls import ROOT, calls, calls_by_file, name_and_owner

ALLOWED = {
    "bigbatch/files.py": "the one place",
    "bigbatch/cli.py": "/dev/null",
    "bigbatch/locks.py": "locks, without a byte in them; follows no link",
    "comm/backends/node_memory.py": "memory of this job, under a name that it drew",
    "comm/rendezvous/hang_report.py": "a temporary file under a new name",
    "tools/emulate/keeper.py": "/dev/null",
    "tools/emulate/namespaces.py": "the kernel's /proc/self",
    "tools/emulate/slurm.py": "a key, with its mode, in a folder that is new and private",
    "launch/jobs/exit_file.py": "a new file",
    "trainer/inference/formats.py": "the hidden file of replacing, by its name",
    "trainer/loggers/tensorboard.py": "TensorBoard's own files, in a folder that is not a link",
    "trainer/report/output.py": "/dev/null",
    "trainer/folder/owner.py": "a hard link to a file of its own",
    "experiments/search/study.py": "Optuna's journal, which is not a link",
}
METHODS = ("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "savefig", "FileHandler", "SummaryWriter")
METHODS += ("mkstemp", "NamedTemporaryFile", "truncate", "memmap", "to_csv", "tofile", "extractall")
BY_MODULE = {
    "os": ("open", "mknod", "mkfifo", "link", "symlink", "truncate"),
    "shutil": ("copy", "copy2", "copyfile", "copytree", "move"),
    "np": ("save", "savez", "savetxt"),
    "json": ("dump",),
    "torch": ("save",),
    "yaml": ("dump", "safe_dump"),
}
STREAMS = ("file", "buffer", "stream")
"""Names of what is open already, to which something is saved."""


def writers(source: str) -> Iterator[str]:
    """Return each call that opens a file to write, or may."""
    return calls(source, _writes)


def _writes(call: ast.Call) -> bool:
    function, words = call.func, [*call.args, *(keyword.value for keyword in call.keywords)]
    name, owner = name_and_owner(call)
    words = words[1:] if name == "fdopen" or isinstance(function, ast.Name) else words  # what is opened comes first
    texts = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    if name in ("savefig", "save") and any(isinstance(word, ast.Name) and word.id in STREAMS for word in words):
        return False
    if owner in BY_MODULE:
        is_read = owner == "os" and name == "open" and not any(f"O_{kind}" in ast.unparse(call) for kind in WRITES)
        is_text = owner == "yaml" and len(call.args) == 1
        return name in BY_MODULE[owner] and not is_read and not is_text
    if name in ("open", "fdopen"):
        return any(set(text) <= set("rwaxbt+U") and set(text) & set("wax+") for text in texts)
    if name == "save":
        return any(text.upper() in ("JPEG", "PNG") for text in texts)
    return name in METHODS and not (name == "write_text" and len(call.args) == 2)  # RunDir's


WRITES = ("WRONLY", "RDWR", "CREAT", "APPEND", "TRUNC")


def test_files_are_written_in_one_place() -> None:
    found = calls_by_file(writers)
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set(), "these write nothing any more"


def dumps_for_others(source: str) -> list[str]:
    """The calls of json.dumps that are printed, encoded or indented, as files and outputs for other programs are."""
    if "json.dumps" not in source:
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for_others = [node for node in calls if any(keyword.arg == "indent" for keyword in node.keywords)]
    for_others += [word for node in calls if ast.unparse(node.func) == "print" for word in node.args]
    return [ast.unparse(node) for node in for_others if ast.unparse(node).startswith("json.dumps")]


def test_json_for_other_programs_has_no_nan() -> None:
    rooms = ("trainer", "launch", "tools", "experiments")
    found = {path: dumps_for_others(path.read_text()) for room in rooms for path in (ROOT / room).rglob("*.py")}
    assert {str(path): calls for path, calls in found.items() if calls} == {}, "call bigbatch.files.as_json"
    assert len(dumps_for_others("print(json.dumps(a)); file.write(json.dumps(b, indent=1).encode())")) == 2


@pytest.mark.parametrize(
    "source",
    [
        "Path('a').write_text('x')",
        "open('a', 'w')",
        "open(path, mode='ab')",
        "path.open('x')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "figure.savefig(path, dpi=120)",
        "shutil.copy(a, b)",
        "json.dump(a, file)",
        "torch.save(state, path)",
        "logging.FileHandler(path)",
        "image.save(path, 'JPEG')",
    ],
)
def test_reader_sees_a_writer(source: str) -> None:
    assert len(list(writers(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "open('a')",
        "path.open('rb')",
        "os.open(path, os.O_RDONLY)",
        "figure.savefig(file, format='png')",
        "yaml.safe_dump(value)",
        "rundir.write_text(rundir.summary, text)",
        "image.save(buffer, 'JPEG')",
        "tarfile.open(fileobj=file, mode='r:')",
    ],
)
def test_reader_lets_others_pass(source: str) -> None:
    assert list(writers(source)) == []
