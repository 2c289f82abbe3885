#!/bin/sh
# fio's rdma engine (3.33) writes and reads 128 MiB, beside its engine for TCP:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/fio.sh
# Its verb "send" has an RNR retry count of 0, and fails with whatever receiver is late.
# Packages: apt-get install fio
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
port=22000
run() {
    port=$((port + 1))
    common="--port=$port --bs=64k --iodepth=16 --size=128m --name=$1"
    # shellcheck disable=SC2086
    fio --ioengine=$2 $4 $common --rw=read >"$folder/server" 2>&1 &
    server=$!
    # Until the server listens.
    # shellcheck disable=SC2086
    until
        sleep 2
        fio --ioengine=$2 $3 --hostname=127.0.0.1 $common --rw=write >"$folder/client" 2>&1
    do
        kill -0 $server 2>/dev/null || {
            cat "$folder/server" "$folder/client"
            return 1
        }
    done
    wait
    echo "$1: $(grep WRITE: "$folder/client")"
}
run tcp net --protocol=tcp "--protocol=tcp --listen"
run write rdma --verb=write ""
run read rdma --verb=read ""
