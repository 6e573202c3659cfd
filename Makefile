# Everything there is to run; .ci/run names what CI runs. TQ_PYTHON=/path/to/python uses an environment of your own instead of making .venv.
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
PEERS := .cache/peers
SOURCES := $(wildcard tq_offload connectors tests benchmarks scripts tools)
KVPRESS_TESTS := tests/kv_cache tests/press
# With transformers 5.19 and a Redis server; the rest of tests/kv_cache runs beside KVPress and with every version there.
MAIN_TESTS := $(filter-out $(KVPRESS_TESTS) tests/upstream tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) \
	tests/kv_cache/test_prefix_process.py tests/kv_cache/test_architectures.py

.PHONY: help env env-kvpress demo demo-short demo-tiers demo-tiers-short bench-codec bench-growth bench-put bench-press bench-quality bench-guard bench-triton bench-transfer bench-capacity bench-model bench-ttft bench-docs demo-press test test-kvpress test-kvpress-versions check format clean

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

demo-tiers-short: $(READY) ## The same with turboquant only
	$(PYTHON) -m benchmarks.tiers --short $(DEMO_ARGS)

bench-codec: $(READY) $(PEERS)/.stamp ## Speed of the codec beside LMCache's fp8, other packages, zstd and memcpy (BENCH_ARGS="--head-dim 128")
	$(PYTHON) -m benchmarks.bench_codec --check $(BENCH_ARGS)

bench-growth: $(READY) ## How time and memory grow with tokens, layers, heads, head_dim and threads: fixed cost, slope (BENCH_ARGS="--short")
	$(PYTHON) -m benchmarks.bench_growth --check $(BENCH_ARGS)

bench-put: $(READY) ## How long a store call holds the engine's thread, beside encoding there; fails above 10 %
	$(PYTHON) -m benchmarks.bench_put --check $(BENCH_ARGS)

bench-transfer: $(READY) ## Puts and gets of chunks through memory, disk and Redis, naive, fp8 and turboquant: rates, bytes, CPU (BENCH_ARGS="--small")
	$(PYTHON) -m benchmarks.bench_transfer --check $(BENCH_ARGS)

bench-capacity: $(READY) ## Tokens of prefix that fit in a budget of RAM and disk, and the hit rate of a trace of conversations
	$(PYTHON) -m benchmarks.bench_capacity --check $(BENCH_ARGS)

bench-model: $(READY) ## From decoding as measured here: load times by model and link, break-even, and the loads of bench-ttft predicted (BENCH_ARGS="--codec codec.json")
	$(PYTHON) -m benchmarks.bench_model --check $(BENCH_ARGS)

bench-press: $(KVPRESS_READY) ## The KVPress press: bytes and peaks, perplexity and KL, decoding speed; fails when a bound is missed (BENCH_ARGS="--only speed")
	$(KVPRESS_PYTHON) -m benchmarks.bench_press --check $(BENCH_ARGS)

bench-triton: $(KVPRESS_READY) ## Speed of the GPU kernels beside plain copies; needs a CUDA device
	$(KVPRESS_PYTHON) -m benchmarks.bench_triton $(BENCH_ARGS)

demo-press: $(KVPRESS_READY) ## kvpress's pipeline with and without the press: bytes and answers (DEMO_ARGS="--json out.json")
	$(KVPRESS_PYTHON) -m benchmarks.demo_press $(DEMO_ARGS)

test: check ## Everything CI tests beside LMCache: `make check`, then pytest (PYTEST_ARGS="-k frame")
	$(PYTHON) -m pytest -n 2 --dist loadfile $(MAIN_TESTS) $(PYTEST_ARGS)

test-kvpress: $(KVPRESS_READY) ## The same beside KVPress: the packed cache, the press, kvpress's own tests with our press, the Triton kernels
	$(KVPRESS_PYTHON) -m pytest -n 2 --dist loadfile $(KVPRESS_TESTS) tests/kernels/test_triton.py $(PYTEST_ARGS)
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

bench-quality: $(READY) $(PEERS)/.stamp ## Quality beside other codecs: KL, attention, biased keys, pass keys (BENCH_ARGS="--short")
	OMP_WAIT_POLICY=passive $(PYTHON) -m benchmarks.bench_quality --check $(BENCH_ARGS)

bench-guard: $(READY) ## `tq-offload check` against a measurement on another text, plain and biased keys
	OMP_WAIT_POLICY=passive $(PYTHON) -m benchmarks.bench_guard --check $(BENCH_ARGS)

bench-docs: $(READY) ## docs/benchmarks.md, its plots and README's tables anew from benchmarks/results, nothing measured (BENCH_ARGS="--check")
	$(PYTHON) -m benchmarks.render_docs $(BENCH_ARGS)

$(PEERS)/.stamp: benchmarks/quality/peers.txt
	@DISABLE_CUDA=1 $(PYTHON) -m pip install --quiet --no-deps --no-compile --upgrade --target $(PEERS) -r $< && touch $@ || \
		echo 'bench-quality: the other packages could not be installed; their rows will say so'

bench-ttft: $(READY) ## Time to first token cold, and from CPU RAM, disk and Redis over links of 100 Mbit/s, 1 Gbit/s and unshaped (BENCH_ARGS="--short")
	$(PYTHON) -m benchmarks.bench_ttft --check $(BENCH_ARGS)

clean: ## Remove caches, build products and what the demo left (keeps .venv and the downloaded model)
	rm -rf build dist *.egg-info .demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find tq_offload connectors tests benchmarks scripts tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
