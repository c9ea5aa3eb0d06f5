"""bigbatch.train as a notebook calls it, in one process; and a script that every rank runs."""

import gc
import json
import os
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

import bigbatch
from bigbatch.errors import ConfigError
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.step.signals import STOP_SIGNALS

STEPS = 6


class Diary:
    """Hooks that record their arguments."""

    def __init__(self, *, stop_at: int | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def hooks(self) -> bigbatch.TrainingHooks:
        return bigbatch.TrainingHooks(
            on_step=self._step,
            on_report=lambda record: self.told.append(("report", record["step"], record["loss"])),
            on_evaluation=self._evaluation,
            on_checkpoint=lambda path: self.told.append(("checkpoint", str(path))),
            on_end=lambda summary: self.told.append(("end", summary["top1"])),
        )

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [rest for each, *rest in self.told if each == kind]  # type: ignore[misc]

    def _step(self, done: int) -> None:
        self.told.append(("step", done))
        if done == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    def _evaluation(self, record: dict[str, Any], model: nn.Module) -> None:
        assert not model.training
        self.told.append(("evaluation", record["step"], record["top1"]))


def settings(root: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings of six steps in two epochs."""
    tiny = {
        "data.root": root,
        "data.loader": "torchvision",
        "data.probe_seconds": 0,
        "data.image_size": 24,
        "data.train_sizes": [[0, 16], [1, 24]],
        "model.options.width": 2,
        "batch.global_batch_size": 16,
        "batch.microbatch_size": 8,
        "batch.bn_span": 8,
        "run.directory": folder,
        "run.epochs": 2,
        "run.eval_every_epochs": 1,
        "run.log_every_steps": 1,
        "run.checkpoint_every_steps": 2,
        "run.keep_checkpoints": 9,
        "schedule.warmup_epochs": 1,
        "comm.algorithm": "hierarchical",
    }
    return {**tiny, **{key.replace("__", "."): value for key, value in changes.items()}}


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_checkpoint(list_checkpoints(folder / "checkpoints")[-1].path)["model"])


def same(ours: Path, theirs: Path) -> bool:
    one, other = weights(ours), weights(theirs)
    return all(torch.equal(one[name], other[name]) for name in other)


def alive() -> Counter[str]:
    """Objects and functions of bigbatch, figures and models, by type and name."""
    homes = ("bigbatch.", "matplotlib.figure", "torch.nn.modules")
    named = [each if isinstance(each, FunctionType) else type(each) for each in gc.get_objects()]
    return Counter(f"{each.__module__}.{each.__qualname__}" for each in named if str(each.__module__).startswith(homes))


def notebook(root: str, out: str) -> int:
    """Cell by cell; the process fails where one does not do what the page says."""
    gc.disable()  # Python's own collection comes after any number of runs
    first, again = Path(out) / "first", Path(out) / "again"
    diary = Diary()
    summary = bigbatch.train("quickstart", settings(root, first), hooks=diary.hooks())
    assert summary == json.loads((first / "summary.json").read_text())
    records = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    told = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval")}
    assert diary.of("step") == [[done] for done in range(1, STEPS + 1)]
    assert diary.of("report") == [[r["step"], r["loss"]] for r in told["train"]]
    assert diary.of("evaluation") == [[r["step"], r["top1"]] for r in told["eval"]]
    assert [r["step"] for r in told["eval"]] == [3, 6]
    assert diary.of("checkpoint") == [[str(first / f"checkpoints/step-{done:08d}")] for done in (2, 3, 4, 6)]
    assert diary.told[-1] == ("end", summary["top1"])
    assert diary.told.index(("step", 3)) < diary.told.index(("evaluation", 3, told["eval"][0]["top1"]))

    before = alive()
    with torch.autocast("cpu"), torch.inference_mode():  # of an earlier cell, for example
        bigbatch.train("quickstart", settings(root, again), quiet=True)
    assert alive() - before == Counter(), "a run leaves these behind"
    assert same(again, first), "a second run in the same process is another"
    finished = Diary()
    assert bigbatch.train(first, hooks=finished.hooks(), quiet=True) == summary, "a finished run gives its summary"
    assert finished.told == [("evaluation", STEPS, summary["top1"]), ("end", summary["top1"])]
    return 0


def interruptions(root: str, out: str, undisturbed: str) -> int:
    """Interrupt a run and continue with it, and meet all else that ends one; undisturbed: the same run without."""
    stopped = Path(out) / "stopped"
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    interrupted = Diary(stop_at=4)
    with pytest.raises(SystemExit) as left:
        bigbatch.train("quickstart", settings(root, stopped), hooks=interrupted.hooks(), quiet=True)
    assert left.value.code == 130
    assert interrupted.of("step")[-1] < [STEPS]
    assert not interrupted.of("end")
    assert not same(stopped, Path(undisturbed))
    assert {number: signal.getsignal(number) for number in handlers} == handlers

    def fail(done: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bigbatch.train("quickstart", settings(root, stopped), hooks=bigbatch.TrainingHooks(on_step=fail), quiet=True)
    bigbatch.train("quickstart", settings(root, stopped), quiet=True)
    assert same(stopped, Path(undisturbed)), "what was stopped continued otherwise"

    with pytest.raises(ConfigError, match=naming("optimizer.lr", "schedule.base_lr")):
        bigbatch.train("quickstart", {"optimizer.lr": 1})
    with pytest.raises(ConfigError, match=naming("run.seed", "Tensor")):
        bigbatch.train("quickstart", {"run.seed": torch.ones(1)})
    with pytest.raises(TypeError, match=naming("overrides", "list")):
        bigbatch.train("quickstart", ["--run.epochs=2"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=naming("hooks", "TrainingHooks")):
        bigbatch.train("quickstart", hooks=bigbatch.TrainingHooks)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigError, match="main thread"):
        threads.submit(bigbatch.train, "quickstart").result()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    return 0


def script(root: str, out: str) -> int:
    """Print the hooks' arguments on this rank."""
    diary = Diary()
    summary = bigbatch.train("quickstart", settings(root, Path(out) / "run"), hooks=diary.hooks(), quiet=True)
    sys.stdout.write(json.dumps([diary.told, summary]) + "\n")  # in one piece, as the ranks share a file
    return 0
