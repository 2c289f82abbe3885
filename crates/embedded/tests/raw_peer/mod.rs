//! A hostile peer, which connects to the socket of another process and sends arbitrary data.
#![allow(dead_code, reason = "each test uses a part")]

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixAddr, accept4, bind, connect, listen, recvmsg, sendmsg, socket,
};
use ring::{FrameSender, Mapping};

/// A directory that is removed after the test.
pub struct TempDirectory(pub PathBuf);

impl TempDirectory {
    pub fn new(name: &str) -> Self {
        let name = format!("ringverbs-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TempDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Connects to the socket of the process with a number.
pub fn connection(directory: &Path, number: u16) -> nix::Result<OwnedFd> {
    let at = UnixAddr::new(&directory.join(format!("{number}.socket")))?;
    let flags = SockFlag::SOCK_CLOEXEC;
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    connect(fd.as_raw_fd(), &at)?;
    Ok(fd)
}

/// The version that a process names in its first message.
pub const VERSION: u8 = 2;

/// Sends a message with descriptors.
pub fn send_descriptors(to: &OwnedFd, descriptors: &[&OwnedFd]) -> nix::Result<()> {
    let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
    let control = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(
        to.as_raw_fd(),
        &[IoSlice::new(&[VERSION])],
        &control,
        flags,
        None,
    )
    .map(drop)
}

/// A connection with a ring, and the memory of the ring.
pub struct RawPeer {
    pub socket: OwnedFd,
    pub ring: FrameSender,
    pub memory: Mapping,
}

impl RawPeer {
    pub fn new(directory: &Path, number: u16) -> nix::Result<Self> {
        let socket = connection(directory, number)?;
        let (ring, memory) = FrameSender::create().unwrap();
        send_descriptors(&socket, &[&memory])?;
        let memory = map(&memory.into());
        Ok(Self {
            socket,
            ring,
            memory,
        })
    }
}

impl RawPeer {
    /// Pushes a frame, and wakes the receiver.
    pub fn push(&mut self, tag: u8, frame: &[u8]) {
        let _ = self.ring.push(tag, frame);
        let _ = send_descriptors(&self.socket, &[]);
    }
}

/// Overwrites a word of a ring's memory, which another process may be reading.
pub fn overwrite_word(memory: &Mapping, at: usize, word: u32) {
    let at = at % (memory.len() / 4);
    // SAFETY: in the mapping, and aligned; all access it by atomics.
    let word_at = unsafe { AtomicU32::from_ptr(memory.as_ptr().cast::<u32>().add(at).as_ptr()) };
    word_at.store(word, Ordering::Relaxed);
}

/// Creates a listening socket with the name of a process.
pub fn listener(directory: &Path, number: u16) -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC;
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
    let at = UnixAddr::new(&directory.join(format!("{number}.socket"))).unwrap();
    bind(fd.as_raw_fd(), &at).unwrap();
    listen(&fd, Backlog::new(8).unwrap()).unwrap();
    fd
}

/// Accepts a connection, and maps the ring that the sender passes.
pub fn accept(listener: &OwnedFd) -> (OwnedFd, Mapping) {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC).unwrap();
    // SAFETY: the descriptor is new and owned by nothing else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let (mut byte, mut control) = ([0], cmsg_space!([RawFd; 1]));
    let mut data = [IoSliceMut::new(&mut byte)];
    let message = recvmsg::<()>(fd, &mut data, Some(&mut control), MsgFlags::empty()).unwrap();
    let mut received = message.cmsgs().unwrap();
    let Some(ControlMessageOwned::ScmRights(received)) = received.next() else {
        panic!("no ring");
    };
    // SAFETY: as above.
    let memory = unsafe { File::from_raw_fd(received[0]) };
    (socket, map(&memory))
}

fn map(memory: &File) -> Mapping {
    let length = memory.metadata().unwrap().len() as usize;
    Mapping::new(memory.as_fd(), 0, length).unwrap()
}
