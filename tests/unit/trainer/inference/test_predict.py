"""`bigbatch predict` answers as evaluation does, for images anywhere."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from error_texts import naming
from sample_images import with_bad_tables

from bigbatch import load_model
from bigbatch.cli import main
from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from bigbatch.trainer.checkpoint.class_names import to_keep
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.inference.predict import load_classifier
from bigbatch.trainer.input.listed import write_list
from bigbatch.trainer.models import build_model

KEYS = ["--model.options.width=4", "--data.image_size=32", "--data.loader=torchvision"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a checkpoint; its data lies in it."""
    folder = tmp_path_factory.mktemp("run")
    write_dataset(folder / "shapes", train_per_class=1, val_per_class=2, side_pixels=(50, 60))
    config = load_config(["--config", "quickstart", *KEYS, f"--data.root={folder / 'shapes'}"])
    torch.manual_seed(1)
    model = build_model("resnet9", num_classes=10, norm=torch.nn.BatchNorm2d, width=4)
    model.linear.weight.data.mul_(100)  # spreads the probabilities
    (folder / "config.yaml").write_text(dump_config(config))
    names = sorted(path.name for path in (folder / "shapes/train").iterdir())
    state = {"step": 1, "config": dump_config(config), "model": model.state_dict(), "classes": to_keep(names)}
    save_checkpoint(folder / "checkpoints", state, step=1, top1=0.5, keep=1)
    return folder


def predicted(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["predict", *map(str, argv), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def images_of(run: Path) -> list[Path]:
    return sorted((run / "shapes/val").rglob("*.JPEG"))


@pytest.mark.long
def test_predict_it_scores_what_evaluate_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data.eval_flip=true", "--data.eval_crop_fraction=0.8"]
    found = predicted(capsys, run, *options, *images_of(run))
    assert main(["evaluate", str(run), *options, "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [Path(each["image"]).parent.name for each in found]
    ranked = [[answer["class"] for answer in each["classes"]] for each in found]
    assert [Path(each["image"]) for each in found] == images_of(run)
    assert record["count"] == len(found) == 20
    assert 0 < record["top1"] < record["top5"] < 1
    assert sum(answers[0] == name for answers, name in zip(ranked, names, strict=True)) == record["top1"] * 20
    assert sum(name in answers for answers, name in zip(ranked, names, strict=True)) == record["top5"] * 20


def test_predict_order_and_company_change_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    *some, last = images_of(run)[:5]
    copy = shutil.copy(last, tmp_path / "a name.png")  # what it is tells its content
    together = predicted(capsys, run, "--batch.microbatch_size", 2, copy, *some, "--top", 10)
    alone = predicted(capsys, run, "--top=10", last)
    assert len(together) == 5
    assert together[0]["image"] == str(copy)
    for ours, theirs in zip(together[0]["classes"], alone[0]["classes"], strict=True):
        assert ours["class"] == theirs["class"]
        assert ours["probability"] == pytest.approx(theirs["probability"], rel=1e-4)
    assert sum(answer["probability"] for answer in alone[0]["classes"]) == pytest.approx(1, rel=1e-5)


def test_predict_lines_for_people_and_weights_without_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, other = images_of(run)[:2]
    (best, *_), _ = (each["classes"] for each in predicted(capsys, run, image, other))
    weights = next((run / "checkpoints").iterdir())
    argv = ["--config", "quickstart", *KEYS, "--data.root=nowhere", image, other, "--top=1", "--weights"]
    assert main(["predict", *map(str, argv), str(weights)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{image}: {best['class']} {100 * best['probability']:.1f}%"
    assert second.startswith(f"{other}: ")


@pytest.mark.parametrize("older", [{}, {"classes": None}])
def test_predict_class_names_are_the_runs_and_numbers_without(
    older: dict[str, None], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, names = images_of(run)[0], sorted(path.name for path in (run / "shapes/train").iterdir())
    state = load_checkpoint(next((run / "checkpoints").iterdir()))
    elsewhere = tmp_path / "shapes/train"
    for name in ["zzz", *names[1:]]:  # one class renamed: the order of all others shifts
        (elsewhere / name).mkdir(parents=True)
    (found,) = predicted(capsys, run, f"--data.root={tmp_path / 'shapes'}", image)
    del state["classes"]
    old = save_checkpoint(tmp_path / "old", {**state, **older}, step=1, top1=None, keep=1)
    assert main(["predict", str(run), "--checkpoint", str(old), str(image), "--json"]) == 0
    said = capsys.readouterr()
    numbers = [int(answer["class"]) for answer in json.loads(said.out)["classes"]]
    assert [names[number] for number in numbers] == [answer["class"] for answer in found["classes"]]
    (line,) = said.err.splitlines()
    assert re.search(naming("bigbatch: ", old, "no class names", "numbers"), line)


def test_predict_class_names_that_no_run_wrote_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = load_checkpoint(next((run / "checkpoints").iterdir()))
    kept = {**state["classes"], "names": state["classes"]["names"][::-1]}  # beside the digest of their own order
    odd = save_checkpoint(tmp_path, {**state, "classes": kept}, step=1, top1=None, keep=1)
    assert main(["predict", str(run), "--checkpoint", str(odd), str(images_of(run)[0])]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(naming(f"{odd} is damaged", "class names"), line)


def test_predict_in_python(run: Path) -> None:
    classify = load_classifier(str(run), "--optimizer.precision=bf16")
    assert list(classify([])) == []
    first, second = classify([str(path) for path in images_of(run)[:2]], top=3)
    assert (first.image, second.image) == tuple(images_of(run)[:2])
    assert len(set(first.classes)) == len(first.probabilities) == 3
    assert list(first.probabilities) == sorted(first.probabilities, reverse=True)
    classify.close()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["empty"], ("bigbatch: empty: ", "folder of images")),
        (["whole.jpg", "--data.num_classes=11"], ("10 classes", "data.num_classes is 11")),
        (["whole.jpg", "--csv=text.jpg/a.csv"], ("text.jpg", "a.csv")),
        (["flowers.json"], ("flowers.json", "list of images")),
    ],
)
def test_predict_one_line_for_what_cannot_be_classified(
    words: list[str],
    parts: tuple[str, ...],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = images_of(run)[0].read_bytes()
    (tmp_path / "empty").mkdir()
    (tmp_path / "flowers.json").write_text("{}")
    (tmp_path / "whole.jpg").write_bytes(data)
    (tmp_path / "text.jpg").write_text("no image")
    assert main(["predict", str(run), *words]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.search(naming(*parts), lines[-1])
    assert len(lines) == 1


def test_predict_images_that_cannot_be_read_are_listed_at_the_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = images_of(run)[:2]
    data = first.read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "damaged.jpg").write_bytes(with_bad_tables(data))  # only decoding shows it
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "taken.jpg").mkdir()
    bad = ["cut.jpg", "damaged.jpg", "text.jpg", "nowhere.jpg"]
    words = ["cut.jpg", str(first), "damaged.jpg", "text.jpg", str(second), "nowhere.jpg", "--top=1"]
    assert main(["predict", str(run), *words, "--batch.microbatch_size=2"]) == 3
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == [str(first), str(second)]
    head, *lines = err.splitlines()
    assert head == "bigbatch: 4 of 6 images cannot be read:"
    assert [line.partition(": ")[0] for line in lines] == bad
    assert main(["predict", str(run), *bad, "--csv=a.csv"]) == 3
    assert Path("a.csv").read_text().count("\n") == 1, "the head alone"
    assert main(["predict", str(run), str(first), "--data.max_megapixels=0.002"]) == 3
    assert "0.002 megapixels" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(DataError, match=naming("damaged.jpg", "decode")):
        list(load_classifier(str(run))([first, "damaged.jpg"]))


def test_predict_reads_images_of_any_size_for_a_run_of_the_resident_loader(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    keys = ["--data.loader=resident", "--data.crop=padded", "--data.crop_area_min=null", "--data.eval_crop_fraction=1"]
    words = [str(run), str(images_of(run)[0]), str(tmp_path / "text.jpg"), "--top=1"]
    assert main(["predict", *words, *keys]) == 3
    out, err = capsys.readouterr()
    assert main(["predict", *words, *keys[-1:]]) == 3
    assert capsys.readouterr() == (out, err)
    assert err.startswith("bigbatch: 1 of 2 images cannot be read:")


def test_predict_folders_and_lists_into_a_table(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bigbatch.trainer.inference.predict.MIN_FOR_PROGRESS", 10)
    val = run / "shapes/val"
    by_class = {path.name: [f"{path.name}/{each.name}" for each in path.iterdir()] for path in val.iterdir()}
    write_list(tmp_path / "list.json", val, {"train": {**by_class, "ring": []}, "val": {"ring": by_class["ring"]}})
    (val / "ring/odd.bmp").write_bytes(b"")
    assert main(["predict", str(run), str(images_of(run)[0]), "--csv=/dev/null"]) == 0
    assert capsys.readouterr() == ("", "bigbatch: /dev/null: 1 prediction\n"), "a stream has rows alone"
    assert main(["predict", str(run), str(val), "--top=3", f"--csv={tmp_path / 'a.csv'}"]) == 0
    out, err = capsys.readouterr()
    (val / "ring/odd.bmp").unlink()
    assert out == f"{tmp_path / 'a.csv'}: 20 predictions\n"
    assert "1 file left out, such as ring/odd.bmp" in err
    assert "predicting: 20 of 20 images" in err
    table = pandas.read_csv(tmp_path / "a.csv")
    assert list(table) == ["path", "class", "probability", "class_2", "probability_2", "class_3", "probability_3"]
    assert table["path"].tolist() == [str(path) for path in images_of(run)]
    expected = predicted(capsys, run, *images_of(run), "--top=3")
    assert table["class_3"].tolist() == [each["classes"][2]["class"] for each in expected]
    assert table["probability"].to_numpy() == pytest.approx([e["classes"][0]["probability"] for e in expected], 1e-4)
    assert main(["predict", str(run), str(tmp_path / "list.json"), "--top=1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {line.partition(": ")[0] for line in said} == {str(path) for path in images_of(run)}
    assert [Path(line.partition(": ")[0]).parent.name for line in said[-2:]] == ["ring", "ring"], "train, then val"


@pytest.mark.slow
def test_predict_and_export_need_no_trust_for_code_that_they_do_not_import(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An own loss, metric and schedule of a run folder; its loader and model are other people's code to run."""
    shutil.copytree(run / "checkpoints", tmp_path / "run/checkpoints")
    keys = ["--config", str(run / "config.yaml"), "--trust-code"]
    losses = ["--optimizer.loss=theirs.Loss", "--optimizer.label_smoothing=0", "--run.divergence_steps=null"]
    own = load_config([*keys, *losses, "--run.metrics={a: theirs.m}", "--schedule.name=theirs.rate"])
    (tmp_path / "run/config.yaml").write_text(dump_config(own))
    image = str(images_of(run)[0])
    assert main(["predict", str(tmp_path / "run"), image]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "a.safetensors")]) == 0
    assert load_model(tmp_path / "run").class_names
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert re.search(naming("theirs.Loss", "theirs.m", "--trust-code"), said)
    assert "theirs.rate" not in said
    (tmp_path / "run/config.yaml").write_text(dump_config(load_config([*keys, "--data.loader=theirs.Loader"])))
    assert main(["predict", str(tmp_path / "run"), image]) == 1
    assert re.search(naming("theirs.Loader", "--trust-code"), capsys.readouterr().err)


def test_predict_impossible_command_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (([], "images"), (["--top=0", "a.jpg"], "--top 0")):
        with pytest.raises(SystemExit, match="2"):
            main(["predict", str(run), *words])
        assert named in capsys.readouterr().err.splitlines()[-1]


def test_predict_what_it_does_not_work_with(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["--data.loader=synthetic", "--data.num_synthetic_samples=10", "--data.eval_crop_fraction=1"]
    with pytest.raises(ConfigError, match=naming("data.loader=synthetic")):
        load_classifier(str(run), *keys)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match=naming("has 2", "launcher")):
        load_classifier(str(run))
