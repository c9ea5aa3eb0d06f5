"""The folder of a sweep or a search: its plan, and the state of each point. `bigbatch report` reads it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from bigbatch.errors import LaunchOptionError, RunFolderError, tell
from bigbatch.experiments.engine.plan import SweepPlan, dump_plan, known_plan
from bigbatch.experiments.engine.points import Point
from bigbatch.files import TEXT_BYTES, as_json, parse_json, read_plain
from bigbatch.locks import open_lock, try_lock
from bigbatch.trainer.config.file import dump_config, flatten, read_dumped
from bigbatch.trainer.config.kinds import flat_options
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.short_run import tuples_as_lists
from bigbatch.trainer.config.strict_yaml import as_yaml, parse_yaml
from bigbatch.trainer.folder import folder as run_folder
from bigbatch.trainer.folder.folder import RunDir, writing

PENDING, SUBMITTED, DONE, FAILED, PRUNED = "pending", "submitted", "done", "failed", "pruned"
STATES = (PENDING, SUBMITTED, DONE, FAILED, PRUNED)
MAY_CHANGE = ("timeout_minutes", "inference")
"""Keys of a search's plan that may change without a new folder."""
FIXED = ("name", "steps", "where", "launch", "script", "study")
"""Keys of a sweep's plan that may not; the others are settings of its points, which are compared themselves."""
DESCRIBING = ("index", "values", "seed", "labels")
"""Entries of a point's state that follow the sweep's file; loggers read the labels."""
WHERE = ("ranks", "ranks_per_node", "machine_keys")
"""Those that follow it until the point starts."""
_parse = cache(read_dumped)
"""A command reads the config of a point more than once, and YAML takes 30 ms."""


@dataclass(frozen=True)
class SweepFolder:
    """The files of a sweep's folder, and the states of its points."""

    path: Path

    @property
    def sweep(self) -> Path:
        return self.path / "sweep.yaml"

    def point(self, number: int | str) -> Path:
        """Return the folder of a point; of all points of an array if the number is INDEX."""
        return self.path / "points" / str(number)

    def config(self, number: int | str) -> Path:
        return self.point(number) / "config.yaml"

    def state(self, number: int) -> Path:
        return self.point(number) / "point.json"

    def log(self, number: int) -> Path:
        return self.point(number) / "log.txt"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def run(self, number: int) -> RunDir:
        return RunDir(self.point(number) / "run")

    def numbers(self) -> list[int]:
        folders = (self.path / "points").glob("*/point.json")
        return sorted(int(path.parent.name) for path in folders if path.parent.name.isdecimal())

    def prepare(self, plan: SweepPlan, points: Sequence[Point], *, gone: Sequence[int] = ()) -> None:
        """Write the plan and the states that it changes. points: in its order; gone: numbers of points it has not.

        Raises: LaunchOptionError if the folder holds another sweep; RunFolderError.
        """
        self.require_same(plan)
        RunDir(self.path).write_text(self.sweep, dump_plan(plan))
        keys = list(dict.fromkeys(key for own in (plan.grid, *plan.cases.values()) for key in own))
        for index, point in enumerate(points):
            labels = {"sweep": plan.name, "run": point.title, "keys": keys}
            first = first_state(point) | {"index": index, "labels": labels}
            known = self.read_state(point.number) if self.state(point.number).exists() else {}
            named = DESCRIBING if self.config(point.number).exists() else (*DESCRIBING, *WHERE)
            state = first | known | {key: first[key] for key in named}
            if parse_json(as_json(state)) != known:
                self.write_state(point.number, state)
        for number in gone:
            if self.read_state(number).get("index", number) is not None:
                self.change_state(number, index=None)

    def write_config(self, point: Point) -> None:
        """Write a point's experiment, unless an earlier start has written it. Raises: RunFolderError."""
        if not self.config(point.number).exists():
            RunDir(self.path).write_text(self.config(point.number), dump_config(point.config))

    def require_same(self, plan: SweepPlan) -> SweepPlan | None:
        """Return the plan that the folder holds; None if there is none yet. Writes nothing.

        Raises: LaunchOptionError if it is another sweep, whose points this plan cannot continue.
        """
        if not self.sweep.exists():
            if self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir()):
                raise LaunchOptionError(f"{self.path} is not empty and holds no sweep: name another --folder")
            return None
        try:
            content = parse_yaml(read_plain(self.sweep, most=TEXT_BYTES))
        except (OSError, ValueError) as error:
            raise LaunchOptionError(f"{self.sweep} is not readable: name another --folder") from error
        old = known_plan(content if isinstance(content, dict) else {})
        for key in (each.name for each in fields(SweepPlan)):
            is_fixed = key not in MAY_CHANGE if plan.study or old.study else key in FIXED
            if is_fixed and as_yaml(getattr(old, key)) != as_yaml(getattr(plan, key)):
                self.refuse(key, getattr(old, key), getattr(plan, key))
        return old

    def refuse(self, key: str, old: Any, new: Any) -> NoReturn:
        raise LaunchOptionError(
            f"{self.path} holds another sweep, with {key}: {json.dumps(old, default=str)} instead of "
            f"{json.dumps(new, default=str)}: name another --folder, or remove that one"
        )

    def read_state(self, number: int) -> dict[str, Any]:
        """Read the state of one point. Raises: LaunchOptionError if the file is damaged."""
        try:
            state = dict(parse_json(read_plain(self.state(number))))
            if state["state"] not in STATES or state["number"] != number:
                raise ValueError(f"state {state['state']} of point {state['number']}")
            if not isinstance(state.get("reason"), str | None) or not isinstance(state["values"], dict):
                raise TypeError("a reason that is not text, or values that are none")
            return state
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise LaunchOptionError(f"{self.state(number)} is not readable: remove {self.point(number)}") from error

    def state_of(self, number: int) -> str:
        """Return PENDING, DONE and so on, also for a point that no sweep has started. Raises: LaunchOptionError."""
        return str(self.read_state(number)["state"]) if self.state(number).exists() else PENDING

    def to_run(self, points: Sequence[Point], *, retry_failed: bool) -> list[Point]:
        """Return the points that have not run yet; with retry_failed the failed ones too."""
        again = (PENDING, FAILED) if retry_failed else (PENDING,)
        return [point for point in points if self.state_of(point.number) in again]

    def write_state(self, number: int, state: dict[str, Any]) -> None:
        """Write a point's state in one step. Raises: RunFolderError."""
        RunDir(self.path).write_json(self.state(number), state)

    def change_state(self, number: int, **changes: Any) -> dict[str, Any]:
        state = self.read_state(number) | changes
        self.write_state(number, state)
        return state

    def read_summary(self, number: int) -> dict[str, Any] | None:
        """Read the summary of a point's finished run; None if there is none."""
        try:
            return run_folder.read_summary(self.run(number)) if self.run(number).summary.exists() else None
        except RunFolderError:
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other sweeps and searches, if its file system can lock.

        Raises: LaunchOptionError; RunFolderError.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = open_lock(self.path / ".lock")
        with file:
            try:
                if not try_lock(file):
                    raise LaunchOptionError(f"another command trains in {self.path}: wait for it, or end it")
            except OSError as error:
                tell(f"{self.path} cannot be locked ({error.strerror}): do not start a second command in it")
            yield


def finished_runs(path: Path) -> list[RunDir]:
    """Return the run folders of a sweep's finished points. Raises: LaunchOptionError for a damaged state."""
    folder = SweepFolder(path)
    states = [(number, folder.read_state(number)) for number in folder.numbers()]
    # a point without an index has left the sweep's file
    return [folder.run(n) for n, state in states if state["state"] == DONE and state.get("index", n) is not None]


def first_state(point: Point) -> dict[str, Any]:
    """Return the state of a point that has not started."""
    return {
        "number": point.number,
        "index": point.number,
        "values": point.values,
        "seed": point.seed,
        "ranks": point.ranks,
        "ranks_per_node": point.ranks_per_node,
        "machine_keys": list(point.machine_keys),
        "state": PENDING,
        "reason": None,
        "exit_code": None,
        "job": None,
        "job_name": None,
        "log": "log.txt",
        "seconds": None,
        "command": None,
    }


def read_experiment_file(path: Path) -> dict[str, Any]:
    """Return a point's settings by key. Raises: LaunchOptionError."""
    try:
        return dict(_parse(read_plain(path, most=TEXT_BYTES).decode()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LaunchOptionError(f"{path} is not readable: remove {path.parent}") from error


def values_of(config: Config) -> dict[str, Any]:
    """Return the values by key that a file of this config holds."""
    return flat_options(flatten(tuples_as_lists(asdict(config))))


def require_same_experiment(path: Path, now: Config, *, config: str) -> None:
    """Raise LaunchOptionError if path has another config; config: name of now."""
    old = read_experiment_file(path)
    new = values_of(now)
    if Path(str(old.get("run.directory"))).absolute() == Path(now.run.directory).absolute():
        old["run.directory"] = now.run.directory
    for key in (*new, *old):
        if key not in old or key not in new or old[key] != new[key]:
            raise LaunchOptionError(
                f"{path} has {key}={json.dumps(old.get(key), default=str)} instead of {json.dumps(new.get(key))}: "
                f"{config} or its overrides have changed since this folder was made: undo that, or "
                "name another --folder"
            )


def rate_of(summary: Mapping[str, Any] | None) -> float | None:
    """Return the images per second of a finished run's summary; None if it states none above 0."""
    rate = (summary or {}).get("images_per_second")
    return rate if isinstance(rate, float) and rate > 0 else None
