"""Evaluate a model over a whole split: it counts every image once, at any number of ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count as count_up
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.prepare_batch import on_device
from bigbatch.trainer.input.stream import BATCHES_BETWEEN_EXCHANGES, gather_replaced
from bigbatch.trainer.step.score import PerImage, Score, cross_entropies, to_grid


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    normalize: Callable[[Tensor], Tensor],
    communicator: Communicator,
    num_samples: int,
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    flip: bool = False,
    score: Score | None = None,
    skipped: Callable[[dict[int, str]], None] = lambda images: None,
    between_batches: Callable[[], None] = lambda: None,
    answered: Callable[[Batch, Tensor], None] = lambda batch, logits_BK: None,
) -> dict[str, Any]:
    """Measure top1, top5 (shares), loss (a mean), own metrics, count and seconds over all ranks' batches.

    score: loss and metrics; by default cross-entropy in nats. The record has metrics by name, if there are any.
    forward: returns the context of the model's forward, as Precision.forward does.
    flip: use the mean of the logits of the image and its mirror image. skipped gets the positions of bad images,
    which are not counted, with reasons. between_batches is called before the first of every eight batches, right
    after an exchange of all ranks; an error that it raises, on all ranks alike, ends the evaluation. answered gets each
    batch of this rank with its logits.
    Collective, with the same number of batches on all ranks. Leaves the model in evaluation mode.
    Raises: DataError when the input of any rank fails, or the ranks together did not count num_samples images.
    """
    start = time.perf_counter()
    device = communicator.device
    model.eval()
    score = score or Score()
    widths = [metric.width for metric in score.metrics.values()]
    # those of count_batch, the number of skipped images, those of the metrics
    sums_N = torch.zeros(5 + sum(widths), dtype=torch.float64, device=device)
    replaced: dict[int, str] = {}
    for batch in exchanging_failures(batches, communicator.connection, met=between_batches):
        labels_B, valid_B = on_device(batch.labels_B, device), on_device(batch.valid_B, device)
        with forward():
            logits_BK = predict(model, normalize(batch.images_BCHW), flip=flip)
        # stays on the device: the host reads it once, after the last batch
        sums_N[:4] += count_batch(logits_BK, labels_B, valid_B, losses=score.losses)
        for sums_M, metric in zip(sums_N[5:].split(widths), score.metrics.values(), strict=True):
            sums_M += metric.sums(logits_BK, labels_B, valid_B)
        answered(batch, logits_BK)
        replaced |= {image.position: image.reason for image in batch.replaced}
    sums_N[4] = len(replaced)
    summed_N = communicator.sum_(sums_N, label="sums of the evaluation").cpu()
    top1, top5, loss, count, num_skipped = summed_N[:5].tolist()
    if num_skipped:
        replaced = gather_replaced(communicator, replaced)
        skipped(replaced)
    if int(count) != num_samples - len(replaced):
        raise DataError(f"evaluation counted {int(count)} images of {num_samples}; the loader is broken")
    figures = {
        name: metric.figure(sums_M, count=int(count))
        for (name, metric), sums_M in zip(score.metrics.items(), summed_N[5:].split(widths), strict=True)
    }
    return {
        "top1": top1 / count,
        "top5": top5 / count,
        "loss": loss / count,
        **({"metrics": figures} if figures else {}),
        "count": int(count),
        "seconds": time.perf_counter() - start,
    }


def exchanging_failures(
    batches: Iterator[Batch], connection: Connection, *, met: Callable[[], None]
) -> Iterator[Batch]:
    """Yield the batches; at intervals and at the end, all ranks exchange whether their input still works. Collective.

    A rank with a failed input enters the next exchange at once, which raises on all ranks or none. met is called after
    each exchange except the last, so equally often on all ranks. No sync with the device.
    Raises: DataError if the input of any rank failed.
    """
    for number in count_up():
        batch, failure = None, ""
        try:
            batch = next(batches, None)
        except DataError as error:
            failure = str(error)
        if batch is None or number % BATCHES_BETWEEN_EXCHANGES == 0:
            failures = connection.gather(failure)
            if text := next(filter(None, failures), ""):
                raise DataError(text)
        if batch is None:
            return
        if number % BATCHES_BETWEEN_EXCHANGES == 0:
            met()
        yield batch


def predict(model: nn.Module, images_BCHW: Tensor, *, flip: bool) -> Tensor:
    """Compute logits (B, K) in fp32; with flip, their mean over the image and its mirror image."""
    logits_BK = model(images_BCHW).float()
    return (logits_BK + model(images_BCHW.flip(3)).float()) / 2 if flip else logits_BK


def rank_classes(logits_BK: Tensor) -> Tensor:
    """Return the five classes with the largest logits, the largest first; K, no class, if that is not finite."""
    largest_BK, ranked_BK = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1)
    return ranked_BK.where(largest_BK[:, :1].isfinite(), logits_BK.shape[1])


def count_batch(logits_BK: Tensor, labels_B: Tensor, valid_B: Tensor, *, losses: PerImage = cross_entropies) -> Tensor:
    """Return sums over the valid samples of a batch, (4) float64: top-1 and top-5 correct, loss, samples."""
    # a row has at most one hit: the first column counts top-1, all columns top-5
    hit_BK = (rank_classes(logits_BK) == labels_B[:, None]) & valid_B[:, None]
    loss_B = torch.where(valid_B, to_grid(losses(logits_BK, labels_B)), 0.0)
    sums = (hit_BK[:, 0].sum(), hit_BK.sum(), loss_B.sum(), valid_B.sum())
    return torch.stack([s.double() for s in sums])
