# What programs see of the device under mlx5_ib, and of the embedded device of the same
# profile: files of sysfs, netlink, attributes. Each difference must be in the list of shown.txt,
# with a reason. PROFILE is the profile.

# Prints a line for each thing of the device $1. The shell itself reads the files; an attribute
# that cannot be read is like an empty one. It is a program of its own for the preload library.
cat > /tmp/describe.sh <<'SCRIPT'
find /sys/class/infiniband/$1/ -maxdepth 5 -follow -type f 2> /dev/null |
    grep -v '/device/\|/subsystem/\|/power/\|/driver/' | LC_ALL=C sort |
    while read -r file; do
        line=
        IFS= read -r line < $file
        echo "${file#/sys/class/infiniband/$1/} = $line"
    done
for name in $(ls /sys/class/infiniband/$1/device/); do
    echo "device/$name"
done
for name in vendor device class revision numa_node local_cpulist local_cpus modalias \
    subsystem_vendor subsystem_device; do
    line=
    read -r line < /sys/class/infiniband/$1/device/$name
    echo "device/$name = $line"
done
for name in $(ls /sys/class/infiniband_verbs/uverbs0/); do
    echo "uverbs/$name"
done
rdma dev show $1
rdma link show $1/1
rdma system show
rdma resource show $1
# One counter a line, with or without a break of rdma's own.
rdma statistic show link $1/1 | sed 's/^link [^ ]* *//' | xargs -n 2 | sed 's/^/statistic /'
ibv_devinfo -v -d $1 | sed '/^$/d; s/^[[:space:]]*//; s/[[:space:]][[:space:]]*/ /g'
SCRIPT

# With rdma-core's provider on both sides.
unset RDMAV_DRIVERS
sh /tmp/describe.sh $RDMA_DEV > /tmp/kernel.txt 2> /tmp/kernel.err
(
    export RINGVERBS_EMBEDDED=$PROFILE RINGVERBS_DIRECTORY=/tmp/shown
    export LD_PRELOAD=/opt/ringverbs/libringverbs_preload.so
    sh /tmp/describe.sh mlx5_0
) > /tmp/embedded.txt 2> /tmp/embedded.err
# A line of the list: < or > and an extended regular expression, a tab, the reason.
grep -v '^#' /tmp/shown.txt | cut -f 1 > /tmp/patterns
diff /tmp/kernel.txt /tmp/embedded.txt | grep '^[<>]' > /tmp/differences
grep -v -x -E -f /tmp/patterns /tmp/differences > /tmp/unexplained
lines=$(wc -l < /tmp/kernel.txt)
if [ $lines -lt 300 ]; then
    echo "@fail the embedded device is shown as mlx5_ib shows it: $lines lines"
elif [ -s /tmp/unexplained ]; then
    cat /tmp/unexplained
    echo "@fail the embedded device is shown as mlx5_ib shows it:" \
        "$(wc -l < /tmp/unexplained) differences, the first is $(head -n 1 /tmp/unexplained)"
else
    echo "@pass the embedded device is shown as mlx5_ib shows it"
fi
