"""The commands of the pages work, here or in a named test, and the files that they link to exist."""

import json
import re
import shlex
import subprocess
import sys
import tarfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from benchmark_process import fork_benchmark, fork_code
from faults.table import format_campaign, read_records
from sample_images import encoded, smooth_image, write
from torch import nn

from bigbatch.cli import COMMANDS as TOP_COMMANDS
from bigbatch.cli import main
from bigbatch.experiments.batch.recommend import short_run
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.experiments.engine.points import make_points
from bigbatch.experiments.search.options import parse_search
from bigbatch.groups import GROUPS, load_command
from bigbatch.launch.start import make_parser as launch_parser
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import dump_config, load_config, packaged_configs
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.listed import keep_list
from bigbatch.trainer.models import build_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

RUN_BY = {  # command that is not run here: the test that runs it, or .ci/run and the tier that does
    "make train": ".ci/run::train",
    "make test": ".ci/run::test",
    "make cluster": ".ci/run::cluster-links",
    "make .venv/ready": ".ci/run::environment",
    "tests/container/run": ".ci/run::container",
    ".ci/package": ".ci/run::package",
    "docker build -t bigbatch .": ".ci/run::container",
    "docker build -t bigbatch --build-arg BASE_IMAGE=python:3.12-slim-bookworm .": ".ci/run::container-3.12",
    "BIGBATCH_EXPECT_GPU=1 .venv/bin/python -m pytest -m gpu": ".ci/run::gpu",
    "BIGBATCH_OPENREG=FOLDER .venv/bin/python -m pytest tests/openreg": ".ci/run::openreg",
    ".venv/bin/python tests/support/lowered_gpu.py ghosts=4 layer1.1": (
        "test_regions_for_a_gpu_have_at_most_these_launches_and_bytes"
    ),
    "pip install -e '.[verify]'": "test_extras_leave_out_what_a_platform_lacks",
    "pip install -e '.[storage]'": "test_extras_leave_out_what_a_platform_lacks",
    "pip install -e '.[wandb]'": "test_extras_leave_out_what_a_platform_lacks",
    "python examples/language_model.py": "test_example_learns",
    "python examples/language_model.py --cell gru --text examples/text/frankenstein.txt --generate 100": (
        "test_example_learns_with_other_cells"
    ),
    "mpirun -n 2 python examples/language_model.py --precision bf16": "test_example_on_two_ranks_is_the_same",
    "torchrun --nproc-per-node 2 train.py": "test_both_sides_of_ddps_page_print_the_same_losses",
    "torchrun --nproc-per-node 2 examples/language_model.py --epochs 2": "test_example_on_two_ranks_is_the_same",
}
BENCHMARK = ".venv/bin/python -m benchmarks."
BENCHMARKS_RUN_BY = {  # by the first of these that follows BENCHMARK, the test that runs it, at a smaller size
    "make faults FAULTS=": "test_killed_rank_is_named_and_the_run_goes_on_with_the_same_bits",
    "input.feed ": "test_feed",
    "comm.messages ": "test_messages_table_of_a_recipe",
    "faults.effective ": "test_effective_time_of_a_job_that_is_struck",
    "faults.healing ": "test_trial_of_healing",
    "gpu.precision ": "test_precision_all_of_it_at_a_tiny_size",
    "twin.predict ": "test_table_is_predicted_without_its_own_measurements",
    "twin.published ": "test_benchmark_prints_both_tables_and_draws",
    "twin.nccl_tests": "test_benchmark_prints_each_size_of_each_table",
    "twin.speed ": "test_work_of_a_simulation_does_not_grow_with_the_number_of_gpus",
    "twin.emulated ": "test_four_numbers_are_found_again_and_predict_four_nodes",
    "gpu.day --small ": "test_parts_all_run_small_and_a_second_call_skips_them",
}
BIGBATCH_RUN_BY = {  # here bigbatch's own are parsed and checked; the test that really runs such a one
    "init": "test_init_to_a_prediction",
    "train": "test_any_division_gives_the_same_update",
    "evaluate": "test_every_image_counts_once",
    "predict": "test_predict_it_scores_what_evaluate_counts",
    "export": "test_export_says_what_serving_needs_to_know",
    "verify": "test_verify_several_seeds_are_tested_together",
    "diff": "test_diff_finds_the_step_after_a_bit_flipped",
    "replay": "test_replay_names_rank_microbatch_and_tensor_of_a_flipped_bit",
    "doctor": "test_whole_examination",
    "sweep": "test_sweep_point_out_of_memory_fails_alone",
    "report": "test_report_of_a_run",
    "simulate": "test_command_answers_and_writes_what_is_asked_for",
    "tune range": "test_range_of_two_ranks_finds_where_the_loss_explodes",
    "tune search": "test_tune_search_of_real_runs_and_a_kill",
    "tune batch": "test_tune_batch_trains_a_short_run_that_measures",
    "tune precision": "test_tune_precision_predicts_what_training_so_reports",
    "comm bench": "test_bench_finds_every_algorithm_of_every_backend_right",
    "comm tune": "test_tune_and_use_what_it_found",
    "explain": "test_rank_that_has_not_begun_is_named_with_the_collective",
    "config show": "test_bigbatch_commands",
    "config diff": "test_bigbatch_commands",
    "config list": "test_bigbatch_commands",
    "data generate": ".ci/run::train",
    "data prepare": "test_prepare_the_command_for_every_data_set",
    "data check": "test_check_the_command_names_the_first_and_writes_all",
    "data pack": "test_pack_the_command",
    "data stage": "test_packed_and_staged_copies_are_the_same_data",
    "launch local": "test_local_starts_a_rank_per_gpu",
    "launch mpirun": ".ci/run::train",
    "examples/language_model.py": "test_own_script_runs_on_every_rank_with_its_arguments",
    "examples/reproducible_sums.py": "test_python_blocks_run",
    "launch flux": "test_ranks_under_flux_know_their_places",
    "launch torchrun": "test_ctrl_c_saves_a_checkpoint_and_changes_no_bit",
    "launch slurm": "test_job_at_its_time_limit_is_requeued_and_ends_with_the_same_bits",
    "launch k8s": "test_k8s_jobs_have_names_of_their_own",
    "launch emulate": "test_bigbatch_command_runs_on_every_rank",
    "launch preflight": "test_node_at_half_speed_is_named_and_equal_ones_are_not",
    "launch status": "test_slurm_status_says_what_a_user_asks_first",
    "launch cancel": "test_slurm_cancel_asks_a_job_to_save_and_stop_or_ends_it",
}
NOT_HERE = (  # need an engine or a base that a test machine has not, or are CI itself
    ".ci/run",
    "nvidia-smi",
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex@6424da3b4faa6c8f062da4a48c424fff3f02d42d",
    "pip install torch torchvision --index-url https://download.pytorch.org/whl/cu126",
    "pip install -e '.[dali-cuda12]'",
    "BIGBATCH_WEEKLY=1 .ci/run",
    "docker build -t bigbatch --build-arg BASE_IMAGE=nvcr.io/nvidia/pytorch:26.10-py3 --build-arg MPI=system .",
    'docker build -t bigbatch --build-arg REVISION="$(git rev-parse --short=12 HEAD)" .',
    "docker build -t bigbatch-test --target test .",
    "docker run --rm --gpus all --shm-size 1g bigbatch-test",
    "docker run --rm bigbatch cat /opt/bigbatch/sbom.cdx.json >sbom.cdx.json",
    "enroot import -o bigbatch.sqsh dockerd://bigbatch",
    'srun --container-image=bigbatch.sqsh --container-mounts="$PWD:$PWD,/data:/data" --container-workdir="$PWD" bigbatch train --config quickstart',  # noqa: E501
    "apptainer build bigbatch.sif docker-daemon://bigbatch:latest",
    "srun apptainer exec --nv --bind /data bigbatch.sif bigbatch train --config quickstart",
)
ACTIVATE = "source .venv/bin/activate"
DRY_RUN = (
    "make check",
    "make proofs AGAINST=HEAD",
    "make docs",
    "make format",
    "make lock",
    "make clean",
    "make gpu-prototypes",
)
DECODE = "input.decode data/shapes --image-size 32 --batch 2 --batches 1 --repetitions 1 --contestants our_pillow"
STEP = "largebatch.lars_step --models resnet18 --repeats 1 --threads 1 --bandwidth-mb 1 --out out.json"
INFERENCE = "gpu.inference --device cpu --model resnet18 --image-size 32 --batches 1 --rounds 1 --half bf16 --only eager-fp32 folded half --out out.json"  # noqa: E501
GPU = "gpu.day --minutes 14 --guard --data d --cifar c --vision v --airbench a --list --out ."
RECOMPUTE = (
    "gpu.recompute --model resnet18 --precision fp32 --image-size 32 --batch 2 --blocks 4 8 --repetitions 1 "
    "--out out.json --plot out.png"
)
AUDITS = "faults.audits --ranks 1 --audits 2 --replays 1 --out out.json"
SMALLER = {  # what follows BENCHMARK: the same with sizes for a test
    "gpu.day --minutes 14": GPU,
    "gpu.day --minutes 14 --data data/imagenet --cifar data/cifar10 --vision vision/references/classification --airbench cifar10-airbench": GPU,  # noqa: E501
    "gpu.day --dry-run": "gpu.day --dry-run --only lars --out . --logs logs",
    "gpu.day --guard": GPU,
    "gpu.day --only prototypes": "gpu.day --only prototypes --list --out .",
    "comm.run --out benchmarks/results": "comm.run --list --out .",
    "comm.run --only scaling-resnet50-1gbit-2 --out benchmarks/results": (
        "comm.run --only scaling-resnet50-1gbit-2 --list --out ."
    ),
    "input.decode data/imagenet --split val --out benchmarks/results/input-decode-1core.json": DECODE,
    "input.decode data/imagenet --batch 32 --prefetch 1 --batches 4 --repetitions 12 --cpu-time --contestants our_dali our_dali_at_256 our_pillow limit_yuv_at_256 --out benchmarks/results/input-stored-cpu-time.json": (  # noqa: E501
        f"{DECODE} limit_yuv_at_256 --cpu-time"
    ),
    "input.slow_reads --out benchmarks/results/input-slow-reads.json": (
        "input.slow_reads --seconds 0.1 --sides 8 --batches 4 --repetitions 1 --out out.json"
    ),
    "gpu.recompute --out benchmarks/results/recompute-gpu.json --plot recompute.png": RECOMPUTE,
    "gpu.recompute --precision fp32 --image-size 64 --batch 8 --repetitions 5 --out benchmarks/results/recompute-cpu.json --plot docs/recompute.png": RECOMPUTE,  # noqa: E501
    "largebatch.lars_step --device cuda --out benchmarks/results/lars-step-cuda.json": STEP,
    "gpu.inference --out benchmarks/results/inference-cuda.json": INFERENCE,
    "gpu.inference --threads 1 --rounds 7 --batches 1 8 32 --out benchmarks/results/inference-cpu.json": INFERENCE,
    "largebatch.busy_cpu --turns 11 --out benchmarks/results/busy-cpu.json": (
        "largebatch.busy_cpu --turns 1 --seconds 0.1 --others 1 --batch 2 --out out.json"
    ),
    "largebatch.lars_step --out benchmarks/results/lars-step-cpu.json": STEP,
    "faults.audits --audits 10000 --replays 100 --out benchmarks/results/audits-cpu.json": AUDITS,
}


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of those languages."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(fence, (ROOT / page).read_text(), re.M | re.S)


COMMANDS = sorted(
    {
        line
        for page in PAGES
        for block in blocks(page, "console", "sh")
        for line in block.splitlines()
        if line and not line.startswith("#")
    }
)


def write_shapes(text: str, *, below: Path) -> None:
    """The embedded data set, small, where text wants it."""
    if "data/shapes" in text:
        write_dataset(below / "data/shapes", train_per_class=10, val_per_class=1)


def write_quickstart(text: str, *, below: Path) -> None:
    """The quick start's run folder, with the random weights of its first step, where text wants it."""
    if "runs/quickstart" in text or "quickstart.onnx" in text:
        config = load_config(["--config", "quickstart"])
        options = {name: config.model.options[name] for name in ("width", "pool_first")}
        model = build_model("resnet9", num_classes=config.data.num_classes, norm=nn.BatchNorm2d, **options)
        state = {"step": 0, "config": dump_config(config), "model": model.state_dict()}
        save_checkpoint(below / config.run.directory / "checkpoints", state, step=0, top1=None, keep=1)
        (below / config.run.directory / "config.yaml").write_text(dump_config(config))
        if "quickstart.onnx" in text:
            folder = str(below / config.run.directory)
            assert main(["export", folder, str(below / "quickstart.onnx"), "--with-preprocessing"]) == 0


class Parsed(BaseException):
    """Ends a command once it has parsed its words, with what came of them."""


def parse(words: list[str]) -> tuple[Any, list[str]]:
    """Let a command parse its words and end; return its options, and the words that it leaves to the config."""
    group = GROUPS.get(words[0])
    name, rest = (group.commands[words[1]][0], words[2:]) if group else (TOP_COMMANDS[words[0]][0], words[1:])
    command = load_command(name)
    with pytest.MonkeyPatch.context() as patch:

        def end_after(place: Any, name: str) -> None:
            call = getattr(place, name)

            def run(*args: Any, **options: Any) -> None:
                patch.undo()
                raise Parsed(call(*args, **options))

            patch.setattr(place, name, run)

        if hasattr(command, "read_trained"):  # which reads the run's config, too
            end_after(command, "read_trained")
        else:
            end_after(ArgumentParser, "parse_args")
            end_after(ArgumentParser, "parse_known_args")
        with pytest.raises(Parsed) as ended:
            command.main(rest)
    found = ended.value.args[0]
    return found[:2] if isinstance(found, tuple) else (found, [])


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the packaged experiments would leave, as far as command lines need it, below one folder."""
    folder = tmp_path_factory.mktemp("trained")
    for name in packaged_configs():
        config = load_config(["--config", name])
        (folder / config.run.directory / "checkpoints/step-00000001").mkdir(parents=True)
        (folder / config.run.directory / "config.yaml").write_text(dump_config(config))
    return folder


OWN = {"flowers": ("rose", "tulip", "iris"), "birds": ("heron", "stork")}
"""Own images that the pages speak of: folder below data -> classes."""


@pytest.fixture(scope="module")
def own_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/flowers in class folders, its recipe and its run, and data/birds with a table."""
    folder = tmp_path_factory.mktemp("own")
    for name, classes in OWN.items():
        files = [f"{each}/{number}.jpg" for each in classes for number in range(4)]
        images = {path: encoded(smooth_image(seed, 70, 70)) for seed, path in enumerate(files)}
        write(folder / "data" / name, images)
    (folder / "data/shards").mkdir()
    for split in ("train", "val"):
        with tarfile.open(folder / f"data/shards/{split}-0.tar", "w") as tar:
            for number, path in enumerate(sorted((folder / "data/flowers").rglob("*.jpg"))):
                tar.add(path, f"{number}.jpg")
                (folder / "label").write_text(path.parent.name)
                tar.add(folder / "label", f"{number}.cls")
    rows = (f"{path.stem},{path.parent.name}/{path.name},{path.parent.name}" for path in folder.glob("data/birds/*/*"))
    (folder / "data/birds/labels.csv").write_text("\n".join(("number,image,species", *rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["init", "data/flowers", "--workers", "1"]) == 0
        config = load_config(["--config", "flowers.yaml"])
        Path(config.run.directory).mkdir(parents=True)
        keep_list(config.data, Path(config.run.directory), is_resumed=False)
    (folder / config.run.directory / "checkpoints/step-00000001").mkdir(parents=True)
    (folder / config.run.directory / "config.yaml").write_text(dump_config(config))
    return folder


RANK = r"(srun (?:--cpus-per-task=8 )?|docker run .*? bigbatch )"
"""Start of a line whose command is one rank of a job."""
BIGBATCH = [line for line in COMMANDS if re.search(rf"^{RANK}?bigbatch ", line)]


RECIPES = [text for page in PAGES for text in blocks(page, "yaml") if text.startswith("base:")]
# a cluster of simulate states its device
SWEEPS = [text for page in PAGES for text in blocks(page, "yaml") if not text.startswith(("base:", "device:"))]


def test_fences_have_a_known_language() -> None:
    for page in PAGES:
        opening = re.findall(r"^```(\w*)$", (ROOT / page).read_text(), re.M)[::2]
        assert set(opening) <= {"console", "sh", "bash", "python", "yaml", "toml", "diff"}, page


@pytest.mark.parametrize("script", [script for page in PAGES for script in blocks(page, "bash")])
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize("text", RECIPES)
def test_recipes_are_experiments(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    config = load_config(["--config", str(tmp_path / "mine.yaml")])
    assert config.run.directory == "runs/mine"


@pytest.mark.long
@pytest.mark.parametrize("text", SWEEPS)
def test_sweeps_make_points(text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    assert make_points(read_plan(tmp_path / "sweep.yaml"), folder=tmp_path)


GROUPED = ("launch", "data", "comm", "config", "tune")
"""Commands whose second word names one, too."""


def words_of(line: str) -> list[str]:
    """The words after bigbatch, with any launcher before it."""
    return shlex.split(re.sub(rf"^{RANK}(?=bigbatch )", "", line))[1:]


def names_of(line: str) -> set[str]:
    """Under which names of the tables a command is known; a launched command under its own, too."""
    if line in BIGBATCH:
        words = words_of(line)
        parts = [words]
        if words[0] == "launch" and "--" in words and words[2] != "exec":
            parts.append(words[words.index("--") + 1 :])
        return {" ".join(part[: 2 if part[0] in GROUPED else 1]) for part in parts}
    return {line} & {*RUN_BY} or {name for name in BENCHMARKS_RUN_BY if line.removeprefix(BENCHMARK).startswith(name)}


def test_commands_are_each_run_by_someone() -> None:
    names = {line: names_of(line) for line in COMMANDS}
    assert {line for line in COMMANDS if not names[line]} == {*NOT_HERE, *DRY_RUN, ACTIVATE} | {
        f"{BENCHMARK}{name}" for name in SMALLER
    }
    assert set().union(*names.values()) == {*RUN_BY, *BENCHMARKS_RUN_BY, *BIGBATCH_RUN_BY}


def names_of_tests() -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", "".join(p.read_text() for p in ROOT.glob("tests/**/test_*.py")), re.M))


def test_commands_name_tests_that_exist() -> None:
    named = {*RUN_BY.values(), *BENCHMARKS_RUN_BY.values(), *BIGBATCH_RUN_BY.values()}
    tiers = {name for name in named if name.startswith(".ci/run::")}
    text = (ROOT / ".ci/run").read_text()
    assert [name for name in tiers if not re.search(rf"^ *tier {name.partition('::')[2]} ", text, re.M)] == []
    assert named - tiers <= names_of_tests()


def test_threat_model_names_tests_that_exist() -> None:
    """Each of its sentences is one, at least."""
    table = (ROOT / "docs/admin.md").read_text().partition("| who | what they reach |")[2].partition("\n\n")[0]
    assert table
    tests = names_of_tests()
    for line in table.splitlines()[2:]:
        names = re.findall(r"`(test_\w+)`", line.rsplit("|", 2)[1])
        assert names, line
        assert set(names) <= tests


def test_environment_is_entered() -> None:
    """The command of the pages enters the environment of these tests."""
    line = ACTIVATE.replace(".venv", shlex.quote(sys.prefix))
    script = f"{line} && python -c 'import sys; print(sys.prefix)'"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() == Path(sys.prefix).resolve()


@pytest.mark.parametrize("command", DRY_RUN)
def test_make_targets_exist(command: str) -> None:
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(set(SMALLER.values())))
def test_benchmarks_run(command: str, tmp_path: Path) -> None:
    write_shapes(command, below=tmp_path)
    code, output = fork_benchmark(*command.split(), cwd=tmp_path, timeout_seconds=280)
    assert code == 0, output


@pytest.mark.long
def test_benchmarks_that_fail_are_seen(tmp_path: Path) -> None:
    code, output = fork_benchmark("comm.run", "--only", "moon", cwd=tmp_path, timeout_seconds=280)
    assert code == 2
    assert "no case has such a name" in output
    code, output = fork_benchmark("nonesuch", cwd=tmp_path, timeout_seconds=280)
    assert code == 1
    assert "No module named benchmarks.nonesuch" in output


@pytest.mark.parametrize("line", BIGBATCH)
def test_bigbatch_commands(
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Launches are dry, trainings are parsed and checked for that number of ranks, measurements are parsed."""
    words = words_of(line)
    num_ranks = 1
    is_own = any(name in line for name in (*OWN, "data/shards"))
    if is_own:
        monkeypatch.chdir(request.getfixturevalue("own_images"))
        capsys.readouterr()  # what was said as they were made
        if words[0] in ("init", "data"):
            assert main([*words, *(["--force"] if words[0] == "init" else []), "--workers", "1"]) == 0
            return
    if words[:2] == ["launch", "emulate"]:
        if "--nodes" in words:
            assert main([*words[:3], "--dry-run", *words[3:]]) == 0
        num_ranks = 4
        if "--" not in words or words[2] == "exec":
            return
        words = words[words.index("--") + 1 :]
    elif words[:2] in (["launch", "status"], ["launch", "cancel"]):
        assert launch_parser(words[1]).parse_args(words[1:]).jobs
        return
    elif words[:2] == ["launch", "preflight"]:
        assert main([*words[:2], "--dry-run", *words[2:]]) == 0
        if "--" not in words:
            return
        words = words[words.index("--") + 1 :]
    elif words[:2] in (["launch", "slurm"], ["launch", "k8s"]):
        split = words.index("--")
        assert main([*words[:split], "--dry-run", *words[split:]]) == 0
        asked = launch_parser(words[1]).parse_args(words[1:split])
        num_ranks = (asked.nodes or 1) * (asked.ranks_per_node or 1)
        words = [word.replace("{index}", "0") for word in words[split + 1 :]]
    elif words[0] == "launch":
        split = words.index("--")
        assert main([*words[:split], "--dry-run", *words[split:]]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line != "wait" and line[0] != "#"]
        launched = shlex.split(shown[-1].removesuffix(" &"))
        num_ranks = int(launched[launched.index("-n") + 1]) if "-n" in launched else len(shown)
        words = words[split + 1 :]
        assert launched[-len(words) :] == words
    if words[0].endswith(".py"):
        assert (ROOT / words[0]).is_file()
        return
    if words[0] == "simulate":
        monkeypatch.chdir(tmp_path)
        assert main(words) == 0
        return
    if words[:2] == ["tune", "search"]:
        parse_search(words[2:]).check()
    elif words[:2] == ["tune", "precision"]:
        assert main([*words, "--dry-run"]) == 0
    elif words[0] == "sweep":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "configs").symlink_to(ROOT / "configs")
        assert main([*words, *(["--dry-run"] if "--dry-run" not in words else [])]) == 0
    elif "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
    elif words[0] == "train":
        if "--schedule.range_test" in words:
            monkeypatch.chdir(tmp_path)
            text = json.dumps({"suggested_lr": 1.0, "config": dump_config(load_config(words[1:3]))})
            folder = Path(words[words.index("--schedule.range_test") + 1])
            folder.mkdir(parents=True)
            (folder / "range.json").write_text(text)
        assert accumulation_steps(load_config(words[1:]).batch, world_size=num_ranks) >= 1
    elif words[0] == "config" or words[0] == "explain":
        assert main(words) == 0
    else:
        if not is_own:
            monkeypatch.chdir(request.getfixturevalue("run_folders"))  # only read
        arguments, overrides = parse(words)
        if words[:2] == ["tune", "batch"] and arguments.out:
            short_run(arguments, overrides)
        elif words[0] in ("comm", "tune", "doctor") and getattr(arguments, "config", None):
            config = load_config(["--config", arguments.config, *overrides])
            world_size = getattr(arguments, "ranks", num_ranks)
            assert words[0] == "comm" or accumulation_steps(config.batch, world_size=world_size) >= 1


def test_page_of_faults_shows_the_recorded_campaign() -> None:
    conditions, records = read_records(ROOT / "benchmarks/results/faults.jsonl")
    assert (
        (ROOT / "benchmarks/results/faults-summary.md")
        .read_text()
        .endswith(f"\n\n{format_campaign(conditions, records)}\n")
    )
    table = (ROOT / "docs/failure-model.md").read_text().partition("| fault | n |")[2].partition("\n\n")[0]
    seen = []
    for line in table.splitlines()[2:]:
        names, *shown = [cell.strip() for cell in line.strip("|").split("|")]
        kinds = re.findall("`([^`]+)`", names)
        some = [each for each in records if each["kind"] in kinds]
        longest = [max(each[key] or 0.0 for each in some) for key in ("detected_seconds", "ended_seconds")]
        lost = max(each["steps_lost"] or 0 for each in some)
        kept = sum(not each["broken"] for each in some)
        full = [str(len(some)), *(f"{each:.1f}" for each in longest), str(lost), str(kept)]
        assert [cell or value for cell, value in zip(shown, full, strict=True)] == full, names
        seen += kinds
    assert sorted(seen) == sorted({each["kind"] for each in records})


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    # tests/parallel/test_other_scripts.py runs those of compare.md and from-ddp.md, in a job
    [
        *(code for page in PAGES if page != "docs/compare.md" for code in blocks(page, "python")),
        (ROOT / "examples/reproducible_sums.py").read_text(),
    ],
)
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    write_shapes(code, below=tmp_path)
    write_quickstart(code, below=tmp_path)
    exit_code, output = fork_code(code, cwd=tmp_path, timeout_seconds=280)
    assert exit_code == 0, output


def test_every_cell_that_compares_trainers_has_a_link_or_a_command() -> None:
    table = (ROOT / "docs/compare.md").read_text().partition("| from | what you gain |")[2].partition("\n\n")[0]
    cells = [cell for row in table.splitlines()[2:] for cell in row.strip("| ").split(" | ")]
    assert len(cells) == 4 * 7
    assert [cell for cell in cells if "](" not in cell and "`bigbatch " not in cell] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text(), flags=re.S)
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
