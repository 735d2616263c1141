#!/usr/bin/env bash
# This checkout beside another one on the same machine, in turns: what a change costs or gains.
#
#     OUT=results bash benchmarks/against.sh OTHER_CHECKOUT STEP...
#
#     step              expected   what
#     throughput-0.6b   4 min      Qwen3-0.6B: one request, 32 requests, 1,000 ShareGPT-like requests
#     throughput-8b     6 min      Llama-3.1-8B: the same
#     serving-0.6b      3 min      Qwen3-0.6B behind the server, 800 requests at 50 a second and 1,000 at once
#     serving-8b        6 min      Llama-3.1-8B behind the server, 500 requests at 25 a second and 1,000 at once
#
# Throughput runs other, this, this, other (TURNS); the two of a pair show the spread. OPTIONS are added to its command.
# Serving starts both servers at once, each with two fifths of the GPU's memory, and loads them in turns, ROUNDS times (5)
# at the rate (REQUESTS, if set, instead of so many) and BURSTS times (2) at once, so that no measurement depends on one
# process alone. OUT gets a report for each run. The first run of each checkout compiles, unless JPAGED_CACHE_DIR holds
# its programs. Compare two reports with `python benchmarks/compare.py OTHER.json THIS.json`. Of the other checkout, the
# package `jpaged` is enough. SERVER_CORES and CLIENT_CORES, if set, are the cores (as taskset takes them) of both
# servers and of what loads them. With PARTS=1 the parts of both engines' loops are timed while they serve, and shown at
# the end (`engine_parts/`); latencies are then longer. The exit code says whether all runs went well. Where BUDGET_S is
# set, throughput takes at most so many seconds; runs for which none are left count as failed.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
other=$(cd "${1:?the directory of another checkout}" && pwd)
shift
OUT=$(mkdir -p "${OUT:-results}" && cd "${OUT:-results}" && pwd)
PYTHON=${PYTHON:-python}
FAILED=0
on_server_cores=(${SERVER_CORES:+taskset -c "$SERVER_CORES"})
on_client_cores=(${CLIENT_CORES:+taskset -c "$CLIENT_CORES"})

in_turns() { # LIMIT_S FUNCTION MODEL
    local turn=0 which limit code
    for which in ${TURNS:-other this this other}; do
        local checkout=$here
        [[ $which == other ]] && checkout=$other
        turn=$((turn + 1))
        limit=$1
        if [[ -n ${BUDGET_S:-} ]] && ((limit > BUDGET_S - SECONDS)); then
            limit=$((BUDGET_S - SECONDS))
        fi
        if ((limit < 1)); then
            echo "== $2 $3 $turn: $which: not run: $SECONDS of BUDGET_S=$BUDGET_S seconds are over"
            FAILED=$((FAILED + 1))
            continue
        fi
        echo "== $2 $3 $turn: $which"
        (cd "$checkout" && export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} && "$2" "$3" "$limit" "$which-$turn")
        code=$?
        ((code)) && FAILED=$((FAILED + 1))
        echo "== exit code $code"
    done
}

throughput() { # MODEL LIMIT_S NAME
    # shellcheck disable=SC2086  # OPTIONS are several words
    timeout --kill-after=10 "$2" "$PYTHON" -m jpaged bench throughput --model "$1" --load-format dummy \
        --max-model-len 17000 --workload single --workload batch-32 --workload sharegpt --runs "${RUNS:-3}" \
        ${OPTIONS:-} --json "$OUT/throughput-$1-$3.json"
}

serving() { # MODEL RATE NUM_PROMPTS
    local model=$1 work round which port parts=
    local -A checkouts=([other]=$other [this]=$here) ports=([other]=8765 [this]=8766) servers=()
    work=$(mktemp -d)
    PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" "$here/benchmarks/dummy_model.py" "$model" "$work/$model"
    ulimit -n "$(ulimit -Hn)"
    [[ -n ${PARTS:-} ]] && parts=$here/benchmarks/engine_parts
    for which in other this; do
        (cd "${checkouts[$which]}" && export ENGINE_PARTS=${parts:+$OUT/parts-$model-$which.json} &&
            PYTHONPATH=${parts:+$parts:}$PWD${PYTHONPATH:+:$PYTHONPATH} exec "${on_server_cores[@]}" "$PYTHON" \
            -m jpaged serve "$work/$model" --load-format dummy --served-model-name "$model" --port "${ports[$which]}" \
            --gpu-memory-utilization 0.4 --no-access-log >"$OUT/serve-$model-$which.log" 2>&1) &
        servers[$which]=$!
    done
    for which in other this; do
        until curl -sf "http://127.0.0.1:${ports[$which]}/health" >/dev/null; do
            if ! kill -0 "${servers[$which]}" 2>/dev/null; then
                echo "server '$which' did not start" >&2
                FAILED=$((FAILED + 1))
                kill -TERM "${servers[@]}" 2>/dev/null
                wait "${servers[@]}"
                rm -rf "$work"
                return
            fi
            sleep 1
        done
        load "$model" "$which" 25 50 9 warm-up
    done
    for round in $(seq "${ROUNDS:-5}"); do
        for which in $( ((round % 2)) && echo other this || echo this other); do
            load "$model" "$which" "$2" "$3" "$round" "$2-$round"
        done
    done
    for round in $(seq "${BURSTS:-2}"); do
        for which in $( ((round % 2)) && echo other this || echo this other); do
            load "$model" "$which" inf 1000 "$((round + 100))" "inf-$round"
        done
    done
    if [[ -n ${PARTS:-} ]]; then
        for which in other this; do kill -USR2 "$(<"$OUT/parts-$model-$which.json.pid")"; done
        sleep 2
        "$PYTHON" "$parts/table.py" "$OUT/parts-$model-"{other,this}.json || FAILED=$((FAILED + 1))
    fi
    for which in other this; do
        curl -sf "http://127.0.0.1:${ports[$which]}/metrics" >"$OUT/serve-$model-$which.metrics"
        kill -TERM "${servers[$which]}"
        wait "${servers[$which]}"
    done
    rm -rf "$work"
}

load() { # MODEL other|this RATE NUM_PROMPTS SEED NAME
    local port=8765
    [[ $2 == this ]] && port=8766
    curl -sf -X POST "http://127.0.0.1:$port/reset_prefix_cache" >/dev/null
    PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} "${on_client_cores[@]}" "$PYTHON" -m jpaged bench serve \
        --base-url "http://127.0.0.1:$port" --model "$1" --dataset sharegpt-like --request-rate "$3" --num-prompts "$4" \
        --seed "$5" --json "$OUT/serve-$1-$6-$2.json" || FAILED=$((FAILED + 1))
}

for step in "$@"; do
    case $step in
        throughput-0.6b) in_turns 150 throughput qwen3-0.6b ;;
        throughput-8b) in_turns 200 throughput llama-3.1-8b ;;
        serving-0.6b) serving qwen3-0.6b 50 "${REQUESTS:-800}" ;;
        serving-8b) serving llama-3.1-8b 25 "${REQUESTS:-500}" ;;
        *)
            echo "unknown step $step; see the top of $0" >&2
            exit 2 ;;
    esac
done
((FAILED == 0))
