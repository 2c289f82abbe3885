//! The headers of a captured frame: what an arrow is labelled with, and what pairs the frame that
//! was sent with the one that was received.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::Ipv6Addr;

use embedded::roce::packet::{
    Aeth, AtomicEth, CNP, Class, Deth, Gid, Link, NakCode, Opcode, OpcodeFlags, Reth, Syndrome,
    View, ip_of_gid, op,
};
use embedded::roce::transport::rnr_wait;

use crate::capture::reader::Frame;

/// Offsets in a management datagram.
const MANAGEMENT_CLASS: usize = 1;
const MANAGEMENT_ATTRIBUTE: usize = 16;
/// The management class of the connection manager.
const CONNECTION_MANAGEMENT: u8 = 7;
/// Bytes of a frame without RDMA headers, or of a management datagram, that pair it.
const PAIRED: usize = 64;

/// An address of a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Address {
    Gid(Gid),
    Lid(u16),
    Unknown,
}

impl Address {
    fn text(self) -> Option<String> {
        match self {
            Self::Gid(gid) => Some(match ip_of_gid(gid) {
                std::net::IpAddr::V4(address) => address.to_string(),
                std::net::IpAddr::V6(_) => Ipv6Addr::from(gid).to_string(),
            }),
            Self::Lid(lid) => Some(format!("LID {lid:#x}")),
            Self::Unknown => None,
        }
    }
}

/// The kinds of arrows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PacketKind {
    /// Requests, and responses with data.
    Data,
    /// Acknowledgements without an error.
    Acknowledgement,
    /// NAKs and RNR NAKs.
    Nak,
    /// Management datagrams.
    Management,
    /// Congestion notifications, and frames that are not RDMA.
    Other,
}

/// The transport headers of a frame.
struct Transport {
    opcode_byte: u8,
    opcode: Option<Opcode>,
    partition: u16,
    psn: u32,
    wants_acknowledgement: bool,
    is_solicited: bool,
    payload: usize,
    reth: Option<Reth>,
    atomic: Option<AtomicEth>,
    aeth: Option<Aeth>,
    atomic_value: Option<u64>,
    deth: Option<Deth>,
    immediate: Option<u32>,
    management: Option<(u8, u16)>,
}

/// The headers of a frame.
pub struct Packet {
    /// Equal in the frame that was sent, in its repetitions, and in the frames that were received.
    pub key: u64,
    /// The queue pair that it is for; `None` if it is not RDMA.
    pub destination_queue: Option<u32>,
    length: usize,
    source: Address,
    destination: Address,
    transport: Option<Transport>,
}

impl Packet {
    /// Reads the headers of a frame.
    pub fn read(frame: &Frame) -> Self {
        let bytes = &frame.bytes[..];
        let length = bytes.len();
        let Ok(view) = View::read_unchecked(frame.link, bytes) else {
            return Self {
                key: key_of(&bytes[..length.min(PAIRED)]),
                destination_queue: None,
                length,
                source: Address::Unknown,
                destination: Address::Unknown,
                transport: None,
            };
        };
        let payload = view.payload.bytes();
        let is_management = view.bth.dest_qpn <= 1;
        let shown = if is_management {
            payload.len().min(PAIRED)
        } else {
            0
        };
        let headers = bytes.get(view.network.bth_at..view.payload_at() + shown);
        let (slid, dlid) = match view.network.link {
            Link::Ib { slid, dlid, .. } => (Address::Lid(slid), Address::Lid(dlid)),
            _ => (Address::Unknown, Address::Unknown),
        };
        let or = |gid: Option<Gid>, lid| gid.map_or(lid, Address::Gid);
        let source = or(view.network.sgid(view.frame), slid);
        Self {
            key: key_of(&(headers, source.text(), payload.len())),
            destination_queue: Some(view.bth.dest_qpn),
            length,
            source,
            destination: or(view.network.dgid(view.frame), dlid),
            transport: Some(Transport::read(&view, is_management)),
        }
    }

    /// Returns the kind of arrow.
    pub fn kind(&self) -> PacketKind {
        let Some(transport) = &self.transport else {
            return PacketKind::Other;
        };
        if transport.management.is_some() {
            return PacketKind::Management;
        }
        match (transport.operation(), transport.aeth) {
            (Some(op::ACKNOWLEDGE), Some(aeth)) => match aeth.syndrome {
                Syndrome::Ack(_) => PacketKind::Acknowledgement,
                Syndrome::RnrNak(_) | Syndrome::Nak(_) => PacketKind::Nak,
            },
            (Some(_), _) => PacketKind::Data,
            (None, _) => PacketKind::Other,
        }
    }

    /// Returns whether the packet is a NAK that the requester cannot repair by repeating.
    pub fn is_fatal(&self) -> bool {
        let syndrome = self.transport.as_ref().and_then(|it| it.aeth);
        syndrome.is_some_and(
            |it| matches!(it.syndrome, Syndrome::Nak(code) if code != NakCode::SequenceError),
        )
    }

    /// Returns whether a second packet like this one repeats the first.
    pub fn is_repeatable(&self) -> bool {
        matches!(self.kind(), PacketKind::Data | PacketKind::Management)
    }

    /// Returns the label of the arrow.
    pub fn label(&self) -> String {
        let Some(transport) = &self.transport else {
            return format!("frame of {} bytes", self.length);
        };
        if let Some((class, attribute)) = transport.management {
            return management_name(class, attribute);
        }
        match transport.aeth.map(|it| it.syndrome) {
            Some(Syndrome::RnrNak(code)) => {
                return format!("RNR NAK, {}", duration(rnr_wait(code)));
            }
            Some(Syndrome::Nak(code)) => return format!("NAK {}", nak_name(code)),
            _ => {}
        }
        let mut label = transport.name();
        if transport.payload > 0 {
            label.push_str(&format!(", {} B", transport.payload));
        } else if let Some(reth) = &transport.reth {
            label.push_str(&format!(", {} B", reth.length));
        }
        label
    }

    /// Returns all fields.
    pub fn fields(&self) -> Vec<(&'static str, String)> {
        let mut fields = Vec::new();
        if let Some(transport) = &self.transport {
            transport.add_fields(&mut fields);
        }
        if let Some(number) = self.destination_queue {
            fields.push(("to queue pair", format!("{number:#x}")));
        }
        if let (Some(from), Some(to)) = (self.source.text(), self.destination.text()) {
            fields.push(("addresses", format!("{from} to {to}")));
        }
        fields.push(("frame", format!("{} bytes", self.length)));
        fields
    }

    /// Returns the destination's address.
    pub fn destination_address(&self) -> Option<String> {
        self.destination.text()
    }
}

impl Transport {
    fn read(view: &View<'_>, is_management: bool) -> Self {
        let payload = view.payload.bytes();
        let has_immediate = view.has(OpcodeFlags::IMM) || view.has(OpcodeFlags::INVALIDATE);
        let management = match (
            payload.get(MANAGEMENT_CLASS),
            payload.get(MANAGEMENT_ATTRIBUTE..),
        ) {
            (Some(class), Some([high, low, ..])) if is_management => {
                Some((*class, u16::from_be_bytes([*high, *low])))
            }
            _ => None,
        };
        Self {
            opcode_byte: view.bth.opcode,
            opcode: view.opcode,
            partition: view.bth.pkey,
            psn: view.bth.psn.value(),
            wants_acknowledgement: view.bth.ack_request,
            is_solicited: view.bth.solicited,
            payload: payload.len(),
            reth: view.reth(),
            atomic: view.atomic(),
            aeth: view.aeth(),
            atomic_value: view.atomic_value(),
            deth: view.deth(),
            immediate: has_immediate.then(|| view.imm()),
            management,
        }
    }

    fn operation(&self) -> Option<u8> {
        self.opcode.map(|it| it.operation)
    }

    /// Returns the name of the operation, of reliable connections without the service.
    fn name(&self) -> String {
        let Some(opcode) = self.opcode else {
            return match self.opcode_byte {
                CNP => "CNP".to_owned(),
                byte => format!("opcode {byte:#x}"),
            };
        };
        let service = match opcode.class {
            Class::Rc => "",
            Class::Uc => "UC ",
            Class::Ud => "UD ",
            Class::Xrc => "XRC ",
            Class::Dc => "DC ",
        };
        format!("{service}{}", operation_name(opcode.operation))
    }

    fn add_fields(&self, fields: &mut Vec<(&'static str, String)>) {
        fields.push(("operation", self.name()));
        fields.push(("PSN", format!("{:#08x}", self.psn)));
        if self.payload > 0 {
            fields.push(("payload", format!("{} bytes", self.payload)));
        }
        if let Some(reth) = &self.reth {
            fields.push(("remote address", format!("{:#x}", reth.va)));
            fields.push(("rkey", format!("{:#x}", reth.rkey)));
            fields.push(("length of the message", reth.length.to_string()));
        }
        if let Some(atomic) = &self.atomic {
            fields.push(("remote address", format!("{:#x}", atomic.va)));
            fields.push(("rkey", format!("{:#x}", atomic.rkey)));
            fields.push(("swap or add", format!("{:#x}", atomic.swap_add)));
            fields.push(("compare", format!("{:#x}", atomic.compare)));
        }
        if let Some(value) = self.atomic_value {
            fields.push(("previous value", format!("{value:#x}")));
        }
        if let Some(aeth) = &self.aeth {
            fields.push(("syndrome", syndrome_text(aeth.syndrome)));
            fields.push(("MSN", aeth.msn.to_string()));
        }
        if let Some(deth) = &self.deth {
            fields.push(("Q_Key", format!("{:#x}", deth.qkey)));
            fields.push(("from queue pair", format!("{:#x}", deth.source_qpn)));
        }
        if let Some(immediate) = self.immediate {
            fields.push(("immediate data or key", format!("{immediate:#x}")));
        }
        let mut flags = Vec::new();
        if self.wants_acknowledgement {
            flags.push("acknowledgement requested");
        }
        if self.is_solicited {
            flags.push("solicited event");
        }
        if !flags.is_empty() {
            fields.push(("flags", flags.join(", ")));
        }
        fields.push(("P_Key", format!("{:#x}", self.partition)));
    }
}

fn key_of(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The names of IBA 9.2.1.
fn operation_name(operation: u8) -> &'static str {
    match operation {
        op::SEND_FIRST => "SEND First",
        op::SEND_MIDDLE => "SEND Middle",
        op::SEND_LAST => "SEND Last",
        op::SEND_LAST_IMM => "SEND Last with Immediate",
        op::SEND_ONLY => "SEND Only",
        op::SEND_ONLY_IMM => "SEND Only with Immediate",
        op::WRITE_FIRST => "RDMA WRITE First",
        op::WRITE_MIDDLE => "RDMA WRITE Middle",
        op::WRITE_LAST => "RDMA WRITE Last",
        op::WRITE_LAST_IMM => "RDMA WRITE Last with Immediate",
        op::WRITE_ONLY => "RDMA WRITE Only",
        op::WRITE_ONLY_IMM => "RDMA WRITE Only with Immediate",
        op::READ_REQUEST => "RDMA READ Request",
        op::READ_RESPONSE_FIRST => "RDMA READ response First",
        op::READ_RESPONSE_MIDDLE => "RDMA READ response Middle",
        op::READ_RESPONSE_LAST => "RDMA READ response Last",
        op::READ_RESPONSE_ONLY => "RDMA READ response Only",
        op::ACKNOWLEDGE => "ACK",
        op::ATOMIC_ACKNOWLEDGE => "ATOMIC Acknowledge",
        op::COMPARE_SWAP => "CmpSwap",
        op::FETCH_ADD => "FetchAdd",
        op::SEND_LAST_INV => "SEND Last with Invalidate",
        op::SEND_ONLY_INV => "SEND Only with Invalidate",
        _ => "reserved",
    }
}

fn nak_name(code: NakCode) -> &'static str {
    match code {
        NakCode::SequenceError => "PSN sequence error",
        NakCode::InvalidRequest => "invalid request",
        NakCode::RemoteAccess => "remote access error",
        NakCode::RemoteOperation => "remote operational error",
    }
}

fn syndrome_text(syndrome: Syndrome) -> String {
    match syndrome {
        Syndrome::Ack(credits) => format!("ACK, credit count {credits}"),
        Syndrome::RnrNak(code) => {
            format!("RNR NAK: send again after {}", duration(rnr_wait(code)))
        }
        Syndrome::Nak(code) => format!("NAK: {}", nak_name(code)),
    }
}

/// The messages of the connection manager (IBA 12.6).
fn management_name(class: u8, attribute: u16) -> String {
    let name = match (class, attribute) {
        (CONNECTION_MANAGEMENT, 0x10) => "CM ConnectRequest",
        (CONNECTION_MANAGEMENT, 0x11) => "CM MsgRcptAck",
        (CONNECTION_MANAGEMENT, 0x12) => "CM ConnectReject",
        (CONNECTION_MANAGEMENT, 0x13) => "CM ConnectReply",
        (CONNECTION_MANAGEMENT, 0x14) => "CM ReadyToUse",
        (CONNECTION_MANAGEMENT, 0x15) => "CM DisconnectRequest",
        (CONNECTION_MANAGEMENT, 0x16) => "CM DisconnectReply",
        (CONNECTION_MANAGEMENT, 0x17) => "CM ServiceIDResReq",
        (CONNECTION_MANAGEMENT, 0x18) => "CM ServiceIDResReqResp",
        (CONNECTION_MANAGEMENT, 0x19) => "CM LoadAlternatePath",
        (CONNECTION_MANAGEMENT, 0x1a) => "CM AlternatePathResponse",
        _ => return format!("management class {class:#x}, attribute {attribute:#x}"),
    };
    name.to_owned()
}

/// Displays nanoseconds.
pub fn duration(nanoseconds: u64) -> String {
    let value = nanoseconds as f64;
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{} µs", rounded(value / 1e3)),
        1_000_000..1_000_000_000 => format!("{} ms", rounded(value / 1e6)),
        _ => format!("{} s", rounded(value / 1e9)),
    }
}

/// Three significant digits.
fn rounded(value: f64) -> String {
    let digits = match value {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
