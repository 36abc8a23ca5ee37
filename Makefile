# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV ?= .venv
RUN ?= runs/demo
export HF_HUB_OFFLINE ?= 1

.PHONY: help install system demo test unit lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install, train the small policy on two cores, write the report"
	@echo "make test    install, run every test"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove the virtual environment (runs/ stays)"

install: $(VENV)/.installed

$(VENV)/.installed: requirements-cpu.lock pyproject.toml scripts/install.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh

system: install
	@bash scripts/system.sh bubblewrap

demo: install system
	@VENV="$(VENV)" bash scripts/demo.sh "$(RUN)"

test: install system
	$(VENV)/bin/python -m pytest tests

unit: install
	$(VENV)/bin/python -m pytest tests/unit

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV)
