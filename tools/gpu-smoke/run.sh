#!/bin/sh
# Checks and measures a GPU on a machine that has a driver and nothing else: no compiler, no
# Python. Beyond POSIX sh it asks for coreutils, grep and sed.
# `cargo xtask gpu-smoke` made this folder; docs/PLATFORM.md says what to do with it.

usage() {
    cat <<'END'
usage: ./run.sh [OPTIONS]

  --only STEP,...   these steps alone, in the order below
  --minutes N       for everything together: a step has its share of what is left, and leaves
                    to those behind it what it does not need
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

Each step writes DIR/N-STEP.txt as it goes, and the next one follows after a failure;
DIR/summary.txt has all outcomes. A connection that drops stops nothing; Ctrl-C or a TERM does,
and keeps what was done. Exit code 1 when a step failed, ran out of its time or ended by
itself, 2 when nothing could run or results cannot be written, 130 when it was stopped.
END
}

STEPS='probe:3 check:3 conformance:6 oracles:6 training:6 sanitize:8 launches:4 layers:25'
# Seconds of a minute: tests have shorter ones. A step may always take one, if it is left, since
# the driver alone needs seconds to load.
minute=${MOESAIC_KIT_MINUTE:-60}
here=$(cd "$(dirname "$0")" && pwd) || exit 2
program=$here/moesaic-gpu-smoke
only= minutes= device=cuda tiny= out= shapes= python=python3 packages=

refuse() { echo "run.sh: $1" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --tiny) tiny=--tiny; shift; continue ;;
        --help | -h) usage; exit 0 ;;
        --only | --minutes | --device | --out | --shapes | --python | --packages) ;;
        *) usage >&2; refuse "unknown option $1" ;;
    esac
    [ $# -gt 1 ] || refuse "$1 needs a value"
    case $1 in
        --only) only=$(echo "$2" | tr -d ' ') ;;
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
    *[!0-9]* | 0?*) refuse "--minutes takes a whole number, not $minutes" ;;
esac
for step in $(echo "$only" | tr ',' ' '); do
    case " $STEPS" in
        *" $step:"*) ;;
        *) refuse "there is no step $step; the steps are$(echo " $STEPS" | sed 's/:[0-9]*//g')" ;;
    esac
done
[ -z "$packages" ] || [ -d "$packages" ] || refuse "--packages $packages is no folder"

now() { date +%s; }
begun=$(now)
[ -n "$out" ] || out=results-$(echo "$device" | tr ':' '-')-$(date -u +%Y-%m-%d-%H%M%S)
mkdir -p "$out" || refuse "results cannot be written to $out"
out=$(cd "$out" && pwd) || exit 2

exec 3>&1
running= name= finished= scratch=
# A terminal or a reader of the output that has gone is no reason to stop.
trap '' HUP PIPE
trap 'stopped' INT TERM

# Says a line, and keeps it; without a place to keep results there is no reason to go on.
tell() {
    { echo "$1" >>"$out/summary.txt"; } 2>/dev/null || unwritable
    { echo "$1" >&3; } 2>/dev/null
}

unwritable() {
    kill_step
    refuse "results cannot be written to $out, of which df says: $(df -Pk "$out" | sed -n 2p)"
}

# Memory of a GPU is free again when all of a step's processes have ended: torch, too.
kill_step() {
    [ -z "$running" ] || kill -s KILL -- "-$running" 2>/dev/null
    running=
}

# By a signal: what was done is kept, and nothing goes on by itself.
stopped() {
    trap '' INT TERM
    if [ -n "$running" ]; then
        kill -s TERM -- "-$running" 2>/dev/null && sleep 1
        kill_step
    fi
    [ -z "$name" ] || [ -n "$finished" ] || report STOPPED
    tell "stopped by a signal; results are in $out"
    exit 130
}

# Runs a command under a limit. In the background, since a shell heeds signals while it waits,
# not while it runs something; `timeout` makes a group of processes of its own, by its number.
limited() {
    limit=$1
    shift
    timeout -k $((minute / 6 + 1)) "$limit" "$@" 3>&- &
    running=$!
    wait "$running" 2>/dev/null
    code=$?
    kill_step
    return $code
}

tell "folder $(cat "$here/version"), $(date -u '+%Y-%m-%d %H:%M:%S UTC'), device $device $tiny"

# Layers with torch pass gigabytes through files.
kib() {
    df -Pk "$1" 2>/dev/null | sed -n '2s/.* \([0-9][0-9]*\)  *[0-9]*% .*/\1/p' | grep . || echo 0
}
trap 'rm -rf "$scratch"' EXIT
temporary=${TMPDIR:-/tmp}
free=$(kib "$temporary")
if [ "$free" -lt $((16 << 20)) ] && [ "$(kib "$out")" -gt "$free" ]; then
    temporary=$out
fi
scratch=$(mktemp -d "$temporary/moesaic-XXXXXX") || refuse "no files can be made in $temporary"
export TMPDIR="$scratch"
# Without NVRTC, kernels come from the pack alone.
nvrtc=${MOESAIC_NVRTC-}
export MOESAIC_NVRTC=/nothing
[ -z "$packages" ] || export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
store=$scratch/store

clocks() {
    command -v nvidia-smi >/dev/null || return 0
    fields=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit
    timeout -k 1 20 nvidia-smi --query-gpu=$fields,temperature.gpu,memory.used --format=csv 2>&1 |
        sed 's/^/# /'
}

# Everything that a reader of the results has to know of the machine.
facts() {
    echo "# $(date -u '+%Y-%m-%d %H:%M:%S UTC'), $(uname -sm), folder $(cat "$here/version")"
    echo "# $1"
    sed 's/^/# /' "$scratch/facts"
    clocks
}

# Seconds that an item of a suite may take. Simulators are slow.
case $device in
    cuda*) each=30 ;;
    *) each=60 ;;
esac

# A suite ends by itself a little before it would be killed.
suite() {
    limited "$2" "$program" suite "$1" --device "$device" --store "$store" \
        --data "$here/data" --each "$each" --seconds $(($2 > 30 ? $2 - 10 : $2 / 2)) $tiny
}

probe() {
    case $device in
        cuda*) limited "$1" "$program" probe --device cuda --from "$here/kernels/probe" \
            --seconds $(($1 > 30 ? $1 - 10 : $1 / 2)) ;;
        # A simulator compiles as it goes, with the NVRTC that is here.
        *) limited "$1" env -u MOESAIC_NVRTC ${nvrtc:+"MOESAIC_NVRTC=$nvrtc"} "$program" probe \
            --device "$device" ${tiny:+--only matrix} ;;
    esac
}

check() {
    case $device in
        cuda*) limited "$1" "$program" check --from "$here/kernels/check" ;;
        *) echo "simulators have no streams, graphs and faults to check"; return $ABSENT ;;
    esac
}

sanitize() {
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null |
        head -n 1)
    case $device$tool in
        cuda*/*) ;;
        *) echo "compute-sanitizer is not here, or this is no GPU"; return $ABSENT ;;
    esac
    worst=0
    for kind in memcheck racecheck initcheck synccheck; do
        for what in conformance training; do
            echo "## $kind, $what"
            limited $(($1 / 8 + 1)) "$tool" --tool $kind --error-exitcode 9 --print-limit 20 \
                "$program" suite $what --here --tiny --device "$device" --store "$store" \
                --data "$here/data"
            code=$?
            echo "## $kind, $what: exit code $code"
            case $code in
                0) ;;
                124 | 137) [ $worst -ne 0 ] || worst=124 ;;
                *) worst=1 ;;
            esac
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
        --seconds $(($1 > 120 ? $1 - 40 : $1 * 2 / 3))
}

# What a step's exit code means. The program says 2 where it could not begin: on a device that
# is there that is a failure.
ABSENT=5
outcome() {
    case $1 in
        0) echo ok ;;
        1) echo FAILED ;;
        2) [ -n "$present" ] && echo FAILED || echo absent ;;
        4) echo cut ;;
        $ABSENT) echo absent ;;
        124 | 137) echo 'TIME UP' ;;
        *) echo "ENDED $1" ;;
    esac
}

# A line of the summary, with the last that the step said.
report() {
    last=$(grep -Ev '^(#|$)' "$file" | tail -n 1 | cut -c 1-120)
    tell "$(printf '%-12s %-8s %4d s  %s' "$name" "$1" $(($(now) - start)) "$last")"
}

wanted() {
    case ",${only:-$1}," in
        *",$1,"*) ;;
        *) return 1 ;;
    esac
}

# Seconds that a step may take, of the minutes it is given here: those, or, with --minutes, its
# share of what is left among the steps that are still to come.
allowed() {
    seconds=$(($2 * minute))
    if [ -n "$minutes" ]; then
        left=$((minutes * minute - ($(now) - begun)))
        weights=0 reached=
        for other in $STEPS; do
            [ "${other%:*}" != "$1" ] || reached=1
            [ -z "$reached" ] || ! wanted "${other%:*}" || weights=$((weights + ${other#*:}))
        done
        share=$((left * $2 / weights))
        [ "$share" -ge "$minute" ] || share=$minute
        [ "$share" -le "$left" ] || share=$left
        [ "$share" -ge "$seconds" ] || seconds=$share
    fi
    echo "$seconds"
}

# A folder for another card, or a driver that cannot load its kernels, is said before all else.
fits() {
    [ -f "$here/kernels/made" ] || return 0
    made=$(cat "$here/kernels/made")
    target=${made%% *} release=${made#* }
    case $device$(cat "$scratch/facts") in
        cuda*", $target, "*) ;;
        cuda*)
            tell "this folder is for $target, and the device is another: $(cat "$scratch/facts")"
            exit 2 ;;
    esac
    has=$(sed -n 's/.*the driver is for CUDA \([0-9]*\)\..*/\1/p' "$scratch/facts")
    [ -z "$has" ] || [ "$has" -ge "${release%%.*}" ] ||
        tell "the driver is too old: kernels of CUDA $release want one for CUDA ${release%%.*}.0"
}

limited 120 "$program" unpack "$here/kernels/layers.tar.gz" "$store" >"$scratch/unpacked" 2>&1 || {
    tell "the smoke test cannot start here, or its kernels cannot be unpacked: $(cat "$scratch/unpacked")"
    exit 2
}
present=
limited $((minute / 2 + 10)) "$program" facts --device "$device" --store "$store" \
    >"$scratch/facts" 2>&1
case $? in
    0) present=1 ;;
    124 | 137) tell "the device does not answer"; exit 2 ;;
esac
facts summary >>"$out/summary.txt"
[ -z "$present" ] || fits

bad=0 ran=0 number=0
for step in $STEPS; do
    number=$((number + 1))
    limit=${step#*:} name=${step%:*} finished=1
    wanted "$name" || continue
    seconds=$(allowed "$name" "$limit")
    if [ "$seconds" -lt $((minute / 15 + 1)) ]; then
        tell "$(printf '%-12s %-8s        no time was left' "$name" 'left out')"
        continue
    fi
    file=$out/$number-$name.txt
    start=$(now)
    { echo "# $name, $seconds s at most" >"$file"; } 2>/dev/null || unwritable
    facts "./run.sh --only $name --device $device $tiny" >>"$file"
    finished=
    case $name in
        conformance | oracles | training) suite "$name" "$seconds" ;;
        *) "$name" "$seconds" ;;
    esac >>"$file" 2>&1
    code=$?
    finished=1
    clocks >>"$file"
    { echo "# the end, exit code $code" >>"$file"; } 2>/dev/null || unwritable
    result=$(outcome $code)
    report "$result"
    case $result in
        absent) ;;
        ok | cut) ran=1 ;;
        *) ran=1 bad=1 ;;
    esac
done
tell "results are in $out"
[ $ran -eq 1 ] || exit 2
exit $bad
