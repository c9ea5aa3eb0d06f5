"""`python -m benchmarks.twin.predict` on tables as people keep them: every question gets an answer or a line."""

import csv
import re

import pytest
from error_texts import naming

from benchmarks.twin.predict import main

COLUMNS = (
    "id,ladder,accelerator,num_accelerators,num_nodes,inter_node_link,framework,model,batch_per_accelerator,"
    "global_batch_size,images_per_second,fusion,ms_per_step"
)
ONE = "one,a,NVIDIA A100-SXM4-80GB,8,1,8 x HDR InfiniBand 200 Gb/s,MXNet,ResNet-50 v1.5,408,,,,120.04"
EIGHT = "eight,a,NVIDIA A100-SXM4-80GB,64,8,8 x HDR InfiniBand 200 Gb/s,MXNet,ResNet-50 v1.5,51,,,,"


@pytest.fixture
def ask(tmp_path, capsys):
    """Predict the second text's rows from the first's: exit code, rows of the table, what was printed."""

    def asked(given: str | bytes, questions: str | bytes):
        paths = [tmp_path / name for name in ("given.csv", "questions.csv", "out.csv")]
        for path, text in zip(paths[:2], (given, questions), strict=True):
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        code = main(["--given", str(paths[0]), "--rows", str(paths[1]), "--out", str(paths[2])])
        shown = capsys.readouterr()
        rows = list(csv.DictReader(paths[2].open())) if paths[2].is_file() else []
        return code, rows, shown.out + shown.err

    return asked


def table(*lines: str, columns: str = COLUMNS) -> str:
    return "\n".join((columns, *lines)) + "\n"


def plain(ask) -> float:
    _, rows, _ = ask(table(ONE), table(EIGHT))
    return float(rows[0]["ms_per_step"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("64,8,", ",8,"), "num_accelerators"),
        (("64,8,", "64,65,"), "num_nodes=65"),
        (("64,8,", "8.5,8,"), "num_accelerators=8.5"),
        (("ResNet-50 v1.5", ""), "model"),
        ((",51,", ",nan,"), "batch_per_accelerator=nan"),
    ],
)
def test_question_that_cannot_be_answered_is_named_and_the_others_are_answered(ask, change, why):
    code, rows, shown = ask(table(ONE), table(EIGHT.replace("eight", "odd").replace(*change), EIGHT))
    assert (code, [row["id"] for row in rows]) == (0, ["eight"])
    assert re.search(naming("questions.csv", "line 2", "odd", why), shown)


def test_given_rows_that_are_broken_are_named_and_left_out(ask):
    broken = [
        ONE.replace("one,", f"{name},", 1).replace(*change)
        for name, change in {
            "word": ("120.04", "n/a"),
            "negative": ("120.04", "-1"),
            "nodes": (",8,1,", ",8,9,"),
            "batch": (",408,", ",x,"),
        }.items()
    ]
    code, rows, shown = ask(table(*broken, ONE), table(EIGHT))
    assert code == 0
    assert float(rows[0]["ms_per_step"]) == plain(ask)
    for line, name in enumerate(("word", "negative", "nodes", "batch"), start=2):
        assert re.search(naming("given.csv", f"line {line}", name), shown)


def test_many_broken_rows_are_counted_not_listed(ask):
    broken = [ONE.replace("one,", f"row{number},", 1).replace("120.04", "n/a") for number in range(500)]
    _, _, shown = ask(table(*broken, ONE), table(EIGHT))
    assert "row0" in shown
    assert "495 more" in shown
    assert len(shown.splitlines()) < 12


def test_spelling_of_the_file_changes_nothing(ask):
    expected = plain(ask)
    given, questions = table(ONE), table(EIGHT)

    def backwards(text: str) -> str:
        return "\n".join(",".join(reversed(line.split(","))) for line in text.splitlines())

    for spelt in (
        (b"\xef\xbb\xbf" + given.encode(), b"\xef\xbb\xbf" + questions.encode()),
        (given.replace("\n", "\r\n"), questions.replace("\n", "\r\n")),
        (given.rstrip("\n"), questions + "\n\n"),
        (backwards(given), backwards(questions)),
        (table(ONE + ",x,y"), table(EIGHT + ",,,")),
        (table(ONE + ",7", columns=COLUMNS + ",unheard of"), questions),
        (table(ONE.replace("8,1,", " 8 ,1.0,")), questions),
    ):
        code, rows, _ = ask(*spelt)
        assert code == 0
        assert float(rows[0]["ms_per_step"]) == expected


def test_images_per_second_do_for_the_step_that_is_not_stated(ask):
    # 8 x 408 images in 120.04 ms
    rate = 8 * 408 / 0.12004
    code, rows, _ = ask(table(ONE.replace(",,,120.04", f",{rate:.6f},,")), table(EIGHT))
    assert code == 0
    assert float(rows[0]["ms_per_step"]) == pytest.approx(plain(ask), rel=1e-4)


@pytest.mark.parametrize("step", ["?", "19.7"])
def test_what_a_question_measured_is_not_read(ask, step):
    code, rows, _ = ask(table(ONE), table(EIGHT + step))
    assert (code, float(rows[0]["ms_per_step"])) == (0, plain(ask))


@pytest.mark.parametrize(
    "change",
    [
        ("NVIDIA A100-SXM4-80GB", "Made of dreams"),
        ("ResNet-50 v1.5", "ViT-B/16"),
        ("8 x HDR InfiniBand 200 Gb/s", "0 x nothing at 0 Gb/s"),
        ("64,8,", "1000000,125000,"),
        (",51,", ",0.001,"),
        (",51,,,,", ",51,,,67108864 / 99999999999999999999,"),
        (",51,,,,", ",51,,,0 / 0,"),
    ],
)
def test_unseen_systems_are_predicted(ask, change):
    code, rows, shown = ask(table(ONE), table(EIGHT.replace(*change)))
    assert (code, len(rows)) == (0, 1), shown
    assert 0 < float(rows[0]["low"]) <= float(rows[0]["ms_per_step"]) <= float(rows[0]["high"]) < float("inf")


@pytest.mark.parametrize(
    ("given", "questions", "words"),
    [
        ("", table(EIGHT), ("given.csv", "id")),
        (table(EIGHT), table(EIGHT), ("given.csv", "ms_per_step")),
        (table(ONE), table(), ("questions.csv", "no row")),
        (table(ONE), table(EIGHT.replace(",51,", ",x,")), ("questions.csv", "line 2", "batch_per_accelerator=x")),
        (table(ONE), b"\xff\xfe\x00x", ("questions.csv",)),
        (table(EIGHT.removesuffix(",") + ",19.7"), table(EIGHT), ("eight", "itself")),
    ],
)
def test_where_nothing_can_be_answered_one_line_says_why(ask, given, questions, words):
    code, rows, shown = ask(given, questions)
    assert (code, rows) == (1, [])
    assert re.search(naming(*words), shown)
    assert "Traceback" not in shown
