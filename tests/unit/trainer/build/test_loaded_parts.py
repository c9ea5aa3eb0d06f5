"""A run imports the loaders, forms of data and augmentations that its config and its data name, and no others."""

import json
from pathlib import Path

import pytest
from benchmark_process import fork_fresh_code
from sample_images import encoded, smooth_image, write

from bigbatch.trainer.datasets.pack import PackRecipe, pack

READS = """
import json, sys
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.config.file import load_config
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE

config, communicator = load_config(["--config", "quickstart", *sys.argv[1:]]), connect(env=ALONE, backend="gloo")
splits = build_input.make_splits(config, communicator)
prepare = build_input.make_prepare(
    config, communicator, normalize=build_input.make_normalize(config, communicator)
)
for batch in build_input.eval_batches(config, communicator, splits.val):
    prepare(batch)
splits.close()
names = [name.removeprefix("bigbatch.trainer.") for name in sys.modules]
print(json.dumps([name for name in names if name.startswith(("input.", "augment.", "datasets."))]))
"""
CORE = {
    "augment.crops",
    *(f"input.{name}" for name in ("base", "data_root", "formats", "image_files", "order", "prepare_batch", "report")),
    *("input.reading", "input.retry", "input.loaders", "input.loaders.encoded", "input.loaders.pillow"),
}
SHARDS = {"input.shards", "input.shard_files"}


def loaded(*words: str, cwd: Path) -> set[str]:
    options = ["--data.loader=torchvision", "--data.num_classes=2", *words]
    options += ["--batch.global_batch_size=4", "--batch.microbatch_size=4", "--batch.bn_span=4"]
    code, output = fork_fresh_code(READS, *options, cwd=cwd, timeout_seconds=200)
    assert code == 0, output
    return set(json.loads(output.splitlines()[-1]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{split}/{name}/0.jpg": encoded(smooth_image(0, 40, 40)) for split in ("train", "val") for name in "ab"}
    return write(tmp_path_factory.mktemp("folders") / "images", files)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], set()),
        (["--augment.cutout_size=4"], {"augment.pipeline", "augment.cutout"}),
        (["--augment.mixup_alpha=0.2"], {"augment.pipeline", "augment.mix"}),
    ],
)
def test_class_folders_load_the_core_and_what_is_named(
    words: list[str], parts: set[str], folders: Path, tmp_path: Path
) -> None:
    assert loaded(f"--data.root={folders}", *words, cwd=tmp_path) == CORE | parts


def test_packed_shards_load_their_reader_alone(folders: Path, tmp_path: Path) -> None:
    pack(folders, tmp_path / "packed", recipe=PackRecipe())
    assert loaded(f"--data.root={tmp_path}/packed", cwd=tmp_path) == CORE | SHARDS
