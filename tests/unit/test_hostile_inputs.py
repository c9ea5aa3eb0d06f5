"""Everything that is read from outside, mutated: one clear line, never a traceback, nothing run, nothing written.

Each surface is a function that reads bytes as its command does. Hypothesis draws the seeds of the cases, the same
everywhere; a failure prints its own.
"""

import copy
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from thread_controls import alone
from whole_states import state_of

import bigbatch
from benchmarks.twin.rows import read_given, read_questions
from bigbatch.cli import UNUSABLE_PATH
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.rendezvous.environ import ALONE, read_process_env
from bigbatch.comm.tuning.tuned import ClusterFacts, Tuned, read_tuned, write_tuned
from bigbatch.errors import DamagedCheckpoint, UserError, print_traceback
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.experiments.report.collect import read_folder, train_records
from bigbatch.launch.jobs.site import read_file as read_site
from bigbatch.launch.jobs.validation import parse_hosts, read_hostfile
from bigbatch.tools.simulate.cluster import load_cluster
from bigbatch.trainer.build.optimizer import stated_settings
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from bigbatch.trainer.checkpoint.fields import require_fields
from bigbatch.trainer.checkpoint.resume import find_start, restore_
from bigbatch.trainer.config.file import PACKAGED, load_config
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.folder.folder import RunDir, read_curves
from bigbatch.trainer.input.data_root import INDEX, open_split
from bigbatch.trainer.input.shard_files import WEBDATASET_INDEX
from bigbatch.trainer.input.shards import ENTRIES, read_packed

TOKENS = (
    *(b"", b"\0", b"\n", b"\r", b"\t", b" ", b"'", b'"', b"\\", b"%", b"#", b"&", b"*", b"!", b"|", b">", b"-", b"--"),
    *(b"{", b"}", b"[", b"]", b":", b",", b"[]", b"{}", b"null", b"true", b"~", b"NaN", b"Infinity", b"-Infinity"),
    *(b"0", b"-1", b"1e400", b"-0.0", b"9" * 25, b"9" * 5000, b"0x10", b"1_000", b"0.1", b"1:30", b"2026-13-45"),
    *("\u0661\u0662".encode(), "\u00b2".encode(), "\u2028".encode(), b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b"../", b"/", b"~/", b"../../../../tmp/x", b"$(touch x)", b"`touch x`", b";touch x", b"\x1b[31m", b"%s%n"),
    *(b"!!python/object/apply:os.system [touch x]", b"<<: *a", b"&a [*a]", b"[" * 2000, b'{"a":' * 2000, b"- " * 500),
)
"""Texts that some parser somewhere takes for more than text."""
EDITS = ("cut", "drop", "repeat", "flip", "swap", "insert", "insert")
SHORT = 40
CASES = {
    # of the long form, at least 10,000 of each kind; YAML is slow to parse, so that its kinds share them
    **dict.fromkeys(("options", "tuned", "metrics", "shard"), 10_000),
    "checkpoint": 8000,
    **dict.fromkeys(("recipe", "hosts", "hostfile", "index", "entries"), 5000),
    **dict.fromkeys(("torchrun", "openmpi", "srun"), 3400),
    **dict.fromkeys(("sweep", "cluster", "site", "rows"), 2500),
    **dict.fromkeys(("manifest", "webdataset"), 2000),
    "webdataset index": 1000,
}
BUSY_SECONDS = 1800
"""Time limit of the long forms, which take up to 90 s of computing on a machine that four others use."""
Read = Callable[[bytes], None]

RECIPE = b"""run: {epochs: 2, directory: "runs/{name}"}
data:
  root: data/shapes
  image_size: 32
batch: {global_batch_size: 96, microbatch_size: 32, bn_span: 16}
schedule: {base_lr: 1.5e-1, warmup_epochs: 0}
"""
METRICS = b"".join(
    json.dumps({"kind": kind, "step": step, "images_per_second": 100.0, "wire_wait_fraction": 0.1}).encode() + b"\n"
    for step, kind in enumerate(("start", "train", "train", "train", "eval"))
)
ROWS = b"""id,accelerator,num_accelerators,num_nodes,batch_per_accelerator,model,ms_per_step,collective_library_version
a,NVIDIA A100,8,1,408,ResNet-50 v1.5,120.04,NCCL 2.12.10
b,NVIDIA A100,64,8,51,ResNet-50 v1.5,19.6,NCCL 2.12.10
"""
SWEEP = b"""name: small
config: quickstart
options: {data.loader: synthetic, schedule.warmup_epochs: 0}
steps: 10
where: local
launch: {}
ranks_per_node: 2
grid: {scaling: [weak], ranks: [1, 2]}
seeds: 1
timeout_minutes: 5
"""
SITE = b"""partition = "gpu"
account = "physics"
sbatch = ["exclusive", "mail-type=END"]
interface = "ib0"
[env]
NCCL_IB_HCA = "mlx5_0"
"""
TUNED = Tuned(
    cluster=ClusterFacts("tcp", 2, (2,), "block", None, "cpu", "fp32", "torch"),
    model="small",
    tensors=(TensorSpec("fc.weight", 100, 4, "float32"), TensorSpec("fc.bias", 10, 4, "float32")),
    table=HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "ring"))),
    sizes=PlanSizes(8000, 12_000, 4000),
    command="bigbatch comm tune --config small",
    evidence={"ready_seconds": {"fc.weight": 0.5}},
)


class Surface:
    """A function that reads what outsiders may have written, and valid bytes for it."""

    def __init__(self, valid: bytes, read: Read, folder: Path) -> None:
        self.valid, self.read, self.folder = valid, read, folder

    def check(self, data: bytes) -> None:
        """Read the bytes: a UserError of one to a few clear lines, or none; and the folder as before."""
        before = sorted(os.listdir(self.folder))
        try:
            self.read(data)
        except UserError as error:
            said = str(error)
            assert said.strip()
            assert "Traceback" not in said
            assert len(said) <= 5 * len(data) + 5_000
        except SystemExit:  # --help among the options
            pass
        except OSError as error:  # a name too long: the command line says it in a line of its own
            if error.errno not in UNUSABLE_PATH or not error.filename:
                raise
        assert sorted(os.listdir(self.folder)) == before


def mutate(data: bytes, draw: Random) -> bytes:
    """Edit valid bytes one to four times, at any place, as an attacker or a bad disk does."""
    for _ in range(draw.randint(1, 4)):
        data = _edit(data, draw)
    return data


def _edit(data: bytes, draw: Random) -> bytes:
    kind, token = draw.choice(EDITS), draw.choice(TOKENS)
    first, last = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    if kind == "cut":
        return data[:first]
    if kind == "drop":
        return data[:first] + data[last:]
    if kind == "repeat":
        return data[:last] + data[first:]
    if kind == "flip" and first < len(data):
        return data[:first] + bytes([data[first] ^ (1 << draw.randint(0, 7))]) + data[first + 1 :]
    if kind == "swap":
        return data[:first] + token + data[first + len(token) :]
    return data[:first] + token + data[first:]


def read_file(path: Path, read: Callable[[Path], object]) -> Read:
    def write_and_read(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    path.touch()
    return write_and_read


def hosts(data: bytes) -> None:
    parse_hosts(data.decode(errors="surrogateescape"))


def variables(data: bytes) -> None:
    lines = data.replace(b"\0", b"").decode(errors="surrogateescape").split("\n")
    pairs = [line.partition("=") for line in lines if "=" in line]
    read_process_env({name: value for name, _, value in pairs})


def options(data: bytes) -> None:
    words = data.replace(b"\0", b"").decode(errors="surrogateescape").split("\n")
    with redirect_stderr(io.StringIO()):
        load_config(words)


def metrics_of(run: Path) -> Read:
    (run / "config.yaml").write_text("schedule: {warmup_epochs: 0}\n")

    def read(data: bytes) -> None:
        (run / "metrics.jsonl").write_bytes(data)
        read_folder(run)
        train_records(RunDir(run))
        read_curves(RunDir(run).metrics)

    (run / "metrics.jsonl").touch()
    return read


def tables(path: Path) -> None:
    for read in (read_given, read_questions):
        with suppress(UserError):
            for row in read(path).rows:
                row.job()


def checkpoint_of(folder: Path, name: str) -> Read:
    """A checkpoint with one changed file gives the same weights, or none."""
    state = {"weights": torch.arange(6.0), "step": 3}
    save_checkpoint(folder, state, step=3, top1=0.5, keep=2)
    (path,) = (each.path for each in list_checkpoints(folder))

    def read(data: bytes) -> None:
        (path / name).write_bytes(data)
        list_checkpoints(folder)
        loaded = load_checkpoint(path)
        assert loaded["step"] == 3
        assert torch.equal(loaded["weights"], state["weights"])

    read.path = path / name  # type: ignore[attr-defined]
    return read


def webdataset_of(folder: Path, name: str) -> Read:
    """A shard, or the index of shards: one that is not as it was written is made again."""
    root = folder / "webdataset"
    write_dataset(folder / "images", train_per_class=1, val_per_class=1, side_pixels=(32, 32))
    pack(folder / "images", folder / "packed", recipe=PackRecipe(), splits=("train",))
    (root / "train").mkdir(parents=True)
    (folder / "packed/train/shard-000000.tar").rename(root / "train/0.tar")
    expected = len(open_split(root, "train"))
    path = root / name if name == WEBDATASET_INDEX else root / "train" / name

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with redirect_stderr(io.StringIO()):
            index = open_split(root, "train")
        assert name != WEBDATASET_INDEX or len(index) == expected
        for number in range(len(index)):
            index.read(number)

    read.path = path  # type: ignore[attr-defined]
    return read


def packed_of(folder: Path, name: str) -> Read:
    source, target = folder / "images", folder / "packed"
    write_dataset(source, train_per_class=1, val_per_class=1, side_pixels=(32, 32))
    pack(source, target, recipe=PackRecipe(), splits=("val",))
    (target / "val" / "kept").touch()
    split = target / "val"

    def read(data: bytes) -> None:
        (split / name).write_bytes(data)
        before = {path.name for path in split.iterdir()}
        try:
            index = read_packed(split)
            for number in range(len(index)):
                index.read(number)
        finally:
            assert {path.name for path in split.iterdir()} == before

    read.path = split / name  # type: ignore[attr-defined]
    return read


def surfaces(folder: Path) -> dict[str, Callable[[], Surface]]:
    """Name -> what makes it, in the folder."""

    def of(valid: bytes, read: Read) -> Surface:
        return Surface(valid, read, folder)

    def of_file(name: str, valid: bytes, read: Callable[[Path], object]) -> Surface:
        return of(valid, read_file(folder / name, read))

    def of_kept(read: Read) -> Surface:
        return of(read.path.read_bytes(), read)  # type: ignore[attr-defined]

    def tuned() -> Surface:
        write_tuned(TUNED, folder / "tuned.json")
        return of_file("tuned.json", (folder / "tuned.json").read_bytes(), read_tuned)

    return {
        "recipe": lambda: of_file("a.yaml", RECIPE, lambda path: load_config(["--config", str(path)])),
        "options": lambda: of(
            b"--config\n../small.yaml\n--run.epochs\n3\n--batch.bn_span=16\n--optimizer.momentum\n0.8", options
        ),
        "sweep": lambda: of_file("sweep.yaml", SWEEP, read_plan),
        "cluster": lambda: of_file(
            "c.yaml", (PACKAGED / "clusters/dgx_h100.yaml").read_bytes(), lambda path: load_cluster(str(path))
        ),
        "rows": lambda: of_file("rows.csv", ROWS, tables),
        "site": lambda: of_file("bigbatch.toml", SITE, read_site),
        "hosts": lambda: of(b"n0:8,n1:8,node-2.cluster:4", hosts),
        "hostfile": lambda: of_file("hosts", b"n0 slots=8\nn1:4 # spare\nn2\n", read_hostfile),
        "torchrun": lambda: of(
            b"RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\nMASTER_PORT=29500",
            variables,
        ),
        "openmpi": lambda: of(
            b"OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2"
            b"\nPMIX_HOSTNAME=n0\nSLURM_STEP_ID=0\nSLURM_PROCID=1",
            variables,
        ),
        "srun": lambda: of(
            b"SLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=4\nSLURM_LOCALID=1\nSLURM_STEP_TASKS_PER_NODE=2(x2)\n"
            b"SLURM_STEP_NODELIST=n[0-1]\nSLURM_NODEID=0\nSLURM_JOB_ID=7",
            variables,
        ),
        "tuned": tuned,
        "metrics": lambda: of(METRICS, metrics_of(folder)),
        "checkpoint": lambda: of_kept(checkpoint_of(folder / "checkpoints", "state.pt")),
        "manifest": lambda: of_kept(checkpoint_of(folder / "checkpoints", "manifest.json")),
        "index": lambda: of_kept(packed_of(folder, INDEX)),
        "entries": lambda: of_kept(packed_of(folder, ENTRIES)),
        "shard": lambda: of_kept(packed_of(folder, "shard-000000.tar")),
        "webdataset": lambda: of_kept(webdataset_of(folder, "0.tar")),
        "webdataset index": lambda: of_kept(webdataset_of(folder, WEBDATASET_INDEX)),
    }


FIELD_RUN = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 64,
    "data.image_size": 16,
    "model.options": {"width": 4},
    "batch.global_batch_size": 32,
    "batch.microbatch_size": 32,
    "batch.bn_span": 32,
    "run.epochs": 1,
    "run.eval_every_epochs": 1,
    "run.log_every_steps": 1,
    "schedule.warmup_epochs": 0,
    "schedule.base_lr": 0.01,
    "optimizer.ema_decay": 0.9,
    "optimizer.ema_every_steps": 1,
}
ESCAPES = "\x1b]0;title\x07\x1b[31m"
MISSING = object()
ODD_VALUES = (
    MISSING,
    None,
    True,
    -1,
    10**30,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    ESCAPES,
    "9" * 5000,
    [],
    {},
    [{}],
    (),
)
ODD_VALUES += (
    {"a": ESCAPES},
    {1: 2},
    torch.tensor(float("nan")),
    torch.zeros(0),
    torch.zeros(3, dtype=torch.complex64),
)


def fields(state: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each field; of many tensors of one kind, those of the first and of the last."""
    items = list(state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ())
    for key, value in items if len(items) < 15 else (*items[:2], *items[-2:]):
        yield (*place, key)
        yield from fields(value, (*place, key))


def with_field(state: dict[str, Any], place: tuple[Any, ...], value: object) -> dict[str, Any]:
    """Return a copy of the state with another value at a place."""
    changed = copy.deepcopy(state)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return changed


def tensors_of(state: Any) -> int:
    """Count the tensors in a state."""
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(tensors_of, values)) + isinstance(state, torch.Tensor)


NAMES = sorted(surfaces(Path()))


BATCH = 20
"""Cases of one draw: hypothesis takes longer for one than most of these readers."""


def run_cases(surface: Surface, name: str, count: int) -> None:
    @settings(
        max_examples=count // BATCH,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        draw = Random(seed)
        for _ in range(BATCH):
            data = mutate(surface.valid, draw)
            try:
                surface.check(data)
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}: {data[:2000]!r}") from error

    check()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Surface]]:
    """Surfaces in a folder that is all they may touch; what a mutated text may run or write would lie beside it."""
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (tmp_path / "small.yaml").write_text("schedule: {warmup_epochs: 0}\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    yield lambda name: surfaces(work)[name]()
    assert list(home.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "small.yaml", "work"]
    assert not (work / "x").exists()


@pytest.mark.parametrize("name", NAMES)
def test_valid_input_is_read(name: str, made: Callable[[str], Surface]) -> None:
    surface = made(name)
    surface.read(surface.valid)


@pytest.mark.parametrize("name", NAMES)
def test_mutated_input_is_refused_in_a_line(name: str, made: Callable[[str], Surface]) -> None:
    run_cases(made(name), name, SHORT)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=[pytest.mark.long, pytest.mark.weekly])])
@pytest.mark.timeout(BUSY_SECONDS)
def test_each_field_of_a_checkpoint_is_checked(stride: int, tmp_path: Path) -> None:
    """A changed field under a valid digest: the whole state is restored, or one line says what is wrong."""
    bigbatch.train("quickstart", {**FIELD_RUN, "run.directory": str(tmp_path / "run")}, quiet=True)
    (made,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    state, step = load_checkpoint(made.path), made.step
    overrides = [f"--{key}={as_yaml(value)}" for key, value in FIELD_RUN.items()]
    run = ["--config", "quickstart", *overrides, f"--run.directory={tmp_path / 'next'}"]
    path = save_checkpoint(tmp_path / "checkpoints", state, step=step, top1=made.top1, keep=1)
    config = load_config([*run, f"--run.resume={path}"])
    communicator = connect(env=ALONE, backend="gloo")

    def resume() -> None:
        start, found = find_start(config, RunDir(tmp_path / "next"), samples=state["samples"], control=alone())
        plan = make_plan(config, communicator, num_samples=64, first_step=start.step)
        order = start.gradient_order
        parts = make_parts(config, communicator, plan=plan, tuned=None, gradient_order=order, is_restored=True)
        restore_(parts, found, path=path, stated=stated_settings(config.optimizer))
        assert tensors_of(parts.optimizer.state_dict()) == tensors_of(state["optimizer"])
        assert tensors_of(found["average"]) == tensors_of(state["average"])

    resume()
    refusals, defects = [], []
    cases = [
        (place, value)
        for number, place in enumerate(fields(state))
        for value in (ODD_VALUES if len(place) == 1 else [ODD_VALUES[(number + k) % len(ODD_VALUES)] for k in (0, 9)])
    ]
    for place, value in cases[::stride]:
        changed = with_field(state, place, value)
        save_checkpoint(tmp_path / "checkpoints", changed, step=step, top1=made.top1, keep=1)
        try:
            resume()
        except UserError as error:
            refusals.append(str(error))
        except Exception as error:
            defects.append((place, str(value)[:20], repr(error)[:200]))
    assert defects == []
    assert len(refusals) > 150 // stride
    assert [line for line in refusals if "\n" in line or len(line) > 600] == []


def test_weight_without_its_momentum_is_refused(tmp_path: Path) -> None:
    config = load_config(["--config", "quickstart", "--run.directory", str(tmp_path)])
    groups = [{"params": [0, 1], "names": ["a", "b"], "momentum": 0.9}]
    kept = {number: {"momentum_buffer": torch.ones(2)} for number in (0, 1)}
    state = state_of(config, step=3, gradient_order="a\nb")
    require_fields({**state, "optimizer": {"state": kept, "param_groups": groups}}, source="c")
    for lost in ({0: {}}, {0: {"momentum_buffer": None}}):
        with pytest.raises(DamagedCheckpoint, match="c is damaged: the optimizer's state of a is missing"):
            require_fields({**state, "optimizer": {"state": {**kept, **lost}, "param_groups": groups}}, source="c")
    with pytest.raises(DamagedCheckpoint, match="state of a is missing"):
        require_fields({**state, "optimizer": {"state": {}, "param_groups": groups}}, source="c")


@pytest.mark.parametrize("step", [[], {}, [1.0], torch.tensor([1.0]), -1, 4])
def test_count_of_updates_that_no_run_keeps_is_refused(step: object, tmp_path: Path) -> None:
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}", "--optimizer.name=adamw"])
    kept = {0: {"step": step, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    groups = [{"params": [0], "names": ["a"], "betas": (0.9, 0.99)}]
    state = state_of(config, step=3, gradient_order="a", optimizer={"state": kept, "param_groups": groups})
    with pytest.raises(DamagedCheckpoint, match=r"the optimizer counts .* updates of a in 3 steps"):
        require_fields(state, source="c")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_weights_may_be_complex_and_without_elements(dtype: torch.dtype, tmp_path: Path) -> None:
    """Such as RoPE's factors; of a matrix without elements Muon keeps nothing."""
    config = load_config(["--config", "quickstart", "--run.directory", str(tmp_path)])
    groups = [{"params": [0, 1], "names": ["a", "empty"], "momentum": 0.9}]
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": groups}
    model = {"a": torch.ones(2), "empty": torch.ones(0, 2), "factors": torch.ones(2, dtype=dtype)}
    state = state_of(config, step=3, gradient_order="a\nempty", optimizer=optimizer, model=model)
    require_fields(state, source="c")
    with pytest.raises(DamagedCheckpoint, match="state of empty is missing"):
        require_fields(state | {"model": {**model, "empty": torch.ones(1, 2)}}, source="c")
    if dtype.is_complex:
        with pytest.raises(DamagedCheckpoint, match="average is a dict, not finite"):
            require_fields(state | {"average": model}, source="c")


def test_traceback_is_printed_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_traceback(TypeError(f"first {ESCAPES}\nsecond"))
    assert capsys.readouterr().err == "TypeError: first \\x1b]0;title\\x07\\x1b[31m\nsecond\n"


@pytest.mark.weekly
@pytest.mark.timeout(BUSY_SECONDS)
@pytest.mark.parametrize("name", NAMES)
def test_mutated_input_is_refused_thousands_of_times(name: str, made: Callable[[str], Surface]) -> None:
    run_cases(made(name), name, CASES[name])
