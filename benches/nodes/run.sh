#!/bin/sh
# Runs the example numa_nodes, or tests, on a machine of several NUMA nodes that
# QEMU makes up and a real Linux runs on: where pages lie is then the kernel's doing.
# Every instruction is emulated, so that it runs anywhere, and its times mean nothing.
#
#   benches/nodes/run.sh [NODES [PROCESSORS [tests]]]
#
# NODES (2) NUMA nodes of PROCESSORS (1) each share 6 GB. Prints what the programs
# inside print, with the status of each.
#
# The example runs with threads that the system moves, with pinned ones, and with these
# while the kernel balances nodes; its kernels are compiled here and go there in a
# cache. The last line says whether outputs are the same bytes as here. With `tests`
# gcc goes there instead, for conformance/nodes.rs and the CPU target's tests of nodes
# and threads.
#
# Needs Debian 12 on x86-64 with qemu-system-x86, its lists of packages (apt-get update),
# 8 GB of free memory, and gcc. The Linux and the shell inside are packages that are
# fetched and unpacked in a temporary folder, not installed.
set -eu
cd "$(dirname "$0")/../.."

nodes=${1:-2}
each=${2:-1}
what=${3:-example}
target=${CARGO_TARGET_DIR:-target}
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
root=$temp/root

# Kernels for what QEMU's processor is said to be, in a cache of their own.
kernels() {
    cp benches/examples/numa_nodes/layer.toml "$temp/f32.toml"
    cp "$temp/f32.toml" "$temp/bf16.toml"
    printf '[precision]\nweights = "bf16"\nactivations = "bf16"\n' >>"$temp/bf16.toml"
    MOESAIC_CACHE=$root/cache "$target/release/moesaic" precompile --target cpu:avx2 \
        --l1 64KiB --l2 512KiB --spec "$temp/f32.toml,$temp/bf16.toml" >/dev/null
}

# Puts files into the machine, each where it is here.
take() {
    for file; do
        mkdir -p "$root/$(dirname "$file")"
        cp -rL "$file" "$root/$(dirname "$file")/"
    done
}

# Puts a program into the machine as /bin/NAME, without what debuggers want, and its
# libraries.
program() {
    strip -o "$root/bin/$2" "$1"
    libraries "$1"
}

libraries() {
    for library in $(ldd "$@" | grep -o '/[^ ]*\.so[^ ]*' | sort -u); do
        take "$library"
    done
}

compiler() {
    own=$(dirname "$(gcc -print-libgcc-file-name)")
    cc1=$(gcc -print-prog-name=cc1)
    take /usr/bin/gcc /usr/bin/as /usr/bin/ld "$cc1" /usr/include "$own"
    rm -f "$root/$own"/cc1plus "$root/$own"/lto1
    for file in crti.o crtn.o libc.so libc_nonshared.a libm.so libmvec.so.1; do
        take "$(gcc -print-file-name=$file)"
    done
    libraries /usr/bin/gcc /usr/bin/as /usr/bin/ld "$cc1" "$(gcc -print-prog-name=collect2)"
}

# A program of tests: its path is on the line that says it was built.
built() {
    cargo test "$@" --no-run 2>&1 | sed -n 's/.*Executable .*(\(.*\))$/\1/p'
}

linux() {
    kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
    mkdir "$temp/packages"
    (cd "$temp/packages" && apt-get download -q "$kernel" busybox-static >/dev/null 2>&1)
    for package in "$temp"/packages/*.deb; do
        dpkg -x "$package" "$temp/unpacked"
    done
    cp "$temp"/unpacked/bin/busybox "$root/bin/"
}

# What runs inside; what it prints is all that is printed.
init() {
    cat <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t devtmpfs dev /dev
export MOESAIC_CACHE=/cache RUST_BACKTRACE=1
run() {
    echo "\$ $*"
    status=0
    "$@" || status=$?
    echo "status $status"
    echo
}
balance() {
    echo "$1" >/proc/sys/kernel/numa_balancing
}
run uname -srv
run cat /sys/kernel/mm/transparent_hugepage/enabled
INIT
    case $what in
    example)
        echo 'export PATH=/bin'
        echo 'run balance 0; run numa_nodes --strict; run numa_nodes --strict --pin'
        echo 'run balance 1; run numa_nodes --strict --pin'
        ;;
    tests)
        echo 'export PATH=/bin:/usr/bin'
        echo 'run pages --color never --nocapture'
        echo 'run units --color never'
        echo 'run conformance --color never no_number_of_nodes_changes_a_byte'
        ;;
    esac
    echo 'poweroff -f'
}

machine() {
    set -- -m 6G -smp $((nodes * each))
    node=0
    while [ $node -lt "$nodes" ]; do
        first=$((node * each))
        set -- "$@" \
            -object "memory-backend-ram,id=m$node,size=$((6144 / nodes))M" \
            -numa "node,nodeid=$node,memdev=m$node,cpus=$first-$((first + each - 1))"
        node=$((node + 1))
    done
    timeout 3000 qemu-system-x86_64 -accel tcg,thread=multi -cpu max "$@" \
        -display none -monitor none -serial stdio -no-reboot -nodefaults \
        -kernel "$temp"/unpacked/boot/vmlinuz-* -initrd "$temp/initramfs" \
        -append 'console=ttyS0 quiet panic=-1' </dev/null | sed -u 's/\r$//'
}

# The outputs that the example names.
outputs() {
    sed -n 's/.* tokens .* y //p' "$1"
}

# Whether it was the same three times as here.
compare() {
    "$target/release/examples/numa_nodes" --target cpu:avx2 >"$temp/here"
    outputs "$temp/here" >"$temp/once"
    cat "$temp/once" "$temp/once" "$temp/once" >"$temp/expected"
    if outputs "$temp/inside" | cmp -s - "$temp/expected"; then
        echo 'outputs are the same bytes as here'
    else
        echo 'outputs differ from those here, or are not all there'
        return 1
    fi
}

# Whether all that was to run did, and ended well.
ended() {
    well=$(grep -c '^status 0$' "$temp/inside" || true)
    if [ "$well" -ne "$1" ] || grep '^status [1-9]' "$temp/inside" >/dev/null; then
        echo "$well of $1 ended well"
        return 1
    fi
}

mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/tmp" "$root/dev"
linux
case $what in
example)
    cargo build --quiet --release -p moesaic-cli
    cargo build --quiet --release -p moesaic-benches --example numa_nodes
    kernels
    program "$target/release/examples/numa_nodes" numa_nodes
    ;;
tests)
    compiler
    program "$(built --test main)" conformance
    program "$(built -p moesaic-cpu --test nodes)" pages
    program "$(built -p moesaic-cpu --lib)" units
    ;;
*)
    echo "$what is neither example nor tests" >&2
    exit 2
    ;;
esac
init >"$root/init"
chmod +x "$root/init"
(cd "$root" && find . | "$root/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$temp/initramfs"

echo "nodes: $nodes, processors of each: $each"
machine | tee "$temp/inside"
case $what in
example) ended 7 && compare ;;
tests) ended 5 ;;
esac
