"""Balanced sampling: quotas by their formula, each image as often as others of its class, by seed and epoch alone."""

from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import encoded, write

from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.build.input import Split, train_batches
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.balanced import balanced_order, quotas
from bigbatch.trainer.input.base import LoaderSetup
from bigbatch.trainer.input.loaders.encoded import make_loader
from bigbatch.trainer.input.order import read_index, train_requests
from bigbatch.trainer.observe.digests import positions_of

COUNTS = np.array([50, 0, 5, 45, 1])
LABELS_N = np.repeat(np.arange(5), COUNTS)
NUM = len(LABELS_N)


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 1.0])
def test_balanced_quotas_are_within_one_of_the_formula(balance):
    found = quotas(COUNTS, balance=balance)
    weights = [float(count) ** (1 - balance) if count else 0.0 for count in COUNTS.tolist()]
    assert found.sum() == NUM
    for quota, weight in zip(found.tolist(), weights, strict=True):
        assert abs(quota - NUM * weight / sum(weights)) < 1
    assert found[1] == 0
    if balance == 0:
        assert found.tolist() == COUNTS.tolist()
    if balance == 1:
        assert all(abs(quota - Fraction(NUM, 4)) < 1 for quota in found[[0, 2, 3, 4]].tolist())


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_balanced_images_come_equally_often_within_their_class(balance):
    order = balanced_order(LABELS_N, seed=3, balance=balance)
    quotas_K = quotas(COUNTS, balance=balance)
    for epoch in range(3):
        indices_N = order(epoch)
        assert len(indices_N) == NUM
        assert len(set(indices_N.tolist())) == NUM, "each draw of an image has its own index, so its own crop and flip"
        times = Counter((indices_N % NUM).tolist())
        assert np.bincount(LABELS_N[indices_N % NUM], minlength=5).tolist() == quotas_K.tolist()
        for label in (0, 2, 3, 4):
            of_class = [times[image] for image in np.flatnonzero(label == LABELS_N).tolist()]
            assert max(of_class) - min(of_class) <= 1
    assert (order(1) == order(1)).all()
    assert (order(1) != order(2)).any()
    other = balanced_order(LABELS_N, seed=4, balance=balance)
    assert (other(1) != order(1)).any()
    if balance == 0:
        assert sorted(order(0).tolist()) == list(range(NUM))


def test_balanced_rare_images_are_other_ones_in_each_epoch():
    order = balanced_order(LABELS_N, seed=0, balance=1.0)
    chosen = [frozenset(index for index in (order(epoch) % NUM).tolist() if index < 50) for epoch in range(4)]
    assert len(chosen[0]) == quotas(COUNTS, balance=1.0)[0]
    assert len(set(chosen)) == 4


@pytest.mark.parametrize("start", [0, 7])
def test_balanced_requests_do_not_depend_on_ranks_and_resume_anywhere(start):
    """The global order of steps is the same for one rank and four, and from any step on."""

    def batches(world_size: int, start: int) -> list[list[int]]:
        common = {"seed": 1, "num_samples": NUM, "global_batch_size": 8, "microbatch_size": 2}
        order = balanced_order(LABELS_N, seed=1, balance=0.7)
        steps: list[list[int]] = [[] for _ in range(30 - start)]
        for rank in range(world_size):
            mine = range(4)[rank * 4 // world_size : (rank + 1) * 4 // world_size]
            requests = train_requests(microbatches=mine, start_step=start, end_step=30, order=order, **common)
            for number, request in enumerate(requests):
                steps[number // len(mine)] += request.indices_B.tolist()
        return steps

    assert batches(1, 0)[start:] == batches(4, start)


def test_balanced_runs_draw_by_the_key_and_read_the_image_of_each_index(tmp_path):
    files = {f"train/{'ab'[n > 0]}/{n}.png": encoded(Image.new("RGB", (8, 8), (n, n, n)), "PNG") for n in range(12)}
    index = read_index(write(tmp_path, files), "train")
    data = ["--data.loader=torchvision", "--data.num_classes=2", "--data.image_size=8", "--data.flip=false"]
    sizes = [f"--batch.{name}=12" for name in ("global_batch_size", "microbatch_size", "bn_span")]
    small = ["--model.name=resnet9", "--model.options.width=4", "--compute.mode=eager"]
    config = load_config(["--config=quickstart", *data, *sizes, *small, "--data.balance=1"])
    crop = random_resized_crop(seed=0, scale=(0.3, 1.0))
    common = {"source": index, "crop": crop, "image_size": lambda epoch: 8, "microbatch_size": 12}
    loader = make_loader(LoaderSetup(**common, device=torch.device("cpu"), data=config.data))
    plan = SimpleNamespace(microbatches=[0], first_step=0, num_steps=2)
    split = Split(len(index), loader, index)
    for batch in train_batches(config, split, plan=plan):
        assert batch.labels_B.tolist().count(0) == 6, "of one image, and six of eleven others"
        grey_B = batch.images_BCHW.float().mean((1, 2, 3)).round().int().tolist()
        expected = [int(index.paths[each % 12].split("/")[1][:-4]) for each in batch.request.indices_B.tolist()]
        assert grey_B == expected
        assert [int(index.paths[position].split("/")[1][:-4]) for position in positions_of(batch)] == expected
        assert batch.valid_B.all()
    loader.close()
