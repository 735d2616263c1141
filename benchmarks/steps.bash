# shellcheck shell=bash
# What the scripts of named steps share; sourced by each of them.
#
# OUT gets the figures, TAG is added to their files' names, PYTHON names the interpreter. BUDGET_S is for all steps
# together. DRY_RUN=1 prints the commands, one a line, and runs none. Where LOGS names a directory, each step's output
# goes to a file there, and its last lines are shown. A script of steps ends with `((FAILED == 0))`: its exit code says
# whether all that ran went well.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export PYTHON=${PYTHON:-python} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
OUT=${OUT:-benchmarks/results}
# shellcheck disable=SC2034  # for the script that sources this
SUFFIX="${TAG:+-$TAG}.json"
[[ -n ${DRY_RUN:-} ]] || mkdir -p "$OUT"

declare -A TIMES=()  # how often each step has run

step() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 begun=$SECONDS code log lines=8
    shift 2
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q ' "$@"
        echo
        return
    fi
    if [[ -n ${BUDGET_S:-} ]]; then  # of all steps together, from the script's start
        ((limit > BUDGET_S - SECONDS)) && limit=$((BUDGET_S - SECONDS))
        if ((limit < ${LEAST_S:-15})); then
            not_run "$name" "$SECONDS of BUDGET_S=$BUDGET_S seconds are over"
            return
        fi
    fi
    echo "== $name: $*"
    # The signal that ends a command does not reach what `timeout` has started in it. So a script of steps, and
    # against.sh, gets a budget, by which it ends its own. Its first step starts even if that is little.
    local -x BUDGET_S=$((limit - 5)) LEAST_S=5
    if [[ -n ${LOGS:-} ]]; then
        TIMES[$name]=$((${TIMES[$name]:-0} + 1))
        log=$name
        ((TIMES[$name] > 1)) && log+=.${TIMES[$name]}
        log=$LOGS/${log// /-}${SUFFIX%.json}.log
        timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
        code=$?
        ((code)) && lines=25
        tail -n "$lines" "$log"
    else
        timeout --kill-after=10 "$limit" "$@"
        code=$?
    fi
    echo "== $name: exit code $code after $((SECONDS - begun)) s"
    sum_up "$name" "$code" "$((SECONDS - begun))"
}

not_run() { # NAME WHY
    if [[ -n ${DRY_RUN:-} ]]; then
        echo "# $1: not run: $2" >&2
        return
    fi
    echo "== $1: not run: $2"
    sum_up "$1" - 0
}

SUMMARY=() FAILED=0
sum_up() { # NAME CODE SECONDS
    [[ $2 == [0-] ]] || FAILED=$((FAILED + 1))
    SUMMARY+=("$(printf '%-28s %4s %5s s' "$@")")
}

show_summary() { # a line a step: its name, its exit code ("-": not run) and its seconds
    printf '%s\n' "${SUMMARY[@]}"
}

unknown_step() { # NAME SCRIPT
    echo "unknown step $1; see the top of $2" >&2
    exit 2
}
