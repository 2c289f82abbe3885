# Gloo's collectives over ibverbs, by its benchmark, which compares the results of the first
# iteration. Its unit tests of that transport do not end: they leave the GID index undefined, and
# a pair is destroyed with the lock held for which the thread that must acknowledge its event waits.
#   sed -i -f gloo.sed .github/workflows/build-linux.yml
s|-DBUILD_TEST=ON|& -DBUILD_BENCHMARK=ON|
$a\
      - if: contains(matrix.cmake_args, 'USE_IBVERBS')\
        uses: OWNER/ringverbs@VERSION\
      - name: Test ibverbs\
        if: contains(matrix.cmake_args, 'USE_IBVERBS')\
        run: |\
          for algorithm in allreduce_ring allreduce_halving_doubling allgather_ring broadcast_one_to_all; do\
            store=$(mktemp -d)\
            set -- --size 2 --shared-path "$store" --prefix test --transport ibverbs --elements 100000 --iteration-count 20\
            ./build/gloo/benchmark/benchmark "$@" --rank 1 "$algorithm" > /dev/null &\
            ./build/gloo/benchmark/benchmark "$@" --rank 0 "$algorithm"\
            wait $!\
          done
