# Each target first creates the virtual environment it needs in .venv, with the versions in requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
UV := VIRTUAL_ENV=$(VENV) UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 $(BIN)/uv pip

# Without bytecode, each process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all test-frameworks check check-alerts check-versions check-images check-clients test-kubernetes bench soak chaos release screenshots lock clean

run: $(VENV)/run.stamp
	@$(BIN)/capsule dev $(ARGS)

# `test` skips the tests that tests/conftest.py marks as long; `test-all` runs all. There are more processes than most
# machines have cores, because many tests wait; the long ones also keep the cores busy.
test: SELECTED := -n 6 -m "not long"
test-all: SELECTED := -n 4
test test-all: $(VENV)/tests.stamp
	$(BIN)/pytest --dist loadfile --no-loadscope-reorder $(SELECTED) $(ARGS)

# Builds and serves the projects of every framework, with their packages from npm and PyPI.
test-frameworks: $(VENV)/dev.stamp
	FRAMEWORKS=all $(BIN)/pytest tests/workers/builds/test_recognition.py $(ARGS)

# Causes failures, and checks that their alerts fire and end. Needs root, Prometheus, Alertmanager, the exporter of
# Redis's metrics, and faketime.
check-alerts: $(VENV)/dev.stamp
	$(BIN)/pytest tests/ops/check_alerts.py $(ARGS)

# Runs this version and a former one side by side, under load.
check-versions: $(VENV)/dev.stamp
	$(BIN)/pytest tests/ops/check_versions.py $(ARGS)

# Installs the newest release of each client of models that docs/clients.md names, and asks with it. Needs PyPI and npm.
check-clients: $(VENV)/dev.stamp
	$(BIN)/pytest -s tests/gateway/clients/check_clients.py $(ARGS)

# Builds both images and runs compose.yaml with them. Needs Docker 28 and Compose 2.40.
check-images: $(VENV)/dev.stamp
	$(BIN)/pytest tests/ops/check_images.py $(ARGS)

# Runs apps on a real Kubernetes, which it builds the first time, in six minutes. Needs root and Debian 12. For example
# ARGS="-k crash"; KUBERNETES_SWAPS=100 swaps releases a hundred times.
test-kubernetes: $(VENV)/dev.stamp
	$(BIN)/pytest -o 'python_files=check_*.py' tests/kubernetes $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Runs everything in forty minutes; with ARGS, passes them to bench.py and runs nothing else.
bench: $(VENV)/dev.stamp
	$(BIN)/python bench/bench.py $(ARGS)
ifeq ($(ARGS),)
	$(BIN)/python bench/deliveries.py
	$(BIN)/python bench/ramp.py -n 1
endif

# Runs an hour of steady load; `make soak ARGS=5` runs five minutes.
soak: $(VENV)/dev.stamp
	$(BIN)/python bench/soak.py $(ARGS)

# For example ARGS="--minutes 60 --seed 7"; see docs/chaos.md.
chaos: $(VENV)/dev.stamp
	$(BIN)/python -m tests.chaos $(ARGS)

# Makes and tries a release of the commit that is checked out, in dist/.
release: $(VENV)/dev.stamp
	@$(PIP) install -c requirements.lock --group release
	$(BIN)/python ops/release.py

# Writes docs/img. Check the images before you commit them.
screenshots: $(VENV)/dev.stamp
	$(BIN)/python -m docs.screenshots

# An environment without Python is incomplete. Remove it together with its stamps, which would mark it as complete.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "This needs Python 3.11 or newer. Name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@rm -rf $(VENV); $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "This needs Python's venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }

# uv takes half of pip's time but ignores pip's settings. If these name another index, or if uv fails, pip installs.
$(VENV)/run.stamp: pyproject.toml requirements.lock | $(BIN)/python
	@echo "Installing packages into $(VENV) ..."
	@{ ! $(BIN)/python -m pip config list | grep -q '\.index-url=' && $(PIP) install uv && \
		$(UV) install -q -c requirements.lock -e '.[dev]'; } || $(PIP) install -c requirements.lock -e '.[dev]'
	@touch $@

# pip supports dependency groups since 25.1.
$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "Installing test and development tools ..."
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -c requirements.lock -e '.[dev,otel,s3,kubernetes]' --group dev
	@touch $@

# Compiles the tests once. Otherwise, each process that runs them would.
$(VENV)/tests.stamp: $(VENV)/dev.stamp
	@$(BIN)/pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

# Pins the newest versions that pyproject.toml allows. Run it with the oldest supported Python, which needs the most
# packages.
lock:
	rm -rf $(VENV)/lock && $(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install -q 'pip>=25.1'
	$(VENV)/lock/bin/python -m pip install -q -e '.[dev,otel,s3,kubernetes]' --group dev --group release
	$(VENV)/lock/bin/python -m pip freeze --exclude-editable > requirements.lock
	rm -rf $(VENV)/lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/browser/node_modules
