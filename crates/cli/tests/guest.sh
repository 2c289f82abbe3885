#!/bin/sh
# Tests of the command that need rdma_rxe: `info -v` matches ibv_devinfo, `pingpong`
# works with the C tools, `trace` decodes the queues of a running program.
# Run in a guest, with the binary in the same directory or in $RINGVERBS:
#
#     cargo build -p ringverbs-cli
#     cp target/debug/ringverbs crates/cli/tests/guest.sh DIR
#     cargo xtask guest --share DIR --run 'sh ./guest.sh'
#
# `record` and `check` need the libraries: take target/dist/ringverbs, which carries them, and
# run `sh ./guest.sh record`; the others do not run it. `check` also needs a compiler, and the
# files of crates/preload/tests/c in the folder `c`.
#
# The arguments are the parts to run (default: all); TYPES has the types of
# ping-pongs. With SHORT set each type runs once as client and once as server of
# the C tools, on events.

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

# Removes indentation, repeated blanks and empty lines.
normalize() { sed -e 's/[[:space:]]\{1,\}/ /g' -e 's/^ //' -e 's/ $//' -e '/^$/d'; }

# Removes the raw packet capabilities that only a driver's own data has: `info`
# does not read that of mlx5.
without_driver_caps() {
    case $RXE_DEV in
        mlx5_*) sed -e '/^tso_caps:/,/^rss_caps:/{/^rss_caps:/!d}' -e '/^rx_hash_/d' \
            -e '/^packet_pacing_caps:/,/^tag matching/{/^tag matching/!d}' ;;
        *) cat ;;
    esac
}

info() {
    for options in '' '-v'; do
        ibv_devinfo $options | normalize | without_driver_caps > "$scratch/theirs"
        "$ringverbs" info $options | normalize > "$scratch/ours"
        name="info $options matches ibv_devinfo $options ($(wc -l < "$scratch/theirs") lines)"
        if [ -s "$scratch/theirs" ] && diff "$scratch/theirs" "$scratch/ours" > "$scratch/diff"; then
            ok "$name"
        else
            bad "$name" "$scratch/diff"
        fi
    done
    # Compares the JSON field by field.
    "$ringverbs" info --json > "$scratch/json"
    if ibv_devinfo -v | normalize | without_driver_caps | python3 -c '
import json, re, sys
ours = json.load(open(sys.argv[1]))[0]
flat = {**ours, **ours["attributes"], **ours["ports"][0]}
missing, wrong, compared = [], [], 0
names = {"hca_core_clock": "hca_core_clock_khz", "completion timestamp_mask": "completion_timestamp_mask", "maximum available device memory": "max_dm_size"}
nested = {}
for group in ("rss_caps", "tm_caps", "cq_moderation_caps", "driver_caps"):
    nested.update(ours["attributes"][group] or {})
for line in sys.stdin:
    match = re.match(r"\s*([\w ]+):\s+(\S.*)$", line)
    # Unknown flags have no field of their own: they are part of the line above.
    if not match or line.strip().startswith(("GID", "Unknown flags")):
        continue
    key, value = match.groups()
    key = names.get(key, key)
    got = flat.get(key, nested.get(key, nested.get(key + "_kbps")))
    if got is None:
        missing.append(key)
        continue
    compared += 1
    if isinstance(got, dict):
        number = re.search(r"\((-?\d+)\)", value)
        got, value = got["value"] if number or "names" in got else got["name"], number.group(1) if number else value
    for unit in ("kbps", "kHZ", " us", "Bytes"):
        value = value.removesuffix(unit)
    same = int(value, 0) == got if isinstance(got, int) else value == got
    if not same:
        wrong.append(f"{key}: theirs {value}, ours {got}")
print(compared, "fields compared; missing", missing, "wrong", wrong)
sys.exit(bool(missing or wrong or compared < 60))
' "$scratch/json" > "$scratch/fields" 2>&1; then
        ok "info --json: $(cat "$scratch/fields")"
    else
        bad "info --json matches ibv_devinfo -v" "$scratch/fields"
    fi
    case $RXE_DEV in mlx5_*) driver=mlx5_ib ;; *) driver=rdma_rxe ;; esac
    if "$ringverbs" devices > "$scratch/devices" && grep -q "^$RXE_DEV .*$driver" "$scratch/devices"; then
        ok "devices lists $RXE_DEV"
    else
        bad "devices lists $RXE_DEV" "$scratch/devices"
    fi
    if "$ringverbs" info -d nosuch > "$scratch/out" 2>&1; then
        bad "info of a missing device fails" "$scratch/out"
    elif grep -q "available: $RXE_DEV" "$scratch/out"; then
        ok "info of a missing device lists the available ones"
    else
        bad "info of a missing device lists the available ones" "$scratch/out"
    fi
}

# Causes each problem. The doctor must find it, and the printed command must fix it.
doctor() {
    if "$ringverbs" doctor > "$scratch/doctor"; then
        ok "doctor finds no problem"
    else
        bad "doctor finds no problem" "$scratch/doctor"
    fi
    # Root needs no sudo, which may not be installed. Other users must be able to
    # read the files.
    mkdir "$scratch/bin"
    printf '#!/bin/sh\nexec "$@"\n' > "$scratch/bin/sudo"
    chmod -R a+rx "$scratch"
    PATH="$scratch/bin:$PATH"
    netdev=$(cat "/sys/class/infiniband/$RXE_DEV/parent")
    nobody='setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all'

    doctor_as=
    check_problem problem node "mv /dev/infiniband/uverbs0 $scratch/uverbs0" "mknod"
    check_problem problem link "ip link set $netdev down" "ip link set $netdev up"
    check_problem warning mtu "ip link set $netdev mtu 1500" "ip link set $netdev mtu 4200"
    check_problem warning address "ip -4 addr flush dev $netdev" "ip addr add 192.168.77.1/24 dev $netdev"
    # The doctor selects an interface that is up for a new device: it must be this one.
    others=$(ip -o link show up | cut -d: -f2 | cut -d@ -f1 | grep -v -x -e " $netdev" -e " lo")
    for other in $others; do ip link set "$other" down; done
    check_problem problem device "rdma link delete $RXE_DEV" "rdma link add $RXE_DEV type rxe netdev $netdev"
    # Without modules: the next two problems are consequences of the first.
    check_problem problem module "rdma link delete $RXE_DEV && modprobe -r rdma_ucm rdma_rxe ib_uverbs" "modprobe ib_uverbs"
    check_problem problem device "true # also without a device" "modprobe rdma_rxe && rdma link add $RXE_DEV type rxe netdev $netdev"
    check_problem warning rdma_cm "true # also without rdma_ucm" "modprobe rdma_ucm"
    for other in $others; do ip link set "$other" up; done

    doctor_as=$nobody
    check_problem problem node "chmod 600 /dev/infiniband/uverbs0" "chmod 666 /dev/infiniband/uverbs0"
    check_problem warning node "chmod 600 /dev/infiniband/rdma_cm" "chmod 666 /dev/infiniband/rdma_cm"

    # Limits and variables are inherited, and fixed in the shell.
    check_environment problem memlock "prlimit --memlock=32768:unlimited $nobody" "ulimit -l unlimited"
    : > "$scratch/libother-rdmav1.so"
    check_environment warning provider "env RDMAV_DRIVERS=$scratch/libother" "unset RDMAV_DRIVERS"

    # Restores the device for later cases.
    ! command -v rxe-driver > /dev/null || rxe-driver setup > /dev/null
}

# finding_fix LEVEL CHECK: prints the fix of that finding in $scratch/doctor; fails
# if there is no such finding.
finding_fix() {
    python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
levels = [f["level"] for f in report["findings"]]
assert report["works"] == ("problem" not in levels), report
found = [f for f in report["findings"] if (f["level"], f["check"]) == (sys.argv[2], sys.argv[3])]
sys.exit(not (found and [print(found[0]["mend"])]))
' "$scratch/doctor" "$@"
}

# await_finding STATUS LEVEL CHECK: runs the doctor until the finding is present (0)
# or absent (1), because the kernel may apply a change with a delay.
await_finding() {
    expected=$1
    shift
    waited=0
    while :; do
        $doctor_as "$ringverbs" doctor --json > "$scratch/doctor"
        works=$?
        finding_fix "$@" > "$scratch/fix"
        [ $? -ne "$expected" ] || break
        waited=$((waited + 1))
        [ $waited -lt 30 ] || return 1
        sleep 0.2
    done
    # The exit status must agree with the report.
    case $expected$1$works in 0problem0) return 1 ;; esac
}

# check_problem LEVEL CHECK COMMAND FIX: COMMAND causes the problem, FIX is part of the
# command that must fix it.
check_problem() {
    if sh -c "$3" > "$scratch/cause" 2>&1 && await_finding 0 "$1" "$2" && grep -q -F "$4" "$scratch/fix"; then
        ok "doctor finds the problem of: $3"
    else
        bad "doctor finds the problem of: $3" "$scratch/cause" "$scratch/doctor"
        return
    fi
    cp "$scratch/fix" "$scratch/command"
    if sh "$scratch/command" > "$scratch/fixed" 2>&1 && await_finding 1 "$1" "$2"; then
        ok "and none after: $(cat "$scratch/command")"
    else
        bad "and none after: $(cat "$scratch/command")" "$scratch/fixed" "$scratch/doctor"
    fi
}

# check_environment LEVEL CHECK COMMAND FIX: COMMAND runs the doctor in an environment
# that has the problem.
check_environment() {
    doctor_as=$3
    if await_finding 0 "$1" "$2" && grep -q -F "$4" "$scratch/fix"; then
        ok "doctor finds the problem of: $3"
    else
        bad "doctor finds the problem of: $3" "$scratch/doctor"
        return
    fi
    cp "$scratch/fix" "$scratch/command"
    printf '%s\nexec "$@"\n' "$(cat "$scratch/command")" > "$scratch/shell"
    chmod a+r "$scratch/shell"
    doctor_as="$3 sh $scratch/shell"
    if await_finding 1 "$1" "$2"; then
        ok "and none after: $(cat "$scratch/command")"
    else
        bad "and none after: $(cat "$scratch/command")" "$scratch/doctor"
    fi
}

# The queues of a C program, with known work requests.
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
        ok "trace shows the 300 receives of a waiting ibv_rc_pingpong"
    else
        bad "trace shows the 300 receives of a waiting ibv_rc_pingpong" "$scratch/trace" "$scratch/python"
    fi
    # While messages are exchanged, which must not be disturbed.
    "$ringverbs" trace $server --follow --interval 1 > "$scratch/followed" 2>&1 &
    follower=$!
    waited=0
    until [ -s "$scratch/followed" ] || [ $waited -ge 100 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
    ibv_rc_pingpong -d "$RXE_DEV" -g "$RXE_GID" -n 200 127.0.0.1 > "$scratch/client" 2>&1
    if wait $server; then
        ok "a traced program completes"
    else
        bad "a traced program completes" "$scratch/server"
    fi
    wait $follower
    if [ $? -eq 0 ] && grep -q 'SUCCESS RECV 4096 bytes' "$scratch/followed" \
        && grep -q 'SUCCESS SEND' "$scratch/followed" && grep -q ' SEND 4096 bytes' "$scratch/followed"; then
        ok "trace --follow shows completions and sends ($(wc -l < "$scratch/followed") lines), and ends with the program"
    else
        bad "trace --follow shows completions and sends" "$scratch/followed"
    fi
    if "$ringverbs" trace 1 > "$scratch/out" 2>&1 || ! grep -q 'no queue mapped' "$scratch/out"; then
        bad "trace reports a process without queues" "$scratch/out"
    else
        ok "trace reports a process without queues"
    fi
}

# Records of C programs, which are listed, and replayed on an embedded device.
record() {
    for program in "ibv_rc_pingpong -n 50" "ibv_uc_pingpong -n 50" "ibv_rc_pingpong -e -n 50"; do
        rm -f "$scratch"/*.jsonl
        command="$program -d $RXE_DEV -g $RXE_GID"
        check_pair "$program is recorded" "$ringverbs run --record $scratch/server.jsonl -- $command" \
            "$ringverbs run --record $scratch/client.jsonl -- $command 127.0.0.1"
        "$ringverbs" replay "$scratch"/*.jsonl > "$scratch/replay" 2>&1
        # 500 receives of each end before the first message, and as many as it then takes.
        if grep -q '^replayed .* posts and 200 completions: differences: 0' "$scratch/replay" \
            && ! grep -q 'not replayed' "$scratch/replay"; then
            ok "$program is replayed: $(tail -1 "$scratch/replay")"
        else
            bad "$program is replayed" "$scratch/replay"
        fi
    done
    rm -f "$scratch"/*.jsonl
    # It listens on no TCP port.
    timeout 60 "$ringverbs" run --record "$scratch/server.jsonl" -- rping -s -a "$RXE_ADDR" -C 3 > "$scratch/server" 2>&1 &
    server=$!
    sleep 5
    if timeout 60 "$ringverbs" run --record "$scratch/client.jsonl" -- rping -c -a "$RXE_ADDR" -C 3 > "$scratch/client" 2>&1; then
        ok "rping is recorded"
    else
        bad "rping is recorded" "$scratch/server" "$scratch/client"
    fi
    wait $server
    "$ringverbs" replay "$scratch"/*.jsonl > "$scratch/replay" 2>&1
    if grep -q '^replayed .* posts and [1-9].* completions: differences: 0' "$scratch/replay"; then
        ok "rping is replayed: $(tail -1 "$scratch/replay")"
    else
        bad "rping is replayed" "$scratch/replay"
    fi
    command="ibv_rc_pingpong -n 5 -d $RXE_DEV -g $RXE_GID"
    check_pair "a program is listed" "$command" "$ringverbs trace -- $command 127.0.0.1"
    if grep -q "ibv_create_qp($RXE_DEV, qp_type=RC" "$scratch/client" \
        && [ "$(grep -c 'ibv_poll_cq(.*SEND' "$scratch/client")" -eq 5 ]; then
        ok "trace lists $(grep -c ' ibv_' "$scratch/client") calls, posts and completions"
    else
        bad "trace lists calls, posts and completions" "$scratch/client"
    fi
}

# Errors that are planted in C programs, each with its rule, on the host's device.
check() {
    for source in check_cases check_objects; do
        cc -O1 -o "$scratch/$source" c/$source.c -libverbs -lpthread > "$scratch/cc" 2>&1 || bad "cc $source.c" "$scratch/cc"
    done
    for planted in never-drains:queue-never-drains \
        small-sends:completion-queue-too-small \
        small-receives:completion-queue-too-small \
        small-builder:completion-queue-too-small \
        unacknowledged:events-not-acknowledged \
        again-send:use-after-destroy again-receive:use-after-destroy \
        again-poll:use-after-destroy no-start:builder-without-start \
        region:leak domain:leak completion-queue:leak \
        queue-pair:leak first-calls-poll:two-threads; do
        error=${planted%:*} rule=${planted#*:} cases=check_cases
        [ "$rule" != two-threads ] || cases=check_objects
        # One whose completions are lost waits for them.
        timeout 15 "$ringverbs" check --host -- "$scratch/$cases" "$error" > "$scratch/wrong" 2>&1
        wrong=$?
        timeout 60 "$ringverbs" check --host -- "$scratch/$cases" "$error" right > "$scratch/right" 2>&1
        right=$?
        if { [ $wrong -eq 99 ] || [ $wrong -eq 124 ]; } && grep -q "^ringverbs: $RXE_DEV: error $rule: " "$scratch/wrong" \
            && [ $right -eq 0 ] && ! grep -q ': error ' "$scratch/right"; then
            ok "$error is found: $(grep -m 1 ': error ' "$scratch/wrong")"
        else
            bad "$error is found ($wrong, without it $right)" "$scratch/wrong" "$scratch/right"
        fi
    done
    command="ibv_rc_pingpong -d $RXE_DEV -g $RXE_GID"
    check_pair "a correct program has no errors" "$ringverbs check --host -- $command" \
        "$ringverbs check --host -- $command 127.0.0.1"
}

# Waits until a server listens on port 18515.
await_listener() {
    waited=0
    until grep -q ':4853 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6 || [ $waited -ge 150 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
}

# check_pair NAME SERVER-COMMAND CLIENT-COMMAND: both must succeed.
check_pair() {
    # The C tools have no timeout.
    timeout 60 $2 > "$scratch/server" 2>&1 &
    server=$!
    await_listener
    if timeout 60 $3 > "$scratch/client" 2>&1; then client=0; else client=$?; kill $server 2> /dev/null; fi
    wait $server
    if [ $? -eq 0 ] && [ $client -eq 0 ] && ! grep -q 'invalid data' "$scratch/server" "$scratch/client"; then
        ok "$1: $(tail -1 "$scratch/client")"
    else
        bad "$1" "$scratch/server" "$scratch/client"
    fi
}

pingpong() {
    # A datagram is one packet.
    mtu=$(ibv_devinfo -d "$RXE_DEV" | sed -n 's/.*active_mtu:[[:space:]]*\([0-9]*\).*/\1/p')
    datagram=$((mtu >= 4096 ? 4000 : mtu - 24))
    for type in ${TYPES:-rc uc ud srq}; do
        case $type in ud) large="-s $datagram" ;; *) large='-s 50000 -r 50' ;; esac
        for options in '' '-e' "$large"; do
            [ -z "$SHORT" ] || [ "$options" = -e ] || continue
            theirs="ibv_${type}_pingpong -d $RXE_DEV -g $RXE_GID -n 200 -c $options"
            ours="$ringverbs pingpong -t $type -d $RXE_DEV -g $RXE_GID -n 200 -c $options"
            check_pair "$type $options: ours serves theirs" "$ours -S" "$theirs 127.0.0.1"
            check_pair "$type $options: theirs serves ours" "$theirs" "$ours 127.0.0.1"
        done
        [ -z "$SHORT" ] || continue
        check_pair "$type: ours serves ours" "$ringverbs pingpong -S -t $type -c -n 200" "$ringverbs pingpong -t $type -c -n 200 localhost"
        if "$ringverbs" pingpong -t $type -n 200 -c > "$scratch/out" 2>&1; then
            ok "$type: both sides in one process: $(tail -1 "$scratch/out")"
        else
            bad "$type: both sides in one process" "$scratch/out"
        fi
    done
    timeout 60 "$ringverbs" pingpong -S -n 10 > "$scratch/out" 2>&1 &
    server=$!
    await_listener
    printf 'GET / HTTP/1.1\r\nHost: example.org\r\nAccept: everything\r\n\r\n' | busybox nc 127.0.0.1 18515 > /dev/null
    if wait $server; then
        bad "a server ends with an error at a request of another protocol" "$scratch/out"
    elif grep -q 'is malformed' "$scratch/out"; then
        ok "a server ends with an error at a request of another protocol: $(tail -1 "$scratch/out" | cut -c 1-80)"
    else
        bad "a server ends with an error at a request of another protocol" "$scratch/out"
    fi
}

# check_perf NAME COMMAND...: COMMAND must print valid results as JSON.
check_perf() {
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
' "$scratch/perf" > "$scratch/summary" 2>> "$scratch/err"; then
        ok "$name: $(cat "$scratch/summary")"
    else
        bad "$name" "$scratch/err" "$scratch/perf"
    fi
}

perf() {
    for operation in send write read atomic; do
        check_perf "perf $operation" "$ringverbs" perf -o $operation -s 8,4096,65536 -n 50
        check_perf "perf $operation -e" "$ringverbs" perf -o $operation -s 64 -n 50 -e
        check_perf "perf $operation -q 3 -b" "$ringverbs" perf -o $operation -s 64 -n 50 -q 3 -b
    done
    check_perf "perf --type uc" "$ringverbs" perf -t uc -o write -s 8,1024 -n 50
    check_perf "perf --type ud" "$ringverbs" perf -t ud -o send -s 8,1024 -n 50
    timeout 120 "$ringverbs" perf --server > "$scratch/server" 2>&1 &
    server=$!
    waited=0
    until grep -q ':4854 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6 || [ $waited -ge 150 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
    check_perf "perf with a server" "$ringverbs" perf -o send -s 8..1024 -n 30 --plot "$scratch/send.svg" localhost
    if wait $server && grep -q '</svg>' "$scratch/send.svg"; then
        ok "perf: the server exits with its client, and there is a plot"
    else
        bad "perf: the server exits with its client, and there is a plot" "$scratch/server"
    fi
    bar
}

# The progress bar, which is shown on a terminal only.
bar() {
    if TERM=xterm python3 -c '
import fcntl, json, os, pty, struct, subprocess, sys, termios
ours, theirs = pty.openpty()
fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=theirs)
os.close(theirs)
shown = b""
try:
    while True:
        shown += os.read(ours, 4096)
except OSError:
    pass # the other side of the terminal is closed
report = child.stdout.read()
assert child.wait() == 0, (child.returncode, shown[-500:])
assert len(json.loads(report)["rows"]) == 2, report
assert b"write 64 B" in shown and b"%" in shown, shown
print(len(shown), "bytes on the terminal")
' "$ringverbs" perf -o write -s 64,128 -n 500 --json > "$scratch/bar" 2>&1; then
        ok "perf: a progress bar on a terminal: $(cat "$scratch/bar")"
    else
        bad "perf: a progress bar on a terminal" "$scratch/bar"
    fi
    if "$ringverbs" perf -s 64 -n 500 2> "$scratch/bar" > /dev/null && [ ! -s "$scratch/bar" ]; then
        ok "perf: no progress bar elsewhere"
    else
        bad "perf: no progress bar elsewhere" "$scratch/bar"
    fi
}

for part in ${*:-info doctor trace pingpong perf}; do $part; done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
