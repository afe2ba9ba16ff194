# From a fresh clone: `make demo` shows the engine at work, `make test` checks all of it.
# Needs Python >= 3.11, gcc >= 12 and make; everything else is installed into .venv.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # each step is parallel inside (ninja, ctest); their output stays readable

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMPS := $(VENV)/stamps
OUTSIDE_PATH := $(PATH)
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)

# -qq: silent unless it fails, and then with the whole story.
PIP_INSTALL := $(BIN)/python -m pip install -qq

# Requirements are written once, in pyproject.toml: $(call requirements,project.dependencies ...).
requirements = $(BIN)/python -c 'import sys, tomllib; from functools import reduce; \
  project = tomllib.load(open("pyproject.toml", "rb")); \
  print(*(line for path in sys.argv[1:] for line in reduce(dict.__getitem__, path.split("."), project)), sep="\n")' $(1)

# Directories are listed too, so that a deleted file counts as a change.
PACKAGE_SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE examples/tour.py \
  $(shell find native src -name tests -prune -o -name __pycache__ -prune -o -path src/vram/web/static -prune -o -print \
    2>/dev/null)
WEB_SOURCES := $(shell find web -name node_modules -prune -o -type f -print 2>/dev/null)
CXX_FILES = $(shell find native benchmarks examples tests/process/c src/vram/torch -name '*.[ch]' -o -name '*.hpp' -o -name '*.cpp' 2>/dev/null)

.PHONY: help demo test test-all check stubs format sanitize bench clean distclean setup native-test python-test \
  native-build asan-build sanitize-address sanitize-thread sanitize-python test-integrations test-gpu test-peers web test-web screenshots test-null null-python

help:
	@echo "make demo      set up .venv and run the tour on the default device"
	@echo "make test      set up .venv, then checks, native tests and Python tests"
	@echo "make test-all  exhaustive versions of sampled tests: every schedule, every failing call, 10 000 damaged files"
	@echo "make check     ruff, mypy, import contracts, clang-format, stub diff"
	@echo "make web       build the page of vram serve (Node 20 or later); make test-web: test it in Chromium"
	@echo "make screenshots  make the pictures of the page in docs/images"
	@echo "make test-integrations  tests with CuPy, Numba, cuda.core, JAX, PyTorch and Dask (a large download)"
	@echo "make test-null  tests of PyTorch on a null GPU: no GPU is needed (a large download)"
	@echo "make sanitize  native tests under ASan+UBSan and TSan, Python tests under ASan"
	@echo "make test-gpu  tests that need a CUDA device, without .venv or network"
	@echo "make test-peers PEERS=folder  suites of PyTorch, CuPy and Numba with vram, on a GPU: docs/internals/testing.md"
	@echo "make bench     run every benchmark"
	@echo "make docs      build the documentation site into build/site; make wheel-check: check the wheel and the sdist"
	@echo "make format    format Python and C++;  make stubs: regenerate src/vram/_native.pyi"
	@echo "make clean     remove build outputs;   make distclean: remove .venv too"

# ---- setup: one stamp a step ------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "vram needs Python 3.11 or later, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/venv pyproject.toml
	@echo "== installing build tools"
	@list=$$($(call requirements,build-system.requires project.dependencies)); \
	  $(PIP_INSTALL) -r <(echo "$$list") 'cmake>=3.20' 'ninja>=1.10'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/build pyproject.toml
	@echo "== installing test and development tools"
	@list=$$($(call requirements,project.optional-dependencies.test project.optional-dependencies.dev)); \
	  $(PIP_INSTALL) -r <(echo "$$list")
	@touch $@

# The page of `vram serve`, if Node is installed and its libraries can be downloaded. Without it, vram says so.
# Not `npm ci`: it wants every platform's build of the bundler in the lock file, and not all of them exist.
NPM_INSTALL := npm install --no-save --no-audit --no-fund --loglevel=error
$(STAMPS)/web: $(STAMPS)/venv $(WEB_SOURCES)
	@if ! node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; then \
	  echo "== Node 20 is not installed: skipping the page of vram serve"; \
	elif ! (cd web && $(NPM_INSTALL) >/dev/null); then \
	  echo "== npm failed to install the dependencies of the page: skipping it"; \
	else $(MAKE) --no-print-directory web; fi
	@touch $@

web:
	@echo "== building the page"
	@cd web && { [ -d node_modules ] || $(NPM_INSTALL); } && npm run --silent build -- --logLevel warn

$(STAMPS)/package: $(STAMPS)/build $(STAMPS)/web $(PACKAGE_SOURCES)
	@echo "== building and installing vram"
	@$(PIP_INSTALL) --no-build-isolation --no-deps --force-reinstall .
	@touch $@

setup: $(STAMPS)/dev $(STAMPS)/package

# ---- use ----------------------------------------------------------------------------------------

demo: $(STAMPS)/package
	@$(BIN)/vram demo

# Native benchmarks are built without check() calls, unlike the tests: build/bench/bench_*.
NATIVE_BENCHMARKS = $(patsubst benchmarks/native/%.cpp,bench_%,$(wildcard benchmarks/native/*.cpp))

bench: setup
	@$(call configure,bench,-DVRAM_MODULE=OFF)
	@[ -z "$(NATIVE_BENCHMARKS)" ] || $(BIN)/ninja -C build/bench --quiet $(NATIVE_BENCHMARKS)
	@for name in hotpath threads scenarios pages warmup; do \
	  echo "== vram bench $$name"; $(BIN)/vram bench "$$name"; done
	@for name in waste open record policies; do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python "benchmarks/$$name.py"; done

# ---- checks and tests -----------------------------------------------------------------------------

test: setup
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory native-test
	@$(MAKE) --no-print-directory python-test

# The Python tests that try a sample in `make test`.
SAMPLED_TESTS := tests/conformance/test_contents.py tests/faults tests/fuzz tests/properties \
  tests/process/test_close_surface.py tests/process/test_extreme_arguments.py tests/process/test_fork_surface.py \
  tests/unit/test_trace_hostile.py

test-all: export VRAM_THOROUGH := 1
test-all: setup native-test
	@echo "== exhaustive Python tests"
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) $(SAMPLED_TESTS)

check: setup
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import contracts"
	@rm -rf build/imports && mkdir -p build/imports && cp -r src/vram build/imports/vram
	@cp src/vram/_native.pyi build/imports/vram/_native.py
	@PYTHONPATH=build/imports $(BIN)/lint-imports --no-cache --no-logo
	@echo "== include floors"
	@$(BIN)/python native/check_includes.py
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@echo "== stub of the native module"
	@$(BIN)/python -m nanobind.stubgen -q -p native/bindings/stubs.pat -m vram._native -o build/_native.pyi
	@diff -u src/vram/_native.pyi build/_native.pyi || { \
	  echo "src/vram/_native.pyi does not match the bindings; run 'make stubs' and commit it." >&2; exit 1; }

stubs: setup
	@$(BIN)/python -m nanobind.stubgen -q -p native/bindings/stubs.pat -m vram._native -o src/vram/_native.pyi

format: $(STAMPS)/dev
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

# One CMake directory a configuration: $(call configure,name,options). Ninja decides what is stale.
configure = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
  -DVRAM_NATIVE_TESTS=ON $(2) >/dev/null
build = $(BIN)/cmake --build build/$(1) -- --quiet
# $(call ctest,name,seconds a suite may take; 600)
ctest = $(BIN)/ctest --test-dir build/$(1) --output-on-failure --no-tests=error --timeout $(or $(2),600)

native-build: $(STAMPS)/build
	@$(call configure,tests,-DVRAM_MODULE=OFF -DVRAM_CHECKS=ON)
	@$(call build,tests)

native-test: native-build
	@echo "== native tests"
	@$(call ctest,tests)

python-test: setup
	@echo "== Python tests"
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# The adaptors against the real libraries, as far as they go without a GPU. They are large, so apart.
$(STAMPS)/integrations: $(STAMPS)/dev pyproject.toml
	@echo "== installing CuPy, Numba, cuda.core, JAX, PyTorch and Dask"
	@list=$$($(call requirements,project.optional-dependencies.integrations)); $(PIP_INSTALL) -r <(echo "$$list")
	@touch $@

test-integrations: setup $(STAMPS)/integrations
	@echo "== tests with other libraries"
	@$(BIN)/python -m pytest $(PYTEST_ARGS) tests/integrations

# PyTorch built for CUDA, on a null GPU. It has an environment of its own, because .venv may have another build;
# there it finds what .venv has besides. A null GPU is for Linux alone.
# `make test-null NULL_TORCH=2.15.0` tests another version of PyTorch, without comparing with recordings.
NULL_TORCH ?=
NULL_GPU := null-gpu$(addprefix -,$(NULL_TORCH))
NULL_VENV := $(VENV)/$(NULL_GPU)
# Where the download takes longer, the tests are skipped.
NULL_INSTALL_SECONDS := 1200
NULL_PYTHON := $(CURDIR)/$(NULL_VENV)/bin/python
$(STAMPS)/$(NULL_GPU): $(STAMPS)/dev pyproject.toml
	@echo "== installing PyTorch built for CUDA (about 3 GB)"
	@rm -rf $(NULL_VENV) && $(BIN)/python -m venv --without-pip $(NULL_VENV)
	@$(call requirements,project.optional-dependencies.null-gpu) \
	  $(if $(NULL_TORCH),| sed 's/^torch==.*/torch==$(NULL_TORCH)/') >$(NULL_VENV)/requirements.txt
	@timeout $(NULL_INSTALL_SECONDS) \
	  $(BIN)/python -m pip --python $(NULL_PYTHON) install -qq -r $(NULL_VENV)/requirements.txt
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$site" >"$$($(NULL_PYTHON) -c "$$site")/vram.pth"
	@touch $@

# Tests for a CUDA device that run there as well; those that need results or time skip themselves.
ON_NULL_GPU := $(addprefix tests/integrations/test_torch, .py _batch_sizes.py _calls.py _race.py _spill.py) $(addprefix tests/gpu/test_, \
  exit_fork.py functions.py gpu_arena.py gpu_driver_pool.py gpu_watching.py memory.py)
NULL_PYTEST = $(NULL_PYTHON) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-null: setup
	@if ! $(MAKE) --no-print-directory $(STAMPS)/$(NULL_GPU); then \
	  echo "== PyTorch built for CUDA cannot be installed here: skipping the tests on a null GPU"; \
	elif ! $(NULL_PYTHON) -c 'import sys; from vram.predict.environment import cuda_of_torch as cuda; \
	    sys.exit(not cuda())'; then \
	  echo "== the PyTorch that pip installs here is not built for CUDA: skipping the tests on a null GPU"; \
	else $(MAKE) --no-print-directory null-python; fi

null-python:
	@$(if $(NULL_TORCH),,echo "== predictions on a null GPU"; $(NULL_PYTEST) tests/null)
	@echo "== tests for a CUDA device, on a null GPU"
	@$(NULL_PYTHON) -m vram run --null-gpu h200 -- $(NULL_PYTEST) $(ON_NULL_GPU)

# The page in a real browser. The tests skip where there is no Chromium; .ci/run installs it.
$(STAMPS)/browser: $(STAMPS)/dev pyproject.toml
	@list=$$($(call requirements,project.optional-dependencies.browser)); $(PIP_INSTALL) -r <(echo "$$list")
	@touch $@

# The pictures of the page in docs/images, from the recordings in traces/.
screenshots: setup $(STAMPS)/browser
	@echo "== pictures of the page"
	@$(BIN)/python docs/images/make_screenshots.py

test-web: setup $(STAMPS)/browser
	@echo "== tests of the page in a browser"
	@$(BIN)/python -m pytest $(PYTEST_ARGS) tests/web

# ---- what is published ------------------------------------------------------------------------------

.PHONY: docs wheel-check

# The documentation site. A broken link or a public name without a docstring fails it.
$(STAMPS)/docs: $(STAMPS)/build pyproject.toml
	@echo "== installing MkDocs"
	@list=$$($(call requirements,project.optional-dependencies.docs)); $(PIP_INSTALL) -r <(echo "$$list")
	@touch $@

docs: $(STAMPS)/package $(STAMPS)/docs
	@echo "== documentation site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet, which does not count warnings
	@echo "build/site/index.html"

# A wheel of this platform, the pure-Python wheel and the source distribution, and what they must pass.
# The page must be built (make web). The native core is taken from the build directory of `make setup`.
$(STAMPS)/wheel: $(STAMPS)/build pyproject.toml
	@echo "== installing tools for wheels"
	@list=$$($(call requirements,project.optional-dependencies.wheel)); $(PIP_INSTALL) -r <(echo "$$list")
	@touch $@

wheel-check: $(STAMPS)/package $(STAMPS)/wheel
	@echo "== wheels and source distribution"
	@rm -rf build/dist && mkdir -p build/dist
	@$(BIN)/python -m build --no-isolation --outdir build/dist --sdist . >build/dist/log 2>&1 || { cat build/dist/log; exit 1; }
	@$(BIN)/python -m build --no-isolation --outdir build/dist --wheel . >>build/dist/log 2>&1 || { cat build/dist/log; exit 1; }
	@VRAM_PURE_PYTHON=1 $(BIN)/python -m build --no-isolation --outdir build/dist --wheel . >>build/dist/log 2>&1 || \
	  { cat build/dist/log; exit 1; }
	@$(BIN)/python tests/process/check_wheels.py build/dist

# ---- sanitizers -------------------------------------------------------------------------------------

UBSAN_OPTIONS := halt_on_error=1:print_stacktrace=1
comma := ,

# Random operations from four threads in each sanitized run of the stress test.
SANITIZED_OPS ?= 20000000

sanitize: sanitize-address sanitize-thread sanitize-python

# ThreadSanitizer of older compilers cannot stand a widely randomised address space. Children of a fork start threads of
# their own, which it allows with die_after_fork=0.
FIXED_ADDRESSES = $(shell setarch "$$(uname -m)" -R true 2>/dev/null && echo setarch "$$(uname -m)" -R)

asan-build: $(STAMPS)/build
	@$(call configure,asan,-DVRAM_MODULE=ON -DPython_EXECUTABLE=$(BIN)/python -DVRAM_CHECKS=ON \
	  -DVRAM_SANITIZE=address$(comma)undefined)
	@$(call build,asan)

sanitize-address: asan-build
	@echo "== native tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@VRAM_STRESS_OPS=$(SANITIZED_OPS) UBSAN_OPTIONS=$(UBSAN_OPTIONS) $(call ctest,asan,1800)

sanitize-thread: $(STAMPS)/build
	@echo "== native tests under ThreadSanitizer"
	@$(call configure,tsan,-DVRAM_MODULE=OFF -DVRAM_SANITIZE=thread)
	@$(call build,tsan)
	@VRAM_STRESS_OPS=$(SANITIZED_OPS) TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:die_after_fork=0 \
	  $(FIXED_ADDRESSES) $(call ctest,tsan,1800)

# The tests that cross into native code most; the others are Python's alone, and slow here.
SANITIZED_TESTS ?= tests/conformance tests/faults tests/properties tests/unit/test_buffer.py \
  tests/unit/test_device.py tests/unit/test_field_bugs.py

# The package with the sanitized module lies in build/asan/overlay and hides the installed one.
# libstdc++ is preloaded too: AddressSanitizer must find it at start to follow C++ exceptions.
# pytest leaves file descriptor 2 alone (--capture=sys), so that a report is seen when the process dies.
sanitize-python: setup asan-build
	@echo "== Python tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@rm -rf build/asan/overlay && mkdir -p build/asan/overlay && cp -r src/vram build/asan/overlay/vram
	@$(BIN)/cmake --install build/asan --prefix build/asan/overlay >/dev/null
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=$(UBSAN_OPTIONS) \
	  PYTHONMALLOC=malloc PYTHONPATH="$(CURDIR)/build/asan/overlay" \
	  $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --capture=sys -m "not slow and not fork" --hypothesis-profile=sanitize $(PYTEST_ARGS) \
	  $(SANITIZED_TESTS)

# ---- on a GPU ---------------------------------------------------------------------------------------
# With the interpreter at hand and what is installed there (nanobind, scikit-build-core, cmake, ninja, torch,
# CuPy, Numba, NumPy, pytest, hypothesis): no .venv and no network. All but the soak takes minutes at most.

VRAM_SOAK_SECONDS ?= 180
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_REPORTS ?= build/gpu-reports
GPU_STEPS := gpu-device gpu-install gpu-conformance gpu-python gpu-soak gpu-memcheck gpu-native
# Plugins that other packages brought there take no part.
GPU_ENVIRONMENT = PYTHONPATH="$(GPU_SITE)" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
GPU_PYTEST = $(PYTHON) -m pytest -q -p no:cacheprovider $(PYTEST_ARGS)
.PHONY: $(GPU_STEPS) gpu-integrations
test-gpu $(GPU_STEPS) gpu-integrations: export PATH := $(OUTSIDE_PATH)
test-gpu: $(GPU_STEPS)

gpu-device:
	@$(PYTHON) -c 'import ctypes; driver = ctypes.CDLL("libcuda.so.1"); count = ctypes.c_int(); \
	  assert driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value' \
	  2>/dev/null || { echo "make test-gpu needs a CUDA device: libcuda.so.1 is missing or reports none." >&2; exit 1; }

gpu-install: gpu-device
	@echo "== building vram for $$($(PYTHON) --version)"
	@rm -rf "$(GPU_SITE)"
	@$(PYTHON) -m pip install -qq --no-index --no-build-isolation --no-deps --target "$(GPU_SITE)" .
	@cd / && PYTHONPATH="$(GPU_SITE)" $(PYTHON) -c 'import vram; found = vram.devices(); print(*found, sep="\n"); \
	  assert found[0].kind == "cuda", "vram finds no CUDA device, so nothing would be tested"'

# Quick here, at length in `make test` and `make sanitize`.
gpu-native: gpu-device
	@echo "== native tests"
	@export PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH"; \
	  cmake -S . -B build/gpu-native -G Ninja -DVRAM_MODULE=OFF -DVRAM_NATIVE_TESTS=ON >/dev/null; \
	  cmake --build build/gpu-native -- --quiet; \
	  VRAM_STRESS_OPS=1000000 ctest --test-dir build/gpu-native --output-on-failure --no-tests=error --timeout 100

# No test here takes long: one that hangs ends the run soon.
gpu-conformance gpu-python: GPU_PYTEST += -m gpu -o faulthandler_timeout=150

gpu-conformance: gpu-install
	@echo "== conformance on CUDA"
	@$(GPU_ENVIRONMENT) $(GPU_PYTEST) --junit-xml=$(GPU_REPORTS)/conformance.xml tests/conformance

gpu-python: gpu-install
	@echo "== tests that need a real device"
	@$(GPU_ENVIRONMENT) $(GPU_PYTEST) --junit-xml=$(GPU_REPORTS)/tests.xml --ignore=tests/gpu/test_soak.py \
	  --ignore=tests/gpu/test_gpu_arrays.py --ignore=tests/gpu/test_gpu_adaptors.py tests/gpu

# Other libraries over vram, apart from the above: they bring contexts, streams and endings of their own.
gpu-integrations: gpu-install
	@echo "== tests with other libraries"
	@$(GPU_ENVIRONMENT) $(GPU_PYTEST) --junit-xml=$(GPU_REPORTS)/integrations.xml \
	  tests/gpu/test_gpu_arrays.py tests/gpu/test_gpu_adaptors.py tests/integrations

gpu-soak: gpu-install
	@echo "== soak: $(VRAM_SOAK_SECONDS) seconds"
	@$(GPU_ENVIRONMENT) VRAM_SOAK_SECONDS=$(VRAM_SOAK_SECONDS) $(GPU_PYTEST) \
	  --junit-xml=$(GPU_REPORTS)/soak.xml \
	  -o faulthandler_timeout=$$(($(VRAM_SOAK_SECONDS) + 180)) tests/gpu/test_soak.py

# compute-sanitizer is part of the CUDA toolkit and cannot work everywhere; then this says so and goes on.
MEMCHECKED := serve_a_large_one or plain_segments or trim_gives or own_stream_reuses_while or \
  (whatever_happens and 1-pages)
gpu-memcheck: gpu-install
	@echo "== compute-sanitizer"
	@tool=$$($(PYTHON) tests/gpu/find_sanitizer.py) || { echo "$$tool"; exit 0; }; \
	  $(GPU_ENVIRONMENT) timeout 150 "$$tool" --tool memcheck --error-exitcode 99 --report-api-errors no \
	  --target-processes application-only $(GPU_PYTEST) --junit-xml=$(GPU_REPORTS)/memcheck.xml \
	  -k "$(MEMCHECKED)" tests/gpu/test_memory.py tests/gpu/test_kernel_order.py

# Suites of other libraries, from a folder that the user names, with their own allocators and with vram.
PEERS_ARGS ?=
test-peers: export PATH := $(OUTSIDE_PATH)
test-peers: gpu-install
	@[ -n "$(PEERS)" ] || { echo "make test-peers needs PEERS=folder; see docs/internals/testing.md" >&2; exit 2; }
	@PYTHONPATH="$(GPU_SITE):$${PYTHONPATH:-}" $(PYTHON) tests/peers/compare_peers.py $(PEERS_ARGS) "$(PEERS)"

# ---- housekeeping -----------------------------------------------------------------------------------

clean:
	rm -rf build dist src/vram/web/static web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find native src tests -name __pycache__ -type d -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
