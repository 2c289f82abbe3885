#!/bin/sh
# TensorPipe's ibv transport: a process sends messages of up to 16 MiB to another one, which
# sends them back, and compares the data:
#   ringverbs run --embedded [--devices mlx5] -- rxe-tests/frameworks/tensorpipe.sh [ADDRESS]
# ADDRESS is that of a network interface, over which the queue pairs are connected.
# Packages: apt-get install g++ libtensorpipe-dev
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/pipe.cc" <<'SOURCE'
#include <cstdio>
#include <fstream>
#include <future>
#include <unistd.h>
#include <tensorpipe/tensorpipe.h>

using namespace tensorpipe;

void check(const Error& error) {
  if (error) {
    printf("%s\n", error.what().c_str());
    _exit(1);
  }
}

void write(Pipe& pipe, std::vector<char>& data) {
  Message message;
  message.payloads.push_back({data.data(), data.size() / 2, ""});
  message.tensors.push_back(
      {CpuBuffer{.ptr = data.data() + data.size() / 2}, data.size() - data.size() / 2});
  std::promise<void> written;
  pipe.write(message, [&](const Error& error) { check(error); written.set_value(); });
  written.get_future().wait();
}

std::vector<char> read(Pipe& pipe) {
  std::promise<std::vector<size_t>> described;
  pipe.readDescriptor([&](const Error& error, Descriptor found) {
    check(error);
    described.set_value({found.payloads.at(0).length, found.tensors.at(0).length});
  });
  auto lengths = described.get_future().get();
  std::vector<char> data(lengths[0] + lengths[1]);
  Allocation allocation;
  allocation.payloads.push_back({data.data()});
  allocation.tensors.push_back({CpuBuffer{.ptr = data.data() + lengths[0]}});
  std::promise<void> done;
  pipe.read(allocation, [&](const Error& error) { check(error); done.set_value(); });
  done.get_future().wait();
  return data;
}

int main(int, char** arguments) {
  setlinebuf(stdout);
  bool server = arguments[1][0] == 's';
  auto context = std::make_shared<Context>();
  context->registerTransport(0, "ibv", transport::ibv::create());
  context->registerChannel(0, "basic", channel::basic::create());
  std::shared_ptr<Pipe> pipe;
  std::shared_ptr<Listener> listener;
  if (server) {
    listener = context->listen({std::string("ibv://") + arguments[3]});
    std::promise<std::shared_ptr<Pipe>> accepted;
    listener->accept([&](const Error& error, std::shared_ptr<Pipe> pipe) {
      check(error);
      accepted.set_value(pipe);
    });
    std::string name = arguments[2];
    std::ofstream(name + "-") << listener->url("ibv");
    rename((name + "-").c_str(), name.c_str());
    pipe = accepted.get_future().get();
  } else {
    std::string url;
    std::ifstream(arguments[2]) >> url;
    pipe = context->connect(url);
  }
  for (size_t size : {2ul, 1000ul, 65536ul, 1ul << 20, 16ul << 20})
    for (int turn = 0; turn < 10; turn++) {
      std::vector<char> data(size);
      for (size_t i = 0; i < size; i++) data[i] = i * 31 + turn + (i >> 12);
      if (server) {
        auto got = read(*pipe);
        if (got != data) { printf("server: wrong data of %zu bytes\n", size); _exit(1); }
        write(*pipe, got);
      } else {
        write(*pipe, data);
        if (read(*pipe) != data) { printf("client: wrong data of %zu bytes\n", size); _exit(1); }
        if (turn == 9) printf("%zu bytes: data right\n", size);
      }
    }
  if (server) {
    // The client has read everything once it closes.
    std::promise<void> closed;
    pipe->readDescriptor([&](const Error&, Descriptor) { closed.set_value(); });
    closed.get_future().wait();
  }
  pipe->close();
  context->join();
}
SOURCE
env -u LD_PRELOAD g++ -std=c++17 -w -O1 -o "$folder/pipe" "$folder/pipe.cc" -ltensorpipe -lpthread
"$folder/pipe" server "$folder/url" "${1:-127.0.0.1}" &
while [ ! -e "$folder/url" ]; do
    kill -0 $!
    sleep 0.1
done
"$folder/pipe" client "$folder/url"
wait $!
