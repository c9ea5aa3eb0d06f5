#!/bin/bash
# Ranks on your own hosts by Open MPI's mpirun (5.x), for those who keep their own command line.
#   HOSTS=n0:8,n1:8 ./mpirun.sh train --config imagenet/resnet50_8k
# The hosts need the same bigbatch at the same path, and ssh without a password between them.
# To save a checkpoint and stop: kill -USR1 of mpirun. (Its Ctrl-C leaves no time for one.)
HOSTS=${HOSTS:-localhost:2}
INTERFACE=${INTERFACE:-}   # between the hosts, such as eth0 or ib0,ib1; empty: mpirun and bigbatch choose

command -v mpirun >/dev/null || { echo "mpirun is not installed here: pip install 'bigbatch[mpi]'" >&2; exit 1; }

options=(--host "$HOSTS" --map-by slot)
options+=(--bind-to none)   # else each rank would decode and compute on one core
if [ -n "$INTERFACE" ]; then
  options+=(--prtemca oob_tcp_if_include "$INTERFACE" --mca btl_tcp_if_include "$INTERFACE")
  for name in BIGBATCH_INTERFACE GLOO_SOCKET_IFNAME; do options+=(-x "$name=$INTERFACE"); done
  options+=(-x "NCCL_SOCKET_IFNAME==$INTERFACE")   # with = it is the whole name, without its beginning
fi
[ "$(id -u)" -eq 0 ] && options+=(--allow-run-as-root)

exec mpirun "${options[@]}" bigbatch "$@"
