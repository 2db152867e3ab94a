# Needs python3 (3.10 or newer) and make. Each target sets up what it needs in .venv.
PYTHON ?= python3
TEST_WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
TWINS := $(addprefix -p pagetwin.,reference optimized $(notdir $(patsubst %/,%,$(wildcard shared/*/))))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test docs check mutants

# one thread each: torch's own threads only get in each other's way at these sizes
test: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not slow"

demo: $(STAMP)
	$(BIN)/pagetwin replay --report report.html

# plant every bug of tests/mutants, and see which law finds it; takes a while
mutants: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants.run --workers $(TEST_WORKERS)

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict --quiet

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TWINS)
	$(BIN)/python -m mkdocs build --strict --quiet

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[dev,docs]'
	touch $@
