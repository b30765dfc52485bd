# Every target works from a fresh clone: it makes .venv, installs the pinned dependencies and builds the
# extension first, and again only after pyproject.toml, setup.py or csrc/ changed. Needs python >= 3.10 and a C++20 compiler.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
CSRC := $(shell find csrc -type f 2>/dev/null)
DEMO_ARGS ?=
PYTEST_ARGS ?=

NATIVE := $(filter-out csrc/scheduler/python.cpp,$(wildcard csrc/scheduler/*.cpp)) $(wildcard tests/native/*.cpp)
NATIVE_HEADERS := $(wildcard csrc/scheduler/*.h tests/native/*.h)
SANITIZERS := thread address,undefined
# ThreadSanitizer does not start where addresses are randomised more than it expects.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: all demo horovod test test-native lint format clean

all: $(VENV)/.built

$(VENV)/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "pip==26.1.2"
	$(PY) -m pip install --quiet --group dev
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py $(CSRC)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.horovod: $(VENV)/.built
	$(PY) -m pip install --quiet --group horovod
	$(VENV)/bin/commlib install-horovod
	touch $@

# Two minutes on two cores the first time, then from the user's cache.
horovod: $(VENV)/.horovod

demo: $(VENV)/.built
	$(VENV)/bin/commlib demo $(DEMO_ARGS)

test: $(VENV)/.horovod test-native
	$(PY) -m pytest $(PYTEST_ARGS)

test-native:
	$(MAKE) --no-print-directory -j2 $(SANITIZERS:%=build/native/%)
	for name in $(SANITIZERS); do $(FIXED_ADDRESSES) build/native/$$name || exit 1; done

build/native/%: $(NATIVE) $(NATIVE_HEADERS)
	mkdir -p $(@D)
	$(CXX) -std=c++20 -O0 -g1 -Wall -Wextra -fsanitize=$* -fno-sanitize-recover=all -Icsrc -Itests/native $(NATIVE) -pthread -o $@

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	find csrc tests/native bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find csrc tests/native bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(VENV)/bin/clang-format -i

clean:
	rm -rf $(VENV) build dist *.egg-info commlib/*.so demo-report
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
