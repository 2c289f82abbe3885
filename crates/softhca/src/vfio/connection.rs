//! A connection to QEMU: receives requests and sends replies.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::EventFd;
use nix::sys::time::TimeSpec;

use super::dma::{Guest, MapError};
use super::message::{HEADER_SIZE, Header, MAX_MESSAGE, command, get16, get32, get64};
use super::pci::{Config, irq, region};
use crate::ancillary::{self, Received};
use crate::hca::{BAR_SIZE, Hca, VECTORS};

/// How long to wait after a doorbell for the rest of a BlueFlame write, which
/// arrives 8 bytes at a time.
const BLUE_FLAME_WAIT: TimeSpec = TimeSpec::new(0, 50_000);

/// Limit of file descriptors in a message.
const MAX_FDS: usize = 16;

const MAJOR_VERSION: u16 = 0;
/// Limit of the bytes in one region access.
const MAX_ACCESS: usize = 4096;

const INFO_RESET: u32 = 1;
const INFO_PCI: u32 = 2;
const REGION_READ_WRITE: u32 = 3;
const IRQ_EVENTFD: u32 = 1;
const IRQ_NORESIZE: u32 = 1 << 3;
const SET_DATA_NONE: u32 = 1 << 0;
const SET_DATA_EVENTFD: u32 = 1 << 2;
const SET_ACTION_TRIGGER: u32 = 1 << 5;
const UNMAP_ALL: u32 = 1 << 1;

/// Reasons for the end of a connection.
#[derive(Debug)]
pub enum DisconnectReason {
    /// QEMU closed the connection.
    Closed,
    /// The socket failed.
    Socket(io::Error),
    /// A malformed message, after which the stream is out of sync.
    Malformed(&'static str),
}

/// A connection to QEMU.
pub struct Connection {
    socket: UnixStream,
    config: Config,
    buffer: Vec<u8>,
    /// The received bytes in `buffer` are `begin..end`.
    begin: usize,
    end: usize,
    /// Stream position of `begin`.
    position: u64,
    /// Received descriptors, each with the stream position at which they arrived.
    fds: VecDeque<(u64, Vec<OwnedFd>)>,
    replies: Vec<u8>,
}

impl Connection {
    /// Creates a connection from an accepted socket.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(socket: UnixStream, hca: &Hca<Guest>) -> io::Result<Connection> {
        socket.set_nonblocking(true)?;
        Ok(Connection {
            socket,
            config: Config::new(hca.settings().profile.port),
            buffer: vec![0; 2 * MAX_MESSAGE],
            begin: 0,
            end: 0,
            position: 0,
            fds: VecDeque::new(),
            replies: Vec::new(),
        })
    }

    /// The socket, to poll for readiness.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Handles messages until none is left or `budget` messages were handled.
    /// Returns true if none is left.
    ///
    /// # Errors
    /// The connection ended.
    pub fn serve(&mut self, hca: &mut Hca<Guest>, budget: usize) -> Result<bool, DisconnectReason> {
        let mut handled = 0;
        loop {
            while let Some(header) = self.next_header()? {
                if self.end - self.begin < header.size {
                    break;
                }
                self.handle(hca, header)?;
                handled += 1;
                if handled >= budget {
                    self.flush()?;
                    return Ok(false);
                }
            }
            self.flush()?;
            if self.receive()? || hca.has_partial_blue_flame() && self.wait_for_data() {
                continue;
            }
            hca.flush_blue_flame();
            return Ok(true);
        }
    }

    /// Waits [`BLUE_FLAME_WAIT`] for the rest of a BlueFlame write. Returns true if
    /// data arrived.
    fn wait_for_data(&self) -> bool {
        let socket = PollFd::new(self.socket.as_fd(), PollFlags::POLLIN);
        matches!(ppoll(&mut [socket], Some(BLUE_FLAME_WAIT), None), Ok(1..))
    }

    fn next_header(&self) -> Result<Option<Header>, DisconnectReason> {
        match self.buffer[self.begin..self.end].first_chunk::<HEADER_SIZE>() {
            Some(bytes) => Header::parse(bytes)
                .map(Some)
                .map_err(DisconnectReason::Malformed),
            None => Ok(None),
        }
    }

    /// Receives available data. Returns false if there is none.
    fn receive(&mut self) -> Result<bool, DisconnectReason> {
        if self.begin > 0 {
            self.buffer.copy_within(self.begin..self.end, 0);
            self.end -= self.begin;
            self.begin = 0;
        }
        let received = ancillary::receive(self.socket.as_fd(), &mut self.buffer[self.end..], 0);
        let Received {
            length,
            fds,
            is_cut,
        } = match received {
            Ok(received) => received,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(false),
                _ => return Err(DisconnectReason::Socket(error)),
            },
        };
        // Those of a message that has not arrived completely, and of the next one.
        let waiting: usize = self.fds.iter().map(|(_, fds)| fds.len()).sum();
        if is_cut || fds.len() > MAX_FDS || waiting > MAX_FDS {
            return Err(DisconnectReason::Malformed("too many file descriptors"));
        }
        if length == 0 {
            return Err(DisconnectReason::Closed);
        }
        self.end += length;
        if !fds.is_empty() {
            // A receive ends at the message that its descriptors came with, so they
            // belong to the message that contains the last byte.
            let last = self.position + (self.end - self.begin) as u64;
            self.fds.push_back((last, fds));
        }
        Ok(true)
    }

    /// Takes the descriptors of the message that ends at `end`.
    fn take_fds(&mut self, end: u64) -> Vec<OwnedFd> {
        let mut taken = Vec::new();
        while self
            .fds
            .front()
            .is_some_and(|(position, _)| *position <= end)
        {
            if let Some((_, fds)) = self.fds.pop_front() {
                taken.extend(fds);
            }
        }
        taken
    }

    fn flush(&mut self) -> Result<(), DisconnectReason> {
        let mut rest = &self.replies[..];
        while !rest.is_empty() {
            match nix::unistd::write(&self.socket, rest) {
                Ok(n) => rest = &rest[n..],
                Err(Errno::EAGAIN) => {
                    // QEMU will read the replies that it waits for.
                    let poll = PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT);
                    let _ = nix::poll::poll(&mut [poll], 1000_u16);
                }
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(DisconnectReason::Socket(errno.into())),
            }
        }
        self.replies.clear();
        Ok(())
    }

    fn handle(&mut self, hca: &mut Hca<Guest>, header: Header) -> Result<(), DisconnectReason> {
        let from = self.begin + HEADER_SIZE;
        let to = self.begin + header.size;
        self.begin = to;
        self.position += header.size as u64;
        let fds = self.take_fds(self.position);
        if header.is_reply() {
            return Ok(());
        }
        // The buffer is unused until the next `receive`.
        let body = std::mem::take(&mut self.buffer);
        let result = self.execute(hca, header.command, &body[from..to], fds);
        self.buffer = body;
        if header.wants_reply() {
            match result {
                Ok(reply) => {
                    let bytes = header.reply(HEADER_SIZE + reply.len(), 0);
                    self.replies.extend_from_slice(&bytes);
                    self.replies.extend_from_slice(&reply);
                }
                Err(errno) => {
                    tracing::debug!(command = header.command, %errno, "vfio-user request failed");
                    self.replies
                        .extend_from_slice(&header.reply(HEADER_SIZE, errno as i32));
                }
            }
        }
        Ok(())
    }

    fn execute(
        &mut self,
        hca: &mut Hca<Guest>,
        code: u16,
        body: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Errno> {
        match code {
            command::REGION_WRITE => self.region_write(hca, body),
            command::REGION_WRITE_MULTI => self.region_write_multi(hca, body),
            command::REGION_READ => self.region_read(hca, body),
            command::VERSION => version(body),
            command::DMA_MAP => dma_map(hca, body, fds),
            command::DMA_UNMAP => dma_unmap(hca, body),
            command::GET_INFO => Ok(words_to_bytes(&[
                16,
                INFO_RESET | INFO_PCI,
                region::COUNT,
                irq::COUNT,
            ])),
            command::GET_REGION_INFO => region_info(body),
            command::GET_IRQ_INFO => irq_info(body),
            command::SET_IRQS => set_irqs(hca, body, fds),
            command::RESET => {
                hca.reset();
                self.config = Config::new(hca.settings().profile.port);
                Ok(Vec::new())
            }
            _ => Err(Errno::EOPNOTSUPP),
        }
    }

    fn region_read(&mut self, hca: &mut Hca<Guest>, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let offset = get64(body, 0);
        let count = get32(body, 12) as usize;
        if count > MAX_ACCESS {
            return Err(Errno::EINVAL);
        }
        let mut reply = body.get(..16).ok_or(Errno::EINVAL)?.to_vec();
        let mut data = vec![0; count];
        match get32(body, 8) {
            region::CONFIG => self.config.read(offset, &mut data),
            region::BAR0 if in_bar(offset, count) => {
                // Earlier writes take effect before the read.
                hca.flush_blue_flame();
                hca.read(offset, &mut data);
            }
            _ => return Err(Errno::EINVAL),
        }
        reply.extend_from_slice(&data);
        Ok(reply)
    }

    fn region_write(&mut self, hca: &mut Hca<Guest>, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let offset = get64(body, 0);
        let count = get32(body, 12) as usize;
        let head = body.get(..16).ok_or(Errno::EINVAL)?;
        let data = body.get(16..16 + count).ok_or(Errno::EINVAL)?;
        self.write(hca, get32(body, 8), offset, data)?;
        Ok(head.to_vec())
    }

    fn region_write_multi(&mut self, hca: &mut Hca<Guest>, body: &[u8]) -> Result<Vec<u8>, Errno> {
        /// Offset, region, count and 8 bytes of data.
        const WRITE: usize = 24;
        let count = get64(body, 0) as usize;
        for write in body.get(8..).unwrap_or(&[]).chunks_exact(WRITE).take(count) {
            let n = get32(write, 12) as usize;
            let data = write.get(16..16 + n).ok_or(Errno::EINVAL)?;
            self.write(hca, get32(write, 8), get64(write, 0), data)?;
        }
        Ok(body.get(..8).ok_or(Errno::EINVAL)?.to_vec())
    }

    fn write(
        &mut self,
        hca: &mut Hca<Guest>,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Errno> {
        match region {
            region::CONFIG => self.config.write(offset, data),
            region::BAR0 if in_bar(offset, data.len()) => hca.write(offset, data),
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }
}

fn in_bar(offset: u64, count: usize) -> bool {
    offset
        .checked_add(count as u64)
        .is_some_and(|end| end <= BAR_SIZE)
}

fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn version(body: &[u8]) -> Result<Vec<u8>, Errno> {
    if get16(body, 0) != MAJOR_VERSION {
        return Err(Errno::EINVAL);
    }
    let mut reply = words_to_bytes(&[u32::from(MAJOR_VERSION)]);
    let capabilities = format!(
        r#"{{"capabilities":{{"max_msg_fds":{MAX_FDS},"max_data_xfer_size":{MAX_ACCESS},"pgsizes":4096,"write_multiple":true}}}}"#
    );
    reply.extend_from_slice(capabilities.as_bytes());
    reply.push(0);
    Ok(reply)
}

fn dma_map(hca: &mut Hca<Guest>, body: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<u8>, Errno> {
    let (offset, address, size) = (get64(body, 8), get64(body, 16), get64(body, 24));
    let file = fds.into_iter().next().map(|fd| (fd, offset));
    match hca.platform_mut().map(address, size, file) {
        Ok(()) => Ok(Vec::new()),
        Err(MapError::Range) => Err(Errno::EINVAL),
        Err(MapError::File) => {
            // The guest continues without access to this region by the device.
            tracing::warn!("cannot map guest memory at {address:#x}+{size:#x}");
            let _ = hca.platform_mut().map(address, size, None);
            Ok(Vec::new())
        }
    }
}

fn dma_unmap(hca: &mut Hca<Guest>, body: &[u8]) -> Result<Vec<u8>, Errno> {
    let head = body.get(..24).ok_or(Errno::EINVAL)?;
    if get32(body, 4) & UNMAP_ALL != 0 {
        hca.platform_mut().unmap_all();
    } else {
        hca.platform_mut().unmap(get64(body, 8), get64(body, 16));
    }
    Ok(head.to_vec())
}

fn region_info(body: &[u8]) -> Result<Vec<u8>, Errno> {
    let index = get32(body, 8);
    let size = match index {
        region::BAR0 => BAR_SIZE,
        region::CONFIG => super::pci::CONFIG_SIZE as u64,
        _ if index < region::COUNT => 0,
        _ => return Err(Errno::EINVAL),
    };
    let flags = if size > 0 { REGION_READ_WRITE } else { 0 };
    let mut reply = words_to_bytes(&[32, flags, index, 0]);
    reply.extend_from_slice(&size.to_ne_bytes());
    reply.extend_from_slice(&0_u64.to_ne_bytes());
    Ok(reply)
}

fn irq_info(body: &[u8]) -> Result<Vec<u8>, Errno> {
    let index = get32(body, 8);
    let count = match index {
        irq::MSIX => VECTORS as u32,
        _ if index < irq::COUNT => 0,
        _ => return Err(Errno::EINVAL),
    };
    Ok(words_to_bytes(&[
        16,
        IRQ_EVENTFD | IRQ_NORESIZE,
        index,
        count,
    ]))
}

fn set_irqs(hca: &mut Hca<Guest>, body: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<u8>, Errno> {
    let flags = get32(body, 4);
    let index = get32(body, 8);
    let start = get32(body, 12) as usize;
    let count = get32(body, 16) as usize;
    if index >= irq::COUNT {
        return Err(Errno::EINVAL);
    }
    if index != irq::MSIX || flags & SET_ACTION_TRIGGER == 0 {
        return Ok(Vec::new());
    }
    if start.checked_add(count).is_none_or(|end| end > VECTORS) {
        return Err(Errno::EINVAL);
    }
    let guest = hca.platform_mut();
    if flags & SET_DATA_EVENTFD != 0 {
        let mut fds = fds.into_iter();
        for vector in start..start + count {
            // SAFETY: QEMU declares these descriptors to be eventfds. They are only
            // written to, 8 bytes at a time, and are owned from here on.
            let event = fds.next().map(|fd| unsafe { EventFd::from_owned_fd(fd) });
            guest.set_vector(vector, event);
        }
    } else if flags & SET_DATA_NONE != 0 && count == 0 {
        for vector in 0..VECTORS {
            guest.set_vector(vector, None);
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use roce::fabric::Fabric;
    use roce::packet::Pool;

    use super::*;
    use crate::Settings;
    use crate::profile::Profile;

    /// A message, or many that are never complete, with more descriptors than a command has.
    #[test]
    fn too_many_descriptors_are_closed() {
        let (passed, _other) = nix::unistd::pipe().unwrap();
        for counts in [&[17][..], &[18], &[253], &[16; 8]] {
            let settings = Settings::numbered(Profile::named("roce").unwrap(), 0);
            let guest = Guest::new(VECTORS);
            let mut hca = Hca::new(guest, settings, &Fabric::new(1), Pool::new());
            let (qemu, device) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(device, &hca).unwrap();
            for count in counts {
                let raw = vec![passed.as_raw_fd(); *count];
                let control = [ControlMessage::ScmRights(&raw)];
                let (part, flags) = ([IoSlice::new(&[0])], MsgFlags::MSG_NOSIGNAL);
                sendmsg::<()>(qemu.as_raw_fd(), &part, &control, flags, None).unwrap();
            }
            let reason = connection.serve(&mut hca, 64);
            assert!(
                matches!(reason, Err(DisconnectReason::Malformed(_))),
                "{counts:?}"
            );
            drop((connection, qemu));
            let number = |at: &str| std::fs::metadata(at).map(|it| it.ino()).ok();
            let own = number(&format!("/proc/self/fd/{}", passed.as_raw_fd()));
            let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let open = all.filter(|it| it.path().to_str().and_then(number) == own);
            // Both ends of the pipe.
            assert_eq!(open.count(), 2, "{counts:?}");
        }
    }
}
