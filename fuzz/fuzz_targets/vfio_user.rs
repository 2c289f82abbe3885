//! The software HCA's vfio-user server with messages of arbitrary contents, in arbitrary
//! pieces, with and without the required file descriptors.
//!
//! For every input: the connection answers or closes, and no access is outside mapped
//! memory.

#![no_main]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use ringverbs_roce::fabric::Fabric;
use ringverbs_softhca::hca::VECTORS;
use ringverbs_roce::packet::Pool;
use ringverbs_softhca::profiles::PROFILES;
use ringverbs_softhca::vfio::dma::Guest;
use ringverbs_softhca::vfio::connection::{Connection, DisconnectReason};
use ringverbs_softhca::{Hca, Settings};

const MEMORY: u64 = 1 << 20;

/// The rest of the input; zeros at its end.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

fn memory() -> OwnedFd {
    // SAFETY: a fresh descriptor without another owner, or -1.
    let fd = unsafe {
        let fd = libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "memfd_create");
        OwnedFd::from_raw_fd(fd)
    };
    let file = File::from(fd);
    file.set_len(MEMORY).expect("a size");
    file.into()
}

/// Returns a message whose fields are mostly valid.
fn message(script: &mut Script<'_>, bits: u8) -> Vec<u8> {
    let command = u16::from(script.byte() % 18);
    let mut body = Vec::new();
    match command {
        // DMA: size, flags, offset, address, length.
        2 | 3 => {
            let size: u32 = if command == 2 { 32 } else { 24 };
            body.extend(size.to_le_bytes());
            body.extend(u32::from(script.byte() & 3).to_le_bytes());
            if command == 2 {
                body.extend((u64::from(script.byte() & 7) << 12).to_le_bytes());
            }
            body.extend((u64::from(script.short()) << 12).to_le_bytes());
            body.extend((u64::from(script.short()) << 8).to_le_bytes());
        }
        // Interrupts: size, flags, index, first, count.
        8 => {
            body.extend(20_u32.to_le_bytes());
            for _ in 0..4 {
                body.extend(u32::from(script.byte() & 0x3f).to_le_bytes());
            }
        }
        // Regions: offset, region, count, data.
        9 | 10 => {
            let count = script.byte() % 72;
            let offset = u64::from(script.short()) << (script.byte() % 16);
            let region = [0, 7, 0, u32::from(script.byte())][usize::from(bits & 3)];
            body.extend(offset.to_le_bytes());
            body.extend(region.to_le_bytes());
            body.extend(u32::from(count).to_le_bytes());
            if command == 10 {
                body.extend(script.bytes(count.into()));
            }
        }
        15 => {
            let count = script.byte() % 8;
            body.extend(u64::from(count).to_le_bytes());
            for _ in 0..count {
                body.extend((u64::from(script.short()) << 3).to_le_bytes());
                body.extend(0_u32.to_le_bytes());
                body.extend(u32::from(script.byte() % 9).to_le_bytes());
                let mut data = script.bytes(8).to_vec();
                data.resize(8, 0);
                body.extend(data);
            }
        }
        _ => {
            body.extend(16_u32.to_le_bytes());
            body.extend(u32::from(script.byte() & 1).to_le_bytes());
            body.extend(u32::from(script.byte() % 10).to_le_bytes());
            body.extend(0_u32.to_le_bytes());
        }
    }
    if bits & 4 != 0 {
        // One byte is arbitrary.
        let at = usize::from(script.byte()) % body.len();
        body[at] = script.byte();
    }
    let size = match bits & 0x38 {
        0x38 => u32::from(script.short()),
        _ => 16 + body.len() as u32,
    };
    let mut bytes = script.short().to_le_bytes().to_vec();
    bytes.extend(command.to_le_bytes());
    bytes.extend(size.to_le_bytes());
    bytes.extend(u32::from(script.byte() & 0x11).to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes
}

fuzz_target!(|data: &[u8]| {
    let mut script = Script(data);
    let profile = &PROFILES[usize::from(script.byte()) % PROFILES.len()];
    let settings = Settings::numbered(profile, 0);
    let mut hca = Hca::new(Guest::new(VECTORS), settings, &Fabric::new(1), Pool::new());
    let (mut qemu, device) = UnixStream::pair().expect("a pair of sockets");
    qemu.set_nonblocking(true).expect("not blocking");
    let mut connection = Connection::new(device, &hca).expect("a connection");
    while !script.0.is_empty() {
        let bits = script.byte();
        let bytes = match bits & 0xc0 {
            0xc0 => {
                let count = usize::from(script.byte());
                script.bytes(count).to_vec()
            }
            _ => message(&mut script, bits),
        };
        let fds: Vec<OwnedFd> = (0..script.byte() & 3).map(|_| memory()).collect();
        let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights[..] };
        // A message may be sent in two pieces.
        let (first, rest) = bytes.split_at(bytes.len().min(usize::from(script.byte())));
        for (piece, control) in [(first, control), (rest, &[][..])] {
            if piece.is_empty() {
                continue;
            }
            let slices = [std::io::IoSlice::new(piece)];
            let flags = MsgFlags::MSG_NOSIGNAL;
            if sendmsg::<()>(qemu.as_raw_fd(), &slices, control, flags, None).is_err() {
                return;
            }
            match connection.serve(&mut hca, 64) {
                Ok(_) => {}
                Err(DisconnectReason::Malformed(_) | DisconnectReason::Closed) => return,
                Err(DisconnectReason::Socket(error)) => panic!("the socket: {error}"),
            }
            for _ in 0..8 {
                if !hca.run() {
                    break;
                }
            }
        }
        let mut replies = [0; 8192];
        while qemu.read(&mut replies).is_ok_and(|n| n > 0) {}
    }
});
