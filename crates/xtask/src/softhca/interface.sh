# What the network interface hears of what it sends: nothing, with whatever
# programs there are, but for the driver's own test of that.
card=$(ls /sys/class/infiniband/$RDMA_DEV/device/net | head -n 1)
count() {
    cat /sys/class/net/$card/statistics/$1_packets
}
# NAME: asks for an address that nobody has.
silent() {
    heard=$(count rx) sent=$(count tx)
    busybox arping -c 3 -w 5 -I $card ${RDMA_ADDR%.*}.250 > /tmp/arping 2>&1
    heard=$(($(count rx) - heard)) sent=$(($(count tx) - sent))
    if [ $sent -ge 3 ] && [ $heard = 0 ]; then
        echo "@pass $1"
    else
        echo "@fail $1: sent $sent, heard $heard"
    fi
}
test_itself() {
    if ethtool -t $card online > /tmp/tested 2>&1; then
        echo "@pass $1"
    else
        echo "@fail $1: $(grep -v ' 0$' /tmp/tested | tr '\n' ' ')"
    fi
}
if [ "$(cat /sys/class/infiniband/$RDMA_DEV/ports/1/link_layer)" = Ethernet ]; then
    silent "broadcasts are not heard by who sends them"
    test_itself "the interface tests itself"
    # With two, the driver lets all that users of the card send come back.
    for program in 1 2; do
        timeout 60 ibv_asyncwatch -d $RDMA_DEV > /tmp/watch$program 2>&1 &
        watching="$watching $!"
    done
    sleep 1
    silent "the same beside two programs"
    test_itself "the interface tests itself beside two programs"
    kill $watching
    wait $watching 2> /dev/null
    silent "the same after them"
fi
