"""Cores that this process may use, and how long its OpenMP threads spin on them while they wait."""

import os

SPIN_COUNT = "GOMP_SPINCOUNT"
STATED = (SPIN_COUNT, "OMP_WAIT_POLICY")
"""Variables that say how long a thread spins before it sleeps; GNU OpenMP reads them when torch is loaded."""
SPINS = 10_000
"""Bounds a wait to about 0.5 ms; GNU OpenMP's own bound is 300,000. Chosen by benchmarks/largebatch/busy_cpu.py."""
BUSY = 1.5
"""Load average per core from which other work delays threads that wait for each other."""


def bound_spinning() -> None:
    """Let OpenMP's waiting threads sleep after SPINS looks, also in children; unless stated. Call it before torch."""
    if not is_spinning_stated():
        os.environ[SPIN_COUNT] = str(SPINS)


def describe_spinning(num_threads: int) -> str | None:
    """Return a line if num_threads may spin without a bound, and other work keeps the cores busy; else None."""
    if num_threads == 1 or is_spinning_stated() or not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], len(usable_cores())
    if load < BUSY * cores:
        return None
    return (
        f"load average {load:.1f} on {cores} cores: other work delays threads that wait for each other, and OpenMP's "
        f"waiting threads spin meanwhile; export {SPIN_COUNT}={SPINS} before Python starts"
    )


def is_spinning_stated() -> bool:
    return any(name in os.environ for name in STATED)


def usable_cores() -> list[int]:
    """Return the cores that this process may use: a launcher, Slurm or a container can restrict them.

    Ranks that may use the same cores share them; ranks that were bound to different cores do not.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
