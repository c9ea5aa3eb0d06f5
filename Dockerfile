# hadolint global ignore=DL3008,DL3013,DL4006,SC2086
# Why: any base, so no versions of Debian's packages; constraints.txt pins pip's; a broken pipe of grep -q is success;
# $need and $mpi are lists.
# bigbatch and its dependencies, for any Debian or Ubuntu base with Python 3.10 or later, or for a base's own Python.
# The wheels contain CUDA: for GPUs the host needs only the driver and NVIDIA's container toolkit. The image works
# without its entrypoint and variables, for any user, and read-only. To build and run it, see docs/install.md:
#   docker build -t bigbatch .
# the digest covers all platforms; docker buildx imagetools inspect debian:bookworm-slim prints the current one
ARG BASE_IMAGE=debian:bookworm-slim@sha256:abd67ffcfa541b485a3dff59865ab629aa048a6c613e639d36e7456b0b229241

# python: an environment that also uses the base's packages, such as its torch; user 1000; RDMA libraries, without which
# NCCL silently falls back to TCP; the compiler and headers for torch.compile
FROM ${BASE_IMAGE} AS python
# hadolint ignore=DL3002
USER 0
ENV PATH=/opt/venv/bin:$PATH
RUN set -e; export DEBIAN_FRONTEND=noninteractive; need=; apt-get update; \
    python3 -c 'import ensurepip, sys; assert sys.version_info >= (3, 10)' 2>/dev/null || need='python3 python3-venv'; \
    ldconfig -p | grep -q libibverbs.so.1 || need="$need libibverbs1 ibverbs-providers"; \
    command -v g++ >/dev/null || need="$need g++"; \
    headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true); \
    [ -f "$headers/Python.h" ] || need="$need python3-dev"; \
    apt-get install -y --no-install-recommends ca-certificates $need; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log; \
    python3 -m venv --system-site-packages /opt/venv; \
    getent group 1000 >/dev/null || groupadd --gid 1000 bigbatch; \
    getent passwd 1000 >/dev/null || useradd --uid 1000 --gid 1000 --no-create-home --home-dir /home/bigbatch bigbatch; \
    install -d -o 1000 -g 1000 /home/bigbatch
# like make, a pip that checks the hashes of constraints.txt; packages of the base stay, without a hash
WORKDIR /opt/bigbatch
COPY constraints.txt .ci/keep_base.py ./
RUN set -e; sed -n '/^pip==/,/[^\\]$/p' constraints.txt | pip install --no-cache-dir -r /dev/stdin; \
    python keep_base.py constraints.txt >kept.txt; \
    printf '[global]\nno-require-hashes = true\nconstraint = %s\nbuild-constraint = %s\n' \
      "$PWD/kept.txt" "$PWD/kept.txt" >/opt/venv/pip.conf

# torch: a layer of several GB, which changes only with torch's version
FROM python AS torch
ARG NCCL_VERSION=
RUN pip install --no-cache-dir torch torchvision \
 && if [ -n "$NCCL_VERSION" ]; then \
      pip show --quiet nvidia-nccl-cu13 || { echo "NCCL_VERSION: this torch uses the NCCL of its base"; exit 1; }; \
      sed -i "/^nvidia-nccl-cu13==/,/[^\\\\]\$/c nvidia-nccl-cu13==$NCCL_VERSION" kept.txt; \
      pip install --no-cache-dir --no-deps "nvidia-nccl-cu13==$NCCL_VERSION"; \
    fi \
 && python -c 'import torch; print("torch", torch.__version__)'

# dependencies: a layer that stays the same if only bigbatch's code changes
FROM torch AS dependencies
ARG DALI=1
ARG MPI=wheel
ARG EXTRAS=
COPY setup.py pyproject.toml ./
COPY bigbatch/__init__.py bigbatch/
RUN set -e; touch README.md; extras=tune,verify,export,energy${EXTRAS:+,$EXTRAS}; \
    case $DALI in 0) ;; 1) extras=$extras,dali ;; *) echo "DALI is 0 or 1, not $DALI"; exit 1 ;; esac; \
    case $MPI in \
      none) ;; \
      wheel) extras=$extras,mpi ;; \
      system) mpirun --version || { echo "MPI=system: the base has no mpirun; MPI=wheel brings one"; exit 1; }; \
              mpi=mpi4py ;; \
      *) echo "MPI is wheel, system or none, not $MPI"; exit 1 ;; \
    esac; \
    pip install --no-cache-dir ".[$extras]" $mpi; \
    pip uninstall --yes bigbatch; \
    rm -rf build bigbatch ./*.egg-info ./*.md setup.py pyproject.toml

# compiled: wheels of Horovod and apex, or nothing. The compilers stay in this stage; nvcc is from PyPI, of torch's CUDA,
# or the base's. APEX is 0, 1 or a commit: a host without GPUs compiles for TORCH_CUDA_ARCH_LIST
FROM dependencies AS compiled
ARG HOROVOD=0
ARG APEX=0
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG TORCH_CUDA_ARCH_LIST="7.5 8.0 9.0 10.0"
WORKDIR /tmp/compiled
COPY examples/build_horovod.sh ./
RUN set -e; mkdir /wheels; \
    case $HOROVOD in 0|1) ;; *) echo "HOROVOD is 0 or 1, not $HOROVOD"; exit 1 ;; esac; \
    [ "$HOROVOD$APEX" != 00 ] || exit 0; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends cmake g++ git make python3-dev; \
    pip install --no-cache-dir ninja packaging setuptools wheel; \
    sed -i /build-constraint/d /opt/venv/pip.conf; \
    nvidia=$(echo /opt/venv/lib/python3*/site-packages/nvidia); \
    if [ -d "$nvidia/cu13" ]; then \
      pip install --no-cache-dir "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" \
        "nvidia-cuda-cccl==13.0.*"; \
      ln -s lib "$nvidia/cu13/lib64"; \
      ln -s libcudart.so.13 "$nvidia/cu13/lib/libcudart.so"; \
      ln -s libnccl.so.2 "$nvidia/nccl/lib/libnccl.so"; \
      export CUDA_HOME="$nvidia/cu13" CUDAToolkit_ROOT="$nvidia/cu13" HOROVOD_NCCL_HOME="$nvidia/nccl"; \
      export PATH="$CUDA_HOME/bin:$PATH"; \
    fi; \
    if [ "$HOROVOD" = 1 ]; then bash build_horovod.sh /wheels; fi; \
    case $APEX in 0) exit 0 ;; 1) ;; *) APEX_COMMIT=$APEX ;; esac; \
    command -v nvcc || { echo "APEX needs CUDA's compiler, which neither this torch nor the base has"; exit 1; }; \
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
      pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels \
        "git+https://github.com/NVIDIA/apex@$APEX_COMMIT"

# wheel: built from this checkout
FROM python AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps -w /wheels .

# sshd: for Kubernetes' MPI operator. Each pod makes its own host keys (ssh-keygen -A), and clients do not verify them
FROM dependencies AS runtime
ARG SSHD=0
RUN set -e; case $SSHD in 0) exit 0 ;; 1) ;; *) echo "SSHD is 0 or 1, not $SSHD"; exit 1 ;; esac; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openssh-server openssh-client; \
    rm -rf /etc/ssh/ssh_host_* /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log; \
    mkdir -p /run/sshd; \
    printf 'PasswordAuthentication no\nStrictModes no\nSetEnv PATH=%s LD_LIBRARY_PATH=%s\n' \
      "$PATH" "$LD_LIBRARY_PATH" >/etc/ssh/sshd_config.d/bigbatch.conf; \
    printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
      >/etc/ssh/ssh_config.d/bigbatch.conf
ARG REVISION=
RUN --mount=type=bind,from=compiled,source=/wheels,target=/compiled \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=.ci/sbom.py,target=/sbom.py \
    set -e; \
    if [ -n "$(ls /compiled)" ]; then pip install --no-cache-dir /compiled/*.whl; fi; \
    pip install --no-cache-dir --no-deps /wheels/*.whl; \
    for folder in /opt/venv/lib/python3*/site-packages/bigbatch/comm/tuning; do echo "$REVISION" >"$folder/built_from.txt"; done; \
    ln -s /opt/venv/bin/bigbatch /usr/local/bin/bigbatch; \
    python /sbom.py >sbom.cdx.json

ENV PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /home/bigbatch
USER 1000:1000
CMD ["bigbatch", "--help"]

# test: built with --target test; runs the tests inside the image, on the machine where it will be used
FROM runtime AS test
USER 0
WORKDIR /opt/bigbatch
RUN pip install --no-cache-dir pytest pytest-timeout hypothesis
COPY pyproject.toml ./
COPY docs docs
COPY examples examples
COPY tests tests
USER 1000:1000
CMD ["python", "-m", "pytest", "tests/laws", "tests/parallel"]

# images based on this one may install other versions
FROM runtime
USER 0
RUN rm /opt/venv/pip.conf
USER 1000:1000
ARG VERSION=
ARG REVISION=unknown
LABEL org.opencontainers.image.title="bigbatch" \
      org.opencontainers.image.description="Train ImageNet with very large batches on clusters of GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
