# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check test-slow bench-smoke lint types docs docs-serve clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: making $(VENV) and installing gossamer with its development tools (once; re-run only when pyproject.toml or constraints.txt change)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "setup: Gossamer needs Python 3.11 or newer, got " + sys.version.split()[0] + "; call make PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { echo "setup: could not make $(VENV); on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## make the environment (.venv) and install
	@echo "setup: $(VENV) is ready"

demo: setup  ## install if needed, then run the main job
	@echo "demo: torch's DDP against GossipAdam on the alternating exponential ring, both at the same learning rate: a small"
	@echo "demo: residual network on digits, 2 nodes x 2 workers with 20 Mbit/s between them, 2 seeds; about two minutes."
	@echo "demo: Gradients are averaged exactly inside each node, and the nodes gossip (the default; --no-exact-inside: all workers)"
	@rm -rf runs/demo
	@$(BIN)/gossamer compare vision --workers 4 --per-node 2 --link 20mbit --methods ddp,gossipadam:aer --steps 120 --seeds 2 \
		--lr 1.6e-2 --ddp-bucket-mb 0.05 --trace --out runs/demo --html runs/demo/report.html

lint: setup  ## ruff: lint and format
	@echo "lint: ruff check, ruff format --check"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup  ## mypy
	@echo "types: mypy (strict)"
	@$(BIN)/mypy

check: lint types  ## fast inner loop: lint, types, unit tests
	@echo "check: pytest tests/unit"
	@$(BIN)/pytest -q -x -n 2 tests/unit

test: lint types  ## install if needed, then run every check and test
	@echo "test: pytest"
	@$(BIN)/pytest -n 4 --dist worksteal

test-slow: setup  ## the long tests as well
	@echo "test-slow: pytest, the long tests too"
	@$(BIN)/pytest -m "slow or not slow" --timeout 1800

bench-smoke: setup  ## the benchmark on two nodes, in a minute or two (part of make test)
	@echo "bench-smoke: gossamer bench on two nodes; needs root and network namespaces, says so where it skips"
	@$(BIN)/pytest -q -rs tests/distributed/test_bench_smoke.py

docs: setup  ## build the documentation site into build/site; a warning is an error
	@echo "docs: mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: open build/site/index.html"

docs-serve: setup  ## show the documentation site, and rebuild it when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch website --watch benchmarks/records --watch src

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist aer.svg
