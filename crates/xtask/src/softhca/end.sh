# The end of every guest: prints the kernel's messages on the device, then unloads the
# drivers, loads them again with active ports, and unloads them.

# Expected messages on this device, and on injected faults.
known='vendor specific ID|modify_port_caps|counters are not supported|firmware level support'
known="$known|CREATE_QP\(0x500\)|Create QP type|CQ error on CQN"
# pyverbs resizes a CQ below its number of unread completions.
known="$known|MODIFY_CQ\(0x403\).*too many outstanding CQEs"
kernel_messages() {
    dmesg -c -l emerg,alert,crit,err,warn |
        grep -E 'mlx5|infiniband|ib[0-9]+: |ib_|WARNING:|BUG:|Call Trace' |
        grep -vE "$known" | head -20 | sed 's/^/@kernel /'
}
unload() {
    modprobe -r rdma_ucm mlx5_ib && modprobe -r mlx5_core
}
active_ports() {
    cat /sys/class/infiniband/*/ports/1/state 2> /dev/null | grep -c ACTIVE
}
reload() {
    modprobe mlx5_core prof_sel=0 && modprobe mlx5_ib && modprobe rdma_ucm || return
    tries=0
    while [ "$(active_ports)" != "$before" ]; do
        [ $tries -lt 300 ] || return
        for netdev in /sys/class/infiniband/*/device/net/*; do
            [ -e "$netdev" ] && ip link set "${netdev##*/}" up
        done
        sleep 0.1
        tries=$((tries + 1))
    done
    ibv_devinfo > /tmp/devinfo && grep -q PORT_ACTIVE /tmp/devinfo
}
# check NAME COMMAND: a case that passes if the command does.
check() {
    if $2 > /tmp/check 2>&1; then
        echo "@pass $1"
    else
        echo "@fail $1: $(tail -n 3 /tmp/check | tr '\n' ' ')"
    fi
}

echo "@system $(uname -r) $(dpkg-query -W -f '${Version}' rdma-core)"
before=$(active_ports)
kernel_messages
check "the drivers unload" unload
check "the drivers load again, the ports are active" reload
check "the drivers unload again" unload
kernel_messages
