"""What other launchers leave in the environment of a shell, as it was recorded or as their manuals have it."""

from bigbatch.comm.rendezvous.environ import ProcessEnv

FAMILIES = {
    "torchrun": "RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 GROUP_WORLD_SIZE=2 ROLE_RANK=3 "
    "ROLE_NAME=default ROLE_WORLD_SIZE=8 MASTER_ADDR=login MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none "
    "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=3",
    "one rank of torchrun": "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1",
    "half of torchrun": "RANK=3 WORLD_SIZE=8",
    "PyTorchJob": "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NNODES=2 PET_NODE_RANK=1 "
    "PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456 PET_RDZV_BACKEND=c10d",
    "mpirun": "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
    "OMPI_COMM_WORLD_NODE_RANK=0 OMPI_UNIVERSE_SIZE=1 PMIX_RANK=0 PMIX_NAMESPACE=prterun-n0-245@1 PMIX_HOSTNAME=n0 "
    "PMIX_SERVER_TMPDIR=/tmp/ompi.245 PMIX_SERVER_URI41=prterun-n0-245@0.0;tcp4://127.0.0.1:44023 PRTE_LAUNCHED=1 "
    "BIGBATCH_STOPPED=/tmp/.stopped-1",
    "prterun": "PMIX_RANK=1 PMIX_NAMESPACE=prterun-n0-1871@1 PMIX_HOSTNAME=n0 PRTE_LAUNCHED=1",
    "mpiexec of MPICH": "PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
    "PALS": "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_NODEID=1 PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4",
    "flux": "FLUX_JOB_SIZE=8 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=6 FLUX_TASK_LOCAL_ID=2 PMI_RANK=6 PMI_SIZE=8",
    "srun": "SLURM_STEP_ID=4 SLURM_STEPID=4 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=n[0-1] SLURM_TASK_PID=312 SLURM_GTIDS=1",
    "jsrun": "JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4",
    "MVAPICH": "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=4",
    "aprun": "ALPS_APP_PE=0",
    "mpirun of Open MPI 4": "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_MCA_ess=^singleton "
    "OMPI_MCA_ess_base_vpid=0 OMPI_MCA_orte_ess_num_procs=1 OMPI_MCA_orte_hnp_uri=1.0;tcp://127.0.0.1:4000",
    "horovodrun": "HOROVOD_RANK=0 HOROVOD_SIZE=1 HOROVOD_LOCAL_RANK=0 HOROVOD_CROSS_SIZE=1 "
    "HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1",
}
SETTINGS = {
    "NCCL_DEBUG": "INFO",
    "OMPI_MCA_btl": "tcp,self",
    "HOROVOD_FUSION_THRESHOLD": "1048576",
    "PRTE_MCA_plm_ssh_agent": "ssh",
    "PMIX_MCA_gds": "hash",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEPMGR": "n0",
    "RANKING": "5",
}
"""What is not a place of a rank."""


def recorded(text: str) -> dict[str, str]:
    """Return the variables of an environment; written as NAME=VALUE, with blanks between."""
    return dict(word.split("=", 1) for word in text.split())


def left_by(family: str) -> dict[str, str]:
    """Return the variables of one of FAMILIES."""
    return recorded(FAMILIES[family])


def place(env: ProcessEnv) -> tuple[str, int, int, int, int]:
    """The five facts that every launcher must yield."""
    return env.launcher, env.rank, env.world_size, env.local_rank, env.local_size
