#!/bin/sh
# Migrates 256 MiB of random memory between two QEMU processes (7.2) over TCP and RDMA,
# without and with all pages pinned, and compares the memory:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/qemu-migration.sh [ADDRESS]
# On an InfiniBand port ADDRESS is that of a network interface.
# Packages: apt-get install qemu-system-x86 python3
set -eu
exec python3 - "${1:-127.0.0.1}" <<'PYTHON'
import filecmp, json, os, socket, subprocess, sys, tempfile, time

MEGABYTES = 256


class Qemu:
    def __init__(self, folder, name, backend, *arguments):
        path = os.path.join(folder, name)
        self.process = subprocess.Popen(
            ["qemu-system-x86_64", "-machine", "q35,accel=tcg,memory-backend=ram0", "-m",
             str(MEGABYTES), "-object", f"{backend},id=ram0,size={MEGABYTES}M", "-nodefaults",
             "-display", "none", "-S", "-qmp", f"unix:{path},server,nowait", *arguments])
        link = socket.socket(socket.AF_UNIX)
        for _ in range(300):
            try:
                link.connect(path)
                break
            except OSError:
                time.sleep(0.1)
        self.file = link.makefile("rw")
        self.file.readline()
        self("qmp_capabilities")

    def __call__(self, command, **arguments):
        self.file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.file.flush()
        while True:
            answer = json.loads(self.file.readline())
            if "event" not in answer:
                return answer.get("return", answer)


def migrate(scheme, pin, port):
    with tempfile.TemporaryDirectory() as folder:
        memory = os.path.join(folder, "memory")
        with open(memory, "wb") as file:
            file.write(os.urandom(MEGABYTES << 20))
        backend = f"memory-backend-file,mem-path={memory},share=off"
        source = Qemu(folder, "source", backend)
        target = Qemu(folder, "target", "memory-backend-ram", "-incoming", "defer")
        for side in source, target:
            side("migrate-set-capabilities",
                 capabilities=[{"capability": "rdma-pin-all", "state": pin}])
        source("migrate-set-parameters", **{"max-bandwidth": 100 << 30})
        uri = f"{scheme}:{sys.argv[1]}:{port}"
        target("migrate-incoming", uri=uri)
        start = time.time()
        source("migrate", uri=uri)
        while (state := source("query-migrate").get("status")) not in ("completed", "failed"):
            assert time.time() < start + 300
            time.sleep(0.02)
        seconds = time.time() - start
        for side, name in (source, "a"), (target, "b"):
            side("pmemsave", val=0, size=MEGABYTES << 20, filename=os.path.join(folder, name))
        same = filecmp.cmp(os.path.join(folder, "a"), os.path.join(folder, "b"), False)
        for side in source, target:
            side("quit")
            side.process.wait()
        print(f"{scheme} pin-all={pin}: {state}, {seconds:.2f} s, same memory: {same}", flush=True)
        return state == "completed" and same


cases = [("tcp", False), ("rdma", False), ("rdma", True)]
results = [migrate(scheme, pin, 24000 + number) for number, (scheme, pin) in enumerate(cases)]
sys.exit(not all(results))
PYTHON
