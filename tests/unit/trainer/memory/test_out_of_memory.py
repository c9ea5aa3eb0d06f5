"""The largest microbatch that fits, what a run says that does not, and that nothing is lost by it."""

import ctypes
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import forked_ranks
import pytest
import torch
from error_texts import naming
from recorded_graph import RecordedCapture
from small_run import num_alive
from tiny_training import TINY

from bigbatch.errors import UserError
from bigbatch.trainer.build import parts
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.machine.host import is_out_of_memory
from bigbatch.trainer.memory import out_of_memory
from bigbatch.trainer.memory.largest_batch import SizeSearch, fits_memory, largest_fitting, run_steps, sizes_within
from bigbatch.trainer.memory.out_of_memory import explain, propose
from bigbatch.trainer.step import cuda_graph
from bigbatch.trainer.step.cuda_graph import Cut

CPU = torch.device("cpu")
M_ARENA_MAX = -8
"""From glibc's malloc.h."""
OF_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "67108864 bytes. Error code 12 (Cannot allocate memory)"
)
OF_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.17 GiB is free."
    " Including non-PyTorch memory, this process has 77.9 GiB memory in use."
)


def quickstart(global_batch_size: int, microbatch_size: int, bn_span: int, *words: str) -> Config:
    batch = {"global_batch_size": global_batch_size, "microbatch_size": microbatch_size, "bn_span": bn_span}
    settings = {"data.image_size": 32, "model.options.width": 4}
    settings |= {f"batch.{key}": value for key, value in batch.items()}
    return load_config(["--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items()), *words])


# --- the search ---


@pytest.mark.parametrize("limit", [0, 1, 7, 31, 96, 97, 4000])
@pytest.mark.parametrize("is_last_near", [True, False])
def test_out_of_memory_search_finds_the_largest_legal_size_below_a_limit(limit: int, is_last_near: bool) -> None:
    """Beside a count by hand: divisors of the span of 32, and its multiples."""
    sizes = sizes_within(quickstart(1024, 256, 32).batch, most=255)
    assert sizes == [1, 2, 4, 8, 16, *range(32, 256, 32)]
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest_fitting(sizes, fits, is_last_near=is_last_near)
    assert found == SizeSearch(max((size for size in sizes if size <= limit), default=None), is_complete=True)
    assert len(tried) == len(set(tried)) <= (4 if is_last_near else 9)
    if not is_last_near:
        assert all(size <= max(1, 2 * limit) + 32 for size in tried), "nothing far too large"


def test_out_of_memory_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    found = largest_fitting([1, 2, 4, 8, 16], lambda size: True, is_last_near=False, seconds=2)
    assert found == SizeSearch(2, is_complete=False), "two tries, after which the clock was past 2 s"
    assert largest_fitting([1], lambda size: True, is_last_near=False, seconds=-1) == SizeSearch(
        None, is_complete=False
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(OF_GPU), True),
        (RuntimeError(OF_CPU), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("FIND was unable to find an engine to execute this computation"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("could not create a primitive descriptor for a convolution"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("a decoder ended: out of memory?"), False),
        (KeyError("memory"), False),
    ],
)
def test_out_of_memory_is_recognised(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1, ()),
        (16, ("--augment.mixup_alpha=0.2", "--optimizer.ema_decay=0.9", "--optimizer.ema_every_steps=100")),
        (16, ("--optimizer.sharded=true", "--optimizer.precision=bf16_autocast")),
    ],
)
def test_out_of_memory_steps_run_at_any_size(size: int, words: tuple[str, ...]) -> None:
    assert run_steps(quickstart(64, 16, 8, *words), size, device=CPU, num_microbatches=2) > 0


def test_out_of_memory_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("bigbatch.trainer.memory.largest_batch.run_steps", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        fits_memory(quickstart(64, 16, 8), 4, device=CPU)


class FullCapture(RecordedCapture):
    """Has no memory left for graphs, beside what the steps before have taken."""

    def __call__(self, work: Callable[[Cut], torch.Tensor]) -> tuple[list[Callable[[], None]], torch.Tensor]:
        super().__call__(work)
        raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(("capture", "is_fitting"), [(RecordedCapture(), True), (FullCapture(), False)])
def test_out_of_memory_tries_are_captured_where_the_run_is(
    capture: RecordedCapture, is_fitting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two microbatches before the capture fit; then both graphs must, too."""
    monkeypatch.setattr(parts, "require_capturable", lambda communicator: None)
    monkeypatch.setattr(cuda_graph, "CudaCapture", lambda device: capture)
    config = quickstart(64, 16, 8, "--compute.cuda_graph=true")
    assert fits_memory(config, 4, device=CPU, num_microbatches=2) == is_fitting
    assert (capture.num_warm_ups, capture.num_captures) == (3, 2)


@pytest.mark.slow
def test_out_of_memory_a_try_that_fails_early_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of a reducer that is not closed would keep the model, and leave the next try less memory."""

    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("bigbatch.trainer.build.parts.make_loss", fail)
    before = num_alive("GradientReducer")
    assert not fits_memory(quickstart(64, 16, 8), 4, device=CPU)
    assert num_alive("GradientReducer") == before


# --- the line ---


@pytest.mark.parametrize(
    ("config", "world_size", "fitting", "expected", "note"),
    [
        ((512, 256, 32), 1, 96, {"microbatch_size": 64}, ""),
        ((512, 256, 32), 2, 96, {"microbatch_size": 64}, ""),
        ((512, 64, 64), 2, 63, {"microbatch_size": 32}, "each ghost batch lies on 2 ranks"),
        ((512, 64, 64), 1, 63, {"microbatch_size": 32, "bn_span": 32}, "over 32 images instead of 64"),
    ],
)
def test_out_of_memory_proposals_by_hand(
    config: tuple[int, int, int], world_size: int, fitting: int, expected: dict[str, int], note: str
) -> None:
    asked = quickstart(*config)
    words = propose(asked, fitting, world_size=world_size)
    assert {key: int(value) for key, value in re.findall(r"--batch\.(\w+) (\d+)", words)} == expected
    batch = replace(asked, batch=replace(asked.batch, **expected)).batch  # legal
    steps = accumulation_steps(batch, world_size=world_size)
    assert re.search(naming(f"({steps} accumulation steps)", "batch stays 512", note), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "reason", "words"),
    [
        (96, OF_GPU, r"1.17 GiB of 79.11 GiB were free\): at least 96 fits; with --batch.micro.* 64 "),
        (96, OF_CPU, r"\(67108864 bytes more were wanted\): at least 96 fits; with "),
        (1, "could not create a primitive", r"fit on cpu: at least 1 fits; with .* --batch.bn_span 1 "),
        (0, OF_CPU, r"no smaller one fits; choose a smaller model.name"),
        (None, OF_CPU, r": there was no time to try smaller ones; halve it and batch.bn_span$"),
    ],
)
def test_out_of_memory_messages_of_a_run_without_memory(
    limit: int | None, reason: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room's catalogue of messages: the one test here that holds whole sentences. limit: None if time is over."""
    tried: list[tuple[int, int]] = []

    def fits(config: Config, size: int, *, device: torch.device, num_microbatches: int) -> bool:
        tried.append((size, num_microbatches))
        assert (config.compute.cuda_graph, config.compute.compile) == (True, None), "captured as the run, not compiled"
        return size <= limit

    if limit is None:
        monkeypatch.setattr(out_of_memory, "SEARCH_SECONDS", -1.0)
    monkeypatch.setattr(out_of_memory, "fits_memory", fits)
    words_of_run = ("--compute.cuda_graph=true", "--compute.compile=default", "--compute.compile_fallback=true")
    config = quickstart(512, 256, 32, *words_of_run)
    line = explain(config, reason, stated=config, world_size=1, device=CPU)
    assert line.startswith("out of memory: batch.microbatch_size=256 does not fit on cpu")
    assert re.search(words, line), line
    assert "\n" not in line
    assert all(size < 256 and num == 2 for size, num in tried)


# --- with a real limit ---


def limited(megabytes: str, *command: str) -> int:
    """`bigbatch` in a process that may take so much more address space than it has now.

    One arena for all threads: as many as there happen to be at once would reserve 64 MB each.
    """
    from bigbatch.cli import main

    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)

    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    limit = 1024 * int(found[1]) + int(megabytes) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    return main(command)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts address space as Linux does")
def test_out_of_memory_a_run_without_memory_ends_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    """It trains for an epoch; then its command asks for a larger microbatch, which 330 MB do not hold."""

    def train(microbatch_size: int, epochs: int) -> tuple[int, str]:
        settings = TINY | {"data.num_synthetic_samples": 512, "data.image_size": 32, "model.options.width": 16}
        settings |= {"batch.global_batch_size": 512, "batch.microbatch_size": microbatch_size, "batch.bn_span": 32}
        settings |= {"schedule.warmup_epochs": 0, "run.epochs": epochs, "run.directory": tmp_path / "run"}
        words = ["train", "--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items())]
        log = tmp_path / f"{microbatch_size}.log"
        rank = forked_ranks.start_rank(
            "tests.unit.trainer.memory.test_out_of_memory:limited", ["330", *words], environ={}, stdout=log, stderr=log
        )
        codes = forked_ranks.exit_codes([rank], timeout_seconds=240)
        assert codes is not None, log.read_text()
        return codes[0], log.read_text()

    code, text = train(32, 1)
    assert code == 0, text
    saved = list_checkpoints(RunDir(tmp_path / "run").checkpoints)
    code, text = train(512, 2)
    assert code == 1, text
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("bigbatch: ")]
    assert len(lines) == 1, text
    match = re.match(
        r"bigbatch: out of memory: batch.microbatch_size=512 does not fit on cpu.*: at least (\d+) fits[;,]", lines[0]
    )
    assert match, lines[0]
    assert 1 <= int(match[1]) < 512
    assert "--compute.recomputed_blocks, up to 2" in lines[0]
    assert "batch stays 512" in lines[0]
    assert list_checkpoints(RunDir(tmp_path / "run").checkpoints) == saved
