#!/bin/sh
# The tests of ibverbs (2026.10.22, PyPI) from the source tree of rdma4py:
#   ringverbs run --embedded=roce,roce [--devices mlx5] -- rxe-tests/frameworks/rdma4py.sh SOURCE
# It looks mlx5dv_init_obj up in libmlx5 by dlsym, which knows no queue pair of ringverbs:
# with --devices mlx5 that test fails.
# Packages: pip install ibverbs pytest numpy
set -eu
cd "$1/ibverbs/tests"
exec python3 -m pytest -q .
