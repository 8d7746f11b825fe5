#!/usr/bin/env bash
# The whole job: data, training on several ranks, evaluation. `make train` calls it.
#
#   PYTHON  the interpreter that has rowmesh installed
#   RANKS   processes (2)
#   RUN     the run's folder (runs/make_train); an earlier run in it is replaced
#   DATA    raw Criteo rows (train.tsv, .gz); without it a data set of 1 M samples is drawn from a planted model
#   ARGS    keys of the configuration, as in ARGS="train.epochs=2 tables.dim=32"
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-2}
RUN=${RUN:-runs/make_train}
DATA=${DATA:-}
ARGS=${ARGS:-}
GENERATED=data/generated

# One thread a rank, and no memory given back to the system between steps: see docs/command_line.md.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-4294967296}
export MALLOC_TOP_PAD_=${MALLOC_TOP_PAD_:-268435456}

rowmesh() { "$PYTHON" -m rowmesh.cli "$@"; }
on_ranks() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" -m rowmesh.cli "$@"; }

# Both commands make their folder whole or not at all, so a folder that exists is complete.
if [[ -n $DATA ]]; then
    prepared=data/prepared/$(basename "$DATA" | cut -d. -f1)-$(cksum <<<"$(realpath "$DATA") $(stat -c %Y "$DATA")" | cut -d' ' -f1)
    [[ -d $prepared ]] || rowmesh data prepare "$DATA" --schema criteo --out "$prepared"
else
    prepared=$GENERATED/criteo
    [[ -d $GENERATED/raw ]] || rowmesh data synthesize "$GENERATED/raw" --samples 1000000
    [[ -d $prepared ]] || rowmesh data prepare "$GENERATED/raw" --out "$prepared" --min-count 100
fi

# A hundred steps at least: a small data set gets small batches.
samples=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["splits"]["train"]["samples"])' \
    "$prepared/metadata.json")
batch_size=2048
while ((batch_size > 64 && samples < 100 * batch_size)); do ((batch_size /= 2)); done

# shellcheck disable=SC2086  # ARGS are words
on_ranks train configs/criteo.toml "data.folder=$prepared" "data.batch_size=$batch_size" "run.folder=$RUN" $ARGS --overwrite
on_ranks evaluate "$RUN"
