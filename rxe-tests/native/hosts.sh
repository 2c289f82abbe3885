#!/bin/sh
# A device over UDP sockets in a network namespace, with rdma_rxe at the other end of a
# veth pair: hosts.sh pingpong|perf|cm|multicast|crate ...
#
# rdma_rxe stays in the initial namespace, since its socket is there before Linux 7.2.
# Environment: COUNT of ping-pongs and of perf's operations; LOSS, such as 1%, of packets in
# both directions.

if [ ! -e /ctl/start ]; then
    echo "SKIPPED: creates network devices; runs only in guests"
    exit 77
fi
modprobe rdma_ucm
ringverbs=${RINGVERBS:-ringverbs}
count=${COUNT:-100}
# Addresses and devices of the kernel's side and of ours.
theirs=192.168.78.1 ours=192.168.78.2 device=roce:192.168.78.2 rxe=rxe7
in_ours_netns="ip netns exec hosts"
scratch=$(mktemp -d)
clean() {
    ip link del hx0 2> /dev/null
    ip netns del hosts 2> /dev/null
    rm -rf "$scratch"
}
trap clean EXIT
# shellcheck source=report.sh
. "$(dirname "$0")/report.sh"

setup() {
    ip link add hx0 type veth peer name hx1
    ip netns add hosts
    ip link set hx1 netns hosts
    ip addr add $theirs/24 dev hx0
    ip link set hx0 up
    ip -n hosts addr add $ours/24 dev hx1
    ip -n hosts link set lo up
    ip -n hosts link set hx1 up
    if [ -n "$LOSS" ]; then
        modprobe sch_netem
        tc qdisc add dev hx0 root netem loss "$LOSS" || exit 1
        tc -n hosts qdisc add dev hx1 root netem loss "$LOSS" || exit 1
    fi
    rdma link add $rxe type rxe netdev hx0
    for _ in $(seq 100); do
        for gid in 0 1 2 3; do
            case $(cat "/sys/class/infiniband/$rxe/ports/1/gids/$gid" 2> /dev/null) in
            *:ffff:c0a8:4e01) return ;;
            esac
        done
        sleep 0.1
    done
    echo "$rxe has no address"
    exit 1
}

running() { kill -0 "$1" 2> /dev/null; }

# run_pair NAME SERVER-SIDE SERVER CLIENT: both must succeed. An rdma_cm server of our side
# has no port that can be looked up: its client is retried until it listens.
run_pair() {
    name=$1 side=$2 server=$3 client=$4
    case $side in
    ours) at=$in_ours_netns other='' ;;
    theirs) at='' other=$in_ours_netns ;;
    esac
    # shellcheck disable=SC2086
    $at env $settings timeout 60 $server > "$scratch/server" 2>&1 &
    pid=$!
    tries=1
    case $wait in
    tcp:*) for _ in $(seq 300); do tcp_listens "${wait#tcp:}" $at && break; running $pid || break; sleep 0.1; done ;;
    cm:*) if [ $side = theirs ]; then
        for _ in $(seq 300); do cm_listens "${wait#cm:}" && break; running $pid || break; sleep 0.1; done
    else tries=50; fi ;;
    esac
    while :; do
        # shellcheck disable=SC2086
        $other env $settings timeout 60 $client > "$scratch/client" 2>&1
        client_status=$?
        tries=$((tries - 1))
        [ $client_status -ne 0 ] && [ $tries -gt 0 ] && running $pid || break
        sleep 0.2
    done
    [ $client_status -eq 0 ] || kill $pid 2> /dev/null
    wait $pid
    server_status=$?
    if [ $client_status -eq 0 ] && [ $server_status -eq 0 ]; then
        pass "$name: $(tail -1 "$scratch/client")"
    else
        fail "$name (statuses $server_status and $client_status)" "$scratch/server" "$scratch/client"
    fi
}

pingpong() {
    wait=tcp:18515 settings=
    for type in rc uc ud srq; do
        # Messages of several packets, except for datagrams.
        case $type in ud) size=1000 ;; *) size=5000 ;; esac
        c="ibv_${type}_pingpong -d $rxe -g $gid -n $count -s $size -c"
        rust="$ringverbs pingpong -t $type -d $device -n $count -s $size -c"
        run_pair "$type: ours serves ibv_${type}_pingpong" ours "$rust -S" "$c $ours"
        run_pair "$type: ibv_${type}_pingpong serves ours" theirs "$c" "$rust $theirs"
    done
}

perf() {
    settings=
    for test in send:4096 write:20000 read:20000; do
        operation=${test%:*} size=${test#*:} wait=tcp:18515
        c="ib_${operation}_bw -n $count -s $size -F -d $rxe -x $gid"
        rust="perftest_peer $device $operation $count $size"
        run_pair "ib_${operation}_bw serves ours, $size bytes" theirs "$c" "$rust $theirs"
        run_pair "ours serves ib_${operation}_bw, $size bytes" ours "$rust" "$c $ours"
    done
    for operation in write read atomic; do
        wait=tcp:18600
        both="$ringverbs perf --port 18600 -n $count --op $operation --sizes 8"
        [ $operation = atomic ] || both="$both,30000"
        run_pair "perf, $operation: ours serves the kernel's device" ours \
            "$both -d $device --server" "$both -d $rxe $ours"
        run_pair "perf, $operation: the kernel's device serves ours" theirs \
            "$both -d $rxe --server" "$both -d $device $theirs"
    done
}

cm() {
    settings=RINGVERBS_DEVICE=$device
    wait=cm:7174
    run_pair "rping -s serves rping_client" theirs "rping -s -a $theirs -V" "rping_client $theirs 20"
    for options in '-C 20' '-C 5 -S 65000' '-C 5 -q'; do
        run_pair "rping_server serves rping $options" ours rping_server "rping -c -a $ours -V $options"
    done
    run_pair "udaddy serves cm_datagram" theirs udaddy "cm_datagram $theirs"
    run_pair "cm_datagram serves udaddy" ours cm_datagram "udaddy -s $ours"
    wait=cm:7471
    run_pair "ucmatose serves cm_client" theirs ucmatose "cm_client $theirs"
    run_pair "cm_server serves ucmatose" ours "cm_server 1" "ucmatose -s $ours"
    # There is no listener.
    if $in_ours_netns env $settings timeout 60 cm_client $theirs 7999 > "$scratch/client" 2>&1; then
        fail "rdma_rxe's host rejects cm_client" "$scratch/client"
    elif grep -q REJECTED "$scratch/client"; then
        pass "rdma_rxe's host rejects cm_client"
    else
        fail "rdma_rxe's host rejects cm_client" "$scratch/client"
    fi
}

# From rdma_rxe to ours, and back. A member that has not joined yet misses datagrams, so they are
# sent until it has enough.
multicast() {
    group=239.1.78.3
    for to in ours theirs; do
        case $to in
        ours) receiver="$in_ours_netns multicast $device $group 10" sender="mckey -m $group -b $theirs -C 10 -s" ;;
        theirs) receiver="mckey -m $group -b $theirs -C 10" sender="$in_ours_netns multicast $device $group 10 text" ;;
        esac
        timeout 60 $receiver > "$scratch/server" 2>&1 &
        pid=$!
        while running $pid; do
            timeout 60 $sender > "$scratch/client" 2>&1 || break
            sleep 0.2
        done
        if wait $pid; then
            pass "multicast, received by $to: $(tail -1 "$scratch/server")"
        else
            fail "multicast, received by $to" "$scratch/server" "$scratch/client"
        fi
    done
}

# Streams of the crate between rdma_rxe and ours.
crate() {
    wait=cm:7471
    for server in theirs ours; do
        case $server in ours) at=$in_ours_netns other='' server_address=$ours ;; theirs) at='' other=$in_ours_netns server_address=$theirs ;; esac
        # The server runs until it is killed.
        $at env ${at:+RINGVERBS_DEVICE=$device} stream_echo $server_address:7471 > "$scratch/server" 2>&1 &
        pid=$!
        for _ in $(seq 50); do
            $other env ${other:+RINGVERBS_DEVICE=$device} timeout 60 stream_echo $server_address:7471 one two three \
                > "$scratch/client" 2> "$scratch/client.err" && break
            running $pid || break
            sleep 0.2
        done
        kill $pid 2> /dev/null
        wait $pid 2> /dev/null
        if [ "$(cat "$scratch/client")" = "one two three" ]; then
            pass "streams, served by $server"
        else
            fail "streams, served by $server" "$scratch/server" "$scratch/client" "$scratch/client.err"
        fi
    done
}

setup
for part in "$@"; do $part; done
report
