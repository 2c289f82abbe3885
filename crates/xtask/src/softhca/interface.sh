# The network interface does not receive the broadcasts that it sends, also beside other
# programs, and passes the driver's self-tests.
netdev=$(ls /sys/class/infiniband/$RDMA_DEV/device/net | head -n 1)
count() {
    cat /sys/class/net/$netdev/statistics/$1_packets
}
# no_loopback NAME: sends ARP requests for an unused address, and must not receive them.
no_loopback() {
    received=$(count rx) sent=$(count tx)
    busybox arping -c 3 -w 5 -I $netdev ${RDMA_ADDR%.*}.250 > /tmp/arping 2>&1
    received=$(($(count rx) - received)) sent=$(($(count tx) - sent))
    if [ $sent -ge 3 ] && [ $received = 0 ]; then
        echo "@pass $1"
    else
        echo "@fail $1: sent $sent, received $received"
    fi
}
self_test() {
    if ethtool -t $netdev online > /tmp/tested 2>&1; then
        echo "@pass $1"
    else
        echo "@fail $1: $(grep -v ' 0$' /tmp/tested | tr '\n' ' ')"
    fi
}
if [ "$(cat /sys/class/infiniband/$RDMA_DEV/ports/1/link_layer)" = Ethernet ]; then
    no_loopback "broadcasts are not received by their sender"
    self_test "the interface's self-test"
    # With two programs the driver enables loopback for users of the device.
    for program in 1 2; do
        timeout 60 ibv_asyncwatch -d $RDMA_DEV > /tmp/watch$program 2>&1 &
        watching="$watching $!"
    done
    sleep 1
    no_loopback "broadcasts are not received by their sender, beside two programs"
    self_test "the interface's self-test, beside two programs"
    kill $watching
    wait $watching 2> /dev/null
    no_loopback "broadcasts are not received by their sender, after two programs"
fi
