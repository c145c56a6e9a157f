.PHONY: check lint fast slow format bench

check: lint
	python -m pytest -n 2 --dist loadfile

lint:
	ruff check .
	ruff format --check .
	pyright

fast:
	python -m pytest -x tests/test_combinators.py tests/test_communication.py tests/test_masks.py tests/test_docs.py tests/test_collectives.py

slow:
	python -m pytest -n 2 --dist loadfile -m slow

format:
	ruff check --fix .
	ruff format .

bench:
	python -m benchmarks.yardstick
