"""Modules of others that cannot be imported: what is missing, and what to do."""

from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import UserError
from bigbatch.trainer.config.dotted import import_owner


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("import no_such_package.part", ("'no_such_package'", "pip install no_such_package")),
        ("import sys\nsys.exit(0)", ("importing own_of_mine ends Python", "__main__")),
    ],
)
def test_own_module_that_cannot_be_imported(
    text: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=naming(*parts)):
        import_owner("own_of_mine.Net")


def test_work_folder_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match=naming("the work folder is not there any more", "cd to")):
        import_owner("own_of_mine.Net")
