#!/bin/sh
# The planner beside measurements on emulated nodes (links.sh): calibrates on exchanges and
# launches of 16 ranks and on steps by each route, measures every strategy of layers that are
# drawn by number, if it is not predicted to be far behind, lets a layer choose by itself,
# measures the fastest, the planner's choice and the layer's once more in turns, and a hot expert
# with and without replicas.
#
#   benches/nodes/planned.sh [RATE [FIRST [LAST [ROUNDS]]]]
#
# Links of RATE (100) Mbit/s, layers FIRST (1) to LAST (12), ROUNDS (6) steps of each strategy.
# Raw lines and the calibration go to a folder of MOESAIC_PLANNED_OUT (a new one), the tables to
# the standard output. What links.sh needs, and a few minutes for each layer.
set -eu
cd "$(dirname "$0")/../.."

rate=${1:-100}
first=${2:-1}
last=${3:-12}
rounds=${4:-6}
target=${CARGO_TARGET_DIR:-target}
out=${MOESAIC_PLANNED_OUT:-$(mktemp -d)}
mkdir -p "$out"

cargo build --quiet --release -p moesaic-cli
cargo bench --quiet --bench adaptive --no-run
bench=$(ls -t "$target"/release/deps/adaptive-* | grep -v '\.' | head -n 1)

# Narrow rows, so that small pieces have some for each rank.
cat >"$out/layer.toml" <<'LAYER'
shape = { model_dim = 64, hidden_dim = 64, experts = 16, top_k = 2 }
LAYER

# Links may be ahead by little, so that a transfer takes what its bytes say. Ranks compile
# kernels the first time, which takes long where 16 of them share two processors.
export MOESAIC_LINKS_AHEAD=1 MOESAIC_LINKS_NICE=-19 MOESAIC_LINKS_SECONDS=7200 MOESAIC_DEADLINE=900
nodes() {
    program=$1
    shift
    MOESAIC_LINKS_PROGRAM=$program benches/nodes/links.sh 4 4 "$rate" "$@"
}

nodes "$target/release/moesaic" bench --spec "$out/layer.toml" --target cpu \
    --tokens 16,32,64,128,256,512,1024 --seconds 3 --ranks 16 --machine mpi-emulated \
    --calibration "$out/calibration.toml"
nodes "$bench" measure "$first" "$last" "$rounds" "$out/calibration.toml" | tee "$out/measured.txt"
nodes "$bench" hot "$rounds" "$out/calibration.toml" | tee "$out/hot.txt"
"$bench" compare "$out/measured.txt" "$out/calibration.toml" | tee "$out/compared.txt"
