# Loads the drivers, waits for the RDMA devices, and assigns addresses to their network
# devices, on InfiniBand those of IPoIB. Sets in the environment:
#   RDMA_DEV   the device; RDMA_DEV1 ... the others
#   RDMA_GID   the index of a RoCE v2 GID of its IPv4 address; 0 on InfiniBand
#   RDMA_ADDR  that address
modprobe ib_uverbs
modprobe ib_umad 2> /dev/null
modprobe rdma_ucm
# Without the driver's cache of thousands of memory keys, each of which is a command.
modprobe mlx5_core prof_sel=0 || exit 1
modprobe mlx5_ib || exit 1
tries=0
while [ -z "$(ls /sys/class/infiniband 2> /dev/null)" ] && [ $tries -lt 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
if grep -q InfiniBand /sys/class/infiniband/*/ports/1/link_layer 2> /dev/null; then
    modprobe ib_ipoib
fi
n=
number=1
for dev in $(ls /sys/class/infiniband 2> /dev/null); do
    export RDMA_DEV$n="$dev" RDMA_GID$n=0
    netdev=$(ls /sys/class/infiniband/$dev/device/net 2> /dev/null | head -1)
    layer=$(cat /sys/class/infiniband/$dev/ports/1/link_layer)
    if [ "$layer" = InfiniBand ] && [ -n "$netdev" ]; then
        export RDMA_ADDR$n=192.168.78.$number
        ip link set "$netdev" up
        ip addr add 192.168.78.$number/24 dev "$netdev"
        # Waits until IPoIB has joined the broadcast group.
        tries=0
        while [ "$(cat /sys/class/net/$netdev/carrier)" != 1 ] && [ $tries -lt 100 ]; do
            sleep 0.1
            tries=$((tries + 1))
        done
    elif [ "$layer" = Ethernet ] && [ -n "$netdev" ]; then
        export RDMA_ADDR$n=192.168.78.$number
        ip link set "$netdev" up
        ip addr add 192.168.78.$number/24 dev "$netdev"
        tries=0
        index=
        while [ -z "$index" ] && [ $tries -lt 100 ]; do
            for gid in /sys/class/infiniband/$dev/ports/1/gids/*; do
                i=${gid##*/}
                case "$(cat "$gid" 2> /dev/null)" in
                *:ffff:c0a8:4e*)
                    type=$(cat /sys/class/infiniband/$dev/ports/1/gid_attrs/types/$i 2> /dev/null)
                    [ "$type" = "RoCE v2" ] && index=$i ;;
                esac
            done
            [ -z "$index" ] && sleep 0.1
            tries=$((tries + 1))
        done
        export RDMA_GID$n="${index:-0}"
    fi
    n=$number
    number=$((number + 1))
done
if [ -z "$RDMA_DEV" ]; then
    echo "no RDMA device appeared" >&2
    dmesg | tail -40
    exit 1
fi
