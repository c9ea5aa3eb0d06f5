"""Effective training time: its share while ranks of a job are killed, for bigbatch and others.

    python -m benchmarks.faults.effective --out benchmarks/results/healing-time.json --plot healing-time.png

Each way trains a ResNet-18 on emulated nodes, one rank each, which needs what `bigbatch launch emulate` needs. A rank
that is drawn gets SIGKILL at moments that are drawn, or as soon as it runs again: one every --mean-seconds, on average.
What the last one cost is waited for. The share is the number of steps of the state at the end, times what a step takes
where nothing fails, of the time from the first step on. A failure's cost is the time until the job is as far as it was.
Name ways to measure these alone.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import at_least, conditions, run, spread, write_record
from bigbatch.errors import UserError

MARK = "BENCHMARK_MARK"
START_SECONDS = 120
END_SECONDS = 60
LOOK_SECONDS = 0.05
AGENTS = ("torch.distributed.run", "emulate")
"""Words in the commands of processes that start ranks."""
FIRST_STEP = 20
"""First timed step: kernels, links and the order of gradients are settled by then."""
PORT = 29511


@dataclass
class Progress:
    """Steps of a job over time, and its killed ranks."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    strikes: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the first of the steps, and the rank, of each kill."""

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step without failures: the median over polls that saw some steps."""
        taken = [
            (late - early) / (last - first)
            for (early, first), (late, last) in pairwise(self.steps)
            if last > first and not any(early <= when <= late for when, _ in self.strikes)
        ]
        return statistics.median(taken)

    def effective(self, seconds: float) -> float:
        """Return the share of effective training time in these seconds, or more if the last report came later."""
        return (self.steps[-1][1] - self.steps[0][1]) * self.step_seconds / max(seconds, self.steps[-1][0])

    @property
    def has_recovered(self) -> bool:
        """Return whether the job is further than at the last kill; the step under way then does not count."""
        if not self.strikes:
            return True
        return self.steps[-1][1] > self._last_before(self.strikes[-1][0])

    def _last_before(self, strike_seconds: float) -> float:
        """Return the furthest step before a kill; the other ranks may end the step under way."""
        return max(step for seconds, step in self.steps if seconds <= strike_seconds + self.step_seconds)

    def costs(self) -> Iterator[tuple[float, float]]:
        """Yield seconds until the job recovered, and lost steps, of each kill from which it did before the next."""
        for (when, _), (end, _) in pairwise([*self.strikes, (float("inf"), 0)]):
            noticed, before = when + self.step_seconds, self._last_before(when)
            after = [(seconds, step) for seconds, step in self.steps if noticed < seconds <= end]
            recovered = next((seconds for seconds, step in after if step > before), None)
            if recovered is not None:
                first = min(step for seconds, step in after if seconds <= recovered)
                yield recovered - when - self.step_seconds, max(0.0, before - (first - 1))


@dataclass(frozen=True)
class Method:
    """A method to survive failures."""

    what: str
    argv: Callable[[Path], list[str]]
    """The command, for a separate folder."""
    look: Callable[[Path], tuple[float, float] | None]
    """Returns the time and the step of the last report of a job in that folder."""


def main() -> None:
    options = parse()
    facts = conditions(options)
    found: dict[str, Any] = {}
    failed: list[str] = []
    known = ways(options)
    if unknown := [name for name in options.ways if name not in known]:
        raise UserError(f"there is no way {unknown[0]!r} here: choose among {', '.join(known)}")
    for name in options.ways or known:
        way = known[name]
        try:
            with tempfile.TemporaryDirectory() as folder:
                progress = follow(way, Path(folder), options)
        except UserError as error:  # keep the results of the others, which took minutes
            failed.append(f"{way.what}: {error}")
            continue
        share = progress.effective(options.seconds)
        costs = list(progress.costs())
        found[name] = {
            "what": way.what,
            "effective_share": share,
            "step_seconds": progress.step_seconds,
            "failures": len(progress.strikes),
            "cost_seconds": spread([cost for cost, _ in costs]) if costs else None,
            "steps_lost": spread([lost for _, lost in costs]) if costs else None,
            "strikes": progress.strikes,
            "steps": progress.steps,
        }
        cost = f"{statistics.median(cost for cost, _ in costs):.1f} s each" if costs else "none made good"
        print(f"{way.what:45} {100 * share:5.1f}%  {len(progress.strikes)} failures, {cost}", file=sys.stderr)
    if options.plot and found:
        plot(found, options)
    write_record(options.out, {"benchmark": "effective time", "conditions": facts, "ways": found})
    if failed:
        raise UserError("\n".join(failed))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help="healing, often, disk, torchrun, torchrun-often (all)")
    parser.add_argument("--nodes", type=at_least(2), default=2)
    parser.add_argument("--seconds", type=at_least(1), default=240, help="time of each way, from its first steps on")
    parser.add_argument("--mean-seconds", type=at_least(1), default=60, help="between two failures")
    parser.add_argument("--epoch-steps", type=at_least(1), default=300, help="between two checkpoints on disk")
    parser.add_argument(
        "--often-steps", type=at_least(1), default=20, help="between two checkpoints of the ways -often"
    )
    parser.add_argument("--batch", type=at_least(2), default=8, help="images of a rank and step")
    parser.add_argument("--image-size", type=at_least(32), default=64)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and the ranks")
    parser.add_argument("--plot", type=Path, help="PNG file: steps over time of each method")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def ways(options: argparse.Namespace) -> dict[str, Method]:
    """Return the ways that can be compared here, by name."""
    emulate = [sys.executable, "-m", "bigbatch", "launch", "emulate", "run", "--launcher", "plain"]
    emulate += ["--nodes", str(options.nodes)]
    peer = ["--batch", str(options.batch), "--image-size", str(options.image_size)]

    def ours(folder: Path, *, save_every: int = options.epoch_steps, heal: str = "restart") -> list[str]:
        keys: dict[str, object] = {
            "run.directory": folder / "run",
            "run.epochs": 100_000,
            "run.eval_every_epochs": 100_000,
            "run.log_every_steps": 1,
            "run.checkpoint_every_steps": save_every,
            "data.loader": "synthetic",
            "data.num_synthetic_samples": options.epoch_steps * options.batch * options.nodes,
            "data.probe_seconds": 0,
            "data.image_size": options.image_size,
            "model.name": "resnet18",
            "batch.global_batch_size": options.batch * options.nodes,
            "batch.microbatch_size": options.batch,
            "batch.bn_span": options.batch,
            "schedule.base_lr": 0.01,
            "comm.timeout_seconds": 15,
            "comm.warn_seconds": 3,
            "run.heal": heal,
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        return [*emulate, "--restarts", "1000", "--", "train", "--config", "quickstart", *words]

    def torchrun(folder: Path, *, save_every: int) -> list[str]:
        agent = ["-m", "torch.distributed.run", "--nnodes", str(options.nodes), "--nproc-per-node", "1"]
        agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"n0:{PORT}", "--max-restarts", "1000"]
        script = ["-m", "benchmarks.faults.ddp", "--folder", str(folder), "--save-every", str(save_every), *peer]
        return [*emulate, "--python", "--", *agent, *script]

    often, epoch = options.often_steps, options.epoch_steps
    healing = partial(ours, heal="in_place")
    return {
        "healing": Method("ours, healing in place", healing, look_at_run),
        "often": Method(f"ours, a checkpoint every {often} steps", partial(ours, save_every=often), look_at_run),
        "disk": Method(f"ours, a checkpoint every {epoch} steps", ours, look_at_run),
        "torchrun": Method(f"DDP, a checkpoint every {epoch} steps", partial(torchrun, save_every=epoch), look_at_note),
        "torchrun-often": Method(f"DDP, a checkpoint every {often}", partial(torchrun, save_every=often), look_at_note),
    }


def look_at_run(folder: Path) -> tuple[float, float] | None:
    """Read the last report of one of our runs."""
    path = folder / "run/metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2**16))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            report = json.loads(line)
            if report["kind"] == "train":
                return report["time"], report["step"]
    return None


def look_at_note(folder: Path) -> tuple[float, float] | None:
    """Read the last report of a peer."""
    try:
        seconds, step = (folder / "step").read_text().split()
    except FileNotFoundError:
        return None
    return float(seconds), float(step)


def follow(way: Method, folder: Path, options: argparse.Namespace) -> Progress:
    """Run a job, kill its ranks, and return its progress. Raises: UserError if it does not start, or ends."""
    mark = uuid.uuid4().hex
    draw = random.Random(options.seed)
    pending = list(moments(draw, options))
    progress, began = Progress(), 0.0
    with (folder / "output").open("w") as output, ended_job(way, folder, mark, output) as job:
        deadline = time.time() + START_SECONDS
        while (now := time.time()) < deadline or (not progress.has_recovered and now < deadline + END_SECONDS):
            if job.poll() is not None or (not began and time.time() > deadline - LOOK_SECONDS):
                raise UserError(f"the job ended, or took no step: {(folder / 'output').read_text()[-2000:]}")
            word = way.look(folder)
            if not began and word and word[1] >= FIRST_STEP:
                began, deadline = word[0], word[0] + options.seconds
            if began and word and (not progress.steps or (word[0] - began, word[1]) != progress.steps[-1]):
                progress.steps.append((word[0] - began, word[1]))
            if began and pending and time.time() - began >= pending[0][0]:
                when, rank = time.time() - began, pending[0][1]
                if process := find_rank(mark, rank):
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended: the next turn kills another
                        process.kill()
                        progress.strikes.append((when, rank))
                        pending.pop(0)
            time.sleep(LOOK_SECONDS)
    return progress


def moments(draw: random.Random, options: argparse.Namespace) -> Iterator[tuple[float, int]]:
    """Yield times of strikes, in seconds since the first steps, and their ranks."""
    seconds = draw.expovariate(1 / options.mean_seconds)
    while seconds < options.seconds:
        yield seconds, draw.randrange(options.nodes)
        seconds += draw.expovariate(1 / options.mean_seconds)


@contextlib.contextmanager
def ended_job(way: Method, folder: Path, mark: str, output: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a job; at the end remove all of its processes."""
    environ = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each restarted rank compiles all modules again
    job = subprocess.Popen(way.argv(folder), env=environ, stdout=output, stderr=output, start_new_session=True)
    try:
        yield job
    finally:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END_SECONDS)
        while left := marked(mark):  # some start others again meanwhile
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(LOOK_SECONDS)
        job.wait()


def marked(mark: str) -> list[psutil.Process]:
    """List the processes of a job, the oldest first; their info has environ and cmdline."""
    processes = psutil.process_iter(["pid", "create_time", "environ", "cmdline"])
    found = [each for each in processes if (each.info["environ"] or {}).get(MARK) == mark]
    return sorted(found, key=lambda each: (each.info["create_time"], each.pid))


def find_rank(mark: str, rank: int) -> psutil.Process | None:
    """Find a rank of a job; None if there is none at the moment. Processes that a rank started are younger than it."""
    for each in marked(mark):
        is_agent = any(agent in word for word in each.info["cmdline"] or () for agent in AGENTS)
        if each.info["environ"].get("RANK") == str(rank) and not is_agent:
            return each
    return None


def plot(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Draw steps over time for each method, with the failures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in found.values():
        times, steps = zip(*way["steps"], strict=True)
        seconds = list(accumulate(times, max))  # the step that a job resumes from was reported before
        done = [(step - steps[0]) * way["step_seconds"] for step in steps]
        (line,) = axes.plot(seconds, done, label=f"{way['what']}: {100 * way['effective_share']:.0f}%")
        for when, _ in way["strikes"]:
            axes.axvline(when, color=line.get_color(), linewidth=0.5, linestyle=":")
    axes.plot([0, options.seconds], [0, options.seconds], color="black", linewidth=0.5, label="nothing fails")
    axes.set_xlabel("seconds; dotted: a rank is killed")
    axes.set_ylabel("seconds of undisturbed steps")
    axes.legend()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    run(main)
