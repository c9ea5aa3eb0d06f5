"""What a simulation costs: counted, as times are a machine's affair."""

import json

from benchmarks.twin.speed import LIMITS, main, scenario_of, simulate_all
from bigbatch.tools.measure.cost_model import MODELS
from bigbatch.tools.simulate.scaling import simulate_point


def test_work_of_a_simulation_does_not_grow_with_the_number_of_gpus(tmp_path, capsys, monkeypatch):
    called = {}
    for name, form in MODELS.items():

        def counted(num_bytes, cluster, *, name=name, form=form):
            called[name] = called.get(name, 0) + 1
            return form(num_bytes, cluster)

        monkeypatch.setitem(MODELS, name, counted)
    counts = []
    for num_devices in LIMITS:
        called.clear()
        assert simulate_all(num_devices) > 0
        counts.append(dict(called))
    assert counts[0] == counts[1]
    main(["--rounds", "1", "--out", str(tmp_path / "speed.json")])
    assert "102,400 GPUs" in capsys.readouterr().out
    stored = json.loads((tmp_path / "speed.json").read_text())["gpus"]
    assert {int(count) for count in stored} == set(LIMITS)


def test_a_hundred_thousand_gpus_keep_their_share_of_the_batch():
    point = simulate_point(scenario_of(102_400, algorithm="native"), 102_400)
    assert (point.num_nodes, point.global_batch_size / point.num_devices) == (12_800, 128)
