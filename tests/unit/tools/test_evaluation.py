"""What `bigbatch evaluate` prints and writes on classes, confusions and images."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from error_texts import naming
from PIL import Image
from sample_images import encoded, smooth_image, write

from bigbatch.cli import main
from bigbatch.errors import RunFolderError
from bigbatch.tools.evaluation import MAX_MATRIX, EvaluationReport
from bigbatch.tools.evaluation_plots import MAX_GRID, draw_confusion, draw_reliability
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.inference.answers import Answered
from bigbatch.trainer.input.order import ImageIndex

EVIL = "--><script>alert('1')</script>\x1b[2J"


def answered(pairs: list[tuple[int, int]], *, classes: int) -> Answered:
    labels_N, predicted_N = np.array(pairs, np.int64).T
    return Answered(np.arange(len(pairs)), labels_N, predicted_N, np.linspace(0.5, 1, len(pairs)), classes)


class Page(HTMLParser):
    """Collects the tags, the addresses of images and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.sources, self.text = set[str](), list[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Glyph")
@pytest.mark.usefixtures("rendered_figures")
def test_page_shows_images_without_a_network_and_no_foreign_markup(tmp_path: Path) -> None:
    write(tmp_path, {"in/a.jpg": encoded(smooth_image(1)), f"{EVIL.replace('/', '')}.jpg": b"no image"})
    paths = ["in/a.jpg", f"{EVIL.replace('/', '')}.jpg", "in/a.jpg"]
    index = ImageIndex(str(tmp_path), classes=("a", EVIL), paths=paths, labels_N=np.array([0, 1, 1]))
    report = EvaluationReport(answered([(0, 1), (1, 0), (1, 1)], classes=2), index.classes, index=index)
    out = RunDir(tmp_path / "out")
    out.path.mkdir()
    report.write(out, {"top1": 1 / 3, "count": 3, **report.record}, title=EVIL, max_pixels=10**6)
    page = Page((out.path / "index.html").read_text())
    assert "script" not in page.tags
    assert page.text.count("--><script>alert('1')</script>\\x1b[2J") >= 3
    assert "no image" not in page.text
    assert ("a.jpg" in page.text, "in/a.jpg" in page.text) == (True, False), "a path does not fit under an image"
    assert "is not an image" in page.text or "cannot be" in page.text, "why the second one is not shown"
    shown = [source for source in page.sources if source.startswith("data:image/jpeg;base64,")]
    assert len(shown) == 2
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    assert Image.open(out.path / "confusion.png").size > (300, 300)
    with open(out.path / "classes.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["class"], first["images"], first["recall"], first["taken_for_images"]) == ("a", "1", "0.0", "1")
    assert second["class"] == "'" + EVIL.replace("\x1b", "\\x1b"), (
        "a cell that a spreadsheet does not take for a formula"
    )
    with open(out.path / "confusion.csv", newline="") as file:
        assert [row[1:] for row in csv.reader(file)][1:] == [["0", "1"], ["1", "1"]]
    assert json.loads((out.path / "evaluation.json").read_text())["worst_classes"] == ["a", EVIL]


def test_terminal_gets_few_lines_of_many_classes(capsys: pytest.CaptureFixture[str]) -> None:
    """Class k has 200 images, k of them wrong, so that the last classes are the worst; class 0 has none."""
    names = [f"class {number}" for number in range(200)]
    pairs = [(k, k if n >= k else (k + 1) % 200) for k in range(1, 200) for n in range(200)]
    report = EvaluationReport(answered(pairs, classes=200), names, index=None)
    report.show()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10 + 5 + 2
    assert [line for line in lines if "class 199" in line and "class 0 (199)" in line]
    assert report.record["worst_classes"][0] == "class 199"
    assert "class 0" not in report.record["worst_classes"], "it has no images"
    assert lines[-1].startswith("calibration error (ECE, 15 bins): ")
    assert len(report.record["most_certain_wrong"]) == 12


def test_plots_of_few_and_of_many_classes() -> None:
    few = draw_confusion(answered([(0, 1), (0, 0), (1, 1)], classes=MAX_GRID), ["$a$"] * MAX_GRID)
    assert [text.get_text() for text in few.axes[0].texts] == ["1", "1", "1"]
    pairs = [(k, (k + 1) % 40) for k in range(40) for _ in range(k + 1)]
    many = draw_confusion(answered(pairs, classes=40), [f"{number}" for number in range(40)])
    assert [round(bar.get_width()) for bar in many.axes[0].patches] == list(range(40, 40 - MAX_GRID, -1))
    assert many.axes[0].get_yticklabels()[0].get_text() == "39 \N{RIGHTWARDS ARROW} 0"
    none = draw_confusion(answered([(0, 0)], classes=40), ["a"] * 40)
    assert none.axes[0].get_title() == "No image was taken for another class"
    reliability = draw_reliability(answered([(0, 0), (0, 1)], classes=2).calibration())
    assert [bar.get_height() for bar in reliability.axes[1].patches if bar.get_height()] == [1, 1]


def test_confusions_of_very_many_classes_are_pairs() -> None:
    names = [f"{number}" for number in range(MAX_MATRIX + 1)]
    report = EvaluationReport(answered([(7, 1000), (7, 1000), (3, 3)], classes=len(names)), names, index=None)
    assert list(report._confusions()) == [("class", "predicted", "images"), ("7", "1000", 2), ("3", "3", 1)]


@pytest.mark.slow
def test_evaluate_writes_where_it_is_told_and_through_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
    from bigbatch.trainer.config.file import dump_config, load_config
    from bigbatch.trainer.models import build_model

    monkeypatch.chdir(tmp_path)
    write_dataset(Path("data"), train_per_class=1, val_per_class=1, side_pixels=(40, 50))
    keys = ["--model.options.width=2", "--data.image_size=32", "--data.loader=torchvision", "--data.root=data"]
    config = load_config(["--config", "quickstart", *keys])
    model = build_model("resnet9", num_classes=10, norm=torch.nn.BatchNorm2d, width=2)
    state = {"step": 1, "config": dump_config(config), "model": model.state_dict()}
    checkpoint = save_checkpoint(Path("run/checkpoints"), state, step=1, top1=0.5, keep=1)
    Path("run/config.yaml").write_text(dump_config(config))
    assert main(["evaluate", "run"]) == 0
    *_, page, files = capsys.readouterr().out.splitlines()
    assert page.startswith("run/evaluation/index.html: ")
    assert all((Path("run/evaluation") / name).is_file() for name in files.partition(": ")[2].split(", "))
    assert main(["evaluate", "--config", "run/config.yaml", "--weights", str(checkpoint)]) == 0
    assert "--out FOLDER" in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "linked/checkpoints").parent.mkdir()
    for name in ("checkpoints", "config.yaml"):
        (tmp_path / "run" / name).rename(tmp_path / "linked" / name)
    (tmp_path / "linked/evaluation").symlink_to(tmp_path / "run")
    before = sorted(tmp_path.joinpath("run").rglob("*"))
    assert main(["evaluate", "linked", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["count"] == 10, "what was measured is not lost"
    assert re.search(naming("linked/evaluation", "link"), err.splitlines()[-1])
    assert sorted(tmp_path.joinpath("run").rglob("*")) == before
    assert main(["evaluate", "linked", "--out", "elsewhere"]) == 0
    assert Path("elsewhere/index.html").is_file()


def test_report_names_the_file_that_cannot_be_written(tmp_path: Path) -> None:
    report = EvaluationReport(answered([(0, 0), (0, 1)], classes=2), ["a", "b"], index=None)
    (tmp_path / "confusion.png").mkdir()
    with pytest.raises(RunFolderError, match=naming("confusion.png")):
        report.write(RunDir(tmp_path), {"top1": 0.5, "count": 2}, title="", max_pixels=1)
