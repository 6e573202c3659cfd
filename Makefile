# What CI runs, and nothing else. TQ_PYTHON=/path/to/python uses an environment of your own instead of making .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
unexport PYTHONDONTWRITEBYTECODE # many processes import torch and vLLM: let the first one keep what it compiled

ifdef TQ_PYTHON
PYTHON := $(TQ_PYTHON)
READY :=
else
PYTHON := .venv/bin/python
READY := .venv/.stamps/tq-offload
endif
BIN := $(dir $(PYTHON))
ifdef TQ_KVPRESS_PYTHON
KVPRESS_PYTHON := $(TQ_KVPRESS_PYTHON)
KVPRESS_READY :=
else
KVPRESS_PYTHON := .venv-kvpress/bin/python
KVPRESS_READY := .venv-kvpress/.stamps/ready
endif
SOURCES := $(wildcard tq_offload connectors tests benchmarks scripts tools)
KVPRESS_TESTS := tests/kv_cache tests/press
# With transformers 5.19 and a Redis server; the rest of tests/kv_cache runs beside KVPress and with every version there.
MAIN_TESTS := $(filter-out $(KVPRESS_TESTS) tests/upstream tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) \
	tests/kv_cache/test_prefix_process.py tests/kv_cache/test_architectures.py

.PHONY: help env env-kvpress demo demo-short demo-tiers demo-tiers-short bench-codec bench-put bench-press bench-quality demo-press test test-kvpress test-kvpress-versions check format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-21s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(READY) ## Make .venv with torch, vLLM for CPU, LMCache and the tools (about 3 minutes, 3 GB; skipped when it is there)

.venv/.stamps/tq-offload: scripts/setup_env.sh scripts/env_lib.sh scripts/constraints.txt pyproject.toml
	scripts/setup_env.sh .venv
	@touch $@

env-kvpress: $(KVPRESS_READY) ## Make .venv-kvpress with torch, kvpress and the tools (kvpress and LMCache cannot share an environment)

.venv-kvpress/.stamps/ready: scripts/setup_kvpress_env.sh scripts/env_lib.sh scripts/constraints-kvpress.txt pyproject.toml
	scripts/setup_kvpress_env.sh .venv-kvpress
	@touch $@

demo: $(READY) ## Real vLLM and LMCache: bytes on disk and time to first token for naive, fp8 and turboquant (DEMO_ARGS="--restart --json out.json")
	$(PYTHON) -m benchmarks.demo $(DEMO_ARGS)

demo-short: $(READY) ## The same with naive and turboquant only; what CI runs
	$(PYTHON) -m benchmarks.demo --short $(DEMO_ARGS)

demo-tiers: $(READY) ## Real vLLM with LMCache inside it: bytes held by RAM, disk and Redis, hits, restart (DEMO_ARGS="--mode in-process,multi-process")
	$(PYTHON) -m benchmarks.tiers $(DEMO_ARGS)

demo-tiers-short: $(READY) ## The same with turboquant only; what CI runs
	$(PYTHON) -m benchmarks.tiers --short $(DEMO_ARGS)

bench-codec: $(READY) ## Speed of the codec beside LMCache's fp8 and memcpy, one thread; fails below 4x and 0.3x (BENCH_ARGS="--json out.json")
	$(PYTHON) -m benchmarks.bench_codec --check $(BENCH_ARGS)

bench-put: $(READY) ## How long a store call holds the engine's thread, beside encoding there; fails above 10 % (BENCH_ARGS="--json out.json")
	$(PYTHON) -m benchmarks.bench_put --check $(BENCH_ARGS)

bench-press: $(KVPRESS_READY) ## The KVPress press: bytes and peaks, perplexity and KL, decoding speed; fails when a bound is missed (BENCH_ARGS="--only speed")
	$(KVPRESS_PYTHON) -m benchmarks.bench_press --check $(BENCH_ARGS)

demo-press: $(KVPRESS_READY) ## kvpress's pipeline with and without the press: bytes, answers, and docs/press-memory.svg (DEMO_ARGS="--json out.json")
	$(KVPRESS_PYTHON) -m benchmarks.demo_press $(DEMO_ARGS)

test: check ## Everything CI tests beside LMCache: `make check`, then pytest (PYTEST_ARGS="-k frame")
	$(PYTHON) -m pytest -n 2 --dist loadfile $(MAIN_TESTS) $(PYTEST_ARGS)

test-kvpress: $(KVPRESS_READY) ## The same beside KVPress: the packed cache, the press, and kvpress's own tests with our press
	$(KVPRESS_PYTHON) -m pytest -n 2 --dist loadfile $(KVPRESS_TESTS) $(PYTEST_ARGS)
	$(KVPRESS_PYTHON) -m pytest tests/upstream $(PYTEST_ARGS)

test-kvpress-versions: $(KVPRESS_READY) ## The packed cache and the press with every supported pair of kvpress and transformers (PYTEST_ARGS="-x")
	PYTEST_ARGS='$(PYTEST_ARGS)' scripts/kvpress_versions.sh $(KVPRESS_PYTHON) $(PAIRS)

check: $(READY) ## Lint, format, types, and which module may import which
	$(BIN)ruff check $(SOURCES)
	$(BIN)ruff format --check $(SOURCES)
	$(BIN)mypy
	$(BIN)lint-imports

format: $(READY) ## Rewrite the sources in the house format
	$(BIN)ruff check --fix $(SOURCES)
	$(BIN)ruff format $(SOURCES)

bench-quality: $(READY) ## Squared error and stored bits: Gaussian data against theory, and real KV of SmolLM2
	$(PYTHON) -m benchmarks.bench_quality

clean: ## Remove caches, build products and what the demo left (keeps .venv and the downloaded model)
	rm -rf build dist *.egg-info .demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find tq_offload connectors tests benchmarks scripts tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
