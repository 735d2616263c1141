#!/usr/bin/env bash
# Serving under load, on one GPU: starts a server for each model, loads it, stops it.
#
#   benchmarks/serving.sh [OUT_DIR] [serve options ...]      e.g. benchmarks/serving.sh benchmarks/results --api-workers 4
#
# Writes OUT_DIR/serve-MODEL-RATE.json for Llama-3.1-8B's shape at 25 requests/s and all at once, and for
# Qwen3-0.6B's shape all at once and at 50: random weights, ShareGPT-like lengths, greedy, streamed. PYTHON names the
# interpreter, MODELS one of the two or both, with a space between.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${1:-benchmarks/results}
shift || true
port=${PORT:-8765}
url=http://127.0.0.1:$port
work=$(mktemp -d)
server=
stop() {
  if [[ -n $server ]]; then kill -TERM "$server" 2>/dev/null || true; wait "$server" || true; server=; fi
}
trap 'stop; rm -rf "$work"' EXIT
ulimit -n "$(ulimit -Hn)"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

start() { # MODEL, serve options
  local model=$1
  shift
  "$python" benchmarks/dummy_model.py "$model" "$work/$model"
  "$python" -m jpaged serve "$work/$model" --load-format dummy --served-model-name "$model" --port "$port" \
    --no-access-log "$@" &
  server=$!
  until curl -sf "$url/health" >/dev/null; do
    kill -0 "$server" 2>/dev/null || { echo "the server did not start" >&2; exit 1; }
    sleep 1
  done
}

load() { # MODEL RATE NUM_PROMPTS SEED
  curl -sf -X POST "$url/reset_prefix_cache" >/dev/null
  "$python" -m jpaged bench serve --base-url "$url" --dataset sharegpt-like --request-rate "$2" --num-prompts "$3" \
    --seed "$4" --json "$out/serve-$1-$2.json"
}

read -ra models <<<"${MODELS-llama-3.1-8b qwen3-0.6b}"
for model in "${models[@]:-}"; do
  [[ $model == llama-3.1-8b || $model == qwen3-0.6b ]] || {
    echo "MODELS: llama-3.1-8b and qwen3-0.6b are known, not '$model'" >&2
    exit 2
  }
done
mkdir -p "$out"
for model in "${models[@]}"; do
  start "$model" "$@"
  "$python" -m jpaged bench serve --base-url "$url" --request-rate 25 --num-prompts 50 --seed 9 # warms up
  case $model in
    llama-3.1-8b) load "$model" 25 500 1; load "$model" inf 1000 2 ;;
    qwen3-0.6b) load "$model" inf 1000 2; load "$model" 50 800 1 ;;
  esac
  stop
done
