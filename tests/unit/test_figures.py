"""Tables of the pages have the figures of their records."""

import csv
import hashlib
import json
import re
import statistics
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures_age
import pytest
from figures_age import commits

from bigbatch.tools.simulate.interval import FACTORS, UNCHECKED_REACH
from bigbatch.trainer.report.ending import closing_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def read_table(name: str) -> list[dict[str, str]]:
    with (ROOT / f"benchmarks/results/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first cell is head, head first, without the rule."""
    _, found, text = (ROOT / "docs" / page).read_text().partition(f"\n| {head} |")
    assert found, f"{page} has no such table"
    lines = f"| {head} |{text}".partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def require(cell: str, *values: float) -> None:
    """A cell shows these values, each rounded to the digits that it has."""
    shown = re.findall(r"\d[\d,]*(?:\.\d+)?", cell)
    assert len(shown) == len(values), cell
    for text, value in zip(shown, values, strict=True):
        half = 0.5 * 10.0 ** -len(text.partition(".")[2])
        assert abs(float(text.replace(",", "")) - value) <= half + 1e-9, f"{cell}: {value}"


def top1(runs: Sequence[dict[str, Any]]) -> float:
    return 100 * statistics.fmean(run["top1"] for run in runs)


def median(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def test_a_figure_that_is_not_the_records_is_seen() -> None:
    require("77.7 (73.0 to 1,084)", 77.65, 73.04, 1084.4)
    for cell, value in (("67.8%", 67.748), ("1,084", 1085), ("nothing", 1.0)):
        with pytest.raises(AssertionError):
            require(cell, value)


def test_figures_of_stored_images() -> None:
    found = record("input-stored-cpu-time")
    rates, ratios = found["images_per_second_per_core"], found["ratios"]
    names = ("our_dali", "our_dali_at_256", "limit_yuv_at_256")
    for name, (_, images, over, stored) in zip(names, rows_of("measured.md", "stored as")[1:], strict=True):
        require(images, *(rates[name][key] for key in ("median", "min", "max")))
        if name == "our_dali":
            require(stored, found["conditions"]["mean_bytes"])
        else:
            require(over, *(1 / ratios[f"our_dali / {name}"][key] for key in ("median", "max", "min")))


def test_figures_of_the_accuracy_with_stored_images() -> None:
    found = record("stored-images-accuracy")
    small, original = (found["cases"][case] for case in ("at 74", "original"))
    for case in (small, original):
        for key in ("top1", "top1_other_validation"):
            values = [100 * run[key] for run in case["runs"]]
            spread = {"mean": statistics.fmean(values), "sd": statistics.stdev(values), "n": len(values)}
            assert case[f"{key}_percent"] == pytest.approx(spread)
    text = (ROOT / "docs/measured.md").read_text().partition("accuracy was not measured on ImageNet, but")[2]
    sizes, own, others = text.partition(" ([record]")[0].split(". ")
    ran = found["conditions"]
    require(sizes, ran["image_size"], ran["short_side"], ran["image_size"], 256, 224)
    own_spreads, other_spreads = (
        [case[key][part] for case in (small, original) for part in ("mean", "sd")]
        for key in ("top1_percent", "top1_other_validation_percent")
    )
    costs = [100 * (a["top1"] - b["top1"]) for a, b in zip(original["runs"], small["runs"], strict=True)]
    epochs, seeds = (ran["epochs"], ran["recipe_epochs"]), [run["seed"] for run in small["runs"]]
    assert seeds == [run["seed"] for run in original["runs"]]
    require(own, *own_spreads, 144, *epochs, len(seeds), min(costs), max(costs))
    require(others, *other_spreads)


@pytest.mark.parametrize(("head", "name"), [("CIFAR-10", "cifar10"), ("Imagenette", "imagenette")])
def test_figures_of_optimizers(head: str, name: str) -> None:
    named = {"`sgd`, Nesterov": "nesterov", "Schedule-Free SGD": "schedule-free"}
    cases = record(f"beyond-{name}-medium")["cases"].values()
    found = {(case["family"], case["optimizer"], case["batch"]): case for case in cases}
    rows = rows_of("optimizers.md", head)[1:]
    assert len(rows) == 6
    for row, *cells in rows:
        optimizer = named.get(row, row.strip("`"))
        for batch, cell in zip((128, 512, 2048), cells[:3], strict=True):
            require(cell, *(found["batch", optimizer, batch]["top1_percent"][key] for key in ("mean", "sd")))
        for batch, cell in zip((128, 512), cells[3:], strict=True):
            if shorter := found.get(("time", optimizer, batch)):
                require(cell, *(shorter["top1_percent"][key] for key in ("mean", "sd")), shorter["epochs"])
            else:
                assert cell == "same"


def test_figures_of_ten_times() -> None:
    found = record("ten-times-cpu")
    first = median(found["steps"][0]["runs"], "seconds")
    rows = rows_of("sources.md", "CPU, each on top of those before it")[1:]
    for (_, seconds, times, reached, evaluation, right), step in zip(rows, found["steps"], strict=True):
        runs = step["runs"]
        own = median(runs, "seconds")
        require(seconds, own, *(choose(run["seconds"] for run in runs) for choose in (min, max)))
        require(times, first / own)
        require(reached, median(runs, "reached_seconds"))
        require(evaluation, median(runs, "evaluation_seconds"))
        require(right, top1(runs))
    assert {run["epochs"] for run in found["steps"][-1]["runs"]} == {6, 7}
    forms = found["inference"]["forms"]
    first = statistics.median(forms[0]["images_per_second"])
    for (_, rate, times, right), form in zip(
        rows_of("sources.md", "CPU, inference by the last, each on top of those before")[1:], forms, strict=True
    ):
        own = form["images_per_second"]
        require(rate, statistics.median(own), min(own), max(own))
        require(times, statistics.median(own) / first)
        require(right, 100 * statistics.fmean(form["top1"]))


def test_figures_of_pilots() -> None:
    runs = {run["config"]: run for run in record("pilots-cpu")["runs"]}
    shown = 0
    for name, *_, right, minutes in rows_of("recipes.md", "pilot")[1:]:
        if right:
            require(right, 100 * runs[name.strip("`")]["top1"])
            shown += 1
        if minutes[:1].isdigit():
            require(minutes.partition(",")[0], runs[name.strip("`")]["cpu_user_seconds"] / 60)
    assert shown == len(runs)


def test_figures_of_how_weights_start() -> None:
    for (name, cell), step in zip(rows_of("models.md", "start")[1:], record("starts-cpu")["steps"], strict=True):
        assert name.replace("`", "") == step["name"]
        found = [100 * run["top1"] for run in step["runs"]]
        assert len(found) == 3
        require(cell, statistics.fmean(found), statistics.stdev(found))


def test_figures_of_the_noise_scale() -> None:
    (_, *batches), (_, *steps), (_, *scales) = rows_of("batch.md", "global batch")
    found = record("noise-scale-cpu")
    for batch, count, scale, row in zip(batches, steps, scales, found["batches"], strict=True):
        require(batch, row["global_batch_size"])
        require(count, row["steps"]["median"])
        require(scale, found["noise_scale_by_batch"][str(row["global_batch_size"])])


def test_figures_of_precision_by_depth() -> None:
    rows = {(row["model"], row["precision"]): row for row in record("precision-cpu-depths")["rows"]}
    shown = rows_of("precision.md", "| fp32, images/s")[1:]
    assert len(shown) == 5
    for name, speed, *gains, memory in shown:
        found = [rows[name.lower().replace("-", ""), each] for each in ("fp32", "bf16_autocast", "bf16")]
        require(speed, found[0]["images_per_second"]["median"])
        for cell, row in zip(gains, found[1:], strict=True):
            require(cell, *(row["speedup"][key] for key in ("median", "min", "max")))
        require(memory, found[0]["peak_mb"], found[2]["peak_mb"])


def test_figures_of_largest_microbatches() -> None:
    found = {(row["model"], row["precision"]): row["largest"] for row in record("precision-cpu-largest")["rows"]}
    (_, *models), *rows = rows_of("precision.md", "largest microbatch")
    assert len(found) == len(rows) * len(models)
    for name, *cells in rows:
        for model, cell in zip(models, cells, strict=True):
            require(cell, found[model.lower().replace("-", ""), name])


def test_figures_of_healing() -> None:
    layouts = record("healing-trials")["layouts"]
    rows = rows_of("restarts.md", "killed ranks")[1:]
    assert len(rows) == len(layouts)
    for (_, *cells), name in zip(rows, ("4x1", "2x2"), strict=True):
        keys = ("n", "median_seconds", "percentile_95_seconds", "max_seconds", "steps_lost", "equal")
        for cell, key in zip(cells, keys, strict=True):
            require(cell, layouts[name][key])


def test_figures_of_the_cost_of_exact_sums() -> None:
    large, small = record("exact-sums-cpu-224")["models"], record("exact-sums-cpu")["models"]
    found = [large["resnet50"], *(small[name] for name in ("resnet50", "resnet18", "alexnet_bn"))]
    for each, (_, fp32, exact, cost) in zip(found, rows_of("reproducible.md", "model")[1:], strict=True):
        require(fp32, each["milliseconds"]["fp32"]["median"] / 1e3)
        require(exact, each["milliseconds"]["grid"]["median"] / 1e3)
        price = each["price_percent"]
        require(cost.replace("-", ""), *(abs(price[key]) for key in ("median", "min", "max")))


def test_figures_of_exact_sums() -> None:
    small = record("exact-sums-errors")["models"]
    columns = [small[name] for name in ("resnet18", "resnet50", "alexnet_bn")]
    columns.append(record("exact-sums-errors-64")["models"]["resnet18"])
    keys = ("fp32", "grid", "fp16 wire, loss scale 1024", "bf16 wire")
    for key, (_, _, *cells) in zip(keys, rows_of("reproducible.md", "| bytes")[1:], strict=True):
        assert cells == [f"{each['errors'][key]['l2']:.1e}".replace("e-0", "e-") for each in columns]


def test_figures_of_exact_sums_between_nodes() -> None:
    rows = record("comm-exact-resnet50-1gbit")["rows"]
    _, (_, *measured), (_, *best) = rows_of("reproducible.md", "r")
    for row, cell, limit in zip(rows, measured, best, strict=True):
        require(cell, *(row["ratio"][part] for part in ("median", "min", "max")))
        require(limit, row["ways"]["grid"]["limit_seconds"] / row["ways"]["fp32"]["limit_seconds"])


def test_figures_of_the_scaling_plot() -> None:
    points = [point for point in record("sweep-scaling-cpu")["points"] if point["ranks"] > 1]
    around = r"efficiency is (.*)% with 2 ranks, and (.*)% with 4,.* communication is (.*)% of a step"
    shown = re.search(around, (ROOT / "README.md").read_text())
    assert shown
    shares = [[point["efficiency"] for point in points if point["ranks"] == ranks] for ranks in (2, 4)]
    shares.append([point["losses"]["exposed communication"] for point in points])
    for text, values in zip(shown.groups(), shares, strict=True):
        require(text, 100 * min(values), 100 * max(values))


def test_figures_of_many_ranks() -> None:
    found = record("comm-meeting")["found"]
    for (_, cell), key in zip(
        rows_of("measured.md", "what")[1:], ("meeting_seconds", "roll_call_seconds"), strict=True
    ):
        require(cell, *(found[key][part] for part in ("median", "min", "max")))


def test_each_record_names_a_commit() -> None:
    named = {path.stem: list(commits(json.loads(path.read_text()))) for path in RESULTS.glob("*.json")}
    assert [name for name, found in named.items() if not found] == []
    unclean = {name for name, found in named.items() if not all(re.fullmatch("[0-9a-f]{12}", each) for each in found)}
    assert not unclean


def test_commits_of_records_are_in_the_history() -> None:
    """Measure at a commit that is on the main branch already: one that is rebased later leaves the history."""
    log = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False)
    history = {line[:12] for line in log.stdout.split()}
    if "78985a8faaf9" not in history:
        pytest.skip("this copy of the sources has no history, or a part of it")
    found = {path.stem: set(commits(json.loads(path.read_text()))) for path in RESULTS.glob("*.json")}
    assert [name for name, named in found.items() if not named <= history] == []


def test_age_of_a_figure_is_the_share_of_its_code_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_age, "ROOT", tmp_path)
    for name, lines in (("one.py", 6), ("two.py", 4)):
        (tmp_path / name).write_text("".join(f"{name} = {line}\n" for line in range(lines)))
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for step in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "first")):
        figures_age.git(*step)
    first = figures_age.git("rev-parse", "HEAD").strip()
    assert figures_age.new_share(first, ["one.py", "two.py"]) == 0.0
    (tmp_path / "two.py").write_text("two = 0\n" * 5)
    assert figures_age.new_share(first, ["one.py", "two.py"]) == 5 / 11


def test_command_that_measures_again_is_found() -> None:
    own = figures_age.command_of("quickstart-2cores", record("quickstart-2cores"))
    assert own == record("quickstart-2cores")["command"]
    for name, module in (("recompute-cpu", "gpu.recompute"), ("comm-scaling-resnet50-1gbit-2", "comm.run")):
        command = str(figures_age.command_of(name, {}))
        assert f"benchmarks.{module} " in command
        assert "benchmarks/__init__.py" in figures_age.code_of(command)


@pytest.mark.parametrize(("head", "named"), [("left out", "left out"), ("in sample", "cold"), ("in sample", "warm")])
def test_figures_of_simulated_steps(head: str, named: str) -> None:
    found = record("simulate-published")["summaries"][named]
    groups = {"all across nodes": "across nodes", "NCCL": "nccl", "MPI in host memory": "host"}
    groups |= {"parameter servers": "servers", "NCCL over sockets": "sockets"}
    rows = [row for row in rows_of("simulate-errors.md", head)[1:] if head == named or row[0].startswith(f"{named}: ")]
    assert len(rows) == (9 if head == named else 3)
    for name, count, *cells in rows:
        name = name.removeprefix(f"{named}: ")
        key = groups.get(name, name)
        each = found["carriers"].get(key) or found[key]
        require(count, each["rows"])
        for cell, column in zip(cells, ("ours", "linear", "line", "held", "width"), strict=True):
            require(cell, *([] if each[column] is None else [100 * each[column]]))
    if head == named:
        for name, count, *cells in rows_of("simulate-errors.md", "system, left out")[1:]:
            each = found["families"][name]
            require(count, each["rows"])
            for cell, column in zip(cells, ("ours", "linear", "line", "held", "width"), strict=True):
                require(cell, 100 * each[column])


def test_intervals_have_the_widths_of_the_record_and_hold_for_new_families_over_each_carrier() -> None:
    found = record("simulate-published")
    below, above = UNCHECKED_REACH
    names = {"ladder": "same_system", "stranger": "other_system"}  # of an earlier release
    widths = {names.get(key, key): width for key, width in found["widths"].items()}
    assert widths == pytest.approx({**FACTORS, "below": below, "above": above}, abs=0.005)
    summary = found["summaries"]["left out"]
    assert 0.85 <= summary["held by the band"] <= 0.95
    for name, carrier in summary["carriers"].items():
        assert 0.85 <= round(carrier["held"], 2) <= 0.955, name
    assert f"contain {round(100 * summary['held by the band'])}% of all rows" in (ROOT / "docs/simulate.md").read_text()


def test_figures_of_systems_predicted_before_their_figures_were_read() -> None:
    found, second = record("simulate-unseen-outcomes"), record("simulate-unseen-second-rows")
    lines = rows_of("simulate-errors.md", "not seen before")[1:]
    assert [name for name, *_ in lines] == ["all", *found["systems"]]
    for name, *cells in lines:
        halves = (found, cells[:4]), (second, cells[4:])
        for outcomes, (count, *shares) in halves:
            each = outcomes["summaries"]["all"] if name == "all" else outcomes["systems"].get(name)
            require(count, *([each["rows"]] if each else []))
            for cell, column in zip(shares, ("ours", "linear", "held"), strict=True):
                require(cell, *([100 * each[column]] if each else []))
    total, held = found["summaries"]["all"]["rows"], round(100 * found["summaries"]["all"]["held"])
    for page, words in (
        ("simulate-errors.md", f"**Only {held}% of the rows are inside their 90% intervals**"),
        ("simulate.md", f"only {held}% of {total} rows of eight other systems"),
    ):
        assert words in (ROOT / "docs" / page).read_text()


def test_outcomes_are_those_of_the_predictions_that_were_committed_first() -> None:
    promised, found = record("simulate-unseen"), record("simulate-unseen-outcomes")
    assert found["promised"] == {key: promised[key] for key in ("sha256", "commit")}
    lines = [",".join((name, *values)) for name, values in promised["predictions"].items()]
    text = "\n".join(("id,ms_per_step,low,high,extrapolated,scaled_from", *lines, ""))
    assert hashlib.sha256(text.encode()).hexdigest() == promised["sha256"]
    assert found["rows"].keys() == promised["predictions"].keys()
    asked, answered = (read_table(f"simulate-unseen-{name}") for name in ("questions", "answers"))
    others = dict.fromkeys(("role", "ms_per_step", "images_per_second"))
    assert [row | others for row in answered] == [row | others for row in asked]
    assert {row["id"]: float(row["ms_per_step"]) for row in answered} == {
        name: row["measured"] for name, row in found["rows"].items()
    }
    for name, row in found["rows"].items():
        assert [row[key] for key in ("predicted", "low", "high")] == list(map(float, promised["predictions"][name][:3]))
    held = [row["low"] <= row["measured"] <= row["high"] for row in found["rows"].values()]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in found["rows"].values()]
    assert found["summaries"]["all"]["held"] == pytest.approx(statistics.fmean(held), abs=1e-3)
    assert found["summaries"]["all"]["ours"] == pytest.approx(statistics.median(errors), abs=1e-4)


def test_figures_of_input_from_a_slow_storage() -> None:
    found = record("input-slow-reads")["images"]
    assert list(found) == ["4 kB", "107 kB"]
    text = (ROOT / "docs/measured.md").read_text()
    cell = re.search(r"\| reading with 3 ms per file [^|]*\|([^|]*) of 36 bare threads", text)
    cases = [each["batches of 256"] for each in found.values()]
    values = [case[name]["median"] for name in ("images_per_second", "share_of_bare") for case in cases]
    assert cell
    require(cell[1], *values)


def test_figures_of_input_from_an_object_store() -> None:
    waits = record("input-s3-latency")["input_wait_fraction"]
    measured, data = ((ROOT / "docs" / page).read_text() for page in ("measured.md", "data.md"))
    cell = re.search(r"answers after 20 ms, with `data.cache_dir` \|(.*) \| 3 \|", measured)
    assert cell
    require(cell[1], *(100 * waits[place][key] for place in ("s3", "disk") for key in ("median", "min", "max")))
    sentence = re.search(r"waits for input ([\d.]+% of its time, and [\d.]+%)", data)
    assert sentence
    require(sentence[1], 100 * waits["s3"]["median"], 100 * waits["disk"]["median"])


def test_figures_of_effective_time() -> None:
    found = record("healing-time")["ways"]["healing"]
    (_, share, cost, lost) = rows_of("restarts.md", "way")[1]
    require(share, 100 * found["effective_share"])
    spread = found["cost_seconds"]
    require(cost, *(spread[key] for key in ("median", "min", "max", "n")))
    require(lost, found["steps_lost"]["max"])
    readme = (ROOT / "README.md").read_text()
    costs = f"a kill costs {cost.partition(' ')[0]} s, a step takes {found['step_seconds']:.1f} s"
    assert f"| {share}, no step lost (one run, {found['failures']} kills; {costs})" in readme


def test_figures_of_a_step_by_kernels() -> None:
    columns = ("norm, ReLU and add", "convolutions and products", "max-pool", "optimizer", "other")
    cases = record("gpu-nvidia-h200-kernels")["cases"]
    for name, *cells in rows_of("gpu.md", "step")[1:]:
        found = cases[name.replace("script (AMP)", "script, AMP (fp16)")]
        values = [found["images_per_second"], found["step_ms"], *(found["kernel_ms"][each] for each in columns)]
        for cell, value in zip(cells, values, strict=True):
            require(cell, value)


def test_figures_of_trainings() -> None:
    text = (ROOT / "README.md").read_text()
    rows = rows_of("measured.md", "run")[1:]
    for (_, _, right, seconds, rate, exposed), name in zip(rows, ("quickstart", "imagenette"), strict=True):
        found = record(f"{name}-2cores")
        spread = found["spread"]
        for cell, key, unit in ((right, "top1", 100), (seconds, "seconds", 1)):
            require(cell, *(unit * spread[key][each] for each in ("median", "min", "max")))
        require(rate, spread["images_per_second"]["median"])
        require(exposed, 100 * spread["exposed_communication_fraction"]["median"])
        median_right, median_seconds = right.partition(" ")[0], seconds.partition(" (")[0]
        assert f"{median_right} top-1 after {median_seconds} (n = {len(found['summaries'])} seeds)" in text


def test_last_lines_of_the_quick_start_are_those_of_its_record() -> None:
    block = (ROOT / "README.md").read_text().partition("`make train` ends with:\n\n")[2].partition("\n\n")[0]
    summary = record("quickstart-2cores")["summaries"][0]
    assert textwrap.dedent(block).splitlines() == closing_lines(summary, Path("runs/quickstart"), num_classes=10)


def test_figures_of_scaling() -> None:
    rows = {
        row["contestant"]: row for row in record("comm-scaling-resnet50-1gbit-2")["rows"] if row["scaling"] == "weak"
    }
    names = {"bigbatch": "ours", "DDP (gloo)": "ddp"}
    shown = rows_of("measured.md", "one node to two")[1:]
    assert [name for name, *_ in shown] == list(names)
    for name, seconds, efficiency, limit in shown:
        found = rows[names[name]]
        require(seconds, found["seconds"]["median"])
        require(efficiency, *(100 * found["efficiency"][part] for part in ("median", "min", "max")))
        require(limit, 100 * found["limit_efficiency"])


def at(found: Any, path: str) -> float:
    """The figure of a record at a path of names and positions; 1/PATH: its inverse."""
    if path.startswith("1/"):
        return 1 / at(found, path.removeprefix("1/"))
    for name in path.split("|"):
        found = found[int(name) if isinstance(found, list) else name]
    return float(found)


H100, DECODE, DEPTHS = "gpu-nvidia-h100-80gb-hbm3", "input-decode-1core", "precision-cpu-depths"
PER_CORE = "images_per_second_per_core|{}|median"
OVER = "ratios|our_dali / torchvision|median"
ON_H100 = "cases|training/{}|figures|{}|median"
REPEATED = (  # page, what stands around a figure, its record, and the path in it
    ("README.md", r"per second and core \| (\d+) \(", DECODE, PER_CORE.format("our_dali")),
    ("README.md", r"torchvision's recipe (\d+) ", DECODE, PER_CORE.format("torchvision")),
    ("README.md", r"trained ([\d,]+) images/s", H100, ON_H100.format("generated", "fp16")),
    ("README.md", r"torchvision's script ([\d,]+)\)", H100, ON_H100.format("generated", "torchvision's script")),
    ("README.md", r"and ([\d,]+) from JPEG", H100, ON_H100.format("pictures", "fp16")),
    ("README.md", r"; the script ([\d,]+)\)", H100, ON_H100.format("pictures", "torchvision's script")),
    ("docs/measured.md", r"dali` decodes (\d+) images/s", DECODE, PER_CORE.format("our_dali")),
    ("docs/measured.md", r"That is ([\d.]+) times", DECODE, OVER),
    (
        "docs/measured.md",
        r"two ranks \| ([\d.]+)% of the step",
        "input-feed-quickstart",
        "real|input_wait_fraction|median",
    ),
    ("docs/measured.md", r"files of 5.5 kB \| ([\d.]+) \(", "input-storage", "ratios|cold|median"),
    ("docs/measured.md", r"draws \| (\d+) us", "input-python-cost", "microseconds_per_picture|reader, folders|median"),
    ("docs/measured.md", r"\(6 us\); (\d+) us", "input-python-cost", "microseconds_per_picture|loader, folders|median"),
    ("docs/sources.md", r"([\d.]+) times torchvision's recipe", DECODE, OVER),
    ("docs/sources.md", r"steps wait ([\d.]+)%", "input-feed-quickstart", "real|input_wait_fraction|median"),
    ("docs/sources.md", r"bf16 ([\d.]+) \(ResNet-18\)", DEPTHS, "resnet18|median"),
    ("docs/sources.md", r" to ([\d.]+) \(ResNet-101\)", DEPTHS, "resnet101|median"),
    ("docs/doctor.md", r"([\d.]+) to [\d.]+ of fp32", DEPTHS, "resnet18|median"),
    ("docs/doctor.md", r"[\d.]+ to ([\d.]+) of fp32", DEPTHS, "resnet101|median"),
    ("docs/doctor.md", r"of the bytes in ([\d.]+) times", "recompute-cpu", "curve|-1|relative_time|median"),
    ("docs/compare.md", r"([\d.]+) times the images per core", DECODE, OVER),
    (
        "docs/data.md",
        r"([\d.]+) times as many images",
        "input-stored-cpu-time",
        "1/ratios|our_dali / our_dali_at_256|median",
    ),
    ("docs/gpu.md", r"it is ([\d.]+) times as fast", H100, ON_H100.format("pictures", "bf16 / torchvision's script")),
)


@pytest.mark.parametrize(("page", "around", "name", "path"), REPEATED)
def test_figures_that_pages_repeat_are_those_of_their_record(page: str, around: str, name: str, path: str) -> None:
    shown = re.findall(around, (ROOT / page).read_text())
    assert len(shown) == 1, shown
    found = record(name)
    if name == DEPTHS:  # by model, in bf16
        found = {row["model"]: row["speedup"] for row in found["rows"] if row["precision"] == "bf16"}
    require(shown[0], at(found, path) * (100 if "fraction" in path else 1))
