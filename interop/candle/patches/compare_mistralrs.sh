#!/usr/bin/env bash
# Applies `mistralrs-core.patch` to mistralrs-core 0.8.1 and runs `compare_mistralrs.rs`: the
# outputs of the experts with and without it, and the times of both. It needs `patch`, and `curl`
# for the crate's sources.
#
#     interop/candle/patches/compare_mistralrs.sh [taskset -c 0]
#     interop/candle/patches/compare_mistralrs.sh check
#
# Words after it come before the program that is run; `check` has rustc check the whole crate, with
# its several hundred dependencies, and runs nothing. The program has the files `src/moe` and
# `src/cuda/moe.rs` as they are and of `src/layers.rs` the activations, because these need only
# mistralrs-quant and candle.
set -euo pipefail
patches=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$patches/../../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

crate=mistralrs-core-0.8.1
curl --silent --fail --location --output "$work/crate" \
    "https://static.crates.io/crates/mistralrs-core/$crate.crate"
sha256sum --quiet --check - <<SUM
a2b8b9e5c94491d9ceeded3a30291cb6af6ae74810a5776dd55e3bbb8b3429d4  $work/crate
SUM
tar -xzf "$work/crate" -C "$work"
cd "$work/$crate"
patch --quiet --strip 1 <"$patches/mistralrs-core.patch"

if [ "${1-}" = check ]; then
    printf '[dependencies.moesaic]\npath = "%s"\n' "$root" >>Cargo.toml
    cargo check --lib
    exit
fi
sed -i 's/pub use experts::{/&MoEExpertsBackend, /' src/moe/mod.rs
{
    echo 'use candle_core::{Module, Result, Tensor};'
    echo 'use serde::{Deserialize, Serialize};'
    grep -B 2 '^pub enum Activation' src/layers.rs
    sed '1,/^pub enum Activation/d; /^impl TryInto/,$d' src/layers.rs
} >src/activation.rs
mv src/activation.rs src/layers.rs
cp "$patches/compare_mistralrs.rs" src/main.rs
cat >Cargo.toml <<TOML
[workspace]
[package]
name = "compare"
version = "0.0.0"
edition = "2021"
autolib = false
[[bin]]
name = "compare_mistralrs"
path = "src/main.rs"
[dependencies]
candle-core = "0.10.2"
candle-nn = "0.10.2"
half = "2.7.1"
mistralrs-quant = "=0.8.1"
moesaic = { path = "$root" }
serde = { version = "1", features = ["derive"] }
[lints.rust]
warnings = "allow"
TOML
rm build.rs
cargo build --release --quiet
"$@" "${CARGO_TARGET_DIR:-target}/release/compare_mistralrs"
