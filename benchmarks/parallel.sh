#!/usr/bin/env bash
# The figures of several GPUs, a step a time; each has a time limit, and one that fails does not stop the others.
#
#     OUT=benchmarks/results bash benchmarks/parallel.sh STEP...
#
#     step          GPUs  expected   what
#     one-shot-2    2     2 min      whether models say the same with the one-shot all-reduce; first, it checks the rest
#     all-reduce-2  2     4 min      sums of 1 to 8,192 rows: XLA's, the one-shot kernel
#     tp2-8b        2     80 s       8B, TP 2: one request, ShareGPT-like, 16 k prefill
#     tp2-8b-1024   2     80 s       the same with the one-shot kernel in steps of up to 1,024 rows
#     tp2-8b-nccl   2     80 s       the same without it
#     tp2-30b       2     4 min      Qwen3-30B-A3B on one GPU, then on two: one, 32 and 256 requests
#     tp2-steps     2     2 min      8B, TP 2: decode steps of 1, 256 and 1,000 sequences by kernel
#     one-shot-4    4     3 min      as one-shot-2
#     all-reduce-4  4     over 6 min as all-reduce-2
#     scoring       4     4-5 min    8B, 2,000 rows of 1,024 tokens: one GPU (500 rows), then DP 4
#     dp4-8b        4     2-3 min    8B, DP 4: ShareGPT-like
#     tp4-8b        4     3 min      8B, TP 4: one request, ShareGPT-like
#     tp4-8b-nccl   4     3 min      the same without the one-shot kernel
#     tp4-70b       4     4-6 min    70B, TP 4: one request, 32 requests
#
# XLA_FLAGS are passed on, so a step can be repeated with what all-reduce-* found best; TAG names its file then.
set -uo pipefail
source "$(dirname "$0")/steps.bash"

throughput() { # NAME LIMIT_S MODEL OPTIONS...
    local name=$1 limit=$2 model=$3
    shift 3
    step "$name" "$limit" "$PYTHON" -m jpaged bench throughput --model "$model" --load-format dummy --runs 2 \
        --gpu-memory-utilization 0.85 --json "$OUT/throughput-$model-$name$SUFFIX" "$@"
}

scoring() { # NAME LIMIT_S OPTIONS...
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$PYTHON" -m jpaged bench scoring --model llama-3.1-8b --load-format dummy --row-len 1024 \
        --runs 1 --json "$OUT/scoring-$name$SUFFIX" "$@"
}

one_shot_rows() { # STEP: what its name ends with
    [[ $1 == *-nccl ]] && echo 0 || echo "${1##*-}"
}

for name in "$@"; do
    case $name in
        one-shot-2 | one-shot-4)
            step "$name" 220 "$PYTHON" -m tests.drills.one_shot --devices "${name##*-}" ;;
        all-reduce-2 | all-reduce-4)
            step "$name" 560 "$PYTHON" benchmarks/all_reduce.py --devices "${name##*-}" --json "$OUT/$name$SUFFIX" ;;
        tp2-8b)
            throughput tp2 290 llama-3.1-8b --tensor-parallel-size 2 --max-model-len 17000 \
                --workload single --workload sharegpt --workload prefill-16k ;;
        tp2-8b-*)
            throughput "${name/-8b/}" 200 llama-3.1-8b --tensor-parallel-size 2 --max-model-len 17000 \
                --one-shot-rows "$(one_shot_rows "$name")" \
                --workload single --workload sharegpt --workload prefill-16k ;;
        tp2-30b)
            for degree in 1 2; do
                throughput "of-$degree" 240 qwen3-30b-a3b --tensor-parallel-size "$degree" --max-model-len 1024 \
                    --max-num-seqs 256 --decode-buckets 8,32,256 --max-num-batched-tokens 8192 \
                    --token-buckets 64,512,8192 --workload single --workload batch-32 --workload batch-256
            done ;;
        tp2-steps)
            step "$name" 200 "$PYTHON" -m jpaged bench steps --model llama-3.1-8b --load-format dummy \
                --tensor-parallel-size 2 --max-model-len 17000 --batch 1 --batch 256 --batch 1000 --steps 32 \
                --json "$OUT/steps-llama-3.1-8b-tp2$SUFFIX" ;;
        tp4-8b)
            throughput tp4 290 llama-3.1-8b --tensor-parallel-size 4 --max-model-len 17000 \
                --workload single --workload sharegpt ;;
        tp4-8b-nccl)
            throughput tp4-nccl 290 llama-3.1-8b --tensor-parallel-size 4 --max-model-len 17000 \
                --one-shot-rows 0 --workload single --workload sharegpt ;;
        dp4-8b)
            throughput dp4 290 llama-3.1-8b --data-parallel-size 4 --max-model-len 4096 --workload sharegpt ;;
        tp4-70b) # few shapes, which compile in less time
            throughput tp4 480 llama-3.1-70b --tensor-parallel-size 4 --max-model-len 4096 --max-num-seqs 64 \
                --max-num-batched-tokens 2048 --workload single --workload batch-32 ;;
        scoring) # the first compiles, and the workers of the second find its programs
            scoring llama-3.1-8b 200 --num-rows 500
            scoring llama-3.1-8b-dp4 280 --num-rows 2000 --data-parallel-size 4 ;;
        *)
            unknown_step "$name" "$0" ;;
    esac
done
((FAILED == 0))
