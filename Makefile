# Set-up, demo and checks. Everything is installed into $(VENV), nothing else
# on the machine is touched.
#
#   make setup    the environment, with all development tools
#   make demo     the main job, on a CPU
#   make test     the tests
#   make lint     the static checks
#   make interop  compares checkpoints with other projects' tools, on a CPU
#   make aot      compiles and interprets the GPU kernels, on a CPU
#   make tunix    times a GRPO step beside google-tunix's, on a CPU
#   make clean    removes the environments and what the tools left
#
# PYTHON=/path/to/python3.12 chooses the interpreter, VENV=dir the place.
# interop has an environment of its own, $(VENV)-interop, of a Python 3.11 that
# INTEROP_PYTHON=/path/to/python3.11 chooses; it holds torch and takes 1.5 GB.
# So have aot, $(VENV)-aot (Triton; 1 GB), and tunix, $(VENV)-tunix, of the same
# Python as the project's.

VENV ?= .venv
PYTHON ?=
INTEROP_PYTHON ?=

BIN := $(VENV)/bin
INTEROP_VENV := $(VENV)-interop
AOT_VENV := $(VENV)-aot
TUNIX_VENV := $(VENV)-tunix
PIP_OPTIONS := --disable-pip-version-check --no-input
PIP := $(BIN)/python -m pip $(PIP_OPTIONS)
INTEROP_PIP := $(INTEROP_VENV)/bin/python -m pip $(PIP_OPTIONS)
AOT_PIP := $(AOT_VENV)/bin/python -m pip $(PIP_OPTIONS)
TUNIX_PIP := $(TUNIX_VENV)/bin/python -m pip $(PIP_OPTIONS)
SOURCES := nvfp4_jax experiments tests interop

.PHONY: help setup demo test lint interop run-interop aot tunix clean
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

# Not part of `test`, since it installs torch. Without a Python 3.11 it is
# skipped; one that was named and does not serve is an error.
interop:
	@set -eu; \
	if [ ! -e $(INTEROP_VENV)/.setup ]; then \
	  $(find_interop_python); \
	  if [ -z "$$python" ]; then \
	    if [ -n "$(INTEROP_PYTHON)" ]; then echo "$$missing" >&2; exit 1; fi; \
	    echo "make interop is SKIPPED. $$missing"; \
	    exit 0; \
	  fi; \
	fi; \
	$(MAKE) --no-print-directory run-interop

run-interop: $(VENV)/.setup-dev $(INTEROP_VENV)/.setup
	$(BIN)/python interop/check.py --python $(INTEROP_VENV)/bin/python

# Not part of `test`, since it installs Triton. The compiler and the interpreter
# exclude each other in one process.
aot: $(AOT_VENV)/.setup
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -q -m aot tests/kernels
	JAX_PLATFORMS=cpu TRITON_INTERPRET=1 \
	  $(AOT_VENV)/bin/python -m pytest -q -m aot tests/kernels

# The rows go to results/tunix, behind those that are there.
tunix: $(TUNIX_VENV)/.setup
	$(TUNIX_VENV)/bin/python interop/tunix_grpo.py

# runs/ stays: it holds results.
clean:
	rm -rf $(VENV) $(INTEROP_VENV) $(AOT_VENV) $(TUNIX_VENV) build *.egg-info
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The demo needs no development tools and is set up without them.
$(VENV)/.setup-demo: pyproject.toml constraints.txt
	@$(call install,plots)
	@touch $@

# What serves development serves the demo too, hence both stamps.
$(VENV)/.setup-dev: pyproject.toml constraints.txt
	@$(call install,plots$(comma)gguf$(comma)tensorboard$(comma)dev)
	@touch $(VENV)/.setup-demo $@

# torch comes first and alone, so that what follows takes it as it is.
$(INTEROP_VENV)/.setup: interop/requirements.txt
	@set -eu; \
	$(call open_environment,$(INTEROP_VENV),$(find_interop_python)); \
	echo "Installing $< into $(INTEROP_VENV) (minutes at first)"; \
	$(INTEROP_PIP) install -q --no-compile "$$(grep '^torch==' $<)"; \
	$(INTEROP_PIP) install -q --no-compile -r $<; \
	rm $(INTEROP_VENV)/.unfinished
	@touch $@

$(AOT_VENV)/.setup: pyproject.toml constraints.txt
	@set -eu; \
	$(call open_environment,$(AOT_VENV),$(find_project_python)); \
	echo "Installing nvfp4-jax[aot,dev] into $(AOT_VENV) (a minute or more)"; \
	$(AOT_PIP) install -q --no-compile -c constraints.txt setuptools; \
	$(AOT_PIP) install -q --no-compile -c constraints.txt \
	  --no-build-isolation -e '.[aot,dev]'; \
	rm $(AOT_VENV)/.unfinished
	@touch $@

# The project first, so that what it pins stays; the others bring nothing along.
$(TUNIX_VENV)/.setup: pyproject.toml constraints.txt \
    interop/tunix_requirements.txt
	@set -eu; \
	$(call open_environment,$(TUNIX_VENV),$(find_project_python)); \
	echo "Installing google-tunix into $(TUNIX_VENV) (a minute or more at first)"; \
	$(TUNIX_PIP) install -q --no-compile -c constraints.txt setuptools; \
	$(TUNIX_PIP) install -q --no-compile -c constraints.txt \
	  --no-build-isolation -e .; \
	$(TUNIX_PIP) install -q --no-compile --no-deps \
	  -r interop/tunix_requirements.txt; \
	rm $(TUNIX_VENV)/.unfinished
	@touch $@

comma := ,

# Installs this project with the extras $(1). setuptools comes first, so that
# the build too uses the pinned version and downloads nothing of its own.
# --no-compile halves the work: Python compiles what is used when it is used.
define install
set -eu; \
$(call open_environment,$(VENV),$(find_project_python)); \
echo "Installing nvfp4-jax[$(1)] into $(VENV) (a minute or more at first)"; \
$(PIP) install -q --no-compile -c constraints.txt setuptools; \
$(PIP) install -q --no-compile -c constraints.txt --no-build-isolation -e '.[$(1)]'; \
rm $(VENV)/.unfinished
endef

# Makes the environment $(1), if need be, of the Python that the commands $(2)
# find. While it is installed into, an environment is marked as unfinished; one
# found so is not trusted but made anew, since pip takes a half-copied package
# for a whole one.
define open_environment
if [ ! -x $(1)/bin/python ] || [ -e $(1)/.unfinished ]; then \
  $(2); \
  if [ -z "$$python" ]; then echo "$$missing" >&2; exit 1; fi; \
  echo "Making $(1) with $$python"; \
  rm -rf $(1); \
  mkdir -p $(1); \
  touch $(1)/.unfinished; \
  echo '*' > $(1)/.gitignore; \
  "$$python" -m venv $(1); \
fi; \
touch $(1)/.unfinished
endef

find_project_python = $(call find_python,PYTHON,>= (3$(comma) 12),3.12 or \
  newer,python3.12 python3.13 python3.14)
find_interop_python = $(call find_python,INTEROP_PYTHON,== (3$(comma) 11),3.11,\
  python3.11)

# Sets $python to the oldest Python whose version is $(2), or to nothing, and
# then $missing to what to say: $(3) names the version. The variable $(1) chooses
# one, else $(4) and others are tried. Each is run and says itself what it is: a
# command of that name may be a shim for a version that is not installed, and
# some systems ship Python without venv.
define find_python
if [ -n "$($(1))" ]; then set -- "$($(1))"; else \
  set -- $(4) python3 python \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python3; \
fi; \
python=$$( \
  for candidate; do "$$candidate" -c '$(call describe_python,$(2))' || true; \
  done 2>/dev/null </dev/null | sort -s -n -k 1,1 | sed -n '1s/^[0-9]* //p' \
); \
missing="No Python $(3) with venv was found; tried: $$*. Install one, or name \
it: make $(1)=/path/to/python ..."
endef

describe_python = import sys; \
  sys.version_info[:2] $(1) or sys.exit(1); \
  import ensurepip, venv; \
  print("%d %s" % (sys.version_info[1], sys.executable))
