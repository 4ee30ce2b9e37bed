# make setup   .venv with everything for development
# make run     the default model on the sample images, then progresvit quickstart
# make check   lint, types and fast tests
# make test    lint, types and all tests but the longest
# make long    the longest tests: Ray, the wheel, quickstart, the rehearsal
# make rehearse   the study of the whole paper at toy size, in runs/rehearsal
# make lint    lint, spelling and types
# make docs    the site, in site/
# make wheel   the wheel, in dist/; its tests install it into an empty environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# uv trusts the certificates of the system, as pip does. Company proxies need this.
export UV_SYSTEM_CERTS ?= 1

.PHONY: setup run check test long rehearse lint format docs wheel clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# uv does not read the settings of pip, so the command passes on pip's local folder of wheels.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "error: Python 3.11, 3.12 or 3.13 is needed; run 'make PYTHON=/path/to/python3.11'"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.11.15'
	links="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true)}"; \
	  if [ -n "$$links" ]; then export UV_FIND_LINKS="$$links"; fi; \
	  $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraints constraints.txt --editable '.[dev]'
	@touch $@

# Column "round": easy images exit after round 1, hard ones continue to round 2. The three images in tests/images show
# none of the model's classes: --threshold careful withholds uncertain answers.
run: setup
	$(BIN)/progresvit classify --samples
	$(BIN)/progresvit classify tests/images --threshold careful
	$(BIN)/progresvit quickstart --out runs/quickstart --overwrite

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -n 2 -q -m "not slow and not long"

# Tests of a file run in one process, so that what they share is made once.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

long: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

rehearse: setup
	$(BIN)/python repro/rehearse.py runs/rehearsal

format: setup
	$(BIN)/python scripts/code_map.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The variable silences a notice that the theme prints at each build: it is maintained until May 2027.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: setup
	$(BIN)/uv build --quiet --wheel --out-dir dist
	$(BIN)/python -m pytest -q tests/test_package.py

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
