#!/bin/sh
# What only a machine with rdma_rxe can show: `info -v` says what ibv_devinfo
# says, the ping-pongs meet the C tools, queues of a live program are decoded.
# Run in a guest, with the binary beside or in $RINGVERBS:
#
#     cargo build -p ringverbs-cli
#     cp target/debug/ringverbs crates/cli/tests/guest.sh DIR
#     cargo xtask guest --share DIR --run 'sh ./guest.sh'
#
# Arguments name the parts to run (all of them without one); TYPES, of the
# ping-pongs, the types. With SHORT set they meet the C tools once each way, on
# events, and not each other.

ringverbs=${RINGVERBS:-./ringverbs}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0
failed=0

ok() { passed=$((passed + 1)); echo "ok      $1"; }
bad() {
    failed=$((failed + 1))
    echo "FAILED  $1"
    shift
    for file in "$@"; do sed "s/^/        /" "$file" | tail -20; done
}

# Lines without indentation, double blanks and empty lines.
plain() { sed -e 's/[[:space:]]\{1,\}/ /g' -e 's/^ //' -e 's/ $//' -e '/^$/d'; }

# What rdma-core's provider has from its driver alone, of raw packets: `info`
# asks the kernel whatever the driver is.
told_by_driver() {
    case $RXE_DEV in
        mlx5_*) sed -e '/^tso_caps:/,/^rss_caps:/{/^rss_caps:/!d}' -e '/^rx_hash_/d' \
            -e '/^packet_pacing_caps:/,/^tag matching/{/^tag matching/!d}' ;;
        *) cat ;;
    esac
}

info() {
    for options in '' '-v'; do
        ibv_devinfo $options | plain | told_by_driver > "$scratch/theirs"
        "$ringverbs" info $options | plain > "$scratch/ours"
        name="info $options says what ibv_devinfo $options says ($(wc -l < "$scratch/theirs") lines)"
        if [ -s "$scratch/theirs" ] && diff "$scratch/theirs" "$scratch/ours" > "$scratch/diff"; then
            ok "$name"
        else
            bad "$name" "$scratch/diff"
        fi
    done
    # Numbers of the JSON, field by field.
    "$ringverbs" info --json > "$scratch/json"
    if ibv_devinfo -v | plain | told_by_driver | python3 -c '
import json, re, sys
ours = json.load(open(sys.argv[1]))[0]
flat = {**ours, **ours["attributes"], **ours["ports"][0]}
missing, wrong, seen = [], [], 0
names = {"hca_core_clock": "hca_core_clock_khz", "completion timestamp_mask": "completion_timestamp_mask", "maximum available device memory": "max_dm_size"}
nested = {}
for group in ("rss_caps", "tm_caps", "cq_moderation_caps", "driver_caps"):
    nested.update(ours["attributes"][group] or {})
for line in sys.stdin:
    match = re.match(r"\s*([\w ]+):\s+(\S.*)$", line)
    # What has no name has no field of its own: "unknown" of the word above.
    if not match or line.strip().startswith(("GID", "Unknown flags")):
        continue
    key, value = match.groups()
    key = names.get(key, key)
    got = flat.get(key, nested.get(key, nested.get(key + "_kbps")))
    if got is None:
        missing.append(key)
        continue
    seen += 1
    if isinstance(got, dict):
        number = re.search(r"\((-?\d+)\)", value)
        got, value = got["value"] if number or "names" in got else got["name"], number.group(1) if number else value
    for unit in ("kbps", "kHZ", " us", "Bytes"):
        value = value.removesuffix(unit)
    same = int(value, 0) == got if isinstance(got, int) else value == got
    if not same:
        wrong.append(f"{key}: theirs {value}, ours {got}")
print(seen, "fields compared; missing", missing, "wrong", wrong)
sys.exit(bool(missing or wrong or seen < 60))
' "$scratch/json" > "$scratch/fields" 2>&1; then
        ok "info --json: $(cat "$scratch/fields")"
    else
        bad "info --json says what ibv_devinfo -v says" "$scratch/fields"
    fi
    # The names that the kernel's drivers give.
    case $RXE_DEV in mlx5_*) driver=mlx5_ib ;; *) driver=rdma_rxe ;; esac
    if "$ringverbs" devices > "$scratch/devices" && grep -q "^$RXE_DEV .*$driver" "$scratch/devices"; then
        ok "devices lists $RXE_DEV"
    else
        bad "devices lists $RXE_DEV" "$scratch/devices"
    fi
    if "$ringverbs" info -d nosuch > "$scratch/out" 2>&1; then
        bad "info of a device that is not there fails" "$scratch/out"
    elif grep -q "there is $RXE_DEV" "$scratch/out"; then
        ok "info of a device that is not there says which there are"
    else
        bad "info of a device that is not there says which there are" "$scratch/out"
    fi
}

# Each of what can be wrong is made so, and must be found, with the command that
# mends it; and that command, run as it is printed, must mend it.
doctor() {
    if "$ringverbs" doctor > "$scratch/doctor"; then
        ok "doctor finds nothing in the way"
    else
        bad "doctor finds nothing in the way" "$scratch/doctor"
    fi
    # Root needs no sudo, and may have none. Others are to read what is there.
    mkdir "$scratch/bin"
    printf '#!/bin/sh\nexec "$@"\n' > "$scratch/bin/sudo"
    chmod -R a+rx "$scratch"
    PATH="$scratch/bin:$PATH"
    netdev=$(cat "/sys/class/infiniband/$RXE_DEV/parent")
    nobody='setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all'

    doctor_as=
    broken problem node "mv /dev/infiniband/uverbs0 $scratch/uverbs0" "mknod"
    broken problem link "ip link set $netdev down" "ip link set $netdev up"
    broken warning mtu "ip link set $netdev mtu 1500" "ip link set $netdev mtu 4200"
    broken warning address "ip -4 addr flush dev $netdev" "ip addr add 192.168.77.1/24 dev $netdev"
    # That address is the only one of its interface: no other one is to be
    # chosen for a new device.
    others=$(ip -o link show up | cut -d: -f2 | cut -d@ -f1 | grep -v -x -e " $netdev" -e " lo")
    for other in $others; do ip link set "$other" down; done
    broken problem device "rdma link delete $RXE_DEV" "rdma link add $RXE_DEV type rxe netdev $netdev"
    # From nothing, one after the other.
    broken problem module "rdma link delete $RXE_DEV && modprobe -r rdma_ucm rdma_rxe ib_uverbs" "modprobe ib_uverbs"
    broken problem device "true # what is left of that" "modprobe rdma_rxe && rdma link add $RXE_DEV type rxe netdev $netdev"
    broken warning rdma_cm "true # and of that" "modprobe rdma_ucm"
    for other in $others; do ip link set "$other" up; done

    doctor_as=$nobody
    broken problem node "chmod 600 /dev/infiniband/uverbs0" "chmod 666 /dev/infiniband/uverbs0"
    broken warning node "chmod 600 /dev/infiniband/rdma_cm" "chmod 666 /dev/infiniband/rdma_cm"

    # What a process has from the one before it is mended in a shell.
    surrounded problem memlock "prlimit --memlock=32768:unlimited $nobody" "ulimit -l unlimited"
    : > "$scratch/libother-rdmav1.so"
    surrounded warning provider "env RDMAV_DRIVERS=$scratch/libother" "unset RDMAV_DRIVERS"

    # Later cases find the device as it was.
    ! command -v rxe-driver > /dev/null || rxe-driver setup > /dev/null
}

# finding LEVEL CHECK: whether the report in $scratch/doctor has such a finding;
# prints the command that mends it.
finding() {
    python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
levels = [f["level"] for f in report["findings"]]
assert report["works"] == ("problem" not in levels), report
found = [f for f in report["findings"] if (f["level"], f["check"]) == (sys.argv[2], sys.argv[3])]
sys.exit(not (found and [print(found[0]["mend"])]))
' "$scratch/doctor" "$@"
}

# finds WANTED LEVEL CHECK: until the doctor finds that (0), or does not (1);
# what is changed in the kernel shows a moment later.
finds() {
    wanted=$1
    shift
    waited=0
    while :; do
        $doctor_as "$ringverbs" doctor --json > "$scratch/doctor"
        works=$?
        finding "$@" > "$scratch/mend"
        [ $? -ne "$wanted" ] || break
        waited=$((waited + 1))
        [ $waited -lt 30 ] || return 1
        sleep 0.2
    done
    # The exit status says what the report says.
    case $wanted$1$works in 0problem0) return 1 ;; esac
}

# broken LEVEL CHECK COMMAND MEND-PATTERN
broken() {
    if sh -c "$3" > "$scratch/broke" 2>&1 && finds 0 "$1" "$2" && grep -q -F "$4" "$scratch/mend"; then
        ok "doctor finds out about: $3"
    else
        bad "doctor finds out about: $3" "$scratch/broke" "$scratch/doctor"
        return
    fi
    cp "$scratch/mend" "$scratch/command"
    if sh "$scratch/command" > "$scratch/mended" 2>&1 && finds 1 "$1" "$2"; then
        ok "and is content after: $(cat "$scratch/command")"
    else
        bad "and is content after: $(cat "$scratch/command")" "$scratch/mended" "$scratch/doctor"
    fi
}

# surrounded LEVEL CHECK COMMAND MEND-PATTERN: the doctor run by that command.
surrounded() {
    doctor_as=$3
    if finds 0 "$1" "$2" && grep -q -F "$4" "$scratch/mend"; then
        ok "doctor finds out about: $3"
    else
        bad "doctor finds out about: $3" "$scratch/doctor"
        return
    fi
    cp "$scratch/mend" "$scratch/command"
    printf '%s\nexec "$@"\n' "$(cat "$scratch/command")" > "$scratch/shell"
    chmod a+r "$scratch/shell"
    doctor_as="$3 sh $scratch/shell"
    if finds 1 "$1" "$2"; then
        ok "and is content after: $(cat "$scratch/command")"
    else
        bad "and is content after: $(cat "$scratch/command")" "$scratch/doctor"
    fi
}

# A C program's queues: what it has posted is known.
trace() {
    ibv_rc_pingpong -d "$RXE_DEV" -g "$RXE_GID" -r 300 -n 200 > "$scratch/server" 2>&1 &
    server=$!
    sleep 2
    "$ringverbs" trace $server --json > "$scratch/trace" 2>&1
    if python3 -c '
import json, sys
queues = json.load(open(sys.argv[1]))
assert len(queues) == 3, len(queues)
[receive] = [q for q in queues if q["kind"] == "receive queue"]
assert receive["pending"] == 300, receive
entry = receive["entries"][-1]
assert entry["pending"] and entry["wr_id"] == 1 and entry["length"] == 4096, entry
assert entry["sges"][0]["length"] == 4096, entry
' "$scratch/trace" 2> "$scratch/python"; then
        ok "trace finds the 300 receives of an ibv_rc_pingpong that waits"
    else
        bad "trace finds the 300 receives of an ibv_rc_pingpong that waits" "$scratch/trace" "$scratch/python"
    fi
    # In the middle, if it can be caught; the exchange must not suffer.
    "$ringverbs" trace $server --follow --interval 1 > "$scratch/followed" 2>&1 &
    follower=$!
    waited=0
    until [ -s "$scratch/followed" ] || [ $waited -ge 100 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
    ibv_rc_pingpong -d "$RXE_DEV" -g "$RXE_GID" -n 200 127.0.0.1 > "$scratch/client" 2>&1
    if wait $server; then
        ok "a program that is traced goes on"
    else
        bad "a program that is traced goes on" "$scratch/server"
    fi
    wait $follower
    if [ $? -eq 0 ] && grep -q 'SUCCESS RECV 4096 bytes' "$scratch/followed" \
        && grep -q 'SUCCESS SEND' "$scratch/followed" && grep -q ' SEND 4096 bytes' "$scratch/followed"; then
        ok "trace --follow sees completions and sends ($(wc -l < "$scratch/followed") lines), and ends with the program"
    else
        bad "trace --follow sees completions and sends" "$scratch/followed"
    fi
    if "$ringverbs" trace 1 > "$scratch/out" 2>&1 || ! grep -q 'no queue mapped' "$scratch/out"; then
        bad "trace says that a process has no queues" "$scratch/out"
    else
        ok "trace says that a process has no queues"
    fi
}

# Until somebody listens on port 18515.
listening() {
    waited=0
    until grep -q ':4853 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6 || [ $waited -ge 150 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
}

# met NAME SERVER-COMMAND CLIENT-COMMAND: both must succeed.
met() {
    # The C tools wait for ever.
    timeout 60 $2 > "$scratch/server" 2>&1 &
    server=$!
    listening
    if timeout 60 $3 > "$scratch/client" 2>&1; then client=0; else client=$?; kill $server 2> /dev/null; fi
    wait $server
    if [ $? -eq 0 ] && [ $client -eq 0 ] && ! grep -q 'invalid data' "$scratch/server" "$scratch/client"; then
        ok "$1: $(tail -1 "$scratch/client")"
    else
        bad "$1" "$scratch/server" "$scratch/client"
    fi
}

pingpong() {
    # At most a packet's worth.
    mtu=$(ibv_devinfo -d "$RXE_DEV" | sed -n 's/.*active_mtu:[[:space:]]*\([0-9]*\).*/\1/p')
    datagram=$((mtu >= 4096 ? 4000 : mtu - 24))
    for type in ${TYPES:-rc uc ud srq}; do
        case $type in ud) large="-s $datagram" ;; *) large='-s 50000 -r 50' ;; esac
        for options in '' '-e' "$large"; do
            [ -z "$SHORT" ] || [ "$options" = -e ] || continue
            theirs="ibv_${type}_pingpong -d $RXE_DEV -g $RXE_GID -n 200 -c $options"
            ours="$ringverbs pingpong -t $type -d $RXE_DEV -g $RXE_GID -n 200 -c $options"
            met "$type $options: ours serves theirs" "$ours -S" "$theirs 127.0.0.1"
            met "$type $options: theirs serves ours" "$theirs" "$ours 127.0.0.1"
        done
        [ -z "$SHORT" ] || continue
        met "$type: ours serves ours" "$ringverbs pingpong -S -t $type -c -n 200" "$ringverbs pingpong -t $type -c -n 200 localhost"
        if "$ringverbs" pingpong -t $type -n 200 -c > "$scratch/out" 2>&1; then
            ok "$type: both sides in one process: $(tail -1 "$scratch/out")"
        else
            bad "$type: both sides in one process" "$scratch/out"
        fi
    done
    timeout 60 "$ringverbs" pingpong -S -n 10 > "$scratch/out" 2>&1 &
    server=$!
    listening
    printf 'GET / HTTP/1.1\r\nHost: example.org\r\nAccept: everything\r\n\r\n' | busybox nc 127.0.0.1 18515 > /dev/null
    if wait $server; then
        bad "a stranger's request ends a server" "$scratch/out"
    elif grep -q 'makes no sense' "$scratch/out"; then
        ok "a stranger's request ends a server: $(tail -1 "$scratch/out" | cut -c 1-80)"
    else
        bad "a stranger's request ends a server" "$scratch/out"
    fi
}

# measured NAME COMMAND...: prints JSON of rows that make sense.
measured() {
    name=$1
    shift
    if "$@" --json > "$scratch/perf" 2> "$scratch/err" && python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
assert report["rows"], report
for row in report["rows"]:
    latency = row["latency_ns"]
    marks = [latency[key] for key in ("min", "p50", "p90", "p99", "p999", "max")]
    assert marks == sorted(marks) and marks[0] > 0, row
    assert row["bandwidth"]["bytes_per_second"] > 0, row
print(len(report["rows"]), "sizes, p50", report["rows"][0]["latency_ns"]["p50"], "ns")
' "$scratch/perf" > "$scratch/said" 2>> "$scratch/err"; then
        ok "$name: $(cat "$scratch/said")"
    else
        bad "$name" "$scratch/err" "$scratch/perf"
    fi
}

perf() {
    for operation in send write read atomic; do
        measured "perf $operation" "$ringverbs" perf -o $operation -s 8,4096,65536 -n 50
        measured "perf $operation -e" "$ringverbs" perf -o $operation -s 64 -n 50 -e
        measured "perf $operation -q 3 -b" "$ringverbs" perf -o $operation -s 64 -n 50 -q 3 -b
    done
    measured "perf --type uc" "$ringverbs" perf -t uc -o write -s 8,1024 -n 50
    measured "perf --type ud" "$ringverbs" perf -t ud -o send -s 8,1024 -n 50
    timeout 120 "$ringverbs" perf --server > "$scratch/server" 2>&1 &
    server=$!
    waited=0
    until grep -q ':4854 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6 || [ $waited -ge 150 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
    measured "perf with a server" "$ringverbs" perf -o send -s 8..1024 -n 30 --plot "$scratch/send.svg" localhost
    if wait $server && grep -q '</svg>' "$scratch/send.svg"; then
        ok "perf: the server ends with its client, and the picture is there"
    else
        bad "perf: the server ends with its client, and the picture is there" "$scratch/server"
    fi
    bar
}

# On a terminal a bar tells how far it is; what is measured goes elsewhere.
bar() {
    if TERM=xterm python3 -c '
import fcntl, json, os, pty, struct, subprocess, sys, termios
ours, theirs = pty.openpty()
fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=theirs)
os.close(theirs)
seen = b""
try:
    while True:
        seen += os.read(ours, 4096)
except OSError:
    pass # nobody has the terminal any more
report = child.stdout.read()
assert child.wait() == 0, (child.returncode, seen[-500:])
assert len(json.loads(report)["rows"]) == 2, report
assert b"write 64 B" in seen and b"%" in seen, seen
print(len(seen), "bytes on the terminal")
' "$ringverbs" perf -o write -s 64,128 -n 500 --json > "$scratch/bar" 2>&1; then
        ok "perf: a bar on a terminal: $(cat "$scratch/bar")"
    else
        bad "perf: a bar on a terminal" "$scratch/bar"
    fi
    if "$ringverbs" perf -s 64 -n 500 2> "$scratch/bar" > /dev/null && [ ! -s "$scratch/bar" ]; then
        ok "perf: and none elsewhere"
    else
        bad "perf: and none elsewhere" "$scratch/bar"
    fi
}

for part in ${*:-info doctor trace pingpong perf}; do $part; done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
