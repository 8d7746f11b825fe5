# make train   set everything up, train a DLRM on two ranks, evaluate it (DATA=rows.tsv.gz, RANKS=2, RUN=folder, ARGS="key=value")
# make train MODEL=hstu   HSTU on drawn events whose best ranking is known (or sasrec, fuxi_alpha, fuxi_beta; DATA=ratings.dat SCHEMA=movielens-1m)
# make demo    the same model trained in twelve ways, what each system changes, in a table (ARGS="--quick", docs/demo.md)
# make test    set everything up, run the tests; make test-listed runs those that take longer
# make lint    ruff and pyright
# make docs    docs/ and the docstrings as a site, in site/; a broken link is an error
# make newcomer   what a newcomer does, in a fresh clone: train, own CSV, own model, predict, report
# make bench   every benchmark, quickly
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs_ready
RANKS  ?= 2
RUN    ?=
DATA   ?=
MODEL  ?= dlrm
SCHEMA ?= movielens-1m
ARGS   ?=

# Modules are compiled once, not in each of the many processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train demo test test-listed test-slow durations lint format docs newcomer bench clean

# torch first and pinned: a range could bring a newer release, and with it another build. One that is there is kept.
$(READY): pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

train: $(READY)
	PYTHON="$(CURDIR)/$(BIN)/python" RANKS="$(RANKS)" RUN="$(RUN)" DATA="$(DATA)" MODEL="$(MODEL)" SCHEMA="$(SCHEMA)" ARGS="$(ARGS)" bash configs/train.sh

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-listed: $(READY)
	$(BIN)/python -m pytest -m listed --numprocesses 3 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

durations: $(READY)
	$(BIN)/python -m pytest -m "not slow" --measure --numprocesses 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

docs: $(DOCS_READY)
	$(BIN)/mkdocs build --strict

newcomer: $(READY)
	$(BIN)/python -m pytest tests/test_newcomer.py

bench: $(READY)
	for name in segment_unique address_map exchange_rounds embedding_step "embedding_step --plan cyclic" \
		sparse_all_reduce planning "two_dimensional --hosts 2x2" "pipeline --hosts 2" "pipeline --tier disk" "pipeline --el-rec" "pipeline --ablation" "pipeline --replicas" "pipeline --stages" sample_clustering reordering checkpoint own_data tiered tensor_train \
		"tensor_train --ablation" "tensor_train --footprint" "tensor_train --versus-dense" "tensor_train --quality" train_step "train_step --precision bfloat16" precision_quality "train_step --tensor-train" \
		"placement --table 2 --table 3 --figure 10 --topology 2x4" sequence_step raw_quality "dynamic_table --stream" gpu_compile gpu_ops; do \
		$(BIN)/python -m benchmarks.$$name --quick || exit 1; done

clean:
	rm -rf $(VENV) site data/generated data/prepared runs/make_train* runs/demo runs/demo_quick
