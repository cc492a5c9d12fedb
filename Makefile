# What each target does is in README.md. ARGS reaches the demo: make demo ARGS="--compare".

RUN = .venv/bin/python -m

.PHONY: demo test setup clean

demo: setup
	@.venv/bin/mlx-swarm demo $(ARGS)

test: setup
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy .dev/mlx_swarm tests bench examples
	OPENBLAS_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadfile $(ARGS)

setup:
	@sh .dev/setup.sh

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
