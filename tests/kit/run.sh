#!/bin/sh
# Checks and measures a GPU on a machine that has a driver and nothing else: no compiler, no
# Python. Beyond POSIX sh it asks for coreutils, grep and sed.
# `cargo xtask gpu-kit` made this folder; docs/PLATFORM.md says what to do with it.

usage() {
    cat <<'END'
usage: ./run.sh [OPTIONS]

  --only STEP,...   these steps alone, in the order below
  --minutes N       for everything together; what finds no time is said to be left out
  --device D        cuda, or a simulator such as sim:sm_90a                    [cuda]
  --tiny            a few small cases of each step
  --out DIR         where results go                         [results-DEVICE-DATE-TIME]
  --shapes NAME,... layers of the last step: mixtral, qwen3, deepseek-v3, gpt-oss, olmoe
  --python PATH     a Python that may have torch and transformers           [python3]
  --packages DIR    Python packages for it, before its own

  step         limit    what
  probe        3 min    every hardware primitive beside the tables, bit by bit
  check        3 min    streams, graphs, copies, faults: the device path
  conformance  6 min    small layers beside an f64 reference, smallest first
  oracles      6 min    layers and gradients of Hugging Face and Tutel
  training     6 min    gradients beside the reference, and Tutel's example
  sanitize     8 min    compute-sanitizer's four tools over small layers, if it is here
  launches     4 min    the host's time for a call, plain and as a graph
  layers       25 min   layers of known models beside the card's limits and torch

Each step writes DIR/N-STEP.txt and goes on after a failure; DIR/summary.txt has all
outcomes. Exit code 1 when a step failed, ran out of its time or ended by itself, 2 when
nothing could run.
END
}

STEPS='probe:3 check:3 conformance:6 oracles:6 training:6 sanitize:8 launches:4 layers:25'
here=$(cd "$(dirname "$0")" && pwd) || exit 2
program=$here/moesaic-kit
only= minutes= device=cuda tiny= out= shapes= python=python3 packages=

while [ $# -gt 0 ]; do
    case $1 in
        --tiny) tiny=--tiny; shift; continue ;;
        --help | -h) usage; exit 0 ;;
        --only | --minutes | --device | --out | --shapes | --python | --packages) ;;
        *) echo "run.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    [ $# -gt 1 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
    case $1 in
        --only) only=$2 ;;
        --minutes) minutes=$2 ;;
        --device) device=$2 ;;
        --out) out=$2 ;;
        --shapes) shapes=$2 ;;
        --python) python=$2 ;;
        --packages) packages=$2 ;;
    esac
    shift 2
done

case $minutes in
    *[!0-9]*) echo "run.sh: --minutes takes a whole number" >&2; exit 2 ;;
esac
for step in $(echo "$only" | tr ',' ' '); do
    case " $STEPS" in
        *" $step:"*) ;;
        *) echo "run.sh: there is no step $step" >&2; usage >&2; exit 2 ;;
    esac
done

now() { date +%s; }
begun=$(now)
[ -n "$out" ] || out=results-$(echo "$device" | tr ':' '-')-$(date -u +%Y-%m-%d-%H%M%S)
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
export TMPDIR="$scratch"
[ -z "$packages" ] || export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
store=$scratch/store

# Seconds that a step may take: its own limit, or what is left of all.
allowed() {
    seconds=$(($1 * 60))
    if [ -n "$minutes" ]; then
        left=$((minutes * 60 - ($(now) - begun)))
        [ "$left" -ge "$seconds" ] || seconds=$left
    fi
    echo "$seconds"
}

# Everything that a reader of the results has to know of the machine.
facts() {
    echo "# $(date -u '+%Y-%m-%d %H:%M:%S UTC'), $(uname -sm), kit $(cat "$here/version")"
    echo "# $1"
    "$program" facts --device "$device" --store "$store" 2>&1 | sed 's/^/# /'
    clocks
}

clocks() {
    command -v nvidia-smi >/dev/null || return 0
    fields=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit
    nvidia-smi --query-gpu=$fields,temperature.gpu,memory.used --format=csv 2>&1 | sed 's/^/# /'
}

# Runs the program under a limit; without NVRTC, so that kernels come from the pack alone.
limited() {
    limit=$1
    shift
    MOESAIC_NVRTC=/nothing timeout -k 10 "$limit" "$@"
}

# A suite ends by itself a little before it would be killed.
suite() {
    limited "$2" "$program" suite "$1" --device "$device" --store "$store" \
        --data "$here/data" --seconds $(($2 > 60 ? $2 - 20 : $2)) $tiny
}

probe() {
    case $device in
        cuda*) limited "$1" "$program" probe --device cuda --from "$here/kernels/probe" \
            --results "$scratch" ;;
        # A simulator compiles as it goes, with the NVRTC that is here.
        *) timeout -k 10 "$1" "$program" probe --device "$device" --results "$scratch" \
            ${tiny:+--only matrix} ;;
    esac
}

check() {
    case $device in
        cuda*) limited "$1" "$program" check --from "$here/kernels/check" ;;
        *) echo "simulators have no streams, graphs and faults to check"; return 2 ;;
    esac
}

sanitize() {
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null |
        head -n 1)
    case $device$tool in
        cuda*/*) ;;
        *) echo "compute-sanitizer is not here, or this is no GPU"; return 2 ;;
    esac
    worst=0
    for kind in memcheck racecheck initcheck synccheck; do
        for what in conformance training; do
            echo "## $kind, $what"
            limited $(($1 / 8)) "$tool" --tool $kind --error-exitcode 9 --print-limit 20 \
                "$program" suite $what --here --tiny --device "$device" --store "$store" \
                --data "$here/data"
            code=$?
            echo "## $kind, $what: exit code $code"
            [ $code -eq 0 ] || worst=1
        done
    done
    return $worst
}

launches() {
    limited "$1" "$program" launches --device "$device" --store "$store" $tiny
}

layers() {
    limited "$1" "$program" layers --device "$device" --store "$store" $tiny \
        ${shapes:+--shapes "$shapes"} --python "$python" --peers "$here/peers" \
        --seconds $(($1 > 60 ? $1 - 40 : $1))
}

outcome() {
    case $1 in
        0) echo ok ;;
        1) echo FAILED ;;
        2) echo absent ;;
        4) echo cut ;;
        124 | 137) echo 'TIME UP' ;;
        *) echo "ENDED $1" ;;
    esac
}

tell() { echo "$1" | tee -a "$out/summary.txt"; }

tell "kit $(cat "$here/version"), $(date -u '+%Y-%m-%d %H:%M:%S UTC'), device $device $tiny"
"$program" unpack "$here/kernels/layers.tar.gz" "$store" >"$scratch/unpacked" 2>&1 ||
    { tell "the kernels cannot be unpacked: $(cat "$scratch/unpacked")"; exit 1; }
facts summary >>"$out/summary.txt"

bad=0 ran=0 number=0
for step in $STEPS; do
    number=$((number + 1))
    limit=${step#*:} name=${step%:*}
    case ",${only:-$name}," in
        *",$name,"*) ;;
        *) continue ;;
    esac
    seconds=$(allowed "$limit")
    if [ "$seconds" -lt 5 ]; then
        tell "$(printf '%-12s %-8s        no time was left' "$name" 'left out')"
        continue
    fi
    file=$out/$number-$name.txt
    start=$(now)
    facts "./run.sh --only $name --device $device $tiny" >"$file"
    case $name in
        conformance | oracles | training) suite "$name" "$seconds" ;;
        *) "$name" "$seconds" ;;
    esac >>"$file" 2>&1
    code=$?
    clocks >>"$file"
    last=$(grep -Ev '^(#|kept in|$)' "$file" | tail -n 1 | cut -c 1-120)
    result=$(outcome $code)
    tell "$(printf '%-12s %-8s %4d s  %s' "$name" "$result" $(($(now) - start)) "$last")"
    case $result in
        absent) ;;
        ok | cut) ran=1 ;;
        *) ran=1 bad=1 ;;
    esac
done
tell "results are in $out"
[ $ran -eq 1 ] || exit 2
exit $bad
