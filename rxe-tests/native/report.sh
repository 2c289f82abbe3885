# Sourced by scripts that run several cases: their results, and servers that are waited
# for.

passed=0
failed=0

ok() { passed=$((passed + 1)); echo "ok      $1" | cut -c 1-200; }
# bad NAME FILE...: with the last lines of the files.
bad() {
    failed=$((failed + 1))
    echo "FAILED  $1"
    shift
    for file in "$@"; do sed "s/^/        ${file##*/}: /" "$file" | tail -12 | cut -c 1-200; done
}

# PORT [PREFIX...]: a TCP port, or that of an id of rdma_cm; the prefix enters a network
# namespace.
tcp_listens() {
    tcp_port=$(printf %04X "$1")
    shift
    "$@" cat /proc/net/tcp /proc/net/tcp6 | grep -q ":$tcp_port [0-9A-F:]* 0A "
}
cm_listens() {
    cm_port=$1
    shift
    "$@" rdma resource show cm_id | sed 's/$/ /' | grep -q ":$cm_port "
}

# Prints how many passed and failed; the status is that of the script.
report() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}
