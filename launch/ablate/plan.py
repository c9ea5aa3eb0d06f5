"""What an ablation's file says, and the points that it makes of it: each step has the changes of those before it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError, LaunchOptionError, or_nearest
from bigbatch.launch.sweep.plan import Sweep, check_keys, read_stated
from bigbatch.launch.sweep.points import Point
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import PACKAGED, load_config
from bigbatch.trainer.config.schema import Config, all_keys, lookup
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.tune.search.short_run import shorten

STEP = "step"
"""What the value of a point is called."""
RANKS = "ranks"
"""What a step may state beside keys of the experiment: how many ranks it and those after it have."""
OURS = ("run.directory", "run.eval_every_epochs", "run.eval_offset_epochs", "run.resume")
"""Keys that an ablation sets itself."""
EARLY = ("run.target_top1", "run.stop_metric", "run.stop_after_evaluations")
"""Keys that end a run early, which a recipe's own would do to all steps: they count where the ablation states them."""


@dataclass(frozen=True)
class Ablation:
    """This is an ablation's file; each field is a key of it."""

    name: str
    """Of its folder, runs/ablations/NAME."""
    config: str
    """The experiment that the first step changes: a file, or the name of a packaged one."""
    options: dict[str, Any]
    """Keys of the experiment that are other values in all steps, as far as these do not state them."""
    steps: dict[str, dict[str, Any]]
    """Names of steps, and the keys that each changes, which stay so in those that follow; `ranks` is one of them."""
    target_top1: float | None
    """Evaluate each epoch, and tell how long the training to this top-1 took; null to evaluate the last epoch alone."""
    ranks: int
    """Of each run, on this machine, as long as no step states others."""
    timeout_minutes: float
    """A run that takes longer is ended and has failed."""
    inference: dict[str, list[Any]] = field(default_factory=dict)
    """Names of forms in which what the last step trained answers, and words of `bigbatch evaluate` that each adds."""

    def __post_init__(self) -> None:
        """Check what can be checked without the experiment. Raises: LaunchOptionError."""
        if not self.steps:
            raise LaunchOptionError("steps: there is none")
        for where, ranks in {
            "": self.ranks,
            **{f"{n}: ": s[RANKS] for n, s in self.steps.items() if RANKS in s},
        }.items():
            if type(ranks) is not int or ranks < 1:
                raise LaunchOptionError(f"{where}ranks: {ranks} must be a number from 1 on")
        for where, given in {"options": self.options, **self.steps}.items():
            check_keys(given, legal=all_keys() if where == "options" else (RANKS, *all_keys()), where=where)
            if taken := [key for key in given if key in OURS]:
                raise LaunchOptionError(f"{where}: {taken[0]}: the ablation sets it itself: leave it out")
        if odd := [name for name in self.steps if "," in name]:
            raise LaunchOptionError(f"steps: {odd[0]!r} holds a comma, which stands between names: leave it out")
        if odd := [name for name, words in self.inference.items() if not all(isinstance(word, str) for word in words)]:
            raise LaunchOptionError(f"inference: {odd[0]}: {self.inference[odd[0]]} must be words of bigbatch evaluate")
        if self.target_top1 is not None and not 0 < self.target_top1 <= 1:
            raise LaunchOptionError(f"target_top1: {self.target_top1:g} must be a share of right answers, such as 0.94")
        self.as_sweep()

    @property
    def folder(self) -> Path:
        """Return where its runs lie, unless --folder names another place."""
        return Path("runs/ablations") / self.name

    def as_sweep(self) -> Sweep:
        """Say how and where its points run, for those who run points. Raises: LaunchOptionError."""
        return Sweep(
            name=self.name,
            config=self.config,
            options=self.options,
            steps=None,
            where="local",
            launch={},
            ranks_per_node=self.ranks,
            grid={"ranks": [self.ranks]},
            repeats=1,
            timeout_minutes=self.timeout_minutes,
        )

    def cumulative(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each step with all that it changes, those before it included; its ranks are among them."""
        changes = {RANKS: self.ranks, **self.options}
        for name, own in self.steps.items():
            changes |= own
            yield name, dict(changes)


def packaged_ablations() -> list[str]:
    """Return the names of the ablations that come with bigbatch."""
    return sorted(path.stem for path in (PACKAGED / "ablations").glob("*.yaml"))


def find_ablation(name: str) -> Ablation:
    """Read a file, or the packaged ablation of that name. Raises: LaunchOptionError."""
    path, known = Path(name), packaged_ablations()
    if not path.is_file():
        if name not in known:
            near = or_nearest(name, known, words="the nearest packaged one is")
            raise LaunchOptionError(f"{name}: there is no such file or packaged ablation{near}")
        path = PACKAGED / "ablations" / f"{name}.yaml"
    return read_stated(path, Ablation, replaced={}, example="ablations/bag_of_tricks.yaml")


def make_points(
    ablation: Ablation, *, folder: Path, epochs: int | None, seeds: int, overrides: Sequence[str]
) -> list[Point]:
    """Make all steps with the first seed, then with the next: more seeds keep the first points; overrides win over all.

    epochs: of every step, whose schedule shrinks or grows with it; None for those of each. Raises: ConfigError.
    """
    points: list[Point] = []
    overridden = [word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")]
    if taken := [key for key in overridden if key in OURS]:
        raise ConfigError(f"--{taken[0]}: the ablation sets it itself: leave it out")
    for repeat in range(seeds):
        for name, changes in ablation.cumulative():
            number, ranks = len(points), changes.pop(RANKS)
            words = [*(f"--{key}={as_yaml(value)}" for key, value in changes.items()), *overrides]
            try:
                config = load_config(["--config", ablation.config, *words], prog="bigbatch ablate")
                accumulation_steps(config.batch, world_size=ranks)
                stated = [key for key in EARLY if key in (*changes, *overridden)]
                ends: dict[str, Any] = {key.partition(".")[2]: lookup(config, key) for key in stated}
                whole = shorten(
                    config,
                    epochs=epochs or config.run.epochs,
                    evaluate_each=ablation.target_top1 is not None or bool(ends),
                    directory=folder / "points" / str(number) / "run",
                )
                whole = replace(whole, run=replace(whole.run, **ends))
            except ConfigError as error:
                raise ConfigError(*(f"step {name}: {line}" for line in error.args)) from error
            config = _with_seed(whole, whole.run.seed + repeat)
            points.append(Point(number, {STEP: name}, repeat, ranks, ranks, 1, config))
    return points


def _with_seed(config: Config, seed: int) -> Config:
    return replace(config, run=replace(config.run, seed=seed))


def choose(points: Sequence[Point], only: str | None) -> list[Point]:
    """Choose by 'a,b' the points of those steps. Raises: LaunchOptionError."""
    if only is None:
        return list(points)
    names, known = only.split(","), [point.values[STEP] for point in points]
    for name in names:
        if name not in known:
            raise LaunchOptionError(f"--only: there is no step {name!r}{or_nearest(name, known)}")
    return [point for point in points if point.values[STEP] in names]
