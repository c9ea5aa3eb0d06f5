"""The argument list of mpirun, word by word."""

import sys

from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.mpirun import mpirun_argv

TRAIN = ("train", "--config", "quickstart")


def test_mpirun_on_this_host() -> None:
    assert mpirun_argv(JobSpec(TRAIN, 2)) == [
        *("mpirun", "-n", "2", "--bind-to", "none", "--map-by", "slot"),
        *("-x", "BIGBATCH_TERMINAL_COLUMNS=0", sys.executable, "-m", "bigbatch", *TRAIN),
    ]


def test_mpirun_across_hosts_as_root_with_too_few_cores() -> None:
    job = JobSpec(TRAIN, 16, hosts=(("n0", 8), ("n1", 8)), oversubscribe=True)
    assert mpirun_argv(job, mpirun="/opt/mpirun", is_root=True, terminal_columns=80) == [
        *("/opt/mpirun", "-n", "16", "--bind-to", "none", "--map-by", "slot", "--allow-run-as-root"),
        *("--host", "n0:8,n1:8", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"),
        *("-x", "BIGBATCH_TERMINAL_COLUMNS=80", sys.executable, "-m", "bigbatch", *TRAIN),
    ]


def test_mpirun_passes_variables_of_the_transports_to_other_hosts() -> None:
    variables = ("PATH", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOME", "MASTER_ADDR")
    argv = mpirun_argv(JobSpec(TRAIN, 2, hosts=(("n0", 1), ("n1", 1))), variables=variables)
    first = argv.index("-x")
    assert argv[first : first + 7 : 2] == ["-x"] * 4
    assert argv[first + 1 : first + 6 : 2] == ["GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_SOCKET_IFNAME"]
    assert "NCCL_SOCKET_IFNAME" not in mpirun_argv(JobSpec(TRAIN, 2), variables=variables), "inherited on this host"
