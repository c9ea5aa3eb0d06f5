"""One trial from data to score: an undisturbed run, the same one disturbed, the same command again, the comparison."""

import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from cut_links import cut

from bigbatch.errors import FaultError
from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import ClusterPlan
from bigbatch.tools.emulate.state import EmulatedCluster, state_root
from faults import rank as rank_side
from faults.job import Job, ask
from faults.trial import CHECKPOINT_STEPS, KINDS, NUM_STEPS, Trial

TIMEOUT_SECONDS = 15.0
"""comm.timeout_seconds of the training, unless the campaign states another."""
VERDICT_SECONDS = 15.0
"""How long after its time limit a job may take to name the lost rank: a count, and a busy machine."""
PATIENCE_SHARE = 1 / 15
"""data.patience_seconds, as a share of that limit."""
END_SECONDS = 30.0
"""How long after its ranks the last process of a job may take to end: a moment, unless the machine is busy."""
LINK = 200_000_000
"""Bits per second of each emulated node's link."""
GLOBAL_BATCH = 24
TRAINING: Mapping[str, object] = {
    "run.epochs": 3,
    "run.eval_every_epochs": 1,
    "run.checkpoint_every_steps": CHECKPOINT_STEPS,
    "run.log_every_steps": 2,
    "data.loader": "torchvision",
    "data.image_size": 16,
    "data.eval_crop_fraction": 1.0,
    "data.probe_seconds": 0,
    "model.options.width": 4,
    "batch.global_batch_size": GLOBAL_BATCH,
    "batch.bn_span": 2,
    "schedule.warmup_epochs": 1,
    "comm.algorithm": "hierarchical",
    "comm.warn_seconds": 2,
}
"""Five steps in an epoch, and a ghost batch of two images, so that 1, 2, 3, 4 and 6 ranks share a batch alike: each
has one microbatch in a step."""


@dataclass(frozen=True)
class Score:
    """What became of the promises in one trial. Times in seconds; None where there is nothing to say."""

    trial: Trial
    detected_seconds: float | None = None
    """Seconds from the fault to the first line of another rank that names it."""
    ended_seconds: float | None = None
    """Seconds from the fault to the end of the last rank."""
    is_named: bool | None = None
    """The others named the rank that was struck, and none that was not."""
    resumed_seconds: float | None = None
    """Seconds from the second start to its first step."""
    steps_lost: int | None = None
    is_equal: bool | None = None
    """Weights and optimizer state in the end are those of the undisturbed run, bit for bit."""
    left_behind: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    """The promises that were not kept, a sentence each."""
    said: str = field(default="", compare=False)
    """All that the ranks said, where a promise was broken."""

    def record(self) -> dict[str, Any]:
        """Return it for JSON, without what was said."""
        facts = asdict(self)
        del facts["said"]
        return facts.pop("trial") | facts


class Laboratory:
    """Holds what the trials of a campaign share: the processes' parent, the images, the undisturbed runs."""

    def __init__(self, context: ForkServerContext, folder: Path, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._context, self._folder, self._timeout_seconds = context, folder, timeout_seconds
        self._clusters_root = state_root()
        self._undisturbed: dict[tuple[int, int, str, bool], str] = {}
        self._locks: dict[tuple[int, int, str, bool], threading.Lock] = {}
        self._lock = threading.Lock()
        self._num_clusters = 0
        self._jobs: list[Job] = []
        self._is_over = False
        ask(context, rank_side.write_data, folder / "data")

    def score(self, trial: Trial) -> Score:
        """Run a trial, and remove all of its files and processes."""
        expected = self._expect(trial)
        folder = Path(tempfile.mkdtemp(prefix="trial-", dir=self._folder))
        try:
            return self._disturb(trial, folder, expected=expected)
        finally:
            shutil.rmtree(folder)

    def end(self) -> None:
        """Kill what runs in other threads, and let them start nothing more."""
        with self._lock:
            self._is_over = True
            jobs = list(self._jobs)
        for job in jobs:
            job.kill()

    def _expect(self, trial: Trial) -> str:
        """Return the digest of a run of the trial's shape that nothing disturbs, which is made once."""
        key = (trial.nodes, trial.ranks_per_node, trial.backend, KINDS[trial.kind].is_audited)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._undisturbed:
                folder = Path(tempfile.mkdtemp(prefix="undisturbed-", dir=self._folder))
                with self._cluster(trial) as cluster:
                    job = self._start(trial, folder, fault=None, cluster=cluster)
                    job.follow()
                if any(job.exit_codes):
                    raise FaultError(
                        f"a run that nothing disturbs failed, on {key[0]} node(s) with {key[1]} rank(s) over {key[2]}; "
                        f"where this machine is busy, give a longer --timeout than {self._timeout_seconds:g}:",
                        *job.text().split("\n"),
                    )
                self._undisturbed[key] = ask(self._context, rank_side.digest_of, folder / "run")
                shutil.rmtree(folder)
            return self._undisturbed[key]

    def _disturb(self, trial: Trial, folder: Path, *, expected: str) -> Score:
        shutil.copytree(self._folder / "data", folder / "data")
        with self._cluster(trial) as cluster:
            job = self._start(trial, folder, fault=trial, cluster=cluster)
            job.follow(lambda job: self._act(trial, job, cluster))
            left = self._left(job, cluster)
            if cluster and KINDS[trial.kind].needs_nodes:
                self._mend(cluster)
            if trial.kind in ("truncated", "flipped"):
                rank_side.damage(folder / "run", kind=trial.kind)
            rank_side.put_back(folder)
            again = None
            if KINDS[trial.kind].outcome != "continues" or any(job.exit_codes):
                again = self._start(trial, folder, fault=None, cluster=cluster)
                again.follow()
                left += self._left(again, cluster)
            left += _left_files(folder)
        last = again or job
        digest = None if any(last.exit_codes) else ask(self._context, rank_side.digest_of, folder / "run")
        return judge(
            trial,
            job,
            again,
            is_equal=digest == expected,
            left=tuple(dict.fromkeys(left)),
            named_within_seconds=self._timeout_seconds + VERDICT_SECONDS,
        )

    def _start(self, shape: Trial, folder: Path, *, fault: Trial | None, cluster: EmulatedCluster | None) -> Job:
        data = folder / "data" if (folder / "data").exists() else self._folder / "data"
        settings = {**TRAINING, "data.root": data, "run.directory": folder / "run", "comm.backend": shape.backend}
        settings["comm.timeout_seconds"] = settings["comm.meeting_seconds"] = self._timeout_seconds
        settings["batch.microbatch_size"] = GLOBAL_BATCH // shape.ranks
        settings["data.patience_seconds"] = PATIENCE_SHARE * self._timeout_seconds
        if KINDS[shape.kind].is_audited:
            settings |= {"run.audit_every_steps": 1, "run.reproducible": "true"}
        options = (f"--{key}={value}" for key, value in settings.items())
        command = ("train", "--config", "quickstart", *options)
        with self._lock:
            if self._is_over:
                raise KeyboardInterrupt
            job = Job(self._context, command, shape=shape, fault=fault, folder=folder, cluster=cluster)
            # each holds descriptors of its processes
            self._jobs = [*(each for each in self._jobs if not each.has_ended), job]
        return job

    @contextmanager
    def _cluster(self, trial: Trial) -> Iterator[EmulatedCluster | None]:
        if trial.nodes == 1:
            yield None
            return
        with self._lock:
            self._num_clusters += 1
            name = f"faults-{os.getpid()}-{self._num_clusters}"
        plan = ClusterPlan(name, (trial.ranks_per_node,) * trial.nodes, LINK)
        reader, writer = os.pipe()
        try:
            yield clusters.up(plan, root=self._clusters_root, environ=os.environ, lifeline=reader)
        finally:
            clusters.down(name, root=self._clusters_root)
            os.close(reader)
            os.close(writer)

    def _act(self, trial: Trial, job: Job, cluster: EmulatedCluster | None) -> Callable[[Job], None] | None:
        """Do what only an outsider can; return what ends a short fault."""
        if trial.kind == "pause":
            return lambda job: job.ranks[trial.rank].send(signal.SIGCONT)
        if cluster is None or not KINDS[trial.kind].needs_nodes:
            return None
        if trial.kind == "thin":
            clusters.shape(cluster, rate=LINK // 10, root=self._clusters_root, environ=os.environ, node=trial.node)
            return None
        arriving, leaving = trial.kind != "mute", trial.kind != "deaf"
        cut(cluster, trial.node, arriving=arriving, leaving=leaving)
        if trial.kind == "node":
            for rank in trial.struck:
                job.ranks[rank].send(signal.SIGKILL)
        return (lambda job: self._mend(cluster)) if trial.kind == "short cut" else None

    def _mend(self, cluster: EmulatedCluster) -> None:
        clusters.shape(cluster, rate=LINK, root=self._clusters_root, environ=os.environ)

    def _left(self, job: Job, cluster: EmulatedCluster | None) -> list[str]:
        """Say what the job left: processes, a port; shared memory of nodes, as others use this machine's, too."""
        deadline = time.monotonic() + END_SECONDS
        # the store's process ends when it sees that rank 0 has
        while (left := _still_there(job, has_port=cluster is None)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if cluster is not None:
            for node in range(cluster.plan.num_nodes):
                names = ask(self._context, rank_side.shared_memory_of, cluster.keeper, node).split()
                left += [f"/dev/shm/{name} of n{node}" for name in names]
        return left


def _still_there(job: Job, *, has_port: bool) -> list[str]:
    port = [f"port {job.port}"] if has_port and job.is_listening() else []
    return [f"process {pid}" for pid in job.left_processes()] + port


def _left_files(folder: Path) -> list[str]:
    """Say which temporary files and locks are there after a run has ended well."""
    # the last owner's file stays: it says that its job has ended
    hidden = (path for path in (folder / "run").rglob(".*") if not path.name.startswith(".owner-"))
    return [str(path.relative_to(folder)) for path in (*hidden, *folder.glob("*/tmp/*"))]


def judge(
    trial: Trial,
    job: Job,
    again: Job | None,
    *,
    is_equal: bool,
    left: tuple[str, ...],
    named_within_seconds: float,
) -> Score:
    """Compare what happened with what is promised for the kind."""
    kind = KINDS[trial.kind]
    broken: list[str] = []
    try:
        struck, done = job.struck
    except FileNotFoundError:
        return Score(trial, broken=("the fault did not strike: the phase was never reached",), said=job.text())
    pattern = re.compile(kind.says.format(rank=f"({'|'.join(map(str, sorted(trial.struck)))})"))
    witnesses = job.survivors if kind.outcome == "ends" else job.ranks
    after = [(at, line) for rank in witnesses for at, line in rank.said if at >= struck]
    times = [at for at, line in after if kind.says and pattern.search(line)]
    detected = min(times) - struck if times else None
    ended = max(rank.ended or time.monotonic() for rank in job.ranks) - struck
    # for a rank behind a cut link, the others do not answer
    said_by_others = [line for rank in job.survivors for at, line in rank.said if at >= struck]
    innocents = sorted({rank for line in said_by_others for rank in lost_ranks(line)} - trial.struck)
    codes = job.exit_codes
    if job.is_hung:
        broken.append("the job hung")
    # a stop in the last evaluation may find the run done before anybody heeds it
    is_done = kind.outcome == "stops" and done >= NUM_STEPS and set(codes) == {0}
    if kind.says and detected is None and not is_done:
        broken.append("no rank named it")
    elif detected is not None and detected > named_within_seconds:
        broken.append(f"named after more than {named_within_seconds:g} s")
    if innocents:
        broken.append("innocent ranks were named")
    others = [code for number, code in enumerate(codes) if number not in trial.struck]
    if kind.outcome == "ends" and not job.is_hung and trial.phase != "close" and 0 in others:
        broken.append("a rank ended as if nothing had happened")
    if kind.outcome == "stops" and set(codes) != {130} and not is_done:
        broken.append(f"exit codes {codes} instead of 130")
    if kind.outcome == "continues" and any(codes):
        broken.append("the job did not continue")
    resumed, lost = _resumption(trial, done, again)
    if again is not None and any(again.exit_codes):
        broken.append("the same command did not continue")
        is_ended_well = False
    else:
        is_ended_well = not any((again or job).exit_codes)
    if lost is not None and lost > kind.max_lost:
        broken.append(f"more than {kind.max_lost} steps lost")
    if is_ended_well and not is_equal:
        broken.append("other bits in the end")
    if left:
        broken.append("something was left behind")
    return Score(
        trial,
        detected_seconds=detected,
        ended_seconds=ended,
        is_named=detected is not None and not innocents if kind.says and not is_done else None,
        resumed_seconds=resumed,
        steps_lost=lost,
        is_equal=is_equal if is_ended_well else None,
        left_behind=left,
        broken=tuple(broken),
        said="" if not broken else job.text() + (f"\n--- again\n{again.text()}" if again else ""),
    )


def lost_ranks(line: str) -> set[int]:
    """Return the ranks that a line says are lost, such as 'no answer from rank 1 on n0, 2 on n1'."""
    match = re.search(r"(?:no answer from|runs beside) rank (\d+(?: on [^\s,;]+)?(?:, \d+(?: on [^\s,;]+)?)*)", line)
    return {int(each.split()[0]) for each in match[1].split(", ")} if match else set()


def _resumption(trial: Trial, done: int, again: Job | None) -> tuple[float | None, int | None]:
    """Return seconds from the second start to its first step, and steps that had to be done again."""
    if again is None or any(again.exit_codes):
        return None, None
    if again.stepping is None:  # nothing was left to do
        return max(rank.ended or 0.0 for rank in again.ranks) - again.started, 0
    at, before = again.stepping
    return at - again.started, max(0, done - before)
