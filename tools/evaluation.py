"""The files of `bigbatch evaluate`: tables and plots of classes and calibration, a page with images, a summary."""

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bigbatch.errors import DataError, print_line, printable
from bigbatch.launch.page import as_svg, make_page
from bigbatch.launch.tables import Table, as_csv, records_as_csv, show_table, stdout_console
from bigbatch.tools.evaluation_plots import draw_confusion, draw_reliability
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.inference.answers import NO_ANSWER, Answered
from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.formats import open_image
from bigbatch.words import count, percent

SHOWN_CLASSES, PAGE_CLASSES, NUM_WORST = 10, 100, 3
"""Most classes of the table on the terminal and on the page, and the number of worst classes that are named."""
NUM_IMAGES, THUMBNAIL_PIXELS = 12, 160
"""Images of each gallery, and the longer side of one."""
MAX_MATRIX = 1_000
"""Most classes whose confusions are written as a matrix."""
PAGE = "index.html"


class EvaluationReport:
    """What the answers to a split say, for the terminal, for JSON and as files. index: None for generated images."""

    def __init__(self, answered: Answered, names: Sequence[str], *, index: ImageSource | None) -> None:
        has_all = bool((answered.predicted_N < answered.num_classes).all())
        self._answered, self._names, self._index = answered, [*names, *([] if has_all else [NO_ANSWER])], index
        self._classes = answered.by_class()
        with_images = [label for label, each in enumerate(self._classes) if each["images"]]
        # the lowest F1 first, and of equal ones the one with most images
        self._worst = sorted(with_images, key=lambda k: (self._classes[k]["f1"], -self._classes[k]["images"]))
        self._galleries = {
            "most_certain_wrong": answered.most_certain_wrong(NUM_IMAGES),
            "least_certain_right": answered.least_certain_right(NUM_IMAGES),
        }
        self.record = self._record()

    def show(self) -> None:
        """Print the worst classes and the calibration error."""
        shown = self._worst[:SHOWN_CLASSES]
        title = "Classes, the worst first" if len(shown) == len(self._worst) else f"The {len(shown)} worst classes"
        show_table(self._table(title, shown), stdout_console())
        for line in self._findings():
            print_line(line)

    def write(self, folder: RunDir, record: dict[str, Any], *, title: str, max_pixels: int) -> None:
        """Write the files, the page last. record: the whole record, for evaluation.json. Raises: RunFolderError."""
        calibration = self.record["calibration"]
        figures = {
            "confusion": draw_confusion(self._answered, self._names),
            "reliability": draw_reliability(calibration),
        }
        for name, figure in figures.items():
            folder.save_plot(folder.path / f"{name}.png", figure)
        classes = [{**each, **_taken_for(each)} for each in self.record["classes"]]
        folder.write_text(folder.path / "classes.csv", records_as_csv(classes))
        folder.write_text(folder.path / "confusion.csv", as_csv(self._confusions()))
        # not summary.json: a run may lie in the folder
        folder.write_json(folder.path / "evaluation.json", record)
        galleries = {name: self._gallery(name, rows, max_pixels) for name, rows in self._galleries.items()}
        plots = {name: as_svg(figure) for name, figure in figures.items()}
        worst = self._worst[:PAGE_CLASSES]
        page = make_page(
            title=title,
            findings=[f"top-1 {percent(record['top1'])} of {count(record['count'], 'image')}", *self._findings()],
            images={"confusion": plots["confusion"], **galleries, "reliability": plots["reliability"]},
            tables=[self._table(f"{count(len(worst), 'class')} of {len(self._classes)}, the worst first", worst)],
            note=f"Precision: right / predicted. Recall: right / images. F1: 2 right / (predicted + images). ECE: "
            f"{calibration['definition']}. classes.csv, confusion.csv and evaluation.json hold all figures.",
        )
        folder.write_text(folder.path / PAGE, page)

    def _record(self) -> dict[str, Any]:
        names, labels = self._names, self._answered.pairs()
        classes = [
            {"class": name, **each, "taken_for": taken and {"class": names[taken[0]], "images": taken[1]}}
            for name, each in zip(names, self._classes, strict=False)
            for taken in (each["taken_for"],)
        ]
        confusions = [
            {"class": names[label], "predicted": names[predicted], "images": images}
            for label, predicted, images in zip(*(column.tolist() for column in labels), strict=True)
        ]
        return {
            "worst_classes": [names[label] for label in self._worst[:NUM_WORST]],
            "classes": classes,
            "confusions": confusions,
            "calibration": self._answered.calibration(),
            **{name: list(map(self._answer, rows)) for name, rows in self._galleries.items()},
        }

    def _answer(self, row: int) -> dict[str, Any]:
        found, position = self._answered, int(self._answered.positions_N[row])
        return {
            "image": f"generated image {position}" if self._index is None else self._index.name(position),
            "class": self._names[found.labels_N[row]],
            "predicted": self._names[found.predicted_N[row]],
            "probability": float(found.confidences_N[row]),
        }

    def _findings(self) -> Iterator[str]:
        classes = (f"{self._names[k]} (F1 {percent(self._classes[k]['f1'])})" for k in self._worst[:NUM_WORST])
        yield f"worst classes: {', '.join(classes)}"
        calibration = self.record["calibration"]
        yield f"calibration error (ECE, {calibration['bins']} bins): {percent(calibration['ece'])}"

    def _table(self, title: str, labels: Sequence[int]) -> Table:
        rows = []
        for label in labels:
            each = self._classes[label]
            shares = ["" if each[key] is None else percent(each[key]) for key in ("precision", "recall", "f1")]
            taken = each["taken_for"]
            most = f"{self._names[taken[0]]} ({taken[1]})" if taken else ""
            rows.append((self._names[label], str(each["images"]), *shares, most))
        return Table(title, ("class", "images", "precision", "recall", "F1", "most often taken for"), tuple(rows))

    def _confusions(self) -> Iterator[Sequence[object]]:
        """Yield the rows of confusion.csv: the matrix; of very many classes its entries that are not 0."""
        pairs = list(zip(*(column.tolist() for column in self._answered.pairs()), strict=True))
        if len(self._names) > MAX_MATRIX:
            yield "class", "predicted", "images"
            yield from ((self._names[label], self._names[predicted], images) for label, predicted, images in pairs)
            return
        yield "class", *self._names
        rows = [[0] * len(self._names) for _ in self._classes]
        for label, predicted, images in pairs:
            rows[label][predicted] = images
        yield from ((name, *row) for name, row in zip(self._names, rows, strict=False))

    def _gallery(self, name: str, rows: Sequence[int], max_pixels: int) -> str:
        """Return images with their classes and file names as HTML. All text is escaped; the images are in the page."""
        shots = []
        for row in rows:
            answer = self._answer(row)
            path = str(answer["image"])
            is_right = answer["class"] == answer["predicted"]
            found = answer["class"] if is_right else f"{answer['class']}, taken for {answer['predicted']}"
            picture = self._picture(int(self._answered.positions_N[row]), max_pixels)
            shots.append(
                f"<figure>{picture}<figcaption><b>{_html(found)}</b>, {percent(answer['probability'])}<br>"
                f'<span class="note" title="{_html(path)}">{_html(path.rpartition("/")[2])}</span>'
                "</figcaption></figure>"
            )
        inside = "\n".join(shots) or '<p class="note">none</p>'
        return f'<h2>{name.replace("_", " ").capitalize()} images</h2>\n<div class="shots">{inside}</div>'

    def _picture(self, position: int, max_pixels: int) -> str:
        """Return an image of the split as HTML, made smaller, or why it cannot be shown."""
        if self._index is None:
            return ""
        try:
            image = open_image(self._index.read(position), path=self._index.name(position), max_pixels=max_pixels)
            image = image.convert("RGB")
        except DataError as error:
            return f'<p class="note">{_html(str(error))}</p>'
        image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=85)
        return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _taken_for(each: dict[str, Any]) -> dict[str, Any]:
    taken = each["taken_for"] or {"class": None, "images": 0}
    return {"taken_for": taken["class"], "taken_for_images": taken["images"]}


def _html(text: str) -> str:
    return escape(printable(text))


def written_files(folder: Path) -> list[str]:
    """Return the lines that say where the files are."""
    return [
        f"{folder / PAGE}: wrong images, confusions, calibration",
        f"{folder}: classes.csv, confusion.csv, confusion.png, reliability.png, evaluation.json",
    ]
