# What a developer types. Every target makes what it needs first, .venv included, and may be run again at any time.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
PACKAGES := rubato service workers examples benchmarks tests
BENCHMARKS := engine_throughput engine_parity engine_memory compression data

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test test-all lint format bench bench-peers lock clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv with everything that is pinned in requirements.lock

demo: $(INSTALLED) ## Train a small model with 3D parallelism on Ray, scale it, kill a worker, compare the curves
	$(VENV)/bin/python examples/demo.py

test: $(INSTALLED) ## Run the tests
	$(VENV)/bin/python -m pytest --durations=15

test-all: $(INSTALLED) ## Run the tests, those that take minutes included
	$(VENV)/bin/python -m pytest --durations=15 -m ''

lint: $(INSTALLED) ## Check style, types and the arrows between the packages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(INSTALLED) ## Apply what lint asks for, where a machine can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(INSTALLED) ## Run the benchmarks that need no data; each prints one JSON line last
	@set -e; for benchmark in $(BENCHMARKS); do \
	    echo "== $$benchmark"; $(VENV)/bin/python -m benchmarks.$$benchmark; done

# litgpt without what it asks for: an older huggingface-hub than transformers has, for downloads that nobody needs here.
bench-peers: $(INSTALLED) ## Install the trainers that benchmarks.engine_speed compares with, and compare
	$(VENV)/bin/python -m pip install -qq -c requirements.lock -e '.[bench]'
	$(VENV)/bin/python -m pip install -qq --no-deps litgpt==0.5.13
	$(VENV)/bin/python -m benchmarks.engine_speed

# A changed lock or pyproject.toml installs again; a .venv whose interpreter is gone is made anew.
$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: rubato needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	         "name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing what requirements.lock pins into $(VENV) (a minute or two)"
	@$(VENV)/bin/python -m pip install -qq -c requirements.lock -e '.[dev,postgres]'
	@touch $@

# Without local version labels, so that "torch==2.13.0" is the build a machine's index offers (CPU or CUDA), and
# without the packages that only the CUDA build pulls in.
lock: ## Pin the newest versions that pyproject.toml allows in requirements.lock
	@set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	"$$scratch/venv/bin/python" -m pip install -qq -e '.[dev,postgres,bench]'; \
	{ echo '# Written by "make lock". Versions of everything that rubato[dev,postgres,bench] brings in.'; \
	  "$$scratch/venv/bin/python" -m pip freeze --exclude rubato \
	  | sed -E 's/\+[A-Za-z0-9.]+$$//' | grep -vE '^(nvidia-|cuda-|triton)'; } > "$$scratch/lock"; \
	mv "$$scratch/lock" requirements.lock

clean: ## Remove .venv and everything that was built or cached
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +
