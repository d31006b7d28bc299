# Everything sets itself up: `make demo` needs Python alone, `make test` also Java 17 and Maven.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN := PYTHONPATH=tests $(BIN)/python -m
# Else each of the hundreds of processes of a test run compiles for itself what it imports.
unexport PYTHONDONTWRITEBYTECODE

# Kinds of tests that run only if they are asked for: tests/tools/table.py.
KINDS := asyncapi chaos clusters console deploy examples image kube recover upgrade wild

.PHONY: demo test test-slow test-all check bench simulate fuzz docs dist kafka constraints clean gpu-wheels gpu-check \
	$(KINDS)

demo: $(RUNNABLE)
	@echo "A manager and three workers on this machine, for a few seconds."
	$(BIN)/outfitter demo

# Four at a time also on two cores: many tests wait for a clock or for a broker.
TESTS := $(BIN)/pytest tests --numprocesses 4 --dist worksteal

test: $(READY)
	$(TESTS) -m 'not slow' $(PYTEST_ARGS)

test-slow: $(READY)
	$(TESTS) -m slow $(PYTEST_ARGS)

# What continuous integration tests.
test-all: test test-slow asyncapi deploy examples console

# One kind, with its tools: `make chaos PYTEST_ARGS="-k frozen"`.
$(KINDS): $(TOOLS)
	$(RUN) tools $@
	$(BIN)/pytest -m $@ $(PYTEST_ARGS)

chaos: export CHAOS_OUT = chaos-results.json
wild: export WILD_OUT = wild-results.json

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(RUN) bench --out bench-results.json

simulate: $(READY)
	$(RUN) simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(SIMULATE_ARGS)

fuzz: $(TOOLS)
	$(RUN) fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(TARGETS)

# What `make gpu-check` installs where there is a GPU and no network, for each Python that may be there.
gpu-wheels: $(READY)
	rm -rf build/gpu-wheels && mkdir -p build
	for version in 3.11 3.12 3.13; do \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest build/gpu-wheels --no-deps --only-binary :all: --python-version $$version \
			--require-hashes -r constraints-service.txt || exit 1; \
	done
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir build/gpu-wheels .

gpu-check:
	@sh tests/gpu/run.sh "$(PYTHON)"

# The site in build/docs, out of the pages where they are. A warning is an error.
docs: $(TOOLS)
	rm -rf build/docs
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going \
		--conf-dir docs --doctree-dir build/doctrees . build/docs
	cp build/docs/README.html build/docs/index.html
	$(BIN)/python docs/check.py build/docs

# The wheel, the sdist and the SBOM of the last commit in dist: built twice, checked, tried where nothing is installed.
dist: $(TOOLS)
	$(RUN) release

# Ctrl-C, which the broker takes for an order to end, is no failure here.
kafka:
	@trap : INT; $(PYTHON) deploy/kafka/local_kafka.py broker || [ $$? -eq 130 ]

# A virtual environment with the checkout itself and what it needs to run, from hashed constraints.
$(RUNNABLE): pyproject.toml constraints-service.txt
	@echo "Setting up $(VENV): the packages of constraints-service.txt are downloaded and installed, once."
	@$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r constraints-service.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q proto drivers service
	touch $@

# And what checks, tests and benchmarks need.
$(READY): $(RUNNABLE) constraints.txt
	@echo "The packages of constraints.txt are downloaded and installed, which takes a minute or two, once."
	$(PIP) --require-hashes -r constraints.txt
	touch $@

# And what the site, the release, the console and so on need.
$(TOOLS): $(READY) constraints-tools.txt
	$(PIP) --require-hashes -r constraints-tools.txt
	touch $@

# Pin anew what pyproject.toml allows, for every supported Python. What is pinned stays if it may.
PIN := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate

constraints: $(RUNNABLE)
	$(PIP) uv
	$(PIN) --extra service --extra uvloop --group dev --output-file constraints.txt pyproject.toml
	$(PIN) --extra service --extra nvidia --extra uvloop --group build --constraint constraints.txt \
		--output-file constraints-service.txt pyproject.toml
	$(PIN) --group tools --constraint constraints.txt --output-file constraints-tools.txt

.DEFAULT:
	@echo "there is no target $@: CONTRIBUTING.md has them all, CHANGELOG.md what former ones are called now" >&2; false

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
