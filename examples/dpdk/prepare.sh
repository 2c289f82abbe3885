#!/bin/sh
# Copies DPDK's testpmd and its mlx5 driver from Debian packages for this system to a
# directory for `cargo xtask softhca --share`.
set -eu
to=${1:?directory}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$to/root" "$to/libraries"
to=$(cd "$to" && pwd)
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
cd "$packages"

driver=$(apt-cache search --names-only '^librte-net-mlx5-[0-9]+$' | cut -d' ' -f1)
apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances dpdk-dev "$driver" | grep -E '^(dpdk|librte|libpcap)' | sort -u |
    xargs apt-get download -q
for package in *.deb; do dpkg -x "$package" "$to/root"; done

# Shared libraries that the guest may lack.
lib=$to/root/usr/lib/$(gcc -print-multiarch 2>/dev/null || echo x86_64-linux-gnu)
drivers=$(echo "$lib"/dpdk/pmds-*)
missing=$(LD_LIBRARY_PATH=$lib:$drivers ldd "$to/root/usr/bin/dpdk-testpmd" "$drivers"/*mlx5* |
    grep 'not found' || true)
[ -z "$missing" ] || { echo "install these libraries here: $missing" >&2; exit 1; }
LD_LIBRARY_PATH=$lib:$drivers ldd "$to/root/usr/bin/dpdk-testpmd" "$drivers"/*mlx5* |
    sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(lib(c|m|dl|pthread|rt|gcc_s|ibverbs|mlx5|rdmacm|nl-.*)\.so|ld-)|/root/usr/' |
    xargs -I{} cp -L {} "$to/libraries"
cp "$here/testpmd.sh" "$to"
