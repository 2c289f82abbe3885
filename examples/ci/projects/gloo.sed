# Gloo's ibverbs transport, by its benchmark, which compares the results: its own tests do
# without.
#   sed -i -f gloo.sed .github/workflows/build-linux.yml
s|-DUSE_IBVERBS=ON|-DUSE_IBVERBS=ON -DBUILD_BENCHMARK=ON|
/^      - name: Test$/i\
      - uses: OWNER/ringverbs@VERSION\
        if: contains(matrix.cmake_args, 'USE_IBVERBS')\
        with:\
          explain: explanations.txt\
      - name: Collectives over RDMA\
        if: contains(matrix.cmake_args, 'USE_IBVERBS')\
        run: |\
          export LD_LIBRARY_PATH=/opt/openssl:/opt/openssl/lib:$LD_LIBRARY_PATH\
          for collective in allreduce_ring_chunked allreduce_halving_doubling broadcast_one_to_all; do\
            mkdir "store-$collective"\
            for rank in 0 1; do\
              ringverbs run --embedded --require-rdma -- ./build/gloo/benchmark/benchmark \\\
                --size 2 --rank $rank --shared-path "store-$collective" --transport ibverbs \\\
                --elements 100000 --iteration-count 100 "$collective" &\
            done\
            wait -n && wait -n\
          done
