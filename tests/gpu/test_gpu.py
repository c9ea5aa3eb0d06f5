"""What only a GPU can show. One command: BIGBATCH_EXPECT_GPU=1 .venv/bin/python -m pytest -m gpu."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from all_augmentations import ALL_AUGMENTATIONS

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import DataError
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.loaders import dali
from bigbatch.trainer.input.loaders.encoded import make_image_loader
from bigbatch.trainer.input.order import read_index, train_requests
from bigbatch.trainer.input.stream import InputFailure, InputStream
from bigbatch.trainer.memory.largest_batch import fits_memory
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.train import main as train_main

pytestmark = pytest.mark.gpu
SCALE = ["--optimizer.loss_scale=65536", "--optimizer.loss_scale_growth_steps=2000"]
PRECISIONS = {
    "fp32": [],
    "tf32": ["--optimizer.precision=tf32"],
    "bf16": ["--optimizer.precision=bf16"],
    "fp16": ["--optimizer.precision=fp16", *SCALE],
    "bf16_autocast": ["--optimizer.precision=bf16_autocast"],
    "fp16_autocast": ["--optimizer.precision=fp16_autocast", *SCALE],
}

FAST = ["--data.num_threads=4", "--data.probe_seconds=0", "--run.eval_every_epochs=8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=64, val_per_class=8)
    return root


@pytest.mark.parametrize("hardware_share", [0.0, 1.0])
def test_gpu_decoder_sees_the_same_images_as_pillow(
    hardware_share: float, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two epochs of different image sizes."""
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    monkeypatch.setattr(dali, "_build_pipeline", partial(dali._build_pipeline, hardware_share=hardware_share))
    index = read_index(data, "train")
    common = {
        "source": index,
        "crop": random_resized_crop(seed=0),
        "image_size": lambda epoch: (32, 48)[epoch],
        "microbatch_size": 32,
        "num_threads": 2,
        "prefetch_batches": 2,
    }
    requests = list(
        train_requests(
            seed=0,
            num_samples=len(index.paths),
            global_batch_size=32,
            microbatch_size=32,
            microbatches=range(1),
            start_step=14,
            end_step=26,
        )
    )
    on_gpu = make_image_loader("dali", **common, device_id=0)
    on_cpu = make_image_loader("torchvision", **common)
    sides = []
    for ours, theirs in zip(on_gpu.load(requests), on_cpu.load(requests), strict=True):
        sides.append(ours.images_BCHW.shape[-1])
        assert ours.images_BCHW.is_cuda
        torch.cuda._sleep(10_000_000)  # a consumer that is late: the next batches must not overwrite this one
        difference = (ours.images_BCHW.cpu().float() - theirs.images_BCHW.float()).abs().mean()
        assert difference < 3, "grey levels of 255; decoders differ in chroma upsampling and rounding"
        assert torch.equal(ours.labels_B.cpu(), theirs.labels_B)
    assert sides == 6 * [32] + 6 * [48]
    on_gpu.close()
    on_cpu.close()


OPTIMIZERS: dict[str, dict[str, str]] = {
    "lars": {},
    "sgd": {"name": "sgd"},
    "lamb": {"name": "lamb"},
    "adamw": {"name": "adamw"},
    "lion": {"name": "lion"},
    "muon": {"name": "muon", "options.newton_schulz_precision": "bf16"},
    "lars sharded": {"sharded": "true"},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_has_no_host_sync(precision: str, optimizer: str, data: Path, tmp_path: Path) -> None:
    """Law 6: from the second step on, nothing waits for the device: no augmentation, and no step after a failure."""
    config = load_config(
        [
            *("--config", "quickstart", f"--run.directory={tmp_path}", f"--data.root={data}"),
            *(*PRECISIONS[precision], "--batch.global_batch_size=256", "--optimizer.clip_norm=1.0"),
            "--compute.cudnn_benchmark=false",  # its search, in the first step, is over by then
            *(() if "sharded" in optimizer else ("--optimizer.ema_decay=0.9", "--optimizer.ema_every_steps=1")),
            *(f"--optimizer.{key}={value}" for key, value in OPTIMIZERS[optimizer].items()),
            *(f"--augment.{key}={value}" for key, value in ALL_AUGMENTATIONS.items()),
        ]
    )
    communicator, tuned = join_job(config, ALONE)
    plan = make_plan(config, communicator, num_samples=640, first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=tuned)
    parts.model.train()

    def batches() -> Iterator[Batch]:
        images = torch.zeros(128, 48, 48, 3, dtype=torch.uint8, device=communicator.device).permute(0, 3, 1, 2)
        labels = torch.zeros(128, dtype=torch.int64)  # on the host, as loaders give them
        valid = torch.ones(128, dtype=torch.bool)
        for _ in range(3 * len(plan.microbatches)):
            yield Batch(images, labels, valid, Request(0, np.arange(128), np.ones(128, bool)))
        raise DataError("the images are gone")

    stream, train_step = InputStream(batches()), TrainStep(plan, parts)
    for step in range(2):
        train_step(step, stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(2, stream)
        before = [master.detach().clone() for master in parts.precision.masters.values()]
        train_step(3, stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.failure == InputFailure(3, "the images are gone")
    assert all(map(torch.equal, before, parts.precision.masters.values()))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's own data set."""
    root = tmp_path_factory.mktemp("shapes") / "shapes"
    write_dataset(root)
    return root


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quickstart_learns_on_a_gpu(precision: str, shapes: Path, tmp_path: Path) -> None:
    """By compute.mode=auto in fp32, as stated in the others; evaluated once, at the end."""
    arguments = ["--config", "quickstart", f"--run.directory={tmp_path / 'run'}", f"--data.root={shapes}", *FAST]
    if precision != "fp32":
        arguments.append("--compute.mode=eager")
    if not dali.is_installed():
        arguments.append("--data.loader=torchvision")
    assert train_main([*arguments, *PRECISIONS[precision]]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "cpu" not in summary["device"]
    assert summary["top1"] >= 0.95


def test_only_tf32_rounds_to_tf32() -> None:
    """A product and a convolution beside float64: fp32 keeps 24 bits of each factor, TF32 11 where cuDNN uses it."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, dtype=torch.float64, generator=generator) for _ in range(2))
    for name in ("tf32", "fp32"):
        config = load_config(["--config", "quickstart", f"--optimizer.precision={name}"])
        communicator, _ = join_job(config, ALONE)
        x, y = (each.float().to(communicator.device) for each in (a, b))
        conv = torch.nn.functional.conv2d(x.view(1, 1024, 32, 32), y.view(1024, 1024, 1, 1)).view(1024, 1024)
        product, convolved = (
            float((found.double().cpu() - exact).norm() / exact.norm())
            for found, exact in ((x @ y, a @ b), (conv, b @ a))
        )
        assert (product > 1e-5) == (name == "tf32"), (name, product)
        assert convolved < (1e-5 if name == "fp32" else 1e-3), (name, convolved)


def test_trial_that_does_not_fit_leaves_nothing_behind() -> None:
    config = load_config(["--config", "quickstart"])
    device = torch.device("cuda", 0)
    assert fits_memory(config, 64, device=device)  # what CUDA's libraries keep is there from now on
    before = torch.cuda.memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 2**28) / total, device)
    try:
        assert not fits_memory(config, 65536, device=device)
        assert torch.cuda.memory_allocated(device) == before
        assert fits_memory(config, 64, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
