# Every target sets up .venv first; a second run starts at once.
#
#   PYTHON=...   the interpreter to build .venv with (default: the newest of python3.13, python3.12, python3.11 that works)
#   TORCH=...    pip's arguments for torch; given once, it stays until `make clean`

VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?= throughput --workload C1

ifneq ($(origin TORCH),undefined)
TORCH_IS_GIVEN := yes
endif
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo serve test lint format bench test-matrix clean FORCE

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo
	@echo "  make demo TORCH='torch==2.13.0 --index-url URL'   another build of torch, as arguments of pip"
	@echo "  make test PYTHON=/path/to/python3                 another interpreter (3.11 or newer)"

install: $(VENV)/.installed ## make .venv with everything that running mmserve needs

demo: install ## summarise the documents in samples/ with the embedded model; results go to out/
	@echo "Fetching the embedded model (100 MB), if it is not there yet"
	@$(BIN)/mmserve pull smollm2-135m --quiet >/dev/null
	@echo "Summarising the documents in samples/; results go to out/, too. On two cores this takes some minutes."
	@$(BIN)/mmserve summarize samples --output-dir out --force

serve: install ## start the HTTP service on 127.0.0.1
	$(BIN)/mmserve serve

test: lint ## the whole gate: ruff, mypy --strict, pytest
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.test-installed ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test-installed ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## measure throughput; BENCH_ARGS chooses what
	@$(BIN)/mmserve bench $(BENCH_ARGS)

test-matrix: $(VENV)/.installed ## pytest on Python 3.11 to 3.13 with the oldest and the newest torch and transformers
	$(BIN)/python tests/matrix.py $(MATRIX_ARGS)

clean: ## remove .venv, out/ and what the tools left behind
	rm -rf $(VENV) $(VENV).torch out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# An interpreter counts once it has run: a shim that is on PATH for a version that is not there does not.
$(VENV)/.created: $(if $(TORCH_IS_GIVEN),$(VENV).torch)
	@python="$(PYTHON)"; \
	for candidate in $${python:-python3.13 python3.12 python3.11 python3}; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$candidate ($$($$candidate --version))"; \
	    rm -rf $(VENV) && "$$candidate" -m venv $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer that can make a virtual environment was found." >&2; \
	echo "Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	exit 1

# Remembers what TORCH was given, so that another value starts a new environment.
$(VENV).torch: FORCE
	@test -f $@ && test "$$(cat $@)" = '$(TORCH)' || printf '%s\n' '$(TORCH)' > $@

$(VENV)/.torch-installed: $(VENV)/.created
	@echo "Installing $(TORCH): the largest part. On Linux the plain build of torch brings CUDA libraries of several GB;"
	@echo "without an NVIDIA card, TORCH='...' can name a smaller one (see README.md)."
	$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch-installed pyproject.toml
	@echo "Installing mmserve and what it needs: a minute or two without output"
	$(PIP) install --quiet --editable .
	@touch $@

# The kernels are tested with Triton's interpreter. A build of torch for CUDA brings the Triton that belongs to it.
$(VENV)/.test-installed: $(VENV)/.installed
	@echo "Installing what the tests need: a moment without output"
	$(PIP) install --quiet --editable '.[test]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet --editable '.[interpreter]'
	@touch $@
