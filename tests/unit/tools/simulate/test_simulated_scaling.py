"""A recipe on a cluster: what the command answers, what its clusters state, and what it refuses."""

import dataclasses
import json
import math
import re
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import LaunchOptionError, SimulationError
from bigbatch.tools.simulate import cluster as cluster_module
from bigbatch.tools.simulate import show
from bigbatch.tools.simulate.cluster import Rate, cluster_names, load_cluster, profile_path, read_profile
from bigbatch.tools.simulate.command import read_counts, read_hours
from bigbatch.tools.simulate.interval import FACTORS, POWER_SPREAD
from bigbatch.tools.simulate.published import OWN_RATES, PUBLISHED_POWER, epochs_to_759, power_of
from bigbatch.tools.simulate.run import Failures, effective_share
from bigbatch.tools.simulate.scaling import (
    PredictedPoint,
    Scenario,
    advise,
    cheapest_within,
    efficiencies,
    input_rate,
    knee,
    simulate_point,
    simulate_scaling,
)
from bigbatch.tools.simulate.shapes import load_shape, shape_of
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import lookup
from bigbatch.user_settings import measured_folder

ROOT = Path(__file__).parents[4]
CLUSTER = """device: {value: a device, source: test}
devices_per_node: {value: 4, source: test}
inside_gbyte_per_s: {value: 10, source: test}
across_gbit_per_s: {value: 10, source: test}
rates:
  - {model: resnet50, local_batch: 64, images_per_second: 300, source: test}
"""


WIRE = ("--comm.reduce_dtype", "wire")
NO_SCALE = ("--optimizer.loss_scale", "null", "--optimizer.loss_scale_growth_steps", "null")


def ask(cluster: str = "dgx_a100", recipe: str = "imagenet/resnet50_64k", **options) -> Scenario:
    return Scenario(load_config(["--config", recipe]), load_cluster(cluster), **options)


def test_paper_s_run_of_2048_gpus_lies_in_the_band():
    # Jia et al. 2018: 90 epochs in 6.6 minutes at batch 65,536 on 2,048 P40
    question = ask("p40_roce100", "imagenet/jia_resnet50_64k")
    point = simulate_point(question, 2048)
    published_seconds = 6.6 * 60 / (90 * 1_281_167 / 65_536)
    assert point.low_seconds <= published_seconds <= point.high_seconds
    # what it takes beyond its training steps evaluates 50,000 images after each epoch: a third of a training step's
    # computing, which at 32 images of 2,048 GPUs each is the same 65,536
    training = 90 * 1_281_167 / 65_536 * point.step.seconds / 3600
    assert point.run.steps == pytest.approx(training)
    assert 0 < point.run.evaluations < 90 * point.step.computing / 3600 / 2
    assert (point.num_nodes, point.num_microbatches) == (256, 1)


def test_images_per_gpu_are_those_of_the_gpus_with_the_most_microbatches():
    points = [simulate_point(ask(), count) for count in (8, 96, 512)]
    table = show.scaling_table(points, price=None)
    column = [row[table.head.index("images per GPU")] for row in table.rows]
    assert column == ["8,192 (64 microbatches)", "768 (6 microbatches)", "128"]


def test_losses_add_up_and_more_devices_never_make_a_step_cheaper():
    points, refused = simulate_scaling(ask(), [8, 64, 512, 1024])
    assert [point.num_devices for point in points] == [8, 64, 512]
    assert list(refused) == [1024]
    assert "microbatch_size" in refused[1024]
    for each in efficiencies(points):
        assert sum(each.losses.values()) == pytest.approx(1 - each.efficiency)
    hours = [point.device_hours for point in points]
    assert hours == sorted(hours)
    assert cheapest_within(points, 1e6) is points[0]
    assert cheapest_within(points, points[1].hours) is points[1]
    assert cheapest_within(points, points[-1].hours / 2) is None


def test_bytes_and_messages_of_a_step_are_the_closed_forms():
    """ResNet-50's fp16 gradients, M bytes, on 64 nodes of 8, however many buffers they are in.

    For sums in fp32 NCCL, which would round each addition, is given twice the bytes, as in runs.
    """
    M = 25_557_032 * 2
    found = {name: simulate_point(ask(algorithm=name), 512) for name in ("native", "ring", "hierarchical", "sharded")}
    num_buffers = len(found["ring"].step.transfers)
    slack = 2 * 512 * num_buffers * 2  # parts differ by an element
    expected = {
        "native": (2 * 511 / 512 * 2 * M, 2 * 63 / 64 * 2 * M),
        "ring": (2 * 511 / 512 * M, 2 * 511 / 512 * M),
        "hierarchical": (4 * 7 / 8 * 2 * M + 2 * 63 / 64 * 2 * M, 2 * 63 / 64 * 2 * M),
        "sharded": (2 * 7 / 8 * 2 * M + 2 * 63 / 64 * 2 * M / 8, 2 * 63 / 64 * 2 * M),
    }
    for name, (rank, node) in expected.items():
        assert found[name].sent.rank_bytes == pytest.approx(rank, abs=slack), name
        assert found[name].sent.node_bytes == pytest.approx(node, abs=slack), name
    assert found["ring"].sent.rank_messages == 2 * 511 * num_buffers  # parts of a buffer are below a segment
    rounding = load_config(["--config", "imagenet/resnet50_64k", *WIRE])
    for name in ("native", "hierarchical", "sharded"):
        assert (found[name].sent.rank_messages, found[name].sent.node_messages) == (None, None)
        halves = simulate_point(Scenario(rounding, load_cluster("dgx_a100"), algorithm=name), 512)
        assert halves.sent.node_bytes == pytest.approx(2 * 63 / 64 * M, abs=slack)
    # sums in fp32 of halves that double: partial sums travel, 6 times across 64 nodes
    assert simulate_point(ask(algorithm="doubling"), 512).sent.node_bytes == 6 * 2 * M
    alone = simulate_point(ask(cluster="dgx_a100"), 1).sent
    assert (alone.rank_bytes, alone.rank_messages, alone.node_bytes) == (0, 0, 0)


@pytest.mark.parametrize("cluster", ["dgx_a100", "v100_cloud_tcp"])  # NCCL's own links, and sockets
def test_a_library_s_own_sums_of_halves_take_the_time_of_fp32(cluster):
    def communication(precision: str, reduce_dtype: str) -> float:
        """Return the communication of one buffer, whatever its bytes."""
        words = (f"--optimizer.precision={precision}", f"--comm.reduce_dtype={reduce_dtype}")
        one_buffer = "--comm.buffer_bytes=1000000000"
        config = load_config(["--config", "imagenet/resnet50_64k", *NO_SCALE, *words, one_buffer])
        return simulate_point(Scenario(config, load_cluster(cluster), algorithm="native"), 64).step.communication

    assert communication("bf16", "fp32") == pytest.approx(communication("fp32", "fp32"))
    assert communication("bf16", "wire") < 0.8 * communication("fp32", "fp32")


def test_only_what_is_simulated_is_shown_under_its_name():
    cluster = load_cluster("v100_cloud_tcp")
    for name in ("ring", "hybrid"):
        with pytest.raises(SimulationError, match=naming("v100_cloud_tcp", "sockets", name)):
            simulate_scaling(ask("v100_cloud_tcp", algorithm=name), [16, 64])
    config = load_config(["--config", "imagenet/resnet50_64k", "--comm.algorithm", "ring"])
    question = Scenario(config, cluster)
    assert simulate_point(question, 64).algorithm == "native"
    lines = show.assumptions(question)
    assert any("ring is not simulated" in line for line in lines)
    assert any(line.startswith("carrier sockets: few published") for line in lines)
    assert not any(line.startswith("carrier") for line in show.assumptions(ask()))


@pytest.mark.parametrize(
    ("recipe", "count", "options", "said"),
    [
        ("imagenet/resnet50_64k", 64, (), None),
        ("imagenet/resnet50_64k", 8192, ("--batch.microbatch_size", "8"), "this many GPUs"),
        ("imagenet/resnet50_64k", 64, ("--batch.microbatch_size", "8"), "8 images at once"),
        ("imagenet/resnet50_64k", 8, ("--model.name", "resnet18"), "resnet18"),
    ],
)
def test_answer_beyond_what_was_checked_names_the_nearest_published_step(recipe, count, options, said):
    config = load_config(["--config", recipe, *options])
    points = [simulate_point(Scenario(config, load_cluster("dgx_a100")), count)]
    assert (points[0].beyond_checked is None) == (said is None)
    words = " ".join(show.findings(points, model=config.model.name, deadline_hours=None))
    if said is None:
        assert "extrapolated" not in words
    else:
        assert all(word in words for word in (said, "Nearest checked", "images each"))


def test_a_run_is_its_steps_evaluations_and_checkpoints():
    asked = ["--run.checkpoint_every_steps", "100", "--run.eval_every_epochs", "4"]
    config = load_config(["--config", "imagenet/resnet50_64k", *asked])
    point = simulate_point(Scenario(config, load_cluster("dgx_a100")), 64)
    steps = config.run.epochs * 1_281_167 / 65_536
    assert point.run.steps * 3600 == pytest.approx(steps * point.step.seconds)
    # fp32 weights and momentum of 25,557,032 parameters are copied at 2.4 GB/s, every 100 steps and 4 epochs
    copies = steps / 100 + config.run.epochs / 4
    assert point.run.checkpoints * 3600 == pytest.approx(copies * 8 * 25_557_032 / 2.4e9)
    assert point.run.evaluations > 0
    assert point.run.failures == 0
    assert point.hours == point.run.steps + point.run.evaluations + point.run.checkpoints


def test_energy_is_published_power_over_the_time_of_a_step_and_of_the_run(tmp_path):
    point = simulate_point(ask("dgx1_v100"), 64)
    watts = 64 * 220.3 * 300 / 250  # boards of 250 W were measured, DGX-1 has some of 300 W
    assert point.energy is not None
    assert point.energy.joules_per_image == pytest.approx(watts * point.step.seconds / point.global_batch_size)
    assert point.energy.kilowatt_hours == pytest.approx(watts * point.hours / 1000)
    bounds = point.energy.low_joules_per_image, point.energy.high_joules_per_image
    waiting = 1 - point.step.computing / point.step.seconds  # at a quarter of the power, or at all of it
    for bound, seconds, share in zip(
        bounds, (point.low_seconds, point.high_seconds), (1 - 0.75 * waiting, 1), strict=True
    ):
        spread = math.hypot(math.log(seconds / point.step.seconds), FACTORS["other_system"] * POWER_SPREAD)
        assert abs(math.log(bound / share / point.energy.joules_per_image)) == pytest.approx(spread)
    written = tmp_path / "points.json"
    words = ["simulate", "imagenet/resnet50_64k", "--gpus", "64", "--json", str(written)]
    assert main([*words, "--cluster", "dgx1_v100"]) == 0
    record = json.loads(written.read_text())
    assert record["assumed"][-1].startswith("energy: 264 W for each NVIDIA V100-SXM2-16GB")
    assert record["points"][0]["energy"] == dataclasses.asdict(point.energy)
    assert main([*words, "--cluster", "h200_roce400"]) == 0  # no published power
    record = json.loads(written.read_text())
    assert not any(line.startswith("energy:") for line in record["assumed"])
    assert record["points"][0]["energy"] is None


def test_spread_of_power_is_what_other_devices_miss():
    shares = {each.device: math.log(each.watts / each.limit_watts) for each in PUBLISHED_POWER}
    missed = [share - mean(other for name, other in shares.items() if name != left) for left, share in shares.items()]
    assert math.sqrt(mean(each**2 for each in missed)) == pytest.approx(POWER_SPREAD, abs=0.005)
    # without the device's own row, neither in the mean nor in the spread
    for left, own in shares.items():
        others = {name: share for name, share in shares.items() if name != left}
        total = sum(others.values())
        spread = math.sqrt(mean((share - (total - share) / (len(others) - 1)) ** 2 for share in others.values()))
        assert abs(own - total / len(others)) <= FACTORS["same_system"] * spread
    assert power_of("NVIDIA H100 PCIe") is power_of("NVIDIA A400") is power_of("NVIDIA V100S-PCIE-32GB") is None
    assert power_of("NVIDIA A40") in PUBLISHED_POWER
    assert power_of("NVIDIA H100 80GB HBM3") == power_of("NVIDIA H100-SXM5-80GB")
    for name, watts in (("Tesla P100-SXM2-16GB", 165.5 * 300 / 250), ("Tesla V100-PCIE-16GB", 220.3)):
        assert (found := power_of(name)) is not None
        assert found.watts == pytest.approx(watts)


def test_energy_of_whole_nodes_holds_a_published_run_of_eight():
    scenario = ask("dgx_h100")
    # 8 nodes of 8 H100: 7,867.17 kJ in 2.554 minutes, MLPerf Training v4.0-0092
    eight_nodes, point = 7_867_170 / (2.554 * 60), simulate_point(scenario, 64)
    assert point.energy is not None
    low, high = (
        bound * point.images_per_second
        for bound in (point.energy.low_joules_per_image, point.energy.high_joules_per_image)
    )
    assert low < eight_nodes < high
    parts = simulate_point(scenario, 4)
    assert parts.energy is None, "its processors and switches take power for all eight"


def test_failures_cost_a_restart_and_half_an_interval_each():
    # seldom: R + T/2 for each of M, to first order
    share = effective_share(600.0, Failures(1000.0, 60.0), num_nodes=8)
    assert share == pytest.approx(1 - (60 + 300) * 8 / 3.6e6, abs=1e-6)
    # often: exponential failures, worked off by hand: M = 450 s, T = 900 s, R = 60 s
    assert effective_share(900.0, Failures(1.0, 60.0), num_nodes=8) == pytest.approx(900 / (510 * 6.389056), rel=1e-6)
    assert effective_share(1e9, Failures(0.01), num_nodes=8) == 0


def test_failures_throw_a_run_back_to_what_it_last_saved():
    def point_of(*asked: str, hours: float = 1000.0) -> PredictedPoint:
        config = load_config(["--config", "imagenet/resnet50_64k", "--run.eval_every_epochs", "4", *asked])
        return simulate_point(Scenario(config, load_cluster("dgx_a100"), failures=Failures(hours)), 64)

    epochs = point_of("--run.checkpoint_every_steps", "0")
    steps = point_of("--run.checkpoint_every_steps", "10")
    interval = 4 * 1_281_167 / 65_536 * epochs.step.seconds
    assert epochs.run.effective_share == pytest.approx(effective_share(interval, Failures(1000.0), num_nodes=8))
    assert epochs.run.effective_share < steps.run.effective_share < 1
    with pytest.raises(SimulationError, match="checkpoint_every_steps"):
        point_of(hours=0.001)


def test_epochs_are_those_of_mlperf_s_records():
    assert [epochs_to_759(batch) for batch in (1024, 4096, 65_536)] == [35.0, 40.0, 84.5]
    # 20,684 lies midway between the logarithms of 13,056 and 32,768
    assert epochs_to_759(20_684) == pytest.approx((45.4 + 56) / 2, abs=1e-3)
    assert epochs_to_759(131_072) is None
    point = simulate_point(ask(), 64)
    epochs = load_config(["--config", "imagenet/resnet50_64k"]).run.epochs
    assert point.hours_to_759 == pytest.approx(point.hours * 84.5 / epochs)
    assert simulate_point(ask("p40_roce100", "imagenet/alexnet_bn_64k"), 64).hours_to_759 is None


def test_over_subscribed_switch_takes_its_share_of_links(tmp_path):
    path = tmp_path / "mine.yaml"
    more = "switch_nodes: {value: 2, source: test}\noversubscription: {value: 4, source: test}\nrates:"
    path.write_text(CLUSTER.replace("rates:", more))
    rates = [load_cluster(str(path)).of_devices(count).across_bytes_per_second for count in (4, 8, 12)]
    assert rates == [1e9, 1e9, 0.25e9]  # four fifths of 10 Gbit/s are reached


def in_fp32(path, algorithm, *words):
    path.write_text(CLUSTER)
    config = load_config(["--config", "imagenet/resnet50_64k", "--optimizer.precision", "fp32", *NO_SCALE, *words])
    return Scenario(config, load_cluster(str(path)), algorithm=algorithm)


def test_advice_on_a_library_s_sums_lets_it_round_each_addition(tmp_path):
    by_library = in_fp32(tmp_path / "mine.yaml", "native")
    found = advise(by_library, simulate_point(by_library, 8))
    assert found.half_wire_options == "--comm.wire_dtype float16 --comm.reduce_dtype wire"


@pytest.mark.parametrize("count", [512, 96])  # equal and unequal numbers of microbatches
def test_advice_is_worth_what_it_says(count, tmp_path):
    question = in_fp32(tmp_path / "mine.yaml", "ring")
    point = simulate_point(question, count)
    found = advise(question, point)
    assert found.half_wire_options == "--comm.wire_dtype float16"
    assert found.half_wire_seconds < point.step.seconds
    sizes = found.plan.sizes
    tuned = ["--comm.threshold_bytes", str(sizes.threshold_bytes), "--comm.buffer_bytes", str(sizes.buffer_bytes)]
    if sizes.first_buffer_bytes:
        tuned += ["--comm.first_buffer_bytes", str(sizes.first_buffer_bytes)]
    changed = simulate_point(in_fp32(tmp_path / "mine.yaml", point.algorithm, *tuned), count)
    assert changed.step.seconds == pytest.approx(found.planned_seconds)
    assert found.planned_seconds <= point.step.seconds


@pytest.mark.parametrize("first", [[], ["--comm.first_buffer_bytes", "1000000"]])
def test_printed_options_give_the_promised_time(first):
    """A recipe's own small first buffer would otherwise remain in the plan, or the plan's would be missing."""
    question = ask(algorithm="hierarchical")
    question = dataclasses.replace(question, config=load_config(["--config", "imagenet/resnet50_64k", *first]))
    (line, *_) = show.advice(question, simulate_point(question, 512))
    options = re.search(r"\((.*)\) would make a step", line)[1].split()
    assert options[::2] == [f"--comm.{name}" for name in ("threshold_bytes", "buffer_bytes", "first_buffer_bytes")]
    tuned = dataclasses.replace(question, config=load_config(["--config", "imagenet/resnet50_64k", *options]))
    assert f" {1e3 * simulate_point(tuned, 512).step.seconds:,.1f} ms instead" in line


EXAMINED = {
    "experiment": {"model": "resnet50", "image_size": 224, "microbatch_size": 128, "precision": "fp16"},
    "machine": {"world_size": 2},
    "rates": {"model_alone": 5000.0},
}


def test_doctor_s_examination_is_a_rate(tmp_path, capsys):
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(EXAMINED))
    config = load_config(["--config", "imagenet/resnet50_64k"])
    rate = read_profile(path, config)
    assert (rate.images_per_second, rate.local_batch) == (2500.0, 128)
    words = ["simulate", "imagenet/resnet50_64k", "--cluster", "dgx_a100", "--gpus", "8", "--profile", str(path)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("compute rate (yours)")
    assert "2,500.0 images/s" in shown
    assert "the rate of bigbatch itself" not in shown
    assert "nois" not in shown
    path.write_text(json.dumps(EXAMINED | {"rates": {**EXAMINED["rates"], "turns": 1}}))
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f"(measured by bigbatch doctor: {path}, measured once)")
    path.write_text(json.dumps(EXAMINED | {"spread": 0.31, "is_noisy": True}))
    assert main(words) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith(f"(measured by bigbatch doctor: {path}, noisy: equal measurements differed by 31%)")
    )
    for key, value in {"model": "resnet18", "precision": "fp32", "microbatch_size": 64, "image_size": 128}.items():
        path.write_text(json.dumps(EXAMINED | {"experiment": EXAMINED["experiment"] | {key: value}}))
        with pytest.raises(SimulationError, match=naming(key, value)):
            read_profile(path, config)
    counted = [json.dumps(EXAMINED | {"machine": {"world_size": number}}) for number in (0, math.inf)]
    odd = json.dumps(EXAMINED | {"is_noisy": True, "spread": "much"})
    for text in ("", "[]", "{}", "[" * 100_000, *counted, odd):
        path.write_text(text)
        with pytest.raises(SimulationError, match=naming("doctor.json")):
            read_profile(path, config)


def first_line_of(capsys, *words, recipe="imagenet/resnet50_64k", cluster="dgx_a100"):
    assert main(["simulate", recipe, "--cluster", cluster, "--gpus", "8", *words]) == 0
    return capsys.readouterr().out.splitlines()[0]


OTHERS = "compute rate (of another system, MLPerf's implementation, not of bigbatch): NVIDIA A100"


def keep(record=EXAMINED, *words, recipe="imagenet/resnet50_64k"):
    path = profile_path(load_config(["--config", recipe, *words]), "NVIDIA A100-SXM4-80GB")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def test_kept_rate_is_used_if_none_is_stated(tmp_path, capsys):
    first = partial(first_line_of, capsys)
    assert first().startswith(OTHERS)
    path = keep(EXAMINED | {"conditions": {"date": "2026-11-30"}})
    assert re.fullmatch(r"A100-SXM4-80GB-[0-9a-f]{16}\.json", path.name)
    assert first() == (
        "compute rate (yours): NVIDIA A100-SXM4-80GB: 2,500.0 images/s of resnet50 at 128 images a step (measured by "
        f"bigbatch doctor on 2026-11-30: {path})"
    )
    assert first("--rate", "2600").endswith("2,600.0 images/s of resnet50 at 128 images a step (--rate)")
    stated = tmp_path / "stated.json"
    stated.write_text(json.dumps(EXAMINED | {"rates": {"model_alone": 5400.0, "turns": 3}}))
    assert "2,700.0 images/s" in first("--profile", str(stated))
    assert "of another system" in first(cluster="dgx_h100")
    own = tmp_path / "own.yaml"
    own.write_text(CLUSTER.replace("a device", "NVIDIA A100-SXM4-80GB").replace("source: test}", "source: mine}"))
    assert first(cluster=str(own)).startswith("compute rate (as own states): ")  # it has a rate of the model
    for odd in ({}, EXAMINED | {"conditions": "odd"}):
        path.write_text(json.dumps(odd))
        assert first().startswith(OTHERS)


@pytest.mark.parametrize(
    "other",
    [
        "batch.microbatch_size=64",
        "batch.bn_span=64",
        "optimizer.precision=bf16",
        "optimizer.name=sgd",
        "data.image_size=128",
        "data.train_sizes=[[0, 128], [10, 224]]",
        "data.num_classes=10",
        "compute.mode=eager",
        "compute.channels_last=false",
        "augment.cutout_size=16",
        "run.reproducible=true",
    ],
)
def test_rate_of_another_computation_is_not_found(other, capsys):
    keep()
    assert first_line_of(capsys, f"--{other}").startswith(OTHERS)


def test_rate_of_another_width_or_release_is_not_found(monkeypatch):
    def is_found(*words):
        config = load_config(["--config", "quickstart", *words])
        return cluster_module.kept_rate(config, "NVIDIA A100-SXM4-80GB") is not None

    config = load_config(["--config", "quickstart"])
    wanted = {name: lookup(config, key) for name, key in cluster_module.PROFILE_KEYS.items()}
    keep(EXAMINED | {"experiment": wanted}, recipe="quickstart")
    assert is_found()
    assert not is_found("--model.options.width", "128")
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "__version__", "0.0")
        assert not is_found()
    monkeypatch.setattr(cluster_module, "version", lambda name: {"torch": "1.0"}[name])
    assert not is_found()


def test_store_is_not_read_if_a_rate_is_stated(monkeypatch, tmp_path, capsys):
    """Nor does a folder without a value matter then, or at all."""
    odd = partial(measured_folder, environ={"XDG_CACHE_HOME": "$NOT_SET_HERE/cache"})
    monkeypatch.setattr(cluster_module, "measured_folder", odd)
    assert first_line_of(capsys).startswith(OTHERS)
    monkeypatch.setattr(cluster_module, "measured_folder", None)
    assert first_line_of(capsys, "--rate", "2600").endswith("(--rate)")
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(EXAMINED))
    assert str(path) in first_line_of(capsys, "--profile", str(path))


def test_resnet9_grows_with_its_width():
    from bigbatch.trainer.models.resnet9 import resnet9

    for width in (16, 64, 128):
        config = load_config(["--config", "quickstart", "--model.options.width", str(width)])
        held = sum(p.numel() for p in resnet9(num_classes=10, width=width).parameters())
        assert shape_of(config.model).num_parameters == pytest.approx(held, rel=0.02)


def test_own_rate_and_other_models_are_scaled_by_cause():
    cluster = load_cluster("dgx_a100")
    own, _ = cluster.compute(load_shape("resnet50"), rate=Rate("resnet50", 100, 1000.0, "test"))
    assert own.seconds(100) == pytest.approx(0.1)
    deep, _ = cluster.compute(load_shape("resnet101"))
    plain, rate = cluster.compute(load_shape("resnet50"))
    assert rate.images_per_second == 3398.9
    assert deep.seconds_per_image / plain.seconds_per_image == pytest.approx(1.9, rel=0.02)  # 7.8 to 4.1 GFLOP
    assert cluster.compute(load_shape("resnet50"), pixels=448)[0].seconds_per_image == pytest.approx(
        4 * plain.seconds_per_image
    )


def test_every_packaged_cluster_states_sources_and_answers():
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.of_devices(2 * cluster.network.devices_per_node).num_nodes == 2
    with pytest.raises(SimulationError, match=naming("12", "8", "16")):
        load_cluster("dgx_a100").of_devices(12)
    with pytest.raises(SimulationError, match="--rate"):
        load_cluster("emulated").compute(load_shape("resnet50"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("value: 4,", "value: 0,", ("devices_per_node=0",)),
        ("value: 4,", "value: 010,", ("devices_per_node=010",)),
        ("value: 4,", "value: 2.5,", ("devices_per_node=2.5", "whole")),
        ("{value: 10, source: test}\nrates", "{value: -10, source: test}\nrates", ("across_gbit_per_s=-10",)),
        ("{value: 10, source: test}\nrates", "{value: 10}\nrates", ("across_gbit_per_s", "source")),
        ("across_gbit_per_s", "across_gbit", ("across_gbit ", "across_gbit_per_s")),
        ("device: {value: a device, source: test}\n", "", ("device is missing",)),
        ("resnet50", "resnet5", ("resnet5",)),
        ("images_per_second: 300", "images_per_second: -3", ("images_per_second=-3",)),
        ("rates:", "carrier: {value: pigeons, source: test}\nrates:", ("carrier=pigeons", "sockets")),
        ("rates:", "rates: [", ("cannot read",)),
    ],
)
def test_bad_clusters_are_refused_by_key_and_value(tmp_path, old, new, words):
    path = tmp_path / "mine.yaml"
    path.write_text(CLUSTER)
    assert load_cluster(str(path)).network.devices_per_node == 4
    path.write_text(CLUSTER.replace(old, new))
    with pytest.raises(SimulationError, match=naming("mine.yaml", *words)):
        load_cluster(str(path))


@pytest.mark.usefixtures("rendered_figures")
def test_command_answers_and_writes_what_is_asked_for(tmp_path, capsys):
    words = ["simulate", "imagenet/resnet50_64k", "--cluster", "dgx_a100", "--gpus", "8,512", "--price", "2.5"]
    files = {
        option: tmp_path / f"out.{kind}"
        for option, kind in {"json": "json", "trace": "trace", "plot": "svg", "html": "html"}.items()
    }
    words += ["--deadline", "1h", "--compare", "native, ring,hybrid"]
    words += ["--failure-hours", "5000", "--advise", "--tables"]
    assert main([*words, *(f"--{option}={path}" for option, path in files.items())]) == 0
    shown = capsys.readouterr().out
    for said in ("MLPerf Training v2.0", "assumed", "efficiency", "stragglers", "ring", "cheapest"):
        assert said in shown
    points = json.loads(files["json"].read_text())["points"]
    assert [point["gpus"] for point in points] == [8, 512]
    for point in points:
        parts = sum(
            point[f"{part}_seconds"] for part in ("computing", "exposed_communication", "straggler", "input_wait")
        )
        assert parts == pytest.approx(point["step_seconds"])
        element_bytes = 2 if point["algorithm"] == "ring" else 4  # fp32 sums of fp16 gradients
        needed = 2 * (point["nodes"] - 1) / point["nodes"] * element_bytes * 25_557_032
        assert point["node_sends_bytes"] == pytest.approx(needed, abs=point["buffers"])
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert sum(event["args"]["bytes"] for event in events if "args" in event) == 25_557_032 * 2
    assert "<svg" in files["plot"].read_text()
    page = files["html"].read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == 1
    for said in ("MLPerf Training v2.0", "--failure-hours 5000", "What is lost", "The run"):
        assert said in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib.org", "")


def test_a_single_size_has_no_efficiency_and_one_table(tmp_path, capsys):
    """Efficiency compares with the fewest GPUs: a single size would always have 100%."""
    words = ["simulate", "imagenet/resnet50_64k", "--cluster", "dgx_a100"]
    assert main([*words, "--gpus", "32", f"--json={tmp_path / 'one.json'}", "--tables"]) == 0
    shown = capsys.readouterr().out
    assert "efficiency" not in shown
    assert "What is lost" not in shown
    (point,) = json.loads((tmp_path / "one.json").read_text())["points"]
    assert (point["efficiency"], point["losses"]) == (None, None)
    assert main([*words, "--gpus", "8,32"]) == 0
    shown = capsys.readouterr().out
    assert "efficiency" in shown
    assert not [title for title in ("What is lost", "The run") if title in shown]


def test_loaders_that_cannot_keep_up_set_the_pace(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CLUSTER)
    # a node's loaders bring 600 images/s: twice what one device trains, half of what four do
    question = ask(str(path), input_images_per_second=600.0)
    points, _ = simulate_scaling(question, [1, 4, 8])
    alone, full, two_nodes = points
    busy = simulate_point(ask(str(path), algorithm=full.algorithm), 4).step.seconds
    assert alone.step.input == 0
    assert full.step.seconds == pytest.approx(65_536 / 600)
    assert full.step.input == pytest.approx(65_536 / 600 - busy)
    assert two_nodes.step.seconds == pytest.approx(65_536 / 600 / 2)
    lost = efficiencies(points)[1]
    assert lost.efficiency == pytest.approx(alone.step.seconds / 4 / full.step.seconds)
    assert lost.losses["input"] == pytest.approx(full.step.input / full.step.seconds)
    assert lost.name_of("input") == "input"
    assert simulate_point(ask(str(path), input_images_per_second=2400.0), 4).step.input == 0
    words = show.findings(points, model="resnet50", deadline_hours=None)
    assert any("Lost to input (" in line for line in words)
    # two nodes' busy seconds, for which loaders must bring half of 65,536 images each
    needed = 65_536 / 2 / (two_nodes.step.seconds - two_nodes.step.input)
    assert any(line.startswith("Bound by input") and f"{needed:,.0f} images/s" in line for line in words)
    # beside such a wait the rest of the step is lost to rounding
    slow = simulate_point(ask(str(path), input_images_per_second=1e-300), 4)
    words = show.findings([slow], model="resnet50", deadline_hours=None)
    assert any(line.startswith("Bound by input") for line in words)


def test_cores_times_their_rate_are_a_node_s_input(tmp_path):
    path = tmp_path / "mine.yaml"
    cores = "cores_per_node: {value: 48, source: test}\n"
    each = "input_images_per_second_per_core: {value: 500, source: test}\n"
    path.write_text(CLUSTER + cores + each)
    assert load_cluster(str(path)).input_images_per_second == 24_000
    assert input_rate(ask(str(path))) == 24_000
    assert input_rate(ask(str(path), input_images_per_second=7.0)) == 7.0
    generated = ["--data.loader", "synthetic", "--data.num_synthetic_samples", "100000"]
    config = load_config(["--config", "imagenet/resnet50_64k", *generated])
    assert input_rate(Scenario(config, load_cluster(str(path)))) is None  # reads no files
    for text, named in {
        cores: "go together",
        each: "go together",
        cores + each + "input_images_per_second: {value: 500, source: test}\n": "keep one",
    }.items():
        path.write_text(CLUSTER + text)
        with pytest.raises(SimulationError, match=naming("mine.yaml", "cores_per_node", named)):
            load_cluster(str(path))


def test_arguments_are_read_and_refused():
    assert read_counts("8..64,100", per_node=8) == [8, 16, 32, 64, 100]
    assert read_counts("8..20", per_node=8) == [8, 16, 20]
    assert read_counts("", per_node=4)[:3] == [4, 8, 16]
    for text in ("0", "x", "64..8", "8...16", "10000001"):
        with pytest.raises(LaunchOptionError, match="--gpus"):
            read_counts(text, per_node=8)
    assert [read_hours(text) for text in ("1h", "90m", "2", "36s")] == [1, 1.5, 2, 0.01]
    assert [read_hours(text) for text in ("2h30", "2h30m", "1d2h30", "2:30:00", "1-12")] == [2.5, 2.5, 26.5, 2.5, 36]
    for text in ("", "1w", "-1h", "0", "2h30x", "h30", "1:2:3:4", "0:0"):
        with pytest.raises(LaunchOptionError, match="--deadline"):
            read_hours(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["imagenet/resnet50_64k", "--cluster", "dgx_a10"], ("dgx_a100",)),
        (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--model.name", "timm:resnet18"], ("timm",)),
        (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--gpus", "1000000"], ("microbatch_size",)),
        (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--rate", "0"], ("--rate",)),
        (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--input-rate", "0"], ("--input-rate",)),
        *(
            (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--gpus", "8", option, f"/nowhere/x{end}"], said)
            for option, end, said in (
                ("--html", ".html", ("/nowhere/x.html", "name another folder")),
                ("--plot", ".png", ("/nowhere/x.png", "name another folder")),
            )
        ),
        (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--compare", "rng"], ("ring",)),
        (
            ["imagenet/resnet50_64k", "--cluster", "v100_cloud_tcp", "--compare", "native, ring"],
            ("not ring", "--compare"),
        ),
        (["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--json", "a", "--html", "./a"], ("a is named twice",)),
        (["--config", "quickstart", "--cluster", "dgx_a10"], ("dgx_a100",)),
    ],
)
def test_refusals_name_what_to_do(words, said, capsys):
    assert main(["simulate", *words]) != 0
    error = capsys.readouterr().err
    assert error.startswith("bigbatch: ")
    assert all(each in error for each in said), error


@pytest.mark.usefixtures("rendered_figures")
def test_plot_of_an_unknown_format_is_refused(tmp_path, capsys):
    plot = tmp_path / "x.odd"
    assert main(["simulate", "imagenet/resnet50_64k", "--cluster", "dgx_a100", "--gpus", "8", f"--plot={plot}"]) == 1
    assert re.search(naming(f"--plot {plot}: ", "'odd'", "png"), capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ("--cluster",)),
        (["quickstart"], ("--cluster is missing", "dgx_a100", "p40_roce100")),
        (["quickstart", "--config", "pilot/x", "--cluster", "dgx_a100"], ("quickstart", "--config pilot/x")),
    ],
)
def test_wrong_command_line_exits_with_2(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 2, "with a short usage"
    assert all(each in error for each in said), error


def test_hybrid_takes_for_each_buffer_the_fastest_by_size():
    """A short first buffer by doubling's few hops, a long one by what carries bytes best: faster than either alone."""
    sizes = ["--comm.threshold_bytes", "20000000", "--comm.buffer_bytes", "40000000", "--comm.first_buffer_bytes", "9"]
    config = load_config(["--config", "imagenet/resnet50_64k", *sizes])
    cluster = load_cluster("v100_cloud_tcp")
    cluster = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, carrier="nccl"))
    network = cluster.of_devices(64)
    every = ("native", "ring", "hierarchical", "sharded", "doubling")
    for num_bytes in (4_096, 60_000_000):
        times = {name: network.seconds(num_bytes, name) for name in every}
        assert network.seconds(num_bytes, "hybrid") == min(times.values())
        assert times[network.fastest(num_bytes)] == min(times.values())
    steps = {
        name: simulate_point(Scenario(config, cluster, algorithm=name), 64).step.seconds for name in (*every, "hybrid")
    }
    assert steps["hybrid"] <= min(steps.values())
    sent = simulate_point(Scenario(config, cluster, algorithm="hybrid"), 64).sent
    assert sent.node_bytes >= 2 * 7 / 8 * 2 * 25_557_032


def test_slow_links_move_the_knee():
    counts = [8, 16, 32, 64, 128, 256]
    assert knee(simulate_scaling(ask(), counts)[0]).num_devices == 256
    cluster = load_cluster("dgx_a100")
    network = cluster.network
    slow_network = dataclasses.replace(network, across_bytes_per_second=network.across_bytes_per_second * 1e-4)
    slow = dataclasses.replace(ask(), cluster=dataclasses.replace(cluster, network=slow_network))
    assert knee(simulate_scaling(slow, counts)[0]).num_devices < 256


def test_measured_rate_makes_the_interval_narrower_and_parameter_servers_wider():
    def width(question: Scenario) -> float:
        point = simulate_point(question, 8)
        return point.high_seconds / point.low_seconds

    own = Rate("resnet50", 128, 3400.0, "measured")
    assert width(ask(rate=own)) < width(ask())
    cluster = load_cluster("dgx_a100")
    servers = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, carrier="servers"))
    assert width(dataclasses.replace(ask(rate=own), cluster=servers)) > width(ask(rate=own))


def test_first_line_says_whose_rate_it_is_and_the_second_what_ours_is() -> None:
    first, second, *_ = show.assumptions(ask("dgx_h100"))
    assert first.startswith("compute rate (of another system, MLPerf's implementation, not of bigbatch): NVIDIA H100")
    assert "the rate of bigbatch itself is 5,573 to 5,835 images/s at 256 images a step, by record" in second
    assert "the rate of bigbatch itself is unknown" in show.assumptions(ask("dgx_a100"))[1]
    own = ask("dgx_h100", rate=Rate("resnet50", 128, 5000.0, "--rate"))
    assert show.assumptions(own)[0].startswith("compute rate (yours)")


def test_own_rates_are_those_of_the_record() -> None:
    record = (ROOT / "benchmarks/results/gpu-nvidia-h100-80gb-hbm3.md").read_text()
    (own,) = OWN_RATES
    found = [
        float(value.replace(",", "")) for value in re.findall(r"\| (?:cuda_graph|bf16|fp16) \| ([\d,]+) \|", record)
    ]
    assert (min(each for each in found if each > 5000), max(found)) == (own.low, own.high)


def test_cost_has_cents_and_is_in_the_json(tmp_path, capsys) -> None:
    words = ["imagenet/resnet50_64k", "--cluster", "dgx_a100", "--gpus", "8", "--price", "0.125", "--json"]
    assert main(["simulate", *words, str(tmp_path / "p.json")]) == 0
    (point,) = json.loads((tmp_path / "p.json").read_text())["points"]
    assert point["cost"] == pytest.approx(0.125 * point["gpu_hours"])
    assert f"{0.125 * point['gpu_hours']:,.2f}" in capsys.readouterr().out
    assert json.loads(show.as_json(ask(), [simulate_point(ask(), 8)]))["points"][0]["cost"] is None
