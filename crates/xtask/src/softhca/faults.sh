# Injects faults while programs run: each must be reported, and nothing may hang.

# until_true SECONDS COMMAND...: waits until the command succeeds.
until_true() {
    left=$(($1 * 5))
    shift
    while ! "$@" > /dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 0.2
    done
}
# check NAME COMMAND...: a case that passes if the command does.
check() {
    name=$1
    shift
    if "$@" > /tmp/check 2>&1; then
        echo "@pass $name"
    else
        echo "@fail $name: $(tail -n 3 /tmp/check | tr '\n' ' ')"
    fi
}
# logged PATTERN: whether the kernel has logged it.
logged() { dmesg | grep -qE "$1"; }
# Clears the kernel's log; reports the messages that are never expected.
clear_log() { dmesg -c | grep -E 'WARNING:|BUG:|Call Trace' | sed 's/^/@kernel /'; }
state() { grep -q "$1" /sys/class/infiniband/$RDMA_DEV/ports/1/state; }
# Whether a server of ping-pongs listens on port 18515.
listens() { grep -q ':4853 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; }
is_connected() { ! listens; }
# Starts two programs that ping-pong until they fail or are killed.
start() {
    timeout 90 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID -n 100000000 > /tmp/server 2>&1 &
    server=$!
    until_true 30 listens
    timeout 90 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID -n 100000000 127.0.0.1 > /tmp/client 2>&1 &
    client=$!
    until_true 30 is_connected
    sleep 1
}
# retries_exceeded FILES...: whether a program has reported it; prints their output.
retries_exceeded() {
    cat "$@"
    cat "$@" | grep -q "transport retry counter exceeded"
}
has_exited() { ! kill -0 $1 2> /dev/null; }

# The cable.
ibv_asyncwatch -d $RDMA_DEV > /tmp/async 2>&1 &
watch=$!
sleep 1
start
echo "@tell link-down"
check "link down: the port is down" until_true 20 state DOWN
check "link down: a port event" until_true 20 grep -q IBV_EVENT_PORT_ERR /tmp/async
# The sender of the message in flight fails; the other program may wait forever.
one_has_exited() { has_exited $server || has_exited $client; }
check "link down: a program ends by itself" until_true 40 one_has_exited
check "link down: its retries are exceeded" retries_exceeded /tmp/client /tmp/server
kill $server $client 2> /dev/null
wait $server $client 2> /dev/null
echo "@tell link-up"
check "link up: the port is active" until_true 20 state ACTIVE
check "link up: a port event" until_true 20 grep -q IBV_EVENT_PORT_ACTIVE /tmp/async
kill $watch

# ping-pongs work afterwards.
pingpong() {
    timeout 60 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID -n 50 -c > /tmp/server 2>&1 &
    until_true 30 listens
    timeout 60 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID -n 50 -c 127.0.0.1 && wait $!
}
if [ -n "$RDMA_ADDR" ]; then
    # The GID of the address was removed and added with the link.
    until_true 20 grep -q "" /sys/class/infiniband/$RDMA_DEV/ports/1/gids/$RDMA_GID
    sleep 1
fi
check "after the link: a ping-pong" pingpong

# A command that fails once.
echo "@tell fail CREATE_QP nth=1"
sleep 1
timeout 20 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID > /tmp/server 2>&1
check "a failed command: the program is told" grep -q "Couldn't create QP" /tmp/server
check "after a failed command: a ping-pong" pingpong

# Queues that enter the error state.
cat > /tmp/events.py << 'P'
import os, signal, sys, types
# rdma-core 44 has only the second module, 65 only the first.
try:
    import pyverbs.libibverbs_enums as enums
except ImportError:
    import pyverbs.enums as enums
from pyverbs.addr import GID
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR

# The constants are in the module, from rdma-core 65 on only in its enumerations.
e = types.SimpleNamespace(**vars(enums))
for kind in vars(enums).values():
    vars(e).update(getattr(kind, '__members__', {}))

what, order, wanted = sys.argv[1:]
signal.alarm(30)
ctx = Context(name=os.environ['RDMA_DEV'])
pd, cq = PD(ctx), CQ(ctx, 16)
init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq,
                  cap=QPCap(max_send_wr=4, max_recv_wr=4))
attr = QPAttr(port_num=1)
qp = QP(pd, init, attr)
qp.to_init(attr)
mr = MR(pd, 64, e.IBV_ACCESS_LOCAL_WRITE)
qp.post_recv(RecvWR(wr_id=7, num_sge=1, sg=[SGE(mr.buf, 64, mr.lkey)]))
print('@tell ' + order.replace('QPN', str(qp.qp_num)), flush=True)
event = ctx.get_async_event()
got = event.event_type
event.ack()
if what == 'queue pair' and got == getattr(e, wanted):
    # The posted receive is flushed.
    count, wcs = 0, []
    while not count:
        count, wcs = cq.poll(1)
    if (wcs[0].wr_id, wcs[0].status) != (7, e.IBV_WC_WR_FLUSH_ERR):
        sys.exit('@fail a failed %s: a completion of %s' % (what, wcs[0]))
if got == getattr(e, wanted):
    print('@pass a failed %s: %s' % (what, wanted), flush=True)
else:
    print('@fail a failed %s: event %s' % (what, got), flush=True)
P
python3 /tmp/events.py "queue pair" "qp-error qp=QPN" IBV_EVENT_QP_FATAL ||
    echo "@fail a failed queue pair: no event"
python3 /tmp/events.py "completion queue" "cq-error qp=QPN" IBV_EVENT_CQ_ERR ||
    echo "@fail a failed completion queue: no event"
check "after failed queues: a ping-pong" pingpong

# Receives of SRQs that the device returns, since their memory is not present: the provider
# posts them again, and programs do not notice.
srq_pingpong() {
    timeout 60 ibv_srq_pingpong -d $RDMA_DEV -g $RDMA_GID -n 100 -c > /tmp/server 2>&1 &
    server=$!
    until_true 30 listens
    timeout 60 ibv_srq_pingpong -d $RDMA_DEV -g $RDMA_GID -n 100 -c 127.0.0.1 && wait $server
}
echo "@mark"
echo "@tell return-receive nth=1..50"
sleep 1
check "receives that come back: a ping-pong over shared queues" srq_pingpong
echo "@counted receives_returned=50-50 cqes_with_error=50-50 : receives that come back"

# Corrupted packets are detected and retransmitted.
echo "@mark"
echo "@tell corrupt chance=0.05"
sleep 1
check "a wire that corrupts: a ping-pong" pingpong
echo "@counted corrupt=1- bad_icrc=1- retransmitted=1- : a wire that corrupts"
# A wire that loses all packets: one message, retransmitted until the retry limit.
timeout 90 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID -n 10 -s 64 > /tmp/server 2>&1 &
server=$!
until_true 30 listens
echo "@tell end"
echo "@mark"
echo "@tell lose"
sleep 1
timeout 60 ibv_rc_pingpong -d $RDMA_DEV -g $RDMA_GID -n 10 -s 64 127.0.0.1 > /tmp/client 2>&1
check "a wire that loses all: the retries are exceeded" retries_exceeded /tmp/client
echo "@counted retransmitted=7-7 timeouts=8-8 : a wire that loses all, retry count 7"
kill $server 2> /dev/null
wait $server 2> /dev/null
# A wire that delays and reorders.
echo "@tell end"
echo "@mark"
echo "@tell delay 2ms..4ms"
echo "@tell reorder 10ms chance=0.05"
sleep 1
check "a wire that delays: a ping-pong" pingpong
echo "@counted reorder=1- : a wire that delays"
echo "@tell end"
sleep 1

# A health syndrome is reported, and the device keeps working.
echo "@tell health 0x10"
check "a health syndrome: the driver tells" until_true 40 logged "Health issue observed.*emperature"
check "a health syndrome: a ping-pong" pingpong
echo "@tell health 0"
sleep 4
clear_log

# A fatal syndrome: programs get an event, and the driver resets and recovers the device.
reactivate() {
    until_true 60 state "" || return 1
    if [ -n "$RDMA_ADDR" ]; then
        netdev=$(ls /sys/class/infiniband/$RDMA_DEV/device/net | head -n 1)
        ip link set "$netdev" up
        ip addr add $RDMA_ADDR/24 dev "$netdev"
        # Only Ethernet ports have a GID of the address.
        grep -q InfiniBand /sys/class/infiniband/$RDMA_DEV/ports/1/link_layer ||
            until_true 20 grep -q ffff:c0a8 /sys/class/infiniband/$RDMA_DEV/ports/1/gids/$RDMA_GID
    fi
    until_true 20 state ACTIVE
}
ibv_asyncwatch -d $RDMA_DEV > /tmp/async 2>&1 &
watch=$!
start
echo "@tell health 1 fatal"
check "a fatal error: the program is told" until_true 30 grep -q IBV_EVENT_DEVICE_FATAL /tmp/async
check "a fatal error: the driver resets the device" until_true 60 logged "Issuing FW Reset"
check "a fatal error: the driver recovers" until_true 90 logged "health recovery succeeded"
kill $watch $server $client 2> /dev/null
wait $watch $server $client 2> /dev/null
check "after a fatal error: the port is active" reactivate
check "after a fatal error: a ping-pong" pingpong
clear_log

# lose_device FILE COMMAND...: unbinds the device from its driver and binds it again while a
# program uses mlx5dv; FILE has the results of its calls.
lose_device() {
    file=$1
    shift
    device=$(basename "$(readlink -f /sys/class/infiniband/$RDMA_DEV/device)")
    "$@" /share/programs/failure > $file 2>&1 &
    program=$!
    until_true 60 grep -q ready $file || return 1
    echo $device > /sys/bus/pci/drivers/mlx5_core/unbind
    echo $device > /sys/bus/pci/drivers/mlx5_core/bind
    reactivate || return 1
    kill -USR1 $(pidof failure)
    wait $program
    status=$?
    tail -n 3 $file
    return $status
}
check "a lost device: a program with mlx5dv" \
    lose_device /tmp/failure.stock env -u RDMAV_DRIVERS
library=/opt/ringverbs/libmlx5.so.1
if [ -e $library ]; then
    check "a lost device: mlx5dv with ringverbs" \
        lose_device /tmp/failure.ours rxe-driver in-place $library --
    check "a lost device: mlx5dv with ringverbs as with rdma-core" \
        diff /tmp/failure.stock /tmp/failure.ours
fi
check "after all: a ping-pong" pingpong
