# Every target works from a fresh clone: it makes .venv, installs the pinned dependencies and builds the
# extension first, and again only after pyproject.toml, setup.py or csrc/ changed. Needs python >= 3.10 and a C++20 compiler.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
CSRC := $(shell find csrc -type f 2>/dev/null)
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: all demo test lint format clean

all: $(VENV)/.built

$(VENV)/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "pip==26.1.2"
	$(PY) -m pip install --quiet --group dev
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py $(CSRC)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

demo: $(VENV)/.built
	$(VENV)/bin/commlib demo $(DEMO_ARGS)

test: $(VENV)/.built
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(VENV)/bin/clang-format -i

clean:
	rm -rf $(VENV) build dist *.egg-info commlib/*.so demo-report
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
