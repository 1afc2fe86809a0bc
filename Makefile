# The whole face of the project: `make help` lists it. Every target sets up what it needs first.
# The compiled parts are CMake's (CMakePresets.json); this file only strings them together.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PRESET ?= release
PREFIX ?= $(CURDIR)/build/install
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
# What only the Python package's users need: transformers, torchtitan.
CLIENTS := $(CURDIR)/.venv-clients
# A CUDA build of torch.
CUDA := $(CURDIR)/.venv-cuda
BUILD := build/$(PRESET)
# A translation unit of torch wants 1.5 GB of memory.
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemAvailable/ { jobs = int($$2 / 1500000); \
          print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo)

# What `make train` takes. ARGS goes to the program that a target runs: gpt, ctest (ARGS="-R Checkpoint"), compare.py.
STEPS ?=
RANKS ?= 2
DATA ?=
OUT ?=
RESUME ?=
SEED ?=
ARGS ?=
QUICK ?=
CTEST := $(BIN)/ctest --output-on-failure --no-label-summary --parallel $(JOBS)

export PATH := $(BIN):$(PATH)
export CMAKE_COLOR_DIAGNOSTICS ?= OFF

.PHONY: help setup tools build train minilm test clients bench compat soak cuda gpu-check asan tsan check format tidy install clean distclean

help: ## this list
	@echo "libfsdp: fully sharded data parallel training for libtorch"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{ printf "  make %-9s %s\n", $$1, $$2 }'
	@echo
	@echo "  train takes STEPS= RANKS= DATA= OUT= RESUME= SEED=; minilm RANKS=; bench QUICK=1; all that run a program take"
	@echo "  ARGS= for it; all that build take JOBS= (now $(JOBS))."

setup: tools build ## system packages, .venv with torch, the release build

# --- set-up: stamps remember what is done -------------------------------------------------------------------------

tools: build/.system-packages $(VENV)/.complete

build/.system-packages: scripts/setup_system.sh
	@PYTHON=$(PYTHON) scripts/setup_system.sh
	@mkdir -p build && touch $@

$(VENV)/.complete: requirements.txt build/.system-packages
	@scripts/setup_venv.sh $(PYTHON) $(VENV) requirements.txt
	@touch $@

$(CUDA)/.complete: requirements-cuda.txt build/.system-packages
	@scripts/setup_venv.sh $(PYTHON) $(CUDA) $<
	@touch $@

$(CLIENTS)/.minilm: examples/minilm/requirements.txt build/.system-packages
	@scripts/setup_venv.sh $(PYTHON) $(CLIENTS) $<
	@touch $@

$(CLIENTS)/.complete: tests/clients/requirements.txt $(CLIENTS)/.minilm
	@scripts/setup_venv.sh $(PYTHON) $(CLIENTS) $<
	@touch $@

# --- build --------------------------------------------------------------------------------------------------------

# $(call build,<preset>,<ninja targets>)
define build
	@echo "[build] configuring build/$(1)"
	@cmake --preset $(1) -DPython3_EXECUTABLE=$(BIN)/python --log-level=NOTICE
	@echo "[build] compiling build/$(1) with $(JOBS) jobs"
	@ninja -C build/$(1) -j$(JOBS) $(2)
endef

build: tools ## the library, the programs and the tests (PRESET=release, dev)
	$(call build,$(PRESET),)

train: tools ## train a GPT on RANKS=2 local ranks; metrics, curve, checkpoint and a sample
	$(call build,$(PRESET),gpt)
	@RANKS='$(RANKS)' STEPS='$(STEPS)' DATA='$(DATA)' OUT='$(OUT)' RESUME='$(RESUME)' SEED='$(SEED)' \
	  scripts/train.sh $(BUILD)/examples/gpt/gpt $(ARGS)

minilm: tools $(CLIENTS)/.minilm ## fine-tune a published sentence model from Python, sharded over RANKS=2 local ranks
	$(call build,$(PRESET),fsdp_python)
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m torch.distributed.run --standalone \
	  --nproc-per-node '$(RANKS)' examples/minilm/train.py $(ARGS)

test: tools ## every test, the format and layer checks among them
	$(call build,$(PRESET),)
	@cd $(BUILD) && $(CTEST) $(ARGS)

clients: tools $(CLIENTS)/.complete ## libfsdp under torchtitan, transformers and Inductor (not part of test)
	$(call build,$(PRESET),fsdp_python)
	@PYTHONPATH=$(CURDIR)/$(BUILD)/python OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -q tests/clients $(ARGS)

bench: tools ## measure against PyTorch; tables, bench/out/report.json and charts (QUICK=1: a trial)
	$(call build,$(PRESET),)
	@$(BIN)/python bench/compare.py --build $(BUILD) $(if $(QUICK),--quick) $(ARGS)

compat: tools build/.compat-tools ## PyTorch's own FSDP suites with libfsdp in place (SUITES="fsdp2 fsdp1"); writes tests/compat/report_*.md
	$(call build,$(PRESET),fsdp_python)
	@tests/compat/run.sh $(BIN)/python $(BUILD)/python build/compat $(SUITES)

build/.compat-tools: tests/compat/requirements.txt $(VENV)/.complete
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --requirement $<
	@touch $@

soak: tools ## kill a rank of a training run at 100 random moments
	$(call build,$(PRESET),gpt)
	@KILLS=100 FSDP_BINARY_DIR=$(CURDIR)/$(BUILD) $(BIN)/python -m pytest -q tests/python/test_kills.py

asan: tools ## the one-process tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call build,asan,)
	@scripts/sanitizer_env.sh asan $(CTEST) --test-dir build/asan -L 'unit|threads' $(ARGS)

tsan: tools ## the one-process tests under ThreadSanitizer
	$(call build,tsan,)
	@scripts/sanitizer_env.sh tsan $(CTEST) --test-dir build/tsan -L 'unit|threads' $(ARGS)

cuda: tools $(CUDA)/.complete ## compile against the CUDA build of torch 2.14.1, with the engine nccl (needs a CUDA toolkit)
	@cmake --preset cuda -DPython3_EXECUTABLE=$(CUDA)/bin/python --log-level=NOTICE
	@ninja -C build/cuda -j$(JOBS)

gpu-check: ## the tests that need a GPU, on those of this machine, and the host's cost; says so where there is none
	@if scripts/has_gpu.sh; then $(MAKE) --no-print-directory cuda && scripts/gpu_check.sh $(CUDA)/bin/python build/cuda $(ARGS); \
	else echo "[gpu-check] no GPU here: nothing was run"; fi

check: build/.system-packages ## format and layer checks alone
	@scripts/check_format.sh
	@$(PYTHON) scripts/check_layers.py

format: build/.system-packages ## rewrite the sources in the project's format
	@scripts/check_format.sh --fix

tidy: tools ## clang-tidy over src/
	@cmake --preset dev -DPython3_EXECUTABLE=$(BIN)/python --log-level=NOTICE
	@scripts/tidy.sh build/dev

install: tools ## install library, headers and CMake package under PREFIX=
	$(call build,$(PRESET),fsdp)
	@cmake --install $(BUILD) --prefix $(PREFIX)
	@echo "[install] done; use it with -DCMAKE_PREFIX_PATH=$(PREFIX)"

clean: ## remove what was built (keeps .venv, .venv-clients, .venv-cuda and out/)
	rm -rf build

distclean: clean ## remove .venv, .venv-clients and .venv-cuda too
	rm -rf $(VENV) $(CLIENTS) $(CUDA)
