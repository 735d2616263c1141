#!/usr/bin/env bash
# This checkout beside another one on the same machine, in turns: what a change costs or gains.
#
#     OUT=results bash benchmarks/against.sh OTHER_CHECKOUT STEP...
#
#     step              expected   what
#     throughput-0.6b   4 min      Qwen3-0.6B: one request, 32 requests, 1,000 ShareGPT-like requests
#     throughput-8b     6 min      Llama-3.1-8B: the same
#     serving-0.6b      3 min      Qwen3-0.6B behind the server, 1,000 requests at once and 50 a second
#     serving-8b        4 min      Llama-3.1-8B behind the server, 1,000 requests at once and 25 a second
#
# Each step runs other, this, this, other; the two of a pair show the spread. OUT gets a report for each run. The first
# run of each checkout compiles, unless JPAGED_CACHE_DIR holds its programs. Compare two reports with
# `python benchmarks/compare.py OTHER.json THIS.json`.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
other=$(cd "${1:?the directory of another checkout}" && pwd)
shift
OUT=$(mkdir -p "${OUT:-results}" && cd "${OUT:-results}" && pwd)
PYTHON=${PYTHON:-python}

in_turns() { # LIMIT_S FUNCTION MODEL
    local turn=0 which
    for which in other this this other; do
        local checkout=$here
        [[ $which == other ]] && checkout=$other
        turn=$((turn + 1))
        echo "== $2 $3 $turn: $which"
        (cd "$checkout" && export PYTHONPATH=$checkout && "$2" "$3" "$1" "$which-$turn")
        echo "== exit code $?"
    done
}

throughput() { # MODEL LIMIT_S NAME
    timeout --kill-after=10 "$2" "$PYTHON" -m jpaged bench throughput --model "$1" --load-format dummy \
        --max-model-len 17000 --workload single --workload batch-32 --workload sharegpt --runs "${RUNS:-3}" \
        --json "$OUT/throughput-$1-$3.json"
}

serving() { # MODEL LIMIT_S NAME
    local reports
    reports=$(mktemp -d)
    MODELS=$1 timeout --kill-after=10 "$2" bash benchmarks/serving.sh "$reports"
    for report in "$reports"/*.json; do
        mv "$report" "$OUT/$(basename "$report" .json)-$3.json"
    done
    rmdir "$reports"
}

for step in "$@"; do
    case $step in
        throughput-0.6b) in_turns 150 throughput qwen3-0.6b ;;
        throughput-8b) in_turns 200 throughput llama-3.1-8b ;;
        serving-0.6b) in_turns 150 serving qwen3-0.6b ;;
        serving-8b) in_turns 200 serving llama-3.1-8b ;;
        *)
            echo "unknown step $step; see the top of $0" >&2
            exit 2 ;;
    esac
done
