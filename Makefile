# Two commands: `make demo` runs the main job on the embedded engine, `make test` runs all tests.
# Both set up what they need in .venv; nothing outside the checkout is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench detection wheel-check real-vllm test-real-model clean

demo: $(STAMP)
	@$(BIN)/python -m speccheck demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python tests/bench/engine.py
	$(BIN)/python tests/bench/adaptive.py
	$(BIN)/python tests/bench/gateway.py

# Which broken verifiers the distribution tests find, with how many tokens.
detection: $(STAMP)
	$(BIN)/python tests/bench/detection.py

# A real vLLM (its CPU build, 3.7 GB in .venv-vllm, once): what is broken in it is found, what is
# sound passes. Minutes.
real-vllm: $(STAMP)
	$(BIN)/python tests/real_vllm.py

# A real chat model on it: SmolLM2-135M-Instruct with prompt lookup. Only when asked: many minutes.
test-real-model: $(STAMP)
	$(BIN)/python tests/real_model.py --keep .venv-vllm/real-model

# A wheel in a fresh virtual environment, away from the checkout.
wheel-check: $(STAMP)
	$(BIN)/python tests/wheel_check.py

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "speccheck needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) demo dist build .pytest_cache .mypy_cache .ruff_cache
