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
    /// XRC target: no work requests.
    XrcTarget,
}

/// Exclusive limit of the opcodes.
pub(crate) const OPCODES: usize = 16;

/// Encoding of an operation on a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// The device's opcode.
    pub opcode: u8,
    /// Contents of its immediate field.
    pub extra: Extra,
    /// It has a remote segment.
    pub remote: bool,
    /// It has an atomic segment.
    pub atomic: bool,
    /// It writes to its local memory (reads, atomics).
    pub reads: bool,
    /// It changes a memory key and has no data.
    pub keys: bool,
    /// Segments before the data: control, address, remote memory, operands.
    pub before: u8,
    /// Fence bits of the next work request, unless that has a stronger fence.
    pub fence_after: u8,
    /// It qualifies for `SendQueue::push_short`: only a control segment and at most
    /// a remote segment precede the data.
    pub short: bool,
    /// The opcode and the number of segments before the data, as in the first 8
    /// bytes of the control segment; 0 if the service lacks the operation.
    pub head: u64,
}

impl Form {
    /// No operation.
    const NONE: Self = Self {
        opcode: 0,
        extra: Extra::Nothing,
        remote: false,
        atomic: false,
        reads: false,
        keys: false,
        before: 0,
        fence_after: 0,
        short: false,
        head: 0,
    };
}

/// Contents of the immediate field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extra {
    Nothing,
    /// Immediate data, in wire order.
    Immediate,
    /// A key, in host order.
    Key,
}

impl Service {
    /// Number of address segments of a work request; those that change keys have
    /// none.
    pub(crate) const fn address(self) -> u8 {
        match self {
            Self::Datagram => 3,
            Self::XrcInitiator => 1,
            _ => 0,
        }
    }

    /// [`Service::form`] by the opcode's number.
    pub(crate) fn forms(self) -> &'static [Form; OPCODES] {
        static FORMS: [[Form; OPCODES]; 5] = [
            Service::ReliableConnection.all_forms(),
            Service::UnreliableConnection.all_forms(),
            Service::Datagram.all_forms(),
            Service::XrcInitiator.all_forms(),
            Service::XrcTarget.all_forms(),
        ];
        &FORMS[self as usize]
    }

    const fn all_forms(self) -> [Form; OPCODES] {
        let mut all = [Form::NONE; OPCODES];
        let mut opcode = 0;
        while opcode < OPCODES {
            if let Some(form) = self.form(Opcode(opcode as u32)) {
                all[opcode] = form;
            }
            opcode += 1;
        }
        all
    }

    /// The encoding of an operation; `None` if the service lacks it.
    const fn form(self, operation: Opcode) -> Option<Form> {
        if matches!(self, Self::XrcTarget) {
            return None;
        }
        let address = self.address();
        let plain = Form {
            opcode: opcode::SEND,
            before: 1 + address,
            ..Form::NONE
        };
        let form = match operation {
            Opcode::SEND => plain,
            Opcode::SEND_WITH_IMM => Form {
                opcode: opcode::SEND_IMM,
                extra: Extra::Immediate,
                ..plain
            },
            _ if matches!(self, Self::Datagram) => return None,
            Opcode::SEND_WITH_INV => Form {
                opcode: opcode::SEND_INVAL,
                extra: Extra::Key,
                ..plain
            },
            Opcode::RDMA_WRITE => Form {
                opcode: opcode::RDMA_WRITE,
                remote: true,
                before: 2 + address,
                ..plain
            },
            Opcode::RDMA_WRITE_WITH_IMM => Form {
                opcode: opcode::RDMA_WRITE_IMM,
                extra: Extra::Immediate,
                remote: true,
                before: 2 + address,
                ..plain
            },
            Opcode::BIND_MW | Opcode::LOCAL_INV => Form {
                opcode: opcode::UMR,
                extra: Extra::Key,
                keys: true,
                // Without an address.
                before: keys::BEFORE as u8,
                fence_after: CONTROL_SMALL_FENCE,
                ..plain
            },
            _ if matches!(self, Self::UnreliableConnection) => return None,
            Opcode::RDMA_READ => Form {
                opcode: opcode::RDMA_READ,
                remote: true,
                before: 2 + address,
                reads: true,
                ..plain
            },
            Opcode::ATOMIC_CMP_AND_SWP => Form {
                opcode: opcode::ATOMIC_CS,
                remote: true,
                before: 3 + address,
                atomic: true,
                reads: true,
                ..plain
            },
            Opcode::ATOMIC_FETCH_AND_ADD => Form {
                opcode: opcode::ATOMIC_FA,
                remote: true,
                before: 3 + address,
                atomic: true,
                reads: true,
                ..plain
            },
            _ => return None,
        };
        Some(Form {
            short: address == 0 && form.before <= 2 && !matches!(form.extra, Extra::Key),
            head: ((form.opcode as u64) << 32) | form.before as u64,
            ..form
        })
    }
}
