"""All mistakes of a job are reported at once on the host that starts or submits it, and nothing is started."""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from bigbatch.cli import main

TRAIN = ("--", "train", "--config", "quickstart")
SBATCH = "#!/bin/sh\ncat > submitted\necho 7\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node's, with an sbatch that keeps what it gets."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "kubectl"):
        (tmp_path / "bin" / name).write_text(SBATCH)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/shapes").mkdir(parents=True)
    return tmp_path


def refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """The messages about a job that was refused before its start."""
    assert main(["launch", *words]) == 2
    said = capsys.readouterr()
    assert not Path("submitted").exists()
    assert said.out == ""
    return said.err


NODES = ("slurm", "--nodes", "3", "--ranks-per-node", "5")
PART, MASTER = ("local", "--nodes", "2", "--ranks-per-node", "1"), ("--master", "n0:1")
FEW_GPUS = ("slurm", "--ranks-per-node", "8", "--gpus-per-node", "4")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        # 512 images in ghost batches of 128 or parts of them: 15 ranks cannot share them, 4 can
        ((*NODES, *TRAIN), ("--nodes 3", "5 rank", "15 rank", "batch.global_batch_size=512", "start 4 rank")),
        # found at once, not after a walk down from there
        (("slurm", "--dry-run", "--nodes", "9" * 21, *TRAIN), ("--nodes 999", "1000000 or fewer")),
        (("slurm", "--exclude", "n[1-99999999999]", *TRAIN), ("--exclude 'n[1-99999999999]'", "100000 hosts")),
        (("local", "--ranks", "5", *TRAIN), ("5 rank", "batch.global_batch_size=512", "start 4 rank")),
        (("slurm", "--", "trian", "--config", "quickstart"), ("trian", "nearest is train")),
        (("torchrun", "--", "trian"), ("trian", "nearest is train")),
        (("slurm", "--", "comm", "bnech"), ("bnech", "nearest is bench", "tune")),
        (("slurm", "--", "train.py"), ("train.py", "--python")),
        (("local", "--", "python3", "-m", "own"), ("python3", "--python -- -m own")),
        (("local", "--", "/usr/bin/bigbatch", "data", "check"), ("leave /usr/bin/bigbatch out", "-- data check")),
        (("slurm", "--array", "7-0", *TRAIN, "--run.directory", "r/{index}"), ("--array '7-0'", "0-7")),
        (("slurm", "--array", "1-3%0", *TRAIN, "--run.directory", "r/{index}"), ("--array '1-3%0'", "%1")),
        (("slurm", "--array", "0-7%00", *TRAIN, "--run.directory", "r/{index}"), ("--array '0-7%00'", "%1")),
        (("slurm", "--array", "0-7:0", *TRAIN, "--run.directory", "r/{index}"), ("--array '0-7:0'", "step")),
        (("slurm", "--mount", "/:/data", *TRAIN), ("--mount without --image",)),
        (("slurm", "--container", "pyxis", *TRAIN), ("--container without --image",)),
        (("slurm", "--image", "none.sif", *TRAIN), ("--image none.sif", "no such file")),
        (("local", *TRAIN, "--run.directory", "/dev/null/run"), ("--run.directory /dev/null/run", "not a folder")),
        (("local", "--python", "--", "/none/train.py"), ("/none/train.py",)),
        (("torchrun", "--", "comm", "tune", "--ddp", "/none/t.py"), ("--ddp /none/t.py", "no such file")),
        (("slurm", "--image", "bb", "--mount", "none:/d", *TRAIN), ("--mount none", "no such file or folder")),
        (("mpirun", "--", "train", "--config", "quikstart"), ("quikstart", "quickstart")),
        (("torchrun", "--dry-run", *TRAIN, "--batch.bn_spam", "3"), ("batch.bn_spam", "batch.bn_span")),
        ((*FEW_GPUS, *TRAIN, "--batch.microbatch_size", "64"), ("8 ranks", "--gpus-per-node 4", "--device cpu")),
        (("slurm", "--time", "2h", *TRAIN), ("--time '2h'", "2:00:00")),
        (("local", *TRAIN, "--run.directory", "bin/sbatch/run"), ("--run.directory bin/sbatch/run", "not a folder")),
        # once, not by each rank
        (("local", "--ranks", "4", *TRAIN, "--data.root", "nowhere"), ("--data.root nowhere: there is no such",)),
        (("torchrun", *TRAIN, "--data.root", "/none/flowers.json"), ("--data.root /none/flowers.json",)),
        (("local", *TRAIN, "--data.list", "none.json"), ("--data.list none.json: there is no such",)),
        (("local", "--python", "--", "trian.py"), ("trian.py", "train.py")),
        (("slurm", "--python", "--", "-m", "no_such_module.main"), ("no_such_module.main",)),
        (("torchrun", "--python", "--", "--rate", "3"), ("--rate", "script")),
        (("torchrun", "--python", "--", "-m"), ("-m", "module")),
        (("preflight", "--", "trian"), ("trian", "nearest is train")),
        (("emulate", "run", "--nodes", "5", *TRAIN), ("5 rank", "batch.global_batch_size=512", "start 4 rank")),
        (("emulate", "run", "--nodes", "2", "--python", "--", "trian.py"), ("trian.py", "train.py")),
        # commands that train nothing
        ((*NODES, "--", "preflight", "--link-gbit", "nan"), ("argument --link-gbit: nan must be a positive number",)),
        ((*NODES, "--", "evaluate", "runs/none"), ("runs/none", "config.yaml")),
        ((*NODES, "--", "export", "runs/none", "--format", "onnx"), ("runs/none", "config.yaml")),
        ((*NODES, "--", "export", "$UNSET/none"), ("$UNSET/none", "$UNSET has no value here")),
        ((*NODES, "--", "tune", "search", "--config", "quickstrt"), ("quickstrt", "quickstart")),
        ((*NODES, "--", "evaluate", "--config=quickstrt", "--weights", "x.pth"), ("quickstrt", "quickstart")),
        # a node's part of a job knows its place
        ((*PART, *TRAIN), ("--nodes 2", "--master HOST:PORT", "--node-rank")),
        ((*PART, *MASTER, *TRAIN), ("--nodes 2", "--node-rank", "0 to 1")),
        ((*PART, *MASTER, "--node-rank", "2", *TRAIN), ("--node-rank 2", "--nodes 2")),
        ((*PART, *MASTER, "--node-rank", "0", "--restarts", "1", *TRAIN), ("--restarts", "mpirun")),
        # restarts, healing
        (("mpirun", "--restarts", "1", *TRAIN, "--run.resume", "never"), ("--run.resume never",)),
        (("emulate", "run", "--nodes", "2", "--restarts", "1", *TRAIN, "--run.resume", "never"), ("--run.resume",)),
        *(
            ((name, *TRAIN, "--run.heal", "in_place"), (f"in_place: {name} ends all", "mpirun, slurm or k8s"))
            for name in ("torchrun", "flux")
        ),
    ],
    ids=" ".join,
)
def test_check_says_what_cannot_work_before_anything_starts(
    words: tuple[str, ...], named: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").touch()
    said = refused(words, capsys)
    assert all(part in said for part in named), said
    assert said.count("\n") == 1


def test_check_says_all_at_once_and_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--time", "2h", "--name", "a b", "--array", "7-0", "--mount", "x", "--env", "A-", "--master", "n0")
    said = refused((*NODES, *words, "--node-rank", "1", "--", "trian"), capsys).splitlines()
    options = ("--time", "--name", "--array", "--mount", "--env", "--master", "--node-rank", "--array and", "trian")
    assert sorted(line.strip().split(" ")[0].rstrip(":") for line in said[1:]) == sorted(
        option.split(" ")[0] for option in options
    )
    assert str(len(options)) in said[0]


@pytest.mark.parametrize("words", [("--dry-run",), ("--output", "job.sh", "--dry-run")])
def test_check_of_a_job_that_is_shown_warns_of_files_that_are_not_here(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be meant for another cluster."""
    missing = ("--image", "none.sif", "--mount", "none:/d")
    assert main(["launch", "slurm", *words, *missing, "--python", "--", "none.py"]) == 0
    said = capsys.readouterr()
    assert "none.py" in said.out
    assert all(f"warning: {part}" in said.err for part in ("--image none.sif", "--mount none", "--python: "))


@pytest.mark.parametrize("words", [("--dry-run",), ("--output", "job.sh"), ()])
@pytest.mark.parametrize("launcher", ["slurm", "mpirun"])
def test_check_warns_of_images_that_are_not_in_the_work_folder(
    launcher: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those at an absolute path may be on disks of the nodes, and other roots are no paths."""
    if launcher == "mpirun":
        words = ("--dry-run",)
    for root, is_warned in (("data/none", True), ("/none/data", False), ("s3://bucket/data", False)):
        assert main(["launch", launcher, *words, *TRAIN, f"--data.root={root}"]) == 0
        said = capsys.readouterr().err
        assert said.count("--data.root data/none: there is no such") == said.count("warning: --data.root") == is_warned
        Path("job.sh").unlink(missing_ok=True)
    others = ("--data.root", "data/none", "--data.loader", "synthetic")
    assert main(["launch", launcher, *words, *TRAIN, *others]) == 0
    assert "--data.root" not in capsys.readouterr().err


def test_shares_of_the_ranks_are_shown_and_unequal_ones_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """8 microbatches: 3 ranks take 3, 3 and 2, so that 8 of 9 are used."""
    words = (*TRAIN, "--batch.global_batch_size", "512", "--batch.microbatch_size", "64", "--batch.bn_span", "64")
    even = "bigbatch: global batch 512 = 4 ranks x 2 microbatches x 64\n"
    unequal = (
        "bigbatch: global batch 512 = 8 microbatches x 64 on 3 ranks; uneven shares: 2 ranks x 3 and 1 rank x 2 "
        "microbatches in a step, which takes as long as the larger share: 89% of the ranks' time is used\n"
    )
    for options, said in (
        (("--dry-run", "--nodes", "4"), even),
        (("--nodes", "4"), ""),
        (("--nodes", "3"), unequal),
    ):
        assert main(["launch", "slurm", *options, *words]) == 0
        assert capsys.readouterr().err == said
    assert main(["launch", "slurm", "--dry-run", "--", "comm", "bench"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--image", "bb", "--mount", "/none/data:/d", *TRAIN, "--run.directory", "/none/runs"), "--mount /none/data"),
        (("--image", "/none/images/bb.sqsh", *TRAIN), "--image /none/images/bb.sqsh"),
        ((*TRAIN, "--run.directory", "/dev/null/run"), "--run.directory /dev/null/run"),
        (("--python", "--", "/none/train.py"), "/none/train.py"),
        (("--env", "PYTHONPATH=/none", "--python", "--", "-m", "no_such_module"), "no_such_module"),
        (("--module", "mine", "--python", "--", "-m", "no_such_module"), "no_such_module"),
    ],
)
def test_check_lets_the_nodes_have_disks_and_modules_of_their_own(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", *words]) == 0
    said = capsys.readouterr()
    assert "job 7" in said.out
    assert said.err.count("\n") == 1
    assert said.err.startswith("bigbatch: warning: ")
    assert named in said.err


class Editable:
    """Finds a module that is on no path, as an editable install's finder does."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "editable_module" else None


@pytest.mark.parametrize(
    "words",
    [
        ("--image", "oras://registry/bb.sif", *TRAIN),
        ("--python", "--", "-m", "editable_module.main"),
        ("--python", "--", "bin"),
        ("--", "comm", "tune", "--ddp", "$HERE/bin/sbatch"),
    ],
)
def test_check_leaves_alone_what_works(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    monkeypatch.setenv("HERE", os.getcwd())
    assert main(["launch", "slurm", *words]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        ("slurm", "--image", "bb"),
        ("k8s", "--memory", "8G", "--cpus-per-rank", "2", "--image", "bb", "--mount", "/none:/d"),
    ],
)
def test_check_lets_an_image_have_another_bigbatch(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words, "--", "trian"]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in ("warning: trian", "image"))


@pytest.mark.parametrize("words", [("--device", "cpu", *TRAIN), (*TRAIN, "--comm.backend", "gloo")])
def test_check_lets_ranks_on_the_cpu_outnumber_the_gpus(words: tuple[str, ...]) -> None:
    assert main(["launch", "slurm", "--ranks-per-node", "4", "--gpus-per-node", "2", *words]) == 0


def test_output_says_what_it_wrote_and_leaves_an_edited_script_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "slurm", "--logs", "out", "--output", "job.sh", *TRAIN]
    assert main(words) == 0
    assert capsys.readouterr() == ("written: job.sh; submit it by: mkdir -p out && sbatch job.sh\n", "")
    assert main(words) == 0, "nothing differs"
    capsys.readouterr()
    made = (folder / "job.sh").read_text()
    (folder / "job.sh").write_text(made + "echo mine\n")
    said = refused(tuple(words[1:]), capsys)
    assert all(part in said for part in ("--output job.sh", "--force"))
    assert (folder / "job.sh").read_text() == made + "echo mine\n"
    assert main([*words[:2], "--force", *words[2:]]) == 0
    assert (folder / "job.sh").read_text() == made


def test_output_may_be_a_stream() -> None:
    reading, writing = os.pipe()
    assert main(["launch", "slurm", "--output", f"/dev/fd/{writing}", *TRAIN]) == 0
    assert os.read(reading, 1 << 20).startswith(b"#!/bin/bash\n")
    os.close(reading)
    os.close(writing)


def test_job_of_one_core_a_rank_and_of_an_image_without_bigbatch_is_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpus-per-node", "1", "--image", "nvcr.io/nvidia/pytorch:1", "--output", "job.sh")
    assert main(["launch", "slurm", *words, *TRAIN]) == 0
    said = capsys.readouterr().err
    assert "warning: without --cpus-per-rank" in said
    assert "warning: --image nvcr.io/nvidia/pytorch:1: it must contain bigbatch" in said


@pytest.mark.parametrize("last", ["n[1-", "n!", "n[1-99999999999]"])
def test_check_of_a_long_list_of_nodes_does_not_repeat_it(last: str, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ",".join([f"node-of-a-long-name-{number:04}" for number in range(999)] + [last])
    assert main(["launch", "slurm", "--exclude", nodes, *TRAIN]) == 2
    said = capsys.readouterr().err
    assert "--exclude 'node-of-a-long-name-0000,node" in said
    assert len(said) < 300
