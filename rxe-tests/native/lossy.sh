#!/bin/sh
# Two rxe devices on a wire that loses one packet in a hundred each way, then on
# one that reorders them as well. MESSAGES, BYTES and SEED go to the program.
set -e
modprobe rdma_ucm
modprobe sch_netem
# Later cases find the device as it was.
restore() {
    ip rule del pref 69 2> /dev/null || true
    rxe-driver setup > /dev/null
}
trap restore EXIT
ip rule del pref 69 2> /dev/null || true
rxe-driver setup --veth > /tmp/lossy.env
. /tmp/lossy.env
# The connection manager asks for the way before it has an address of its own.
ip rule add pref 69 to "$RXE_ADDR1" iif lo lookup 70
# What the wires have lost.
lost() {
    tc -s qdisc show | sed -n 's/.*dropped \([0-9]*\),.*/\1/p' |
        { total=0; while read -r n; do total=$((total + n)); done; echo $total; }
}
# Requests that came out of order or again, of both devices.
repeated() {
    cat /sys/class/infiniband/rxe[01]/ports/1/hw_counters/out_of_seq_request \
        /sys/class/infiniband/rxe[01]/ports/1/hw_counters/duplicate_request |
        { total=0; while read -r n; do total=$((total + n)); done; echo $total; }
}
# By its source rdma_rxe may put bytes of a read of several packets in the wrong place when an
# answer comes between its decision to ask again and its doing so. So where
# packets are late, a read has one.
for wire in 'loss 1%' 'loss 1% delay 1ms reorder 25%'; do
    case $wire in *delay*) READ=${LATE_READ:-4000}; export READ ;; esac
    for card in rx0 rx1; do
        # shellcheck disable=SC2086
        tc qdisc replace dev $card root netem $wire limit 10000
    done
    before=$(repeated)
    echo "== $wire"
    lossy --ignored --nocapture --test-threads=1
    echo "packets lost: $(lost), requests out of order or repeated: $(($(repeated) - before))"
    # A wire that loses nothing shows nothing.
    [ "$(lost)" -gt 0 ]
    [ "$(repeated)" -gt "$before" ]
    tc qdisc del dev rx0 root
    tc qdisc del dev rx1 root
done
