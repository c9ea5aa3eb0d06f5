"""The comparison of two commits sees one flipped bit, and says so by its exit code."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SPEC = importlib.util.spec_from_file_location("proofs", Path(__file__).parents[1] / "proofs.py")
assert SPEC is not None
assert SPEC.loader is not None
proofs = importlib.util.module_from_spec(SPEC)
sys.modules["proofs"] = proofs  # as dataclasses ask for it
SPEC.loader.exec_module(proofs)


def test_digest_is_of_names_and_bits_and_not_of_their_order(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.tensor(1)}
    changed = {"a": torch.nextafter(weights["a"], torch.tensor(2.0)), "b": weights["b"]}
    found = []
    for number, model in enumerate((weights, dict(reversed(weights.items())), changed)):
        path = tmp_path / f"{number}.pt"
        torch.save({"model": model}, path)
        found.append(proofs.digest(path))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("hashes", "code"), [("aa", 0), ("ab", 1)])
def test_exit_code_tells_whether_a_job_differs(hashes: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(hashes)
    monkeypatch.setattr(proofs, "cases", lambda: [proofs.Case("a job", 1, {})])
    monkeypatch.setattr(proofs, "final_hash", lambda *_: next(given))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["proofs.py", "COMMIT"])
    assert proofs.main() == code
