"""What a sweep's search found inside each case: read from the sweep's folder, as a table and a plot."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.colours import COLOURS, new_figure
from bigbatch.experiments.engine.folder import DONE, FAILED
from bigbatch.experiments.engine.plan import CASE, describe_values
from bigbatch.experiments.report.compare import short_key, value_text
from bigbatch.experiments.report.plots import MARKERS, plain_text
from bigbatch.launch.tables import Table, table_of
from bigbatch.trainer.folder.folder import RunDir, read_recorded
from bigbatch.words import DECIMAL, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "tuned.json"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The trials of a search that has ended, for the points of a sweep with equal values."""

    values: dict[str, Any]
    """Its case, and values of the grid."""
    folder: str
    """Folder of its trials, in the sweep's folder."""
    epochs: int
    """Epochs of each trial."""
    metric: str
    """top1 or loss, of the last evaluation."""
    space: dict[str, str]
    """Key -> range, as in the sweep's file."""
    trials: list[dict[str, Any]]
    """Values, state and result of each trial."""
    best: int | None
    """Index of the best trial; None if all failed."""
    edges: list[str]
    """Keys whose best value is at an end of its range."""
    reason: str = ""
    """Why all trials failed."""

    @property
    def name(self) -> str:
        others = describe_values({short_key(key): value for key, value in self.values.items() if key != CASE})
        return ", ".join(filter(None, (self.values.get(CASE, ""), others))) or "all points"

    @property
    def best_values(self) -> dict[str, str]:
        return {} if self.best is None else self.trials[self.best]["values"]

    @property
    def shown_best(self) -> str:
        """Return the best result in words; the reason if there is none."""
        if self.best is None:
            return f"all {len(self.trials)} trials failed, {self.reason}"
        return result_text(self.trials[self.best]["result"], metric=self.metric)

    def describe(self) -> str:
        if self.best is None:
            return self.shown_best
        return "; ".join([f"{self.shown_best} with {describe_values(self.best_values)}", *self.remarks])

    @property
    def remarks(self) -> list[str]:
        return [edge_remark(key, self.space[key]) for key in self.edges]


def edge_remark(key: str, space: str) -> str:
    """Return the remark on a best value at an end of its range, beyond which there may be a better one."""
    return f"the best {key} is at an end of {space}: widen it"


def result_text(result: float, *, metric: str) -> str:
    return f"top-1 {100 * result:.2f}%" if metric == "top1" else f"loss {result:.4f} nats"


def write_searches(folder: Path, results: Sequence[SearchResult]) -> None:
    """Write the results of a sweep's searches. Raises: RunFolderError."""
    RunDir(folder).write_json(folder / NAME, [asdict(each) for each in results])


def read_searches(folder: Path) -> list[SearchResult]:
    """Read the results of a sweep's searches; empty if it has none. Raises: RunFolderError if they are damaged."""
    return read_recorded(folder / NAME, _parse, remedy="repeat the sweep's command") or []


def _parse(record: Any) -> list[SearchResult]:
    found = [SearchResult(**each) for each in record]
    for each in found:
        _require_sound(each)
    return found


def is_decimal(text: str, *, above: float = -math.inf) -> bool:
    return bool(re.fullmatch(DECIMAL, text)) and above < float(text) < math.inf


def _require_sound(result: SearchResult) -> None:
    """Raise an error of reading damaged files if a result lacks what the table and the plot show."""
    texts = (result.folder, result.metric, result.reason, *result.space.values(), result.values.get(CASE, ""))
    for trial in result.trials:
        texts += (trial["state"], *trial["values"].values())
        if (trial["state"] == DONE) != is_number(trial["result"]) or trial["values"].keys() != result.space.keys():
            raise ValueError("a trial without its result")
        for key, space in result.space.items():
            least = 0.0 if space.startswith("log") else -math.inf
            if not space.startswith("choice:") and not is_decimal(trial["values"][key], above=least):
                raise ValueError("a value out of its range")
    if not result.space or not {*result.edges} <= result.space.keys():
        raise ValueError("an end of no range")
    if not all(isinstance(text, str) for text in texts) or type(result.epochs) is not int or not result.trials:
        raise TypeError("a name that is no text")
    if result.best is not None and (result.best < 0 or result.trials[result.best]["state"] != DONE):
        raise ValueError("a best trial that has not finished")


def tuned_table(results: Sequence[SearchResult], *, name: str | None) -> Table:
    """Show budget, best values and remarks of each case; name: the sweep, if there are several."""
    columns = {"case": [each.name for each in results]}
    failed = [sum(trial["state"] == FAILED for trial in each.trials) for each in results]
    columns["trials"] = [
        f"{len(each.trials)}" + (f", {number} failed" if number else "")
        for each, number in zip(results, failed, strict=True)
    ]
    columns["budget (epochs)"] = [f"{len(each.trials)} x {each.epochs}" for each in results]
    for key in dict.fromkeys(key for each in results for key in each.space):
        columns[key] = [value_text(each.best_values.get(key, "")) for each in results]
    columns["its best trial"] = [each.shown_best for each in results]
    columns["remark"] = ["; ".join(each.remarks) for each in results]
    shown = {title: column for title, column in columns.items() if title != "remark" or any(column)}
    title = "Tuned inside each case, on the images of the evaluation"
    return table_of(f"{title}: {name}" if name else title, shown)


def draw_tuned(results: Sequence[SearchResult]) -> "Figure":
    """Draw results over the values of each key: a colour and marker for each case, a larger marker at its best."""
    keys = list(dict.fromkeys(key for each in results for key in each.space))
    figure, panels = new_figure(max(6.4, 4.4 * len(keys)), 4.4, num_panels=len(keys), sharey=True)
    for panel, key in zip(panels, keys, strict=True):
        spaces = [each.space[key] for each in results if key in each.space]
        is_listed = any(space.startswith("choice:") for space in spaces)
        texts = dict.fromkeys(trial["values"][key] for each in results if key in each.space for trial in each.trials)
        if is_listed := is_listed and not all(map(is_decimal, texts)):
            places = {text: float(index) for index, text in enumerate(sorted(texts))}
        else:
            places = {text: float(text) for text in texts}
        for index, each in enumerate(results):
            done = [trial for trial in each.trials if trial["state"] == DONE and key in trial["values"]]
            if not done:
                continue
            points = [(places[trial["values"][key]], _height(each, trial)) for trial in done]
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            panel.scatter(*zip(*points, strict=True), s=22, alpha=0.6, label=plain_text(each.name), **style)
            best = each.trials[each.best or 0]
            panel.scatter([places[best["values"][key]]], [_height(each, best)], s=130, edgecolors="black", **style)
        if is_listed:
            panel.set_xticks(list(places.values()), [plain_text(text) for text in places])
        elif any(space.startswith("log") for space in spaces):
            panel.set_xscale("log")
        panel.set(xlabel=plain_text(key))
    panels[0].set_ylabel("top-1 of a trial (%)" if results[0].metric == "top1" else "loss of a trial")
    handles = dict(reversed(pair) for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Trials inside each case; a large marker is its best", fontsize=11)
    return figure


def _height(result: SearchResult, trial: dict[str, Any]) -> float:
    return float(trial["result"]) * (100 if result.metric == "top1" else 1)
