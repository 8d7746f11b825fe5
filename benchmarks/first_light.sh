#!/usr/bin/env bash
# All of docs/gpu.md's "first run on a GPU", stage by stage: what is there, kernels, the sanitizer, ranks, runs, times.
#
#   bash benchmarks/first_light.sh                     every stage
#   bash benchmarks/first_light.sh what kernels rank   those alone, in this order
#   bash benchmarks/first_light.sh --list              the stages, with their limits in seconds
#
#   OUT      where output goes (first_light): STAGE.log, results as JSON lines, summary.txt
#   PYTHON   the interpreter that has torch for the GPU (python3); a rowmesh that is not installed is read from here
#   WHEELS   a folder of wheels: what the interpreter lacks is installed from it, without a network
#   JOBS     processes that test side by side (0: one after the other, in one process)
#
# A stage that fails or runs past its limit does not stop the next; the exit status is the number of those that did.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
OUT=${OUT:-first_light}
WHEELS=${WHEELS:-}
JOBS=${JOBS:-0}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset TRITON_INTERPRET

# Stage, limit in seconds, what it runs: the simplest first, as each needs what the one before it shows.
stages() {
    cat <<'STAGES'
what 60 what
simple 120 tests -x tests/ops/test_gather_cuda.py
kernels 400 tests tests/ops -m triton_and_not_slow
examples 120 tests rowmesh/ops -k cuda
rank 400 tests tests/test_device.py tests/test_device_tensor_train.py tests/test_device_tiers.py -m triton -k not_ranks_and_not_nodes
memcheck 400 sanitize memcheck
racecheck 400 sanitize racecheck
ranks 500 tests tests/test_device.py tests/exchange/device tests/pipeline -m triton_and_not_slow
run 300 run 1
run_of_two 300 run 2
ops_quick 120 bench gpu_ops --quick
step_quick 120 bench gpu_step --quick
ops 500 bench gpu_ops
step 500 bench gpu_step
tensor_train 500 bench tensor_train --device cuda
all 590 tests -m triton
STAGES
}

what() {
    nvidia-smi
    "$PYTHON" - <<'CODE'
import torch, triton
print("torch", torch.__version__, "CUDA", torch.version.cuda, "triton", triton.__version__)
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.mem_get_info())
CODE
    "$PYTHON" -m rowmesh.cli env
}

# An argument's underscores in -m and -k expressions are spaces. Other versions of libraries warn of other things.
tests() {
    local words=() expression=
    for word in "$@"; do
        [[ -n $expression ]] && word=${word//_/ }
        [[ $word == -m || $word == -k ]] && expression=1 || expression=
        words+=("$word")
    done
    PYTHONWARNINGS=default "$PYTHON" -m pytest -v -n "$JOBS" --dist worksteal --durations 15 -o filterwarnings=default "${words[@]}"
}

sanitize() { # every tensor in memory of its own, or what is next to it would hide an error
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 \
        "$PYTHON" -m pytest -x -v -n 0 --timeout 0 tests/ops -m "triton and not slow" -k "not compile and not wait"
}

run() {
    PYTHON=$PYTHON RANKS=$1 SAMPLES=100000 STORE=$OUT/store RUN=$OUT/run$1 ARGS="train.device=cuda" bash configs/train.sh
}

bench() { "$PYTHON" -m "benchmarks.$1" "${@:2}" --output "$OUT/$1.jsonl"; }

if [[ ${1:-} == --list ]]; then
    stages
    exit
fi
for word in "$@"; do
    if ! stages | cut -d' ' -f1 | grep -qx -- "$word"; then
        echo "there is no stage $word; --list has them" >&2
        exit 2
    fi
done
mkdir -p "$OUT"
if [[ -n $WHEELS ]]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "$WHEELS"/*.whl || exit 1
fi
export -f what tests sanitize run bench
export PYTHON OUT JOBS

failed=0
while read -r name limit command; do
    [[ $# -gt 0 && " $* " != *" $name "* ]] && continue
    began=$SECONDS
    timeout --kill-after 10 "$limit" bash -ec "$command" >"$OUT/$name.log" 2>&1 </dev/null
    status=$?
    case $status in
        0) outcome=passed ;;
        124 | 137) outcome="cut off after $limit s" ;;
        *) outcome="failed with $status" ;;
    esac
    [[ $status -ne 0 ]] && failed=$((failed + 1))
    printf '%-12s %-22s %4d s  %s\n' "$name" "$outcome" $((SECONDS - began)) "$(tail -n 1 "$OUT/$name.log" | cut -c1-160)" |
        tee -a "$OUT/summary.txt"
done < <(stages)
exit "$failed"
