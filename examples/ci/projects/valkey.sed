# Valkey's RDMA test without a kernel module and root:
#   sed -i -f valkey.sed .github/workflows/ci.yml
# Its script ends well without a device, so that --require-rdma is what fails then.
/^  test-rdma:/,/^  [a-z]/ {
  /- name: clone-rxe-kmod/,/^          make -C/d
  /- name: clear-kernel-log/,/run:/d
  /- name: show-kernel-log/,/run:/d
  s|^\( *\)run: sudo ./runtest-rdma --install-rxe|\1run: ringverbs run --embedded --require-rdma --explain -- ./runtest-rdma|
  /^      - name: test$/i\
      - uses: OWNER/ringverbs@VERSION
}
