# Two commands do everything on a machine with Python 3.11 (or newer) and make: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Tell me a story about a fox and a lantern.

.PHONY: demo chat install install-test test lint types format clean help

help:
	@echo "make demo   install into $(VENV) and tell a story with the embedded model"
	@echo "make chat   talk to the embedded model"
	@echo "make test   install what the tests need and run them, with lint and types"
	@echo "make lint types format clean   the parts"

demo: install
	$(BIN)/jpaged generate "$(PROMPT)"

chat: install
	$(BIN)/jpaged chat

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

install-test: $(VENV)/.installed-test

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

test: install-test lint types
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-test
	$(BIN)/mypy

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
