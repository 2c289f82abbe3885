//! Completion channels and asynchronous event files.

use zerocopy::IntoBytes;

use super::context;
use crate::abi::ids::ATTR_CORE_OUT;
use crate::abi::write::{AsyncEventDesc, cmd};
use crate::kernel::fake::{Call, Target};
use crate::*;

#[test]
fn completion_channel() {
    let (fake, context) = context();
    let channel = CompletionChannel::create(&context).unwrap();
    let fd = channel.fd();
    assert!(fake.open_fds().contains(&fd));
    channel.set_nonblocking(true).unwrap();
    assert!(fake.take_calls().contains(&Call::SetNonblocking {
        fd,
        nonblocking: true
    }));

    fake.push_read(fd, Ok(0x1122_3344_5566_7788u64.to_ne_bytes().to_vec()));
    fake.push_read(fd, Ok(vec![0; 7]));
    fake.push_read(fd, Err(Errno::new(libc::EINTR)));
    assert_eq!(channel.read_event(), Ok(0x1122_3344_5566_7788));
    let error = channel.read_event().unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::ReadCompEvent,
            ..
        }
    ));
    assert_eq!(channel.read_event().unwrap_err().errno().raw(), libc::EINTR);
    assert_eq!(
        channel.read_event().unwrap_err().errno().raw(),
        libc::EAGAIN
    );

    drop(channel);
    assert!(!fake.open_fds().contains(&fd));
    let kept = CompletionChannel::create(&context).unwrap().into_fd();
    assert!(fake.open_fds().contains(&kept));
}

#[test]
fn a_channel_needs_a_descriptor() {
    let (fake, context) = context();
    fake.on(Target::Write(cmd::CMD_CREATE_COMP_CHANNEL), |reply| {
        reply.set(ATTR_CORE_OUT, u32::MAX.as_bytes());
        Ok(())
    });
    let error = CompletionChannel::create(&context).unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::CreateCompChannel,
            ..
        }
    ));
}

#[test]
fn asynchronous_events() {
    let (fake, context) = context();
    let file = AsyncEventFile::alloc(&context).unwrap();
    let fd = file.fd();
    let event = |event_type| AsyncEventDesc {
        element: 0xabc,
        event_type,
        reserved: 0,
    };
    fake.push_read(fd, Ok(event(8).as_bytes().to_vec()));
    fake.push_read(fd, Ok(event(12345).as_bytes().to_vec()));
    fake.push_read(fd, Ok(vec![1; 15]));
    assert_eq!(
        file.read_event(),
        Ok(AsyncEvent {
            element: 0xabc,
            event: AsyncEventType::DEVICE_FATAL
        })
    );
    let unknown = file.read_event().unwrap().event;
    assert_eq!(
        (unknown, format!("{unknown:?}").as_str()),
        (AsyncEventType(12345), "AsyncEventType(12345)")
    );
    assert_eq!(file.read_event().unwrap_err().errno().raw(), libc::EPROTO);
    drop(file);
    assert!(!fake.open_fds().contains(&fd));
}
