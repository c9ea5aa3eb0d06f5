"""Rank and world size from the variables that each launcher sets."""

import io
import os
import re
import socket
import sys
from types import SimpleNamespace

import pytest
from error_texts import naming
from other_launchers import FAMILIES, SETTINGS, left_by, place, recorded

from bigbatch.comm.rendezvous import launcher
from bigbatch.comm.rendezvous.environ import (
    SECRET_VARIABLE,
    prefer_interface,
    read_process_env,
    slurm_job,
    step_hosts,
    terminal_columns,
    with_secret,
    without_identity,
)
from bigbatch.comm.rendezvous.launcher import expand_hostlist
from bigbatch.errors import LaunchError, UserError

TORCHRUN = recorded("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n0 MASTER_PORT=29400")
OPENMPI = recorded("""
    OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4
""")
MPICH = recorded("PMI_RANK=7 PMI_SIZE=8 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4")
# what a batch script sees: tasks of the allocation, but no step
SBATCH = recorded("""
    SLURM_JOB_ID=123 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=4(x2)
    SLURM_JOB_NODELIST=n[01-02]
""")
SRUN = SBATCH | recorded("""
    SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=n[01-02]
    SLURM_PROCID=4 SLURM_NODEID=1 SLURMD_NODENAME=n02
""")


def test_secret_is_new_for_each_job_and_is_not_shown() -> None:
    first, second = with_secret({"PATH": "here"}), with_secret({})
    assert first["PATH"] == "here"
    assert first[SECRET_VARIABLE] != second[SECRET_VARIABLE]
    assert with_secret(first) == first  # a user's own
    env = read_process_env(first)
    assert env.secret == first[SECRET_VARIABLE].encode()
    assert first[SECRET_VARIABLE] not in repr(env)
    assert read_process_env({}).secret == b""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        (SBATCH, ("none", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        (OPENMPI, ("openmpi", 6, 8, 2, 4)),
        (MPICH, ("mpich", 7, 8, 3, 4)),
        (SRUN, ("srun", 4, 8, 0, 4)),
        # precedence: the launcher that started this very process wins
        ({**SRUN, **TORCHRUN}, ("torchrun", 5, 8, 1, 4)),
        ({**OPENMPI, **TORCHRUN}, ("torchrun", 5, 8, 1, 4)),
        ({**SBATCH, **OPENMPI}, ("openmpi", 6, 8, 2, 4)),
        ({**SRUN, **OPENMPI}, ("openmpi", 6, 8, 2, 4)),  # mpirun reaches other nodes by srun
        ({**SRUN, **MPICH}, ("mpich", 7, 8, 3, 4)),
        # srun --mpi=pmi2 speaks to MPICH's library, without MPICH's launcher
        ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "8"}, ("srun", 4, 8, 0, 4)),
        # scripts that set two of torchrun's variables for torch's env://
        ({**SRUN, "RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, ("srun", 4, 8, 0, 4)),
        ({**OPENMPI, "RANK": "6", "WORLD_SIZE": "8"}, ("openmpi", 6, 8, 2, 4)),
        # the script of a PBS job, and jobs of one pod or host
        ({"PBS_TASKNUM": "1", "PBS_NODENUM": "0"}, ("none", 0, 1, 0, 1)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, ("none", 0, 1, 0, 1)),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, ("none", 0, 1, 0, 1)),
        # an interactive shell of an allocation of eight tasks is one process
        (
            {**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "4294967290"},
            ("srun", 0, 1, 0, 1),
        ),
    ],
)
def test_launcher_is_recognised(variables: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert place(read_process_env(variables)) == expected


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_size"),
    [
        *(
            ("2(x3),1", 0, 2),
            ("2(x3),1", 2, 2),
            ("2(x3),1", 3, 1),
            ("7", 0, 7),
            ("1,3(x2),2", 2, 3),
            ("1,3(x2),2", 3, 2),
        ),
        *(("1(x999999999),3", 0, 1), ("1(x999999999),3", 999999999, 3)),  # no list of so many
    ],
)
def test_slurm_nodes_may_hold_different_numbers_of_tasks(tasks_per_node: str, node: int, local_size: int) -> None:
    env = read_process_env({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_NODEID": str(node)})
    assert env.local_size == local_size


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            ("mpich", " MPI_LOCALRANKID;", "no other ranks, unset PMI_RANK and PMI_SI"),
        ),
        ({**TORCHRUN, "RANK": "five"}, ("RANK='five'", "number")),
        ({**TORCHRUN, "MASTER_PORT": "x"}, ("MASTER_PORT='x'", "number")),
        *(({**TORCHRUN, "MASTER_PORT": port}, (f"MASTER_PORT={port} ", "65535")) for port in ("70000", "0", "-1")),
        *(({**TORCHRUN, "MASTER_ADDR": empty}, ("MASTER_ADDR is empty", "rank 0's host")) for empty in ("", " ", "[]")),
        ({**SRUN, "MASTER_ADDR": "", "MASTER_PORT": "29500"}, ("MASTER_ADDR is empty",)),
        ({**TORCHRUN, "RANK": "8"}, ("RANK=8 ", "WORLD_SIZE=8")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ("LOCAL_WORLD_SIZE=9 ", "WORLD_SIZE=8")),
        ({**TORCHRUN, "RANK": "-1"}, ("RANK=-1 ", "WORLD_SIZE=8")),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, ("LOCAL_RANK=4 ", "OMPI_COMM_WORLD_LOCAL_SIZE=4")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(2)"}, ("SLURM_STEP_TASKS_PER_NODE='4(2)'", "8(x4)")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": ""}, ("SLURM_STEP_TASKS_PER_NODE=''", "8(x4)")),
        ({**SRUN, "SLURM_NODEID": "2"}, ("SLURM_NODEID=2 ", "SLURM_STEP_TASKS_PER_NODE=")),
        ({**SRUN, "SLURM_NODEID": "-1"}, ("SLURM_NODEID=-1 ", "SLURM_STEP_TASKS_PER_NODE=")),
        ({**SRUN, "SLURM_NODEID": "?"}, ("SLURM_NODEID='?'", "number")),
        ({**SRUN, "SLURM_JOB_ID": "?"}, ("SLURM_JOB_ID='?'", "number")),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[01-"}, ("'n[01-'", "node[01-04]")),
        ({"BIGBATCH_DEVICE": "gpu"}, ("BIGBATCH_DEVICE='gpu'", "cpu")),
        ({"BIGBATCH_TERMINAL_COLUMNS": "wide"}, ("BIGBATCH_TERMINAL_COLUMNS='wide'", "number")),
    ],
)
def test_environment_that_is_broken_names_the_variable(variables: dict[str, str], named: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match=naming(*named)) as caught:
        read_process_env(variables)
    assert isinstance(caught.value, UserError)  # one line for the user, no traceback
    assert isinstance(caught.value, ValueError)


MASTER = "MASTER_ADDR=n0 MASTER_PORT=29500"
PER_NODE = '--nodes "$WORLD_SIZE" --node-rank "$RANK" --master "$MASTER_ADDR:$MASTER_PORT"'


@pytest.mark.parametrize(
    ("variables", "launcher", "remedy"),
    [
        # as the sources of these launchers set them
        (
            f"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 CROSS_RANK=0 CROSS_SIZE=1 LOCAL_SIZE=2 {MASTER}",
            "DeepSpeed",
            "set LOCAL_WORLD_SIZE to LOCAL_SIZE",
        ),
        (
            f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 NPROC=2 NODE_RANK=0 FORK_LAUNCHED=1 {MASTER}",
            "accelerate",
            "Accelerator before bigbatch.connect()",
        ),
        (f"RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 NODE_RANK=0 {MASTER}", "Azure ML", "process_count_per_instance: 1"),
        (f"RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 AZUREML_RUN_ID=x {MASTER}", "Azure ML", PER_NODE),
        (f"RANK=0 WORLD_SIZE=2 CLUSTER_SPEC={{}} {MASTER}", "Vertex AI", PER_NODE),
        (f"RANK=1 WORLD_SIZE=2 PYTHONUNBUFFERED=0 {MASTER}", "PyTorchJob of Kubeflow v1", PER_NODE),
        ("PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=a", "trainer job of Kubeflow", "PET_*"),
        ("PET_NNODES=1:4 PET_RDZV_ENDPOINT=a:1", "trainer job of Kubeflow", "PET_*"),
        ('SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-2', "SageMaker", "torch_distributed"),
        ("PBS_TASKNUM=146 PBS_NODENUM=0 PBS_VNODENUM=0", "pbsdsh", "mpirun"),
        ("LSF_PM_TASKID=1 LSB_JOBID=3", "blaunch", "mpirun"),
        ("SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1", "SkyPilot", "--node-rank"),
        (MASTER, "MASTER_ADDR=n0", "before bigbatch.connect()"),
        ("WORLD_SIZE=2 NODE_RANK=0 LOCAL_RANK=1", "WORLD_SIZE=2 is set without RANK", "variables of its launcher"),
    ],
)
def test_rank_of_an_unsupported_launcher_is_refused_by_name(variables: str, launcher: str, remedy: str) -> None:
    """It would train alone, as the others would. The remedy does not drop the variables, after which all would.

    If torch's process group states the ranks, as the remedy for accelerate has it, nothing is refused.
    """
    assert read_process_env(recorded(variables), has_group=True).started_by == "none"
    with pytest.raises(LaunchError, match=naming(launcher, remedy)) as caught:
        read_process_env(recorded(variables))
    assert not re.search(r"torchrun did|of torchrun|env -u", str(caught.value))


def test_job_of_one_rank_needs_no_local_variables() -> None:
    assert read_process_env(recorded(f"RANK=0 WORLD_SIZE=1 {MASTER}")).started_by == "none"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[8-9].site", ["r1n8.site", "r1n9.site", "r2n8.site", "r2n9.site"]),
        ("x[1,3],y-2,z[2-2]", ["x1", "x3", "y-2", "z2"]),
    ],
)
def test_host_lists_are_written_out(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[1-3", "n1-3]", "n[]", "n[a-b]", "n[3-1]", "n[1-]", "n[1[2]]", "n 1", "n[²]"]
)
def test_host_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=naming(repr(text), "node[01-04]")):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "r[1-40]n[1-40]", "n[1-600],m[1-600]"])
def test_host_list_that_is_too_long_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_HOSTS", 1000)
    with pytest.raises(LaunchError, match=naming(repr(text), "more than 1000 hosts")):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("variables", "master"),
    [
        ({}, None),
        (TORCHRUN, ("n0", 29400)),
        (OPENMPI, None),
        (MPICH, None),
        ({**OPENMPI, "MASTER_ADDR": "n7", "MASTER_PORT": "1234"}, ("n7", 1234)),
        ({**OPENMPI, "MASTER_ADDR": "[fd00::7]", "MASTER_PORT": "1234"}, ("fd00::7", 1234)),
        (SRUN, ("n01", 20000 + 123 + 2 * 1009)),
        ({**SRUN, "SLURM_JOB_ID": "12000", "SLURM_STEP_ID": "0"}, ("n01", 20000)),
        ({**SRUN, "SLURM_JOB_ID": "12000", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}, ("n01", 25003)),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, ("n01", 20000 + 3733)),  # an interactive step
        ({**SRUN, "MASTER_ADDR": "n7", "MASTER_PORT": "1234"}, ("n7", 1234)),
    ],
)
def test_meeting_point(variables: dict[str, str], master: tuple[str, int] | None) -> None:
    assert read_process_env(variables).master == master


def test_slurm_job_on_one_host_meets_on_the_loopback_interface() -> None:
    one_host = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    env = read_process_env({**SRUN, **one_host, "SLURM_PROCID": "3"})
    assert env.is_one_host
    assert env.master == ("127.0.0.1", 22141)
    assert not read_process_env(SRUN).is_one_host


def test_steps_of_neighbouring_jobs_never_meet_at_one_port() -> None:
    """They may share a node, with several steps each; Linux hands out the ports from 32768 on."""
    numbers = [(job, step) for job in range(499_950, 500_050) for step in range(11)]
    ports = {
        read_process_env({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master[1]  # type: ignore[index]
        for job, step in numbers
    }
    assert len(ports) == len(numbers)
    assert min(ports) >= 20_000
    assert max(ports) < 32_768


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, socket.gethostname()),
        (SRUN, "n02"),
        ({**SRUN, "BIGBATCH_HOST": "played"}, "played"),
        ({**OPENMPI, "BIGBATCH_HOST": "played"}, "played"),
        # MPICH's mpiexec hands the variables of the batch node to all ranks
        ({**SRUN, **MPICH}, socket.gethostname()),
    ],
)
def test_name_of_the_host(variables: dict[str, str], host: str) -> None:
    assert read_process_env(variables).host == host


@pytest.mark.parametrize(("word", "runs"), [("True", True), ("False", False)])
def test_torchrun_may_serve_the_rendezvous_itself(word: str, runs: bool) -> None:
    env = read_process_env({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": word})
    assert (env.master_runs, env.agent_pid) == (runs, os.getppid() if runs else None)
    assert not read_process_env({**OPENMPI, "TORCHELASTIC_USE_AGENT_STORE": word}).master_runs


def test_launcher_is_named_if_it_says_so() -> None:
    """`bigbatch launch local`, and any script, sets RANK and WORLD_SIZE as torchrun does."""
    environs = ({}, TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, OPENMPI, SRUN)
    assert [read_process_env(each).started_by for each in environs] == ["none", "none", "torchrun", "openmpi", "srun"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "is_terminal", "columns"),
    [
        ({}, False, None),
        ({}, True, 93),
        (TORCHRUN, True, 93),
        (OPENMPI, True, None),  # mpirun's own pseudo-terminal
        ({**OPENMPI, "BIGBATCH_TERMINAL_COLUMNS": "120"}, True, 120),
        ({**OPENMPI, "BIGBATCH_TERMINAL_COLUMNS": "120"}, False, 120),
        ({"BIGBATCH_TERMINAL_COLUMNS": "0"}, True, None),
    ],
)
def test_width_of_the_terminal(
    variables: dict[str, str], is_terminal: bool, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", _Terminal() if is_terminal else io.StringIO())
    monkeypatch.setenv("COLUMNS", "93")
    assert terminal_columns(variables) == columns
    assert read_process_env(variables).terminal_columns == columns


def test_stream_of_a_script_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has none where the caller closed it; a script may close it, or replace it by anything to print to."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, object(), closed):
        monkeypatch.setattr(sys, "stdout", stream)
        assert terminal_columns({}) is None


@pytest.mark.parametrize(
    ("interface", "is_one_host", "of_user", "gloo", "nccl"),
    [
        (None, True, None, ("lo", "lo0"), None),  # NCCL finds its own way inside a host
        (None, False, None, (None,), None),
        ("ib0", True, None, ("ib0",), "=ib0"),  # without = NCCL would take ib01, too
        ("ib0,ib1", False, None, ("ib0,ib1",), "=ib0,ib1"),
        (None, True, "ib0", ("ib0",), None),
        ("eth1", True, "ib0", ("ib0",), "=eth1"),
    ],
)
def test_interface_is_told_to_the_libraries_unless_the_user_has(
    interface: str | None,
    is_one_host: bool,
    of_user: str | None,
    gloo: tuple[str | None],
    nccl: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, of_user or "")  # so that both are put back after the test
        if of_user is None or name.startswith("NCCL"):
            monkeypatch.delenv(name)
    prefer_interface(interface, is_one_host=is_one_host)
    assert os.environ.get("GLOO_SOCKET_IFNAME") in gloo
    assert os.environ.get("NCCL_SOCKET_IFNAME") == nccl


@pytest.mark.parametrize("variables", [{}, TORCHRUN])
@pytest.mark.parametrize(
    ("name", "text", "field", "expected"),
    [
        ("BIGBATCH_DEVICE", "cpu", "keeps_to_cpu", True),
        ("BIGBATCH_INTERFACE", "ib0", "interface", "ib0"),
        ("BIGBATCH_STOP_SECONDS", "300", "notice_seconds", 300),
    ],
)
def test_words_of_bigbatch_launch_reach_the_ranks(
    variables: dict[str, str], name: str, text: str, field: str, expected: object
) -> None:
    assert getattr(read_process_env({**variables, name: text}), field) == expected
    assert not getattr(read_process_env(variables), field)
    if name != "BIGBATCH_STOP_SECONDS":
        assert not getattr(read_process_env({**variables, name: ""}), field)


def test_nodes_of_a_step_are_told_by_slurm_alone() -> None:
    assert step_hosts({"SLURM_STEP_NODELIST": "n[0-1],x"}) == ["n0", "n1", "x"]
    assert step_hosts({"SLURM_JOB_NODELIST": "n[0-1]"}) == []


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, ("12", 0)),
        ({"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "big", "SLURM_RESTART_COUNT": "3"}, ("12 of big", 3)),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": ""}, ("12", 0)),
    ],
)
def test_environ_job_of_slurm_is_its_number_and_how_often_it_came_back(
    variables: dict[str, str], job: tuple[str, int] | None
) -> None:
    assert slurm_job(variables) == job


@pytest.mark.parametrize("family", FAMILIES)
def test_environment_for_ranks_of_ours_tells_of_no_other_launcher(family: str) -> None:
    cleaned = without_identity(left_by(family) | SETTINGS)
    assert cleaned == SETTINGS
    assert place(read_process_env(cleaned)) == ("none", 0, 1, 0, 1)
    assert without_identity({"MASTER_ADDR": "n0"}, keep=("MASTER_ADDR",)) == {"MASTER_ADDR": "n0"}


@pytest.mark.parametrize(
    ("shell", "expected"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)]
)
def test_notebook_is_told_from_a_terminals_shell(
    shell: object, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert read_process_env({}).is_notebook is expected
