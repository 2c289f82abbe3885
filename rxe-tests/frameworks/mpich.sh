#!/bin/sh
# MPICH's collective operations between two processes over UCX, with RC and UD:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/mpich.sh
# Packages: apt-get install mpich libmpich-dev
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
source=$(dirname "$0")/../../crates/preload/tests/c/collectives.c
env -u LD_PRELOAD mpicc.mpich -O1 -o "$folder/collectives" "$source"
for transport in rc ud; do
    # Without shared memory, and with an error in place of TCP.
    UCX_TLS=$transport,self mpiexec.mpich -n 2 "$folder/collectives"
    echo "$transport: data right"
done
