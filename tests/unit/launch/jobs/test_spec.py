"""JobSpec from the command line; every launcher honours an option or says that it cannot."""

import os
import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.installed import count_gpus
from bigbatch.launch.jobs.options import make_job
from bigbatch.launch.jobs.spec import OPTIONS, JobSpec
from bigbatch.launch.jobs.validation import (
    UNLIMITED,
    format_minutes,
    parse_environment,
    parse_forwarded,
    parse_hosts,
    parse_master,
    parse_minutes,
    read_hostfile,
)
from bigbatch.launch.launchers import slurm_script
from bigbatch.launch.launchers.local import local_processes
from bigbatch.launch.launchers.registry import LAUNCHERS, load_launcher
from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")
IN_PODS = (*TRAIN, "--data.root", "/runs/data", "--run.directory", "/runs/r")
SAMPLES: dict[str, Any] = {
    "hosts": (("n0", 4), ("n1", 4)),
    "num_nodes": 2,
    "node_rank": 1,
    "master": ("n0", 29500),
    "name": "other",
    "minutes": 90,
    "partition": "gpu",
    "account": "vision",
    "qos": "high",
    "reservation": "window",
    "constraint": "a100",
    "exclude": "n[3-4]",
    "sbatch": (("exclusive", None), ("mem-per-gpu", "60G")),
    "mpi": "pmix",
    "gpus_per_node": 2,
    "gpu_type": "a100",
    "cpus_per_rank": 3,
    "memory": "7G",
    "image": "other.sif",
    "mounts": ("/a:/b", "runs:/runs"),
    "container": "apptainer",
    "environment": (("A", "1"),),
    "modules": ("cuda",),
    "interface": "eth7",
    "device": "cpu",
    "logs": "other/logs",
    "array": "0-3",
    "stop_seconds": 33,
    "restarts": 2,
    "namespace": "team",
    "queue": "research",
    "priority": "high",
    "node_selector": ("gpu=h200",),
    "tolerations": ("nvidia.com/gpu:NoSchedule",),
    "pull_secrets": ("registry",),
    "rdma": "rdma/hca=2",
    "pod": ("host-network", "label.team=vision"),
    "user": "5000:6000",
    "is_python": True,
    "preflight": "exclude",
}
"""A value for each field that a user may state."""


def _slurm(job: JobSpec) -> str:
    command = (*TRAIN, "{index}") if job.array else TRAIN
    return slurm_script.sbatch_script(replace(job, command=command))


def _dry(launcher: str, job: JobSpec) -> str:
    # each time another port that is free
    text = re.sub(r"(MASTER_PORT|--master-port)=\d+", "", load_launcher(launcher).dry_run(job, {}))
    # and another name
    return re.sub(r"\b(bigbatch|other)-[a-z0-9]{5}\b", r"\1", text) if launcher == "k8s" else text


WRITERS = {name: partial(_dry, name) for name in LAUNCHERS} | {"slurm": _slurm}
BASES = {"k8s": JobSpec(IN_PODS, 8, image="bb", mounts=("runs:/runs",)), "slurm": JobSpec(TRAIN, 8, image="bb.sqsh")}


def test_job_field_has_a_sample() -> None:
    # what is taken from the environment need not show: test_env.py
    without = {"command", "num_ranks", "oversubscribe", "forwarded"}
    assert {field.name for field in fields(JobSpec)} - set(SAMPLES) == without


@pytest.mark.parametrize("launcher", WRITERS)
@pytest.mark.parametrize("field", list(SAMPLES))
def test_job_option_is_honoured_or_refused_by_name(launcher: str, field: str) -> None:
    base = BASES.get(launcher, JobSpec(TRAIN, 8))
    write = WRITERS[launcher]
    if launcher in ("local", "torchrun") and field in ("num_nodes", "node_rank", "master"):
        base = JobSpec(TRAIN, 8, num_nodes=4, node_rank=0, master=("n9", 1))
    try:
        changed = write(replace(base, **{field: SAMPLES[field]}))
    except LaunchOptionError as error:
        assert str(error).startswith(f"{OPTIONS[field].flag}: bigbatch launch {launcher} "), error  # noqa: PT017
        assert len(str(error).partition("; ")[2]) > 10, "and says what to do instead"  # noqa: PT017
        return
    assert changed != write(base)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        *(("90", 90), ("2:00:00", 120), ("1-12:30:00", 2190), ("1:30", 2), ("0:00:01", 1), ("2-0", 2880)),
        *(("1-2:30", 1590), ("UNLIMITED", UNLIMITED), ("infinite", UNLIMITED)),
    ],
)
def test_job_times_are_read_as_slurm_reads_them(text: str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "-1", "1h", "1:2:3:4", "1-", "0:00:00", "٣", "1:00:00\n", "1;rm"])
def test_job_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchOptionError, match="--time"):
        parse_minutes(text)


@pytest.mark.parametrize("minutes", [1, 59, 60, 1439, 1440, 2190, 99999, UNLIMITED])
def test_job_times_are_written_as_they_are_read(minutes: int) -> None:
    assert parse_minutes(format_minutes(minutes)) == minutes


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("minutes", UNLIMITED, "#SBATCH --time=UNLIMITED"),
        ("memory", "0", "#SBATCH --mem=0"),
        ("memory", "200g", "#SBATCH --mem=200g"),
        ("array", "0-7:2,9%3", "#SBATCH --array=0-7:2,9%3"),
        ("array", "0-15:4%2", "#SBATCH --array=0-15:4%2"),
    ],
)
def test_job_words_that_are_legal_in_slurm_reach_it(field: str, value: Any, line: str) -> None:
    assert line in _slurm(replace(BASES["slurm"], **{field: value})).splitlines()


NOTHING_STATED: dict[str, Any] = {"num_ranks": None, "hosts": (), "num_cores": 2}
TOO_MANY = ("are more than any job has: state 1000000 or fewer",)


def test_job_ranks_are_nodes_times_ranks_per_node() -> None:
    def ranks(**stated: Any) -> int:
        return make_job(TRAIN, **{**NOTHING_STATED, **stated}).num_ranks

    assert ranks(num_nodes=4, ranks_per_node=8) == 32
    assert ranks(num_nodes=4) == 4
    assert ranks(num_nodes=4, gpus_per_node=8) == 32
    assert ranks(num_nodes=4, gpus_per_node=8, ranks_per_node=2) == 8
    assert ranks(num_nodes=4, num_ranks=32) == 32
    assert ranks(default_ranks=3) == 3
    assert ranks(hosts=(("n0", 8), ("n1", 4))) == 12
    assert ranks() == 1


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"num_nodes": 3, "num_ranks": 8}, ("--ranks 8", "--nodes 3", "--ranks-per-node")),
        ({"num_nodes": 2, "num_ranks": 8, "ranks_per_node": 2}, ("--ranks 8", "--nodes 2")),
        ({"num_nodes": 0}, ("--nodes 0",)),
        ({"ranks_per_node": -1}, ("--ranks-per-node -1",)),
        ({"num_nodes": 2, "hosts": (("n0", 1),)}, ("--hosts", "--nodes", "--ranks-per-node")),
        *(({"num_ranks": ranks}, (f"--ranks {ranks} must be at least 1",)) for ranks in (0, -1)),
        ({"num_ranks": 9, "hosts": (("n0", 8),)}, ("--ranks",)),
        ({"command": ()}, ("-- train --config quickstart",)),
        # more than any cluster has, before memory is taken for each
        ({"num_ranks": 5_000_000}, TOO_MANY),
        ({"num_nodes": 10**9}, TOO_MANY),
        ({"hosts": (("n0", 10**8),)}, TOO_MANY),
        ({"ranks_per_node": 10**7}, TOO_MANY),
    ],
)
def test_job_numbers_that_contradict_each_other_are_refused(stated: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(LaunchOptionError, match=naming(*named)):
        make_job(**{"command": TRAIN, **NOTHING_STATED, **stated})


def test_job_ranks_beyond_the_cores_share_them() -> None:
    stated = ({"num_ranks": 3}, {"num_ranks": 2}, {"num_ranks": 8, "hosts": (("n0", 8),)})  # hosts state their slots
    assert [make_job(TRAIN, **NOTHING_STATED | each).oversubscribe for each in stated] == [True, False, False]


@pytest.mark.parametrize(("cores", "is_shared"), [(2, True), (3, False), (None, False)])
def test_job_ranks_on_hyperthreads_share_cores_as_mpirun_counts_them(
    cores: int | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A virtual machine may not tell its cores."""
    monkeypatch.setattr("psutil.cpu_count", lambda logical: cores)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert main(["mpirun", "--ranks", "3", "--dry-run", *("--", *TRAIN)]) == 0
    assert ("--oversubscribe" in capsys.readouterr().out) == is_shared


def test_job_of_more_ranks_than_a_host_can_run_is_refused_by_local() -> None:
    with pytest.raises(LaunchOptionError, match=naming("900000 ranks", "4096 or fewer")):
        local_processes(JobSpec(TRAIN, 900_000), port=29500)


def test_job_hosts() -> None:
    assert parse_hosts("n0:8,node-1.cluster:4,n2") == (("n0", 8), ("node-1.cluster", 4), ("n2", 1))
    for text in ("", "n0:", "n0:0", "n0:x", "-x:1", "n0 n1", "n0;rm:1", "n0:1,", "$(id):1", "n\n:1"):
        with pytest.raises(LaunchOptionError, match="HOST:RANKS"):
            parse_hosts(text)


def test_hostfile_forms(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    lines = b"# workers\nw-0.job.ns.svc slots=8\nw-1.job.ns.svc  slots = 4  # small\n\nn2:2\nn3\n"
    path.write_bytes(b"\xef\xbb\xbf" + lines + b"n4 slots=4 max_slots=8\r\nn5 max-slots = 8\r\n")
    named = (("w-0.job.ns.svc", 8), ("w-1.job.ns.svc", 4))
    assert read_hostfile(path) == (*named, ("n2", 2), ("n3", 1), ("n4", 4), ("n5", 1))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *((text, ("--host",)) for text in ("", "# none\n", "n0 slots=0\n", "-x slots=1\n", "n0;rm\n")),
        ("n0\nme@n1 slots=2\n", ("--hostfile", "hostfile', line 2: 'me@n1 slots=2'", "n0 slots=8")),
    ],
)
def test_hostfile_that_is_none_is_refused(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(LaunchOptionError, match=naming(*named)):
        read_hostfile(path)
    with pytest.raises(LaunchOptionError, match=naming("--hostfile", tmp_path / "none", "No such file")):
        read_hostfile(tmp_path / "none")
    with pytest.raises(LaunchOptionError, match=naming("--hostfile", r"/a\nb'")):
        read_hostfile(tmp_path / "a\nb")


def test_hostfile_may_be_the_output_of_a_command_but_no_named_pipe(tmp_path: Path) -> None:
    """To open a pipe without a writer never returns. bash gives <(COMMAND) as /dev/fd/63."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LaunchOptionError, match=naming("--hostfile", tmp_path / "pipe", "not a regular file")):
        read_hostfile(tmp_path / "pipe")
    reading, writing = os.pipe()
    os.write(writing, b"n0 slots=2\n")
    os.close(writing)
    assert read_hostfile(Path(f"/dev/fd/{reading}")) == (("n0", 2),)
    os.close(reading)


def test_interface_that_mpirun_would_not_find_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["mpirun", "--ranks", "2", "--interface", "ib7"]
    with pytest.raises(LaunchOptionError, match=r"^--interface 'ib7': .*\blo\b"):
        main([*words, *("--", *TRAIN)])
    assert main([*words, "--dry-run", *("--", *TRAIN)]) == 0  # may be meant for another machine
    assert "ib7" in capfd.readouterr().out


def test_hosts_that_are_empty_are_not_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable for --hosts may be empty."""
    with pytest.raises(LaunchOptionError, match=naming("--hosts ''", "HOST:RANKS")):
        main(["mpirun", "--hosts", "", "--dry-run", *("--", *TRAIN)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["n0", "n0:", "n0:0", "n0:65536", "-n:1", "n 0:1", ":1", "n0:1\n"])
def test_master_that_is_none_is_refused(text: str) -> None:
    assert parse_master("n0.x:29500") == ("n0.x", 29500)
    assert parse_master("[::1]:29500") == ("::1", 29500)
    with pytest.raises(LaunchOptionError, match="--master"):
        parse_master(text)


def test_variables_may_hold_equals_signs() -> None:
    assert parse_environment(["A=b=c", "D="]) == (("A", "b=c"), ("D", ""))
    assert parse_environment(["A", "A@b"]) == ()
    assert parse_forwarded(["A=b", "A", "A@b", "A@"]) == (("A", None), ("A", "b"), ("A", ""))


GPUS = ("GPU 0: NVIDIA H100 (UUID: GPU-1)", "  MIG 1g.10gb Device 0: (UUID: MIG-1)", "GPU 1: NVIDIA H100 (UUID: GPU-2)")


@pytest.mark.parametrize(
    ("lines", "code", "count"),
    [(GPUS, 0, 2), (GPUS, 9, 2), (("Failed to initialize NVML: Driver/library version mismatch",), 18, 0)],
)
def test_local_starts_a_rank_per_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: tuple[str, ...],
    code: int,
    count: int,
) -> None:
    """And says that the driver fails: else it would train on the CPU of a GPU's host in silence."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    main(["local", "--dry-run", "--", *TRAIN])
    shown = capsys.readouterr()
    assert shown.out.count(" RANK=") == (count or 1)
    warned = naming("warning", "nvidia-smi", f"{count} GPU", "--ranks", "--device cpu")
    assert bool(re.search(warned, shown.err)) == (code != 0)


def test_local_counts_no_gpu_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0


def test_local_starts_one_rank_on_the_cpu_whatever_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bigbatch.launch.launchers.local.count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # tests hide GPUs
    for words, count in (([], 4), (["--device", "cpu"], 1)):
        main(["local", *words, "--dry-run", "--", *TRAIN])
        assert capfd.readouterr().out.count(" RANK=") == count


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("GPU-a", 1), ("", 1), ("-1", 1)])
def test_local_starts_one_rank_for_each_gpu_that_is_visible(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bigbatch.launch.launchers.local.count_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    main(["local", "--dry-run", "--", *TRAIN])
    assert capfd.readouterr().out.count(" RANK=") == count
