# Everything here first makes the machine ready (scripts/setup), which is quick when there is nothing to do.
#
#   make demo                  the main job, start to finish
#   make test [ARGS="-k lab"]  lint, types and all tests
#   make lab [ARGS="..."]      a playground of brokers and sidecars; Ctrl-C ends it and leaves nothing behind
#   make bench [ROWS="P1 P2"]  side-by-side benchmarks: P1 P1M P1L P2 P2B P2C P3 P5 P5M P6 P9 P10, see docs/benchmarks.md
#   make clean                 removes what these made in this folder (not the brokers in the cache: see scripts/broker)

ARGS =
ROWS =

.PHONY: demo test lab bench clean

demo:
	@scripts/setup --extra demo
	@.venv/bin/lrq-ha demo $(ARGS)

# RabbitMQ 4.3 beside the distribution's own: the two ends of what is supported. pytest is last, so that its summary ends the output.
test:
	@scripts/setup --extra dev --broker 4.3
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/pytest -n 5 --dist loadgroup --no-loadscope-reorder $(ARGS)

lab:
	@scripts/setup $(filter --tls,$(ARGS))
	@.venv/bin/lrq-ha lab up $(ARGS)

bench:
	@scripts/setup --extra dev
	@.venv/bin/python -m bench $(ROWS)

clean:
	@if [ -d .lab ] && [ -x .venv/bin/lrq-ha ]; then .venv/bin/lrq-ha lab down 2>/dev/null || true; fi
	rm -rf .venv .lab .cache .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-report *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
