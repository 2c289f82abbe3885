#!/bin/sh
# dtest of DAPL (2.1.10), over rdma_cm and over sockets: RDMA writes in both directions, and
# back and forth with the data compared:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/dapl.sh
# Packages: apt-get install dapl2-utils libdapl2
set -eu
DAT_OVERRIDE=$(mktemp)
export DAT_OVERRIDE
# Otherwise what is lost while a busy machine runs other programs is repeated after 4 s.
export DAPL_ACK_TIMER=14
trap 'rm -f "$DAT_OVERRIDE"' EXIT
cat >"$DAT_OVERRIDE" <<'CONF'
rdma_cm u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 "lo 0" ""
sockets u2.0 nonthreadsafe default libdaploscm.so.2 dapl.2.0 "mlx5_0 1" ""
CONF
for provider in rdma_cm sockets; do
    # Its 1000 writes of 4 MiB take minutes on a busy machine.
    for test in "-B 100 -b 1048576" "-W -D -B 100 -b 65536"; do
        # shellcheck disable=SC2086
        dtest -P $provider $test >/dev/null &
        # It listens on TCP port 15828 for the client's parameters.
        tries=300
        until grep -q ':3DD4 0*:0000 0A' /proc/net/tcp || [ $((tries -= 1)) = 0 ]; do sleep 0.1; done
        # shellcheck disable=SC2086
        dtest -P $provider $test -h 127.0.0.1 | grep -E 'bi-direction|PINGPONG|Test Complete'
        wait $!
    done
done
