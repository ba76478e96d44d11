# make demo       the main job on a real SGLang server, from a bare clone
# make test       the quick suite          make test-all   with the slow tests
# make check      ruff, mypy, import rules make fmt        format the code
# make bench      parts, figures, bars     make wheel      build, install elsewhere, import
# make modes      the table docs/modes.md  make soak       20,000 mixed requests, with aborts, retries, restarts
# make aborts     1,000 prompts aborted at random moments
# make test-triton   the kernels' quick tests under the oldest and the newest Triton that serve
# make test-sglang-old   the core of the server tests on the oldest SGLang that serves
# make test-trainers   captures read and trained on by the trainers' own packages (TRAINERS=readers for one environment)
#
# Every verb builds .venv first where it is missing or the locks have changed. The locks are whole, so pip need not resolve.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/.installed
TRITONS := 3.6.0 3.9.0
OLD_SGLANG := .cache/sglang-old
TRAINERS := readers speculators modelopt
TESTS_OF_readers := tests/trainers/test_specforge.py tests/trainers/test_angelslim.py
TESTS_OF_speculators := tests/trainers/test_speculators.py
TESTS_OF_modelopt := tests/trainers/test_modelopt.py
PAGES_OF_readers := specforge or angelslim
PAGES_OF_speculators := speculators
PAGES_OF_modelopt := modelopt

.PHONY: demo test test-all test-triton test-sglang-old test-trainers $(TRAINERS:%=test-trainer-%) check bench fmt wheel modes soak aborts

demo: $(ENVIRONMENT)
	$(PY) bench/demo.py $(DEMO)

test: $(ENVIRONMENT)
	$(PY) -m pytest -q -m "not slow"

# A server that starts keeps one core busy: two files at a time.
test-all: $(ENVIRONMENT)
	$(PY) -m pytest -q -p tests.cells -m "not trainer" -n 2 --dist loadfile --no-loadscope-reorder --benchmark-disable --timeout 600

test-triton: $(TRITONS:%=.cache/triton-%/.installed)
	set -e; for version in $(TRITONS); do \
	  export PYTHONPATH="$(CURDIR)/.cache/triton-$$version"; \
	  $(PY) -c "import triton; assert triton.__version__ == '$$version', triton; print('triton $$version')"; \
	  $(PY) -m pytest -q -m "not slow" tests/kernels; \
	done

.cache/triton-%/.installed: | $(ENVIRONMENT)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --target $(@D) triton==$*
	touch $@

test-trainers: $(TRAINERS:%=test-trainer-%)
	$(PY) -m pytest -q -m trainer tests/trainers/test_example.py

# A second OpenMP thread makes these small models slower on a shared machine. Warnings are the packages' own.
$(TRAINERS:%=test-trainer-%): test-trainer-%: .cache/trainers/%/.installed .cache/trainers/captures
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -q -W default -m trainer $(TESTS_OF_$*)
	$(PY) -m pytest -q -m trainer tests/trainers/test_pages.py -k "$(PAGES_OF_$*)"

.cache/trainers/%/.installed: tests/trainers/locks/%.lock tests/trainers/locks/%-nodeps.lock
	rm -rf $(@D)
	"$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps $(addprefix -r ,$(filter %.lock,$^))
	$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.cache/trainers/captures: tests/trainers/smollm2.py | $(ENVIRONMENT)
	rm -rf $@
	OMP_NUM_THREADS=1 $(PY) -m tests.trainers.smollm2 $@
	touch $@

modes: $(ENVIRONMENT)
	$(PY) -m pytest -q -p tests.cells -m cell

soak: $(ENVIRONMENT)
	$(PY) -m tests.server.soak $(SOAK)

aborts: $(ENVIRONMENT)
	$(PY) -m tests.server.aborts $(ABORTS)

test-sglang-old: $(OLD_SGLANG)/.installed
	set -e; export PYTHONPATH="$(CURDIR)/$(OLD_SGLANG)"; \
	$(PY) -c "from hashtap import releases, targets; assert releases.installed_sglang()[0] == targets.TESTED_VERSIONS[0]"; \
	$(PY) -m pytest -q -m "not slow" tests/seam/test_plugin.py tests/seam/test_setters.py \
	  tests/server/test_identity.py tests/server/test_values.py tests/server/test_refusals.py

$(OLD_SGLANG)/.installed: sglang-old.lock | $(ENVIRONMENT)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --target $(@D) -r sglang-old.lock
	touch $@

check: $(ENVIRONMENT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_layers.py tests/test_public.py

bench: $(ENVIRONMENT)
	$(PY) -m pytest -q bench/micro --benchmark-json=bench/results/benchmarks.json
	$(PY) bench/figures.py

fmt: $(ENVIRONMENT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: $(ENVIRONMENT)
	rm -rf dist build
	$(PY) -m build --quiet --wheel --no-isolation
	rm -rf .cache/elsewhere && "$(PYTHON)" -m venv .cache/elsewhere
	.cache/elsewhere/bin/pip install --quiet --constraint cpu.lock dist/hashtap-*.whl
	cd .cache && elsewhere/bin/python ../tests/wheel_smoke.py ../tests/golden/captures

$(ENVIRONMENT): cpu.lock cpu-nodeps.lock pyproject.toml setup.cfg
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit("hashtap is developed on Python 3.11, \
	but $(PYTHON) is %d.%d: install 3.11 and say make PYTHON=/path/to/python3.11" % v)'
	rm -rf $(VENV)
	"$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --quiet --no-deps -r cpu.lock -r cpu-nodeps.lock
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
