#!/usr/bin/env bash
# The virtual layout beside the paged one, a step a time; each has a time limit, and one that fails does not stop the
# others. Each engine has a process of its own, and both layouts of a step run one after the other on the same card.
#
#     OUT=benchmarks/results bash benchmarks/virtual.sh STEP...
#
#     step          GPUs  expected   what
#     calls         0     1 min      the driver's calls for 1,000 tokens, by the scheduler alone
#     mapping       1     1 min      pages mapped and unmapped a second
#     sharegpt      1     3 min      8B, ShareGPT-like: paged, virtual
#     long          1     4 min      8B, decode-16k and prefill-16k: paged, virtual
#     steps         1     5 min      8B, decode steps: paged, virtual, with pages mapped ahead and in the step
#     growth        1     3 min      8B, decode steps of 1,000 sequences of equal lengths, which grow together
#     tp2           2     4 min      8B, TP 2, ShareGPT-like and decode-16k: paged, virtual
#
# A virtual run says how many pages were in the way of a step, and how long steps waited for pages. Compare the
# throughputs with `python benchmarks/compare.py $OUT/virtual-sharegpt-paged.json $OUT/virtual-sharegpt-virtual.json`.
set -uo pipefail
source "$(dirname "$0")/steps.bash"
SIZES=(--model llama-3.1-8b --load-format dummy --max-model-len 17000)

beside() { # NAME LIMIT_S OPTIONS...
    local name=$1 limit=$2 layout
    shift 2
    for layout in paged virtual; do
        step "$name $layout" "$limit" "$PYTHON" -m jpaged bench throughput "${SIZES[@]}" --runs 2 \
            --kv-cache-layout "$layout" --json "$OUT/virtual-$name-$layout$SUFFIX" "$@"
    done
}

vattention() { # NAME LIMIT_S OPTIONS...
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$PYTHON" -m jpaged bench vattention --json "$OUT/virtual-$name$SUFFIX" "$@"
}

for name in "$@"; do
    case $name in
        calls)
            JAX_PLATFORMS=cpu vattention "$name" 200 --part calls --model llama-3.1-8b ;;
        mapping)
            vattention "$name" 150 --part mapping ;;
        sharegpt)
            beside "$name" 200 --workload sharegpt ;;
        long)
            beside "$name" 240 --workload decode-16k --workload prefill-16k ;;
        steps)
            vattention "$name" 400 --part steps "${SIZES[@]}" --layout paged --layout sliced --rows 64 --context 512 ;;
        growth)
            vattention "$name" 400 --part steps "${SIZES[@]}" --layout paged --layout sliced --rows 1000 \
                --context 496 ;;
        tp2)
            beside "$name" 240 --tensor-parallel-size 2 --gpu-memory-utilization 0.85 \
                --workload sharegpt --workload decode-16k ;;
        *)
            unknown_step "$name" "$0" ;;
    esac
done
