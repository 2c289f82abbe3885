#!/bin/sh
# tgtd (1.0.85) exports a disk over TCP and iSER, QEMU's initiator (libiscsi 1.19) reads and
# writes 64 MiB of it, and the data are compared:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/tgt-iser.sh
# Packages: apt-get install tgt qemu-utils qemu-block-extra
set -eu
folder=$(mktemp -d)
export TGT_IPC_SOCKET="$folder/ipc"
size=67108864
initiator=iqn.2008-11.org.linux-kvm
head -c $size /dev/urandom >"$folder/disk"
# iSER listens on port 3260: tgtd's option for another is refused by a stale errno.
tgtd -f -C 0 --iscsi portal=127.0.0.1:3261 >"$folder/log" 2>&1 &
daemon=$!
# tgtd ends by no signal but this one while it has targets.
trap 'kill -KILL $daemon; rm -rf "$folder"' EXIT
sleep 2
number=0
for kind in iscsi iser; do
    number=$((number + 1))
    tgtadm --lld $kind --mode target --op new --tid $number -T iqn.2020-01.test:$kind
    tgtadm --lld $kind --mode logicalunit --op new --tid $number --lun 1 -b "$folder/disk"
    tgtadm --lld $kind --mode target --op bind --tid $number -I ALL
    tgtadm --lld $kind --mode target --op bind --tid $number --initiator-name $initiator
done
for kind in tcp iser iser; do
    case $kind in tcp) port=3261 target=iscsi ;; *) port=3260 target=iser ;; esac
    # libiscsi refuses more than 512 KiB at once over iSER.
    image="driver=blkdebug,max-transfer=262144,image.driver=iscsi,image.transport=$kind"
    image="$image,image.portal=127.0.0.1:$port,image.target=iqn.2020-01.test:$target,image.lun=1"
    image="$image,image.initiator-name=$initiator"
    start=$(date +%s%N)
    qemu-img convert --image-opts -O raw "$image" "$folder/read"
    middle=$(date +%s%N)
    cmp "$folder/read" "$folder/disk"
    head -c $size /dev/urandom >"$folder/new"
    before=$(date +%s%N)
    qemu-img convert -n --target-image-opts -f raw "$folder/new" "$image"
    end=$(date +%s%N)
    cmp "$folder/new" "$folder/disk"
    echo "$kind: read $(((middle - start) / 1000000)) ms, write $(((end - before) / 1000000)) ms"
done
