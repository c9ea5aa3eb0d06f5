"""Some steps of training on images that a loader decodes: on torch's openreg device, and the same on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openreg_gpu import DEVICE, play_gpu
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.loaders.encoded import make_image_loader
from bigbatch.trainer.input.order import read_index, train_requests
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.step.loop import TrainStep

NUM_STEPS = 3
BATCH_SIZE = 16


def train(communicator: Communicator, data: Path, *settings: str) -> list[Tensor]:
    """Some steps as a config makes them; the weights that come of them."""
    microbatch_size = BATCH_SIZE // communicator.world_size // 2
    arguments = [
        *("--config", "quickstart", f"--data.root={data}", "--model.options.width=2", "--data.bind_numa=false"),
        *(f"--batch.global_batch_size={BATCH_SIZE}", f"--batch.microbatch_size={microbatch_size}"),
        *("--batch.bn_span=4", "--comm.threshold_bytes=8192", "--comm.buffer_bytes=8192", *settings),
    ]
    config, index = load_config(arguments), read_index(data, "train")
    plan = make_plan(config, communicator, num_samples=len(index.paths), first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=None)
    parts.model.train()
    loader = make_image_loader(
        "torchvision",
        source=index,
        crop=random_resized_crop(seed=0),
        image_size=lambda epoch: 16,
        microbatch_size=microbatch_size,
        num_threads=2,
        prefetch_batches=2,
        pin_memory=communicator.device.type != "cpu",
    )
    requests = train_requests(
        seed=0,
        num_samples=len(index.paths),
        global_batch_size=BATCH_SIZE,
        microbatch_size=microbatch_size,
        microbatches=plan.microbatches,
        start_step=0,
        end_step=NUM_STEPS,
    )

    def handed_over() -> Iterator[Batch]:
        for batch in loader.load(requests):
            assert batch.images_BCHW.is_pinned() == (communicator.device == DEVICE)
            yield batch

    step, stream = TrainStep(plan, parts), InputStream(handed_over())
    for number in range(NUM_STEPS):
        step(number, stream)
    parts.precision.wait_for_weights()
    assert parts.reducer.exposed.take_seconds() > 0
    loader.close()
    return [weight.detach().cpu() for weight in parts.model.parameters()]


def train_beside_the_cpu(data: str, rounding: str, *settings: str) -> int:
    """Train over tcp, by way of the host from a device; then on the CPU, which must give the same but for rounding."""
    own = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        locked = play_gpu(monkeypatch)
        communicator = connect(backend="tcp", algorithm="hierarchical", group_size=1, device=DEVICE)
        assert communicator.transport.staging is not None
        own["openreg"] = train(communicator, Path(data), *settings)
        assert locked.count > 0
        communicator.close()
    communicator = connect(backend="tcp", algorithm="hierarchical", group_size=1, device=torch.device("cpu"))
    own["cpu"] = train(communicator, Path(data), *settings)
    communicator.close()
    for ours, theirs in zip(own["openreg"], own["cpu"], strict=True):
        assert (ours - theirs).abs().max() <= float(rounding) * theirs.abs().max()
    return 0
