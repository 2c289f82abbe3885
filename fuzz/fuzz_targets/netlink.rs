//! RDMA netlink answers and sysfs texts with arbitrary contents.
//!
//! The first byte selects how the rest is split into datagrams, which are input of each
//! parser, and of device discovery.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use uverbs::abi::netlink::{NLDEV_CMD_GET, NLDEV_CMD_GET_CHARDEV, NLDEV_CMD_SYS_GET, nldev_type};
use uverbs::discovery::netlink::{
    self, Attributes, Messages, parse_char_device, parse_copy_on_fork, parse_device,
    parse_object_counts, read_answer,
};
use uverbs::discovery::{self, sysfs};
use uverbs::kernel::fake::FakeKernel;

/// Checks that an accepted name from the kernel is one component of a path.
fn assert_component(name: &str) {
    assert!(!name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']));
}

fn parsers(bytes: &[u8]) {
    for message in Messages::new(bytes).flatten() {
        if let Ok(device) = parse_device(message.payload) {
            assert_component(&device.name);
        }
        if let Ok(device) = parse_char_device(message.payload) {
            assert_component(&device.name);
        }
        let _ = parse_copy_on_fork(message.payload);
        if let Ok(counts) = parse_object_counts(message.payload) {
            assert_component(&counts.device);
        }
    }
    let total: usize = Attributes::new(bytes)
        .flatten()
        .map(|(_, value)| value.len() + 4)
        .sum();
    assert!(total <= bytes.len());
    let _ = parse_device(bytes);
    let _ = parse_char_device(bytes);
    for dump in [false, true] {
        let _ = read_answer(bytes, NLDEV_CMD_GET, dump, |payload| {
            parse_device(payload).map(drop)
        });
    }
    let text = String::from_utf8_lossy(bytes);
    let _ = (
        sysfs::parse_gid(&text),
        sysfs::parse_guid(&text),
        sysfs::parse_pkey(&text),
    );
    let _ = (
        sysfs::parse_device_number(&text),
        sysfs::parse_node_type(&text),
    );
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&cut, bytes)) = bytes.split_first() else {
        return;
    };
    let datagrams: Vec<Vec<u8>> = match usize::from(cut) {
        0 => vec![bytes.to_vec()],
        // Datagrams of several whole messages, according to their lengths.
        cut if cut < 128 => {
            let ends = Messages::new(bytes).flatten().map(|message| {
                message.payload.as_ptr().addr() - bytes.as_ptr().addr() + message.payload.len()
            });
            let mut ends: Vec<usize> = ends
                .map(|end| end.next_multiple_of(4).min(bytes.len()))
                .collect();
            ends.push(bytes.len());
            let mut start = 0;
            let piece = |end: usize| {
                let piece = bytes[start.min(end)..end].to_vec();
                start = end;
                piece
            };
            ends.into_iter().step_by(cut).map(piece).collect()
        }
        cut => bytes.chunks(cut - 127).map(<[u8]>::to_vec).collect(),
    };
    for datagram in &datagrams {
        parsers(datagram);
    }
    let fake = FakeKernel::new();
    for command in [NLDEV_CMD_GET, NLDEV_CMD_GET_CHARDEV, NLDEV_CMD_SYS_GET] {
        fake.set_netlink(nldev_type(command), datagrams.clone());
    }
    fake.set_device_number("/dev/infiniband/uverbs0", 1);
    let kernel: &Arc<FakeKernel> = &fake;
    for device in discovery::devices(kernel).unwrap_or_default() {
        assert_component(&device.name);
        assert_component(&device.uverbs_name);
    }
    let _ = netlink::copy_on_fork(kernel);
    assert!(fake.open_fds().is_empty(), "no file is left open");
});
