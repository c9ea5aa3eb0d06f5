"""Storage that fails for a while, for good, or never answers; and images that come slowly."""

import errno
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_process import from_checkout
from error_texts import naming
from image_loaders import COMMON_SETTINGS, bigbatch_threads, made_loaders, resident
from sample_images import encoded, smooth_image, with_bad_tables, write

from bigbatch import cli
from bigbatch.errors import DataError, StorageError
from bigbatch.trainer.augment.crops import center_crop, random_resized_crop
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input import reading, retry
from bigbatch.trainer.input.base import Request
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.loaders.encoded import make_image_loader
from bigbatch.trainer.input.reading import MAX_THREADS, ReadingThreads

SETTINGS = COMMON_SETTINGS | {"crop": random_resized_crop(seed=7), "image_size": 32, "patience_seconds": 60.0}
STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
SLACK_SECONDS = 100.0
"""For a busy machine; less than what would be waited for without need."""
STEP_SECONDS = 0.125


class Clock:
    """The time that reads go by: it passes as they take it, and while none but those that never return is under way.

    So a machine that stands still for seconds changes nothing.
    """

    def __init__(self):
        self.now, self.silent, self.is_over = 0.0, frozenset(), False
        self._reading, self._num_looks, self._changed = [], 0, threading.Condition()

    def seconds(self):
        with self._changed:
            if not threading.current_thread().name.startswith("bigbatch-read"):  # a thread that waits for them looks
                self._num_looks += 1
                if self._reading and self.silent.issuperset(self._reading):
                    self.now += 0.05
                self._changed.notify_all()
            return self.now

    @contextmanager
    def reading(self, position):
        with self._changed:
            self._reading.append(position)
        try:
            yield
        finally:
            with self._changed:
                self._reading.remove(position)

    def sleep(self, seconds):
        """Advance the clock in steps; the thread that waits for the reads sees each step."""
        while seconds > 0 and not self.is_over:
            with self._changed:
                step, seen = min(seconds, STEP_SECONDS), self._num_looks
                self.now, seconds = self.now + step, seconds - step
                # a look asks up to three times
                assert self._changed.wait_for(lambda seen=seen: self._num_looks > seen + 6 or self.is_over, 200)

    def end(self):
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


class PlayedEvent(threading.Event):
    """Waits by a clock of ours."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def wait(self, timeout):
        if not self.is_set():
            self._clock.sleep(timeout)
        return self.is_set()


@pytest.fixture
def clock(brisk, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retry, "awake_seconds", clock.seconds)
    monkeypatch.setattr(retry, "Event", lambda: PlayedEvent(clock))
    monkeypatch.setattr(retry, "CHECK_SECONDS", 0.005)
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", STEP_SECONDS)  # a power of two, so that sums are exact
    monkeypatch.setattr(reading, "IMAGES_PER_SECOND", 0)  # this clock adds up what several threads take
    yield clock
    clock.end()


class Storage:
    """Images in memory; reading may fail for a number of times, take time, or wait until it is released."""

    def __init__(self, num_images=8, *, failures=None, cause=STALE, seconds=0.0, silent=(), clock=None):
        self.clock = clock or Clock()
        self.clock.silent = frozenset(silent)
        self.images = [encoded(smooth_image(n, 60, 50)) for n in range(num_images)]
        self.classes, self.labels_N = ("a",), np.zeros(num_images, np.int64)
        self.failures, self.cause, self.seconds, self.silent = dict(failures or {}), cause, seconds, silent
        self.num_reads = [0] * num_images
        self.release = threading.Event()

    def __len__(self):
        return len(self.images)

    def name(self, position):
        return f"far/away/{position}.jpg"

    def read(self, position):
        self.num_reads[position] += 1
        with self.clock.reading(position):
            self.clock.sleep(self.seconds)
            if position in self.silent:
                self.release.wait()
        if self.num_reads[position] <= self.failures.get(position, 0):
            raise StorageError(f"{self.name(position)}: is gone") from self.cause
        return self.images[position]

    def sizes(self, positions_B):
        return None

    def close(self):
        pass


FOREVER = 10**9
WORST_SECONDS = retry.GRACE_SECONDS + retry.CHECK_SECONDS


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """No outage before."""
    monkeypatch.setattr(retry, "OUTAGE", retry.Outage())


@pytest.fixture
def brisk(monkeypatch):
    """Reads that do not return are soon given up."""
    monkeypatch.setattr(retry, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(retry, "CHECK_SECONDS", 0.1)


@pytest.fixture(params=["torchvision", "dali"])
def make(request):
    """Make a reader as in the other tests; silent storage answers before the loaders are closed."""
    storages = []
    with made_loaders(request.param, SETTINGS, slack_seconds=SLACK_SECONDS) as make_loader:

        def make(storage, **changed):
            storages.append(storage)
            return make_loader(storage, **changed)

        yield make
        for storage in storages:
            if isinstance(storage, Storage):
                storage.release.set()


def ask(*positions):
    return Request(0, np.array(positions), np.ones(len(positions), bool))


def test_reading_reads_that_fail_for_a_while_change_nothing(make, capsys):
    asked = [ask(0, 1, 2, 3), ask(4, 5, 6, 7)]
    expected = [batch.images_BCHW.clone() for batch in make(Storage()).load(asked)]
    storage = Storage(failures={1: 2, 2: 1, 7: 1})
    batches = [batch.images_BCHW.clone() for batch in make(storage).load(asked)]
    assert all(torch.equal(one, other) for one, other in zip(batches, expected, strict=True))
    assert storage.num_reads == [1, 3, 2, 1, 1, 1, 1, 2]
    (line,) = capsys.readouterr().err.splitlines()  # one outage, though three images were met by it
    assert re.fullmatch(rf"far/away/[12].jpg: .*{os.strerror(errno.ESTALE)}.* 60 s", line)


def test_reading_the_next_outage_is_told_again(monkeypatch, capsys):
    monkeypatch.setattr(retry, "OUTAGE_GAP_SECONDS", 0.0)
    reads = retry.PatientReads(Storage(failures={0: 1, 1: 1}), patience_seconds=60.0)
    reads.read(0)
    reads.read(1)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "far/away/0.jpg",
        "far/away/1.jpg",
    ]


def test_reading_a_read_that_never_succeeds_ends_after_the_patience(make, clock, capsys):
    storage = Storage(failures={3: FOREVER}, clock=clock)
    with pytest.raises(StorageError, match=r"^far/away/3.jpg: is gone \(.* 0\.5 s: data.patience_seconds\)$"):
        list(make(storage, patience_seconds=0.5).load([ask(0, 1, 2, 3)]))
    assert clock.now == 0.5
    assert storage.num_reads[3] == 4  # at 0, 0.125, 0.375 and 0.5 s
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("cause", [None, ValueError("the shard was cut")])
def test_reading_what_the_system_did_not_refuse_is_not_tried_again(make, capsys, cause):
    storage = Storage(failures={0: FOREVER}, cause=cause)
    with pytest.raises(StorageError, match=r"^far/away/0.jpg: is gone$"):
        list(make(storage).load([ask(0, 1, 2, 3)]))
    assert storage.num_reads[0] == 1
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize("end", ["close the loader", "load again", "close the iterator", "close while silent"])
def test_reading_an_unused_batch_never_blocks_on_storage(make, end):
    storage = Storage(silent={5}) if end == "close while silent" else Storage(failures={5: FOREVER})
    # DALI hands out a batch when it has been fed as many more as it works ahead
    loader = make(storage, patience_seconds=200.0, prefetch_batches=1)
    batches = loader.load([ask(0, 1, 2, 3), ask(4, 5, 6, 7)])
    next(batches)
    while not storage.num_reads[5]:
        time.sleep(0.01)
    start = time.monotonic()
    if end == "load again":
        assert len(list(loader.load([ask(0, 1, 2, 3)]))) == 1
    else:
        (batches if end == "close the iterator" else loader).close()
    assert time.monotonic() - start < SLACK_SECONDS


@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_reading_a_failure_comes_in_its_place(make, prefetch_batches):
    """What was read before is delivered: the loop saves a checkpoint after it."""
    storage = Storage(12, failures={9: FOREVER})
    batches = make(storage, patience_seconds=0.0, prefetch_batches=prefetch_batches).load(
        [ask(0, 1, 2, 3), ask(4, 5, 6, 7), ask(8, 9, 10, 11)]
    )
    assert [next(batches).request.indices_B[0] for _ in range(2)] == [0, 4]
    with pytest.raises(StorageError, match=r"far/away/9.jpg"):
        next(batches)


def test_reading_a_read_that_does_not_return_is_named(make, clock):
    storage = Storage(silent={6}, clock=clock)
    batches = make(storage, patience_seconds=0.2).load([ask(0, 1, 2, 3), ask(4, 5, 6, 7)])
    next(batches)
    with pytest.raises(StorageError) as caught:
        next(batches)
    assert clock.now < 2 * (0.2 + 1)
    found = re.fullmatch(
        r"far/away/6.jpg: a read has not returned for (.*) s \(data.patience_seconds=0.2\); check whether its "
        r"file system answers",
        str(caught.value),
    )
    assert 0.4 <= float(found[1]) <= clock.now + 0.05  # to a tenth
    storage.release.set()


def test_reading_the_worst_case_is_what_the_config_leaves_time_for():
    """It asks for 2 * (data.patience_seconds + 1) within comm.timeout_seconds."""
    assert WORST_SECONDS <= 2


def slow(storage, microbatch_size, **changed):
    settings = {"microbatch_size": microbatch_size, "num_threads": 1, "patience_seconds": 0.4}
    return make_image_loader("torchvision", storage, **(SETTINGS | settings | changed))


def test_reading_slow_reads_are_not_stuck(clock):
    """Longer in all than one read may take; also where all are of one image, as at the end of an evaluation."""
    loader = slow(Storage(1, seconds=0.2, clock=clock), 4)
    assert len(list(loader.load([ask(*[0] * 4)]))) == 1
    assert clock.now > 0.4 + retry.GRACE_SECONDS
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slow", "failing"])
def test_reading_a_batch_waits_for_slow_storage_for_twice_the_patience(how, clock):
    """Each image comes within the patience, and all together later than the other ranks wait."""
    trouble = {"seconds": 0.3} if how == "slow" else {"failures": dict.fromkeys(range(8), 2)}
    storage = Storage(8, **trouble, clock=clock)
    loader = slow(storage, 8)
    with pytest.raises(StorageError) as caught:
        list(loader.load([ask(*range(8))]))
    assert clock.now < 2 * (0.4 + 1)
    text = str(caught.value)
    found = re.match(r"far/away/(\d).jpg: .* (\d) of 8 images are read after the step has waited ([0-9.]+) s\.", text)
    assert found, text
    assert re.search(naming("data.patience_seconds=0.4", "batch.microbatch_size"), text)
    # 0.3 s each: the fourth comes after 1.2 s, later than 2 * 0.4 + GRACE_SECONDS
    assert 1 <= int(found[1]) == int(found[2]) <= 4
    assert 2 * 0.4 + retry.GRACE_SECONDS <= float(found[3]) < 2 * (0.4 + 1)
    loader.close()


@pytest.mark.slow
def test_reading_the_time_of_all_that_a_batch_waits_for_counts(clock):
    """DALI hands out its first batch when more are read: each of these comes in time alone."""
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    changed = {"patience_seconds": 0.4, "prefetch_batches": 4, "num_threads": 1}
    loader = make_image_loader("dali", Storage(8, seconds=0.15, clock=clock), **(SETTINGS | changed))
    with pytest.raises(StorageError, match=naming("far/away/", "data.patience_seconds=0.4", "batch.microbatch_size")):
        list(loader.load([ask(0, 1, 2, 3), ask(4, 5, 6, 7)] * 3))
    assert clock.now < 2 * (0.4 + 1)
    loader.close()


@pytest.mark.long
def test_reading_ahead_may_be_slow_while_no_step_waits(clock):
    storage = Storage(8, seconds=0.2, clock=clock)
    loader = slow(storage, 4, prefetch_batches=1)
    batches = loader.load([ask(*range(4)), ask(*range(4, 8)), ask(*range(4))])
    next(batches)  # 0.8 s
    storage.seconds = 0.5
    before = clock.now
    while clock.now < before + 1.4:  # longer than 2 * 0.4 + GRACE_SECONDS
        time.sleep(0.01)
    storage.seconds = 0.0
    assert len(list(batches)) == 2
    loader.close()


class Down(Storage):
    """All reads fail or never return, from the first read of image 8 on."""

    def __init__(self, *, is_silent, clock):
        super().__init__(16, clock=clock)
        self.is_silent, self.is_down = is_silent, False

    def read(self, position):
        self.is_down = self.is_down or position == 8
        if self.is_down and self.is_silent:
            self.silent = self.clock.silent = frozenset(range(16))
        self.failures = dict.fromkeys(range(16), FOREVER) if self.is_down else {}
        return super().read(position)


@pytest.mark.long
@pytest.mark.parametrize("is_silent", [False, True])
def test_reading_an_image_to_skip_does_not_make_storage_be_waited_for_twice(make, is_silent, clock):
    """While what is behind it cannot be read: neither before it is skipped, nor again afterwards."""
    storage = Down(is_silent=is_silent, clock=clock)
    storage.images[5] = with_bad_tables(storage.images[5])
    loader = make(storage, patience_seconds=1.5, max_skipped=3, num_threads=1)
    batches = loader.load([ask(*range(n, n + 4)) for n in range(0, 16, 4)])
    times = [clock.now]
    with pytest.raises(StorageError):
        times.extend(clock.now for _ in batches)
    assert np.diff([*times, clock.now]).max() < 2 * 1.5 - 0.2


def test_reading_the_resident_loader_is_patient_too(clock, capsys):
    storage = Storage(failures={3: 2}, clock=clock)
    common = {"crop": center_crop(fraction=1.0), "image_size": 50, "microbatch_size": 4, "device": "cpu"}
    storage.images = [encoded(smooth_image(n, 50, 50)) for n in range(8)]
    resident(storage, **common, patience_seconds=60.0)
    assert storage.num_reads[3] == 3
    storage.silent = clock.silent = {6}
    with pytest.raises(StorageError, match=naming("far/away/6.jpg: ", "data.patience_seconds=0.2")):
        resident(storage, **common, patience_seconds=0.2)
    storage.release.set()
    storage.failures, storage.silent, clock.silent = {2: FOREVER}, set(), set()
    with pytest.raises(StorageError, match=r"far/away/2.jpg: is gone \(.* s: data.patience_seconds"):
        resident(storage, **common, patience_seconds=0.2)


class Watched:
    """An index whose reads a clock knows."""

    def __init__(self, index, clock):
        self._index, self._clock = index, clock

    def read(self, position):
        with self._clock.reading(position):
            return self._index.read(position)

    def __len__(self):
        return len(self._index)

    def __getattr__(self, name):
        return getattr(self._index, name)


def test_reading_a_shard_that_does_not_open_is_named_and_blocks_no_close(make, clock, tmp_path, monkeypatch):
    files = {f"{split}/a/{n}.jpg": encoded(smooth_image(n)) for split in ("train", "val") for n in range(4)}
    pack(write(tmp_path / "folder", files), tmp_path / "packed", recipe=PackRecipe(shard_bytes=1))
    index = open_split(tmp_path / "packed", "train")
    silent, clock.silent = str(tmp_path / "packed/train/shard-000001.tar"), {1}
    answered, opened = threading.Event(), os.open

    def open_late(path, *rest, **named):
        """Open like os.open, but the shard only once the storage has answered."""
        assert path != silent or answered.wait(60)
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", open_late)
    loader = make(Watched(index, clock), patience_seconds=0.1)
    with pytest.raises(StorageError, match=naming(f"{silent}: image 00000001: ", "data.patience_seconds=0.1")):
        list(loader.load([ask(0, 1, 2, 3)]))
    loader.close()
    assert len(index.read(0)) > 0
    answered.set()


def as_pipe(path):
    """Replace path by a pipe that blocks the thread that opens it."""
    path.unlink()
    os.mkfifo(path)
    return path


def test_reading_threads_that_wait_for_a_file_system_do_not_hold_the_process(monkeypatch, capsys):
    left, release = [], threading.Event()
    monkeypatch.setattr(cli.os, "_exit", left.append)
    before = bigbatch_threads()
    assert not [thread for thread in before if not thread.daemon]
    for is_daemon in (True, False):
        threading.Thread(target=release.wait, name="bigbatch-read_0", daemon=is_daemon).start()
        cli.main(["data", "check", "no/such/folder"])
        assert left == ([] if is_daemon else [1])
    release.set()
    for thread in bigbatch_threads() - before:
        thread.join()
    assert "no/such/folder" in capsys.readouterr().err


TINY = {
    "data.image_size": 32,
    "data.loader": "torchvision",
    "data.patience_seconds": 0.5,
    "data.prefetch_batches": 1,
    "model.options.width": 4,
    "batch.global_batch_size": 8,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.log_every_steps": 1,
    "run.epochs": 1,
    "schedule.warmup_epochs": 1,
}


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "val"])
def test_reading_a_run_ends_though_a_file_never_opens(tmp_path, split):
    root = tmp_path / "shapes"
    write_dataset(root, train_per_class=4, val_per_class=2, side_pixels=(36, 48))
    silent = as_pipe(sorted((root / split / "disk").iterdir())[0])
    settings = {**TINY, "data.root": root, "run.directory": tmp_path / "run"}
    command = ["train", "--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items())]
    done = subprocess.run(
        [sys.executable, "-m", "bigbatch", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=from_checkout(),
        cwd=Path(cli.__file__).parents[1],
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("bigbatch: ")]
    assert str(silent) in line
    assert "Traceback" not in done.stderr


def chosen(threads, latencies):
    numbers = []
    for latency in latencies:
        threads.adapt(latency)
        numbers.append(threads.number)
    return numbers


def test_reading_threads_follow_the_latency_by_littles_law():
    """24 reads of 3 ms under way are 8,000 images/s; 12,000 are aimed at."""
    threads = ReadingThreads(2)
    assert chosen(threads, [50e-6] * 3) == [2, 2, 2]  # a local disk
    assert chosen(threads, [3e-3] * 6) == [4, 8, 16, 32, 36, 36]
    assert chosen(threads, [1e-3, 60e-6]) == [12, 2]  # now from the page cache
    assert chosen(threads, [1.0] * 6)[-2:] == [MAX_THREADS] * 2


def test_reading_threads_that_wait_for_each_other_are_not_increased():
    """Each read takes as long as there are threads: they share a core, a lock or a server."""
    threads, numbers = ReadingThreads(2), []
    for _ in range(8):
        numbers += chosen(threads, [threads.number * 2e-4])
    assert numbers == [4, 2, 2, 2] * 2


class Late(Storage):
    """Reading image `late` returns once it is released."""

    def __init__(self, num_images, late, **trouble):
        super().__init__(num_images, **trouble)
        self.late, self.is_asked = late, threading.Event()
        self.all_others, self._lock = threading.Event(), threading.Lock()

    def read(self, position):
        if position == self.late:
            self.is_asked.set()
            assert self.release.wait(200)
        data = super().read(position)
        with self._lock:
            if sum(self.num_reads) == len(self) - 1:
                self.all_others.set()
        return data


TWO_BATCHES = [ask(0, 1, 2, 3), ask(4, 5, 6, 7)]


def test_reading_goes_on_to_the_next_batch_while_one_image_is_late():
    storage = Late(8, 0)
    threading.Thread(target=lambda: storage.all_others.wait(200) and storage.release.set()).start()
    with made_loaders("torchvision", SETTINGS | {"prefetch_batches": 1}) as make:
        found = list(make(storage).load(TWO_BATCHES))
    assert [batch.request.indices_B.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("failing", [None, 3])
def test_reading_a_batch_comes_or_fails_though_a_read_of_the_next_one_does_not_return(failing, monkeypatch):
    monkeypatch.setattr(retry, "GRACE_SECONDS", 0.05)
    storage = Late(8, 7, failures={failing: FOREVER}, cause=None)
    with made_loaders("torchvision", SETTINGS | {"prefetch_batches": 1, "num_threads": 2}, slack_seconds=200) as make:
        batches = make(storage).load(TWO_BATCHES)
        if failing is None:
            assert next(batches).request.indices_B.tolist() == [0, 1, 2, 3]
            assert storage.is_asked.wait(200)
        else:
            with pytest.raises(StorageError, match=r"far/away/3.jpg: is gone"):
                next(batches)
        batches.close()
        assert not storage.release.is_set()
        storage.release.set()


def test_reading_raises_an_error_of_the_requests_in_its_place():
    def requests():
        yield ask(0, 1, 2, 3)
        raise DataError("no more requests")

    with made_loaders("torchvision", SETTINGS | {"prefetch_batches": 1}) as make:
        batches = make(Storage(4)).load(requests())
        assert next(batches).request.indices_B.tolist() == [0, 1, 2, 3]
        with pytest.raises(DataError, match="no more requests"):
            next(batches)


def test_reading_yields_a_batch_though_the_next_request_waits_for_it():
    has_come = threading.Event()

    def requests():
        yield ask(0, 1, 2, 3)
        assert has_come.wait(200)
        yield ask(3, 2, 1, 0)

    with made_loaders("torchvision", SETTINGS | {"prefetch_batches": 1}) as make:
        batches = make(Storage(4)).load(requests())
        assert next(batches).request.indices_B.tolist() == [0, 1, 2, 3]
        has_come.set()
        assert next(batches).request.indices_B.tolist() == [3, 2, 1, 0]


def test_reading_of_no_rows_is_done_at_once():
    reads = retry.PatientReads(Storage(), patience_seconds=0.0)
    assert reads.finish(reads.begin([], reads.read)) == []


def test_reading_uses_the_threads_that_the_system_allows(monkeypatch):
    reads, started, begin = retry.PatientReads(Storage(), patience_seconds=0.0), [], threading.Thread.start

    def start(thread):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with reads.threads():
        reads.use_threads(9)
        assert None not in reads.finish(reads.begin(range(8), reads.read))
    assert not any(thread.is_alive() for thread in started)
    with (
        pytest.raises(RuntimeError, match="can't start"),
        retry.PatientReads(Storage(), patience_seconds=0.0).threads(),
    ):
        retry.PatientReads(Storage(), patience_seconds=0.0).use_threads(1)


UNCLOSED = """
import sys, time
from bigbatch.trainer.input.retry import PatientReads

class Source:
    def read(self, position):
        if position == 7:
            time.sleep(1000)
        return b"data"

reads = PatientReads(Source(), patience_seconds=0.0)
context = reads.threads()
context.__enter__()
reads.use_threads(4)
assert len(reads.finish(reads.begin(range(4), reads.read))) == 4
reads.begin([7], reads.read)
sys.exit(3)
"""


def test_reading_threads_do_not_hold_a_process_that_leaves_a_loader_open():
    done = subprocess.run([sys.executable, "-c", UNCLOSED], timeout=200, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_reading_raises_the_first_error_of_a_batch_and_begins_no_further_row():
    reads, seconds_first, taken = retry.PatientReads(Storage(), patience_seconds=0.0), threading.Event(), []

    def take(row):
        taken.append(row)
        if row == 0:
            assert seconds_first.wait(200)
            raise StorageError("the first row")
        seconds_first.set()
        raise StorageError("the second row")

    with reads.threads():
        reads.use_threads(2)
        with pytest.raises(StorageError, match="the first row"):
            reads.finish(reads.begin(range(8), take))
    assert sorted(taken) == [0, 1]


class Together(Storage):
    """A read ends when as many are under way as its batch is expected to have threads."""

    def __init__(self, num_images, *, num_threads):
        super().__init__(num_images)
        self._num_threads, self._lock = num_threads, threading.Lock()
        self._num_begun = self._num_under_way = 0
        self._reached = [threading.Event() for _ in num_threads]

    def read(self, position):
        with self._lock:
            batch = min(self._num_begun // len(self.images), len(self._num_threads) - 1)
            self._num_begun, self._num_under_way = self._num_begun + 1, self._num_under_way + 1
            assert self._num_under_way <= self._num_threads[batch]
            if self._num_under_way == self._num_threads[batch]:
                self._reached[batch].set()
        assert self._reached[batch].wait(200)
        with self._lock:
            self._num_under_way -= 1
        return super().read(position)


def test_reading_many_threads_change_no_image_and_end(monkeypatch):
    """Latency is 3 ms by the clock of each thread."""
    own = threading.local()

    def seconds():
        own.now = getattr(own, "now", 0.0) + 3e-3
        return own.now

    monkeypatch.setattr(retry, "awake_seconds", seconds)
    num_images = 40
    storage = Together(num_images, num_threads=[2, 4, 8, 16, 32, 36])
    orders = np.random.default_rng(0).permuted([range(num_images)] * 6, axis=1)
    settings = SETTINGS | {"microbatch_size": num_images, "patience_seconds": 0.0, "prefetch_batches": 1}
    with made_loaders("torchvision", settings) as make:
        expected = list(make(Storage(num_images), num_threads=1).load([ask(*order) for order in orders]))
        loader = make(storage)
        found = list(loader.load([ask(*order) for order in orders]))
        storage.failures = {int(orders[0, 20]): FOREVER}
        with pytest.raises(StorageError, match="is gone"):
            list(loader.load([ask(*orders[0])]))
        storage.failures = {}
        again = loader.load([ask(*order) for order in orders])
        found.append(next(again))  # and the rest is dropped as the loader closes
    for batch, other in zip(found, [*expected, expected[0]], strict=True):
        assert batch.request.indices_B.tolist() == other.request.indices_B.tolist()
        assert torch.equal(batch.images_BCHW, other.images_BCHW)
