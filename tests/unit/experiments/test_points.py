"""Which points a sweep makes, and with which config."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming
from small_sweep import SWEEP, write

from bigbatch.errors import LaunchOptionError
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.growth import Growth, grow
from bigbatch.experiments.engine.plan import dump_plan, packaged_sweeps, read_plan
from bigbatch.experiments.engine.points import make_points
from bigbatch.experiments.report.show import print_table
from bigbatch.trainer.config.file import PACKAGED, read_dumped


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, {2}),  # 8 cores, at most 4 ranks
        ({"where": "slurm"}, {None}),
        ({"options": SWEEP["options"] | {"compute.cpu_threads": 3}}, {3}),
        ({"grid": {}}, {None}),
        ({"where": "mpirun", "launch": {"hosts": "a:2,b:2"}}, {None}),  # of other hosts the cores are not known
    ],
)
def test_sweep_points_have_the_same_threads_per_rank(
    file: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], threads: set[int | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    points = make_points(read_plan(write(file, **changes)), folder=Path("out"))
    assert {point.config.compute.cpu_threads for point in points} == threads


@pytest.mark.parametrize("cores_of_then", [None, 2])
def test_sweep_goes_on_with_the_threads_it_was_begun_with(
    file: Path, monkeypatch: pytest.MonkeyPatch, cores_of_then: int | None
) -> None:
    """A sweep begun before this rule, or on other cores, keeps the threads that its points state."""
    sweep, folder = read_plan(file), SweepFolder(Path("out"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    points = make_points(sweep, folder=folder.path)
    threads = None if cores_of_then is None else max(1, cores_of_then // 4)
    compute = [replace(point.config.compute, cpu_threads=threads) for point in points]
    then = [replace(p, config=replace(p.config, compute=c)) for p, c in zip(points, compute, strict=True)]
    folder.prepare(sweep, then)
    for point in then:
        folder.write_config(point)
    folder.prepare(sweep, points)
    for point in points:
        folder.write_config(point)
    assert {read_dumped(folder.config(p.number).read_text())["compute.cpu_threads"] for p in points} == {threads}
    stated = read_plan(write(file, options=SWEEP["options"] | {"compute.cpu_threads": 3}))
    for point in points:
        folder.write_config(point)
    with pytest.raises(LaunchOptionError, match=naming("out", "options")):
        grow(stated, make_points(stated, folder=folder.path), folder)


def test_value_of_the_grid_replaces_the_parts_that_options_state(file: Path) -> None:
    options = SWEEP["options"] | {"model.options.width": 16}
    plan = read_plan(write(file, options=options, grid={"model.options": [{"width": 4}, {"width": 8}]}))
    points = make_points(plan, folder=Path("out"))
    assert [point.config.model.options["width"] for point in points] == [4, 8]


@pytest.mark.long
def test_sweep_points_weak_and_strong_by_hand(file: Path) -> None:
    points = make_points(read_plan(file), folder=Path("out"))
    found = [
        (
            *(point.number, point.values["scaling"], point.ranks, point.nodes, point.ranks_per_node),
            *(point.config.batch.global_batch_size, point.config.batch.microbatch_size, point.config.batch.bn_span),
            *(point.config.data.num_synthetic_samples, point.config.run.epochs, point.config.run.directory),
        )
        for point in points
    ]
    assert found == [
        # weak: a microbatch of 32 on each rank; 10 steps
        (0, "weak", 1, 1, 1, 32, 32, 16, 320, 1, "out/points/0/run"),
        (1, "weak", 2, 1, 2, 64, 32, 16, 640, 1, "out/points/1/run"),
        (2, "weak", 4, 1, 2, 128, 32, 16, 1280, 1, "out/points/2/run"),
        # strong: 96 images; four ranks have 24 each, whose ghost batches of at most 16 are 12
        (3, "strong", 1, 1, 1, 96, 32, 16, 960, 1, "out/points/3/run"),
        (4, "strong", 2, 1, 2, 96, 24, 12, 960, 1, "out/points/4/run"),
        (5, "strong", 4, 1, 2, 96, 24, 12, 960, 1, "out/points/5/run"),
    ]


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        # weak: a microbatch of 32 on each rank; strong: 96 images on at most 4
        ({}, {("weak", ranks): 32 for ranks in (1, 2, 4)} | {("strong", ranks): 24 for ranks in (1, 2, 4)}),
        ({"grid": {"ranks": [4]}}, {(None, 4): "auto"}),
        ({"grid": {"ranks": [1, 2]}, "options": {"compute.mode": "eager"}}, {(None, 1): "eager", (None, 2): "eager"}),
    ],
)
def test_sweep_points_of_several_numbers_of_ranks_have_one_mode(
    file: Path, changes: dict[str, Any], modes: dict[tuple[str | None, int], int | str]
) -> None:
    options = {"options": SWEEP["options"] | {"compute.mode": "auto"} | changes.get("options", {})}
    points = make_points(read_plan(write(file, **changes | options)), folder=Path("out"))
    assert {(each.values.get("scaling"), each.ranks): each.config.compute.mode for each in points} == modes


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "launch", "nodes"),
    [
        ("slurm", {}, [1, 1, 2]),
        ("emulated", {}, [1, 1, 2]),
        ("local", {}, [1, 1, 1]),
        ("mpirun", {}, [1, 1, 1]),
        ("mpirun", {"hosts": "a:1,b:8"}, [1, 2, 2]),
        ("mpirun", {"hosts": "a:1,b:1,a:2"}, [1, 2, 2]),
        ("mpirun", {"hostfile": "hosts"}, [1, 1, 2]),
    ],
)
def test_sweep_nodes_are_those_on_which_ranks_run(
    where: str, launch: dict[str, Any], nodes: list[int], file: Path
) -> None:
    """For points of 1, 2 and 4 ranks."""
    file.with_name("hosts").write_text("a slots=3\nb slots=3\n")
    write(file, where=where, launch=launch, grid={"ranks": [1, 2, 4]})
    assert [point.nodes for point in make_points(read_plan(file), folder=Path("out"))] == nodes


@pytest.mark.long
def test_sweep_of_any_key_and_repeats_with_seeds_of_their_own(file: Path) -> None:
    grid = {"ranks": [1], "comm.algorithm": ["ring", "native"], "optimizer.precision": ["fp32", "bf16"]}
    points = make_points(read_plan(write(file, grid=grid, seeds=2)), folder=Path("out"))
    values = [(point.config.comm.algorithm, point.config.optimizer.precision) for point in points[:4]]
    assert values == [("ring", "fp32"), ("ring", "bf16"), ("native", "fp32"), ("native", "bf16")]
    assert [(point.seed, point.config.run.seed) for point in points] == [(0, 0)] * 4 + [(1, 1)] * 4
    assert points[5].describe() == "ranks=1, comm.algorithm=ring, optimizer.precision=bf16, seed=1"


@pytest.mark.long
@pytest.mark.parametrize("name", packaged_sweeps())
def test_sweep_that_is_packaged_makes_points(name: str) -> None:
    sweep = read_plan(PACKAGED / f"sweeps/{name}.yaml")
    assert sweep.name == name
    assert make_points(sweep, folder=sweep.folder)


@pytest.mark.parametrize("epochs", [None, 4])
def test_sweep_points_go_on_from_their_checkpoints_whatever_the_experiment_says(file: Path, epochs: int | None) -> None:
    own = file.with_name("own.yaml")
    own.write_text("base: quickstart\nrun: {resume: never}\n")
    options = {"data.loader": "synthetic", "data.num_synthetic_samples": 960}
    plan = read_plan(write(file, config=str(own), steps=None, epochs=epochs, options=options, grid={}))
    assert make_points(plan, folder=Path("out"))[0].config.run.resume == "auto"


def test_sweep_times_and_numbers_are_what_they_look_like(file: Path) -> None:
    """YAML 1.1 reads 0:20:00 as 1,200, which Slurm would take for minutes, and 1e-3 as text."""
    text = file.read_text().replace("where: local", "where: slurm").replace("launch: {}", "launch: {time: 0:20:00}")
    file.write_text(text.replace("timeout_minutes: 5", "timeout_minutes: 1e-3"))
    sweep = read_plan(file)
    assert sweep.launch == {"time": "0:20:00"}
    assert sweep.timeout_minutes == 0.001
    file.write_text(dump_plan(sweep))
    assert read_plan(file) == sweep


def test_sweep_table_has_what_differs_and_aligns_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        file,
        grid={"optimizer.options.nesterov": [True, False], "batch.global_batch_size": [96, 9600]},
        options={},
        steps=None,
    )
    plan = read_plan(file)
    points = make_points(plan, folder=file.with_name("none"))
    print_table(plan, SweepFolder(file.with_name("none")), points, Growth(tuple(points)))
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["point", "nesterov", "ranks", "nodes", "global", "batch", "microbatch", "outcome"]
    assert [row.split() for row in rows][1:3] == [
        ["1", "true", "1", "1", "9600", "128", "pending"],
        ["2", "false", "1", "1", "96", "96", "pending"],
    ]
    assert len({len(row) for row in rows}) == 1


def test_stated_interval_of_evaluations_holds_in_a_sweep_with_epochs(file: Path) -> None:
    own = SWEEP["options"] | {"data.num_synthetic_samples": 960}
    stated = {"run.eval_every_epochs": 2, "run.eval_offset_epochs": 1}
    for options, expected in (({}, (4, 0)), (stated, (2, 1))):
        plan = read_plan(write(file, steps=None, epochs=4, options=own | options, grid={}))
        (point,) = make_points(plan, folder=Path("out"))
        run = point.config.run
        assert (run.epochs, run.eval_every_epochs, run.eval_offset_epochs) == (4, *expected)
