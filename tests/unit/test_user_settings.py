"""Folders and settings of libraries that the environment states."""

from pathlib import Path

import pytest

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


def test_measurements_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(measured_folder("webdataset", {"XDG_CACHE_HOME": "/scratch"})) == "/scratch/bigbatch/webdataset"
    monkeypatch.setenv("HOME", "/home/me")
    assert str(measured_folder("webdataset", {})) == "/home/me/.cache/bigbatch/webdataset"
    assert str(measured_folder("webdataset", {"XDG_CACHE_HOME": "~/c"})) == "/home/me/c/bigbatch/webdataset"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert measured_folder("webdataset", {}) is None
