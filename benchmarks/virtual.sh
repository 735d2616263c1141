#!/usr/bin/env bash
# The virtual layout beside the paged one, a step a time; each has a time limit, and one that fails does not stop the
# others. Each engine has a process of its own, and both layouts of a step run one after the other on the same card.
#
#     OUT=benchmarks/results bash benchmarks/virtual.sh STEP...
#
#     step          GPUs  expected   what
#     open          1     9 min      attention, steps, growth, sharing, mapping and figure18, in BUDGET_S seconds (540)
#     attention     1     30 s       decode and a chunk of one layer: cuDNN over contiguous addresses, our kernels
#     steps         1     80 s       8B, decode steps: mean and p99: paged; virtual, pages mapped ahead and in the step
#     growth        1     150 s      8B, the same of 1,000 sequences of equal lengths, which grow together
#     prompts       1     145 s      8B, time to the first token by when pages are mapped, and what layouts agree on
#     throughput    1     190 s      8B, tokens/s by rows, context and prompt length: paged, virtual, virtual by cuDNN
#     sharing       1     50 s       8B, two engines on one card: its memory while one needs what the other does not
#     mapping       1     5 s        pages mapped and unmapped a second
#     figure18      1     220 s      8B, the PagedAttention paper's Figure 18: block sizes 16, 32, 64 and 128
#     calls         0     1 min      the driver's calls for 1,000 tokens, by the scheduler alone
#     sharegpt      1     3 min      8B, ShareGPT-like: paged, virtual
#     long          1     4 min      8B, decode-16k and prefill-16k: paged, virtual
#     tp2           2     4 min      8B, TP 2, ShareGPT-like and decode-16k: paged, virtual
#
# Times are of an H200. What a step has measured is in its file when its time ends. BUDGET_S, if set, is for all steps
# together; those for which no time is left are not run.
# SMALL=1 runs them with the embedded model and small numbers, on a CPU, too: whether they run to their end.
# A virtual run says how many pages were in the way of a step, and how long steps waited for pages. Compare the
# throughputs with `python benchmarks/compare.py $OUT/virtual-sharegpt-paged.json $OUT/virtual-sharegpt-virtual.json`.
set -uo pipefail
source "$(dirname "$0")/steps.bash"
SIZES=(--model llama-3.1-8b --load-format dummy --max-model-len 17000)
# Engines of few sizes of programs, which start soon. FEW is followed by the number of slots, which ends the sizes.
FEW=(--max-num-batched-tokens 8192 --token-buckets 1024,8192)
STEPS=(--rows 64 --context 512)
GROWTH=(--rows 1000 --context 496 --steps 128)
FIRST_TOKEN=(--max-num-seqs 40 --decode-buckets 40 --max-num-batched-tokens 4096 --token-buckets 1024,4096)
FIRST_TOKEN+=(--rows 32 --context 512 --steps 64 --layout paged --layout sliced --layout cudnn)
THROUGHPUT=(--max-num-seqs 128 --decode-buckets 8,32,64,128 --cudnn-slots 40 --most-tokens 262144 --steps 48)
THROUGHPUT+=(--max-num-batched-tokens 4096 --token-buckets 1024,4096 --layout paged --layout sliced --layout cudnn)
SHARED=(--rows 64 --context 2048 --steps 128 --kv-idle-release-s 1)
ATTENTION=(--rows 64 --context 4096)
PROMPTS=(--num-prompts 100)
SLOTS=(72 1024)
if [[ -n ${SMALL:-} ]]; then
    SIZES=(--max-model-len 256)
    FEW=(--max-num-batched-tokens 64 --token-buckets 64)
    STEPS=(--rows 4 --context 32 --steps 32)
    GROWTH=(--rows 12 --context 30 --steps 32)
    FIRST_TOKEN=("${FEW[@]}" --max-num-seqs 6 --decode-buckets 6 --prompt-lengths 32,150)
    FIRST_TOKEN+=(--rows 4 --context 32 --steps 16 --layout paged --layout sliced --layout per-layer)
    THROUGHPUT=("${FEW[@]}" --max-num-seqs 6 --decode-buckets 2,6 --batches 1,2,6 --contexts 16,64 --steps 16)
    THROUGHPUT+=(--prompt-lengths 32,150 --layout paged --layout sliced --layout per-layer)
    SHARED=(--rows 4 --context 96 --steps 32 --kv-idle-release-s 0.2)
    ATTENTION=(--rows 2 --context 64)
    PROMPTS=(--num-prompts 4 --rate 40 --num-gpu-blocks 256)
    SLOTS=(6 16)
fi

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

figure18() {
    local model=(--model llama-3.1-8b --load-format dummy)
    if [[ -n ${SMALL:-} ]]; then
        model=(--model "$("$PYTHON" -c 'from jpaged.assets import demo_model_path; print(demo_model_path())')"
            --max-model-len 256)
    fi
    # --quick and --duration are of the simulation, which runs first, on the host.
    step figure18 260 "$PYTHON" -m jpaged bench memory --figure 18 --quick --duration 10 "${model[@]}" --few-programs \
        "${PROMPTS[@]}" --json "$OUT/virtual-figure18$SUFFIX"
}

named=()
for name in "$@"; do
    if [[ $name == open ]]; then
        BUDGET_S=${BUDGET_S:-540}
        named+=(attention steps growth sharing mapping figure18)
    else
        named+=("$name")
    fi
done
for name in "${named[@]}"; do
    few=("${FEW[@]}" --max-num-seqs "${SLOTS[0]}" --decode-buckets "${SLOTS[0]}")
    case $name in
        calls)
            JAX_PLATFORMS=cpu vattention "$name" 200 --part calls --model llama-3.1-8b ;;
        mapping)
            vattention "$name" 100 --part mapping ;;
        attention)
            vattention "$name" 110 --part attention "${ATTENTION[@]}" ;;
        sharegpt)
            beside "$name" 200 --workload sharegpt ;;
        long)
            beside "$name" 240 --workload decode-16k --workload prefill-16k ;;
        steps)
            vattention "$name" 150 --part steps "${SIZES[@]}" "${few[@]}" "${STEPS[@]}" \
                --layout sliced --layout paged ;;
        growth)
            few=("${FEW[@]}" --max-num-seqs "${SLOTS[1]}" --decode-buckets "${SLOTS[1]}")
            vattention "$name" 150 --part steps "${SIZES[@]}" "${few[@]}" "${GROWTH[@]}" --skip-sleep \
                --layout sliced --layout paged ;;
        prompts)
            vattention "$name" 200 --part prompts --part agreement "${SIZES[@]}" "${FIRST_TOKEN[@]}" ;;
        throughput)
            vattention "$name" 300 --part throughput "${SIZES[@]}" "${THROUGHPUT[@]}" ;;
        sharing)
            vattention "$name" 150 --part sharing "${SIZES[@]}" "${few[@]}" "${SHARED[@]}" ;;
        figure18)
            figure18 ;;
        tp2)
            beside "$name" 240 --tensor-parallel-size 2 --gpu-memory-utilization 0.85 \
                --workload sharegpt --workload decode-16k ;;
        *)
            unknown_step "$name" "$0" ;;
    esac
done
((FAILED == 0))
