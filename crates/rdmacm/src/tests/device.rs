//! Discovery and opening of the device.

use uverbs::Errno;
use uverbs::kernel::Kernel;

use super::*;
use crate::device;
use crate::fake::DEVICE;

#[test]
fn sysfs_has_device_number_and_abi_version() {
    let fake = FakeCm::new();
    let found = device::find(&fake);
    assert_eq!(found.dev_t, Some(libc::makedev(10, 58)));
    assert_eq!((found.name.as_str(), found.abi_version), ("rdma_cm", 4));
    assert_eq!(fake.open_fds(), [], "no attribute is left open");
}

#[test]
fn without_sysfs_the_default_path_is_used() {
    let fake = FakeCm::empty();
    fake.set_file(DEVICE, "");
    assert_eq!(device::find(&fake).dev_t, None);
    let channel = EventChannel::open_on(Box::new(fake.clone())).unwrap();
    assert_eq!(fake.open_fds(), [fd(&channel)]);
    drop(channel);
    assert_eq!(fake.open_fds(), []);
}

#[test]
fn no_module() {
    let error = EventChannel::open_on(Box::new(FakeCm::empty())).unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::Open, libc::ENOENT)
    );
    assert!(error.to_string().contains("modprobe rdma_ucm"), "{error}");
}

#[test]
fn another_version() {
    for (text, found) in [("3\n", 3), ("5", 5)] {
        let fake = FakeCm::new();
        fake.set_file("/sys/class/misc/rdma_cm/abi_version", text);
        let error = EventChannel::open_on(Box::new(fake)).unwrap_err();
        assert_eq!(error, Error::Abi { found });
    }
}

#[test]
fn a_node_of_another_device_is_not_opened() {
    let fake = FakeCm::new();
    fake.set_file("/sys/class/misc/rdma_cm/dev", "10:59\n");
    // All nodes of the fake are 10:58.
    let error = EventChannel::open_on(Box::new(fake.clone())).unwrap_err();
    assert_eq!(error.errno(), Errno::new(libc::ENOENT));
    fake.set_file("/sys/class/misc/rdma_cm/dev", "10:58\n");
    let moved = FakeCm::empty();
    moved.set_file("/sys/class/misc/rdma_cm/abi_version", "4");
    moved.set_file("/sys/class/misc/rdma_cm/dev", "10:58\n");
    moved.set_file("/dev/char/10:58", "");
    EventChannel::open_on(Box::new(moved)).unwrap();
}

#[test]
fn malformed_sysfs_attributes() {
    for text in ["", "x", "99999999999999999999", "4 4", "-4"] {
        let fake = FakeCm::new();
        fake.set_file("/sys/class/misc/rdma_cm/abi_version", text);
        fake.set_file("/sys/class/misc/rdma_cm/dev", text);
        assert_eq!(device::find(&fake).dev_t, None, "{text:?}");
    }
    let fake = FakeCm::new();
    fake.set_file("/sys/class/misc/rdma_cm/dev", &"1".repeat(100));
    assert_eq!(device::find(&fake).dev_t, None);
}

#[test]
fn the_netlink_request_has_the_required_format() {
    let request = device::netlink_request();
    assert_eq!(request.len(), 28);
    assert_eq!(request[..4], 28u32.to_ne_bytes());
    assert_eq!(request[4..6], (5u16 << 10 | 15).to_ne_bytes());
    assert_eq!(request[16..20], [12, 0, 69, 0]);
    assert_eq!(&request[20..], b"rdma_cm\0");
}

/// A kernel whose netlink answers with these datagrams.
#[derive(Debug)]
struct Netlink(FakeCm, Vec<u8>);

// SAFETY: the descriptors are those of the inner fake.
unsafe impl Kernel for Netlink {
    fn open(&self, path: &core::ffi::CStr, flags: i32) -> Result<i32, Errno> {
        self.0.open(path, flags)
    }
    unsafe fn close(&self, fd: i32) -> Result<(), Errno> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.close(fd) }
    }
    unsafe fn ioctl(&self, _: i32, _: libc::Ioctl, _: *mut libc::c_void) -> Result<i32, Errno> {
        Err(Errno::new(libc::ENOTTY))
    }
    unsafe fn read(&self, fd: i32, buffer: &mut [u8]) -> Result<usize, Errno> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.read(fd, buffer) }
    }
    unsafe fn write(&self, fd: i32, buffer: &[u8]) -> Result<usize, Errno> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.write(fd, buffer) }
    }
    unsafe fn wait_readable(&self, fd: i32, timeout_ms: i32) -> Result<bool, Errno> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.wait_readable(fd, timeout_ms) }
    }
    unsafe fn set_nonblocking(&self, fd: i32, nonblocking: bool) -> Result<(), Errno> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.set_nonblocking(fd, nonblocking) }
    }
    fn device_number(&self, path: &core::ffi::CStr) -> Result<libc::dev_t, Errno> {
        self.0.device_number(path)
    }
    fn list_directory(&self, path: &core::ffi::CStr) -> Result<Vec<String>, Errno> {
        self.0.list_directory(path)
    }
    fn netlink(&self, _: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno> {
        if receive(&self.1) {
            Ok(())
        } else {
            Err(Errno::new(libc::EAGAIN))
        }
    }
    fn sysfs_path(&self) -> String {
        self.0.sysfs_path()
    }
}

/// Builds a netlink message with attributes.
fn message(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut message = [
        0u32.to_ne_bytes().as_slice(),
        &(5u16 << 10 | 15).to_ne_bytes(),
    ]
    .concat();
    message.resize(16, 0);
    for (number, value) in attributes {
        message.extend((value.len() as u16 + 4).to_ne_bytes());
        message.extend(number.to_ne_bytes());
        message.extend_from_slice(value);
        message.resize(message.len().next_multiple_of(4), 0);
    }
    let len = (message.len() as u32).to_ne_bytes();
    message[..4].copy_from_slice(&len);
    message
}

#[test]
fn netlink_is_queried_first() {
    let dev = (10u64 << 8 | 58).to_ne_bytes();
    let good: [(u16, &[u8]); 3] = [(70, b"rdma_cm\0"), (71, &4u64.to_ne_bytes()), (72, &dev)];
    let kernel = Netlink(FakeCm::empty(), message(&good));
    let found = device::find(&kernel);
    assert_eq!(
        (found.dev_t, found.abi_version),
        (Some(libc::makedev(10, 58)), 4)
    );
    // A name that leaves the directory, or a truncated answer: sysfs is used.
    let bad: [(u16, &[u8]); 3] = [(70, b"../mem\0"), good[1], good[2]];
    for answer in [
        message(&bad),
        message(&good[..1]),
        message(&good)[..30].to_vec(),
        vec![],
    ] {
        let kernel = Netlink(FakeCm::new(), answer);
        assert_eq!(device::find(&kernel).name, "rdma_cm");
    }
}
