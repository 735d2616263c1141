# What single.sh and parallel.sh share; sourced by both.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-python}
OUT=${OUT:-benchmarks/results}
SUFFIX="${TAG:+-$TAG}.json"
mkdir -p "$OUT"

step() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 begun=$SECONDS
    shift 2
    echo "== $name: $*"
    timeout --kill-after=10 "$limit" "$@"
    echo "== $name: exit code $? after $((SECONDS - begun)) s"
}

unknown_step() { # NAME SCRIPT
    echo "unknown step $1; see the top of $2" >&2
    exit 2
}
