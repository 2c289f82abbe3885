# The short suite of the static guest, which has only busybox and the Rust crate's static
# programs. Each case is reported as a record, "pass NAME" or "fail NAME".
failed=0
check() {
    name=$1
    shift
    if "$@" > /tmp/out 2>&1; then
        printf '\036pass %s\n' "$name"
    else
        sed 's/^/    /' /tmp/out
        printf '\036fail %s\n' "$name"
        failed=1
    fi
}
# The root file system has no library and no loader.
no_library() {
    find / -xdev \( -name '*.so' -o -name '*.so.*' -o -name 'ld-*' \) > /tmp/found
    cat /tmp/found
    [ ! -s /tmp/found ] && [ ! -e /lib64 ] && [ ! -e /usr/lib ]
}
setup() { rxe-driver setup > /run/rxe; }
devices() { ringverbs devices | grep "^$RXE_DEV .*rdma_rxe"; }
info() { ringverbs info -v | grep 'PORT_ACTIVE'; }
pingpong() {
    ringverbs pingpong -S -c -n 100 > /tmp/server 2>&1 &
    server=$!
    n=0
    until ringverbs pingpong -c -n 100 127.0.0.1; do
        n=$((n + 1))
        [ $n -lt 20 ] || { cat /tmp/server; return 1; }
        sleep 0.2
    done
    wait $server || { cat /tmp/server; return 1; }
}
check no-shared-library no_library
check device-setup setup
. /run/rxe
check devices devices
check info info
check pingpong pingpong
for example in hello write_with_immediate atomics datagram srq_echo; do
    check $example $example "$RXE_DEV"
done
exit $failed
