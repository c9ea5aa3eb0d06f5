"""Settings of a site, in bigbatch.toml: which file applies to which launcher, and what is printed about it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from error_texts import naming

from bigbatch import user_settings
from bigbatch.errors import JobRefused
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.jobs import array_job
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import make_points
from bigbatch.launch.launchers.slurm import job_script
from bigbatch.launch.start import main
from bigbatch.user_settings import site_settings

ROOT = Path(__file__).resolve().parents[4]
TRAIN = ("--", "train", "--config", "quickstart")
SYSTEM = """
partition = "gpu"
account = "all"
interface = "ib0,ib1"
module = ["cuda/13.0", "gcc"]
sbatch = ["exclusive", "switches=1"]
[env]
NCCL_IB_HCA = "mlx5"
NCCL_IB_GID_INDEX = 3
"""
USER = """
account = "vision"
sbatch = ["switches=2"]
[env]
NCCL_IB_HCA = "=mlx5_0"
"""
PODS = """
[k8s]
image = "registry.example/bb:1"
queue = "research"
namespace = "theirs"
mount = ["runs:/runs"]
interface = "eth0"
[k8s.env]
NCCL_IB_HCA = "=ib7"
"""
MOUNT = ("--mount", "runs:/runs")
POD_TRAIN = (*TRAIN[1:], "--data.root", "/runs/data", "--run.directory", "/runs/r")
Show = Callable[..., tuple[str, str]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A system's and a user's, in force."""
    system, user = tmp_path / "etc/bigbatch.toml", tmp_path / "config/bigbatch/bigbatch.toml"
    for path, text in ((system, SYSTEM), (user, USER)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setattr(user_settings, "SYSTEM_SITE_FILE", system)
    monkeypatch.delenv("BIGBATCH_SITE_FILE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return system, user


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Return what a dry run prints on stdout and on stderr."""

    def run(*words: str) -> tuple[str, str]:
        assert main([words[0], "--dry-run", *words[1:], *(() if "--" in words else TRAIN)]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


def test_site_fills_in_what_the_command_line_leaves_open(files: tuple[Path, Path], show: Show) -> None:
    script, said = show("slurm", "--nodes", "2", "--partition", "test", "--env", "NCCL_IB_GID_INDEX=5")
    lines = script.splitlines()
    assert {"#SBATCH --partition=test", "#SBATCH --account=vision", "#SBATCH --exclusive"} <= set(lines)
    assert [line for line in lines if "switches" in line and "SBATCH " in line] == ["#SBATCH --switches=2"]
    assert {"module load cuda/13.0 || exit 1", "export BIGBATCH_INTERFACE=ib0,ib1"} <= set(lines)
    assert {"export NCCL_IB_HCA==mlx5_0", "export NCCL_IB_GID_INDEX=5"} <= set(lines)
    assert "export NCCL_IB_GID_INDEX=3" not in lines
    system, user = files
    told = [line for line in said.splitlines() if line.startswith("bigbatch: from ")]
    assert told == [
        f"bigbatch: from {user}: --env NCCL_IB_HCA==mlx5_0 --account vision --sbatch switches=2",
        f"bigbatch: from {system}: --interface ib0,ib1 --module cuda/13.0 --module gcc --sbatch exclusive",
    ]


@pytest.mark.usefixtures("files")
def test_site_speaks_to_each_launcher_of_what_it_can_do(show: Show) -> None:
    alone, _ = show("local")
    assert "NCCL_IB_HCA==mlx5_0" in alone
    assert "INTERFACE=ib0" not in alone, "one host keeps to the loopback interface"
    across, said = show("mpirun", "--hosts", "n0:1,n1:1")
    assert "BIGBATCH_INTERFACE=ib0,ib1" in across
    assert "--partition" not in said
    manifest, said = show("k8s", "--image", "bb", *MOUNT, "--", *POD_TRAIN)
    assert ("mlx5" in manifest, "bigbatch: from" in said) == (False, False), "of another cluster"


def test_site_has_a_table_for_kubernetes(files: tuple[Path, Path], show: Show) -> None:
    _, user = files
    user.write_text(user.read_text() + PODS)
    manifest, said = show("k8s", "--namespace", "mine", "--nodes", "2", "--", *POD_TRAIN)
    loaded = yaml.safe_load(manifest)
    assert loaded["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    assert loaded["metadata"]["namespace"] == "mine", "the command line goes before"
    pod = loaded["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][1] == {"name": "mount-0", "persistentVolumeClaim": {"claimName": "runs"}}
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert environment["NCCL_IB_HCA"] == "=ib7"
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth0"
    told = [line for line in said.splitlines() if line.startswith("bigbatch: from ")]
    assert [line.split()[:3] for line in told] == [["bigbatch:", "from", f"{user}:"]]
    assert site_settings({"BIGBATCH_SITE": environment["BIGBATCH_SITE"]})[str(user)]["queue"] == "research"
    assert "research" not in "".join(show("slurm", "--nodes", "2"))


@pytest.mark.usefixtures("files")
def test_site_with_a_partition_does_not_send_a_preflight_to_slurm(show: Show) -> None:
    assert "#SBATCH" not in show("preflight", "--hosts", "n0:1,n1:1")[0]
    assert "#SBATCH --partition=gpu" in show("preflight", "--nodes", "2")[0]


@pytest.mark.usefixtures("files")
def test_site_fills_in_what_a_sweep_leaves_open(tmp_path: Path) -> None:
    sweep = SweepPlan(name="s", config="quickstart", where="slurm", launch={"account": "mine"}, timeout_minutes=30.0)
    job = array_job(sweep, make_points(sweep, folder=tmp_path), SweepFolder(tmp_path), name="s")
    script = job_script(job, folder=None)
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --account=mine\n" in script


def test_site_container_counts_where_there_is_an_image(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.toml"
    path.write_text('container = "apptainer"\nmount = ["/data:/data"]\n')
    monkeypatch.setenv("BIGBATCH_SITE_FILE", str(path))
    assert "apptainer exec" in show("slurm", "--image", "bb")[0]
    assert "apptainer" not in show("slurm")[0]


@pytest.mark.usefixtures("files")
def test_site_file_that_is_named_stands_alone(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.toml").write_text('qos = "high"')
    monkeypatch.setenv("BIGBATCH_SITE_FILE", str(tmp_path / "own.toml"))
    script, _ = show("slurm")
    assert "#SBATCH --qos=high\n" in script
    assert "--partition" not in script
    monkeypatch.setenv("BIGBATCH_SITE_FILE", "")
    assert "--qos" not in show("slurm")[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('partiton = "gpu"', ("unknown key partiton", "partition")),
        ("nodes = 4", ("unknown key nodes", "partition, account")),
        ("[k8s]\nquue = 'a'", ("[k8s]", "unknown key quue", "queue")),
        ("k8s = 4", ("k8s = 4", "table")),
        ("partition = gpu", ("TOML",)),
        ('module = "cuda"', ("module", "'cuda'", "list")),
        ("partition = true", ("partition", "True")),
        ('env = ["A=b"]', ("env", "table")),
        ("partition = {a = 1}", ("partition", "one word")),
        ('cpus_per_rank = "many"', ("--cpus-per-rank", "'many'")),
        ('container = "docker"', ("--container", "'docker'", "pyxis")),
        (None, ("No such file",)),
    ],
)
def test_site_file_that_is_wrong_is_refused_by_its_name(
    text: str | None, named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.toml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("BIGBATCH_SITE_FILE", str(path))
    with pytest.raises(JobRefused, match=naming(str(path), *named)) as caught:
        main(["slurm", "--dry-run", *TRAIN])
    assert len(str(caught.value).splitlines()) == 1


def test_site_file_of_the_page_is_right(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = re.findall("```toml\n(.*?)```", (ROOT / "docs/admin.md").read_text(), re.S)
    (tmp_path / "own.toml").write_text(text)
    monkeypatch.setenv("BIGBATCH_SITE_FILE", str(tmp_path / "own.toml"))
    script, _ = show("slurm", "--nodes", "2", "--image", "bb.sqsh")
    assert "export NCCL_IB_HCA==mlx5_0,mlx5_1\n" in script
    assert json.loads(re.findall("^export BIGBATCH_SITE='(.*)'$", script, re.M)[0]).keys() == {
        str(tmp_path / "own.toml")
    }
