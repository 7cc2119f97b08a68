# Everything a developer types. Python packages go into .venv, build products into build/, results into out/.

PYTHON ?= python3
JOBS ?= $(shell nproc)

BIN := $(CURDIR)/.venv/bin
BUILD := build/dev
SETUP := .venv/.setup
CLIENTS := .venv-clients/.setup
TEST_DEPENDENCIES := $(BUILD)/.test-dependencies

export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(BIN):$(PATH)

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help setup build demo demo-tune bench-cpu bench-state examples
.PHONY: test test-cpp test-python test-consumer test-wheel test-clients test-asan test-tsan lint format clean

help: ## this list
	@grep -E '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

setup: $(SETUP) ## create .venv with everything pinned in requirements-dev.txt

$(SETUP): requirements-dev.txt requirements-parity.txt tools/setup.sh
	@bash tools/setup.sh $(PYTHON)
	@touch $@

$(BUILD)/build.ninja: $(SETUP)
	@cmake --preset dev
	@touch $@

build: $(BUILD)/build.ninja ## the library, the Python extension, tests, benchmarks and examples
	@cmake --build $(BUILD) -j $(JOBS) -- -k 0 --quiet

demo: $(BUILD)/build.ninja ## train a small GPT with Muon and with AdamW, in C++ and in Python
	@cmake --build $(BUILD) -j $(JOBS) --target muon_python train_gpt -- --quiet
	@python tools/demo.py

demo-tune: $(BUILD)/build.ninja ## choose the demo's AdamW learning rate
	@cmake --build $(BUILD) -j $(JOBS) --target muon_python train_gpt -- --quiet
	@python tools/demo_tune.py

bench-cpu: $(BUILD)/build.ninja ## compare with torch.optim.Muon, a plain loop and AdamW on this CPU
	@cmake --build $(BUILD) -j $(JOBS) --target muon_python -- --quiet
	@python benchmarks/python/bench_cpu.py

bench-state: $(BUILD)/build.ninja ## train the demo's model with int8, int4 and fp8 momentum; bytes, step times, peak memory
	@cmake --build $(BUILD) -j $(JOBS) --target muon_python -- --quiet
	@python benchmarks/python/state.py

$(CLIENTS): requirements-clients.txt tools/setup_clients.sh $(SETUP)
	@bash tools/setup_clients.sh
	@touch $@

examples: $(BUILD)/build.ninja $(CLIENTS) ## train with qkan, neuraloperator, transformers, ...; pictures in out/examples
	@cmake --build $(BUILD) -j $(JOBS) --target muon_python digits -- --quiet
	@.venv-clients/bin/python tools/clients.py

test: test-cpp test-python test-consumer test-wheel lint ## everything below but the sanitizers

$(TEST_DEPENDENCIES): $(BUILD)/build.ninja tools/install_test_dependencies.sh
	@bash tools/install_test_dependencies.sh
	@cmake --preset dev >/dev/null
	@touch $@

test-cpp: $(TEST_DEPENDENCIES) build ## GoogleTest
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

test-python: build ## pytest
	@python -m pytest

test-consumer: build ## a project outside this tree that uses the installed package
	@bash tools/test_consumer.sh

test-wheel: $(SETUP) ## a wheel, in a clean virtual environment
	@bash tools/test_wheel.sh

test-clients: $(BUILD)/build.ninja $(CLIENTS) ## the examples with other frameworks; not part of `make test`
	@cmake --build $(BUILD) -j $(JOBS) --target muon_python digits -- --quiet
	@.venv-clients/bin/python -m pytest tests/clients

test-asan test-tsan: test-%: $(TEST_DEPENDENCIES) ## GoogleTest under sanitizers
	@cmake --preset $* >/dev/null
	@cmake --build build/$* -j $(JOBS) --target muon_tests -- --quiet
	@ctest --test-dir build/$* --output-on-failure --no-tests=error

lint: build ## format, ruff, mypy, clang-tidy of what changed
	@python tools/lint.py

format: $(SETUP) ## rewrite the sources to the project's format
	@python tools/lint.py --fix

clean: ## remove build products and results, keep .venv
	rm -rf build out dist
