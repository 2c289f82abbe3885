#!/bin/sh
# Replaces libmlx5 in a mount namespace and restores it: replace_libmlx5.sh dpkg|folder
# XTASK DIST SCRATCH. To be run by "unshare -m". DIST has a libmlx5.so.1, which may be any
# library of that name; with the rest of "cargo xtask dist" real programs are run.
# Exit status 77: overlays cannot be mounted here.
set -eu

method=$1 xtask=$2 dist=$3 scratch=$4

# The system must not change: all changes are made in overlays.
mount --make-rprivate /
mount -t tmpfs none "$scratch" || exit 77
for folder in usr etc var; do
	mkdir "$scratch/$folder" "$scratch/$folder.work"
	mount -t overlay overlay \
		-o "lowerdir=/$folder,upperdir=$scratch/$folder,workdir=$scratch/$folder.work" "/$folder" ||
		exit 77
	touch "/$folder/.overlay"
	test -e "$scratch/$folder/.overlay"
	rm "/$folder/.overlay"
done

fail() {
	echo "FAILED: $*" >&2
	exit 1
}

libraries=/usr/lib/$(uname -m)-linux-gnu
providers=$libraries/libibverbs
provider=$(basename "$(ls "$providers"/libmlx5-rdmav*.so | head -n 1)")
stock=$(readlink -f "$libraries/libmlx5.so.1")
program=$scratch/linked
if command -v cc >/dev/null; then
	echo 'int mlx5dv_query_device(void *, void *); int main(void) { return !mlx5dv_query_device; }' |
		cc -x c - -o "$program" -Wl,--no-as-needed,--unresolved-symbols=ignore-all \
			-x none "$libraries/libmlx5.so.1"
else
	program=$(command -v ib_write_bw)
fi

# Prints files and links with contents and times, folders, and dpkg's diversions.
snapshot() {
	(
		cd "$libraries"
		for path in libmlx5.so* ringverbs ringverbs/* ringverbs/*/* libibverbs libibverbs/*mlx5* \
			.*.new libibverbs/.*.new /etc/libibverbs.d/* /etc/libibverbs.d/.*.new \
			/etc/ld.so.conf.d/* /etc/ringverbs /etc/ringverbs/*; do
			test -e "$path" || test -L "$path" || continue
			if test -d "$path"; then
				echo "$path folder"
			elif test -L "$path"; then
				stat -c '%n %A %U %Y' "$path"
				readlink "$path"
			else
				stat -c '%n %A %U %Y' "$path"
				sha256sum "$path"
			fi
		done
		ldconfig -p | grep libmlx5
		dpkg-divert --list 2>/dev/null || true
	)
}

linked() {
	readlink -f "$(ldd "$program" | awk '$1 == "libmlx5.so.1" { print $3 }')"
}

# Checks the library that programs and libibverbs load.
is_ours() {
	cmp -s "$(linked)" "$dist/libmlx5.so.1" || fail "$1: the program loads $(linked)"
	case $method in
	dpkg)
		for path in "$libraries/libmlx5.so.1" "$providers"/libmlx5-rdmav*.so; do
			cmp -s "$path" "$dist/libmlx5.so.1" || fail "$1: $path is not ours"
		done
		;;
	folder)
		stem=$(sed -n 's/^driver //p' /etc/libibverbs.d/mlx5.driver | tail -n 1)
		cmp -s "$stem-${provider#*-}" "$dist/libmlx5.so.1" || fail "$1: $stem is not ours"
		;;
	esac
	test -e "$stock" || fail "$1: $stock is gone"
	for path in "$(linked)" "$libraries/ringverbs" /etc/libibverbs.d/mlx5.driver; do
		case $(stat -c %A "$path") in
		-r??r??r--* | -r??r?xr-x* | dr?xr-xr-x*) ;;
		*) fail "$1: $(stat -c '%n %A' "$path")" ;;
		esac
	done
}

is_stock() {
	snapshot >"$scratch/now"
	diff -u "$scratch/before" "$scratch/now" >&2 || fail "$1: not as before"
	test "$(linked)" = "$stock" || fail "$1: the program loads $(linked)"
}

install() {
	"$xtask" install --replace-libmlx5 --dist "$dist" "$@"
}

uninstall() {
	"$xtask" install --replace-libmlx5 --uninstall "$@"
}

if test "$method" = folder; then
	# A system without diversions.
	rm "$(command -v dpkg-divert)"
fi
# Installed files must be readable by everybody.
umask 077
ldconfig
snapshot >"$scratch/before"
is_stock "at first"

for round in first second; do
	install >"$scratch/output"
	grep -q "^installed $libraries/" "$scratch/output" || fail "output: $(cat "$scratch/output")"
	is_ours "$round installation"
done
snapshot >"$scratch/installed"
ldconfig 2>"$scratch/warnings"
test ! -s "$scratch/warnings" || fail "ldconfig: $(cat "$scratch/warnings")"
is_ours "after ldconfig"
for round in first second; do
	uninstall >"$scratch/output"
	is_stock "$round removal"
done
grep -q "nothing to remove" "$scratch/output" || fail "output: $(cat "$scratch/output")"

# A run that is killed at any time is completed or undone by the next run.
killed_after() {
	after=$1
	shift
	{ timeout -s KILL "$after" "$xtask" install --replace-libmlx5 "$@"; } >/dev/null 2>&1 || true
	test -e "$libraries/libmlx5.so.1" || fail "killed after $after s: no libmlx5.so.1"
}
for after in 0.002 0.004 0.008 0.012 0.016 0.024 0.032 0.048 0.064 0.128; do
	killed_after "$after" --dist "$dist"
	uninstall >/dev/null
	is_stock "installation killed after $after s"
	killed_after "$after" --dist "$dist"
	install >/dev/null
	is_ours "installation killed after $after s"
	killed_after "$after" --uninstall
	uninstall >/dev/null
	is_stock "removal killed after $after s"
done

# The removal of everything restores libmlx5.
install >/dev/null
"$xtask" install --uninstall >"$scratch/output"
grep -q "libmlx5 is rdma-core's again" "$scratch/output" || fail "output: $(cat "$scratch/output")"
is_stock "removal of everything"

# Programs of the system on embedded devices: checks their provider.
if test -e "$dist/libringverbs_preload.so" && command -v ibv_devinfo >/dev/null; then
	mkdir -m 700 "$scratch/network"
	run_embedded() {
		RINGVERBS_EMBEDDED=roce RINGVERBS_DIRECTORY=$scratch/network RINGVERBS_LOG=info \
			LD_PRELOAD=$dist/libringverbs_preload.so "$@" 2>&1 || fail "$*"
	}
	run_embedded ibv_devinfo >"$scratch/output"
	grep -q mlx5_0 "$scratch/output" || fail "no device: $(cat "$scratch/output")"
	! grep -q "ringverbs INFO: serves device=mlx5_0" "$scratch/output" || fail "ours before"
	install >/dev/null
	run_embedded ibv_devinfo >"$scratch/output"
	grep -q "ringverbs INFO: serves device=mlx5_0" "$scratch/output" ||
		fail "ibv_devinfo: $(cat "$scratch/output")"
	grep -q PORT_ACTIVE "$scratch/output" || fail "ibv_devinfo: $(cat "$scratch/output")"
	echo "ibv_devinfo is served by ours"
	grep -q ringverbs "$dist/libmlx5.so.1" || fail "doctor cannot recognize ours"
	if test -x "$dist/ringverbs"; then
		"$dist/ringverbs" doctor >"$scratch/output" || true
		grep "libmlx5 .*/libmlx5.so.1.*, ringverbs in libmlx5's place" "$scratch/output" ||
			fail "doctor: $(cat "$scratch/output")"
	fi
	uninstall >/dev/null
	if test -x "$dist/ringverbs"; then
		"$dist/ringverbs" doctor >"$scratch/output" || true
		grep "libmlx5 .*$stock, rdma-core's" "$scratch/output" ||
			fail "doctor: $(cat "$scratch/output")"
	fi
fi

# Run by another user.
if command -v setpriv >/dev/null; then
	if PATH=/usr/sbin:/usr/bin:/sbin:/bin setpriv --reuid 65534 --regid 65534 --clear-groups "$xtask" install --replace-libmlx5 \
		--dist "$dist" 2>"$scratch/output"; then
		fail "installed without rights"
	fi
	grep -q "run this as root" "$scratch/output" || fail "output: $(cat "$scratch/output")"
	is_stock "without rights"
fi
mount -o remount,ro /usr
if install 2>"$scratch/output"; then
	fail "installed on a read-only file system"
fi
grep -q "remount it writable" "$scratch/output" || fail "output: $(cat "$scratch/output")"
mount -o remount,rw /usr
is_stock "on a read-only file system"

# An upgrade to a release with another private ABI writes the diverted links.
if test "$method" = dpkg && command -v dpkg-deb >/dev/null; then
	install >/dev/null
	package=$(dpkg-query -S "$stock" | cut -d : -f 1)
	tree=$scratch/package
	umask 022
	mkdir -p "$tree/DEBIAN" "$tree$providers"
	printf '%s\n' "Package: $package" "Version: 999" "Architecture: $(dpkg --print-architecture)" \
		"Maintainer: nobody" "Description: a newer release" >"$tree/DEBIAN/control"
	cp "$stock" "$tree$libraries/libmlx5.so.1.25.57.0"
	ln -s libmlx5.so.1.25.57.0 "$tree$libraries/libmlx5.so.1"
	ln -s ../libmlx5.so.1.25.57.0 "$tree$providers/libmlx5-rdmav57.so"
	dpkg-deb -b "$tree" "$scratch/new.deb" >/dev/null
	dpkg --force-all -i "$scratch/new.deb" >"$scratch/output" 2>&1 ||
		fail "dpkg: $(cat "$scratch/output")"
	! grep "ldconfig:" "$scratch/output" || fail "ldconfig warns"
	test ! -e "$stock" || fail "the package is not upgraded"
	stock=$libraries/libmlx5.so.1.25.57.0
	is_ours "after an upgrade"
	uninstall >/dev/null
	for path in "$libraries/libmlx5.so.1" "$providers/libmlx5-rdmav57.so"; do
		test "$(readlink -f "$path")" = "$stock" || fail "$path leads to $(readlink -f "$path")"
	done
	test ! -L "$providers/libmlx5-rdmav34.so" || fail "libmlx5-rdmav34.so is back"
	test "$(linked)" = "$stock" || fail "the program loads $(linked)"
	dpkg -V "$package" >"$scratch/output"
	! grep mlx5 "$scratch/output" || fail "dpkg -V: $(cat "$scratch/output")"
	! dpkg-divert --list | grep mlx5 || fail "a diversion is left"
fi
echo "$method: passed"
