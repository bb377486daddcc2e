#!/bin/sh
# Time and peak memory of `moesaic run --hf` on a layer of 4 GiB, in each way that a checkpoint has experts.
#
#     sh benches/load/run.sh DIR BINARY...
#
# DIR gets one checkpoint at a time, which is deleted again: 4 GiB of disk. Peak memory is the maximum
# resident set, pages of mapped files included; runs follow each other, so that the file is in the page cache.
set -e
here=$(dirname "$0")
dir=$1/moesaic-load
shift
for layout in single sharded stacked; do
    bytes=$(python3 "$here/checkpoint.py" "$dir" --layout $layout $CHECKPOINT)
    for run in 1 2 3; do
        for binary in "$@"; do
            /usr/bin/time -o "$dir/time" -f '%e %U %S %M' "$binary" run --hf "$dir" --layer 0 \
                --input "$dir/x.safetensors" --output "$dir/y.safetensors" --target cpu >"$dir/out" 2>&1
            read -r seconds user system kilobytes <"$dir/time"
            peak=$(awk "BEGIN { printf \"%.3f\", $kilobytes * 1024 / $bytes }")
            sum=$(cksum <"$dir/y.safetensors" | cut -d' ' -f1)
            echo "$layout $bytes bytes, $binary: $seconds s ($user user, $system system)," \
                "peak $((kilobytes / 1024)) MiB, $peak of the checkpoint; y $sum"
        done
    done
    rm -r "$dir"
done
