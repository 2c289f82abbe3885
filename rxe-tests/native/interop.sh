#!/bin/sh
# The Rust crate's examples with C programs: interop.sh pings|killed|cm|smoke|perf ...
# The caller chooses the provider of the C programs. TESTS of perf: operations and sizes,
# separated by commas.
#
# Under wire.sh the servers of pings and perf are at the other end of the wire.

modprobe rdma_ucm
# The server's device and addresses; the network namespaces of both ends, if any.
dev1=${RXE_DEV1:-$RXE_DEV} gid1=${RXE_GID1:-$RXE_GID} addr1=${RXE_ADDR1:-$RXE_ADDR}
host1=${RXE_NETNS1:+$RXE_ADDR1}
host1=${host1:-127.0.0.1}
at0=${RXE_NETNS:+ip netns exec $RXE_NETNS} at1=${RXE_NETNS1:+ip netns exec $RXE_NETNS1}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=report.sh
. "$(dirname "$0")/report.sh"

# until_true COMMAND...: waits for at most 30 s until the command succeeds.
until_true() {
    waited=0
    until "$@" || [ $waited -ge 150 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
}
contains() { grep -q "$1" "$2"; }

# start READY PORT COMMAND...: starts a server, and waits until it listens.
start() {
    ready=$1 port=$2
    shift 2
    # Standard error has its own file: C programs buffer their output until they exit.
    $at1 timeout 60 "$@" > "$scratch/server" 2> "$scratch/server.err" &
    server=$!
    until_true "$ready" "$port" $at1
}

# run_client COMMAND...: runs the client, and sets the statuses of both. If the client fails,
# the server is killed.
run_client() {
    $at0 timeout 60 "$@" > "$scratch/client" 2> "$scratch/client.err"
    client_status=$?
    [ $client_status -eq 0 ] || kill $server 2> /dev/null
    wait $server
    server_status=$?
}

# judge NAME [CONDITION...]: passes if both have succeeded and the condition holds.
judge() {
    name=$1
    shift
    if [ $client_status -eq 0 ] && [ $server_status -eq 0 ] && "${@:-true}"; then
        pass "$name: $(tail -1 "$scratch/client")"
    else
        # The last error message first: perftest explains missing figures there.
        message=$(cat "$scratch/server.err" "$scratch/client.err" | tail -1)
        fail "$name (statuses $server_status and $client_status) $message" \
            "$scratch/server" "$scratch/server.err" "$scratch/client" "$scratch/client.err"
    fi
}

# same_pings COUNT: both sides have printed COUNT equal pings.
same_pings() {
    sed -n 's/^server ping data: //p' "$scratch/server" > "$scratch/served"
    sed -n 's/^ping data: //p' "$scratch/client" > "$scratch/asked"
    [ "$(wc -l < "$scratch/served")" -eq "$1" ] && cmp "$scratch/served" "$scratch/asked"
}

pings() {
    for options in '-C 10' '-C 3 -S 65000' '-C 5 -q'; do
        count=${options#-C }
        start cm_listens 7174 rping_server
        run_client rping -c -a "$addr1" -v -V $options
        judge "rping_server serves rping $options" same_pings "${count%% *}"
    done
    for options in '' '-q'; do
        start cm_listens 7174 rping -s -a "$addr1" -v -V $options
        run_client rping_client "$addr1" 10
        judge "rping -s $options serves rping_client" same_pings 10
    done
}

# Killed peers: mostly between two operations, with long pings during one.
killed() {
    for size in 64 65000; do
        start cm_listens 7174 rping_server
        rping -c -S $size -a "$RXE_ADDR" > /dev/null 2>&1 &
        client=$!
        until_true contains 'rdma-ping-20' "$scratch/server"
        kill -9 $client
        wait $server
        server_status=$?
        name="rping_server ends when its client is killed, $size bytes"
        if [ $server_status -eq 0 ] \
            && contains 'then the client has disconnected' "$scratch/server"; then
            pass "$name: $(tail -1 "$scratch/server")"
        else
            fail "$name (status $server_status) $(tail -1 "$scratch/server.err")" "$scratch/server"
        fi
    done
    rping -s -a "$RXE_ADDR" -v > "$scratch/server" 2>&1 &
    server=$!
    until_true cm_listens 7174 $at1
    timeout 60 rping_client "$RXE_ADDR" 1000000 > "$scratch/client" 2>&1 &
    client=$!
    until_true contains 'rdma-ping-20' "$scratch/server"
    kill -9 $server
    if wait $client; then
        fail "rping_client reports that its server was killed" "$scratch/client"
    elif [ $? -eq 1 ] && contains . "$scratch/client"; then
        pass "rping_client reports that its server was killed: $(tail -1 "$scratch/client")"
    else
        fail "rping_client reports that its server was killed" "$scratch/client"
    fi
}

cm() {
    # C clients are served, and then rejected.
    start cm_listens 7471 cm_server 2
    for client in 1 2; do
        timeout 60 ucmatose -s "$RXE_ADDR" > "$scratch/client" 2>&1
        client_status=$?
        if [ $client_status -eq 0 ] && contains 'data transfers complete' "$scratch/client"; then
            pass "cm_server serves ucmatose, client $client"
        else
            fail "cm_server serves ucmatose, client $client" "$scratch/server" "$scratch/client"
        fi
    done
    if timeout 60 ucmatose -s "$RXE_ADDR" > "$scratch/client" 2>&1; then
        fail "cm_server rejects a further ucmatose" "$scratch/server" "$scratch/client"
    elif wait $server && contains 'REJECTED, error: 28' "$scratch/client" \
        && [ "$(grep -c 'messages of 100 bytes came back' "$scratch/server")" -eq 2 ] \
        && [ "$(grep -c '^disconnected' "$scratch/server")" -eq 2 ]; then
        pass "cm_server rejects a further ucmatose: $(grep REJECTED "$scratch/client")"
    else
        fail "cm_server rejects a further ucmatose" "$scratch/server" "$scratch/client"
    fi

    start cm_listens 7471 ucmatose
    run_client cm_client "$RXE_ADDR"
    judge "ucmatose serves cm_client" contains 'data transfers complete' "$scratch/server"

    if timeout 60 cm_client "$RXE_ADDR" 7999 > "$scratch/client" 2>&1; then
        fail "cm_client is rejected without a listener" "$scratch/client"
    elif contains 'REJECTED' "$scratch/client"; then
        pass "cm_client is rejected without a listener: $(tail -1 "$scratch/client")"
    else
        fail "cm_client is rejected without a listener" "$scratch/client"
    fi

    start cm_listens 7174 cm_datagram
    run_client udaddy -s "$RXE_ADDR"
    judge "cm_datagram serves udaddy" contains 'data transfers complete' "$scratch/client"
    start cm_listens 7174 udaddy
    run_client cm_datagram "$RXE_ADDR"
    judge "udaddy serves cm_datagram" contains 'data transfers complete' "$scratch/server"
}

# The connection manager without the crate ringverbs, with queue pairs of rdma_rxe.
smoke() {
    if timeout 120 cm-smoke self "$RXE_ADDR" > "$scratch/client" 2>&1; then
        pass "cm-smoke: both sides"
    else
        fail "cm-smoke: both sides" "$scratch/client"
    fi
    start cm_listens 7471 ucmatose -C 0
    run_client cm-smoke connect "$RXE_ADDR" 7471
    judge "ucmatose -C 0 serves cm-smoke"
    start cm_listens 7471 cm-smoke listen 7471
    run_client ucmatose -C 0 -s "$RXE_ADDR"
    judge "cm-smoke serves ucmatose -C 0"
}

# has_bandwidth FILE SIZE COUNT: the C program has printed a rate above 0; with a few short
# messages a slow machine may have 0.00 MiB/s.
has_bandwidth() {
    awk '/#bytes/ { table = 1; next } table && $1 == size && $2 == count && $5 > 0 { found = 1 }
        END { exit !found }' size="$2" count="$3" "$1"
}

# perftest calibrates the processor's clock first. If that fails on a busy machine, it
# succeeds without figures, and is run again.
lacks_clock() { grep -q 'Correlation coefficient' "$scratch/$1" "$scratch/$1.err"; }

perf() {
    # One packet, several, and less than a slot in perftest's buffer.
    tests=${TESTS:-send:4096,send:20000,write:100,write:20000,read:20000}
    for test in $(echo "$tests" | tr , ' '); do
        operation=${test%:*} size=${test#*:}
        theirs="ib_${operation}_bw -n 100 -s $size -F"
        for _ in 1 2 3; do
            start tcp_listens 18515 $theirs -d $dev1 -x $gid1
            run_client perftest_peer "$RXE_DEV" $operation 100 $size $host1
            lacks_clock server || break
        done
        judge "ib_${operation}_bw serves perftest_peer, $size bytes" \
            has_bandwidth "$scratch/server" "$size" 100
        for _ in 1 2 3; do
            start tcp_listens 18515 perftest_peer "$dev1" $operation 100 $size
            run_client $theirs -d "$RXE_DEV" -x "$RXE_GID" $host1
            lacks_clock client || break
        done
        judge "perftest_peer serves ib_${operation}_bw, $size bytes" \
            has_bandwidth "$scratch/client" "$size" 100
    done
}

for part in "$@"; do $part; done
report
