"""Trials of faults that only emulated nodes can have."""

from pathlib import Path

import pytest
from faults.experiment import Laboratory
from faults.job import prepare
from faults.trial import Trial

from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.state import state_root


@pytest.fixture(scope="module")
def laboratory(runtime_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    folder = tmp_path_factory.mktemp("faults")
    return Laboratory(prepare(), folder, timeout_seconds=30)


@pytest.mark.parametrize(
    "trial",
    [
        Trial("cut", "sum", 6, 1, 2, 1, "tcp"),
        Trial("short cut", "forward", 6, 1, 2, 1, "tcp"),
        Trial("read-only", "update", 6, 0, 1, 2, "gloo"),
    ],
    ids=lambda trial: trial.kind,
)
def test_fault_that_namespaces_make_is_named_or_survived(trial: Trial, laboratory: Laboratory) -> None:
    score = laboratory.score(trial)
    assert score.broken == (), score.said
    assert not [name for name in clusters.names(state_root()) if name.startswith("faults-")]
