#!/bin/sh
# Runs a test program that connects by address: streams.sh PROGRAM
modprobe rdma_ucm
exec "$1" --ignored --test-threads=1
