#!/bin/sh
# The tests of sideway from its source tree, but those of its macros' error messages:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/sideway.sh SOURCE
# Packages: apt-get install gcc libclang-dev; Rust
set -eu
cd "$1"
set -- --lib
for test in tests/test_*.rs; do
    set -- "$@" --test "$(basename "$test" .rs)"
done
env -u LD_PRELOAD cargo test --quiet --no-run "$@"
exec cargo test --quiet "$@"
