# Gloo's tests of its ibverbs transport, which skip themselves without a device:
#   sed -i -f gloo.sed .github/workflows/build-linux.yml
/^      - name: Test$/i\
      - if: contains(matrix.cmake_args, 'USE_IBVERBS')\
        uses: OWNER/ringverbs@VERSION
