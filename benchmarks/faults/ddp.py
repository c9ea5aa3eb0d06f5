"""The usual way to survive a failure: torch's DDP under torchrun, with a checkpoint from time to time.

A rank of `benchmarks.faults.effective`: not to be started by hand. torchrun starts all ranks again, which load the
newest checkpoint of rank 0 and continue behind it.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

NUM_CLASSES = 10


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    model, optimizer, images_BCHW, labels_B = make_training(options)
    ddp = DistributedDataParallel(model)
    step, newest = 0, options.folder / "checkpoint.pt"
    if newest.exists():
        kept = torch.load(newest, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    while True:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images_BCHW), labels_B).backward()
        optimizer.step()
        step += 1
        if dist.get_rank():
            continue
        note(options.folder, step)
        if step % options.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, newest.with_suffix(".new"))
            newest.with_suffix(".new").replace(newest)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="images of a rank")
    parser.add_argument("--image-size", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0, help="steps")
    return parser.parse_args()


def make_training(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """Make a ResNet-18, its optimizer, and images that are the same at each step."""
    torch.manual_seed(0)
    model = resnet18(num_classes=NUM_CLASSES)
    images_BCHW = torch.randn(options.batch, 3, options.image_size, options.image_size)
    labels_B = torch.randint(NUM_CLASSES, (options.batch,))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), images_BCHW, labels_B


def note(folder: Path, step: float) -> None:
    """Write the job's progress to a file."""
    (folder / f"step.{os.getpid()}").write_text(f"{time.time()} {step}")
    (folder / f"step.{os.getpid()}").replace(folder / "step")


if __name__ == "__main__":
    main()
