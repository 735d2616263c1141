# shellcheck shell=bash
# What the scripts of named steps share; sourced by each of them.
#
# OUT gets the figures, TAG is added to their files' names, PYTHON names the interpreter. BUDGET_S is for all steps
# together. DRY_RUN=1 prints the commands, one a line, and runs none. Where LOGS names a directory, each step's output
# goes to a file there, and its last lines are shown.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export PYTHON=${PYTHON:-python} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
OUT=${OUT:-benchmarks/results}
# shellcheck disable=SC2034  # for the script that sources this
SUFFIX="${TAG:+-$TAG}.json"
[[ -n ${DRY_RUN:-} ]] || mkdir -p "$OUT"

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
        if ((limit < 15)); then
            not_run "$name" "$SECONDS of BUDGET_S=$BUDGET_S seconds are over"
            return
        fi
    fi
    echo "== $name: $*"
    # A step that runs another script of steps has that one end its own: a signal to the script does not reach them.
    local -x BUDGET_S=$((limit - 5))
    if [[ -n ${LOGS:-} ]]; then
        log=$LOGS/${name// /-}.log
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
