# Functions of scripts that run several cases: results, and waiting for servers.

passed=0
failed=0

pass() { passed=$((passed + 1)); echo "ok      $1" | cut -c 1-200; }
# fail NAME FILE...: also prints the last lines of the files.
fail() {
    failed=$((failed + 1))
    echo "FAILED  $1"
    shift
    for file in "$@"; do sed "s/^/        ${file##*/}: /" "$file" | tail -12 | cut -c 1-200; done
}

# tcp_listens PORT [PREFIX...], cm_listens PORT [PREFIX...]: whether a TCP socket listens on
# the port, or an rdma_cm id has it; the prefix enters a network namespace.
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

# Prints the counts; its status is that of the script.
report() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}
