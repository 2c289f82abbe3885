#!/bin/sh
# DPDK's testpmd (22.11) forwards packets between two devices of one process, then sends between
# two processes, each with a device on an end of a veth pair, and compares their counts:
#   unshare --map-root-user --net --mount rxe-tests/frameworks/dpdk.sh ringverbs [--devices mlx5]
# Packages: apt-get install dpdk iproute2
# Flows are by verbs for --devices mlx5, which has no flow tables of mlx5dv.
set -eu
command=$1
shift
flows=
case $* in *mlx5*) flows=,dv_flow_en=0 ;; esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# That of the network namespace.
mount -t sysfs none /sys
ip link set lo up
ip link add e0 type veth peer name e1
for number in 0 1; do
    ip link set "e$number" up
    ip addr add "192.0.2.$((number + 1))/24" dev "e$number"
    cat >>"$folder/node.toml" <<EOF
[[device]]
kind = "roce"
address = "0000:17:00.$number"
interface = "e$number"
EOF
done

# Runs testpmd until it is interrupted: seconds, forwarding mode, options of ringverbs.
testpmd() {
    seconds=$1
    mode=$2
    shift 2
    timeout --preserve-status -s INT "$seconds" "$command" run --directory "$folder/$seconds" "$@" -- \
        dpdk-testpmd --no-huge -m 256 -l 0-1 --iova-mode=va --no-telemetry \
        --file-prefix "test$$-$seconds" ${devices:-} -- --total-num-mbufs=8192 --rxd=256 --txd=256 \
        --stats-period 1 --forward-mode="$mode" ${options:-} </dev/null
}

# A total of all ports: direction.
total() {
    sed -n "s/.*$1-packets: \([0-9]*\) .*/\1/p" "$2" | tail -1
}

# The 64 packets that begin it may be on their way at the end.
options=--tx-first devices="-a 0000:17:00.0$flows -a 0000:17:00.1$flows" \
    testpmd 8 io "$@" --embedded --node "$folder/node.toml" >"$folder/io" 2>&1
sent=$(total TX "$folder/io")
received=$(total RX "$folder/io")
echo "io: $sent packets sent, $received received"
[ "$received" -gt 1000 ] && [ "$sent" -ge "$received" ] && [ "$sent" -le $((received + 64)) ]

devices="-a ffff:00:00.0$flows"
testpmd 14 rxonly "$@" --embedded=roce:e1 >"$folder/rxonly" 2>&1 &
sleep 5
options=--eth-peer=0,$(cat /sys/class/net/e1/address) \
    testpmd 6 txonly "$@" --embedded=roce:e0 >"$folder/txonly" 2>&1
wait
sent=$(total TX "$folder/txonly")
received=$(sed -n 's/.*RX-dropped.*RX-total: //p' "$folder/rxonly" | tail -1)
echo "txonly: $sent packets sent, $received received or dropped for want of buffers"
# The kernel's own frames are received as well.
[ "$sent" -gt 1000 ] && [ "$received" -ge "$sent" ] && [ "$received" -le $((sent + 64)) ]
