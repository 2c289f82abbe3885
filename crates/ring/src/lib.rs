//! Rings shared with the kernel or a device: mapping, index protocol, barriers.
