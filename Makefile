# Each target sets itself up: a virtual environment in .venv from the pinned versions in requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check bench lock clean

run: $(VENV)/run.stamp
	@$(BIN)/python -m gateway.dev

test: $(VENV)/dev.stamp
	$(BIN)/pytest $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/dev.stamp
	$(BIN)/python bench/bench.py $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# pip 25.1 is the first that reads dependency groups.
$(VENV)/run.stamp: pyproject.toml requirements.lock | $(VENV)/bin/python
	@echo "Installing what is needed into $(VENV) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements.lock -e . --group run
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements.lock -e . --group dev
	@touch $@

# Writes the newest versions that pyproject.toml admits.
lock:
	rm -rf $(VENV)/lock && $(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install -q 'pip>=25.1'
	$(VENV)/lock/bin/python -m pip install -q -e . --group dev
	$(VENV)/lock/bin/python -m pip freeze --exclude-editable > requirements.lock
	rm -rf $(VENV)/lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
