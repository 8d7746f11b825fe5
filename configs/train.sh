#!/usr/bin/env bash
# The whole job: data, training on several ranks, scores on the test split, a page about the run. `make train` calls it.
#
#   PYTHON   the interpreter that has rowmesh installed
#   RANKS    processes (2)
#   RUN      the run's folder (runs/make_train, of a sequence model runs/make_train_NAME); an earlier run in it is
#            replaced, which a line says
#   DATA     raw Criteo rows (train.tsv, .gz), or a folder of train*, validation* and test* files; without it a
#            data set is drawn from a planted model
#   MODEL    dlrm, or hstu, sasrec, fuxi_alpha, fuxi_beta on events: then DATA is an event table, of the layout SCHEMA
#   SCHEMA   layout of such a table (movielens-1m), or a TOML file
#   SAMPLES  training samples that are drawn (1,000,000)
#   HELD_OUT samples that are drawn for validation, and as many for the test (100,000)
#   STORE    where drawn and prepared data are kept for the next time (data)
#   ARGS     keys of the configuration, as in ARGS="train.epochs=2 tables.dim=32"
set -euo pipefail

PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-2}
DATA=${DATA:-}
SAMPLES=${SAMPLES:-1000000}
HELD_OUT=${HELD_OUT:-100000}
STORE=${STORE:-data}
ARGS=${ARGS:-}
MODEL=${MODEL:-dlrm}
RUN=${RUN:-runs/make_train$([[ $MODEL == dlrm ]] || echo "_$MODEL")}
SCHEMA=${SCHEMA:-movielens-1m}

# One thread a rank, and no memory given back to the system between steps: see docs/command_line.md.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-4294967296}
export MALLOC_TOP_PAD_=${MALLOC_TOP_PAD_:-268435456}

rowmesh() { "$PYTHON" -m rowmesh.cli "$@"; }
on_ranks() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" -m rowmesh.cli "$@"; }

cd "$(dirname "$0")/.."

# With --reuse both commands keep what is there, and make it again where the files or the options have changed.
if [[ $MODEL != dlrm ]]; then
    config=configs/hstu.toml
    [[ $MODEL == hstu ]] || ARGS="model.name=$MODEL $ARGS"
    prepared=$STORE/generated/events
    if [[ -n $DATA ]]; then
        path=$(realpath "$DATA")
        prepared=$STORE/prepared/events-$(cksum <<<"$path" | cut -d' ' -f1)
        rowmesh data prepare "$DATA" --schema "$SCHEMA" --out "$prepared" --reuse
    else
        rowmesh data synthesize-events "$prepared" --reuse
    fi
elif [[ -n $DATA ]]; then
    config=configs/own.toml # batch size, rates and epochs by the data
    path=$(realpath "$DATA")
    prepared=$STORE/prepared/$(basename "$path" | cut -d. -f1)-$(cksum <<<"$path" | cut -d' ' -f1)
    schema=(--schema criteo)
    [[ -f $DATA/schema.toml ]] && schema=() # the folder describes itself
    rowmesh data prepare "$DATA" ${schema[@]+"${schema[@]}"} --out "$prepared" --reuse
else
    config=configs/criteo.toml
    prepared=$STORE/generated/criteo
    rowmesh data synthesize "$STORE/generated/raw" --samples "$SAMPLES" --held-out "$HELD_OUT" --reuse
    rowmesh data prepare "$STORE/generated/raw" --out "$prepared" --min-count 1 --reuse # a row for every id
fi

[[ ! -d $RUN/model ]] || echo "replaces  the run in $RUN, when this one is done; RUN=FOLDER trains beside it"
# shellcheck disable=SC2086  # ARGS are words
on_ranks train "$config" "data.folder=$prepared" "run.folder=$RUN" $ARGS --overwrite
