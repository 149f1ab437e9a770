# Two commands for a new machine: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint format clean

setup: $(STAMP)

# b12x without what it depends on (triton and more): tests have it write a cache with the compiler that is installed anyway.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlactl needs Python 3.11 or newer, found %d.%d" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps b12x
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh

test: setup lint
	$(BIN)/python -m pytest -q -n auto

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .demo build dist *.egg-info
