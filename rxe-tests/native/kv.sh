#!/bin/sh
# The key-value server with several concurrent clients, which check their values; then
# another client reads the values.
server=127.0.0.1:7475
kv_server $server "$RXE_DEV" > server.log 2>&1 &
pid=$!
trap 'kill $pid; cat server.log' EXIT
for _ in $(seq 100); do
    grep -q listening server.log && break
    sleep 0.2
done

clients=""
for name in alice bob carol dave; do
    kv_client $server check $name 25 &
    clients="$clients $!"
done
for client in $clients; do
    wait "$client" || exit 1
done

# expect ANSWER REQUEST...
expect() {
    expected=$1
    shift
    answer=$(kv_client $server "$@") || exit 1
    echo "$*: $answer"
    test "$answer" = "$expected" || exit 1
}
expect "= carol's value 24 of round 1" get carol-24
expect none get erin-0
expect ok set carol-24 ""
expect "= " get carol-24
expect "what?" list

# A client that speaks another protocol is disconnected; others are still served.
python3 -c '
import socket
peer = socket.create_connection(("127.0.0.1", 7475), 20)
peer.sendall(b"GET / HTTP/1.0\r\n\r\n")
while peer.recv(4096): pass
' || exit 1
expect "= alice's value 0 of round 1" get alice-0
kill -0 $pid
