#!/bin/sh
# The Rust crate on wires that lose packets. MESSAGES, BYTES and SEED go to the
# program; RUNS is how often it runs on each wire, each time with the next SEED.
here=$(dirname "$0")
exec "$here/wire.sh" sh -c '
    run=0
    while [ $run -lt "${RUNS:-1}" ]; do
        SEED=$((${SEED:-1} + run)) lossy --ignored --nocapture --test-threads=1 || exit 1
        run=$((run + 1))
    done'
