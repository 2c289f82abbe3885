#!/bin/sh
# spead2 (4.5.1, PyPI) sends and receives 100 heaps of 1 MB as raw packets to a multicast group:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/spead2.sh ADDRESS
# ADDRESS is that of an Ethernet interface, whose MAC address the sender takes.
# Packages: pip install spead2
set -eu
group=239.102.1.1:8888
timeout 30 spead2_recv.py --ibv --bind "$1" --max-heaps 90 $group >/dev/null &
receiver=$!
sleep 3
spead2_send.py --ibv --bind "$1" --heaps 100 --heap-size 1000000 --rate 1 $group
# A heap with a lost packet does not count.
wait $receiver
