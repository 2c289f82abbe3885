#!/bin/sh
# Builds and runs all examples of librpma from its source tree (1.2.0):
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/librpma.sh SOURCE
# Packages: apt-get install gcc librpma-dev libpmem-dev libprotobuf-c-dev
set -eu
examples=$(cd "$1/examples" && pwd)
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
cd "$examples"
common="$(echo common/common-[cehmu]*.c) common/common-pmem_map_file.c $(echo common/gpspm/*.c)"
for example in [01]*; do
    mkdir "$programs/$example"
    for side in client server; do
        own=$(ls "$example"/*common*.c 2>/dev/null || :)
        # shellcheck disable=SC2086
        env -u LD_PRELOAD cc -O1 -DUSE_LIBPMEM -Icommon -Icommon/gpspm "-I$example" \
            -o "$programs/$example/$side" "$example/$side.c" $common $own \
            -lrpma -libverbs -lpmem -lprotobuf-c
    done
done
bash run-all-examples.sh "$programs" 127.0.0.1 7204
