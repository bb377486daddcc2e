#!/bin/sh
# What each stage brings (benches/stages.rs) on nodes with slow links between them, which
# links.sh makes.
#
#   benches/nodes/stages.sh [NODES [RANKS [RATE [OPTION VALUE ...]]]]
#
# NODES (4) nodes of RANKS (2) each, links of RATE (200) Mbit/s; options are the bench's.
set -eu
cd "$(dirname "$0")/../.."

nodes=${1:-4}
each=${2:-2}
rate=${3:-200}
[ $# -gt 3 ] && shift 3 || set -- --rounds 5
program=$(cargo bench --no-run --bench stages --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
MOESAIC_LINKS_PROGRAM=$program benches/nodes/links.sh "$nodes" "$each" "$rate" "$@"
