"""Which launcher started a process, from environments as they were recorded."""

import socket

import pytest
from error_texts import naming
from other_launchers import left_by, place, recorded

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import LaunchError

PALS, FLUX = left_by("PALS"), left_by("flux")  # two nodes with four ranks each
STEP = left_by("srun") | {"SLURM_JOB_ID": "1"}  # srun -n2 -N2 in a batch job, the second task
# a shell that mpirun -n 1 of Open MPI 5 started on n0
OPENMPI = recorded("""
    OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
    PMIX_RANK=0 PMIX_NAMESPACE=prterun-n0-245@1 PMIX_HOSTNAME=n0 PMIX_SERVER_TMPDIR=/tmp/ompi.245 PRTE_LAUNCHED=1
""")
# mpirun -n 4 in a batch job of two nodes, which starts its daemon on the other node by srun; the last rank
UNDER_A_DAEMON = recorded("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    PMIX_RANK=3 PMIX_NAMESPACE=prterun-n0-554@1 PMIX_HOSTNAME=n1 PMIX_SERVER_TMPDIR=/tmp/prted.575 PRTE_LAUNCHED=1
    SLURM_JOB_ID=2 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
    SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=n1 SLURM_TASK_PID=574
""")
# salloc's shell is a step, in which a person types mpirun -n 4
IN_AN_INTERACTIVE_STEP = UNDER_A_DAEMON | recorded("""
    PMIX_NAMESPACE=prterun-n0-900@1 PMIX_HOSTNAME=n0 PMIX_SERVER_TMPDIR=/tmp/ompi.900
    SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=n0 SLURM_TASK_PID=870
""")
PRTERUN = left_by("prterun")
OF_PMIX = recorded("PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.1.4 PMIX_HOSTNAME=n1")


def without(prefix: str, variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(prefix)}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (PALS, ("pals", 5, 8, 1, 4)),
        (without("PMI_LOCAL_", PALS) | {"PALS_LOCAL_SIZE": "4"}, ("pals", 5, 8, 1, 4)),
        (FLUX, ("flux", 6, 8, 2, 4)),
        (without("PMI_", FLUX), ("flux", 6, 8, 2, 4)),  # by -opmi=none
        (FLUX | recorded("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"), ("mpich", 1, 2, 1, 2)),
        (STEP | FLUX, ("flux", 6, 8, 2, 4)),  # in a job of Slurm's
    ],
)
def test_launcher_of_crays_and_flux_is_recognised(
    variables: dict[str, str], expected: tuple[str, int, int, int, int]
) -> None:
    assert place(read_process_env(variables)) == expected


@pytest.mark.parametrize("variables", [PALS, FLUX])
def test_launcher_that_hands_on_its_own_nodes_name_is_not_believed(variables: dict[str, str]) -> None:
    assert read_process_env({**variables, "SLURMD_NODENAME": "first"}).host == socket.gethostname()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (PRTERUN, ("PMIX_RANK=1", "prterun", "mpirun", "srun", "WORLD_SIZE", "MASTER_ADDR")),
        ({**PRTERUN, "PMIX_RANK": "0"}, ("PMIX_RANK=0", "prterun")),
        # srun --mpi=pmix, in a container that does not let SLURM_* through
        (OF_PMIX, ("PMIX_RANK=1", "srun", "SLURM_* ")),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, ("HOROVOD_RANK=1", "horovodrun")),
        ({"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "PMIX_RANK": "3"}, ("JSM_NAMESPACE_RANK=3", "jsrun")),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"}, ("MV2_COMM_WORLD_RANK=0", "mpirun_rsh")),
        ({"MPT_MPI_RANK": "0", "MPT_MPI_SIZE": "2"}, ("MPT_MPI_RANK=0", "HPE's MPT", "Open MPI")),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK=1 is set without RANK", "WORLD_SIZE")),
        ({"ALPS_APP_PE": "0"}, ("ALPS_APP_PE=0", "aprun")),
        ({"PMI_SIZE": "4"}, ("PMI_SIZE=4", "PMI_RANK")),
        ({"PMI_RANK": "2"}, ("PMI_RANK=2", "PMI_SIZE")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", " RANK,", "its launcher")),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE", "openmpi")),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID", "srun")),
        ({"FLUX_JOB_SIZE": "2"}, ("FLUX_JOB_SIZE=2", "FLUX_TASK_RANK", "flux")),
        ({**FLUX, "FLUX_JOB_SIZE": "7"}, ("FLUX_JOB_SIZE=7", "FLUX_JOB_NNODES=2", "--tasks-per-node", "WORLD_SIZE")),
        ({"FLUX_TASK_RANK": "1"}, ("flux", "FLUX_JOB_SIZE")),
        ({"PALS_RANKID": "1"}, ("pals", "PMI_SIZE")),
    ],
)
def test_launcher_whose_ranks_would_each_run_alone_is_refused(
    variables: dict[str, str], named: tuple[str, ...]
) -> None:
    with pytest.raises(LaunchError, match=naming(*named)) as caught:
        read_process_env(variables)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "variables",
    [{"PMI_SIZE": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"SLURM_STEP_NUM_TASKS": "2"}, {"RANK": "gold"}],
)
def test_process_that_is_one_of_one_runs_alone(variables: dict[str, str]) -> None:
    assert place(read_process_env(variables)) == ("none", 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("variables", "host", "expected"),
    [
        # a shell that mpirun started has called srun: on another node, and on its own
        ({**OPENMPI, **STEP}, "n1", ("srun", 1, 2, 0, 1)),
        ({**OPENMPI, **STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, "n0", ("srun", 0, 2, 0, 1)),
        ({**OPENMPI, **STEP, **OF_PMIX}, "n1", ("srun", 1, 2, 0, 1)),
        (UNDER_A_DAEMON, "n1", ("openmpi", 3, 4, 1, 2)),
        ({**UNDER_A_DAEMON, "PMIX_HOSTNAME": "n1.site"}, "n1", ("openmpi", 3, 4, 1, 2)),
        (IN_AN_INTERACTIVE_STEP, "n0", ("openmpi", 3, 4, 1, 2)),
        # a rank under a daemon calls srun itself
        ({**UNDER_A_DAEMON, **STEP, "SLURM_TASK_PID": "901"}, "n1", ("srun", 1, 2, 0, 1)),
    ],
)
def test_launcher_that_is_deeper_counts(
    variables: dict[str, str],
    host: str,
    expected: tuple[str, int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert place(read_process_env(variables)) == expected
