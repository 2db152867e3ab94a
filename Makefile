# Needs python3 (3.10 or newer) and make. Each target sets up what it needs in .venv.
PYTHON ?= python3
TEST_WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
TWINS := -m pagetwin $(addprefix -p pagetwin.,reference optimized $(filter-out package __pycache__,$(notdir $(patsubst %/,%,$(wildcard shared/*/)))))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-quick test-long compile docs types check mutants mutants-generated mutants-hopper mutants-instruments matrix

# laws on both twins, and the tests of each part that take little time; one thread per worker: torch's own threads are slower at these sizes
test test-quick test-long compile docs: export OMP_NUM_THREADS := 1
# bytecode is kept: without it, every worker and each process that a test starts compiles all modules again
test test-quick test-long compile docs: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow and not long and not extended and not compile and not site"

# structure, recorded cases, and one law per area on each twin
test-quick: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "quick and not slow"

# the suite on itself, kernels that are interpreted role by role, tests that start many processes, a sample of the mutants
test-long: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "(long or extended) and not slow"

# every kernel for several chips: registers, spills and instructions, without a GPU
compile: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m compile

demo: $(STAMP)
	$(BIN)/pagetwin replay --report report.html

# plant the bugs of tests/mutants/catalogue/ whose entry in catalogue.txt is out of date
mutants: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants.run --workers $(TEST_WORKERS)

# changes of kernels and metadata builders that operators make: ARGUMENTS="--sample 300 --seed 0"
mutants-generated: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants.run_generated --workers $(TEST_WORKERS) $(ARGUMENTS)

# changes of the kernels for Hopper, in the Gluon interpreter: ARGUMENTS="--sample 300 --seed 0"
mutants-hopper: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants.run_hopper --workers $(TEST_WORKERS) $(ARGUMENTS)

# changes of the conformance suite and of the recorder that are out of date: which test finds each one
mutants-instruments: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m mutants.run_instruments --workers $(TEST_WORKERS) $(ARGUMENTS)

# The quick tests on each declared combination of versions, each in its own environment in .matrix/.
# CORNERS="name name" chooses; CUDA_BUILDS=1 also installs CUDA builds of torch, several GB each.
matrix: $(STAMP)
	$(BIN)/python tests/structure/version_matrix.py --workers $(TEST_WORKERS) $(if $(CUDA_BUILDS),--cuda-builds) $(CORNERS)

# builds site/ and tests its pages, in Chromium where it is installed
docs: $(STAMP)
	@echo "Building site/ and testing its pages takes some minutes."
	$(BIN)/python -m pytest -q -rs -m site tests/structure/test_docs.py $(wildcard tests/structure/test_site*.py)
	@echo "The site is in site/. To read it: $(BIN)/python -m http.server --directory site 8000"

types: $(STAMP)
	$(BIN)/mypy $(TWINS)

check: types docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): pyproject.toml .ci/constraints.txt
	@echo "Installing torch and everything else into .venv takes some minutes and at least 2 GB."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[dev,docs]' -c .ci/constraints.txt
	touch $@
