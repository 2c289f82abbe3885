#!/bin/sh
# The Rust crate on lossy wires. The program reads MESSAGES, BYTES and SEED; RUNS is the
# number of runs on each wire, each with the next SEED.
here=$(dirname "$0")
exec "$here/wire.sh" sh -c '
    run=0
    while [ $run -lt "${RUNS:-1}" ]; do
        SEED=$((${SEED:-1} + run)) lossy --ignored --nocapture --test-threads=1 || exit 1
        run=$((run + 1))
    done'
