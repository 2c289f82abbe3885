#!/bin/sh
# An actor of Monarch (torchmonarch 0.7.0, PyPI, with libibverbs of its own) reads and writes
# 16 MiB of an actor in another process, and compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/torchmonarch.sh
# Packages: pip install torchmonarch numpy
set -eu
# It takes a GID of RoCE v2 only of an address that is no loopback address.
export RINGVERBS_GIDS=v1,v2,v1-ipv6,v2-ipv6
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/actors.py" <<'PYTHON'
import os, sys, time
import numpy as np
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer, get_rdma_backend

SIZE = 16 << 20


def data(of):
    return np.random.default_rng(of).integers(0, 256, SIZE, dtype=np.uint8)


class Owner(Actor):
    def __init__(self):
        self.memory = data(1)
        self.buffer = RDMABuffer(memoryview(self.memory))

    @endpoint
    def get(self):
        return self.buffer, get_rdma_backend()

    @endpoint
    def right(self):
        return np.array_equal(self.memory, data(2))


class Peer(Actor):
    @endpoint
    async def transfer(self, buffer):
        memory = np.zeros(SIZE, dtype=np.uint8)
        start = time.perf_counter()
        await buffer.read_into(memoryview(memory))
        middle = time.perf_counter()
        right = np.array_equal(memory, data(1))
        memory[:] = data(2)
        before = time.perf_counter()
        await buffer.write_from(memoryview(memory))
        end = time.perf_counter()
        return right, SIZE / (middle - start) / 1e6, SIZE / (end - before) / 1e6


def spawn(actor):
    processes = this_host().spawn_procs(per_host={"gpus": 1})
    return processes.spawn(actor.__name__, actor)


owner, peer = spawn(Owner), spawn(Peer)
buffer, backend = owner.get.call_one().get()
read, reading, writing = peer.transfer.call_one(buffer).get()
written = owner.right.call_one().get()
print(f"{backend}: read right: {read}, {reading:.0f} MB/s, "
      f"write right: {written}, {writing:.0f} MB/s")
sys.stdout.flush()
os._exit(not (backend == "ibverbs" and read and written))
PYTHON
python3 "$folder/actors.py"
