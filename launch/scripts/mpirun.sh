#!/bin/bash
# Start ranks on your own hosts by Open MPI's mpirun (5.x), with a command line that you maintain yourself.
#   HOSTS=n0:8,n1:8 ./mpirun.sh train --config imagenet/resnet50_8k
# The hosts need the same bigbatch at the same path, and ssh without a password between them.
# To save a checkpoint and stop, send SIGUSR1 to mpirun (kill -USR1). Ctrl-C leaves no time for a checkpoint.
HOSTS=${HOSTS:-localhost:2}
INTERFACE=${INTERFACE:-}   # between the hosts, such as eth0 or ib0,ib1; empty: mpirun and bigbatch choose

command -v mpirun >/dev/null || { echo "mpirun is not installed here: pip install -e '.[mpi]' in bigbatch's checkout" >&2; exit 1; }

# Variables of a shell inside another job; they describe that job
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE \
  MASTER_ADDR MASTER_PORT ${!TORCHELASTIC_@} ${!PET_@} OMPI_ARGV OMPI_COMMAND ${!OMPI_COMM_WORLD_@} \
  ${!OMPI_WORLD_@} OMPI_UNIVERSE_SIZE OMPI_APP_CTX_NUM_PROCS OMPI_FIRST_RANKS OMPI_NUM_APP_CTX \
  OMPI_FILE_LOCATION OMPI_MCA_num_procs OMPI_MCA_initial_wdir OMPI_MCA_ess ${!OMPI_MCA_ess_@} \
  ${!OMPI_MCA_orte_ess_@} OMPI_MCA_orte_hnp_uri OMPI_MCA_orte_local_daemon_uri PMIX_RANK PMIX_NAMESPACE \
  PMIX_HOSTNAME ${!PMIX_SERVER_@} PMIX_SYSTEM_TMPDIR ${!PMIX_BFROP_@} PMIX_GDS_MODULE PMIX_SECURITY_MODE \
  PMIX_VERSION PRTE_LAUNCHED ${!PMI_@} ${!PMI2_@} MPI_LOCALRANKID MPI_LOCALNRANKS ${!PALS_@} ALPS_APP_PE \
  ${!FLUX_TASK_@} FLUX_JOB_SIZE FLUX_JOB_NNODES ${!JSM_NAMESPACE_@} ${!MV2_COMM_WORLD_@} HOROVOD_RANK \
  HOROVOD_SIZE ${!HOROVOD_LOCAL_@} ${!HOROVOD_CROSS_@} ${!HOROVOD_GLOO_RENDEZVOUS_@} SLURM_PROCID SLURM_LOCALID \
  SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_STEPID ${!SLURM_STEP_@} ${!SLURM_SRUN_@} BIGBATCH_STOPPED \
  BIGBATCH_JOINS BIGBATCH_LISTENER

options=(--host "$HOSTS" --map-by slot --stdin none)   # no input: a loop over lines keeps its own
options+=(--bind-to none)   # otherwise each rank decodes and computes on one core
if [ -n "$INTERFACE" ]; then
  options+=(--prtemca oob_tcp_if_include "$INTERFACE" --mca btl_tcp_if_include "$INTERFACE")
  for name in BIGBATCH_INTERFACE GLOO_SOCKET_IFNAME; do options+=(-x "$name=$INTERFACE"); done
  options+=(-x "NCCL_SOCKET_IFNAME==$INTERFACE")   # the second = makes NCCL compare whole names, not prefixes
fi
[ "$(id -u)" -eq 0 ] && options+=(--allow-run-as-root)

exec mpirun "${options[@]}" bigbatch "$@"
