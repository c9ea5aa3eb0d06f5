"""Commands in groups, `bigbatch GROUP COMMAND`: comm, config, tune; imports nothing heavy before it is needed."""

import argparse
import gc
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from bigbatch.errors import UserError


def load_command(module: str) -> ModuleType:
    """Import a command. Raises: UserError if a package that it needs is missing or does not load."""
    was_enabled = gc.isenabled()
    gc.disable()  # modules stay: looking for garbage among them takes a sixth of the time of torch's import
    try:
        return import_module(module)
    except BrokenPipeError:
        raise
    except (ImportError, OSError) as error:
        # the package that raised the error, or else the one that was imported
        names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        packages = [*(name.partition(".")[0] for name in names), (getattr(error, "name", None) or "").partition(".")[0]]
        own = ("", "bigbatch", "importlib", "_frozen_importlib")
        package = next((each for each in packages if each not in own), None)
        if package is None:
            raise
        advice = "install it again in this environment, or give it more memory (ulimit -v, --mem of the job)"
        raise UserError(f"{package} cannot be loaded here: {str(error).strip()}; {advice}") from error
    finally:
        gc.freeze()  # else the first collection looks at all of them, also while other ranks wait
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class CommandGroup:
    """A group: its name, its help text, and for each command its module with main() and a line of help."""

    name: str
    description: str
    commands: Mapping[str, tuple[str, str]]
    example: str

    def main(self, argv: Sequence[str]) -> int:
        """Run the command that argv begins with; return its exit code."""
        what = "; ".join(f"{name}: {text}" for name, (_, text) in self.commands.items())
        parser = argparse.ArgumentParser(
            prog=f"bigbatch {self.name}",
            usage=f"bigbatch {self.name} {{{','.join(self.commands)}}} [OPTION ...]",
            description=self.description,
            epilog=f"example: {self.example}",
        )
        parser.add_argument("command", choices=tuple(self.commands), help=what)
        command = parser.parse_args(argv[:1]).command
        return int(load_command(self.commands[command][0]).main(argv[1:]))


GROUPS = {
    "comm": CommandGroup(
        "comm",
        "Measure the network between the ranks of a job.",
        {
            "bench": ("bigbatch.tools.measure.bench", "time the all-reduce by size, or compare sums with exact ones"),
            "tune": (
                "bigbatch.tools.tune.communication",
                "choose algorithm by size and fusion plan for this cluster and a model",
            ),
        },
        "bigbatch launch mpirun --ranks 4 -- comm bench --max-bytes 16M",
    ),
    "config": CommandGroup(
        "config",
        "Look at experiments.",
        {
            "show": ("bigbatch.trainer.config.show", "print a complete config, and where each value comes from"),
            "diff": ("bigbatch.trainer.config.diff", "print the keys in which two configs differ"),
            "list": ("bigbatch.trainer.config.packaged", "print the names of the packaged configs"),
        },
        "bigbatch config show quickstart --run.epochs 2",
    ),
    "tune": CommandGroup(
        "tune",
        "Find good values for a config.",
        {
            "range": (
                "bigbatch.tools.tune.range.rising_rate",
                "raise the learning rate step by step until the loss explodes",
            ),
            "search": (
                "bigbatch.experiments.search.options",
                "search config values on short runs, from coarse to fine",
            ),
            "batch": (
                "bigbatch.experiments.batch.recommend",
                "recommend a global batch from the gradient noise scale of a run",
            ),
            "precision": (
                "bigbatch.tools.tune.precision.recommend",
                "recommend precision and loss scale from the underflow of a few steps",
            ),
        },
        "bigbatch tune range --config quickstart --from 0.1 --to 100 --steps 60 --out runs/range",
    ),
}
