# The two commands of a clean machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TP     ?= 2
OUT    ?= demo-output

.PHONY: setup demo test gpu bench mutation fuzz fuzz-guided faults lint format clean

setup: $(VENV)/.ready

# torch first and exactly: a looser request, made by any other package, downloads a CUDA build of gigabytes.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $@

# What the tests alone need. Where torchao is installed, each import of diffusers takes seconds longer, and says so.
$(VENV)/.ready-to-test: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev,quantize,video]'
	touch $@

demo: setup
	$(BIN)/shardwise demo --tp $(TP) --out $(OUT)

# Two halves at once, of about one length: the tests on several ranks wait for each other more than they compute.
BESIDE := $(patsubst %,tests/distributed/test_%.py,demo generate launch pipeline training verify)

test: $(VENV)/.ready-to-test
	@log=$$(mktemp); \
	$(BIN)/python -m pytest tests/unit $(BESIDE) > $$log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest tests/distributed $(BESIDE:%=--ignore=%); rest=$$?; \
	wait $$beside; beside=$$?; \
	cat $$log; rm -f $$log; \
	exit $$((rest | beside))

# On a machine with CUDA devices: the tests of ranks, then loading and steps, in an environment of its own.
# GPU_RANKS are measured, of 2 by default; with GPU_SHARE=1 ranks share devices, so that one is enough for the tests.
gpu:
	$(PYTHON) -m tools.gpu $(if $(GPU_RANKS),--ranks $(GPU_RANKS)) $(if $(filter 1,$(GPU_SHARE)),--share) $(GPU_OPTIONS)

# Loading and steps beside diffusers' own, in about fifteen minutes on two cores that nobody else uses; needs 12 GiB.
bench: setup
	$(BIN)/shardwise bench load --ranks 2 --json benchmarks/results/load-2-ranks.json --plot benchmarks/results/load-2-ranks.png
	$(BIN)/shardwise bench load --ranks 4 --json benchmarks/results/load-4-ranks.json --plot benchmarks/results/load-4-ranks.png
	$(BIN)/shardwise bench load --ranks 2 --no-modulations --no-cold --json benchmarks/results/load-2-ranks-modulations-whole.json --plot benchmarks/results/load-2-ranks-modulations-whole.png
	$(BIN)/shardwise bench step --ranks 2 --json benchmarks/results/step-2-ranks.json --plot benchmarks/results/step-2-ranks.png
	$(BIN)/python -m tools.performance

# Holds the static check against the whole record of wrong plans; tools/mutation/truth.py makes the record anew.
mutation: setup
	$(BIN)/python -m tools.mutation.report

# Hostile files by the million, judged beside the safetensors library; the tests run a tenth of them.
fuzz: setup
	$(BIN)/python -m tools.fuzz --count 1000000 --seed 1 --record docs/fuzz.json

# Loses ranks, hosts and links on purpose, and writes docs/reliability.md from what came of it.
faults: setup
	$(BIN)/python -m tools.faults

# The same verdicts, on inputs that libFuzzer finds by what they reach in the code.
fuzz-guided: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tools.fuzz.guided -max_total_time=600

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-gpu $(OUT) build dist .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
