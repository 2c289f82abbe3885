#!/bin/sh
# Builds async-rdma (0.5.0) from its source tree, and runs its tests:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/async-rdma.sh SOURCE
# Packages: apt-get install gcc make libclang-14-dev libibverbs-dev librdmacm-dev; Rust. Its
# bindgen (0.59) fails with clang 18: set LIBCLANG_PATH to the folder of another one.
set -eu
cd "$1"
# Its default for the flags of a completion with immediate data is rdma_rxe's.
sed -i 's/IBV_WC_WITH_IMM: u32 = 3/IBV_WC_WITH_IMM: u32 = 2/' src/completion_queue.rs
# The warnings of newer compilers must not be errors.
env -u LD_PRELOAD RUSTFLAGS="--cap-lints warn" cargo test --no-run --tests
exec env RUSTFLAGS="--cap-lints warn" cargo test --tests
