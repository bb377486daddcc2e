#!/bin/sh
# Builds Tutel for CPUs from its source into a Python of its own.
#
#     sh benches/peers/tutel.sh DIR [REPOSITORY]
#
# DIR gets the Python environment, with PyTorch; DIR/bin/python is for
# `cargo bench -p moesaic-benches --bench ranks -- --kinds tutel --python DIR/bin/python`. REPOSITORY is where Tutel's
# source comes from, a clone or an address. Needs git, Python 3 with venv, and a C++ compiler;
# 3 GB of disk more where the registry has PyTorch with CUDA alone.
set -eu
commit=ac0e51b
dir=$1
repository=${2:-https://github.com/microsoft/Tutel}

[ -x "$dir/bin/python" ] || python3 -m venv "$dir"
"$dir/bin/pip" install --quiet torch numpy safetensors setuptools wheel
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git clone --quiet "$repository" "$source/tutel"
git -C "$source/tutel" checkout --quiet "$commit"
NO_CUDA=1 "$dir/bin/pip" install --quiet --no-build-isolation --no-deps "$source/tutel"
cd "$source"
"$dir/bin/python" -c 'import tutel.moe, torch; print("Tutel is there, with torch", torch.__version__)'
