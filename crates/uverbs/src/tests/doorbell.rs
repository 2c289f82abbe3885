//! The doorbell's bytes.

use super::context;
use crate::kernel::RealKernel;
use crate::kernel::fake::Call;
use crate::{Context, Errno, PostSendDoorbell, QpHandle};

#[test]
fn a_post_of_nothing() {
    let (fake, context) = context();
    let doorbell = PostSendDoorbell::new(&context, QpHandle(0x1234));
    doorbell.ring().unwrap();
    let calls = fake.take_calls();
    let [Call::Write { fd, bytes }] = calls.as_slice() else {
        panic!("{calls:?}")
    };
    assert_eq!(*fd, context.fd());
    let word = |index: usize| {
        let bytes = bytes.get(index * 4..index * 4 + 4).unwrap();
        u32::from_ne_bytes(bytes.try_into().unwrap())
    };
    assert_eq!(bytes.len(), 32);
    assert_eq!(word(0), 28, "POST_SEND");
    let half =
        |range: core::ops::Range<usize>| u16::from_ne_bytes(bytes[range].try_into().unwrap());
    assert_eq!((half(4..6), half(6..8)), (8, 1), "eight words in, one out");
    let response = u64::from_ne_bytes(bytes[8..16].try_into().unwrap());
    assert_ne!(response, 0, "the kernel writes an answer");
    assert_eq!(word(4), 0x1234, "the queue pair");
    assert_eq!(
        (word(5), word(6)),
        (0, 0),
        "no work request, no scatter element"
    );
    assert_eq!(
        word(7),
        56,
        "the size of a work request, which the kernel checks"
    );
}

#[test]
fn refusals_are_reported() {
    let (fake, context) = context();
    let doorbell = PostSendDoorbell::new(&context, QpHandle(1));
    fake.set_write_error(Some(Errno::new(libc::EIO)));
    assert_eq!(doorbell.ring(), Err(Errno::new(libc::EIO)));
    fake.set_write_error(None);
    assert_eq!(doorbell.ring(), Ok(()));
}

/// The real kernel, with a pipe: exactly one command is written.
#[test]
fn directly_by_libc() {
    let mut fds = [0; 2];
    // SAFETY: the array has room for two descriptors.
    let made = unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) };
    assert_eq!(made, 0);
    let driver = crate::kernel::fake::DRIVER;
    // SAFETY: the pipe's ends are new and owned by nothing else.
    let context = unsafe { Context::from_owned_fd(Box::new(RealKernel), fds[1], driver) };
    let doorbell = PostSendDoorbell::new(&&context, QpHandle(7));
    doorbell.ring().unwrap();
    let mut bytes = [0u8; 64];
    // SAFETY: as above.
    let reader = unsafe { Context::from_owned_fd(Box::new(RealKernel), fds[0], driver) };
    assert_eq!(reader.file().read(&mut bytes), Ok(32));
    assert_eq!(bytes[16..20], 7u32.to_ne_bytes());
    drop(reader);
    // Rust's runtime ignores SIGPIPE, so this is an error.
    assert_eq!(doorbell.ring(), Err(Errno::new(libc::EPIPE)));
}
