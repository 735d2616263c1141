#!/usr/bin/env bash
# Everything that is measured on one GPU. You choose the steps, their order and the seconds for all of them together.
#
#     OUT=/tmp/card BUDGET_S=560 bash benchmarks/card.sh int4-8b fp8-kv-8b ...
#     bash benchmarks/card.sh --list plan-1                  what its steps take; without a name, of all steps and plans
#     DRY_RUN=1 bash benchmarks/card.sh all                  the commands, one a line
#
#     step                seconds  what
#     invariant-product        90  products whose bits depend on a row alone: whether they do; times beside cuBLAS
#     invariant-0.6b          110  Qwen3-0.6B, ShareGPT-like: without batch_invariant, then with it
#     invariant-8b            170  Llama-3.1-8B, the same
#     invariant-bits          130  bits of requests in random batches, beside those of each alone, and in training
#     structured-256           75  0.6B, 256 requests of 128 tokens without a schema, then with one
#     structured-16            55  0.6B, 16 of them, and 100 with schemas never seen before: time to the first token
#     structured-half          85  0.6B, 1,000 ShareGPT-like, half of them with a schema
#     attacks                 110  hostile schemas, regexes and tools: the pauses of other streams
#     structured-8b            70  8B, 256 requests without a schema, then with one
#     fp8-8b                  120  8B in FP8: 1, 32 and 256 requests, ShareGPT-like, 512 of 1,024 tokens, 16 k prefill
#     fp8-kv-8b               115  8B in FP8, keys and values too: 32 and 256 requests, ShareGPT-like, 8 x 16 k
#     int4-8b                  60  8B in 4 bits: 1 and 32 requests
#     bf16-8b                  55  8B in bfloat16: 1 and 32 requests, to compare int4-8b with
#     fp8-30b                 105  Qwen3-30B-A3B in FP8: 1 and 32 requests
#     int4-30b                105  Qwen3-30B-A3B in 4 bits: 1 and 32 requests
#     bf16-30b                105  Qwen3-30B-A3B in bfloat16, to compare both with
#     pool-memory             130  8B in bfloat16, FP8, FP8 with an FP8 cache, 4 bits: the pool, the memory in use
#     few-bits-kernels         55  FP8 products of 8,192^3, 8B's gate and up in all forms, attention over FP8 pools
#     few-bits-experts         80  30B's experts in FP8, 4 bits and MXFP4
#     few-bits-tests          140  the GPU tests of ops with quantized operands
#     train                   210  a story model of 104 million parameters: 1.5 minutes on short rows, one on 16,384
#     quality                 110  of the model of `train`, in FP8 and 4 bits: perplexity and agreement beside bfloat16
#     drift                    60  of the model of `train`, with an FP8 cache: log-probabilities along 16,384 tokens
#     30b                     200  30B: 1, 32 and 256 requests, ShareGPT-like, 16 k prefill
#     30b-steps               130  30B: decode steps of 1, 32 and 256 rows by kernel, beside their floor
#     30b-experts              90  30B: experts and sparse layers beside their floors
#     gpt-oss-steps            90  GPT-OSS-20B: decode steps of 32 and 256 rows
#     gemma-steps              80  Gemma-3-12B: the same
#     deepseek-steps           90  DeepSeek-V2-Lite: the same
#     hybrid-prefixes         110  Qwen3.5-9B: prompts that begin alike, with snapshots of states and without
#     transformers            180  log-probabilities of five families in bfloat16 beside transformers (torch)
#     load                    150  a checkpoint of 61 GB: written below WORK, which needs room for it, then loaded
#     virtual-attention        30  one layer over contiguous addresses (these: benchmarks/virtual.sh)
#     virtual-steps            80  8B, decode steps, pages mapped ahead and in the step, beside paged
#     virtual-growth          150  8B, the same of 1,000 sequences
#     virtual-prompts         145  8B, time to the first token by when pages are mapped
#     virtual-throughput      190  8B, tokens/s by rows, context and prompt length: paged, virtual, virtual by cuDNN
#     virtual-sharing          50  8B, two engines on one card
#     virtual-mapping          30  pages mapped and unmapped a second
#     virtual-sharegpt        180  8B, ShareGPT-like: paged, then virtual
#     virtual-long            240  8B, 8 x 16 k and 16 k prefill: paged, then virtual
#     virtual-figure18        220  8B, block sizes
#     contiguous               90  attention kernels over contiguous addresses beside paged ones, and cuDNN's
#     move-blocks              40  copies, gathers and scatters of blocks: the GPU tests, and the copy's rate
#     families                100  tiny models of every family: the same tokens in all cache layouts
#     rollouts                110  8B beside a trainer: new weights, sleep, streams kept
#     rollouts-process        100  8B in a process of its own: new weights, part by part, after their GPU test
#     shared-device            60  8B and a trainer that take turns on the device
#     grpo                     80  ten steps of GRPO on the embedded model (examples/teach_stories), part by part
#     tunix                   120  rollouts of 0.6B beside Tunix' own sampler (google-tunix)
#     triton-8b               110  8B by Triton's kernels: ShareGPT-like, one request
#     triton-0.6b              85  0.6B by Triton's kernels: ShareGPT-like
#     xla-0.6b                130  0.6B by XLA's: 32 and 256 requests
#     triton-kernels           90  decode, prefill and sampling: Hopper's kernels and Triton's, a column each
#     triton-calls            120  what a call of a Triton kernel costs (benchmarks/triton_calls.py)
#     tests-attention         150  GPU tests of attention
#     tests-experts           150  GPU tests of experts, routing and recurrent layers
#     tests-rest              150  GPU tests of all other kernels
#     serving-8b              130  8B behind the server, open loop (benchmarks/serving.sh)
#     serving-0.6b            110  0.6B, the same
#     against-8b              190  8B, this checkout beside OTHER: 1 and 32 requests, ShareGPT-like
#     against-0.6b            150  0.6B, the same
#     survival                110  8B behind the server, its engine killed twice: the pause, part by part
#     plan-1                  515  Triton's calls, fewer bits, batch invariance, structured output
#     plan-2                  520  mixtures and hybrids, and in fewer bits
#     plan-3                  560  quality in fewer bits, of a larger model; rollouts
#
# Seconds are estimates for an H200 and 16 cores, compilation included. Where BUDGET_S is set, a step starts only if its
# seconds are left of it; those that follow may still fit. Each command of a step may take twice the step's seconds, and
# one that prepares a file for it 200; then it is stopped, or earlier when BUDGET_S is over. A step that fails does not
# stop the others. `quality` and `drift` need `train` before them, in this run or an earlier one with the same WORK.
# OUT gets a JSON file and a log for each, and summary.txt: a line a step with its exit code and seconds. A command that
# prepares is named STEP-before; the logs of commands of the same name are numbered. The exit code says whether all
# steps that ran went well.
#
# WORK keeps what steps prepare for others: configurations, tokenizers, the trained model (default: below /tmp). OTHER
# is another checkout; of it, the package `jpaged` is enough. TOKENIZER is a directory with a tokenizer of 151,936
# tokens for structured output, TOKENIZER_8B one of 128,256 (default: trained on the sources of Python's packages).
# No step needs a network. SMALL=1 runs steps with the embedded model and small numbers, on a CPU, too, and leaves out
# those that have no small form.
# shellcheck disable=SC2054  # sizes are lists with commas
set -uo pipefail
# shellcheck source=benchmarks/steps.bash
source "$(dirname "$0")/steps.bash"
SCRIPT=benchmarks/card.sh
WORK=${WORK:-${TMPDIR:-/tmp}/jpaged-card}
LOGS=$OUT
[[ -n ${DRY_RUN:-} ]] || mkdir -p "$WORK"
PLAN_1=(triton-calls int4-8b fp8-kv-8b invariant-product structured-256 structured-16)
PLAN_2=(30b fp8-30b int4-30b hybrid-prefixes)
PLAN_3=(rollouts-process train quality drift grpo)

LLAMA=(--model llama-3.1-8b --load-format dummy)
QWEN=(--model qwen3-0.6b --load-format dummy)
MOE=(--model qwen3-30b-a3b --load-format dummy)
HYBRID=(--model qwen3.5-9b --max-num-batched-tokens 8192)
# Programs for all workloads, for ShareGPT-like ones, and for few rows.
ALL_SIZES=(--max-model-len 17000 --max-num-seqs 1024 --decode-buckets 8,32,64,128,192,256,384,512,640,768,896,1024)
ALL_SIZES+=(--max-num-batched-tokens 8192 --token-buckets 64,256,512,1024,2048,4096,6144,8192)
SHAREGPT_SIZES=(--max-model-len 2560 --max-num-seqs 512 --decode-buckets 64,256,512)
SHAREGPT_SIZES+=(--max-num-batched-tokens 2048 --token-buckets 256,1024,2048)
FEW_ROWS=(--max-model-len 1024 --max-num-seqs 32 --decode-buckets 8,32)
FEW_ROWS+=(--max-num-batched-tokens 8192 --token-buckets 64,512,8192)
STRUCTURED_SIZES=(--max-model-len 4096 --max-num-seqs 256 --decode-buckets 16,64,128,256)
STRUCTURED_SIZES+=(--max-num-batched-tokens 2048 --token-buckets 64,256,2048)
STEPS=(--max-model-len 2048 --context 512 --steps 32 --top 25 --max-num-seqs 256 --decode-buckets 8,32,256)
STEPS+=(--max-num-batched-tokens 2048 --token-buckets 256,2048)
ROWS=(--batch 32 --batch 256)
ANSWERS=(--input-len 32 --output-len 128 --temperature 1)
ROLLOUTS=(--max-model-len 1024 --max-num-seqs 256 --decode-buckets 8,256 --gpu-memory-utilization 0.5)
ROLLOUTS+=(--max-num-batched-tokens 2048 --token-buckets 256,2048)
STREAMS=()
MINUTES=(1.5 1)
LARGE=(--size large --workers 8 --log-every 100)
LONG=(--join --length 16384 --rows 2)
TEXTS=(--texts 120 --max-tokens 200)
DRIFT=(--tokens 16384 --prompts 4)
if [[ -n ${SMALL:-} ]]; then
    demo=$("$PYTHON" -c 'from jpaged.assets import demo_model_path; print(demo_model_path())')
    LLAMA=(--model "$demo") QWEN=(--model "$demo") MOE=(--model "$demo")
    ALL_SIZES=(--max-model-len 256 --max-num-seqs 8 --decode-buckets 8 --max-num-batched-tokens 64 --token-buckets 64)
    SHAREGPT_SIZES=("${ALL_SIZES[@]}") FEW_ROWS=("${ALL_SIZES[@]}") STRUCTURED_SIZES=("${ALL_SIZES[@]}")
    STEPS=("${ALL_SIZES[@]}" --context 16 --steps 8)
    ROWS=(--batch 4)
    ANSWERS=(--input-len 8 --output-len 16 --temperature 1)
    ROLLOUTS=("${ALL_SIZES[@]}" --rounds 3)
    STREAMS=(--streams 8 --output-len 8)
    MINUTES=(0.05 0.05)
    LARGE=(--size tiny --steps 4 --log-every 1)
    LONG=(--join --length 128 --rows 2)
    TEXTS=(--texts 2 --max-tokens 16)
    DRIFT=(--tokens 128 --prompts 2 --stretch 64)
fi

list() { # STEP...: their lines of the table above, or all
    local name
    if (($# == 0)); then
        sed -n 's/^#     \([a-z0-9.-]* *[0-9s]* .*\)$/\1/p' "$SCRIPT" | sed -n '/^step /,$p'
    fi
    for name in "$@"; do
        sed -n "s/^#     \(${name//./\\.} \+[0-9]\+ .*\)$/\1/p" "$SCRIPT"
    done
}

seconds_of() { # STEP
    list "$1" | awk '{print $2}'
}

throughput() { # NAME OPTIONS...
    local json=$1
    shift
    step "$json" "$limit" "$PYTHON" -m jpaged bench throughput --json "$OUT/$json$SUFFIX" "$@"
}

workloads() { # RUNS WORKLOAD...: the options that name them; few short requests if SMALL
    if [[ -n ${SMALL:-} ]]; then
        options=(--runs 1 --num-prompts 4 --input-len 16 --output-len 8)
        return
    fi
    local workload
    options=(--runs "$1")
    shift
    for workload in "$@"; do options+=(--workload "$workload"); done
}

requests() { # RUNS NUMBER: of ANSWERS
    options=(--runs "$1" --num-prompts "$([[ -n ${SMALL:-} ]] && echo 4 || echo "$2")" "${ANSWERS[@]}")
}

bench() { # BENCH OPTIONS...
    local bench=$1
    shift
    step "$name" "$limit" "$PYTHON" -m jpaged bench "$bench" --json "$OUT/$name$SUFFIX" "$@"
}

script() { # FILE OPTIONS...: of a script that writes a report
    local file=$1
    shift
    step "$name" "$limit" "$PYTHON" "$file" "$@" --json "$OUT/$name$SUFFIX"
}

drill() { # MODULE OPTIONS...
    local module=$1
    shift
    step "$name" "$limit" "$PYTHON" -m "tests.drills.$module" "$@"
}

kernels() { # CASE...: by the backends in `options`
    local case
    for case in "$@"; do options+=(--only "$case"); done
    bench kernels --repeats 3 "${options[@]}"
}

gpu_tests() { # FILE...
    step "$name" "$limit" env JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false "$PYTHON" -m pytest -q \
        -m gpu -n "${WORKERS:-8}" --dist worksteal "$@"
}

prepare() { # PATH COMMAND...: which makes PATH, unless it is there
    local path=$1 command=() word
    shift
    [[ -e $path ]] && return
    if [[ -n ${DRY_RUN:-} ]]; then
        step "$name-before" 200 "$@"
        return
    fi
    # Made under another name, so that what is there is whole, however this script or the command ends.
    for word in "$@"; do
        [[ $word == "$path" ]] && word=$path.part
        command+=("$word")
    done
    rm -rf "$path.part"
    local failed=$FAILED
    step "$name-before" 200 "${command[@]}"
    ((FAILED == failed)) && [[ -e $path.part ]] && mv "$path.part" "$path"
    rm -rf "$path.part"
}

few_bits() { # MODEL SCHEME: sets `model`, the options for it
    local directory=$WORK/$1-$2
    if [[ -n ${SMALL:-} ]]; then
        directory=$WORK/small-$2
        prepare "$directory" "$PYTHON" -m jpaged quantize "$demo" "$directory" --scheme "$2" --group-size 64
        model=(--model "$directory")
    else
        prepare "$directory" "$PYTHON" benchmarks/dummy_model.py "$1" "$directory" --scheme "$2"
        model=(--model "$directory" --load-format dummy)
    fi
}

tokenizer() { # MODEL DIRECTORY: sets `directory`
    directory=${2:-$WORK/$1-tokenizer}
    if [[ -n ${SMALL:-} ]]; then
        directory=$demo
    elif [[ -z $2 ]]; then
        prepare "$directory" "$PYTHON" benchmarks/dummy_model.py "$1" "$directory" --train-tokenizer
    fi
}

other() { # MODEL
    if [[ -z ${OTHER:-} && -z ${DRY_RUN:-} ]]; then
        not_run "$name" "OTHER names no other checkout"
        return
    fi
    step "$name" "$limit" env RUNS=1 "TURNS=${TURNS:-other this}" "OUT=$OUT" \
        bash benchmarks/against.sh "${OTHER:-.}" "throughput-$1"
}

has_small_form() { # STEP
    case $1 in
        load | hybrid-prefixes | serving-* | against-* | triton-calls) return 1 ;;
        gpt-oss-steps | gemma-steps | deepseek-steps) return 1 ;;
        *-kernels | few-bits-* | 30b-experts | contiguous | move-blocks | tests-*) return 1 ;;
    esac
}

run_step() { # NAME
    local name=$1 seconds limit options=() model=() directory kind
    seconds=$(seconds_of "$name")
    limit=$((2 * seconds))
    if [[ -n ${SMALL:-} ]] && ! has_small_form "$name"; then
        not_run "$name" "it has no small form"
        return
    fi
    [[ -n ${SMALL:-} ]] && limit=$((10 * limit))  # on a CPU
    if [[ -n ${BUDGET_S:-} && -z ${DRY_RUN:-} ]] && ((SECONDS + seconds > BUDGET_S)); then
        not_run "$name" "it takes $seconds s, and $((BUDGET_S - SECONDS)) of BUDGET_S=$BUDGET_S are left"
        return
    fi
    case $name in
        invariant-product)
            script benchmarks/invariant_product.py ${SMALL:+--tiny} ;;
        invariant-0.6b | invariant-8b)
            model=("${QWEN[@]}")
            [[ $name == *-8b ]] && model=("${LLAMA[@]}")
            workloads 2 sharegpt
            throughput "$name-plain" "${model[@]}" "${SHAREGPT_SIZES[@]}" "${options[@]}"
            throughput "$name" "${model[@]}" "${SHAREGPT_SIZES[@]}" "${options[@]}" --batch-invariant ;;
        invariant-bits)
            options=(--model llama --model mixture --model qwen3-0.6b --rounds 2)
            [[ -n ${SMALL:-} ]] && options=(--model tiny --rounds 1)
            drill batch_invariance "${options[@]}" --json "$OUT/$name$SUFFIX" ;;
        structured-256 | structured-16)
            tokenizer qwen3-0.6b "${TOKENIZER:-}"
            requests 3 "${name#structured-}"
            [[ $name == *-16 ]] && options+=(--unseen-schemas "$([[ -n ${SMALL:-} ]] && echo 3 || echo 100)")
            throughput "$name" "${QWEN[@]}" "${STRUCTURED_SIZES[@]}" --tokenizer "$directory" --structured all \
                "${options[@]}" ;;
        structured-half)
            tokenizer qwen3-0.6b "${TOKENIZER:-}"
            workloads 2 sharegpt
            throughput "$name" "${QWEN[@]}" "${SHAREGPT_SIZES[@]}" --tokenizer "$directory" --structured half \
                "${options[@]}" ;;
        structured-8b)
            tokenizer llama-3.1-8b "${TOKENIZER_8B:-}"
            requests 2 256
            throughput "$name" "${LLAMA[@]}" "${STRUCTURED_SIZES[@]}" --tokenizer "$directory" --structured all \
                "${options[@]}" ;;
        attacks)
            drill attacks --seconds 5 --json "$OUT/$name$SUFFIX" ;;
        fp8-8b)
            workloads 1 single batch-32 batch-256 sharegpt long-input prefill-16k
            throughput "$name" "${LLAMA[@]}" --quantization fp8 "${ALL_SIZES[@]}" "${options[@]}" ;;
        fp8-kv-8b)
            workloads 1 batch-256 sharegpt decode-16k batch-32
            options+=(--quantization fp8 --kv-cache-dtype fp8)
            throughput "$name" "${LLAMA[@]}" "${ALL_SIZES[@]}" "${options[@]}" ;;
        bf16-8b)
            workloads 2 single batch-32
            throughput "$name" "${LLAMA[@]}" "${FEW_ROWS[@]}" "${options[@]}" ;;
        int4-8b)
            few_bits llama-3.1-8b int4
            workloads 2 single batch-32
            throughput "$name" "${model[@]}" "${FEW_ROWS[@]}" "${options[@]}" ;;
        fp8-30b | bf16-30b)
            workloads 2 single batch-32
            [[ $name == fp8-* ]] && options+=(--quantization fp8)
            throughput "$name" "${MOE[@]}" "${FEW_ROWS[@]}" "${options[@]}" ;;
        int4-30b)
            few_bits qwen3-30b-a3b int4
            workloads 2 single batch-32
            throughput "$name" "${model[@]}" "${FEW_ROWS[@]}" "${options[@]}" ;;
        pool-memory)
            few_bits llama-3.1-8b int4
            options=(--load-format dummy)
            [[ -n ${SMALL:-} ]] && options=(--max-model-len 256)
            script benchmarks/pool_memory.py --model "${LLAMA[1]}" --quantized-model "${model[1]}" "${options[@]}" ;;
        few-bits-kernels)
            kernels "pool in FP8" "=decode 64 x 4,096" square "gate, up, 1 rows" "gate, up, 32 rows" ;;
        few-bits-experts)
            kernels "experts in" ;;
        few-bits-tests)
            gpu_tests tests/pallas_kernels/{fp8_product,int4_product,int8_product,round_rows} \
                tests/pallas_kernels/quantized_grouped_product tests/pallas_kernels/test_fp8_pools.py ;;
        train)
            options=("$PYTHON" examples/train_story_model/train.py "${LARGE[@]}")
            step "$name short" "$limit" "${options[@]}" --minutes "${MINUTES[0]}" --output "$WORK/story"
            step "$name long" "$limit" "${options[@]}" --minutes "${MINUTES[1]}" "${LONG[@]}" \
                --tokenizer "$WORK/story" --begin "$WORK/story" --output "$WORK/story-long" ;;
        quality)
            prepare "$WORK/texts.jsonl" "$PYTHON" benchmarks/story_conversations.py --number 64 \
                --output "$WORK/texts.jsonl"
            for kind in fp8 fp8-block int4; do
                options=(--calibration "$WORK/texts.jsonl")
                [[ $kind == fp8 ]] && options+=(--kv-cache fp8)
                [[ $kind == fp8-block ]] && options=()
                [[ $kind == int4 ]] && options+=(--group-size 64)
                prepare "$WORK/story-$kind" "$PYTHON" -m jpaged quantize "$WORK/story" "$WORK/story-$kind" \
                    --scheme "$kind" "${options[@]}" --quiet
                model+=(--quantized-model "$WORK/story-$kind")
            done
            script benchmarks/quantized_quality.py --model "$WORK/story" "${model[@]}" --kv-cache-dtype fp8 \
                "${TEXTS[@]}" ;;
        drift)
            script benchmarks/fp8_cache_drift.py --model "$WORK/story-long" "${DRIFT[@]}" ;;
        30b)
            workloads 1 single batch-32 batch-256 sharegpt prefill-16k
            throughput "$name" "${MOE[@]}" "${options[@]}" --max-model-len 17000 --max-num-seqs 1000 \
                --decode-buckets 8,32,64,128,256,512,1000 --max-num-batched-tokens 8192 \
                --token-buckets 64,512,1024,2048,8192 ;;
        30b-steps)
            bench steps "${MOE[@]}" "${STEPS[@]}" --batch 1 "${ROWS[@]}" ;;
        30b-experts)
            kernels "experts, " "sparse layer" routing ;;
        gpt-oss-steps | gemma-steps | deepseek-steps)
            case $name in
                gpt-*) model=(--model gpt-oss-20b --load-format dummy) ;;
                gemma-*) model=(--model gemma-3-12b --load-format dummy) ;;
                *) model=(--model deepseek-v2-lite --load-format dummy) ;;
            esac
            bench steps "${model[@]}" "${STEPS[@]}" "${ROWS[@]}" ;;
        hybrid-prefixes)
            script benchmarks/hybrid_prefixes.py "${HYBRID[@]}" ;;
        transformers)
            options=(--together 5)
            [[ -n ${SMALL:-} ]] && options=(--size tiny --model gpt-oss-20b)
            script benchmarks/against_transformers.py "${options[@]}" ;;
        load)
            prepare "$WORK/30b" "$PYTHON" benchmarks/dummy_model.py qwen3-30b-a3b "$WORK/30b" --weights
            script benchmarks/load_weights.py "$WORK/30b" --drop-cache ;;
        virtual-*)
            step "$name" "$limit" env "OUT=$OUT" bash benchmarks/virtual.sh "${name#virtual-}" ;;
        contiguous)
            kernels contiguous "=decode 64 x 4,096" "=decode 8 x 16,384" "=prefill 1 x 16,384" \
                "=chunk of 2,048 on a 14,336 prefix" ;;
        move-blocks)
            gpu_tests tests/pallas_kernels/move_blocks
            kernels "block copy" ;;
        families)
            drill families --processes "$(nproc)" --limit-s "$((seconds - 5))" --json "$OUT/$name$SUFFIX" ;;
        rollouts)
            bench rollouts "${LLAMA[@]}" "${ROLLOUTS[@]}" "${STREAMS[@]}" ;;
        rollouts-process)
            gpu_tests tests/processes/test_weights_on_gpu.py
            bench rollouts "${LLAMA[@]}" "${ROLLOUTS[@]}" --engine-process ;;
        shared-device)
            options=("${LLAMA[@]}" --trainer-gib 16 --max-num-batched-tokens 2048)
            [[ -n ${SMALL:-} ]] && options=()
            drill shared_device "${options[@]}" --json "$OUT/$name$SUFFIX" ;;
        grpo)
            options=(--steps 10)
            [[ -n ${SMALL:-} ]] && options=(--steps 1 --requests 2 --stories 2 --tokens 16)
            step "$name" "$limit" "$PYTHON" examples/teach_stories/teach.py "${options[@]}" \
                --plot "$OUT/$name${SUFFIX%.json}.svg" ;;
        tunix)
            script benchmarks/tunix_sampler.py --runs 1 ${SMALL:+--tiny} ;;
        triton-8b)
            workloads 1 sharegpt single
            throughput "$name" "${LLAMA[@]}" "${ALL_SIZES[@]}" --kernel-backend triton "${options[@]}" ;;
        triton-0.6b)
            workloads 2 sharegpt
            throughput "$name" "${QWEN[@]}" "${ALL_SIZES[@]}" --kernel-backend triton "${options[@]}" ;;
        xla-0.6b)
            workloads 1 batch-32 batch-256
            throughput "$name" "${QWEN[@]}" "${STRUCTURED_SIZES[@]}" --kernel-backend xla "${options[@]}" ;;
        triton-kernels)
            options=(--backend hopper --backend triton)
            kernels "=decode 64 x 4,096" "=decode 256 x 1,024" "=decode 8 x 16,384" "=decode 32 x 1,024" \
                "=prefill 1 x 16,384" "=prefill 4 x 4,096" "=prefill 16 x 1,024" "sample 256 rows" ;;
        triton-calls)
            script benchmarks/triton_calls.py ;;
        tests-attention)
            gpu_tests tests/pallas_kernels/{decode,ragged,mixed,shared_prefix,contiguous,expanded,invariant}_attention \
                tests/pallas_kernels/test_latents.py ;;
        tests-experts)
            gpu_tests tests/pallas_kernels/{grouped_product,route_tokens,gated_delta_rule,state_space_dual} \
                tests/pallas_kernels/short_convolution ;;
        tests-rest)
            gpu_tests tests/pallas_kernels/{gated_product,invariant_product,rope_and_write,write_kv,move_blocks} \
                tests/pallas_kernels/{sample_tokens,test_one_after_another.py,test_triton_call.py} ;;
        serving-8b | serving-0.6b)
            model=(llama-3.1-8b)
            [[ $name == *-0.6b ]] && model=(qwen3-0.6b)
            step "$name" "$limit" env "MODELS=${model[0]}" bash benchmarks/serving.sh "$OUT" ;;
        against-8b)
            other 8b ;;
        against-0.6b)
            other 0.6b ;;
        survival)
            options=(--kills 1 --streams 4 --tokens 200)
            if [[ -z ${SMALL:-} ]]; then
                options=(--kills 2 --streams 24 --tokens 3500 --shortest-wait 4 --longest-wait 6 --exact no)
                directory=$WORK/llama-3.1-8b
                prepare "$directory" "$PYTHON" benchmarks/dummy_model.py llama-3.1-8b "$directory"
                model=(--model "$directory" --load-format dummy --max-model-len 4096 --max-num-seqs 64)
                model+=(--decode-buckets 8,64 --max-num-batched-tokens 2048 --token-buckets 64,2048)
            fi
            drill survival kill "${options[@]}" --json "$OUT/$name$SUFFIX" -- "${model[@]}" ;;
        *)
            unknown_step "$name" "$SCRIPT" ;;
    esac
    [[ -n ${DRY_RUN:-} ]] || show_summary >"$OUT/summary${SUFFIX%.json}.txt"  # after each, in case it is the last
}

expand() { # STEP|PLAN|all...: sets `named`
    local name
    named=()
    for name in "$@"; do
        case $name in
            all) mapfile -t -O "${#named[@]}" named < <(list | awk 'NR > 1 && $1 !~ /^plan-/ {print $1}') ;;
            plan-1) named+=("${PLAN_1[@]}") ;;
            plan-2) named+=("${PLAN_2[@]}") ;;
            plan-3) named+=("${PLAN_3[@]}") ;;
            *) named+=("$name") ;;
        esac
    done
    for name in "${named[@]}"; do
        [[ -n $(seconds_of "$name") ]] || unknown_step "$name" "$SCRIPT"
    done
}

if [[ ${1:-} == --list ]]; then
    shift
    expand "$@"
    list "${named[@]}"
    exit
fi
expand "$@"
if ((${#named[@]} == 0)); then
    list >&2
    exit 2
fi
for variable in TOKENIZER TOKENIZER_8B; do
    path=${!variable:-}
    if [[ -n $path && ! -d $path && -z ${DRY_RUN:-} ]]; then
        echo "$variable=$path is no directory, seen from $PWD; unset it to have a tokenizer trained" >&2
        exit 2
    fi
done
for name in "${named[@]}"; do
    run_step "$name"
done
[[ -n ${DRY_RUN:-} ]] || show_summary
((FAILED == 0))
