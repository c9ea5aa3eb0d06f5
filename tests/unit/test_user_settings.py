"""Folders and settings of libraries that the environment states."""

import resource
from pathlib import Path

import pytest
from other_users import ALICE, as_user, needs_root, open_folder_of_all

from bigbatch.user_settings import measured_folder, set_compile_cache


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "home/.cache/bigbatch/compiled"),
        ({"XDG_CACHE_HOME": "scratch"}, "scratch/bigbatch/compiled"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchs"}, "home/.cache/bigbatch/compiled"),
        ({"XDG_CACHE_HOME": "scratch", "TORCHINDUCTOR_CACHE_DIR": "/mine"}, "/mine"),
        ({"XDG_CACHE_HOME": "file"}, None),  # no folder can be made in it
        ({"XDG_CACHE_HOME": "file", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchs"}, "/tmp/torchs"),
    ],
)
def test_cache_of_compiled_code_is_kept_from_run_to_run(
    variables: dict[str, str], folder: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "home")
    Path("file").touch()
    variables = dict(variables)
    set_compile_cache(variables, torchs_own=variables.get("TORCHINDUCTOR_CACHE_DIR") and "/tmp/torchs")
    assert variables.get("TORCHINDUCTOR_CACHE_DIR") == folder


def kept_in(home: Path) -> str | None:
    """Where compiled code is kept if the cache's folder is there."""
    variables = {"XDG_CACHE_HOME": str(home)}
    set_compile_cache(variables, torchs_own=None)
    return variables.get("TORCHINDUCTOR_CACHE_DIR")


def test_compiled_code_is_not_kept_in_a_home_that_is_full(tmp_path: Path) -> None:
    """A limit of the kernel acts as a quota that is used up: folders and empty files can be made."""
    assert kept_in(tmp_path) == f"{tmp_path}/bigbatch/compiled"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        found = kept_in(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found is None
    assert [*(tmp_path / "bigbatch/compiled").iterdir()] == []


@needs_root
def test_compiled_code_is_not_kept_in_a_home_that_the_user_may_not_write() -> None:
    with open_folder_of_all() as home:
        (home / "bigbatch/compiled").mkdir(parents=True)
        assert as_user(ALICE, lambda: kept_in(home)) is None
        (home / "bigbatch/compiled").chmod(0o777)
        assert as_user(ALICE, lambda: kept_in(home)) == f"{home}/bigbatch/compiled"


def test_measurements_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(measured_folder("webdataset", {"XDG_CACHE_HOME": "/scratch"})) == "/scratch/bigbatch/webdataset"
    monkeypatch.setenv("HOME", "/home/me")
    assert str(measured_folder("webdataset", {})) == "/home/me/.cache/bigbatch/webdataset"
    assert str(measured_folder("webdataset", {"XDG_CACHE_HOME": "~/c"})) == "/home/me/c/bigbatch/webdataset"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert measured_folder("webdataset", {}) is None
