"""The global order: a permutation per epoch, the same for all world sizes and after any resume."""

import errno
import os

import numpy as np
import pytest
from error_texts import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_images import touch

from bigbatch.errors import DataError
from bigbatch.trainer.config.batch import Division
from bigbatch.trainer.input.order import describe_left_out, epoch_order, eval_requests, read_index, train_requests

SIZES = {"seed": 5, "num_samples": 100, "global_batch_size": 24}


WHOLE = Division(12, world_size=1)


def train_indices(*, division=WHOLE, rank=0, microbatch_size=2, start_step=0, end_step=10, **options):
    """[(epoch, indices)] of one rank."""
    requests = train_requests(
        **SIZES | options,
        microbatch_size=microbatch_size,
        microbatches=division.of(rank),
        start_step=start_step,
        end_step=end_step,
    )
    return [(request.epoch, request.indices_B.tolist(), request.valid_B.all()) for request in requests]


def test_order_depends_on_seed_and_epoch_and_is_uniform():
    orders = np.array([epoch_order(seed=s, epoch=e, num_samples=20) for s in range(40) for e in range(50)])
    assert len({tuple(order) for order in orders.tolist()}) == 2000
    # each value at each place: 2000 / 20 = 100 times, standard deviation 9.75; five of them
    counts = np.array([(orders == value).sum(axis=0) for value in range(20)])
    assert np.abs(counts - 100).max() < 49


def test_order_is_the_one_that_old_checkpoints_expect():
    words = np.random.Philox(np.random.SeedSequence((3, 4))).random_raw(9).tolist()
    expected = [place for _, place in sorted(zip(words, range(9), strict=True))]
    assert epoch_order(seed=3, epoch=4, num_samples=9).tolist() == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 12])
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_order_every_world_size_sees_the_same_global_batches(world_size, microbatch_size):
    division = Division(24 // microbatch_size, world_size)
    ranks = [train_indices(division=division, rank=rank, microbatch_size=microbatch_size) for rank in range(world_size)]
    for step in range(10):
        epoch, step_in_epoch = divmod(step, 4)  # 100 // 24 steps per epoch, 4 samples left out
        order = epoch_order(seed=5, epoch=epoch, num_samples=100).tolist()
        counts = [len(rank) // 10 for rank in ranks]
        parts = [rank[step * count : (step + 1) * count] for rank, count in zip(ranks, counts, strict=True)]
        seen = [index for part in parts for _, indices, _ in part for index in indices]
        assert seen == order[step_in_epoch * 24 : (step_in_epoch + 1) * 24]
        assert all(request[0] == epoch and request[2] for part in parts for request in part)


@pytest.mark.parametrize("start_step", [0, 1, 3, 4, 9, 10])
def test_order_resume_is_the_tail(start_step):
    whole = train_indices(division=Division(12, 5), rank=1)
    assert train_indices(division=Division(12, 5), rank=1, start_step=start_step) == whole[start_step * 3 :]


def test_train_requests_refuse_an_epoch_without_a_global_batch():
    with pytest.raises(ValueError, match=naming("num_samples 10", "global_batch_size 12")):
        train_indices(num_samples=10, global_batch_size=12)


@given(num_samples=st.integers(1, 200), microbatch_size=st.integers(1, 17), world_size=st.integers(1, 9))
@settings(max_examples=60)
def test_order_evaluation_counts_each_image_once(num_samples, microbatch_size, world_size):
    ranks = [
        list(eval_requests(num_samples=num_samples, microbatch_size=microbatch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    requests = [request for rank in ranks for request in rank]
    assert {len(rank) for rank in ranks} == {-(-num_samples // (microbatch_size * world_size))}
    assert {len(request.indices_B) for request in requests} == {microbatch_size}
    counted = np.concatenate([request.indices_B[request.valid_B] for request in requests])
    assert sorted(counted.tolist()) == list(range(num_samples))
    assert all((request.indices_B < num_samples).all() for request in requests)


def test_read_index_names_the_key_for_a_folder_that_moved(tmp_path):
    """A finished run keeps the folder of its images, so a command on it must be told the new one."""
    with pytest.raises(DataError, match=naming(tmp_path / "val", "no such folder", "--data.root", "data prepare")):
        read_index(tmp_path, "val")


def test_read_index_takes_nested_images_and_counts_what_it_leaves_out(tmp_path):
    touch(
        tmp_path, "train/a/1.jpg", "train/a/in/deep/2.JFIF", "train/a/in/3.jpe", "train/a/._1.jpg", "train/a/.in/4.jpg"
    )
    touch(
        tmp_path, "train/a/5.bmp", "train/a/in/6.TIFF", "train/b/7.webp", "train/b/8.bmp", "train/9.png", "val/a/1.jpg"
    )
    index, val = read_index(tmp_path, "train"), read_index(tmp_path, "val")
    assert list(index.paths) == ["a/1.jpg", "a/in/3.jpe", "a/in/deep/2.JFIF", "b/7.webp"]
    assert index.labels_N.tolist() == [0, 0, 0, 1]
    assert index.left_out == {".bmp": 2, ".tiff": 1, "in no class folder": 1, "hidden": 1}
    line = describe_left_out("my data", index, val, None)
    assert line.startswith("5 files are left out: 2 .bmp, ")
    assert line.endswith("; `bigbatch data check 'my data'` names them")
    assert describe_left_out("tiny", val) is None


def test_read_index_refuses_a_class_whose_images_no_loader_reads(tmp_path):
    touch(tmp_path, "train/a/in/x.bmp", "train/a/in/y.bmp")
    with pytest.raises(DataError, match=naming(f"{tmp_path}/train/a:", "2 files such as in/x.bmp")):
        read_index(tmp_path, "train")


@pytest.mark.parametrize(("one", "other"), [("café", "cafe\u0301"), ("Cat", "cat"), ("01", "1"), ("a b", "a  b")])
def test_read_index_refuses_two_spellings_of_a_class(tmp_path, one, other):
    touch(tmp_path, f"train/{one}/x.jpg", f"val/{other}/x.jpg", f"both/{one}/x.jpg", f"both/{other}/x.jpg")
    for split in ("val", "both"):
        with pytest.raises(DataError, match=naming(f"{tmp_path}/{split}:", one, other, "rename one")):
            read_index(tmp_path, split, classes=[one])


def test_read_index_names_what_is_wrong(tmp_path):
    touch(tmp_path, "train/a/x.jpg", "train/b/x.txt", "empty/readme", *(f"val/{c}/x.jpg" for c in "acdef"))
    with pytest.raises(DataError, match=naming(f"{tmp_path}/absent:", "absent/<class>/<image>")):
        read_index(tmp_path, "absent")
    with pytest.raises(DataError, match=naming(f"{tmp_path}/empty:", "empty/<class>/<image>")):
        read_index(tmp_path, "empty")
    with pytest.raises(DataError, match=naming(f"{tmp_path}/train/b:", ".jpg, .jpeg, .png, .webp")):
        read_index(tmp_path, "train")
    with pytest.raises(DataError, match=naming(f"{tmp_path}/val:", "lacks 1", ": b;", "excess 4", ": c, d, e, ...")):
        read_index(tmp_path, "val", classes=["a", "b"])
    assert read_index(tmp_path, "val", classes=list("acdef")).classes == tuple("acdef")
    with pytest.raises(DataError, match=naming("another order", "label 0 is a here", "and f there", "in one form")):
        read_index(tmp_path, "val", classes=list("fedca"))


@pytest.mark.parametrize("folder", ["train", "train/a/in"])
def test_read_index_names_a_folder_that_cannot_be_read(tmp_path, monkeypatch, folder):
    touch(tmp_path, "train/a/x.jpg", "train/a/in/y.jpg")
    real_scandir = os.scandir

    def scandir(path):  # a mode would not stop root
        if str(path).endswith(f"/{folder}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real_scandir(path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(DataError, match=naming(f"{tmp_path}/{folder}:", os.strerror(errno.EACCES))):
        read_index(tmp_path, "train")
