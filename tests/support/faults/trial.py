"""What a campaign tries: kinds of faults, where they can strike, how they are drawn and made simpler; pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bigbatch.errors import FaultError, or_nearest

NUM_STEPS = 15
"""Steps of the disturbed training: 3 epochs of 5."""
CHECKPOINT_STEPS = 4
"""Between two checkpoints, beside the one after each epoch's evaluation."""

EARLY, STEP, LATE = ("start", "meeting"), ("forward", "backward", "sum", "update"), ("report", "evaluation")
PHASES = (*EARLY, *STEP, *LATE, "checkpoint", "close")
"""In order; a shrunk trial strikes as early as it can."""
MET = PHASES[1:-1]
IN_TRAINING = (*STEP, *LATE, "checkpoint")
BACKENDS = ("gloo", "tcp")
SHAPES = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1))
"""Nodes, and ranks on each."""
DIFFERS = r"rank {rank} on .* do not hold the same bits"
MISCOMPUTES = r"rank {rank} on .* computed (other|different) bits"


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what happens, in which phases, and what is promised then."""

    what: str
    phases: tuple[str, ...] = PHASES
    outcome: str = "ends"
    """ends: with an error that names the culprit, and the same command continues; stops: with a checkpoint and exit
    code 130; continues: to the end, without a restart."""
    says: str = r"rank {rank}\b"
    """A regular expression that a line must match: of the other ranks; of any, where the job does not end by it."""
    needs_nodes: bool = False
    """It is about links, which only emulated nodes have."""
    needs_mounts: bool = False
    """It mounts something, which is possible where nodes can be emulated."""
    only_first: bool = False
    """Only rank 0 does what this disturbs."""
    max_lost: int = 2 * CHECKPOINT_STEPS
    """Steps that may have to be done again: those since the newest checkpoint on disk, where the next one is being
    written beside them."""
    first_step: int = 1
    last_step: int = NUM_STEPS - 2
    never_ends: bool = False
    """The rank lives until it is killed."""
    is_audited: bool = False
    """Its trials audit gradients in each step."""

    @property
    def needs_namespaces(self) -> bool:
        """Return whether it can only be where nodes can be emulated."""
        return self.needs_nodes or self.needs_mounts


KINDS = {
    "kill": Kind("SIGKILL, as by the kernel's out-of-memory killer"),
    "stop": Kind("SIGSTOP for good: a process that lives and never answers", never_ends=True),
    "pause": Kind("SIGSTOP, and SIGCONT before the time limit", outcome="continues", says=""),
    "term": Kind(
        "SIGTERM, as before a time limit",
        phases=IN_TRAINING,
        outcome="stops",
        says="will save a checkpoint",
        max_lost=0,
    ),
    "usr1": Kind(
        "SIGUSR1, as Slurm sends it", phases=IN_TRAINING, outcome="stops", says="will save a checkpoint", max_lost=0
    ),
    "store killed": Kind("SIGKILL to the process beside rank 0 that runs the store", phases=MET, only_first=True),
    "store stopped": Kind("SIGSTOP to that process, for good", phases=MET, only_first=True),
    "segfault": Kind("a segmentation fault in native code"),
    "memory": Kind("MemoryError"),
    "gil": Kind("native code that never gives Python's lock back", never_ends=True),
    "exception": Kind("an unexpected exception"),
    "slow": Kind("one rank computes tenfold as long", phases=("forward",), outcome="continues"),
    "full disk": Kind(
        "no space left while a checkpoint is written",
        phases=("checkpoint",),
        says="cannot write checkpoint",
        only_first=True,
    ),
    "truncated": Kind(
        "SIGKILL, and the newest checkpoint loses its second half",
        phases=STEP,
        max_lost=3 * CHECKPOINT_STEPS,
        first_step=9,
    ),
    "flipped": Kind(
        "SIGKILL, and one bit of the newest checkpoint differs",
        phases=STEP,
        max_lost=3 * CHECKPOINT_STEPS,
        first_step=9,
    ),
    "read-only": Kind(
        "the storage of the run folder takes no writes any more",
        phases=(*STEP, "checkpoint"),
        says=r"Read-only|rank {rank}\b",
        needs_mounts=True,
        only_first=True,
    ),
    "slow storage": Kind(
        "a checkpoint takes 2 seconds longer", phases=("checkpoint",), outcome="continues", says="", only_first=True
    ),
    "weight bit": Kind("a bit of a weight flips", phases=(*STEP, *LATE), outcome="continues", says=DIFFERS),
    "gradient bit": Kind("a bit of a summed gradient flips", phases=("update",), outcome="continues", says=DIFFERS),
    "local bit": Kind(
        "a bit of a rank's own gradient flips once, before the sum",
        phases=("backward",),
        outcome="continues",
        says=MISCOMPUTES,
        is_audited=True,
    ),
    "lasting bit": Kind(
        "a processor flips a bit of its rank's own gradients from now on",
        phases=("backward",),
        says=MISCOMPUTES,
        is_audited=True,
    ),
    "state bit": Kind(
        "a bit of the optimizer's state flips", phases=(*STEP, *LATE), outcome="continues", says=DIFFERS, first_step=2
    ),
    "clock": Kind("the time of day that a rank reads jumps back by an hour", outcome="continues", says=""),
    # later, all have been read ahead
    "deleted": Kind("images are deleted under the reader", phases=STEP, says=r"train/", last_step=8),
    "cut": Kind("a node's link carries nothing any more, both ways", needs_nodes=True),
    "short cut": Kind("the same for 2 seconds", outcome="continues", says="", needs_nodes=True),
    "deaf": Kind("nothing reaches a node any more", needs_nodes=True),
    "mute": Kind("nothing leaves a node any more", needs_nodes=True),
    "thin": Kind("a node's link falls to a tenth", outcome="continues", says="", needs_nodes=True),
    "node": Kind("a node loses power: its link and all of its processes", needs_nodes=True),
}


@dataclass(frozen=True)
class Trial:
    """One disturbed training; drawn from a seed, or written out."""

    kind: str
    phase: str
    step: int
    """The fault strikes the first time that the rank is in the phase at this step or later; counted from 1."""
    rank: int
    nodes: int
    ranks_per_node: int
    backend: str

    @property
    def ranks(self) -> int:
        """Return the number of ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """Return the node of the rank."""
        return self.rank // self.ranks_per_node

    @property
    def struck(self) -> frozenset[int]:
        """Return the ranks that the fault takes away."""
        if KINDS[self.kind].needs_nodes:
            return frozenset(rank for rank in range(self.ranks) if rank // self.ranks_per_node == self.node)
        return frozenset((self.rank,))

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())


def draw(seed: int, number: int, *, kinds: Sequence[str], max_ranks: int, max_nodes: int) -> Trial:
    """Draw trial number of a seed; the others' number does not matter."""
    dice = random.Random(f"{seed}/{number}")
    possible = [shape for shape in SHAPES if shape[0] <= max_nodes and shape[0] * shape[1] <= max_ranks]
    has_nodes = any(nodes > 1 for nodes, _ in possible)
    name = dice.choice([each for each in kinds if has_nodes or not KINDS[each].needs_namespaces])
    kind = KINDS[name]
    nodes, per_node = dice.choice([shape for shape in possible if shape[0] > 1 or not kind.needs_nodes])
    rank = 0 if kind.only_first else dice.randrange(nodes * per_node)
    phase, step = dice.choice(kind.phases), dice.randint(kind.first_step, kind.last_step)
    return Trial(name, phase, _step_of(phase, step), rank, nodes, per_node, dice.choice(BACKENDS))


def _step_of(phase: str, step: int) -> int:
    return {"start": 0, "meeting": 0, "close": NUM_STEPS}.get(phase, step)


def parse(text: str) -> Trial:
    """Read what str(trial) wrote. Raises: FaultError in one line."""
    words = dict(word.partition("=")[::2] for word in text.split(","))
    names = [field.name for field in fields(Trial)]
    if sorted(words) != sorted(names):
        raise FaultError(f"--trial {text!r}: write {','.join(f'{name}=...' for name in names)}, or a number")
    for name, known in (("kind", KINDS), ("phase", PHASES), ("backend", BACKENDS)):
        if words[name] not in known:
            near = or_nearest(words[name], known)
            raise FaultError(f"--trial: {name}={words[name]} is none of {', '.join(known)}{near}")
    numbers: dict[str, Any] = {}
    for name in ("step", "rank", "nodes", "ranks_per_node"):
        if not words[name].isdecimal():
            raise FaultError(f"--trial: {name}={words[name]!r} is not a whole number")
        numbers[name] = int(words[name])
    trial = Trial(kind=words["kind"], phase=words["phase"], backend=words["backend"], **numbers)
    _check(trial)
    return trial


def _check(trial: Trial) -> None:
    kind = KINDS[trial.kind]
    if (trial.nodes, trial.ranks_per_node) not in SHAPES:
        shapes = ", ".join(f"{nodes} x {ranks}" for nodes, ranks in SHAPES)
        raise FaultError(f"--trial: nodes={trial.nodes} x ranks_per_node={trial.ranks_per_node}: choose among {shapes}")
    if trial.rank >= trial.ranks:
        raise FaultError(f"--trial: rank={trial.rank} is not there: the job has ranks 0 to {trial.ranks - 1}")
    if kind.only_first and trial.rank != 0:
        raise FaultError(f"--trial: {trial.kind} strikes rank 0 alone, which writes the checkpoints: rank=0")
    if trial.phase not in kind.phases:
        raise FaultError(f"--trial: {trial.kind} has no phase {trial.phase}: choose among {', '.join(kind.phases)}")
    if kind.needs_nodes and trial.nodes == 1:
        raise FaultError(f"--trial: {trial.kind} is about the link of a node: nodes=2")
    first = _step_of(trial.phase, kind.first_step)
    last = _step_of(trial.phase, kind.last_step)
    if not first <= trial.step <= last:
        raise FaultError(f"--trial: step={trial.step} is not between {first} and {last}, as {trial.phase} asks")


def simpler(trial: Trial) -> Iterator[Trial]:
    """Yield the trials that are one move simpler, the boldest first: fewer ranks and nodes, earlier."""
    kind = KINDS[trial.kind]
    for nodes, per_node in SHAPES:
        if nodes * per_node < trial.ranks or (nodes * per_node == trial.ranks and nodes < trial.nodes):
            if kind.needs_nodes and nodes == 1:
                continue
            # rank 0 often holds the store: it is another case than the rest
            rank = min(trial.rank, nodes * per_node - 1)
            yield replace(trial, nodes=nodes, ranks_per_node=per_node, rank=rank)
    if _step_of(trial.phase, kind.first_step) < trial.step:
        yield replace(trial, step=kind.first_step)
        if trial.step // 2 > kind.first_step:
            yield replace(trial, step=trial.step // 2)
    for phase in kind.phases[: kind.phases.index(trial.phase)]:
        step = min(max(trial.step, kind.first_step), kind.last_step)
        yield replace(trial, phase=phase, step=_step_of(phase, step))
