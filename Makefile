# Two commands do everything on a machine with Python 3.11 (or newer) and make: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Tell me a story about a fox and a lantern.

# Every test or group of tests that shares compiled programs goes to a worker that is free, in the order of collection.
# A worker that dies ends the run: pytest-xdist would start its test again, and wait for ever when that dies, too.
PARALLEL := -n auto --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo chat docs install install-test test test-fast drills test-tunix test-clients test-ray test-browser test-schemathesis lint types format clean help

help:
	@echo "make demo   install into $(VENV) and tell a story with the embedded model"
	@echo "make chat   talk to the embedded model"
	@echo "make test   install what the tests need and run them, with lint and types; ARGS=... are passed to pytest"
	@echo "make test-fast   the tests of control plane, protocol, text and API, which compile nothing"
	@echo "make drills   what takes long or needs GPUs, each with its target: whole servers and shards under kills and load"
	@echo "make test-ray   the tests that need Ray, which this installs"
	@echo "make test-tunix   jpaged as the rollout engine of google-tunix, installed apart"
	@echo "make test-clients   clients of agents (anthropic, instructor, ...), installed apart, against a server"
	@echo "make test-browser   the tests of the server's page, which need Chromium (Debian: chromium, chromium-driver)"
	@echo "make test-schemathesis   made-up requests to every route of a server, none of which may meet a 5xx"
	@echo "make docs   build the documentation into site/"
	@echo "make lint types format clean   the parts"

demo: install
	$(BIN)/python -m jpaged generate "$(PROMPT)"

chat: install
	$(BIN)/python -m jpaged chat

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "jpaged needs Python 3.11 or newer; name one: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

install-test: $(VENV)/.installed-test

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

test: install-test
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)
	$(MAKE) --no-print-directory lint types

test-fast: install-test
	$(BIN)/python -m pytest $(PARALLEL) --fast

# What `make drill-NAME` runs; it passes ARGS on.
drills:
	@for file in $$(grep -l __main__ tests/drills/*.py); do \
		printf '%-28s %s\n' "make drill-$$(basename $$file .py | tr _ -)" "$$(sed -n '1s/^"""//; 1s/"""$$//; 1p' $$file)"; done

drill-%: install-test
	$(BIN)/python -m tests.drills.$(subst -,_,$*) $(ARGS)

test-ray: install-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[ray]"
	$(BIN)/python -m pytest tests/scoring/test_ray.py tests/serving/test_ray.py

# schemathesis has an environment of its own: nothing else shall depend on the packages that it brings.
test-schemathesis: install-test
	test -x $(VENV)-schemathesis/bin/schemathesis || { $(PYTHON) -m venv $(VENV)-schemathesis && \
		$(VENV)-schemathesis/bin/python -m pip install --quiet --disable-pip-version-check schemathesis; }
	$(BIN)/python -m tests.drills.fuzz --schemathesis $(VENV)-schemathesis/bin/schemathesis $(ARGS)

# So has google-tunix, which brings its own version of JAX.
test-tunix:
	test -x $(VENV)-tunix/bin/pip || $(PYTHON) -m venv $(VENV)-tunix
	$(VENV)-tunix/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[tunix]" pytest optax
	$(VENV)-tunix/bin/python -m pytest tests/integrations

# So have the clients of agents.
test-clients: install-test
	test -x $(VENV)-clients/bin/pip || $(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check \
		openai anthropic instructor langchain-openai "pydantic-ai-slim[openai]" "opentelemetry-api<1.39" litellm
	$(BIN)/python -m tests.drills.agents --python $(VENV)-clients/bin/python $(ARGS)

test-browser: install-test
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ echo "test-browser needs Chromium and its driver; on Debian: apt-get install chromium chromium-driver"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[browser]"
	$(BIN)/python -m pytest tests/serving/test_browser.py

docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html, or run $(BIN)/python -m http.server -d site"

lint: install-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports

types: install-test
	$(BIN)/python -m mypy --num-workers auto

format: install-test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) $(VENV)-schemathesis $(VENV)-clients $(VENV)-tunix .venv312 build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
