#!/bin/sh
# DLSlime (0.1.23, PyPI) writes and reads 64 MiB of another process, sends and receives, and
# compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/dlslime.sh
# Packages: pip install dlslime numpy
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/peer.py" <<'PYTHON'
import os, pickle, sys, time
import numpy as np
import dlslime

SIZE = 64 << 20
role, folder = sys.argv[1:]
other = {"target": "initiator", "initiator": "target"}[role]


def data(of):
    return np.random.default_rng(ord(of[0])).integers(0, 256, SIZE, dtype=np.uint8)


def publish(name, value):
    with open(os.path.join(folder, f"{role}-{name}-"), "wb") as file:
        pickle.dump(value, file)
    os.rename(file.name, file.name[:-1])


def receive(name):
    path = os.path.join(folder, f"{other}-{name}")
    while not os.path.exists(path):
        time.sleep(0.01)
    return pickle.load(open(path, "rb"))


assert dlslime.available_nic() == ["mlx5_0"], dlslime.available_nic()
endpoint = dlslime.RDMAEndpoint("mlx5_0", 1, "auto", 2)
memory = data(role)
key = endpoint.register_memory_region("memory", memory.ctypes.data, 0, SIZE)
publish("info", (endpoint.endpoint_info(), endpoint.mr_info()))
info, regions = receive("info")
endpoint.connect(info)
there = endpoint.register_remote_memory_region("memory", regions["memory"])
publish("connected", None)
receive("connected")
if role == "initiator":
    def transfer(call, length, count=1):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            assert call([(key, there, 0, 0, length)], None).wait() == 0
            times.append(time.perf_counter() - start)
        return sorted(times)[count // 2]

    read = transfer(endpoint.read, SIZE)
    right = np.array_equal(memory, data("target"))
    memory[:] = data("initiator")
    write = transfer(endpoint.write, SIZE)
    small = transfer(endpoint.write, 4096, 500)
    print(f"read right: {right}, {SIZE / read / 1e6:.0f} MB/s, "
          f"write {SIZE / write / 1e6:.0f} MB/s, 4 KiB in {small * 1e6:.0f} us")
    publish("done", None)
    receive("checked")
    # An offset of the sender is ignored.
    endpoint.send((memory.ctypes.data + (1 << 20), 0, 1 << 20)).wait()
    receive("received")
else:
    receive("done")
    right = np.array_equal(memory, data("initiator"))
    print(f"write right: {right}")
    memory[:] = 0
    received = endpoint.recv((memory.ctypes.data, 0, 1 << 20))
    publish("checked", None)
    received.wait()
    right &= np.array_equal(memory[: 1 << 20], data("initiator")[1 << 20 : 2 << 20])
    print(f"message right: {right}")
    publish("received", None)
sys.stdout.flush()
os._exit(not right)
PYTHON
python3 "$folder/peer.py" target "$folder" &
python3 "$folder/peer.py" initiator "$folder"
wait $!
