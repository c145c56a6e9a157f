.PHONY: check lint fast slow format bench structure

check: lint
	python -m pytest -n 2 --dist loadfile

lint:
	ruff check .
	ruff format --check .
	pyright

fast:
	python -m pytest -x tests/library/combinators/test_combinators.py tests/library/test_communication.py tests/library/combinators/test_masks.py tests/docs/test_docs.py tests/library/test_collectives.py

slow:
	python -m pytest -n 2 --dist loadfile -m slow

format:
	ruff check --fix .
	ruff format .

bench:
	python -m benchmarks.yardstick

structure:
	python tests/docs/structure.py
