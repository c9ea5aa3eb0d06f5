"""Proves that a change of the code changed no result: the same short jobs by another commit's sources and by these.

    python tests/proofs.py COMMIT          # 4 minutes on 2 cores; exit code 1 if the final weights of a job differ
    make proofs AGAINST=COMMIT

Both sides run on this machine, so no hash of one machine's rounding is kept anywhere. A job trains 8 steps of a small
network on generated tensors; what is compared is the SHA-256 of all tensors of its last checkpoint's model.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 240.0
SMALL = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 128,
    "data.image_size": 16,
    "data.probe_seconds": 0,
    "model.options.width": 4,
    "batch.global_batch_size": 32,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.epochs": 2,
    "run.checkpoint_every_steps": 2,
    "schedule.warmup_epochs": 1,
    "compute.cpu_threads": 1,
}
SCALED = {"optimizer.loss_scale": 256.0, "optimizer.loss_scale_growth_steps": 2000}


@dataclass(frozen=True)
class Case:
    """A job: its ranks and what its config states beside SMALL; is_killed: it is killed once, and continues."""

    name: str
    ranks: int
    values: Mapping[str, Any]
    is_killed: bool = False


def cases() -> Iterator[Case]:
    """Yield every job."""
    for precision in ("fp32", "bf16", "fp16"):
        scaled = SCALED if precision == "fp16" else {}
        for ranks in (1, 2, 4):
            yield Case(f"{precision}, {ranks} ranks", ranks, {"optimizer.precision": precision, **scaled})
    yield Case("fp32, 2 ranks, killed and resumed", 2, {"run.epochs": 6}, is_killed=True)
    for algorithm in ("native", "ring", "hierarchical", "sharded", "doubling"):
        values = {"run.reproducible": True, "comm.algorithm": algorithm, "comm.backend": "tcp"}
        yield Case(f"reproducible, {algorithm}", 4, {**values, "comm.group_size": 2})
    yield Case("reproducible, gloo", 2, {"run.reproducible": True, "comm.backend": "gloo"})


def final_hash(tree: Path, case: Case, folder: Path) -> str:
    """Run a job by a tree's sources, and return the digest of its model."""
    values = {**SMALL, **case.values, "run.directory": folder / "run"}
    words = ["launch", "local", "--ranks", str(case.ranks), "--", "train", "--config", "quickstart"]
    words += [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bigbatch", *words]
    if case.is_killed:
        kill_after_checkpoint(command, folder / "run", environ)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise SystemExit(
            f"{case.name}: exit code {done.returncode} by {tree}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return digest(max((folder / "run/checkpoints").glob("step-*/state.pt")))


def kill_after_checkpoint(command: list[str], run: Path, environ: Mapping[str, str]) -> None:
    """Start a job, and kill all of it as soon as its first checkpoint is there."""
    job = subprocess.Popen(
        command,
        cwd=run.parent,
        env=dict(environ),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + LIMIT_SECONDS
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        if job.poll() is not None or time.monotonic() > end:
            raise SystemExit("the job that is to be killed has no checkpoint")
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    time.sleep(1.0)  # its ranks are in sessions of their own, and end with the launcher


def digest(path: Path) -> str:
    """Return the SHA-256 over names, types and bytes of the tensors of a checkpoint's model, by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(torch.load(path, weights_only=True)["model"].items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else str(tensor).encode())
    return found.hexdigest()


def main() -> int:
    """Compare; return 1 if a job's weights differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="whose sources are compared with these")
    commit = parser.parse_args().commit
    differing = 0
    with tempfile.TemporaryDirectory(prefix="bigbatch-proofs-") as name:
        old = Path(name) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", old, commit], cwd=ROOT, check=True)
        try:
            for number, case in enumerate(cases()):
                hashes = []
                for side, tree in (("old", old), ("new", ROOT)):
                    folder = Path(name) / f"{number}-{side}"
                    folder.mkdir()
                    hashes.append(final_hash(tree, case, folder))
                is_equal = hashes[0] == hashes[1]
                differing += not is_equal
                shown = " ".join(each[:12] for each in hashes)
                print(f"{case.name:36} {shown} {'equal' if is_equal else 'DIFFERS'}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)
    print(f"{differing} jobs end with other weights than by {commit}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
