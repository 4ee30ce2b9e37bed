# make setup   .venv with everything for development
# make run     the model that ships on the sample pictures, with and without unsure answers; then progresvit quickstart
# make test    lint, types and tests
# make lint    lint and types alone
# make docs    docs/api.md from the docstrings

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup run test lint format docs clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# uv does not read pip's settings, so a local folder of wheels that pip knows of is handed over.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "error: Python 3.11 or 3.12 is needed; run 'make PYTHON=/path/to/python3.11'"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	links="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true)}"; \
	  if [ -n "$$links" ]; then export UV_FIND_LINKS="$$links"; fi; \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --constraints constraints.txt --editable '.[dev]'
	@touch $@

# The model knows four of the ten sample pictures. First it answers for all; then it withholds unsure answers.
run: setup
	$(BIN)/progresvit classify --samples --top-k 2
	$(BIN)/progresvit classify --samples --threshold careful
	$(BIN)/progresvit quickstart --out runs/quickstart --overwrite

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python docs/make_api.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
