.PHONY: check lint fast slow laws mutants format bench table vectors notebooks docs claims

check: lint
	python -m pytest -n 2 --dist loadfile

lint:
	ruff check .
	ruff format --check .
	pyright

fast:
	python -m pytest -x tests/library/algorithms/test_recurrences.py tests/library/combinators/test_combinators.py

slow:
	python -m pytest -n 2 --dist loadfile -m slow

ARGS = --count 300 --seed 0
laws:
	JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 PYTHONPATH=.:docs:tests python tests/library/laws/laws.py $(ARGS)

mutants:
	python tests/mutants.py

claims:
	python tests/support/claims.py --check $(CLAIMS)

format:
	ruff check --fix --exit-zero --quiet .
	ruff format .
	ruff check .

bench:
	python -m benchmarks.yardstick

table:
	JAX_PLATFORMS=cpu PYTHONPATH=.:docs python -m pages.table
	JAX_PLATFORMS=cpu PYTHONPATH=.:docs python -m pages.combinators
	JAX_PLATFORMS=cpu PYTHONPATH=.:docs python -m pages.stacked

vectors:
	JAX_PLATFORMS=cpu PYTHONPATH=.:docs:tests python -m conformance.make

# Notebooks show what is on stderr: a compiler for TPUs would look for one, and say so.
# The kernel in docs/kernels does not warn that a notebook runs without encryption.
notebooks:
	JAX_PLATFORMS=cpu PYTHONPATH=.:docs python -m pages.notebooks

docs:
	@echo "a minute or two"
	JAX_PLATFORMS=cpu python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html
	@echo "the site: docs/_build/html/index.html"
