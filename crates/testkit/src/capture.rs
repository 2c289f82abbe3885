//! Captured frames, and their decoded fields.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use embedded::roce::packet::{LinkKind, OpcodeFlags, Pool, Syndrome, View};
use embedded::roce::pcap;

/// The delivery of a frame: whether it was lost, duplicated, corrupted or delayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// It was lost.
    pub lost: bool,
    /// It arrived twice.
    pub duplicated: bool,
    /// It arrived with a bit flipped.
    pub corrupted: bool,
    /// It arrived this much later.
    pub delay: Duration,
}

/// The kind of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A send, or a part of one.
    Send,
    /// An RDMA write, or a part of one.
    Write,
    /// A request for an RDMA read.
    ReadRequest,
    /// An answer to an RDMA read, or a part of one.
    ReadResponse,
    /// A request for an atomic operation.
    AtomicRequest,
    /// An answer to an atomic operation.
    AtomicResponse,
    /// An acknowledgement.
    Ack,
    /// A negative acknowledgement: the receiver has no receive posted.
    RnrNak,
    /// Another negative acknowledgement.
    Nak,
    /// A message of the connection manager.
    Cm(CmMessage),
}

/// A message of the connection manager, by the name of the specification (IBA 12.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CmMessage {
    /// Request for communication.
    Req,
    /// Message receipt acknowledgement.
    Mra,
    /// Reject.
    Rej,
    /// Reply to a request.
    Rep,
    /// Ready to use.
    Rtu,
    /// Request for the release of communication.
    Dreq,
    /// Reply to such a request.
    Drep,
    /// Request for a datagram service.
    SidrReq,
    /// Reply to such a request.
    SidrRep,
}

impl CmMessage {
    /// Reads a management datagram; `None` if it is none of these.
    fn read(datagram: &[u8]) -> Option<Self> {
        const CONNECTION_MANAGEMENT: u8 = 0x07;
        let (class, attribute) = (datagram.get(1)?, datagram.get(16..18)?);
        if *class != CONNECTION_MANAGEMENT {
            return None;
        }
        Some(match attribute {
            [0, 0x10] => Self::Req,
            [0, 0x11] => Self::Mra,
            [0, 0x12] => Self::Rej,
            [0, 0x13] => Self::Rep,
            [0, 0x14] => Self::Rtu,
            [0, 0x15] => Self::Dreq,
            [0, 0x16] => Self::Drep,
            [0, 0x17] => Self::SidrReq,
            [0, 0x18] => Self::SidrRep,
            _ => return None,
        })
    }
}

/// Decoded fields of an RDMA packet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packet {
    /// The kind of packet.
    pub kind: Kind,
    /// It is the first packet of a message.
    pub first: bool,
    /// It is the last packet of a message.
    pub last: bool,
    /// Number of the destination queue pair.
    pub dest_qp: u32,
    /// Packet sequence number.
    pub psn: u32,
    /// The receiver must acknowledge it.
    pub ack_requested: bool,
    /// Immediate data, or the key to invalidate; 0 if there is neither.
    pub immediate: u32,
    /// Remote address, key and length of a write or read.
    pub remote: Option<(u64, u32, u32)>,
    /// Payload, without padding.
    pub payload: Vec<u8>,
}

impl Packet {
    /// Decodes a frame; `None` if it is not RDMA or malformed.
    pub(crate) fn read(kind: LinkKind, frame: &[u8]) -> Option<Self> {
        let view = View::read(kind, frame).ok()?;
        let traits = view.opcode?.flags();
        let has = |wanted| traits.has(wanted);
        // The queue pair of management datagrams.
        let is_management = view.bth.dest_qpn == 1;
        let message = CmMessage::read(view.payload.bytes()).filter(|_| is_management);
        let kind = match (
            has(OpcodeFlags::RESPONSE),
            has(OpcodeFlags::READ),
            has(OpcodeFlags::ATOMIC),
        ) {
            (true, true, _) => Kind::ReadResponse,
            (true, _, true) => Kind::AtomicResponse,
            (true, ..) => match view.aeth()?.syndrome {
                Syndrome::Ack(_) => Kind::Ack,
                Syndrome::RnrNak(_) => Kind::RnrNak,
                Syndrome::Nak(_) => Kind::Nak,
            },
            (_, true, _) => Kind::ReadRequest,
            (_, _, true) => Kind::AtomicRequest,
            _ if has(OpcodeFlags::WRITE) => Kind::Write,
            _ => message.map_or(Kind::Send, Kind::Cm),
        };
        Some(Self {
            kind,
            first: has(OpcodeFlags::START),
            last: has(OpcodeFlags::END),
            dest_qp: view.bth.dest_qpn,
            psn: view.bth.psn.value(),
            ack_requested: view.bth.ack_request,
            immediate: view.imm(),
            remote: view.reth().map(|reth| (reth.va, reth.rkey, reth.length)),
            payload: view.payload.bytes().to_vec(),
        })
    }
}

/// A frame that was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frame {
    /// Simulated time at which it was sent.
    pub time: Duration,
    /// Index of the node that sent it.
    pub from: usize,
    /// Index of the receiving node.
    pub to: usize,
    /// Its delivery.
    pub delivery: Delivery,
    /// Its fields, if it is an RDMA packet.
    pub packet: Option<Packet>,
    /// Its bytes as they were sent, from the link header on.
    pub bytes: Vec<u8>,
    pub(crate) kind: LinkKind,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.time.as_nanos() as f64 / 1000.0;
        write!(f, "{micros:.3} µs: {} to {}: ", self.from, self.to)?;
        match &self.packet {
            Some(packet) => {
                let part = match (packet.first, packet.last) {
                    (true, true) => "",
                    (true, false) => " (first)",
                    (false, true) => " (last)",
                    (false, false) => " (middle)",
                };
                let length = packet.payload.len();
                write!(
                    f,
                    "{:?}{part}, queue pair {:#x}, PSN {}, {length} bytes",
                    packet.kind, packet.dest_qp, packet.psn
                )?;
            }
            None => write!(f, "{} bytes, not RDMA", self.bytes.len())?,
        }
        if self.delivery.lost {
            f.write_str(", lost")?;
        }
        if self.delivery.corrupted {
            f.write_str(", corrupted")?;
        }
        if self.delivery.duplicated {
            f.write_str(", duplicated")?;
        }
        match self.delivery.delay.is_zero() {
            true => Ok(()),
            false => write!(f, ", delayed by {:?}", self.delivery.delay),
        }
    }
}

/// The frames of a fabric, in the order in which they were sent. A multicast frame is
/// listed once for each receiver. Requests to the subnet manager are not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// The frames.
    pub frames: Vec<Frame>,
}

impl Capture {
    /// Returns the RDMA packets, with their frames.
    pub fn packets(&self) -> impl Iterator<Item = (&Frame, &Packet)> {
        let frames = self.frames.iter();
        frames.filter_map(|frame| Some((frame, frame.packet.as_ref()?)))
    }

    /// Returns the number of packets of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.packets()
            .filter(|(_, packet)| packet.kind == kind)
            .count()
    }

    /// Returns the capture as pcapng, which Wireshark and tshark read.
    pub fn pcapng(&self) -> Vec<u8> {
        let bytes = SharedBuffer::default();
        if let Ok(mut capture) = pcap::Capture::new(bytes.clone()) {
            let pool = Pool::new();
            for frame in &self.frames {
                if let Some(packet) = pool.copy_of(frame.kind, &frame.bytes) {
                    let time = u64::try_from(frame.time.as_nanos()).unwrap_or(u64::MAX);
                    capture.write(time, &packet);
                }
            }
        }
        let mut bytes = bytes.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *bytes)
    }

    /// Writes the capture to a pcapng file.
    ///
    /// # Errors
    /// Those of creating and writing a file.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&self.pcapng())?;
        file.flush()
    }

    /// Returns the capture with remote addresses, and the checksums that cover them, set to
    /// zero, since addresses of a process differ between runs.
    #[must_use]
    pub fn without_addresses(mut self) -> Self {
        const ICRC: usize = 4;
        for frame in &mut self.frames {
            let Some(Packet {
                remote: Some((address, key, length)),
                ..
            }) = &mut frame.packet
            else {
                continue;
            };
            let mut extended = [0; 16];
            extended[..8].copy_from_slice(&address.to_be_bytes());
            extended[8..12].copy_from_slice(&key.to_be_bytes());
            extended[12..].copy_from_slice(&length.to_be_bytes());
            let at = frame.bytes.windows(16).position(|bytes| bytes == extended);
            if let Some(at) = at {
                frame.bytes[at..at + 8].fill(0);
            }
            let end = frame.bytes.len();
            frame.bytes[end - ICRC..].fill(0);
            *address = 0;
        }
        self
    }
}

impl fmt::Display for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.frames
            .iter()
            .try_for_each(|frame| writeln!(f, "{frame}"))
    }
}

/// A shared buffer that a capture is written to.
#[derive(Clone, Default)]
struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
