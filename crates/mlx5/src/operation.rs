//! Encoding of send operations by service and opcode.

use uverbs::Opcode;

use crate::abi::{CONTROL_SMALL_FENCE, opcode};
use crate::send::keys;

/// Service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection: all operations.
    ReliableConnection,
    /// Unreliable connection: sends, writes, and changes of keys.
    UnreliableConnection,
    /// Datagrams: sends, each with an address.
    Datagram,
    /// XRC initiator: all operations, each to a remote SRQ.
    XrcInitiator,
    /// DC initiator: all operations, each with an address.
    DcInitiator,
    /// Raw packets: sends of whole Ethernet frames.
    Packet,
    /// IPoIB datagrams in the name of another queue pair: sends, each with an address.
    Underlay,
    /// XRC or DC target: no work requests.
    Target,
}

/// Exclusive limit of the opcodes.
pub(crate) const OPCODES: usize = 16;

/// How an operation on a service is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperationFormat {
    /// The device's opcode.
    pub opcode: u8,
    /// Contents of its immediate field.
    pub immediate: ImmediateField,
    /// The segment after the control segment and the address.
    pub second: SecondSegment,
    /// It has an atomic segment.
    pub atomic: bool,
    /// It writes to its local memory (reads, atomics).
    pub returns_data: bool,
    /// It changes a memory key and has no data.
    pub changes_keys: bool,
    /// Segments before the data: control, address, remote memory, operands.
    pub leading_segments: u8,
    /// Fence bits of the next work request, unless that has a stronger fence.
    pub fence_after: u8,
    /// The fast path that it qualifies for.
    pub fast: FastPath,
    /// The opcode and the number of segments before the data, as in the first 8
    /// bytes of the control segment; 0 if the service lacks the operation.
    pub control_word: u64,
}

impl OperationFormat {
    /// No operation.
    pub(crate) const NONE: Self = Self {
        opcode: 0,
        immediate: ImmediateField::Unused,
        second: SecondSegment::None,
        atomic: false,
        returns_data: false,
        changes_keys: false,
        leading_segments: 0,
        fence_after: 0,
        fast: FastPath::None,
        control_word: 0,
    };
}

/// Fast paths of `SendQueue`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FastPath {
    None,
    /// `push_fast`: only a control segment and at most one of [`SecondSegment`] precede
    /// the data.
    Plain,
    /// `push_addressed`: an address is between them.
    Addressed,
}

/// The segment that follows the control segment and the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SecondSegment {
    None,
    /// Address and key of remote memory.
    Remote,
    /// Ethernet segment: checksum flags, without inline headers.
    Ethernet,
}

/// Contents of the immediate field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImmediateField {
    Unused,
    /// Immediate data, in wire order.
    Data,
    /// A key, in host order.
    Key,
}

impl Service {
    /// Number of address segments of a work request; those that change keys have
    /// none.
    pub(crate) const fn address(self) -> u8 {
        match self {
            Self::Datagram | Self::DcInitiator | Self::Underlay => 3,
            Self::XrcInitiator => 1,
            _ => 0,
        }
    }

    /// Its queue pairs have a receive queue.
    pub(crate) const fn receives(self) -> bool {
        matches!(
            self,
            Self::ReliableConnection
                | Self::UnreliableConnection
                | Self::Datagram
                | Self::Packet
                | Self::Underlay
        )
    }

    /// Its work requests are packets with headers, and its queues in memory are apart:
    /// to the device they are two objects.
    pub(crate) const fn has_packets(self) -> bool {
        matches!(self, Self::Packet | Self::Underlay)
    }

    /// [`Service::format`] by the opcode's number. `plain_packets`: WQEs of packets have
    /// no headers, and the device computes checksums.
    pub(crate) fn formats(self, plain_packets: bool) -> &'static [OperationFormat; OPCODES] {
        static PLAIN_PACKETS: [OperationFormat; OPCODES] = {
            let mut all = Service::Packet.all_formats();
            let send = &mut all[Opcode::SEND.0 as usize];
            send.fast = FastPath::Plain;
            send.second = SecondSegment::Ethernet;
            send.leading_segments += 1;
            send.control_word += 1;
            all
        };
        if plain_packets {
            return &PLAIN_PACKETS;
        }
        static FORMATS: [[OperationFormat; OPCODES]; 8] = [
            Service::ReliableConnection.all_formats(),
            Service::UnreliableConnection.all_formats(),
            Service::Datagram.all_formats(),
            Service::XrcInitiator.all_formats(),
            Service::DcInitiator.all_formats(),
            Service::Packet.all_formats(),
            Service::Underlay.all_formats(),
            Service::Target.all_formats(),
        ];
        &FORMATS[self as usize]
    }

    const fn all_formats(self) -> [OperationFormat; OPCODES] {
        let mut all = [OperationFormat::NONE; OPCODES];
        let mut opcode = 0;
        while opcode < OPCODES {
            if let Some(format) = self.format(Opcode(opcode as u32)) {
                all[opcode] = format;
            }
            opcode += 1;
        }
        all
    }

    /// The encoding of an operation; `None` if the service lacks it.
    const fn format(self, operation: Opcode) -> Option<OperationFormat> {
        if matches!(self, Self::Target) {
            return None;
        }
        let address = self.address();
        let plain = OperationFormat {
            opcode: opcode::SEND,
            leading_segments: 1 + address,
            ..OperationFormat::NONE
        };
        let format = match operation {
            // The segments of the Ethernet headers are counted when it is written.
            Opcode::SEND => plain,
            Opcode::TSO if matches!(self, Self::Packet) => OperationFormat {
                opcode: opcode::TSO,
                ..plain
            },
            _ if self.has_packets() => return None,
            Opcode::SEND_WITH_IMM => OperationFormat {
                opcode: opcode::SEND_IMM,
                immediate: ImmediateField::Data,
                ..plain
            },
            _ if matches!(self, Self::Datagram) => return None,
            Opcode::SEND_WITH_INV => OperationFormat {
                opcode: opcode::SEND_INVAL,
                immediate: ImmediateField::Key,
                ..plain
            },
            Opcode::RDMA_WRITE => OperationFormat {
                opcode: opcode::RDMA_WRITE,
                second: SecondSegment::Remote,
                leading_segments: 2 + address,
                ..plain
            },
            Opcode::RDMA_WRITE_WITH_IMM => OperationFormat {
                opcode: opcode::RDMA_WRITE_IMM,
                immediate: ImmediateField::Data,
                second: SecondSegment::Remote,
                leading_segments: 2 + address,
                ..plain
            },
            Opcode::BIND_MW | Opcode::LOCAL_INV => OperationFormat {
                opcode: opcode::UMR,
                immediate: ImmediateField::Key,
                changes_keys: true,
                // Without an address.
                leading_segments: keys::LEADING_SEGMENTS as u8,
                fence_after: CONTROL_SMALL_FENCE,
                ..plain
            },
            _ if matches!(self, Self::UnreliableConnection) => return None,
            Opcode::RDMA_READ => OperationFormat {
                opcode: opcode::RDMA_READ,
                second: SecondSegment::Remote,
                leading_segments: 2 + address,
                returns_data: true,
                ..plain
            },
            Opcode::ATOMIC_CMP_AND_SWP => OperationFormat {
                opcode: opcode::ATOMIC_CS,
                second: SecondSegment::Remote,
                leading_segments: 3 + address,
                atomic: true,
                returns_data: true,
                ..plain
            },
            Opcode::ATOMIC_FETCH_AND_ADD => OperationFormat {
                opcode: opcode::ATOMIC_FA,
                second: SecondSegment::Remote,
                leading_segments: 3 + address,
                atomic: true,
                returns_data: true,
                ..plain
            },
            _ => return None,
        };
        let short = format.leading_segments <= address + 2
            && !matches!(format.immediate, ImmediateField::Key);
        Some(OperationFormat {
            fast: match self {
                _ if !short => FastPath::None,
                Self::Datagram | Self::DcInitiator => FastPath::Addressed,
                _ if address == 0 && !matches!(self, Self::Packet) => FastPath::Plain,
                _ => FastPath::None,
            },
            control_word: ((format.opcode as u64) << 32) | format.leading_segments as u64,
            ..format
        })
    }
}
