#!/bin/sh
# Measures exchanges over MPI between nodes that are network namespaces of this machine,
# with slow links between them: each node has a host name of its own, ranks of one node
# share memory, and what goes between nodes goes by TCP through a link of its own.
#
#   benches/nodes/links.sh [NODES [RANKS [RATE [BYTES ...]]]]
#   MOESAIC_LINKS_PROGRAM=PROGRAM benches/nodes/links.sh NODES RANKS RATE WORDS ...
#
# NODES (4) nodes of RANKS (4) each, links of RATE (200) Mbit/s in either direction, and
# parts of BYTES for every pair of ranks. Prints a line for each size: the direct exchange
# beside those in two dimensions. With a PROGRAM ranks run that, with these WORDS.
#
# A link may be ahead of its rate by MOESAIC_LINKS_AHEAD (10) milliseconds. Where others use the
# processors, MOESAIC_LINKS_NICE=-19 has ranks go first (sessions' priority, sched(7)): they wait
# for links most of the time.
#
# The links are real queues of the kernel (`tc tbf`), the processors are shared by all
# nodes: crossovers are those of such links, times are this machine's.
#
# Needs root, iproute2, and Open MPI's mpiexec. All interfaces and addresses are inside the
# namespaces, which are gone when this ends; so is what runs in them. It ends by itself
# after MOESAIC_LINKS_SECONDS (600).
set -eu
cd "$(dirname "$0")/../.."

nodes=${1:-4}
each=${2:-4}
rate=${3:-200}
[ $# -gt 3 ] && shift 3 || set -- 16 128 1024 4096 16384 65536
seconds=${MOESAIC_LINKS_SECONDS:-600}
target=${CARGO_TARGET_DIR:-target}
program=$target/release/examples/exchange
if [ -n "${MOESAIC_LINKS_PROGRAM:-}" ]; then
    program=$MOESAIC_LINKS_PROGRAM
else
    set -- nodes "$@"
fi
ahead=${MOESAIC_LINKS_AHEAD:-10}
temp=$(mktemp -d)
switch=mo$$switch

node() {
    echo "mo$$node$1"
}

spaces() {
    echo "$switch"
    for number in $(seq 0 $((nodes - 1))); do node "$number"; done
}

clean() {
    for space in $(spaces); do
        for process in $(ip netns pids "$space" 2>/dev/null); do
            kill -9 "$process" 2>/dev/null || true
        done
        ip netns delete "$space" 2>/dev/null || true
    done
    rm -rf "$temp"
}
trap clean EXIT
trap 'exit 1' INT TERM HUP

# A namespace with a bridge is what nodes are plugged into.
ip netns add "$switch"
ip -n "$switch" link add bridge type bridge
ip -n "$switch" link set bridge up
# A bucket of what a link carries meanwhile, three packets at least; a queue of 400 ms.
bucket=$((rate * 125 * ahead > 5000 ? rate * 125 * ahead : 5000))
shape() {
    ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "${rate}mbit" burst $bucket latency 400ms
}
echo "127.0.0.1 localhost" >"$temp/hosts"
for number in $(seq 0 $((nodes - 1))); do
    space=$(node "$number")
    ip netns add "$space"
    # Not BBR, which measures a path for seconds before it fills a link.
    ip netns exec "$space" sysctl -qw net.ipv4.tcp_congestion_control=reno
    # Links between nodes of a cluster do not begin slowly after a pause.
    ip netns exec "$space" sysctl -qw net.ipv4.tcp_slow_start_after_idle=0
    ip -n "$space" link set lo up
    ip -n "$space" link add link0 type veth peer name "port$number" netns "$switch"
    ip -n "$space" address add "10.77.0.$((number + 1))/24" dev link0
    ip -n "$space" link set link0 up
    ip -n "$switch" link set "port$number" master bridge
    ip -n "$switch" link set "port$number" up
    shape "$space" link0
    shape "$switch" "port$number"
    echo "10.77.0.$((number + 1)) mosnode$number" >>"$temp/hosts"
    echo "mosnode$number slots=$each" >>"$temp/hostfile"
done

# Runs a command as a node: in its namespace, with its host name.
cat >"$temp/as" <<AS
#!/bin/sh
number=\${1#mosnode}
shift
exec ip netns exec mo$$node\$number unshare --uts --mount sh -c '
    mount --bind $temp/hosts /etc/hosts
    hostname "\$0"
    exec "\$@"' "mosnode\$number" "\$@"
AS
# How mpiexec starts its daemon on another node: as HOST COMMAND, a line for a shell.
cat >"$temp/agent" <<AGENT
#!/bin/sh
host=\$1
shift
exec $temp/as "\$host" sh -c "\$*"
AGENT
chmod +x "$temp/as" "$temp/agent"

# What a rank is: the program, in a session that mpiexec has made for it.
cat >"$temp/rank" <<'RANK'
#!/bin/sh
[ -z "${MOESAIC_LINKS_NICE:-}" ] || echo "$MOESAIC_LINKS_NICE" >/proc/self/autogroup
exec "$@"
RANK
chmod +x "$temp/rank"

[ -x "$program" ] || cargo build --quiet --release -p moesaic-collectives --example exchange
echo "# links of $rate Mbit/s between $nodes nodes of $each ranks, $(nproc) processors for all," \
    "load $(cut -d' ' -f1 /proc/loadavg)"
timeout "$seconds" "$temp/as" mosnode0 mpiexec --allow-run-as-root --oversubscribe \
    --hostfile "$temp/hostfile" -n $((nodes * each)) --map-by slot --bind-to none \
    --mca plm_rsh_agent "$temp/agent" --mca plm rsh --mca pml ob1 --mca btl tcp,vader,self \
    --mca btl_tcp_if_include link0 --mca oob_tcp_if_include link0 --mca mpi_yield_when_idle 1 \
    "$temp/rank" "$(realpath "$program")" "$@"
