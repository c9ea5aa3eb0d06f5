"""Which room may import which, read from the sources.

The rules are those of the design: comm knows neither trainer nor launch, launch knows no torch, the parts of the
trainer do not know each other, a heavy dependency has one door, and one file reads the environment.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
import removed_parts
from own_imports import ROOT, Module, house, imported_with, is_within, read_files, read_module

from bigbatch.launch.launchers.registry import LAUNCHERS

ROOMS = (
    # from the ground up; a room may import itself and the rooms below it, rooms on one floor do not know each other
    ("colours", "interpreter"),
    ("errors", "files", "locks"),
    ("paths", "words"),
    ("user_settings",),
    ("comm.rendezvous",),
    ("comm.backends",),
    ("comm.algorithms",),
    ("comm",),
    ("comm.gradients",),
    ("comm.tuning",),
    ("trainer.config",),
    ("trainer.machine", "trainer.models", "trainer.optim"),
    ("trainer.input",),
    ("trainer.augment", "trainer.datasets"),
    ("trainer.input.loaders",),
    ("trainer.step",),
    ("trainer.folder",),
    ("trainer.checkpoint",),
    ("trainer.report",),
    ("trainer.loggers", "trainer.observe"),
    ("trainer.build",),
    ("trainer.memory", "trainer.inference"),
    ("trainer",),
    ("launch.jobs",),
    ("launch.launchers",),
    ("launch",),
    ("tools",),
    ("tools.measure", "tools.emulate", "tools.explain", "tools.mlperf", "tools.preflight", "tools.init"),
    ("tools.replay", "tools.simulate", "tools.tune"),
    ("tools.tune.range", "tools.tune.precision"),
    ("tools.doctor",),
    ("experiments.engine",),
    ("experiments.report",),
    ("experiments.search",),
    ("experiments",),
    ("experiments.batch",),
)
FLOORS = {f"bigbatch.{room}": floor for floor, rooms in enumerate(ROOMS) for room in rooms}
FORBIDDEN = (
    # (what imports, what it must not import), beside the order of the rooms
    ("bigbatch.comm", "bigbatch.trainer"),
    *((f"bigbatch.{core}", "bigbatch.tools") for core in ("comm", "trainer", "launch")),  # parts.load names them
    ("bigbatch.trainer.step", "bigbatch.trainer.config.schema"),  # the loop is handed ready objects
    ("bigbatch.trainer.step", "bigbatch.trainer.config.file"),
    ("bigbatch.trainer.step", "bigbatch.trainer.models"),
    ("bigbatch.trainer.input", "bigbatch.trainer.models"),
    ("bigbatch.trainer.input", "bigbatch.trainer.optim"),
)
DOORS = {
    # dependency: the files that may import it
    "fcntl": ("bigbatch.locks",),
    "mpi4py": ("bigbatch.comm.rendezvous.by_mpi",),
    "nvidia.dali": ("bigbatch.trainer.input.loaders.dali",),
    "horovod": ("bigbatch.comm.backends.horovod",),
    "apex": (),
    "mlperf_logging": ("bigbatch.tools.mlperf.reference",),
    "scipy": ("bigbatch.trainer.datasets.prepare", "bigbatch.tools.mlperf.reference"),
    "pynvml": ("bigbatch.trainer.machine.gpu_driver",),
    "pyarrow": ("bigbatch.trainer.datasets.tables",),
    "fsspec": ("bigbatch.trainer.input.storage",),
    "optuna": ("bigbatch.experiments.search.study",),
    "safetensors": ("bigbatch.trainer.checkpoint.weights",),
    "onnx": ("bigbatch.trainer.inference.formats",),
    "onnxscript": ("bigbatch.trainer.inference.formats",),
    "onnxruntime": ("bigbatch.trainer.inference.formats",),
    "wandb": ("bigbatch.trainer.loggers.wandb",),
    "mlflow": ("bigbatch.trainer.loggers.mlflow",),
    "timm": ("bigbatch.trainer.inference.formats", "bigbatch.trainer.models.libraries"),
}
BESIDE_PARTS = {
    # a file that goes with a part -> the part
    "bigbatch.comm.algorithms.shared": "bigbatch.comm.algorithms.ring",
    "bigbatch.trainer.joining": "bigbatch.trainer.healing",
}
LOGIN_TOOLS = ("bigbatch.tools.simulate", "bigbatch.tools.emulate", "bigbatch.tools.explain")
"""Tools that run on a login node, without torch."""
ENVIRONMENT_READERS = (
    "bigbatch.comm.rendezvous.environ",  # what launchers set
    "bigbatch.user_settings",  # what users set
    "bigbatch.cores",  # what OpenMP reads
    "bigbatch.launch.start",  # hands all of it to the job that it starts
)


def room_of(name: str, modules: Iterable[str]) -> str | None:
    """The folder that a module of ours lies in, such as bigbatch.comm.gradients; None for the front door and others."""
    if name not in modules:
        name = name.rpartition(".")[0]  # a name in a module
    rooms = (name, name.rpartition(".")[0])  # a package lies in itself
    return next((room for room in rooms if room in FLOORS), None)


def climbs(importer: str | None, imported: str | None) -> bool:
    """A room imports one above it, or a neighbour."""
    if importer is None or imported is None or importer == imported:
        return False
    return FLOORS[imported] >= FLOORS[importer]


def broken_walls(modules: Mapping[str, Module]) -> list[str]:
    """Every edge, door and reader that the design does not allow."""
    found = []
    for name, module in sorted(modules.items()):
        for imported in sorted({each.name for each in module.imports}):
            is_forbidden = any(is_within(name, a) and is_within(imported, b) for a, b in FORBIDDEN)
            if is_forbidden or climbs(room_of(name, [name]), room_of(imported, house())):
                found.append(f"{name} imports {imported}")
            for dependency, doors in DOORS.items():
                if is_within(imported, dependency) and name not in doors:
                    found.append(f"{name} imports {imported}")
        if module.reads_environment and name not in ENVIRONMENT_READERS:
            found.append(f"{name} reads the environment")
    return found


def uses_of_parts(modules: Mapping[str, Module]) -> list[str]:
    """Imports of a part, also late ones, in files of the core: those of a run and its launch that are no part."""
    parts = [f"bigbatch.{part.file.removesuffix('.py').replace('/', '.')}" for part in removed_parts.parts()]
    found = []
    for name, module in sorted(modules.items()):
        is_core = any(is_within(name, f"bigbatch.{room}") for room in ("comm", "trainer", "launch"))
        if not is_core or name in parts or is_within(name, "bigbatch.trainer.datasets"):
            continue
        imported = {part for part in parts for each in module.imports if is_within(each.name, part)}
        found += [f"{name} imports {part}" for part in sorted(imported) if BESIDE_PARTS.get(name) != part]
    return found


def import_cycle(modules: Mapping[str, Module]) -> list[str]:
    """Name the modules along one cycle of imports, late ones and those for types included; empty where none is."""
    graph = {}
    for name, module in modules.items():
        asked = (each.name if each.name in modules else each.name.rpartition(".")[0] for each in module.imports)
        graph[name] = {each for each in asked if each in modules and each != name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_reader_reads_the_whole_house() -> None:
    assert {
        "bigbatch",
        "bigbatch.cli",
        "bigbatch.comm.rendezvous.environ",
        "bigbatch.trainer.input.loaders.dali",
    } <= house().keys()
    assert any(each.name == "mpi4py.MPI" for each in house()["bigbatch.comm.rendezvous.by_mpi"].imports)
    assert house()["bigbatch.comm.rendezvous.environ"].reads_environment


def test_rooms_each_have_a_floor() -> None:
    rooms = {name.rpartition(".")[0] for name in house()} - {"", "bigbatch"}
    assert rooms <= FLOORS.keys()


def test_walls_are_not_broken() -> None:
    assert broken_walls(house()) == []


def test_core_imports_no_part() -> None:
    """Which the deletion test relies on: a table names a part, and parts.load() loads it."""
    assert uses_of_parts(house()) == []
    planted = read_module("def train():\n    from bigbatch.trainer.observe.digests import digest\n")
    assert uses_of_parts({"bigbatch.trainer.loop": planted}) == [
        "bigbatch.trainer.loop imports bigbatch.trainer.observe.digests"
    ]


def test_house_has_no_cycle_of_imports() -> None:
    """But for the front door, whose public names are loaded on first use."""
    assert import_cycle({name: module for name, module in house().items() if name != "bigbatch"}) == []


def test_benchmarks_have_no_cycle_of_imports() -> None:
    modules = read_files((ROOT / "benchmarks").rglob("*.py"))
    assert {"benchmarks.record", "benchmarks.comm.links", "benchmarks.gpu.suite.context"} <= modules.keys()
    assert import_cycle(modules) == []


def test_benchmarks_are_imported_by_no_room() -> None:
    asked = {name: [each.name for each in module.imports] for name, module in house().items()}
    assert [name for name in sorted(asked) if any(is_within(each, "benchmarks") for each in asked[name])] == []


@pytest.mark.parametrize(
    "late", ["def f():\n    from a.one import X", "if TYPE_CHECKING:\n    from a.one import X", "import a.one"]
)
def test_reader_sees_a_cycle(late: str) -> None:
    modules = {"a": "", "a.one": "from a import two", "a.two": "from a.three import Y", "a.three": late}
    assert sorted(set(import_cycle({name: read_module(source) for name, source in modules.items()}))) == [
        *("a.one", "a.three", "a.two")
    ]
    del modules["a.three"]
    assert import_cycle({name: read_module(source) for name, source in modules.items()}) == []


def test_launch_experiments_and_the_command_bring_in_no_torch() -> None:
    tops = ("bigbatch.cli", "bigbatch.launch", "bigbatch.experiments", *LOGIN_TOOLS)
    names = [name for name in house() if any(is_within(name, top) for top in tops)]
    assert len(names) > 50
    asked_by = {name: imported_with(name, house()).get("torch") for name in names}
    assert {name: by for name, by in asked_by.items() if by} == {}


@pytest.mark.parametrize(
    "name",
    [
        "trainer.train",
        *(f"trainer.inference.{name}" for name in ("evaluate", "predict", "export")),
        "tools.doctor.probe",
    ],
)
def test_imports_that_are_slow_wait_until_they_are_used(name: str) -> None:
    """torchvision takes as long as torch does."""
    asked_by = imported_with(f"bigbatch.{name}", house())
    assert "torch" in asked_by
    assert "torchvision" not in asked_by, f"{asked_by['torchvision']} imports torchvision"


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        (
            "comm.ring",
            "from bigbatch.trainer.config.schema import Config",
            "imports bigbatch.trainer.config.schema.Config",
        ),
        ("trainer.optim.lars", "import bigbatch.trainer.models", "imports bigbatch.trainer.models"),
        ("trainer.step.precision", "def f():\n    from apex import amp", "imports apex.amp"),
        ("comm.fusion", "import os\nx = os.environ['RANK']", "reads the environment"),
        ("comm.fusion", "from os import environ", "reads the environment"),
        (
            "launch.start",
            "def f():\n    from bigbatch.tools.emulate import plan",
            "imports bigbatch.tools.emulate.plan",
        ),
        ("trainer.input.order", "from bigbatch.trainer.input.loaders import dali", "trainer.input.loaders.dali"),
    ],
)
def test_reader_sees_a_broken_wall(name: str, source: str, complaint: str) -> None:
    found = broken_walls({f"bigbatch.{name}": read_module(source)})
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("comm.trainers", "import bigbatch.trainers"),  # a longer name is another name
        ("trainer.input.loaders.dali", "def f():\n    from nvidia.dali import fn"),
        ("trainer.build.parts", "from bigbatch.trainer.input.loaders.dali import DaliDecoder"),
        ("comm.fusion", "import os\nx = os.cpu_count()"),
    ],
)
def test_reader_lets_the_design_pass(name: str, source: str) -> None:
    assert broken_walls({f"bigbatch.{name}": read_module(source)}) == []


@pytest.mark.parametrize(
    ("job", "rooms", "brings_torch"),
    [
        ("from bigbatch.comm.gradients.fusion import PlanSizes", {}, False),
        (
            "from bigbatch.comm.gradients.fusion import PlanSizes",
            {"bigbatch.comm": "import torch"},
            True,
        ),  # its package
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", {}, False),
    ],
)
def test_reader_sees_torch_behind_other_modules(job: str, rooms: dict[str, str], brings_torch: bool) -> None:
    sources = {
        "bigbatch": "",
        "bigbatch.comm": "",
        "bigbatch.comm.gradients.fusion": "",
        "bigbatch.launch.jobs.spec": job,
    } | rooms
    modules = {name: read_module(source) for name, source in sources.items()}
    assert ("torch" in imported_with("bigbatch.launch.jobs.spec", modules)) is brings_torch


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (["--help"], {"torch", "numpy", "yaml"}),
        (
            ["launch", "local", "--dry-run", "--", "train", "--config", "quickstart"],
            {f"bigbatch.launch.launchers.{name}" for name in LAUNCHERS if name != "local"},
        ),
        (["--help"], {"importlib.metadata"}),
        (["train", "--help"], {"bigbatch.launch.launchers.registry"}),
        (["launch", "mpirun", "--dry-run", "--", "train", "--config", "quickstart"], {"torch", "numpy"}),
    ],
)
def test_command_answers_at_once_without_torch(arguments: list[str], slow: set[str]) -> None:
    script = f"""
import atexit, sys
from bigbatch.cli import main
atexit.register(lambda: print("loaded:", {slow} & sys.modules.keys()))
sys.exit(main({arguments}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("loaded: set()\n"), done.stdout + done.stderr
