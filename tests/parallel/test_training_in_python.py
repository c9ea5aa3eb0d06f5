"""`bigbatch.train` in a process that does more than one run, and as a script on two ranks."""

import json
from pathlib import Path

import pytest

from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import Forked, run

HERE = "tests.parallel.training_in_python"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=5, val_per_class=2, side_pixels=(36, 48))
    return root


@pytest.fixture(scope="module")
def notebook(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("notebook")
    return out, run(Forked((str(data), str(out)), ranks=1, target=f"{HERE}:notebook")).stdout


def test_training_in_a_notebook(notebook: tuple[Path, str]) -> None:
    assert notebook[1].count("evaluation: top-1 ") == 2, "all but the first run are quiet"


def test_training_is_interrupted_and_goes_on(data: Path, notebook: tuple[Path, str], tmp_path: Path) -> None:
    arguments = (str(data), str(tmp_path), str(notebook[0] / "first"))
    assert not run(Forked(arguments, ranks=1, target=f"{HERE}:interruptions")).stdout


def test_training_tells_all_ranks_the_same(data: Path, tmp_path: Path) -> None:
    shown = run(Forked((str(data), str(tmp_path)), ranks=2, target=f"{HERE}:script")).stdout
    one, other = map(json.loads, shown.splitlines())
    assert one == other
    told, summary = one
    assert told[-1] == ["end", summary["top1"]]
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["world_size"] == 2
