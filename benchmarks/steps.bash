# What single.sh and parallel.sh share; sourced by both.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-python}
OUT=${OUT:-benchmarks/results}
SUFFIX="${TAG:+-$TAG}.json"
mkdir -p "$OUT"

step() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 begun=$SECONDS
    shift 2
    if [[ -n ${BUDGET_S:-} ]]; then  # of all steps together, from the script's start
        ((limit > BUDGET_S - SECONDS)) && limit=$((BUDGET_S - SECONDS))
        if ((limit < 15)); then
            echo "== $name: not run: $SECONDS of BUDGET_S=$BUDGET_S seconds are over"
            return
        fi
    fi
    echo "== $name: $*"
    timeout --kill-after=10 "$limit" "$@"
    echo "== $name: exit code $? after $((SECONDS - begun)) s"
}

unknown_step() { # NAME SCRIPT
    echo "unknown step $1; see the top of $2" >&2
    exit 2
}
