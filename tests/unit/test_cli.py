"""The command's own behaviour: its help, its exit codes, what it shows of an error."""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bigbatch
from bigbatch import cli, errors, groups

TOLD = "from bigbatch.errors import tell; tell('one line')"
"""In a script of one's own."""


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["--version"], 0), ([], 2), (["trian"], 2)])
def test_exit_codes(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == code
    output = capsys.readouterr()
    assert "bigbatch" in output.out + output.err
    if argv == ["--help"]:
        assert all(f"\n  {name} " in output.out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("program", "of_stdout"),
    [(["-m", "bigbatch", "--version"], True), (["-c", TOLD], False)],
)
def test_lines_are_written_whole_as_other_ranks_write_beside(program: list[str], of_stdout: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps each write apart
    with ours, theirs:
        stdout, stderr = (theirs, subprocess.DEVNULL) if of_stdout else (subprocess.DEVNULL, theirs)
        subprocess.run([sys.executable, "-u", *program], stdout=stdout, stderr=stderr, check=False)
        theirs.close()
        writes = list(iter(lambda: ours.recv(4096), b""))
    assert len(writes) == 1
    assert writes[0].startswith(b"bigbatch")
    assert writes[0].endswith(b"\n")


def test_unreadable_words_change_nothing() -> None:
    assert subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "-", sys.executable, "-c", TOLD], check=False).returncode == 0


def test_garbage_is_collected_in_a_command_but_not_while_it_is_imported(tmp_path: Path) -> None:
    command = "import gc\nat_import = gc.isenabled()\nmain = lambda _: 40 + 2 * at_import + gc.isenabled()\n"
    (tmp_path / "command.py").write_text(command)
    program = (
        "import sys; from bigbatch import cli; cli.COMMANDS['train'] = 'command', ''; sys.exit(cli.main(['train']))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 41


def test_streams_that_the_caller_has_closed_are_opened_before_any_file(tmp_path: Path) -> None:
    """Else a file gets the number of standard output, and sys.stdout is None."""
    program = (
        "import os, sys; from bigbatch import cli; cli._find_command = lambda _: lambda _: print('told') or 0\n"
        f"code = cli.main(['train']); file = open({str(tmp_path / 'a')!r}, 'w'); assert file.fileno() > 2\n"
        "sys.exit(code)"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", program]
    assert subprocess.run(command, check=False).returncode == 0


UNENDED = "cli._find_command = lambda _: lambda _: print('no line end', end='') or 0"
"""In place of a command, whose words stay in the buffer."""


@pytest.mark.parametrize(
    ("prepare", "argv"),
    [("", ["launch", "local", "--help"]), (UNENDED, ["train"])],
)
def test_output_without_a_reader_ends_every_command_alike(prepare: str, argv: list[str]) -> None:
    program = f"import sys; from bigbatch import cli; {prepare}\nsys.exit(cli.main(sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program, *argv]
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (errors.PIPE_CLOSED, b"")


def test_main_handles_richs_error_on_a_pipe_without_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> int:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904  # as rich's Console.on_broken_pipe

    monkeypatch.setattr(cli, "_find_command", lambda _: run)
    assert cli.main(["report"]) == errors.PIPE_CLOSED


def test_main_refuses_a_work_folder_that_was_deleted(tmp_path: Path) -> None:
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "-", sys.executable, "-m", "bigbatch", "launch", "local"]
    command += ["--", "train"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == errors.FAILED
    (line,) = done.stderr.splitlines()
    assert line.startswith("bigbatch: the work folder was deleted (")


@pytest.mark.parametrize("of_file", [(), ("/there/is/x.npy",)])
def test_main_takes_a_full_disk_for_no_defect(
    of_file: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *of_file)

    monkeypatch.setattr(cli, "_find_command", lambda _: fill)
    assert cli.main(["train"]) == errors.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("cannot be written (No space left on device): free some disk")
    assert "".join(of_file) in line


def test_exit_codes_are_all_on_their_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "failure-model.md"
    explained = [int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(), re.M)]
    codes = [value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)]
    assert explained == [0, *sorted(codes)]


def test_main_shows_the_traceback_of_a_defect_and_not_of_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", "no/such/run"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "train", ("bigbatch.errors", ""))  # a module without main
    assert cli.main(["train"]) == 7
    assert "AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["launch", "local", "--ranks=--", "--", "train"], ["simulate", "--gpus=--"]])
def test_main_refuses_two_dashes_for_a_value(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == errors.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert "=--: -- is not a value" in line


def test_main_leaves_two_dashes_to_a_job_s_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--python", "--", "examples/language_model.py", "--separator=--"]
    assert cli.main(["launch", "local", "--ranks", "1", "--dry-run", *own]) == 0
    assert "--separator=--" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [["data", "check", "PATH"], ["launch", "local", "--dry-run", "--", "train", "--config", "PATH"]],
)
def test_main_takes_a_path_that_may_not_be_looked_at_for_no_defect(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = "x" * 300  # too long for a name; a folder that one may not search raises alike, but not for root
    assert cli.main([path if word == "PATH" else word for word in argv]) == errors.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert path in line
    assert "(File name too long); name another path, or check its permissions" in line


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_main_takes_no_interruption_while_importing_for_a_defect(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(module: str) -> None:
        raise error

    monkeypatch.setattr(groups, "import_module", interrupted)
    assert cli.main(["train"]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('libx.so: failed to map')", "libx.so: failed to map"),
        ("raise OSError('libx.so: gone')", "libx.so: gone"),
        ("x = 1", "cannot import name 'thing'"),
    ],
)
def test_main_names_a_package_that_cannot_be_loaded(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some_wheel.py").write_text(text)
    (tmp_path / "a_command.py").write_text("from some_wheel import thing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bigbatch, "__path__", [*bigbatch.__path__, str(tmp_path)])
    monkeypatch.setitem(cli.COMMANDS, "train", ("bigbatch.a_command", ""))
    assert cli.main(["train"]) == errors.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bigbatch: some_wheel cannot be loaded here: {said}")


def test_main_names_what_is_not_there_and_takes_a_name_that_a_module_lacks_for_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "train", ("no_such_wheel.part", ""))
    assert cli.main(["train"]) == errors.FAILED
    assert capsys.readouterr().err.startswith("bigbatch: no_such_wheel cannot be loaded here: No module named")
    monkeypatch.setitem(cli.COMMANDS, "train", ("bigbatch.no_such_module", ""))
    assert cli.main(["train"]) == errors.FAILED
    assert capsys.readouterr().err.startswith("bigbatch: bigbatch.no_such_module is missing from this installation: ")
    (tmp_path / "own_command.py").write_text("from bigbatch.errors import no_such_name")
    monkeypatch.setattr(bigbatch, "__path__", [*bigbatch.__path__, str(tmp_path)])
    monkeypatch.setitem(cli.COMMANDS, "train", ("bigbatch.own_command", ""))
    assert cli.main(["train"]) == errors.CRASHED
    assert "Traceback" in capsys.readouterr().err
