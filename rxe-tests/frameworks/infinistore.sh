#!/bin/sh
# InfiniStore (0.2.35, PyPI) keeps 64 MiB of a client, which writes and reads it in blocks of
# 64 KiB and compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/infinistore.sh
# With a uvloop of another libuv than its own it aborts.
# Packages: pip install infinistore uvloop==0.21.0 numpy
set -eu
folder=$(mktemp -d)
case $(cat /sys/class/infiniband/mlx5_0/ports/1/link_layer) in
Ethernet) link=Ethernet ;;
*) link=IB ;;
esac
cat >"$folder/server.py" <<'PYTHON'
import infinistore.server

# This needs a privilege: to be spared when memory runs out.
infinistore.server.prevent_oom = lambda: None
infinistore.server.main()
PYTHON
python3 "$folder/server.py" --host 127.0.0.1 --service-port 22346 --manage-port 18081 \
    --prealloc-size 1 --minimal-allocate-size 64 --dev-name mlx5_0 --link-type $link \
    --log-level error >"$folder/server" 2>&1 &
server=$!
trap 'kill $server; wait $server || :; rm -rf "$folder"' EXIT
cat >"$folder/client.py" <<'PYTHON'
import asyncio, os, sys, time
import numpy as np
import infinistore

SIZE, BLOCK = 64 << 20, 64 << 10
config = infinistore.ClientConfig(
    host_addr="127.0.0.1", service_port=22346, connection_type=infinistore.TYPE_RDMA,
    dev_name="mlx5_0", link_type=sys.argv[1], log_level="error")
connection = infinistore.InfinityConnection(config)
connection.connect()
data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
memory = data.copy()
connection.register_mr(memory.ctypes.data, SIZE)
blocks = [(str(offset), offset) for offset in range(0, SIZE, BLOCK)]


def transfer(call, blocks):
    start = time.perf_counter()
    asyncio.run(call(blocks, BLOCK, memory.ctypes.data))
    return SIZE / (time.perf_counter() - start) / 1e6


write = transfer(connection.rdma_write_cache_async, blocks)
memory[:] = 0
# In reverse order, so that no block can be right by accident.
read = transfer(connection.rdma_read_cache_async, blocks[::-1])
right = np.array_equal(memory, data)
print(f"right: {right}, write {write:.0f} MB/s, read {read:.0f} MB/s")
connection.close()
sys.stdout.flush()
os._exit(not right)
PYTHON
# It listens on TCP port 22346.
tries=1200
until grep -q ':574A 0*:0000 0A' /proc/net/tcp || [ $((tries -= 1)) = 0 ]; do sleep 0.1; done
python3 "$folder/client.py" $link || { cat "$folder/server"; exit 1; }
