"""torchvision's reference training script with AMP and channels-last, or a stand-in if it is not available."""

import contextlib
import importlib
import inspect
import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.suite.context import Context
from benchmarks.gpu.suite.job import AS_TORCH_STARTS, Contestant
from bigbatch.errors import ConfigError

SCRIPT = "torchvision's script"
STAND_IN = f"stand-in for {SCRIPT}"
NEEDED = ("model", "criterion", "optimizer", "data_loader", "device", "epoch", "args", "scaler")
OF_SCRIPT = {"print_freq": 10, "clip_grad_norm": None, "model_ema_steps": 32}
"""The script's defaults, as far as an epoch reads them."""

Epoch = Callable[..., Any]
Batches = Generator[tuple[Tensor, Tensor], None, None]


@dataclass(frozen=True)
class Few:
    """Yields that many batches of an endless stream, with the length that the script needs."""

    batches: Batches
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(self.batches, self.count)


def peer_name(context: Context) -> str:
    """Return the peer's name for figures: the stand-in is never called torchvision's."""
    return STAND_IN if context.vision is None else SCRIPT


def script_epoch(vision: Path) -> Epoch:
    """Import train_one_epoch of a checkout's references/classification. Raises: ConfigError."""
    if not (vision / "train.py").is_file():
        raise ConfigError(
            f"--vision {vision} holds no train.py: name references/classification of torchvision's sources"
        )
    sys.path.insert(0, str(vision.resolve()))
    try:
        epoch = importlib.import_module("train").train_one_epoch
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--vision {vision}: its train.py cannot be used: {error}") from error
    finally:
        sys.path.pop(0)
    if missing := [name for name in NEEDED if name not in inspect.signature(epoch).parameters]:
        raise ConfigError(
            f"--vision {vision}: train_one_epoch takes no {missing[0]}; torchvision 0.12 and later have it"
        )
    return epoch


def stand_in_epoch(
    model: nn.Module,
    criterion: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data_loader: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    epoch: int,
    args: Namespace,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Run an epoch like that script: autocast, scaled update, loss and accuracies read at every step."""
    model.train()
    for batch_images, batch_labels in data_loader:
        images, labels = batch_images.to(device), batch_labels.to(device)
        with torch.autocast(device.type, dtype=torch.float16, enabled=scaler is not None):
            logits = model(images)
            loss = criterion(logits, labels)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        hits = logits.topk(5).indices == labels[:, None]
        loss.item(), hits[:, 0].float().mean().item(), hits.any(1).float().mean().item()


def peer(context: Context, batches: Batches, *, num_classes: int) -> Contestant:
    """Make the script's model, update and epoch, on those batches. Raises: ConfigError."""
    import torchvision

    device = context.device
    epoch = stand_in_epoch if context.vision is None else script_epoch(context.vision)
    model = torchvision.models.get_model(context.size.model, num_classes=num_classes)
    model = model.to(device=device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda") if device.type == "cuda" else None
    args = Namespace(**OF_SCRIPT, amp=scaler is not None)

    def run(steps: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            epoch(model, F.cross_entropy, optimizer, Few(batches, steps), device, 0, args, scaler=scaler)

    flags = replace(AS_TORCH_STARTS, cudnn_benchmark=True)  # as in the script
    return Contestant(run, context.size.batch, batches.close, flags)


def generated_batches(
    context: Context, *, batch: int | None = None, memory_format: torch.memory_format = torch.channels_last
) -> Batches:
    """Yield one batch, for ever, ready for the model on the device; batch: its images, by default the size's."""
    size, device = context.size, context.device
    batch = batch or size.batch
    images_BCHW = torch.randn(batch, 3, size.image_size, size.image_size, device=device)
    images_BCHW = images_BCHW.to(memory_format=memory_format)
    labels_B = torch.randint(size.num_classes, (batch,), device=device)
    while True:
        yield images_BCHW, labels_B


def image_batches(context: Context, root: Path) -> Batches:
    """Load training images like the script's preset, by torch's DataLoader with a worker per core."""
    import torchvision
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(context.size.image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    dataset = torchvision.datasets.ImageFolder(str(root / "train"), v2.Compose(steps))
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=context.size.batch,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers(context),
        pin_memory=context.device.type == "cuda",
    )
    while True:
        for images_BCHW, labels_B in loader:
            yield images_BCHW.to(memory_format=torch.channels_last), labels_B


def num_workers(context: Context) -> int:
    """Return the number of the script's worker processes."""
    return 1 if context.is_small else len(os.sched_getaffinity(0))
