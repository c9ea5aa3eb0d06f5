"""From a config to the objects of a run: what does not fit together is refused, and nothing is read in vain."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.environ import ProcessEnv
from bigbatch.trainer import build, build_input
from bigbatch.trainer.config import Config
from bigbatch.trainer.config_file import load_config
from bigbatch.trainer.data.pack import pack
from bigbatch.trainer.data.shard_writer import Recipe
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
    split = build_input.make_eval_split(config, communicator)
    batches = list(build_input.eval_batches(config, communicator, split))
    assert sum(int(batch.valid_B.sum()) for batch in batches) == split.num_samples == 6
    with pytest.raises(DataError, match=r"train/a/0\.png"):
        build_input.make_splits(config, communicator)


def agreed_pictures(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a rank that reads root tells the others."""
    said: list[str] = []
    monkeypatch.setattr(Communicator, "agree", lambda self, what, text: said.append(text))
    build_input._read_indices(cifar10(root), one_rank())
    return said[-1]


def test_ranks_agree_on_classes_labels_and_sizes_not_on_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path / "set")
    pack(tmp_path / "set", tmp_path / "packed", recipe=Recipe())
    for name in ("copy", "renamed", "relabelled"):
        shutil.copytree(tmp_path / "set", tmp_path / name)
    for split in ("train", "val"):
        (tmp_path / "renamed" / split / "b").rename(tmp_path / "renamed" / split / "c")
    (tmp_path / "relabelled/val/a/0.png").rename(tmp_path / "relabelled/val/b/9.png")
    pack(tmp_path / "set", tmp_path / "smaller", recipe=Recipe(max_side=16))
    texts = {folder.name: agreed_pictures(folder, monkeypatch) for folder in tmp_path.iterdir()}
    assert texts["copy"] == texts["set"]
    assert len(set(texts.values())) == len(texts) - 1 == 5
    assert all(text.startswith("6 training pictures (") for text in texts.values())
    halves = [texts[name].split(", ") for name in ("set", "relabelled")]
    assert halves[0][0] == halves[1][0]
    assert halves[0][1] != halves[1][1]


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


def digest(root: Path) -> str | None:
    config, communicator = cifar10(root), one_rank()
    return build_input.samples_digest(build_input.make_splits(config, communicator)[0])


def test_digest_of_the_samples_is_that_of_classes_and_labels(tmp_path: Path) -> None:
    """Packed copies count as the same. A new name within its class goes unseen: names are not in what is packed."""
    write_pictures(tmp_path / "set")
    pack(tmp_path / "set", tmp_path / "packed", recipe=Recipe())
    for name in ("renamed picture", "renamed class", "moved", "added", "removed"):
        shutil.copytree(tmp_path / "set", tmp_path / name)
    for split in ("train", "val"):
        (tmp_path / "renamed class" / split / "b").rename(tmp_path / "renamed class" / split / "c")
    (tmp_path / "renamed picture/train/a/0.png").rename(tmp_path / "renamed picture/train/a/9.png")
    (tmp_path / "moved/train/a/0.png").rename(tmp_path / "moved/train/b/9.png")
    (tmp_path / "removed/train/a/0.png").unlink()
    shutil.copy(tmp_path / "added/train/a/0.png", tmp_path / "added/train/a/9.png")
    digests = {folder.name: digest(folder) for folder in tmp_path.iterdir()}
    assert digests["set"] == digests["packed"] == digests["renamed picture"]
    assert len(set(digests.values())) == 5
    assert None not in digests.values()


def quickstart(*words: str) -> Config:
    return load_config(["--config", "quickstart", "--model.width=2", *(f"--{word}" for word in words)])


def test_generated_samples_have_no_digest() -> None:
    config = quickstart("data.loader=synthetic", "data.num_synthetic_samples=1024")
    assert build_input.samples_digest(build_input.make_splits(config, one_rank())[0]) is None


def test_momentum_survives_an_overflow_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is skipped; memory that torch allocates for it is filled with NaN here, and with anything elsewhere."""
    nothing = (f"optimizer.{key}=null" for key in ("trust_coefficient", "eps", "momentum_form"))
    config, communicator = quickstart("optimizer.name=sgd", "optimizer.precision=fp16", *nothing), one_rank()
    plan = build.make_plan(config, communicator, num_samples=5000, first_step=0)
    parts = build.make_parts(config, communicator, plan=plan, tuned=None)
    for weight in parts.model.parameters():
        weight.grad = torch.full_like(weight, float("inf"))
    parts.precision.scaler.scale(torch.ones(()))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full_like(tensor, float("nan")))
    parts.precision.update_(parts.optimizer)
    momenta = [state["momentum_buffer"] for state in parts.optimizer.state.values()]
    assert len(momenta) == len(list(parts.model.parameters()))
    assert all(not bool(momentum.any()) for momentum in momenta)
