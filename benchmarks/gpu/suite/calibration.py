"""The settings of a public table, to tell a healthy card before anything of ours is measured on it."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.gpu.suite.context import Context, Found
from benchmarks.gpu.suite.job import AS_TORCH_STARTS, Contestant, rates_in_turn
from benchmarks.gpu.suite.torchvision_peer import generated_batches

FIGURE = "ResNet-50, NCHW, AMP"
PUBLISHED = {"NVIDIA H100 80GB HBM3": 2790, "NVIDIA H200": 3079}
"""Driver's name of an SXM card -> images/s.

Source: lambdal/deeplearning-benchmark at aa5addb6, pytorch-train-throughput-v2-fp16.csv.
"""
BATCHES = {80: 1280, 140: 2560}
"""Its batch by the card's memory in 1e9 bytes."""
LOSS_SCALE = 256.0


def measure(context: Context) -> Found:
    """Train torchvision's model on generated images, eager: AMP in fp16, static loss scale, contiguous tensors, SGD.

    The table's script (main.py of NVIDIA's DeepLearningExamples) adds its own metrics and prefetching to that.
    """
    import torchvision

    size, device, found = context.size, context.device, Found()
    batch = batch_for(context)
    model = torchvision.models.get_model(size.model, num_classes=size.num_classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.875, weight_decay=3.05e-5)
    images_BCHW, labels_B = next(generated_batches(context, batch=batch, memory_format=torch.contiguous_format))

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(images_BCHW), labels_B, label_smoothing=0.1)
            optimizer.zero_grad()
            (LOSS_SCALE * loss).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(LOSS_SCALE)
            optimizer.step()

    flags = replace(AS_TORCH_STARTS, cudnn_benchmark=True)
    contestants = {FIGURE: Contestant(run, batch, flags=flags)}
    few = replace(size, steps=max(1, size.steps // 4))  # of five to ten times the images of the others' steps
    found.add(FIGURE, rates_in_turn(contestants, size=few, device=device)[FIGURE], unit="images/s")
    found.conditions |= {"batch": batch, "precision": "autocast to fp16"}
    return found


def batch_for(context: Context) -> int:
    """Return the table's batch on this card, or the size's own if the card has less memory than the table's."""
    if context.device.type != "cuda" or context.is_small:
        return context.size.batch
    memory = torch.cuda.get_device_properties(context.device).total_memory / 1e9
    return max((batch for least, batch in BATCHES.items() if memory >= least), default=context.size.batch)
