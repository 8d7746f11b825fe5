#!/usr/bin/env bash
# The whole job: data, training on several ranks, evaluation. `make train` calls it.
#
#   PYTHON  the interpreter that has rowmesh installed
#   RANKS   processes (2)
#   RUN     the run's folder (runs/criteo); an earlier run in it is replaced
#   DATA    raw Criteo rows (train.tsv, .gz); without it a data set of 1 M samples is drawn from a planted model
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-2}
RUN=${RUN:-runs/criteo}
DATA=${DATA:-}
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
    prepared=data/prepared/$(basename "${DATA%%.*}")-$(cksum <<<"$(realpath "$DATA") $(stat -c %Y "$DATA")" | cut -d' ' -f1)
    [[ -d $prepared ]] || rowmesh data prepare "$DATA" --schema criteo --out "$prepared"
else
    prepared=$GENERATED/criteo
    [[ -d $GENERATED/raw ]] || rowmesh data synthesize "$GENERATED/raw" --samples 1000000
    [[ -d $prepared ]] || rowmesh data prepare "$GENERATED/raw" --out "$prepared"
fi

on_ranks train configs/criteo.toml "data.folder=$prepared" "run.folder=$RUN" --overwrite
on_ranks evaluate "$RUN"
