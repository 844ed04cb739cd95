# Every target makes its own environment first; the second call finds it ready.
#   make demo     the whole loop on a small policy: episodes, one packed update, a table
#   make test     the tests that a CPU can run          make test-slow   the long ones too
#   make test-gpu those that need CUDA, kernels on      make bench       speed, one JSON line a figure
#   make style    lint, format check, types             make format      rewrite what can be
#   make setup    the environment alone                 make clean       away with it
# PYTHON=python3.12 picks the interpreter, VENV=dir the environment, EXTRAS=dev,gpu what goes in.

VENV ?= .venv
EXTRAS ?= dev
WORKERS ?= logical
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    "$$p" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
    >/dev/null 2>&1 && echo "$$p" && break; done)
# Without an NVIDIA GPU the CPU wheel of torch is enough; the default Linux wheel brings gigabytes of
# CUDA. The index that holds it is asked only where it answers: pip would wait for it for minutes.
CPU_TORCH ?= torch==2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
HAS_GPU = $(shell nvidia-smi -L 2>/dev/null | grep GPU)
ANSWERS = import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)

# The stamp's name carries what was installed, so that a changed pyproject.toml is seen even when
# a checkout gives every file the same time.
KEY := $(shell (cat pyproject.toml; echo "$(EXTRAS)") | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(KEY)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test test-slow test-gpu style format bench clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,6p' Makefile | cut -c3-

setup: $(READY)

$(READY):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv found; fix: install one or give PYTHON=path"; exit 1; }
	@echo "making $(VENV) with $(PYTHON): a few minutes, once"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(if $(HAS_GPU),,index=; $(BIN)/python -c "$(ANSWERS)" $(CPU_INDEX)/ 2>/dev/null \
	    && index="--extra-index-url $(CPU_INDEX)"; \
	    $(PIP) $$index "$(CPU_TORCH)")
	@$(PIP) -e ".[$(EXTRAS)]"
	@DS_BUILD_OPS=0 $(PIP) -e ".[deepspeed]" 2>$(VENV)/deepspeed.log || \
	    echo "DeepSpeed did not install (see $(VENV)/deepspeed.log): tests of ZeRO will be skipped"
	@rm -f $(VENV)/.ready-*
	@touch $@

# One thread: products this small gain nothing from a second, which made a turn 1.6 times slower.
demo: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python scripts/demo.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses=8 $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses=8 --slow $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m "gpu or multi_gpu" --slow $(ARGS)

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python scripts/bench.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
