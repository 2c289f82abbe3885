# The end of every guest: what the kernel has to say of the device, and that its
# drivers go, come again with all that they had, and go.

# But for what is known of this device, and what planted faults make it say.
known='vendor specific ID|modify_port_caps|counters are not supported|firmware level support'
known="$known|CREATE_QP\(0x500\)|Create QP type|CQ error on CQN"
# pyverbs asks for a queue that is too short for what is unread in it.
known="$known|MODIFY_CQ\(0x403\).*too many outstanding CQEs"
remarks() {
    dmesg -c -l emerg,alert,crit,err,warn |
        grep -E 'mlx5|infiniband|ib[0-9]+: |ib_|WARNING:|BUG:|Call Trace' |
        grep -vE "$known" | head -20 | sed 's/^/@kernel /'
}
unload() {
    modprobe -r rdma_ucm mlx5_ib && modprobe -r mlx5_core
}
active() {
    cat /sys/class/infiniband/*/ports/1/state 2> /dev/null | grep -c ACTIVE
}
reload() {
    modprobe mlx5_core prof_sel=0 && modprobe mlx5_ib && modprobe rdma_ucm || return
    tries=0
    while [ "$(active)" != "$before" ]; do
        [ $tries -lt 300 ] || return
        for card in /sys/class/infiniband/*/device/net/*; do
            [ -e "$card" ] && ip link set "${card##*/}" up
        done
        sleep 0.1
        tries=$((tries + 1))
    done
    ibv_devinfo > /tmp/devinfo && grep -q PORT_ACTIVE /tmp/devinfo
}
# NAME COMMAND
last() {
    if $2 > /tmp/last 2>&1; then
        echo "@pass $1"
    else
        echo "@fail $1: $(tail -n 3 /tmp/last | tr '\n' ' ')"
    fi
}

echo "@system $(uname -r) $(dpkg-query -W -f '${Version}' rdma-core)"
before=$(active)
remarks
last "the drivers unload" unload
last "the drivers load again, the ports are active" reload
last "the drivers unload again" unload
remarks
