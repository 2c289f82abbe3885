#!/bin/sh
# Gloo's ibverbs transport: two processes sum up to 4,194,304 floats by three algorithms,
# broadcast, and compare the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/gloo.sh
# Packages: apt-get install g++ libgloo-dev libibverbs-dev
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/collectives.cc" <<'SOURCE'
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <memory>
#include <unistd.h>
#include <vector>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/ibverbs/device.h>

using Context = std::shared_ptr<gloo::Context>;
using Pointers = std::vector<float*>;

int main(int, char** arguments) {
  setlinebuf(stdout);
  const int rank = atoi(arguments[1]);
  // GID index 0: RoCE version 1, or the port's InfiniBand GID.
  auto device = gloo::transport::ibverbs::CreateDevice({"mlx5_0", 1, atoi(arguments[2])});
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, 2);
  gloo::rendezvous::FileStore store(arguments[3]);
  context->connectFullMesh(store, device);
  using Algorithm = std::unique_ptr<gloo::Algorithm>;
  const std::pair<const char*, std::function<Algorithm(Pointers, int)>> sums[] = {
      {"ring", [&](Pointers p, int n) {
         return Algorithm(new gloo::AllreduceRing<float>(context, p, n)); }},
      {"ring, chunked", [&](Pointers p, int n) {
         return Algorithm(new gloo::AllreduceRingChunked<float>(context, p, n)); }},
      {"halving and doubling", [&](Pointers p, int n) {
         return Algorithm(new gloo::AllreduceHalvingDoubling<float>(context, p, n)); }},
  };
  // A buffer that is destroyed before its last send has completed throws.
  std::list<std::vector<float>> memory;
  std::vector<Algorithm> used;
  for (auto& [name, make] : sums) {
    for (int count : {1, 1000, 4194304}) {
      auto& data = memory.emplace_back(count);
      used.push_back(make({data.data()}, count));
      for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < count; i++) data[i] = (i % 1000 + turn) * (rank + 1);
        used.back()->run();
        for (int i = 0; i < count; i++)
          if (data[i] != 3.0f * (i % 1000 + turn)) {
            printf("%s: element %d of %d is %f\n", name, i, count, data[i]);
            return 1;
          }
      }
    }
    if (rank == 0) printf("allreduce, %s: data right\n", name);
  }
  std::vector<float> data(1 << 20, rank == 0 ? 7.0f : 0.0f);
  gloo::BroadcastOneToAll<float> broadcast(context, {data.data()}, data.size());
  broadcast.run();
  for (float value : data)
    if (value != 7.0f) return 1;
  if (rank == 0) printf("broadcast: data right\n");
  gloo::BarrierAllToAll barrier(context);
  barrier.run();
  usleep(200000);
  _exit(0);
}
SOURCE
env -u LD_PRELOAD g++ -std=c++17 -w -O1 -o "$folder/collectives" "$folder/collectives.cc" -lgloo -libverbs -lpthread
mkdir "$folder/store"
index=${RINGVERBS_GID:-0}
"$folder/collectives" 1 "$index" "$folder/store" &
"$folder/collectives" 0 "$index" "$folder/store"
wait $!
