# Linux's storage over RDMA between two HCAs of a guest: NVMe over Fabrics, NFS and iSER. The
# server has the second HCA, the client the first. /share/packages has their programs.
[ -n "$RDMA_ADDR1" ] || { echo "@fail storage: there is only one HCA"; exit 1; }
tar -C /share/packages -c . | tar -C / -x --keep-directory-symlink || exit 1

# Both addresses are local: routes that send packets between them over the network.
one=$(ls /sys/class/infiniband/$RDMA_DEV/device/net | head -n 1)
two=$(ls /sys/class/infiniband/$RDMA_DEV1/device/net | head -n 1)
for netdev in all $one $two; do
    echo 1 > /proc/sys/net/ipv4/conf/$netdev/accept_local
    echo 0 > /proc/sys/net/ipv4/conf/$netdev/rp_filter
done
ip rule add pref 100 lookup local
ip rule del pref 0
ip rule add pref 70 to $RDMA_ADDR1 iif lo lookup 70
ip rule add pref 71 to $RDMA_ADDR iif lo lookup 71
ip route replace $RDMA_ADDR1/32 dev $one src $RDMA_ADDR table 70
ip route replace $RDMA_ADDR/32 dev $two src $RDMA_ADDR1 table 71
busybox ping -c 1 -w 20 -I $RDMA_ADDR $RDMA_ADDR1 > /tmp/ping 2>&1

# check NAME COMMAND...: a case that passes if the command does. Its errors are shown.
check() {
    case=$1
    shift
    if "$@" > /tmp/check 2>&1; then
        echo "@pass $case"
    else
        echo "@fail $case: $(tail -n 3 /tmp/check | tr '\n' ' ')"
        return 1
    fi
}
# until_true SECONDS COMMAND...: whether the command succeeds within that time.
until_true() {
    tries=$(($1 * 10))
    shift
    while [ $tries -gt 0 ]; do
        "$@" > /tmp/tried 2>&1 && return
        sleep 0.1
        tries=$((tries - 1))
    done
    return 1
}
put() { printf %s "$1" > "$2"; }
SIZE=16777216
dd if=/dev/urandom of=/tmp/data bs=1M count=16 2> /dev/null

# write_and_read FILE: writes the data, reads it again past the page cache, and compares it.
write_and_read() {
    dd if=/tmp/data of=$1 bs=1M oflag=direct conv=notrunc || return 1
    dd if=$1 of=/tmp/read bs=1M count=16 iflag=direct || return 1
    cmp /tmp/data /tmp/read || return 1
    # Requests that fit into a message, and odd parts.
    dd if=/tmp/data of=$1 bs=4096 count=64 oflag=direct conv=notrunc || return 1
    dd if=$1 of=/tmp/read bs=12288 count=20 iflag=direct || return 1
    cmp -n 245760 /tmp/data /tmp/read
}
# same FILE: whether the server's copy is the data.
same() { cmp -n $SIZE /tmp/data "$1"; }

# NVMe over Fabrics, from a disk in memory.
nvmet=/sys/kernel/config/nvmet
nvme_target() {
    modprobe -a brd nvmet nvmet-rdma nvme-rdma || return 1
    modprobe -r brd && modprobe brd rd_nr=2 rd_size=32768 || return 1
    mkdir $nvmet/subsystems/disk $nvmet/subsystems/disk/namespaces/1 $nvmet/ports/1 || return 1
    put 1 $nvmet/subsystems/disk/attr_allow_any_host
    put /dev/ram0 $nvmet/subsystems/disk/namespaces/1/device_path
    put 1 $nvmet/subsystems/disk/namespaces/1/enable || return 1
    put rdma $nvmet/ports/1/addr_trtype
    put ipv4 $nvmet/ports/1/addr_adrfam
    put $RDMA_ADDR1 $nvmet/ports/1/addr_traddr
    put 4420 $nvmet/ports/1/addr_trsvcid
    ln -s $nvmet/subsystems/disk $nvmet/ports/1/subsystems/disk
}
nvme_connect() {
    timeout 120 nvme connect -t rdma -a $RDMA_ADDR1 -s 4420 -n disk --nr-io-queues=2 --queue-size=32 &&
        until_true 20 test -b /dev/nvme0n1
}
nvme_remove() {
    rm $nvmet/ports/1/subsystems/disk &&
        rmdir $nvmet/ports/1 $nvmet/subsystems/disk/namespaces/1 $nvmet/subsystems/disk
}
if check "nvme: the target" nvme_target && check "nvme: connects" nvme_connect; then
    check "nvme: 16 MiB each way" write_and_read /dev/nvme0n1
    # The target's disk, from memory.
    check "nvme: the target's data" same /dev/ram0
    check "nvme: disconnects" timeout 120 nvme disconnect -n disk
    check "nvme: connects again" nvme_connect
    check "nvme: the data after that" cmp -n $SIZE /tmp/data /dev/nvme0n1
    check "nvme: the target goes away" nvme_remove
    check "nvme: disconnects from what is gone" timeout 90 nvme disconnect -n disk
fi

# NFS.
nfs_server() {
    mkdir -p /run/rpcbind /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /tmp/exported /mnt/nfs
    touch /etc/exports /var/lib/nfs/etab /var/lib/nfs/rmtab
    modprobe -a nfsd rpcrdma || return 1
    mount -t nfsd nfsd /proc/fs/nfsd
    mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs
    mount -t tmpfs tmpfs /tmp/exported
    # The packages' scripts, which add it, have not run.
    grep -q ^_rpc: /etc/passwd || echo _rpc:x:901:65534::/run/rpcbind:/bin/false >> /etc/passwd
    rpcbind && until_true 10 rpcinfo -p 127.0.0.1 || return 1
    exportfs -o rw,no_root_squash,insecure,fsid=0 '*:/tmp/exported' || return 1
    rpc.mountd || return 1
    rpc.nfsd --no-udp --grace-time 10 --lease-time 10 4 || return 1
    put "rdma 20049" /proc/fs/nfsd/portlist
}
nfs_mount() {
    timeout 90 mount -t nfs -o "rdma,port=20049,nolock,$1" $RDMA_ADDR1:$2 /mnt/nfs
}
nfs_over() {
    check "nfs: mounts, version $1" nfs_mount "vers=$1" "$2" || return
    check "nfs: 16 MiB each way, version $1" write_and_read /mnt/nfs/data
    check "nfs: the server's data, version $1" same /tmp/exported/data
    check "nfs: by the page cache, version $1" cp /tmp/data /mnt/nfs/copy
    check "nfs: unmounts, version $1" umount /mnt/nfs
    check "nfs: the server's copy, version $1" same /tmp/exported/copy
    rm -f /tmp/exported/data /tmp/exported/copy
}
if check "nfs: the server" nfs_server; then
    nfs_over 4.2 /
    nfs_over 3 /tmp/exported
    check "nfs: the server ends" rpc.nfsd 0
fi

# iSER.
target=/sys/kernel/config/target
disk=iqn.2003-01.org.example:disk
iser_target() {
    modprobe -a target_core_mod target_core_iblock iscsi_target_mod ib_isert ib_iser || return 1
    [ -d /sys/kernel/config/target ] || mount -t configfs none /sys/kernel/config
    mkdir -p $target/core/iblock_0/ram $target/iscsi/$disk/tpgt_1/lun/lun_0 || return 1
    put udev_path=/dev/ram1 $target/core/iblock_0/ram/control
    put 1 $target/core/iblock_0/ram/enable || return 1
    portal=$target/iscsi/$disk/tpgt_1
    ln -s $target/core/iblock_0/ram $portal/lun/lun_0/ram || return 1
    put 0 $portal/attrib/authentication
    put 1 $portal/attrib/generate_node_acls
    put 0 $portal/attrib/demo_mode_write_protect
    mkdir "$portal/np/$RDMA_ADDR1:3260" && put 1 "$portal/np/$RDMA_ADDR1:3260/iser" || return 1
    put 1 $portal/enable
}
iser_login() {
    mkdir -p /run/lock/iscsi /etc/iscsi
    echo "InitiatorName=iqn.2003-01.org.example:client" > /etc/iscsi/initiatorname.iscsi
    modprobe sd_mod
    pidof iscsid || iscsid
    until_true 10 iscsiadm -m iface || return 1
    iscsiadm -m node -T $disk -p $RDMA_ADDR1:3260 -I iser -o new
    # The target registers hundreds of keys for a connection, each by a command: more than
    # iscsid's 15 s on a busy machine. A client that has gone is EINVAL in rdma_create_qp.
    iscsiadm -m node -T $disk -p $RDMA_ADDR1:3260 -I iser -o update \
        -n 'node.conn[0].timeo.login_timeout' -v 100 || return 1
    timeout 120 iscsiadm -m node -T $disk -p $RDMA_ADDR1:3260 --login || return 1
    until_true 30 test -b /dev/sda
}
iser_logout() {
    timeout 120 iscsiadm -m node -T $disk -p $RDMA_ADDR1:3260 --logout
}
# Waits until the target has released its queue pair and keys, which Linux 6.12 does after the
# logout, even if mlx5_ib has been unloaded by then.
iser_remove() {
    put 0 $portal/enable && rmdir "$portal/np/$RDMA_ADDR1:3260" &&
        until_true 60 modprobe -r ib_isert
}
if check "iser: the target" iser_target && check "iser: logs in" iser_login; then
    check "iser: 16 MiB each way" write_and_read /dev/sda
    check "iser: the target's data" same /dev/ram1
    check "iser: logs out" iser_logout
    check "iser: the target goes away" iser_remove
fi

# Warnings of the protocols. The rest of the script prints those of the drivers.
known='MODE SENSE: unimplemented|db_root: cannot open|Rounding down aligned max_sectors'
known="$known|Property Set error|starting error recovery|client tracking operations"
known="$known|state recovery directory|expired client state directory"
warnings() {
    ! dmesg -l emerg,alert,crit,err,warn | grep -E 'nvme|rpcrdma|svc|NFS|RPC|iscsi|iser|target_|WARNING|BUG' |
        grep -vE "$known"
}
check "no warnings of the kernel" warnings
