# Each target sets itself up: a virtual environment in .venv with the versions pinned in requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run test check bench screenshots lock clean

run: $(VENV)/run.stamp
	@$(BIN)/python -m gateway.dev

test: $(VENV)/dev.stamp
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/dev.stamp
	$(BIN)/python bench/bench.py $(ARGS)
	$(BIN)/python bench/deliveries.py

# For docs/img; look at them before they are committed.
screenshots: $(VENV)/dev.stamp
	$(BIN)/python -m docs.screenshots

# Whatever is left of an environment without its Python goes, stamps included: it would pass for a whole one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@rm -rf $(VENV); $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

# pip 25.1 is the first that reads dependency groups.
$(VENV)/run.stamp: pyproject.toml requirements.lock | $(BIN)/python
	@echo "Installing what is needed into $(VENV) ..."
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -c requirements.lock -e . --group run
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "Installing the tools for tests and checks ..."
	@$(PIP) install -c requirements.lock -e . --group dev
	@touch $@

# Writes the newest versions that pyproject.toml admits. The oldest Python knows every package that a newer one needs.
lock:
	rm -rf $(VENV)/lock && $(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install -q 'pip>=25.1'
	$(VENV)/lock/bin/python -m pip install -q -e . --group dev
	$(VENV)/lock/bin/python -m pip freeze --exclude-editable > requirements.lock
	rm -rf $(VENV)/lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/browser/node_modules
