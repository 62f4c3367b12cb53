# make run: set-up and the whole book. make test: set-up and the tests. Both work on a fresh machine.
PYTHON ?= python3
ENGINE ?= auto
ARGS ?=
BIN = .venv/bin

.PHONY: run test test-fast faults parallel browser screenshots setup lab fresh clean lint
run: setup
	@$(BIN)/qrecipe run --engine $(ENGINE) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	@$(BIN)/python -m pytest -m "not engine" $(ARGS)

# every fault, the slow ones and those on the real engine among them
faults: setup
	@QRECIPE_FAULTS=all $(BIN)/python -m pytest tests/faults tests/test_class.py $(ARGS)

# one model on two ranks and as two copies, on the real engine (minutes)
parallel: setup
	@QRECIPE_PARALLEL=all $(BIN)/python -m pytest tests/test_parallel.py $(ARGS)

# every chapter in JupyterLab in a real browser (minutes); screenshots keeps a picture of each in runs/screenshots
browser: setup
	@QRECIPE_BROWSER=all $(BIN)/python -m pytest tests/browser $(ARGS)

screenshots: setup
	@QRECIPE_BROWSER=all QRECIPE_SCREENSHOTS=runs/screenshots $(BIN)/python -m pytest tests/browser $(ARGS)

setup:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 8) and "set-up: this Python is too old, 3.11 to 3.13 is needed: make PYTHON=/path/to/python3.12" or 0)'
	@$(PYTHON) -m qrecipe.install --engine $(ENGINE)

lab: setup
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/index.md $(ARGS) notebooks

# takes the outputs out of the notebooks; what was typed into them stays
fresh: setup
	@$(BIN)/jupyter nbconvert --log-level ERROR --clear-output --inplace notebooks/[0-9]*.ipynb

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	@test ! -x $(BIN)/python || $(BIN)/python -m qrecipe.alias remove
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis qrecipe.egg-info
