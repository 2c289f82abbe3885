# NIXL's tests without a GPU, which use TCP alone where no RDMA device is: the same by UCX's RDMA
# transports. Tried with NIXL's example of two peers. URL-x86_64 and URL-aarch64 are the commands of a release.
#   sed -i -f nixl.sed .ci/jenkins/lib/build-matrix.yaml
/^  - name: Test \(CPP\|Python\|Nixlbench\)$/,/^$/ {
  s|^\( *\)\.gitlab/test_|\1curl --fail --silent --show-error --location --output /tmp/ringverbs URL-$(uname -m)\
\1chmod 755 /tmp/ringverbs\
\1eval "$(/tmp/ringverbs env --embedded)"\
&|
}
