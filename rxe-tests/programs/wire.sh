#!/bin/sh
# wire.sh COMMAND...: runs the command with two rxe devices, RXE_DEV and
# RXE_DEV1, at the ends of a wire that loses 1 % of the packets each way, and again
# with a wire that also reorders 25 %.
#
# If rdma_rxe supports network namespaces (Linux 7.2 does, 6.12 does not), the ends
# are in the namespaces RXE_NETNS and RXE_NETNS1; the devices are visible in all
# namespaces. Otherwise both ends are in one namespace, with routes from one to the
# other over the wire.
set -e
if [ ! -e /ctl/start ]; then
    echo "SKIPPED: changes the routes of the machine; for guests only"
    exit 77
fi
case $(uname -r) in
[1-5].* | 6.[0-9].* | 6.1[01].*)
    # Not tested with lost packets.
    echo "SKIPPED: rdma_rxe of Linux $(uname -r); 6.12 is the oldest one here"
    exit 77
    ;;
esac
modprobe rdma_ucm
modprobe sch_netem
# Restores the device for later cases.
restore() {
    ip rule del pref 69 2> /dev/null || true
    ip -n one link del rx0 2> /dev/null || true
    for ns in one two; do ip netns del $ns 2> /dev/null || true; done
    rxe-driver setup > /dev/null
}
trap restore EXIT
restore

# namespace NAME NUMBER: creates a device with an address in the namespace.
namespace() {
    card=rx$2 device=rxe$2
    address=192.168.77.$(($2 + 1))
    ip link set "$card" netns "$1"
    ip -n "$1" link set "$card" mtu 4200
    ip -n "$1" addr add "$address/24" dev "$card"
    ip -n "$1" link set "$card" up
    ip netns exec "$1" rdma link add "$device" type rxe netdev "$card"
    # The address appears in the GID table with a delay.
    for _ in $(seq 100); do
        for gid in 0 1 2 3; do
            case $(cat "/sys/class/infiniband/$device/ports/1/gids/$gid") in
            *:ffff:c0a8:4d*) return ;;
            esac
        done
        sleep 0.1
    done
    echo "$device has no address"
    exit 1
}

if grep -q rxe_ns_ /proc/kallsyms; then
    ip link del rx0
    ip netns add one
    ip netns add two
    ip link add rx0 type veth peer name rx1
    # A port is active only if the other end is up.
    ip link set rx1 up
    namespace one 0
    export RXE_DEV=rxe0 RXE_GID="$gid" RXE_ADDR="$address" RXE_NETNS=one
    namespace two 1
    export RXE_DEV1=rxe1 RXE_GID1="$gid" RXE_ADDR1="$address" RXE_NETNS1=two
    at0="ip netns exec one" at1="ip netns exec two"
else
    rxe-driver setup --veth > /tmp/wire.env
    . /tmp/wire.env
    # The connection manager looks up the route before it has a source address.
    ip rule add pref 69 to "$RXE_ADDR1" iif lo lookup 70
    at0='' at1=''
fi

# Prints the number of packets that netem has dropped.
lost() { $1 tc -s qdisc show dev "$2" root | sed -n 's/.*dropped \([0-9]*\),.*/\1/p'; }
# Prints the number of requests out of order or repeated, of both devices.
repeated() {
    cat /sys/class/infiniband/rxe[01]/ports/1/hw_counters/out_of_seq_request \
        /sys/class/infiniband/rxe[01]/ports/1/hw_counters/duplicate_request |
        { total=0; while read -r n; do total=$((total + n)); done; echo $total; }
}
# shellcheck disable=SC2086
for wire in 'loss 1%' 'loss 1% delay 1ms reorder 25%'; do
    $at0 tc qdisc replace dev rx0 root netem $wire limit 10000
    $at1 tc qdisc replace dev rx1 root netem $wire limit 10000
    before=$(repeated)
    echo "== $wire${RXE_NETNS:+, two network namespaces}"
    "$@"
    lost0=$(lost "$at0" rx0) lost1=$(lost "$at1" rx1)
    echo "packets lost: $lost0 + $lost1, requests out of order or repeated: $(($(repeated) - before))"
    # Without losses the run would test nothing.
    [ "$lost0" -gt 0 ]
    [ "$lost1" -gt 0 ]
    [ "$(repeated)" -gt "$before" ]
    $at0 tc qdisc del dev rx0 root
    $at1 tc qdisc del dev rx1 root
done
