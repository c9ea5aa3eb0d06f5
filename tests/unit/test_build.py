"""From a config to the objects of a run: what does not fit together is refused, and nothing is read in vain."""

from pathlib import Path

import pytest
from PIL import Image

from bigbatch.comm.communicator import Communicator, connect
from bigbatch.comm.environ import ProcessEnv
from bigbatch.trainer import build
from bigbatch.trainer.config import Config
from bigbatch.trainer.config_file import load_config
from bigbatch.trainer.errors import ConfigError, DataError

ALONE = ProcessEnv("none", 0, 1, 0, 1, "here", None)


def one_rank() -> Communicator:
    return connect(env=ALONE, backend="gloo")


def cifar10(root: Path) -> Config:
    words = ["data.num_classes=2", "batch.global_batch_size=4", "batch.microbatch_size=4", "batch.bn_span=4"]
    return load_config(["--config", "cifar10", f"--data.root={root}", *(f"--{word}" for word in words)])


def write_pictures(root: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (32, 32)).save(folder / f"{number}.png")


def test_evaluation_opens_no_training_picture(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    (tmp_path / "train" / "a" / "0.png").write_text("no picture")
    config, communicator = cifar10(tmp_path), one_rank()
    split = build.make_eval_split(config, communicator)
    batches = list(build.eval_batches(config, communicator, split))
    assert sum(int(batch.valid_B.sum()) for batch in batches) == split.num_samples == 6
    with pytest.raises(DataError, match=r"train/a/0\.png"):
        build.make_splits(config, communicator)


@pytest.mark.parametrize(
    ("num_samples", "first_step", "words"),
    [
        (3, 0, "batch.global_batch_size=4 exceeds the 3 training pictures"),
        (9, 49, "run.epochs=24 end at step 48, but the checkpoint is of step 49: give at least 25, or"),
    ],
)
def test_run_without_a_step_is_refused(num_samples: int, first_step: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        build.make_plan(cifar10(tmp_path), one_rank(), num_samples=num_samples, first_step=first_step)


def test_run_that_is_at_its_end_is_none_too_many(tmp_path: Path) -> None:
    plan = build.make_plan(cifar10(tmp_path), one_rank(), num_samples=9, first_step=48)
    assert (plan.first_step, plan.num_steps) == (48, 48)
