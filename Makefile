# Everything a person does here. `make demo` on a fresh clone installs, trains and shows the result.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
GSM8K ?= $(firstword $(wildcard data/gsm8k ../shared/data/gsm8k) data/gsm8k)
export HF_HUB_OFFLINE ?= 1
export TORCH_CPP_LOG_LEVEL ?= ERROR

.PHONY: demo test check real lint docs clean clean-venv

demo: $(VENV)/.ready  ## a whole asynchronous run on this CPU, a few minutes
	$(BIN)/slipstream up -c configs/quickstart.yaml learner.checkpoint.resume=never $(ARGS)

real: $(VENV)/.ready  ## a real model on real prompts (GSM8K's directory in GSM8K=), about half an hour on two cores
	$(BIN)/slipstream up -c configs/smollm2_gsm8k_cpu.yaml learner.checkpoint.resume=never \
	  task.options.path=$(GSM8K) $(ARGS)

test: $(VENV)/.ready  ## every test that runs without a GPU
	$(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

check: lint  ## the whole check in under 90 seconds
	$(BIN)/python -m pytest -m "not slow and not service and not gpu" -q -n 4 --dist loadfile $(ARGS)

lint: $(VENV)/.ready  ## lint, format, strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready  ## docs/configuration.md, from the models that check a configuration
	$(BIN)/python -P -m configs.reference > docs/configuration.md

# Stamped: made once, and again when the pins or the project's own metadata change.
$(VENV)/.ready: requirements/cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-deps --progress-bar off -r requirements/cpu.txt || { \
	  echo; \
	  echo "Set-up failed. If pip found no torch of the version pinned in requirements/cpu.txt: the CPU builds are in"; \
	  echo "PyTorch's own wheel index. Find its address at pytorch.org under Get Started (pip, Linux, CPU), then run"; \
	  echo "    PIP_EXTRA_INDEX_URL=<that address> make $(VENV)/.ready"; \
	  exit 1; } >&2
	$(BIN)/python -m pip install --no-deps --no-build-isolation --progress-bar off --quiet -e .
	touch $@

clean:  ## outputs and caches
	rm -rf outputs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

clean-venv:
	rm -rf $(VENV)
