#!/bin/sh
# Builds fabtests from libfabric's source tree, in the installed version, and runs its unit,
# functional and short tests of a provider between processes of this host:
#   ringverbs run --embedded [--devices mlx5] -- \
#     rxe-tests/frameworks/fabtests.sh SOURCE ADDRESS verbs|verbs\;ofi_rxm
# ADDRESS is that of a network interface of this host, not a loopback address. Packages:
# apt-get install gcc make autoconf automake libtool libfabric-dev libfabric-bin
set -eu
source=$(cd "$1/fabtests" && pwd)
address=$2 provider=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$source"
if [ ! -x functional/fi_msg ]; then
    env -u LD_PRELOAD sh -c './autogen.sh && ./configure && make' >"$work/build" 2>&1 ||
        { cat "$work/build"; exit 1; }
fi
env -u LD_PRELOAD make install "prefix=$work/fabtests" >/dev/null
# runfabtests.sh starts both ends by ssh; here both are this host.
cat >"$work/ssh" <<'SSH'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    [ "$1" = -o ] && shift
    shift
done
shift
exec sh -c "$*"
SSH
chmod +x "$work/ssh"
case $provider in
*ofi_rxm) exclude=ofi_rxm/ofi_rxm.exclude ;;
*) exclude=verbs/verbs.exclude ;;
esac
PATH=$work:$PATH bash scripts/runfabtests.sh -t unit,functional,short -T 60 -v \
    -f "test_configs/$exclude" -p "$work/fabtests/bin" "$provider" "$address" "$address"
