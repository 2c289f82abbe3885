# sideway's tests that need a device:
#   sed -i -f sideway.sed .github/workflows/test.yml
/^      - name: Run tests/i\
      - uses: OWNER/ringverbs@VERSION
