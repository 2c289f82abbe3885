#!/bin/sh
# NIXL (1.5.1, PyPI, with libibverbs, libmlx5 and UCX of its own) writes and reads 64 MiB in
# another process, beside TCP, and compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/nixl.sh
# Packages: pip install nixl-cu12
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/peer.py" <<'PYTHON'
import os, pickle, socket, struct, sys, time
import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

SIZE = 64 << 20
role, path = sys.argv[1:]


def data(of):
    return np.random.default_rng(ord(of[0])).integers(0, 256, SIZE, dtype=np.uint8)


def send(value):
    link.sendall(struct.pack("<I", len(encoded := pickle.dumps(value))) + encoded)


def receive():
    stream = link.makefile("rb", buffering=0)
    read = lambda length, got=b"": got if len(got) == length else read(length, got + stream.read(length - len(got)))
    return pickle.loads(read(struct.unpack("<I", read(4))[0]))


link = socket.socket(socket.AF_UNIX)
if role == "target":
    link.bind(path)
    link.listen()
    link = link.accept()[0]
else:
    for _ in range(600):
        try:
            link.connect(path)
            break
        except OSError:
            time.sleep(0.1)
agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
memory = data(role)
address = memory.ctypes.data
registered = agent.register_memory([(address, SIZE, 0, "")], "DRAM")
parts = [(address + at, SIZE // 16, 0) for at in range(0, SIZE, SIZE // 16)]
send((agent.get_agent_metadata(), parts))
metadata, remote = receive()
peer = agent.add_remote_agent(metadata)
if role == "target":
    receive()
    right = np.array_equal(memory, data("initiator"))
    memory[:] = data("target")
    send(right)
    receive()
else:
    def transfer(operation, local, there, count=1):
        request = agent.initialize_xfer(operation, agent.get_xfer_descs(local, "DRAM"),
                                        agent.get_xfer_descs(there, "DRAM"), peer)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            state = agent.transfer(request)
            while state == "PROC":
                state = agent.check_xfer_state(request)
            times.append(time.perf_counter() - start)
            assert state == "DONE", state
        agent.release_xfer_handle(request)
        return sorted(times)[count // 2]

    write = transfer("WRITE", parts, remote)
    send(None)
    right = receive()
    read = transfer("READ", parts, remote, 5)
    right = right and np.array_equal(memory, data("target"))
    small = transfer("WRITE", [(address, 4096, 0)], [(remote[0][0], 4096, 0)], 1000)
    print(f"right: {right}; first write {SIZE / write / 1e6:.0f} MB/s, "
          f"read {SIZE / read / 1e6:.0f} MB/s, 4 KiB written in {small * 1e6:.0f} us")
    send(None)
agent.remove_remote_agent(peer)
agent.deregister_memory(registered)
sys.stdout.flush()
# Its destructors crash at exit, also over TCP.
os._exit(not right)
PYTHON
for transports in tcp rc,ud,tcp; do
    export UCX_TLS=$transports NIXL_LOG_LEVEL=WARN
    python3 "$folder/peer.py" target "$folder/$transports" 2>/dev/null &
    printf '%s: ' $transports
    python3 "$folder/peer.py" initiator "$folder/$transports" 2>/dev/null
    wait $!
done
