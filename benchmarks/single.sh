#!/usr/bin/env bash
# The figures of one GPU, a step a time; each has a time limit, and one that fails does not stop the others.
#
#     OUT=benchmarks/results bash benchmarks/single.sh STEP...
#
#     step              expected   what
#     kernels           6-8 min    every kernel beside the card's own limits
#     decode            90 s       decode attention alone
#     start             90 s       start-up to the first tokens, cold and warm, both models
#     throughput-0.6b   80 s       Qwen3-0.6B: every workload
#     throughput-8b     160 s      Llama-3.1-8B: every workload
#     shared-prefix     70 s       both models, a prefix that 512 requests share read once
#     steps             60 s       a decode step by kernel, both models, batches of 1, 32, 256 and 1,000
#     sequences         2-3 min    8B: four samples and beams of four, beside separate requests and greedy decoding
#     memory            2-3 min    8B: block sizes (Fig. 18), swap against recompute (Fig. 19)
#     scoring           60 s       8B: 300 rows of 1,024 tokens, beside the prefill roofline
#     serving           5-6 min    both models behind the server, open loop (benchmarks/serving.sh)
#
# OPTIONS are added to every `jpaged bench throughput` of a step, and TAG to its file's name:
#     TAG=max-2048 OPTIONS="--max-num-seqs 2048" bash benchmarks/single.sh throughput-8b
# Programs are kept under JPAGED_CACHE_DIR, as always; `start` brings an empty directory of its own.
set -uo pipefail
source "$(dirname "$0")/steps.bash"
OPTIONS=${OPTIONS:-}

bench() { # NAME LIMIT_S BENCH JSON OPTIONS...
    local name=$1 limit=$2 bench=$3 json=$4
    shift 4
    step "$name" "$limit" "$PYTHON" -m jpaged bench "$bench" --json "$OUT/$json$SUFFIX" "$@"
}

throughput() { # NAME LIMIT_S JSON MODEL OPTIONS...
    local name=$1 limit=$2 json=$3 model=$4
    shift 4
    # shellcheck disable=SC2086  # OPTIONS are several words
    bench "$name" "$limit" throughput "$json" --model "$model" --load-format dummy --max-model-len 17000 "$@" $OPTIONS
}

for name in "$@"; do
    case $name in
        kernels)
            bench "$name" 540 kernels kernels ;;
        decode)
            bench "$name" 180 kernels kernels-decode --only "decode " ;;
        start)
            directory=$(mktemp -d)
            for model in qwen3-0.6b llama-3.1-8b; do
                for start in cold warm; do
                    JPAGED_CACHE_DIR=$directory bench "$name $model $start" 150 latency "latency-$model-$start" \
                        --model "$model" --load-format dummy --max-model-len 17000 --runs 3
                done
            done
            rm -rf "$directory" ;;
        throughput-0.6b)
            throughput "$name" 200 throughput-qwen3-0.6b qwen3-0.6b --workload all --runs 2 ;;
        throughput-8b)
            throughput "$name" 300 throughput-llama-3.1-8b llama-3.1-8b --workload all --runs 1 ;;
        shared-prefix)
            for model in qwen3-0.6b llama-3.1-8b; do
                throughput "$name $model" 120 "throughput-$model-shared-prefix-attention" "$model" \
                    --workload shared-prefix --shared-prefix-attention --runs 2
            done ;;
        steps)
            for model in qwen3-0.6b llama-3.1-8b; do
                bench "$name $model" 120 steps "steps-$model-four-batches" --model "$model" --load-format dummy \
                    --max-model-len 17000 --batch 1 --batch 32 --batch 256 --batch 1000 --steps 32
            done ;;
        sequences)
            bench "$name" 300 sequences sequences-llama-3.1-8b --model llama-3.1-8b --load-format dummy \
                --num-prompts 250 --width 4 ;;
        memory)
            bench "$name" 300 memory memory-llama-3.1-8b --figure 18 --figure 19 --model llama-3.1-8b \
                --load-format dummy --num-prompts 400 ;;
        scoring)
            bench "$name" 150 scoring scoring-llama-3.1-8b-300-rows --model llama-3.1-8b --load-format dummy \
                --num-rows 300 ;;
        serving)
            step "$name" 540 bash benchmarks/serving.sh "$OUT" ;;
        *)
            unknown_step "$name" "$0" ;;
    esac
done
((FAILED == 0))
