#!/usr/bin/env bash
# Applies candle-transformers' patches to a copy of the crate and runs `compare.rs`: the logits of
# both, and the times of both MoE blocks. It needs `patch` and the sources of the crate, which
# `cargo fetch --manifest-path interop/candle/Cargo.toml` brings.
#
#     interop/candle/patches/compare.sh [taskset -c 0]
#
# Words after it come before the program that is run.
set -euo pipefail
patches=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$patches/../../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(grep -A1 '"candle-transformers"' "$root/interop/Cargo.lock" | grep -o '[0-9.]*[0-9]')
source=$(echo "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"candle-transformers-$version")
for copy in original patched; do
    mkdir -p "$work/$copy"
    cp -r "$source/src" "$source/Cargo.toml" "$work/$copy/"
    chmod -R u+w "$work/$copy"
done
for model in mixtral qwen2_moe qwen3_moe; do
    patch --quiet --directory "$work/patched" --strip 1 <"$patches/$model.patch"
done
{
    echo '[dependencies.moesaic]'
    echo "path = \"$root\""
    echo '[dependencies.moesaic-candle]'
    echo "path = \"$root/interop/candle\""
} >>"$work/patched/Cargo.toml"
# A lock file tells packages of one name apart by their versions.
sed -i '0,/^version = .*/s//version = "0.0.0"/' "$work/patched/Cargo.toml"
# The blocks are private, and those that are replaced unused. What is timed is named from outside,
# and nothing else changes.
sed -i '1i #![allow(warnings)]' "$work"/{original,patched}/src/lib.rs
for model in mixtral qwen2_moe qwen3_moe; do
    sed -i -E 's/^(struct|enum) /pub \1 /
        s/^    (layers|block_sparse_moe|mlp|feed_forward|base): /    pub \1: /
        s/^    fn forward\(&self, xs: &Tensor, is_prefill/    pub &/; s/pub     fn/    pub fn/' \
        "$work"/{original,patched}/src/models/"$model.rs"
done

mkdir -p "$work/compare/src"
cp "$patches/compare.rs" "$work/compare/src/main.rs"
cp "$root/interop/Cargo.lock" "$work/compare/"
cat >"$work/compare/Cargo.toml" <<TOML
[workspace]
[package]
name = "compare"
version = "0.0.0"
edition = "2024"
[dependencies]
candle-core = { version = "0.11", default-features = false }
candle-nn = { version = "0.11", default-features = false }
original = { package = "candle-transformers", path = "../original" }
patched = { package = "candle-transformers", path = "../patched" }
serde_json = "1"
TOML
cd "$work/compare"
cargo build --release --quiet
"$@" "${CARGO_TARGET_DIR:-target}/release/compare"
