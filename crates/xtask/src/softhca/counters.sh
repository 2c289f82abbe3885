# Counts the WQEs that the HCA receives by BlueFlame and with inline data: 200 writes each
# way, one at a time. With PLUGIN, also with ours.

# latency VARIABLES OPTIONS...: runs ib_write_lat with itself.
latency() {
    variables=$1
    shift
    echo "@mark"
    sleep 1
    env $variables timeout 60 ib_write_lat -F -d $RDMA_DEV -x $RDMA_GID -s 64 -n 200 \
        -p 18590 "$@" > /tmp/server 2>&1 &
    sleep 2
    env $variables timeout 60 ib_write_lat -F -d $RDMA_DEV -x $RDMA_GID -s 64 -n 200 \
        -p 18590 "$@" 127.0.0.1 > /tmp/client 2>&1 && wait $! ||
        echo "@fail $*: $(tail -n 2 /tmp/client /tmp/server | tr '\n' ' ')"
}
# The driver tests BlueFlame when the device is opened first.
ibv_devinfo -d $RDMA_DEV > /tmp/devinfo
# On a busy machine a BlueFlame copy may arrive in parts, and is then taken for a doorbell.
latency MLX5_SHUT_UP_BF=0 -I 64
echo "@counted sends_inline=400- blue_flames=20- : inline, by BlueFlame"
latency MLX5_SHUT_UP_BF=0 -I 0
echo "@counted sends_inline=0-0 blue_flames=20- : not inline, by BlueFlame"
latency MLX5_SHUT_UP_BF=1 -I 64
echo "@counted sends_inline=400- blue_flames=0-0 doorbells=400- : inline, by doorbell"
if [ -n "$PLUGIN" ]; then
    ours="LD_PRELOAD=$PLUGIN-rdmav34.so RDMAV_DRIVERS=$PLUGIN"
    latency "$ours" -I 64
    echo "@counted sends_inline=400- blue_flames=20- : inline, by BlueFlame, with ours"
    latency "$ours" -I 0
    echo "@counted sends_inline=0-0 blue_flames=20- : not inline, by BlueFlame, with ours"
fi
