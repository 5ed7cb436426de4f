# Set-up, demo and checks. Everything is installed into $(VENV), nothing else
# on the machine is touched.
#
#   make setup    the environment, with all development tools
#   make demo     the main job, on a CPU
#   make test     the tests
#   make lint     the static checks
#   make clean    removes the environment and what the tools left
#
# PYTHON=/path/to/python3.12 chooses the interpreter, VENV=dir the place.

VENV ?= .venv
PYTHON ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
SOURCES := nvfp4_jax experiments tests

.PHONY: help setup demo test lint clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# A stamp says what an environment holds, and is written last: an installation
# that was cut short has none and is made again.
setup: $(VENV)/.setup-dev

demo: $(VENV)/.setup-demo
	$(BIN)/python -m experiments.grpo demo

# Files run whole, since their tests share compiled programs, and in order: the
# long ones come early.
test: $(VENV)/.setup-dev
	$(BIN)/python -m pytest -q -n auto --maxprocesses=4 --dist=loadfile \
	  --no-loadscope-reorder

lint: $(VENV)/.setup-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyink --quiet --check --diff $(SOURCES)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports --no-logo

# runs/ stays: it holds results.
clean:
	rm -rf $(VENV) build *.egg-info
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The demo needs no development tools and is set up without them.
$(VENV)/.setup-demo: pyproject.toml constraints.txt
	@$(call install,plots)
	@touch $@

# What serves development serves the demo too, hence both stamps.
$(VENV)/.setup-dev: pyproject.toml constraints.txt
	@$(call install,plots$(comma)gguf$(comma)dev)
	@touch $(VENV)/.setup-demo $@

comma := ,

# Installs this project with the extras $(1). While it works, the environment
# is marked as unfinished; one found so is not trusted but made anew, since pip
# takes a half-copied package for a whole one. setuptools comes first, so that
# the build too uses the pinned version and downloads nothing of its own.
# --no-compile halves the work: Python compiles what is used when it is used.
define install
set -eu; \
if [ ! -x $(BIN)/python ] || [ -e $(VENV)/.unfinished ]; then \
  $(find_python); \
  echo "Making $(VENV) with $$python"; \
  rm -rf $(VENV); \
  mkdir -p $(VENV); \
  touch $(VENV)/.unfinished; \
  "$$python" -m venv $(VENV); \
fi; \
touch $(VENV)/.unfinished; \
echo "Installing nvfp4-jax[$(1)] into $(VENV) (a minute or more at first)"; \
$(PIP) install -q --no-compile -c constraints.txt setuptools; \
$(PIP) install -q --no-compile -c constraints.txt --no-build-isolation -e '.[$(1)]'; \
rm $(VENV)/.unfinished
endef

# Sets $python to the oldest Python from 3.12 on. Each candidate is run and
# says itself what it is: a command of that name may be a shim for a version
# that is not installed, and some systems ship Python without venv.
define find_python
if [ -n "$(PYTHON)" ]; then set -- "$(PYTHON)"; else \
  set -- python3.12 python3.13 python3.14 python3 python \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python3; \
fi; \
python=$$( \
  for candidate; do "$$candidate" -c '$(describe_python)' || true; done \
    2>/dev/null </dev/null | sort -s -n -k 1,1 | sed -n '1s/^[0-9]* //p' \
); \
if [ -z "$$python" ]; then \
  echo "No Python 3.12 or newer with venv was found. Tried: $$*" >&2; \
  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
  exit 1; \
fi
endef

describe_python := import sys; \
  sys.version_info[:2] >= (3, 12) or sys.exit(1); \
  import ensurepip, venv; \
  print("%d %s" % (sys.version_info[1], sys.executable))
