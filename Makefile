# Every target first brings .venv up to date, so `make serve` and `make test` are all a fresh clone needs.
# serve installs what serving needs; the others add the tools of development.

PYTHON ?= python3
MODEL ?=
ARGS ?=
TARGET ?= cpu
TORCH_INDEX_URL ?=

venv := .venv
bin := $(venv)/bin
# A running server holds the compiled libraries open: new ones must be new files, for pip writes into the old ones.
# pip's default build of torch for Linux on x86-64 has gigabytes of CUDA; TORCH_INDEX_URL names an index of other builds.
install := rm -f engine/backends/cpu/_*.so && \
	$(bin)/python -m pip --disable-pip-version-check install --constraint constraints.txt \
	$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
# A process for each of at most four cores, as each takes 1 GB, and one more, as many tests wait for a child process.
processes = $$($(bin)/python -c 'import os; print(min(4, os.cpu_count()) + 1)')
# The slowest tests are named, if they are slow.
pytest = $(bin)/pytest --numprocesses $(processes) --dist worksteal --durations 20 --durations-min 5
# What an installation depends on: the metadata, the pins and what it compiles.
inputs := pyproject.toml constraints.txt $(wildcard setup.py engine/backends/cpu/csrc/*.cpp engine/backends/cpu/csrc/*.h)

# The tests start hundreds of processes, which need not compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: serve test test-all test-nightly sanitize mutants chaos clients templates check format docs bench image gpu gpu-test gpu-chaos gpu-bench help

serve: $(venv)/serving  ## serve the embedded model, or MODEL=folder-or-hub-id, with ARGS="--port 9000"
	$(bin)/gptserve serve $(MODEL) $(ARGS)

test: $(venv)/developing  ## run the tests but the slow ones, or ARGS="tests/engine -k name"
	$(pytest) $(ARGS)

test-all: $(venv)/developing  ## run all tests that need no CUDA device, or with ARGS="--seventh 0" fewer slow ones
	$(pytest) -m 'not gpu and not triton and not clients' $(ARGS)

test-nightly:  ## run test-all, sanitize, chaos and mutants, whichever of them fail
	@$(MAKE) --keep-going --jobs 1 ARGS= test-all sanitize chaos mutants

sanitize: $(venv)/developing  ## run the tests of the C++ under sanitizers; needs GCC
	tests/sanitize.sh

mutants: $(venv)/developing  ## seed faults in copies of the tree, and show that tests notice them; ARGS="--gate NAME"
	$(bin)/python -m tests.mutants $(ARGS)

chaos: $(venv)/developing  ## kill the engine and the server under clients for two minutes
	$(bin)/python -m bench.chaos $(ARGS)

clients: $(venv)/developing  ## try the clients of other projects, each installed into build/clients; needs npm, too
	$(bin)/python -m tests.clients.environments
	$(bin)/pytest -m clients tests/clients $(ARGS)

templates: $(venv)/developing  ## try the chat templates of published models, downloaded into build/templates
	$(bin)/python -m tests.weights.chat.published
	$(bin)/pytest -m 'slow or not slow' tests/weights/chat/test_published.py tests/server/tools/test_published_formats.py \
		$(ARGS)

check: $(venv)/developing  ## lint, formatting, types, import directions, size budget, spelling
	@failed=; \
	for tool in 'ruff check .' 'ruff format --check .' mypy lint-imports 'python -m bench.size_budget' codespell; do \
		echo "$(bin)/$$tool"; \
		$(bin)/$$tool || failed="$$failed; $$tool"; \
	done; \
	test -z "$$failed" || { echo "make check failed: $${failed#; }" >&2; exit 1; }

format: $(venv)/developing  ## format the code, and repair what lint can repair
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

docs: $(venv)/developing  ## write docs/configuration.md from the settings
	$(bin)/python -m tests.configuration_page

bench: $(venv)/developing  ## measure decoding against transformers on this machine
	$(bin)/python -m bench.decode $(ARGS)

gpu:  ## prove and measure all on a CUDA device, into bench/results; the three below, whichever of them fail
	@$(MAKE) --keep-going --jobs 1 ARGS= gpu-test gpu-chaos gpu-bench

gpu-test: $(venv)/developing  ## run the tests that need a CUDA device, or ARGS="-k name"
	$(bin)/python -m bench.gpu_tests $(ARGS)

gpu-chaos: $(venv)/developing  ## kill the engine and the server on a CUDA device under clients for two minutes
	$(bin)/python -m bench.chaos --device cuda --output bench/results/gpu-chaos.json $(ARGS)

gpu-bench: $(venv)/developing  ## run the benchmarks for a CUDA device, or some: ARGS="gpt2 llama-8b"
	$(bin)/python -m bench.gpu $(ARGS)

image:  ## build the container image gptserve; TARGET=cuda for the one with the CUDA libraries
	docker build --target $(TARGET) --tag gptserve --build-arg REVISION=$(shell git rev-parse HEAD) $(ARGS) .

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# pip is the last that comes into a new environment, so that one that stopped half-way is begun again.
$(bin)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(venv) || { rm -rf $(venv); exit 1; }

$(venv)/serving: $(inputs) | $(bin)/pip
	$(install) --editable .
	@touch $@

$(venv)/developing: $(inputs) | $(bin)/pip
	$(install) --editable '.[dev]'
	@touch $@ $(venv)/serving
