# Needs python3 (3.10 or newer) and make. Each target sets up what it needs in .venv.
PYTHON ?= python3
TEST_WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
TWINS := $(addprefix -p pagetwin.,reference optimized $(notdir $(patsubst %/,%,$(wildcard shared/*/))))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-quick docs types check mutants

# one thread per worker: torch's own threads are slower at these sizes
test test-quick: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not slow"

# structure, recorded cases, every law on the reference and one law per area on the other twin
test-quick: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "quick and not slow"

demo: $(STAMP)
	$(BIN)/pagetwin replay --report report.html

# plant the bugs of tests/mutants whose entry in tests/records/mutants.json is out of date
mutants: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants.run --workers $(TEST_WORKERS)

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict --quiet

types: $(STAMP)
	$(BIN)/mypy $(TWINS)

check: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mkdocs build --strict --quiet

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[dev,docs]'
	touch $@
