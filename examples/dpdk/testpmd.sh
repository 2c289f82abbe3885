#!/bin/sh
# Runs in a guest of softhca with two HCAs: testpmd forwards packets between them for some
# seconds, with rdma-core's libmlx5 and with the plugin in its place.
set -u
seconds=${1:-20}
here=$(cd "$(dirname "$0")" && pwd)
lib=$(echo "$here"/root/usr/lib/*-linux-gnu)
drivers=$(echo "$lib"/dpdk/pmds-*)
log=$(mktemp)
devices=
for device in /sys/class/infiniband/*/device; do
    for interface in "$device"/net/*; do ip link set up dev "${interface##*/}"; done
    # Without direct flow rules (DV), which the plugin does not support.
    devices="$devices -a $(basename "$(readlink -f "$device")"),dv_flow_en=0"
done
plugins=
for name in bus_pci bus_auxiliary mempool_ring common_mlx5 net_mlx5; do
    plugins="$plugins -d $(ls "$drivers/librte_$name.so".* | head -n 1)"
done
failed=0
for library_prefix in '' /opt/ringverbs:; do
    [ -z "$library_prefix" ] || [ -e /opt/ringverbs/libmlx5.so.1 ] || continue
    path=$library_prefix$lib:$drivers:$here/libraries
    library=$(LD_LIBRARY_PATH=$path ldd "$drivers"/librte_net_mlx5.so.* | grep -m 1 -o '/[^ ]*libmlx5[^ ]*')
    for mode in txonly 'io --tx-first' 'mac --tx-first --txpkts=1400' \
        'csum --tx-first --txpkts=200,200'; do
        # testpmd runs until it is interrupted; `timeout` then exits with 124.
        LD_LIBRARY_PATH=$path timeout -s INT "$seconds" "$here/root/usr/bin/dpdk-testpmd" \
            --no-huge -m 256 -l 0-1 --iova-mode=va --no-telemetry --file-prefix "test$$" \
            $devices $plugins -- --total-num-mbufs=8192 --rxd=256 --txd=256 \
            --forward-mode=$mode --stats-period 5 </dev/null >"$log" 2>&1
        status=$?
        sent=$(sed -n 's/.*TX-packets: \([0-9]*\) .*TX-total.*/\1/p' "$log" | tail -1)
        received=$(sed -n 's/.*RX-packets: \([0-9]*\) .*RX-total.*/\1/p' "$log" | tail -1)
        echo "$library $mode: status $status, ${sent:-no} packets sent, ${received:-none} received"
        [ "$status" = 124 ] && [ "${sent:-0}" -gt 100000 ] &&
            { [ "$mode" = txonly ] || [ "${received:-0}" -gt 100000 ]; } ||
            { failed=1; tail -20 "$log"; }
    done
done
exit "$failed"
