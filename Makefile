# Everything here first makes the machine ready (scripts/setup), which is quick when there is nothing to do.
#
#   make demo                  the main job, start to finish
#   make test [ARGS="-k lab"]  lint, types, and the quick tier of the tests: what a change has to pass
#   make test-all [SHARD=1/6]  all tests on both ends of what is supported, or one shard of them
#   make lint | types | unit | quick   the parts of `make test`: ruff and the import contracts; mypy; tests that need no broker; the quick tier alone
#   make lab [ARGS="..."]      a playground of brokers and sidecars; Ctrl-C ends it and leaves nothing behind
#   make docs                  the documentation as a site, in build/docs; a warning is an error
#   make bench [ROWS="P1 P2"]  side-by-side benchmarks: P1 P1M P1L P2 P2B P2C P3 P4 P4S P5 P5M P6 P7 P7F P7K P7L P7M P7S P8 P9 P10 P11 P12 P13 P14, see docs/benchmarks.md
#   make clean                 removes what these made in this folder (not the brokers in the cache: see scripts/broker)

ARGS =
ROWS =
SHARD =

# The tests start hundreds of Python processes: each would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all setup-dev check lint types ruff mypy compiled unit quick lab docs bench clean

demo:
	@scripts/setup --extra demo
	@.venv/bin/lrq-ha demo $(ARGS)

# RabbitMQ 4.3 beside the distribution's own: the two ends of what is supported. pytest is last, so that its summary ends the output.
PYTEST = .venv/bin/pytest -n 5 --dist loadgroup --no-loadscope-reorder

test: setup-dev check
	$(PYTEST) --quick -o session_timeout=2400 $(ARGS)

test-all: setup-dev check
	$(PYTEST) $(if $(SHARD),--shard $(SHARD)) --durations 20 $(ARGS)

setup-dev:
	@scripts/setup --extra dev --broker 3.10 --broker 4.3

check:
	@$(MAKE) --no-print-directory -j2 --output-sync=target mypy ruff compiled

ruff:
	.venv/bin/ruff check
	.venv/bin/lint-imports --no-logo

mypy:
	.venv/bin/mypy

# On the core that mypy leaves: a collection writes the tests with their assertions rewritten, which each worker would do otherwise.
compiled:
	@.venv/bin/pytest --collect-only --quiet > /dev/null 2>&1 || true

lint: setup-dev ruff
types: setup-dev mypy

unit: setup-dev
	.venv/bin/pytest -n 2 tests/unit tests/scenarios tests/model $(ARGS)

quick: setup-dev
	$(PYTEST) --quick $(ARGS)

lab:
	@scripts/setup $(filter --tls,$(ARGS)) $(if $(filter etcd,$(ARGS)),--etcd)
	@.venv/bin/lrq-ha lab up $(ARGS)

docs:
	@scripts/setup --extra docs
	.venv/bin/python -m sphinx --fail-on-warning --keep-going docs build/docs

bench:
	@scripts/setup --extra dev
	@.venv/bin/python -m bench $(ROWS)

clean:
	@if [ -d .lab ] && [ -x .venv/bin/lrq-ha ]; then .venv/bin/lrq-ha lab down 2>/dev/null || true; fi
	rm -rf .venv .lab .cache .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist demo-report *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
