#!/bin/sh
# Examples with a server and a client: peers.sh NAME

# start_server LOG PROGRAM...: starts it, and kills it when this script exits.
start_server() {
    log=$1
    shift
    "$@" > "$log" 2>&1 &
    pid=$!
    trap 'kill $pid 2>/dev/null; cat $log' EXIT
}

# retry PROGRAM...: runs a client until its server listens.
retry() {
    for _ in $(seq 50); do
        "$@" && return
        sleep 0.2
    done
    exit 1
}

case $1 in
hello_tcp)
    start_server listen.log hello_tcp listen 127.0.0.1:7000
    retry hello_tcp connect 127.0.0.1:7000 > connect.log
    wait $pid || exit 1
    cat connect.log
    grep -q "hello from the side that said listen" connect.log &&
        grep -q "hello from the side that said connect" listen.log
    ;;
stream_echo)
    modprobe rdma_ucm
    start_server serve.log stream_echo "$RXE_ADDR:7471"
    retry stream_echo "$RXE_ADDR:7471" one two three > answer
    cat answer
    test "$(cat answer)" = "one two three"
    ;;
rping)
    modprobe rdma_ucm
    start_server serve.log rping_server
    retry rping_client "$RXE_ADDR" 10 > client.log
    wait $pid || exit 1
    cat client.log
    grep -q "10 pings came back as they were sent" client.log &&
        grep -q "rdma-ping-9: " serve.log
    ;;
cm)
    modprobe rdma_ucm
    start_server serve.log cm_server 1
    retry cm_client "$RXE_ADDR"
    # One client more than the server accepts.
    cm_client "$RXE_ADDR" > rejected.log 2>&1
    cat rejected.log
    wait $pid || exit 1
    grep -q "10 messages of 100 bytes came back" serve.log &&
        grep -q "enough for today" rejected.log
    ;;
cm_datagram)
    modprobe rdma_ucm
    start_server serve.log cm_datagram
    retry cm_datagram "$RXE_ADDR" > client.log
    wait $pid || exit 1
    cat client.log
    grep -q "10 datagrams there and back" client.log &&
        grep -q "10 datagrams there and back" serve.log
    ;;
*)
    echo "peers.sh: no such example: $1"
    exit 1
    ;;
esac
