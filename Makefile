# From a bare machine (Python 3.10 or later; no root) to a trained model: make train. Everything goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
SYSTEM := $(shell uname -s)
# One rank per GPU, two where there is none. The batch of quickstart has room for 1, 2 or 4 ranks.
RANKS ?= $(shell $(BIN)/python -c 'import torch; n = torch.cuda.device_count(); print(4 if n > 3 else 1 if n == 1 else 2)')
# Further options, such as TRAIN_OPTIONS='--run.epochs 2'. DALI exists for Linux only.
TRAIN_OPTIONS ?= $(if $(filter-out Linux,$(SYSTEM)),--data.loader torchvision)
# Containers often set this. Without compiled files each process of the tests would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=
# CUDA=12: for NVIDIA drivers before 580 (docs/install.md). torch then comes from TORCH_INDEX and is not replaced.
CUDA ?= 13
TORCH_INDEX ?= https://download.pytorch.org/whl/cu126
OLD_CUDA := $(filter 12,$(CUDA))
CONSTRAINTS := $(if $(OLD_CUDA),.venv/constraints.txt,constraints.txt)
# pip checks the hashes of constraints.txt; this checkout has no hash, so it must not require one
HASHED := --no-require-hashes -c $(CONSTRAINTS)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: train test test-unit test-ranks test-all test-long test-long-unit test-long-ranks test-weekly cluster \
  cluster-links cluster-jobs faults proofs reading figures gpu-prototypes figures-age test-cluster check lint docs format lock clean

train: .venv/ready
	$(BIN)/bigbatch data generate data/shapes
	@# remove a finished run; an interrupted run continues
	@if [ -e runs/quickstart/summary.json ]; then rm -r runs/quickstart; fi
	$(BIN)/bigbatch launch mpirun --ranks $(RANKS) -- train --config quickstart $(TRAIN_OPTIONS)

# Each law in a short form, and the fast unit tests: at most 8 minutes on 2 cores. Three unit tests run at the same time,
# and two of the others, because most of those start several ranks.
test: test-unit test-ranks

test-unit: .venv/ready
	$(PYTEST) tests/unit -n 3 --dist worksteal -m "not long"

test-ranks: .venv/ready
	$(PYTEST) tests/laws tests/parallel -n 2 --dist worksteal -m "not long"

# The other tests: full forms, compilers, benchmarks, launchers. Only files with long tests are collected. Jobs of ranks
# wait half of their time, so four run at the same time; tests of one file share reference runs, hence loadfile.
test-long: test-long-unit test-long-ranks

test-long-unit: .venv/ready
	$(PYTEST) $$(grep -rl --include='test_*.py' 'mark\.long' tests/unit) -n 3 --dist worksteal -m "long and not weekly"

test-long-ranks: .venv/ready
	$(PYTEST) tests/laws tests/parallel -n 4 --dist loadfile -m "long and not weekly"

# tests of minutes for code that changes seldom: once a week, and before a release (decision 117)
test-weekly: .venv/ready
	$(PYTEST) tests/unit tests/laws tests/parallel -n 3 -m weekly

test-all: test test-long test-weekly

# Disturb short runs at random moments. Each fault must be named, and the final weights must be equal bit for bit.
FAULTS ?= run --seed 7 --trials 20
faults: .venv/ready
	PYTHONPATH=tests/support $(BIN)/python -m faults $(FAULTS)

# Compare the final weights of short jobs with those of another commit, bit for bit: make proofs AGAINST=COMMIT
proofs: .venv/ready
	$(BIN)/python tests/proofs.py $(AGAINST)

# What one reads to follow a module, and what a run enters; tests/unit/test_size.py holds the limits.
reading: .venv/ready
	$(BIN)/python tests/support/own_imports.py trainer.train trainer.step.loop comm.gradients.reducer trainer.optim.lars
	$(BIN)/bigbatch data generate data/shapes
	@folder=$$(mktemp -d) && $(BIN)/python tests/support/traced_run.py data/shapes $$folder 2>/dev/null | tail -n 1; \
	  rm -r $$folder

# emulated nodes on this machine: needs iproute2, and root or a kernel that lets users make namespaces;
# real Slurm jobs on them: needs root, and apt-get install slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge
cluster: cluster-links cluster-jobs

# tests that measure nodes and links run alone; the others mostly wait, so two run at the same time
cluster-links: .venv/ready
	$(PYTEST) tests/cluster -rs -m alone

cluster-jobs: .venv/ready
	$(PYTEST) tests/cluster -rs -m "not alone" -n 2 --dist loadfile

test-cluster: cluster

check: lint
	$(PYTEST) tests/unit -n 3 -m "not slow and not long"

lint: .venv/ready docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	$(if $(filter Linux,$(SYSTEM)),$(BIN)/hadolint Dockerfile)

# build a searchable site of the pages; a dead link or anchor, or a page that README does not name, is an error
docs: .venv/ready
	$(BIN)/python -m sphinx -qnEW --keep-going -c docs -d build/doctrees . build/site
	cp build/site/README.html build/site/index.html

format: .venv/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Write constraints.txt with the newest versions that fit: hashes of all files, for all platforms and Python from 3.10.
# LOCK= keeps the present versions, if only setup.py or .ci/lock.in changed.
LOCK ?= --upgrade
lock: .venv/ready
	$(BIN)/python -m pip install --quiet $(HASHED) uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --allow-unsafe \
	  --custom-compile-command "make lock" --default-index https://pypi.org/simple --no-emit-index-url $(LOCK) \
	  --extra dali --extra mpi --extra energy --extra wandb --extra mlflow --extra dev setup.py .ci/lock.in -o constraints.txt

# write the figures of pages and recipes from their records; list measurements without a record
figures: .venv/ready
	$(BIN)/python tests/support/figures.py

# values of kernels that no run uses yet, by Triton's interpreter, and their machine code for an H200 (docs/gpu.md)
gpu-prototypes: .venv/ready
	$(BIN)/python -m benchmarks.gpu.suite.prototypes --out benchmarks/results/prototypes-cpu.json

# how much of the code behind each measured figure is newer, and the command that measures it again, or its script's commit
figures-age: .venv/ready
	$(BIN)/python tests/support/figures_age.py

# keeps data/ and runs/
clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -r {} +

# Debian's Python has no pip without the package python3-venv, which needs root: then fetch pip.
.venv/ready: constraints.txt setup.py .ci/fetch_pip.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "bigbatch needs Python 3.10 or later; name one by make PYTHON=python3.12"; exit 1; }
	if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv .venv; \
	else $(PYTHON) -m venv --without-pip .venv && $(BIN)/python .ci/fetch_pip.py; fi
	sed -n '/^pip==/,/[^\\]$$/p' constraints.txt | $(BIN)/python -m pip install --quiet -r /dev/stdin
	$(if $(OLD_CUDA),$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) torch torchvision)
	$(if $(OLD_CUDA),$(BIN)/python .ci/keep_base.py constraints.txt >$(CONSTRAINTS))
	$(BIN)/python -m pip install --quiet $(HASHED) --build-constraint constraints.txt -e '.[$(if $(OLD_CUDA),dali-cuda12,dali),mpi,dev]'
	@touch $@
