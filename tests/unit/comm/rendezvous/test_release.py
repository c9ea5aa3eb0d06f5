"""Whether all ranks run the same code."""

import shutil
from pathlib import Path

import pytest

import bigbatch
from bigbatch.comm.rendezvous.places import require_same_release, sources_digest
from bigbatch.errors import CommError


def test_releases_that_differ_name_each_host_once() -> None:
    with pytest.raises(CommError, match="n1, n3: b; n2: c; n0: a") as caught:
        require_same_release(["a", "b", "b", "c", "b", "a"], hosts=["n0", "n1", "n1", "n2", "n3", "n4"])
    assert "n4" not in str(caught.value)


def test_digest_is_of_all_sources_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy without links has the same; a word more in any room, a file less or another name has not."""
    here = sources_digest()
    copy = tmp_path / "elsewhere"
    shutil.copytree(Path(bigbatch.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(bigbatch, "__file__", str(copy / "__init__.py"))
    assert sources_digest() == here
    found = {here}
    for name in ("cli.py", "comm/gradients/reducer.py", "trainer/optim/lars.py"):
        with (copy / name).open("a") as file:
            file.write("# one word\n")
        found.add(sources_digest())
    (copy / "comm/rendezvous/watch.py").rename(copy / "comm/watched.py")
    found.add(sources_digest())
    (copy / "comm/watched.py").unlink()
    found.add(sources_digest())
    assert len(found) == 6
    last = sources_digest()
    (copy / "notes.txt").write_text("no code")
    (copy / ".ipynb_checkpoints").mkdir()
    (copy / ".ipynb_checkpoints/cli-checkpoint.py").write_text("print()")
    (copy / "comm/.#reducer.py").symlink_to("user@host.1234")  # an editor's lock, which leads nowhere
    assert sources_digest() == last
