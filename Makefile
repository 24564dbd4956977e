# Every target sets up what it needs in .venv, .venv-vllm or .venv-oracle, once; the second time nothing is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
ORACLE_VENV := .venv-oracle
ORACLE_READY := $(ORACLE_VENV)/.ready

# The one that comes with Python 3.11 takes twice the time: it weighs each wheel of a package that there is.
PIP := pip==26.3

# Two environments may be made at once, and an editable install writes into this directory.
ALONE := $(shell command -v flock > /dev/null && echo flock Makefile)

# Where it is set, every process that the tests start would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

# Which build of PyTorch: cpu, cuda, or auto, which is cpu where no NVIDIA GPU is seen and PyTorch's index can be reached.
TORCH ?= auto

# $(call install,DIRECTORY,LOCK): a virtual environment of the locked packages, with tailrace in it. A module is compiled
# when it is first imported: most never are, and compiling takes longer than all the rest.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; call make PYTHON=python3.11 (or newer)" >&2; exit 1; }
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet $(PIP)
	$(1)/bin/python tools/install_lock.py $(2) --torch $(TORCH)
	$(ALONE) $(1)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(1)/.ready
endef

.PHONY: help setup setup-vllm setup-oracle quickstart test test-long test-vllm test-oracle test-gpu lint types layout check-install check docs bench-trl bench-engine bench-gpu bench-adaptive-tp bench-queue bench-weights bench-pipeline bench-modes bench-algorithms bench-quickstart bench-dispatch bench-elastic bench-serve bench-simulator bench-plan-local bench-workloads bench-breakdown reproduce-papers chaos clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(READY) ## make .venv with the locked packages and tailrace in it

$(READY): requirements.lock pyproject.toml
	$(call install,$(VENV),requirements.lock)

setup-vllm: $(VLLM_READY) ## make .venv-vllm, with vLLM's CPU build and the older packages that it needs

$(VLLM_READY): requirements-vllm.lock pyproject.toml
	$(call install,$(VLLM_VENV),requirements-vllm.lock)

setup-oracle: $(ORACLE_READY) ## make .venv-oracle, with verl and what its algorithms import

$(ORACLE_READY): requirements-oracle.lock pyproject.toml
	$(call install,$(ORACLE_VENV),requirements-oracle.lock)

quickstart: $(READY) ## train SmolLM2-135M on two-number sums, 14 minutes on 2 cores without bf16 instructions
	$(BIN)/tailrace train recipes/quickstart.yaml output_dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S)

test: $(READY) ## the tests, two processes for each core; any warning is an error
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 10

test-long: $(READY) ## the tests, the longest at full length: all rounds of killed processes, a million rows and so on
	TAILRACE_LONG_TESTS=1 $(MAKE) --no-print-directory test

test-vllm: $(VLLM_READY) ## the tests of the vLLM engine
	$(VLLM_VENV)/bin/pytest tests/engine/test_vllm.py tests/engine/test_conformance.py -k vllm

test-oracle: $(ORACLE_READY) ## advantages, losses and gradients beside verl's; ends with one JSON line
	$(ORACLE_VENV)/bin/pytest -rs tests/oracle

test-gpu: $(READY) ## the tests on an NVIDIA GPU, a few minutes; without one they are skipped
	$(BIN)/pytest tests/*/test_cuda.py

lint: $(READY) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy

layout: $(READY) ## figures of the layout and the pages; ends with 1 where a rule is broken
	$(BIN)/python -m tools.layout

check-install: $(READY) ## whether all this installs from PyPI alone; needs the network
	nice $(BIN)/python -m tools.check_install

# check-install waits for PyPI most of the time; of the others, all but the last use one core.
check: ## lint, types, layout, check-install and tests: what CI runs
	@$(MAKE) --no-print-directory --jobs 3 check-install lint types layout test-vllm test-oracle test

docs: $(READY) ## write docs/recipes.md from the schemas, docs/metrics.md from the registers
	$(BIN)/python -m tailrace.config.reference > docs/recipes.md
	$(BIN)/python -m tailrace.registers.reference > docs/metrics.md

bench-trl: $(READY) ## samples/s beside TRL's GRPOTrainer, in an environment of its own
	$(BIN)/python benchmarks/bench_trl.py

bench-engine: $(READY) $(VLLM_READY) ## tokens/s beside vLLM and transformers, TP 2 beside TP 1, group sharing
	$(BIN)/python benchmarks/bench_engine.py

bench-gpu: $(READY) ## tokens/s on an NVIDIA GPU, with CUDA graphs and without, beside transformers
	$(BIN)/python benchmarks/bench_gpu.py

bench-adaptive-tp: $(READY) ## adaptive TP beside DP 2 and TP 2 that stay, on a long-tailed workload
	$(BIN)/python benchmarks/bench_adaptive_tp.py

bench-queue: $(READY) ## the transfer queue beside TransferQueue, in an environment of its own
	$(BIN)/python benchmarks/bench_queue.py

bench-weights: $(READY) ## the transfer of new weights, over a slow link and on one host; the link takes root
	$(BIN)/python benchmarks/weight_transfer.py

bench-pipeline: $(READY) ## the modes of a run, one core for each pool, and the best one beside TRL
	$(BIN)/python benchmarks/bench_pipeline.py

bench-modes: $(READY) ## what each mode learns in equal time and from equally many samples, small model
	$(BIN)/python benchmarks/bench_modes.py

bench-algorithms: $(READY) ## every algorithm on a small model, synchronous and with stale responses
	$(BIN)/python benchmarks/bench_algorithms.py

bench-quickstart: $(READY) ## what the quickstart reaches, and its time, beside the recipe grpo; three seeds
	$(BIN)/python benchmarks/bench_quickstart.py

bench-dispatch: $(READY) ## what knowing lengths gains: two real engines, sixteen in virtual time, recall
	$(BIN)/python benchmarks/bench_dispatch.py

bench-elastic: $(READY) ## runs that add engines by themselves, engines that join and leave: real and virtual ones
	$(BIN)/python benchmarks/bench_elastic.py

bench-serve: $(READY) $(VLLM_READY) ## tokens/s through HTTP, beside the engine's own and vLLM's server
	$(BIN)/python benchmarks/bench_serve.py

bench-simulator: $(READY) ## predicted beside measured: runs here, published serving and trainers; 1,024 devices
	$(BIN)/python benchmarks/bench_simulator.py

bench-plan-local: $(READY) ## the plan for this machine beside all others, each measured: the quickstart
	$(BIN)/python benchmarks/bench_plan_local.py

bench-workloads: $(READY) ## replays beside their runs, shipped workloads beside their sources, in TAILRACE_DATA
	$(BIN)/python benchmarks/bench_workloads.py

bench-breakdown: $(READY) ## what a run pays for observe.breakdown, as a part of a step
	$(BIN)/python benchmarks/breakdown_overhead.py

reproduce-papers: $(READY) ## docs/papers.md: figures of four papers in TAILRACE_DATA beside simulated ones, minutes
	$(BIN)/python benchmarks/reproduce_papers.py

chaos: $(READY) ## 100 rounds of runs that lose a process of any kind, each checked, 25 minutes on 2 cores
	$(BIN)/python -m tests.chaos --rounds 100

clean: ## remove what was built and installed, but no run
	rm -rf $(VENV) $(VLLM_VENV) $(ORACLE_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
