# Every target that needs Python creates .venv on its first call and reuses it afterwards.
.DEFAULT_GOAL := help
.PHONY: help docs preview catalogues serve check test records test-all lint lab exercises bench gpu check-site clean install broken
SHELL := /bin/sh
PORT ?= 8000
PY := .venv/bin/python
SITE := docs/_build/html
DOCTREES := docs/_build/doctrees
STAMP := .venv/.installed

# On shared cores the threads of torch cost more than they bring; two processes use both cores.
export OMP_NUM_THREADS := 1
export GALLERY_JOBS ?= 2
export PYTHONDONTWRITEBYTECODE := 1
export MYPY_NUM_WORKERS := 2

help: ## say what each target does
	@echo "lm_from_scratch"
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /|/' | while IFS='|' read -r name text; do \
		printf '  make %-11s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## create .venv and install the pinned requirements

# A Python that was removed or upgraded leaves .venv broken: it is made again.
$(STAMP): pyproject.toml constraints.txt $(shell test -x .venv/bin/python || echo broken)
	@if ! "$(PY)" -c 'import sys' 2>/dev/null; then \
		found=''; seen=''; \
		set -- python3.11 python3.12 python3.13 python3.14 python3 python; \
		[ -z "$(PYTHON)" ] || set -- "$(PYTHON)"; \
		for name; do \
			command -v "$$name" >/dev/null 2>&1 || { [ -z "$(PYTHON)" ] || seen=" There is no $$name."; continue; }; \
			version=$$("$$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || \
				{ seen="$$seen $$name does not start."; continue; }; \
			if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then found=$$name; break; fi; \
			seen="$$seen $$name is $$version."; \
		done; \
		if [ -z "$$found" ]; then \
			echo "Python 3.11 or newer is needed.$$seen Install it, or name it: make PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Creating .venv with $$found"; \
		rm -rf .venv; \
		"$$found" -m venv .venv || { rm -rf .venv; \
			echo "$$found cannot create a virtual environment. Install its venv module (Debian and Ubuntu: python3-venv)." >&2; exit 1; }; \
	fi
	@"$(PY)" -m pip --version >/dev/null 2>&1 || "$(PY)" -m ensurepip >/dev/null
	@echo "Installing the requirements: minutes on the first call, then seconds"
	@"$(PY)" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,docs,lab]' || { \
		echo "The installation is not complete; the first lines above say why. It needs the network. Run the command again: it goes on." >&2; exit 1; }
	@touch "$@"

docs: $(STAMP) ## build the site from nothing; every tutorial runs, a warning is an error
	rm -rf docs/_build docs/auto_tutorials docs/api docs/generated docs/gpu docs/exercises docs/stories
	"$(PY)" -m sphinx -W --keep-going -j $(or $(filter-out 0,$(GALLERY_JOBS)),1) -b html -d "$(DOCTREES)" docs "$(SITE)"
	@echo "The site is in $(SITE). Open $(SITE)/index.html, or run: make serve"

preview: $(STAMP) ## build the site again; only changed tutorials run (for authors)
	"$(PY)" -m sphinx -b html -d "$(DOCTREES)" docs "$(SITE)"
	@echo "The site is in $(SITE). Results of unchanged tutorials were kept; publish from: make docs"

catalogues: $(STAMP) ## for translators: the text of the built site in build/catalogues
	@test -f "$(SITE)/index.html" || { echo "There is no site yet. Run: make docs" >&2; exit 1; }
	rm -rf build/catalogues
	SOURCE_DATE_EPOCH=0 "$(PY)" -m sphinx -q -t catalogues -b gettext -d docs/_build/gettext docs build/catalogues
	"$(PY)" tests/helpers/catalogues.py build/catalogues

serve: $(STAMP) ## show the built site on this machine (PORT=8000)
	@test -f "$(SITE)/index.html" || { echo "There is no site yet. Run: make docs" >&2; exit 1; }
	@echo "http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@"$(PY)" -m http.server --bind 127.0.0.1 --directory "$(SITE)" "$(PORT)"

lint: $(STAMP) ## ruff, mypy, and which room imports which
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .
	"$(PY)" -m mypy
	"$(dir $(PY))lint-imports" --no-logo --no-cache

check: lint ## lint, and the tests of the files that git says have changed
	"$(PY)" tests/changed.py

# What takes minutes and finds the same each time is recorded in tests/slow/recorded, with a digest of
# all that it depends on. A record that is not current is proved again; under CI=true it is an error.
# (The plugin of nbval takes seconds in every process; the tests that need it start one of their own.)
PYTEST := "$(PY)" -m pytest -p no:nbval -n 2 --dist loadgroup --no-loadscope-reorder

test: lint ## lint, then the test suite; proofs whose records are current are not repeated
	$(PYTEST)

records: $(STAMP) ## repeat the proofs whose records are not current, and write these
	CI= RECORDS=stale $(PYTEST) -v tests/slow/test_records.py

test-all: lint ## the test suite with every proof repeated and compared with its record
	RECORDS=again $(PYTEST)

check-site: $(STAMP) ## check the built site in a browser: links, mathematics, accessibility (EVERY_VIEW=1: more)
	@test -f "$(SITE)/index.html" || { echo "There is no site yet. Run: make docs" >&2; exit 1; }
	"$(PY)" -m pytest -p no:nbval tests/site -n 2

lab: $(STAMP) ## open tutorials and exercises as notebooks in JupyterLab
	"$(PY)" docs/_ext/notebooks.py build/notebooks
	"$(PY)" -m jupyterlab --notebook-dir=build/notebooks $(LAB_FLAGS)

exercises: $(STAMP) ## for teachers: notebooks in build/exercises (WEEKS=12: weeks for nbgrader, in build/weeks_12)
	"$(PY)" docs/_ext/hand_out.py build/$(if $(WEEKS),weeks_$(WEEKS),exercises) $(WEEKS)

PEERS := build/bench/peers

bench: $(STAMP) $(PEERS) ## every benchmark beside its peers, for docs/benchmarks (BENCH=--quick to try; ISA=avx2)
	$(if $(filter avx2,$(ISA)),$(AVX2)) "$(PY)" tests/benchmarks/bench.py $(BENCH)

# With these every library treats the processor as one without AVX-512. torch.compile stores its code
# apart: it takes what it made for AVX-512, which writes past the end of vectors half as long.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 CT2_FORCE_CPU_ISA=AVX2 \
	TORCHINDUCTOR_CACHE_DIR="$(CURDIR)/build/inductor-avx2"

# Without what they require: galore-torch asks for a library of CUDA that no benchmark needs. One
# that this system has no wheel of is not measured. transformers imports torchao where it finds it.
PIP = "$(PY)" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all:
$(PEERS):
	-for peer in galore-torch==1.0 pytorch_optimizer==4.1.0 bitsandbytes==0.50.2 ctranslate2==4.8.5 \
		gguf==0.19.0 xllamacpp==2026.10.11549; do $(PIP) --target "$@" $$peer; done
	-$(PIP) --target "$@/apart" torchao==0.18.0

# make gpu PY=python3 takes that Python as it is, where torch and Triton are installed already.
gpu: $(if $(filter .venv/bin/python,$(PY)),$(STAMP)) ## on a GPU: test, check and time every kernel, run the pages (PY=python3)
	"$(PY)" tests/benchmarks/run_gpu.py

clean: ## remove everything that was built; keep .venv and your notebooks
	rm -rf docs/_build docs/auto_tutorials docs/api docs/generated docs/gpu docs/exercises docs/stories dist build/ci build/lib build/bdist.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
