"""Which gradients of a step are ready, so that a fusion buffer can be summed while backward continues."""

from collections import Counter
from collections.abc import Iterable

from bigbatch.comm.gradients.fusion import FusionPlan

Passes = list[tuple[str, int]]
"""Names of gradients in the order in which they become ready, and how often backward adds to each until then."""


class Readiness:
    """Counts the passes of backward that add to each gradient, and learns in the first step how many there are.

    Usually one; with checkpoints that re-enter backward, or with several backwards per step, more.
    """

    def __init__(self, names: Iterable[str], *, learns: bool) -> None:
        self._num_passes = dict.fromkeys(names, 1)
        self._added: list[str] = []
        """Gradients in the order in which backward added to them, while there is something to learn."""
        self.is_learning = learns
        self.missing: list[dict[str, int]] = []
        """The gradients of each buffer that are not ready, and how many passes of backward they wait for."""
        self.reached: set[str] = set()
        """Gradients to which backward has added in this step."""

    def start_over(self, plan: FusionPlan) -> None:
        """Begin a step with the buffers of this plan."""
        self.missing = [{each.name: self._num_passes[each.name] for each in buffer.tensors} for buffer in plan.buffers]
        self.reached, self._added = set(), []

    def add(self, name: str, *, index: int) -> None:
        """Note that backward has added to a gradient, which lies in the buffer of this index."""
        if self.is_learning:
            self._added.append(name)
        missing = self.missing[index]
        missing[name] = missing.get(name, 1) - 1
        if missing[name] < 1:
            del missing[name]

    def passes(self) -> Passes:
        """Return what this step has shown; gradients that it did not reach come last, in the usual order."""
        counts = Counter(self._added)
        ready = [*dict.fromkeys(reversed(self._added))][::-1]  # after its last pass
        rest = [name for name in reversed(self._num_passes) if name not in counts]
        return [(name, max(1, counts[name])) for name in (*ready, *rest)]

    def learn(self, passes: Passes) -> None:
        """Take over the passes of rank 0's first step."""
        self._num_passes, self.is_learning = dict(passes), False
