#!/bin/sh
# PeerCache's transfer engine (0.8.4, PyPI) reads and writes 32 MiB of another process, and
# compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/peercache.sh
# Packages: apt-get install g++ libibverbs-dev librdmacm-dev; pip install peercache numpy
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/peer.py" <<'PYTHON'
import os, sys, time
import numpy as np
from peercache._peercache import ReadRequest, TransferEngine

SIZE, STEP = 32 << 20, 1 << 20
role, folder = sys.argv[1:]
ready, done = (os.path.join(folder, name) for name in ("ready", "done"))


def data(of):
    return np.random.default_rng(ord(of[0])).integers(0, 256, SIZE, dtype=np.uint8)


with open("/sys/class/infiniband/mlx5_0/ports/1/link_layer") as layer:
    gid = 3 if layer.read().strip() == "Ethernet" else 0
engine = TransferEngine(["mlx5_0"], 1, gid, "127.0.0.1", 0)
memory = data(role)
here = memory.ctypes.data
key = engine.register_mr(here, SIZE)[0].rkey
if role == "target":
    with open(ready + "-", "w") as file:
        file.write(f"{engine.local_endpoint()} {here} {key}")
    os.rename(ready + "-", ready)
    while not os.path.exists(done):
        time.sleep(0.05)
    right = np.array_equal(memory, data("initiator"))
else:
    while not os.path.exists(ready):
        time.sleep(0.05)
    peer, there, key = open(ready).read().split()
    there, key, offsets = int(there), int(key), range(0, SIZE, STEP)
    reads = [ReadRequest(peer, here + at, there + at, key, STEP) for at in offsets]
    right = all(engine.batch_read(reads)) and np.array_equal(memory, data("target"))
    memory[:] = data("initiator")
    count = len(offsets)
    right &= all(engine.batch_write_v(
        [peer] * count, [here + at for at in offsets], [there + at for at in offsets],
        [key] * count, [STEP] * count))
    open(done, "w").close()
print(f"{role}: data right: {right}", flush=True)
os._exit(not right)
PYTHON
python3 "$folder/peer.py" target "$folder" &
target=$!
python3 "$folder/peer.py" initiator "$folder"
wait $target
