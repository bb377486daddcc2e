#!/bin/sh
# Builds the C libraries and installs them with headers, pkg-config and CMake files.
#
#   interop/c/install.sh PREFIX [CARGO OPTIONS]     such as --features cuda
#
# BUILT=DIR takes the libraries that cargo built there. Needs Rust; those who link need none.
set -eu
[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
prefix=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/Cargo.toml" | head -n 1)
soname=libmoesaic.so.${version%.*}
static="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"

if [ -n "${BUILT:-}" ]; then
  built=$BUILT
else
  target=${CARGO_TARGET_DIR:-$here/../target}
  cargo build --locked --release --manifest-path "$here/Cargo.toml" --target-dir "$target" --lib "$@"
  built=$target/release
fi

install -d "$prefix/include" "$prefix/lib/pkgconfig" "$prefix/lib/cmake/moesaic"
install -m 644 "$here/include/moesaic.h" "$here/include/moesaic.hpp" "$prefix/include"
install -m 755 "$built/libmoesaic_c.so" "$prefix/lib/libmoesaic.so.$version"
ln -sf "libmoesaic.so.$version" "$prefix/lib/$soname"
ln -sf "$soname" "$prefix/lib/libmoesaic.so"
install -m 644 "$built/libmoesaic_c.a" "$prefix/lib/libmoesaic.a"
for file in pkgconfig/moesaic.pc cmake/moesaic/moesaic-config.cmake; do
  sed -e "s|@PREFIX@|$prefix|; s|@VERSION@|$version|; s|@SONAME@|$soname|" \
    -e "s|@STATIC_LIBS@|$static|; s|@STATIC_LIST@|$(echo "$static" | tr " " ";")|" "$here/$(basename "$file").in" > "$prefix/lib/$file"
done
