#!/usr/bin/env bash
# Build a wheel of Horovod 0.28.1 for the torch that `python` imports: with MPI, and with NCCL if this torch has CUDA.
# Its sources state C++14, which a recent torch refuses: the patch below is all that they need. First install torch, MPI,
# cmake, g++, make, and Python's setuptools, wheel and headers; for GPUs, set CUDA_HOME and HOROVOD_NCCL_HOME.
#   bash examples/build_horovod.sh [FOLDER]     writes the wheel into FOLDER (default: the work folder)
set -euo pipefail
wheels=$(realpath "${1:-.}") version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
pip() { python -m pip "$@"; }
echo "horovod==$version --hash=sha256:$sha256" \
  | pip download --no-cache-dir --no-deps --no-build-isolation --no-binary :all: -r /dev/stdin
tar xf "horovod-$version.tar.gz" --strip-components 1
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' CMakeLists.txt horovod/torch/CMakeLists.txt
if python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then export HOROVOD_GPU_OPERATIONS=NCCL; fi
MAKEFLAGS="-j$(nproc)" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
  pip wheel --no-cache-dir --no-deps --no-build-isolation -w "$wheels" .
