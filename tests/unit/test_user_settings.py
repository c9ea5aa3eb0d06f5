"""Folders and settings of libraries that the environment states."""

from pathlib import Path

import pytest

from bigbatch.user_settings import measured_folder, nccl_settings, set_compile_cache


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


def test_calibrations_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(measured_folder("calibration", {"XDG_CACHE_HOME": "/scratch"})) == "/scratch/bigbatch/calibration"
    monkeypatch.setenv("HOME", "/home/me")
    assert str(measured_folder("calibration", {})) == "/home/me/.cache/bigbatch/calibration"
    assert str(measured_folder("calibration", {"XDG_CACHE_HOME": "~/c"})) == "/home/me/c/bigbatch/calibration"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert measured_folder("calibration", {}) is None


def test_settings_of_nccl_are_those_that_change_how_it_sums() -> None:
    others = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "a", "NCCL_COMM_ID": "n0:1", "HOME": "/"}
    assert nccl_settings({**others, "NCCL_IB_HCA": "mlx5", "NCCL_ALGO": "Tree"}) == {
        "NCCL_ALGO": "Tree",
        "NCCL_IB_HCA": "mlx5",
    }
