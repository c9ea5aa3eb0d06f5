"""Accuracy over a whole split: every picture counted once, at any number of ranks."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.data.loader import Batch
from bigbatch.trainer.errors import DataError


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    normalize: Callable[[Tensor], Tensor],
    communicator: Communicator,
    num_samples: int,
    flip: bool = False,
    skipped: Callable[[dict[str, str]], None] = lambda pictures: None,
) -> dict[str, Any]:
    """top1, top5 (shares), loss (mean cross-entropy, nats), count and seconds over all ranks' batches.

    flip: the mean of the logits for the picture and for its mirror image. skipped is told the bad pictures and why;
    they are not counted.
    Collective. Leaves the model in evaluation mode.
    Raises: DataError when the input of any rank fails, or the ranks together did not count num_samples pictures.
    """
    start = time.perf_counter()
    device = communicator.device
    model.eval()
    sums_4 = torch.zeros(4, dtype=torch.float64, device=device)
    replaced: dict[str, str] = {}
    failure = ""
    try:
        for batch in batches:
            labels_B = batch.labels_B.to(device, non_blocking=True)
            valid_B = batch.valid_B.to(device, non_blocking=True)
            logits_BK = predict(model, normalize(batch.images_BCHW), flip=flip)
            sums_4 += count_batch(logits_BK, labels_B, valid_B)
            replaced |= {picture.name: picture.reason for picture in batch.replaced}
    except DataError as error:  # the others wait for this rank's sums
        failure = str(error)
    notes_2 = torch.tensor([float(bool(failure)), len(replaced)], dtype=torch.float64, device=device)
    *sums, failed, num_skipped = communicator.sum_(
        torch.cat([sums_4, notes_2]), label="sums of the evaluation"
    ).tolist()
    if failed:
        raise DataError(next(text for text in communicator.gather_text(failure) if text))
    if num_skipped:
        for text in communicator.gather_text(json.dumps(replaced)):
            replaced |= json.loads(text)
        skipped(replaced)
    top1, top5, loss, count = sums
    if int(count) != num_samples - len(replaced):
        raise DataError(f"evaluation counted {int(count)} pictures of {num_samples}; the loader is broken")
    return {
        "top1": top1 / count,
        "top5": top5 / count,
        "loss": loss / count,
        "count": int(count),
        "seconds": time.perf_counter() - start,
    }


def predict(model: nn.Module, images_BCHW: Tensor, *, flip: bool) -> Tensor:
    """Logits in fp32; with flip, their mean over the picture and its mirror image."""
    logits_BK = model(images_BCHW).float()
    return (logits_BK + model(images_BCHW.flip(3)).float()) / 2 if flip else logits_BK


def count_batch(logits_BK: Tensor, labels_B: Tensor, valid_B: Tensor) -> Tensor:
    """Sums over the valid samples of a batch: top-1 correct, top-5 correct, loss, samples (float64)."""
    ranked_BK = logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices
    hit_BK = (ranked_BK == labels_B[:, None]) & valid_B[:, None]
    loss_B = F.cross_entropy(logits_BK, labels_B, reduction="none") * valid_B
    sums = (hit_BK[:, 0].sum(), hit_BK.sum(), loss_B.sum(), valid_B.sum())
    return torch.stack([s.double() for s in sums])
