"""Folders of others with links in them: no command writes through one, into a file or into a folder elsewhere."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from mlperf_runs import write_run

from bigbatch.cli import main
from bigbatch.errors import UserError

PRECIOUS = b"precious\n"


def of_mlperf(folder: Path) -> None:
    write_run(folder)


WRITERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    # what lies in the folder, and what writes into it
    "verify": (of_mlperf, lambda folder: main(["verify", str(folder)])),
    "report": (of_mlperf, lambda folder: main(["report", str(folder)])),
}


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Each file's bytes by its path in the folder; None of a folder."""
    return {path.relative_to(folder): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_planted_links(name: str, tmp_path: Path) -> None:
    """A link to a file in the place of each file that a command writes; then one in the place of each folder."""
    make, write = WRITERS[name]
    make(tmp_path / "theirs")
    theirs, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    shutil.copytree(theirs, tmp_path / "before")
    before = contents(theirs)
    write(theirs)
    made = {path: data for path, data in contents(theirs).items() if data is None or data != before.get(path)}
    assert made
    for folder in (None, *(path for path, data in made.items() if data is None)):
        shutil.rmtree(theirs)
        shutil.rmtree(elsewhere, ignore_errors=True)
        shutil.copytree(tmp_path / "before", theirs)
        for path in [path for path, data in made.items() if data is not None] if folder is None else [folder]:
            target = elsewhere / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if folder is None:
                target.write_bytes(PRECIOUS)
            else:
                target.mkdir()
            (theirs / path).parent.mkdir(parents=True, exist_ok=True)
            (theirs / path).unlink(missing_ok=True)
            (theirs / path).symlink_to(target)
        planted = contents(elsewhere)
        with suppress(UserError) if folder else nullcontext():
            write(theirs)
        assert contents(elsewhere) == planted, f"{name} wrote through a link"
