# make run: set-up and the whole book. make test: set-up and the tests. Both work on a fresh machine.
PYTHON ?= python3
ENGINE ?= auto
ARGS ?=
BIN = .venv/bin

.PHONY: run test test-fast setup lab clean lint
run: setup
	@$(BIN)/qrecipe run --engine $(ENGINE) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	@$(BIN)/python -m pytest -m "not engine" $(ARGS)

setup:
	@$(PYTHON) -m qrecipe.install --engine $(ENGINE)

lab: setup
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks/01_size_gpu.ipynb

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	@test ! -x $(BIN)/python || $(BIN)/python -m qrecipe.alias remove
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis qrecipe.egg-info
