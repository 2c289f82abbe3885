#!/bin/sh
# A Ceph monitor, an OSD in memory and clients over RDMA (async+rdma), one process each: an
# object is written, read back and compared.
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/ceph.sh
# Packages: apt-get install ceph-mon ceph-osd ceph-common uuid-runtime
set -eu
folder=$(mktemp -d)
daemons=
trap 'kill $daemons 2>/dev/null; wait; rm -rf "$folder"' EXIT
id=$(uuidgen)
port=$((16789 + $$ % 1000))
cat >"$folder/ceph.conf" <<CONF
[global]
fsid = $id
mon_host = [v2:127.0.0.1:$port]
mon_initial_members = a
ms_type = async+rdma
ms_async_rdma_device_name = mlx5_0
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
keyring = $folder/keyring
# A client that gives up a connection before it is made does not end, as while it registers
# 640 MiB on a busy machine.
mon_client_hunt_interval = 60
ms_async_rdma_receive_buffers = 512
ms_async_rdma_receive_queue_len = 512
ms_async_rdma_send_buffers = 256
mon_data = $folder/mon
mon_data_avail_crit = 0
osd_data = $folder/osd
osd_objectstore = memstore
osd_pool_default_size = 1
osd_crush_chooseleaf_type = 0
run_dir = $folder
admin_socket = $folder/\$name.asok
log_file = $folder/\$name.log
CONF
conf="-c $folder/ceph.conf"

# They warn of the limit of locked memory and of connections that end.
client() { timeout 60 "$@" 2>>"$folder/warnings" || { cat "$folder/warnings"; exit 1; }; }

ceph-authtool --create-keyring "$folder/keyring" --gen-key -n mon. --cap mon 'allow *' >&2
monmaptool --create --addv a "[v2:127.0.0.1:$port]" --fsid "$id" "$folder/map" >&2
ceph-mon $conf --mkfs -i a --monmap "$folder/map" --keyring "$folder/keyring"
ceph-mon $conf -i a -f 2>"$folder/mon.out" & daemons=$!
# Nor does one that comes before the monitor's second election, for its first release.
ready() {
    status=$(env -u LD_PRELOAD ceph --admin-daemon "$folder/mon.a.asok" mon_status 2>&1)
    echo "$status" | grep -q leader && ! echo "$status" | grep -q '"min_mon_release": 0'
}
until ready; do sleep 1; done
mkdir "$folder/osd"
osd=$(uuidgen)
client ceph $conf osd new "$osd"
ceph-osd $conf -i 0 --mkfs --osd-uuid "$osd" 2>"$folder/mkfs.out"
ceph-osd $conf -i 0 -f 2>"$folder/osd.out" & daemons="$daemons $!"
client ceph $conf osd crush add osd.0 1 root=default host=host >&2
client ceph $conf osd pool create pool 8 >&2
head -c 20000000 /dev/urandom >"$folder/data"
client rados $conf -p pool put object "$folder/data"
client rados $conf -p pool get object "$folder/back"
cmp "$folder/data" "$folder/back"
echo "object right"
client rados $conf -p pool bench 3 write | grep Bandwidth
