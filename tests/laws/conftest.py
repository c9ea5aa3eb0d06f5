"""The tiny data set, written once."""

from pathlib import Path

import pytest

from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import TRAIN_PER_CLASS, VAL_PER_CLASS


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=TRAIN_PER_CLASS, val_per_class=VAL_PER_CLASS, side_pixels=(36, 48))
    return root
