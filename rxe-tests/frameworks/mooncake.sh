#!/bin/sh
# Mooncake's transfer engine (0.3.13.post1, PyPI) reads and writes 64 MiB of another process,
# beside TCP, and compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/mooncake.sh
# Packages: pip install mooncake-transfer-engine-non-cuda numpy
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/peer.py" <<'PYTHON'
import os, sys, time
import numpy as np
from mooncake.engine import TransferEngine

SIZE = 64 << 20
role, protocol, folder = sys.argv[1:]
port = {"target": 17813, "initiator": 17814}[role]
ready, done = (os.path.join(folder, protocol + name) for name in ("-ready", "-done"))


def data(of):
    return np.random.default_rng(ord(of[0])).integers(0, 256, SIZE, dtype=np.uint8)


engine = TransferEngine()
device = "mlx5_0" if protocol == "rdma" else ""
assert engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", protocol, device) == 0
memory = data(role)
here = memory.ctypes.data
assert engine.register_memory(here, SIZE) == 0
if role == "target":
    with open(ready + "-", "w") as file:
        file.write(f"127.0.0.1:{engine.get_rpc_port()} {here}")
    os.rename(ready + "-", ready)
    while not os.path.exists(done):
        time.sleep(0.05)
    right = np.array_equal(memory, data("initiator"))
else:
    while not os.path.exists(ready):
        time.sleep(0.05)
    peer, there = open(ready).read().split()

    def transfer(call, length, count):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            assert call(peer, here, int(there), length) == 0
            times.append(time.perf_counter() - start)
        return sorted(times)[count // 2]

    read = transfer(engine.transfer_sync_read, SIZE, 5)
    right = np.array_equal(memory, data("target"))
    memory[:] = data("initiator")
    write = transfer(engine.transfer_sync_write, SIZE, 1)
    small = transfer(engine.transfer_sync_write, 4096, 500)
    print(f"{protocol}: read right: {right}, {SIZE / read / 1e6:.0f} MB/s, "
          f"write {SIZE / write / 1e6:.0f} MB/s, 4 KiB in {small * 1e6:.0f} us")
    open(done, "w").close()
sys.stdout.flush()
os._exit(not right)
PYTHON
for protocol in tcp rdma; do
    if [ $protocol = tcp ]; then export MC_FORCE_TCP=1; else unset MC_FORCE_TCP; fi
    python3 "$folder/peer.py" target $protocol "$folder" 2>/dev/null &
    python3 "$folder/peer.py" initiator $protocol "$folder" 2>/dev/null | grep right
    wait $!
done
