# make demo: the default run. make test: the whole suite. Both set up their own venv first.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= 2.13.0

.PHONY: demo test setup lint

demo: setup
	$(VENV)/bin/python -m unified_trainer --method dance_grpo

test: setup
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv $(VENV)
	scripts/install_torch.sh $(VENV)/bin/python $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	$(VENV)/bin/python -m pip install --quiet --no-deps hpsv3==1.0.0
	touch $@
