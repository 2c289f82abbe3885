#!/bin/sh
# The Rust crate's examples against C programs: interop.sh pings|killed|cm|smoke|perf ...
# With which provider the C programs are served is the caller's choice. TESTS,
# of perf: operations and sizes, with commas between them.
#
# Under wire.sh pings and perf have their server at the other end of the wire.

modprobe rdma_ucm
# The server's device and addresses; each end's network namespace, if it has one.
dev1=${RXE_DEV1:-$RXE_DEV} gid1=${RXE_GID1:-$RXE_GID} addr1=${RXE_ADDR1:-$RXE_ADDR}
host1=${RXE_NETNS1:+$RXE_ADDR1}
host1=${host1:-127.0.0.1}
at0=${RXE_NETNS:+ip netns exec $RXE_NETNS} at1=${RXE_NETNS1:+ip netns exec $RXE_NETNS1}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=report.sh
. "$(dirname "$0")/report.sh"

# until_true COMMAND...: at most half a minute.
until_true() {
    waited=0
    until "$@" || [ $waited -ge 150 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
}
contains() { grep -q "$1" "$2"; }

# start READY PORT COMMAND...: a server, when it can be connected to.
start() {
    ready=$1 port=$2
    shift 2
    # What C has buffered comes at its end: errors are not to be in the middle.
    $at1 timeout 60 "$@" > "$scratch/server" 2> "$scratch/server.err" &
    server=$!
    until_true "$ready" "$port" $at1
}

# ask COMMAND...: its client; leaves the statuses of both. A server that has
# lost its client is not waited for.
ask() {
    $at0 timeout 60 "$@" > "$scratch/client" 2> "$scratch/client.err"
    client_status=$?
    [ $client_status -eq 0 ] || kill $server 2> /dev/null
    wait $server
    server_status=$?
}

# judge NAME [CONDITION...]: both have ended well, and the condition holds.
judge() {
    name=$1
    shift
    if [ $client_status -eq 0 ] && [ $server_status -eq 0 ] && "${@:-true}"; then
        ok "$name: $(tail -1 "$scratch/client")"
    else
        # Its last words first: perftest may have no figures for a reason.
        words=$(cat "$scratch/server.err" "$scratch/client.err" | tail -1)
        bad "$name (statuses $server_status and $client_status) $words" \
            "$scratch/server" "$scratch/server.err" "$scratch/client" "$scratch/client.err"
    fi
}

# The pings of both sides are the same, and as many as asked for.
same_pings() {
    sed -n 's/^server ping data: //p' "$scratch/server" > "$scratch/served"
    sed -n 's/^ping data: //p' "$scratch/client" > "$scratch/asked"
    [ "$(wc -l < "$scratch/served")" -eq "$1" ] && cmp "$scratch/served" "$scratch/asked"
}

pings() {
    for options in '-C 10' '-C 3 -S 65000' '-C 5 -q'; do
        count=${options#-C }
        start cm_listens 7174 rping_server
        ask rping -c -a "$addr1" -v -V $options
        judge "rping_server serves rping $options" same_pings "${count%% *}"
    done
    for options in '' '-q'; do
        start cm_listens 7174 rping -s -a "$addr1" -v -V $options
        ask rping_client "$addr1" 10
        judge "rping -s $options serves rping_client" same_pings 10
    done
}

# A peer that is gone without a word: between two operations, mostly, and with
# long pings in the middle of one.
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
            ok "$name: $(tail -1 "$scratch/server")"
        else
            bad "$name (status $server_status) $(tail -1 "$scratch/server.err")" "$scratch/server"
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
        bad "rping_client says that its server is gone" "$scratch/client"
    elif [ $? -eq 1 ] && contains . "$scratch/client"; then
        ok "rping_client says that its server is gone: $(tail -1 "$scratch/client")"
    else
        bad "rping_client says that its server is gone" "$scratch/client"
    fi
}

cm() {
    # Served, and then rejected, as C sees it.
    start cm_listens 7471 cm_server 2
    for client in 1 2; do
        timeout 60 ucmatose -s "$RXE_ADDR" > "$scratch/client" 2>&1
        client_status=$?
        if [ $client_status -eq 0 ] && contains 'data transfers complete' "$scratch/client"; then
            ok "cm_server serves ucmatose, client $client"
        else
            bad "cm_server serves ucmatose, client $client" "$scratch/server" "$scratch/client"
        fi
    done
    if timeout 60 ucmatose -s "$RXE_ADDR" > "$scratch/client" 2>&1; then
        bad "cm_server rejects one ucmatose more" "$scratch/server" "$scratch/client"
    elif wait $server && contains 'REJECTED, error: 28' "$scratch/client" \
        && [ "$(grep -c 'messages of 100 bytes came back' "$scratch/server")" -eq 2 ] \
        && [ "$(grep -c '^disconnected' "$scratch/server")" -eq 2 ]; then
        ok "cm_server rejects one ucmatose more: $(grep REJECTED "$scratch/client")"
    else
        bad "cm_server rejects one ucmatose more" "$scratch/server" "$scratch/client"
    fi

    start cm_listens 7471 ucmatose
    ask cm_client "$RXE_ADDR"
    judge "ucmatose serves cm_client" contains 'data transfers complete' "$scratch/server"

    if timeout 60 cm_client "$RXE_ADDR" 7999 > "$scratch/client" 2>&1; then
        bad "cm_client is refused where nobody listens" "$scratch/client"
    elif contains 'REJECTED' "$scratch/client"; then
        ok "cm_client is refused where nobody listens: $(tail -1 "$scratch/client")"
    else
        bad "cm_client is refused where nobody listens" "$scratch/client"
    fi

    start cm_listens 7174 cm_datagram
    ask udaddy -s "$RXE_ADDR"
    judge "cm_datagram serves udaddy" contains 'data transfers complete' "$scratch/client"
    start cm_listens 7174 udaddy
    ask cm_datagram "$RXE_ADDR"
    judge "udaddy serves cm_datagram" contains 'data transfers complete' "$scratch/server"
}

# The connection manager by itself, with queue pairs of rdma_rxe.
smoke() {
    if timeout 120 cm-smoke self "$RXE_ADDR" > "$scratch/client" 2>&1; then
        ok "cm-smoke: both sides"
    else
        bad "cm-smoke: both sides" "$scratch/client"
    fi
    start cm_listens 7471 ucmatose -C 0
    ask cm-smoke connect "$RXE_ADDR" 7471
    judge "ucmatose -C 0 serves cm-smoke"
    start cm_listens 7471 cm-smoke listen 7471
    ask ucmatose -C 0 -s "$RXE_ADDR"
    judge "cm-smoke serves ucmatose -C 0"
}

# C's side has printed a rate that is more than nothing; a few short messages of a
# slow machine are 0.00 MiB/s.
has_bandwidth() {
    awk '/#bytes/ { table = 1; next } table && $1 == size && $2 == count && $5 > 0 { found = 1 }
        END { exit !found }' size="$2" count="$3" "$1"
}

# perftest measures the processor's clock first. Where other work keeps it from
# that it ends well but without figures, and is tried again.
knows_no_clock() { grep -q 'Correlation coefficient' "$scratch/$1" "$scratch/$1.err"; }

perf() {
    # A packet's worth, more, and less than a place in perftest's page.
    tests=${TESTS:-send:4096,send:20000,write:100,write:20000,read:20000}
    for test in $(echo "$tests" | tr , ' '); do
        operation=${test%:*} size=${test#*:}
        theirs="ib_${operation}_bw -n 100 -s $size -F"
        for _ in 1 2 3; do
            start tcp_listens 18515 $theirs -d $dev1 -x $gid1
            ask perftest_peer "$RXE_DEV" $operation 100 $size $host1
            knows_no_clock server || break
        done
        judge "ib_${operation}_bw serves perftest_peer, $size bytes" \
            has_bandwidth "$scratch/server" "$size" 100
        for _ in 1 2 3; do
            start tcp_listens 18515 perftest_peer "$dev1" $operation 100 $size
            ask $theirs -d "$RXE_DEV" -x "$RXE_GID" $host1
            knows_no_clock client || break
        done
        judge "perftest_peer serves ib_${operation}_bw, $size bytes" \
            has_bandwidth "$scratch/client" "$size" 100
    done
}

for part in "$@"; do $part; done
report
