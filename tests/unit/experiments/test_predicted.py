"""`bigbatch sweep --predict`: the simulator's prediction of each point, next to the measurement."""

import json

import pytest
from error_texts import naming
from small_sweep import SWEEP, write

from bigbatch.cli import main
from bigbatch.errors import SimulationError
from bigbatch.experiments.engine.folder import DONE, SweepFolder
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.experiments.engine.points import make_points
from bigbatch.experiments.predicted import predict
from bigbatch.experiments.report.show import outcome

OPTIONS = {key: value for key, value in SWEEP["options"].items() if key != "batch.global_batch_size"}
GRID = {"scaling": ["weak"], "ranks": [1, 2, 4]}


def test_done_point_gives_the_speed_of_the_others(file, tmp_path):
    sweep = read_plan(write(file, options=OPTIONS, grid=GRID))
    folder = SweepFolder(tmp_path / "out")
    points = make_points(sweep, folder=folder.path)
    folder.prepare(sweep, points)
    with pytest.raises(SimulationError, match=naming("emulated", "rate")):
        predict(points, folder, cluster="emulated").table()
    for number, rate in ((0, 100.0), (1, 150.0)):
        folder.change_state(number, state=DONE)
        folder.run(number).summary.parent.mkdir(parents=True)
        folder.run(number).summary.write_text(json.dumps({"images_per_second": rate}))
    table = predict(points, folder, cluster="emulated").table()
    assert "point 0" in table.title
    measured, predicted, errors = ([row[column] for row in table.rows] for column in (3, 4, 6))
    assert measured == ["100 images/s", "150 images/s", ""]
    # one rank is what the speed was fitted to; two share a node, four two of them, so each does a little less
    numbers = [float(text.removesuffix(" images/s").replace(",", "")) for text in predicted]
    assert numbers[0] == pytest.approx(100, abs=1)
    assert 150 < numbers[1] <= 200
    assert 300 < numbers[2] < 2 * numbers[1]
    assert (errors[0], errors[2]) == ("", "")
    assert float(errors[1].removesuffix("%")) == pytest.approx(100 * (numbers[1] / 150 - 1), abs=0.5)
    assert table.head[-1] == "error"
    folder.run(1).summary.write_text(json.dumps({"images_per_second": "fast"}))  # damaged
    assert [row[3] for row in predict(points, folder, cluster="emulated").table().rows] == ["100 images/s", "", ""]
    assert outcome(folder, folder.read_state(1)) == "done"
    # one rank alone at 100 images/s, and two together at 500: the first was disturbed
    folder.run(1).summary.write_text(json.dumps({"images_per_second": 500.0}))
    doubted = predict(points, folder, cluster="emulated").table()
    assert doubted.head[-1] == "in doubt for"
    assert [row[-1] for row in doubted.rows] == ["", "more than point 0's speed allows: measure that one again", ""]
    assert doubted.rows[1][6].endswith("% ?")


def test_dry_run_predicts_by_the_cluster_s_rates(file, tmp_path, capsys):
    write(file, options=OPTIONS, grid=GRID)
    assert main(["sweep", str(file), "--folder", str(tmp_path / "out"), "--dry-run", "--predict", "dgx_a100"]) == 0
    shown = capsys.readouterr().out
    assert "Predicted and measured" in shown
    assert not (tmp_path / "out").exists()
    for more in ([], ["--dry-run"]):
        assert main(["sweep", str(file), "--folder", str(tmp_path / "out"), "--predict", "nowhere", *more]) == 1
        told = capsys.readouterr()
        assert ("'nowhere'" in told.err, told.out) == (True, ""), "before any point runs"


def test_ranks_that_share_cores_compute_more_slowly(file, tmp_path):
    """Four ranks of one thread on two cores take twice the time of two ranks, but for what the wire takes."""
    sweep = read_plan(write(file, options=OPTIONS | {"compute.cpu_threads": 1}, grid=GRID))
    folder = SweepFolder(tmp_path / "out")
    points = make_points(sweep, folder=folder.path)
    folder.prepare(sweep, points)
    folder.change_state(0, state=DONE)
    folder.run(0).summary.parent.mkdir(parents=True)
    folder.run(0).summary.write_text(json.dumps({"images_per_second": 100.0}))
    alone, shared = (predict(points, folder, cluster="emulated", cores=each).rates for each in (4, 2))
    assert (shared[0], shared[1]) == (alone[0], alone[1])
    assert shared[2].rate == pytest.approx(alone[2].rate / 2, rel=0.03)
