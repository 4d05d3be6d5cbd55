# zero_topo: `make demo` trains the example, `make test` checks everything. `make help` lists the rest.

PYTHON ?= python3
RANKS ?= 8
K ?=
ARGS ?=
STAGE ?=
PYTEST_ARGS ?=
# Where pip looks for torch besides its usual index. Without an NVIDIA GPU, the much smaller CPU builds if they can be
# reached; for an AMD GPU say TORCH_INDEX=https://download.pytorch.org/whl/rocm<version>.
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0
# DeepSpeed's ops that ranks of long tests, and DeepSpeed's own tests, would otherwise compile when they first need them.
DEEPSPEED_OPS := ShareMemCommBuilder
DEEPSPEED_TEST_OPS := FusedAdamBuilder CPUAdamBuilder
# What the GPU's machine must have beside Python and torch; there is no wheel of DeepSpeed to download.
GPU_WHEELS := .gpu_wheels
GPU_PYTHON ?= 3.12
GPU_NEEDS := 'setuptools>=77' wheel ninja pydantic hjson msgpack einops py-cpuinfo psutil numpy tqdm rich typer \
	matplotlib 'pytest>=9' hypothesis expecttest
PINNED_DEEPSPEED := deepspeed==0.19.8
CPU_INDEX := https://download.pytorch.org/whl/cpu

VENV := $(CURDIR)/.venv
STAMP := $(VENV)/.set-up
TOOLS := $(VENV)/.tools
KERNELS := $(VENV)/.kernels
# Extras of the package that go with it: the demo does without the tools of the tests, which take a core for 40 seconds.
comma := ,
EXTRAS := $(if $(filter demo,$(MAKECMDGOALS)),cli$(comma)plot,dev)
GPU_STAMP := $(VENV)/.set-up-for-gpu
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
FREE_PORT = $$($(VENV)/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# Ranks of the demo and the tests are processes on this machine's CPU, one thread each.
DS_ACCELERATOR ?= cpu
OMP_NUM_THREADS ?= 1
GLOO_SOCKET_IFNAME ?= lo
TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions
export PATH := $(VENV)/bin:$(PATH)
export DS_ACCELERATOR OMP_NUM_THREADS GLOO_SOCKET_IFNAME TORCH_EXTENSIONS_DIR

.PHONY: help release-check test-versions setup demo ops test test-workers test-programs test-fast test-long test-long-workers test-long-programs test-long-launches test-launcher test-deepspeed test-hazards test-coverage deepspeed-ops gpu-wheels gpu-needs gpu-setup gpu-check lint format docs clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make demo                    train the example on 8 ranks of this CPU for 25 seconds, then print its report (ARGS="--steps 50")'
	@echo 'make test                    ruff, mypy and every test that does not take long'
	@echo 'make test-long               those that do: CONTRIBUTING.md lists them by kind; more examples'
	@echo 'make test-fast               the tests that start no launcher or compiler (unit, ranks)'
	@echo 'make test-launcher K=name    the tests of tests/launcher that match, on RANKS ranks of one launch'
	@echo 'make test-hazards            break the package in each way of tests/hazards.md: a test must fail'
	@echo 'make test-coverage           which lines units, ranks and launches run, and which tests run each (.coverage)'
	@echo 'make gpu-check STAGE=n       the first hour on a GPU, or stand-ins on the CPU; without STAGE all seven stages'
	@echo 'make gpu-wheels              what that needs on a machine without a network'
	@echo 'make test-versions           seam, units, ranks, a launch with the oldest, newest, pinned torch and DeepSpeed'
	@echo 'make test-deepspeed DIR=...  DeepSpeed'"'"'s own stage-3 tests from its checkout, under the hook, half an hour'
	@echo 'make release-check           build sdist and wheel, install them elsewhere, use them, uninstall them'
	@echo 'make lint                    ruff and mypy'
	@echo 'make format                  ruff format'
	@echo 'make docs                    the pages of docs/ in site/; an error for a broken link'
	@echo 'make setup                   only make the environment: .venv and .torch_extensions'
	@echo 'make clean, make distclean   remove what tests and builds leave; remove the environment too'

setup: $(TOOLS)

# The packages, and GPU kernels that tests run on the CPU, have one core; the other has the bytecode of what ranks import,
# which else each of them compiles, our op, and the bytecode of the tests.
$(STAMP): setup.py pyproject.toml
	@echo '[1/4] environment in .venv'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --no-compile 'setuptools>=77' wheel ninja
	@echo '[2/4] torch $(TORCH_VERSION) (first: DeepSpeed looks at it when it is installed)'
	@index='$(TORCH_INDEX)'; \
	if [ -z "$$index" ] && ! command -v nvidia-smi >/dev/null && curl -sfIm 5 $(CPU_INDEX)/ >/dev/null 2>&1; then \
		index=$(CPU_INDEX); \
	fi; \
	$(PIP) install --quiet --no-compile torch==$(TORCH_VERSION) $${index:+--extra-index-url $$index}
	@echo '[3/4] DeepSpeed'
	@$(PIP) install --quiet --no-compile --no-build-isolation $(PINNED_DEEPSPEED)
	@echo '[4/4] zero_topo[$(EXTRAS)], and its kernels for the CPU (a minute)'
	@log=$$(mktemp); \
	{ python -c 'import zero_topo.examples.train_gpt, torch._inductor.compile_fx' >/dev/null 2>&1; \
	python -c 'from op_builder.builder import CPUBuilder; CPUBuilder().build()' >$$log 2>&1 || exit 1; \
	test $(EXTRAS) != dev || pytest --collect-only tests >/dev/null 2>&1; true; } & kernels=$$!; \
	$(PIP) install --quiet --no-compile --no-build-isolation -e '.[$(EXTRAS)]' || exit 1; \
	test $(EXTRAS) != dev || python -c 'from op_builder import source_dir; from tests.kernels.gpu_library import bound; \
		bound(source_dir())' >/dev/null 2>&1; \
	wait $$kernels || { tail -20 $$log; echo 'are g++ and the headers of Python installed?'; exit 1; }; rm -f $$log
	@test -n '$(TORCH_INDEX)' || command -v nvidia-smi >/dev/null || touch $(KERNELS)  # else `ops` compiles for the GPU
	@echo $(EXTRAS) >$@

$(TOOLS): $(STAMP)
	@grep -qx dev $(STAMP) || { echo 'tools of the tests'; $(PIP) install --quiet --no-compile --no-build-isolation -e '.[dev]'; }
	@echo dev >$(STAMP)
	@touch $@

demo: $(STAMP)
	@deepspeed --quiet --no_local_rank --num_accelerators $(RANKS) --master_port $(FREE_PORT) \
		zero_topo/examples/train_gpt.py --deepspeed_config configs/demo.json $(or $(ARGS),--seconds 25)
	@echo
	@echo 'You saw $(RANKS) processes train as the ranks of 2 nodes x 2 GPUs x 2 GCDs, and what each of them sent and stored.'
	@echo 'Go on with a config of a large job, and with the plans of a model of your size:'
	@echo '    .venv/bin/zero-topo check configs/frontier.json --world-size 384'
	@echo '    .venv/bin/zero-topo plan --params 20B --machine frontier --nodes 48'

# Wheels for a machine with a GPU and its own torch, but no network: make them where there is one, take them along.
gpu-wheels: $(STAMP)
	@mkdir -p $(GPU_WHEELS)
	@$(PIP) download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		$(foreach tag,2014 _2_17 _2_27 _2_28,--platform manylinux$(tag)_x86_64) --dest $(GPU_WHEELS) $(GPU_NEEDS)
	@$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir $(GPU_WHEELS) $(PINNED_DEEPSPEED)
	@du -sh $(GPU_WHEELS)

gpu-needs:
	@echo "$(GPU_NEEDS) $(PINNED_DEEPSPEED)"

# One GPU, or stand-ins on the CPU. Needs no network: without `make setup` it takes torch from $(PYTHON), and the wheels.
# If $(PYTHON) is itself of a virtual environment, --system-site-packages would show the packages of that one's base, so
# .venv gets the path of $(PYTHON)'s own packages, pip among them.
gpu-setup:
	@test ! -e $(STAMP) || $(MAKE) --no-print-directory $(TOOLS)
	@test -e $(STAMP) || test -e $(GPU_STAMP) || { rm -rf $(VENV) \
		&& outer=$$($(PYTHON) -c 'import site; [print(f"import site; site.addsitedir({p!r})") for p in site.getsitepackages()]') \
		&& $(PYTHON) -m venv --without-pip $(VENV) \
		&& echo "$$outer" > $$($(VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/outer.pth \
		&& $(PIP) install --quiet --no-index --find-links $(GPU_WHEELS) $(GPU_NEEDS) $(PINNED_DEEPSPEED) \
		&& $(PIP) install --quiet --no-index --no-build-isolation --no-deps -e . && touch $(GPU_STAMP); }

gpu-check: gpu-setup
	@python -m tests.gpu $(STAGE)

lint: $(TOOLS)
	ruff check .
	mypy

format: $(TOOLS)
	ruff format .
	ruff check --fix .

docs: $(TOOLS)
	@test -x $(VENV)/bin/mkdocs || $(PIP) install --quiet --no-build-isolation -e '.[docs]'
	@python -m benchmarks.pictures docs/pictures
	@python -m tests.tables
	@NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict

# After a change of csrc: compiles before the tests, which have time limits.
ops: $(TOOLS)
	@$(MAKE) --no-print-directory --silent $(KERNELS)

$(KERNELS): $(wildcard csrc/* op_builder/*.py)
	@zero-topo build >/dev/null 2>&1 || true
	@touch $@

# Two workers for what runs in one process, and beside them programs and launches, which wait for each other's ranks most
# of the time, and mypy, which has one core; their output comes when they end.
test: ops
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint test-workers test-programs

test-workers: ops
	pytest $(PYTEST_ARGS) --numprocesses 2 --dist worksteal -m 'not long' tests/unit tests/ranks tests/kernels

test-programs: ops
	pytest $(PYTEST_ARGS) -m 'not long' tests/e2e

# Each part runs by itself too; with make's flag -k also where an earlier one fails.
test-long: test-long-workers test-long-programs test-long-launches

test-long-workers: ops
	pytest $(PYTEST_ARGS) --numprocesses 2 --dist worksteal --hypothesis-profile=thorough tests/unit tests/ranks tests/kernels

test-long-programs: deepspeed-ops
	pytest $(PYTEST_ARGS) -m long tests/e2e

test-long-launches: ops
	pytest $(PYTEST_ARGS) tests/e2e/test_launcher_suite.py --launcher-ranks=8 --launcher-k=eight_ranks
	pytest $(PYTEST_ARGS) tests/e2e/test_launcher_suite.py \
		--launcher-k='long and not eight_ranks and not test_feature_under_scheme'
	python -m tests.matrix

# A launch that was killed while it loaded a compiled op leaves a lock that the next one would wait for.
deepspeed-ops: ops
	@rm -f $(TORCH_EXTENSIONS_DIR)/*/lock
	@for op in $(DEEPSPEED_OPS); do python -c "from deepspeed.accelerator import get_accelerator as a; \
		a().create_op_builder('$$op').load(verbose=False)" >/dev/null || exit 1; done

test-fast: ops
	pytest $(PYTEST_ARGS) --numprocesses 2 --dist worksteal -m 'not long' tests/unit tests/ranks

test-launcher: ops
	pytest $(PYTEST_ARGS) tests/e2e/test_launcher_suite.py --launcher-k='$(K)' --launcher-ranks=$(RANKS)

test-hazards: ops
	python -m tests.hazards $(K)

$(VENV)/bin/coverage: $(TOOLS)
	@$(PIP) install --quiet --no-build-isolation -e '.[coverage]'

test-coverage: ops $(VENV)/bin/coverage
	pytest $(PYTEST_ARGS) --numprocesses 2 --dist worksteal -m 'not long' --cov=zero_topo --cov-context=test \
		--cov-report= tests/unit tests/ranks tests/kernels
	pytest $(PYTEST_ARGS) --cov=zero_topo --cov-append --cov-report=term:skip-covered tests/e2e/test_launcher_suite.py \
		tests/e2e/test_mpi.py

# DeepSpeed's tests have a time limit, in which two cores do not compile its Adam: minutes, once.
test-deepspeed: DEEPSPEED_OPS += $(DEEPSPEED_TEST_OPS)
test-deepspeed: deepspeed-ops
	@python -m tests.deepspeed_suite '$(DIR)' $(ARGS)

release-check: ops
	@python -m tests.release

test-versions: ops
	@python -m tests.versions $(K)

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean
	rm -rf .venv .torch_extensions
