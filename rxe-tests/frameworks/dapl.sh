#!/bin/sh
# dtest of DAPL (2.1.10), over rdma_cm and over sockets:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/dapl.sh
# Packages: apt-get install dapl2-utils libdapl2
set -eu
DAT_OVERRIDE=$(mktemp)
export DAT_OVERRIDE
trap 'rm -f "$DAT_OVERRIDE"' EXIT
cat >"$DAT_OVERRIDE" <<'CONF'
rdma_cm u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 "lo 0" ""
sockets u2.0 nonthreadsafe default libdaploscm.so.2 dapl.2.0 "mlx5_0 1" ""
CONF
for provider in rdma_cm sockets; do
    dtest -P $provider >/dev/null &
    # It listens on TCP port 15828 for the client's parameters.
    tries=300
    until grep -q ':3DD4 0*:0000 0A' /proc/net/tcp || [ $((tries -= 1)) = 0 ]; do sleep 0.1; done
    dtest -P $provider -h 127.0.0.1 | grep -E 'bi-direction|Test Complete'
    wait
done
