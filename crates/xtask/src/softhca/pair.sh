# Two HCAs in one guest, whose ports are on a network that loses, reorders and duplicates
# frames in both directions. Most programs check the received data.
[ -n "$RDMA_DEV1" ] || { echo "@fail two HCAs: there is only one"; exit 1; }

if [ -n "$RDMA_ADDR1" ]; then
    # Both addresses are local: routes that send packets between them over the network.
    one=$(ls /sys/class/infiniband/$RDMA_DEV/device/net | head -n 1)
    two=$(ls /sys/class/infiniband/$RDMA_DEV1/device/net | head -n 1)
    for netdev in all $one $two; do
        echo 1 > /proc/sys/net/ipv4/conf/$netdev/accept_local
        echo 0 > /proc/sys/net/ipv4/conf/$netdev/rp_filter
    done
    ip rule add pref 100 lookup local
    ip rule del pref 0
    ip rule add pref 70 from $RDMA_ADDR to $RDMA_ADDR1 iif lo lookup 70
    ip rule add pref 71 from $RDMA_ADDR1 to $RDMA_ADDR iif lo lookup 71
    ip route replace $RDMA_ADDR1/32 dev $one src $RDMA_ADDR table 70
    ip route replace $RDMA_ADDR/32 dev $two src $RDMA_ADDR1 table 71
    # Address resolution, before packets are lost.
    ping -c 2 -I $RDMA_ADDR $RDMA_ADDR1 > /tmp/ping 2>&1 ||
        busybox ping -c 2 -I $RDMA_ADDR $RDMA_ADDR1 > /tmp/ping 2>&1
fi
echo "@tell lose chance=0.01"
echo "@tell reorder 50us chance=0.01"
echo "@tell duplicate chance=0.005"

port=18600
# pair NAME GID-OPTION PROGRAM...: runs the server on the second HCA, the client on the
# first.
pair() {
    name=$1 first=
    shift
    for attempt in 1 2 3; do
        run_pair "$@"
        if [ $client = 0 ] && [ $server = 0 ]; then
            [ $attempt = 1 ] && echo "@pass $name" || echo "@late $attempt $name: $first"
            return
        fi
        # A side of a ping-pong exits with its last message. If its acknowledgement of the
        # other side's last message was lost, it is not sent again.
        case $client,$server in
            0,*) other=server ;;
            *,0) other=client ;;
            *) break ;;
        esac
        grep -q "retry counter exceeded" /tmp/$other.errors || break
        [ $attempt = 1 ] && first="$other $(last_output $other)"
    done
    echo "@fail $name: client $client $(last_output client) server $server $(last_output server)"
}

run_pair() {
    gid=$1
    shift
    port=$((port + 1))
    timeout 90 "$@" -d $RDMA_DEV1 $gid $RDMA_GID1 -p $port \
        > /tmp/server 2> /tmp/server.errors &
    server=$!
    hex=$(printf ':%04X ' $port)
    for try in $(seq 100); do
        cat /proc/net/tcp /proc/net/tcp6 | grep -q "$hex.* 0A " && break
        sleep 0.1
    done
    timeout 90 "$@" -d $RDMA_DEV $gid $RDMA_GID -p $port 127.0.0.1 \
        > /tmp/client 2> /tmp/client.errors
    client=$?
    wait $server
    server=$?
}

last_output() {
    { tail -n 2 /tmp/$1.errors; tail -n 2 /tmp/$1; } | tr '\n' ' '
}

pair "rc_pingpong, contents" -g ibv_rc_pingpong -c -n 500 -s 16384
pair "rc_pingpong on events, contents" -g ibv_rc_pingpong -c -e -n 300 -s 4096
pair "srq_pingpong, contents" -g ibv_srq_pingpong -c -n 200 -s 8192
pair "send_bw" -x ib_send_bw -F -n 300 -s 65536
pair "write_bw" -x ib_write_bw -F -n 300 -s 65536
pair "write_bw, 4 queue pairs" -x ib_write_bw -F -n 200 -s 16384 -q 4
pair "read_bw" -x ib_read_bw -F -n 300 -s 65536
pair "atomic_bw" -x ib_atomic_bw -F -n 500
pair "send_lat" -x ib_send_lat -F -n 500 -s 256

if [ -n "$RDMA_ADDR1" ]; then
    timeout 90 rping -s -a $RDMA_ADDR1 -V -C 100 -S 10000 > /tmp/server 2>&1 &
    server=$!
    sleep 2
    timeout 90 rping -c -I $RDMA_ADDR -a $RDMA_ADDR1 -V -C 100 -S 10000 > /tmp/client 2>&1
    client=$?
    wait $server
    if [ $client = 0 ]; then
        echo "@pass rping, contents"
    else
        echo "@fail rping, contents: $client $(tail -n 2 /tmp/client | tr '\n' ' ')"
    fi
fi
# Checks that packets went over the wire and were lost, reordered and duplicated.
echo "@seen lose reorder duplicate retransmitted"
sleep 1
