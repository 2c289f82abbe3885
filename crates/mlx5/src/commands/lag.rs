//! Ports of a bond (LAG) through which the packets of a queue pair leave.

use uverbs::{Context, QpHandle};

use super::{Capabilities, Input, modify, on_qp, opcode, query_object, refusal, word};
use crate::CreateError;
use crate::ioctl::devx;

/// The device object with the port of a queue pair, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LagQueue {
    /// The queue pair itself.
    QueuePair(u32),
    /// For raw packets, the transport interface of the send queue
    /// ([`PacketObjects::tis`](crate::PacketObjects::tis)).
    Interface(u32),
}

/// Of the context of a queue pair or an interface.
const PORT_SHIFT: u32 = 24;
const PORT_MASK: u32 = 0xf;

/// Queries the port of a queue pair, and the active port that its packets leave through,
/// which differs while the first is down.
///
/// # Errors
/// [`CreateError::Unsupported`] without a bond, or for any port; the device's.
pub fn lag_port(
    context: &Context,
    capabilities: &Capabilities,
    handle: QpHandle,
    queue: LagQueue,
) -> Result<[u8; 2], CreateError> {
    const STATE: u32 = 0x7;
    const NO_PORT: CreateError = CreateError::Unsupported {
        what: "a port of a bond",
    };
    let mut bond = [0; 16];
    let input = Input::<16>::new(opcode::QUERY_LAG);
    // SAFETY: a query changes nothing.
    let result = unsafe { devx::general(context, &input.0[..], &mut bond) };
    result.map_err(|error| refusal("QUERY_LAG", error, &bond))?;
    if word(&bond, 8) & STATE == 0 && !capabilities.lag_affinity {
        return Err(NO_PORT);
    }
    let (opcode, name, number, at) = match queue {
        LagQueue::QueuePair(number) => (opcode::QUERY_QP, "QUERY_QP", number, 0x18),
        LagQueue::Interface(number) => (opcode::QUERY_TIS, "QUERY_TIS", number, 0x10),
    };
    let mut input = Input::<16>::new(opcode);
    input.set(8, number & 0xff_ffff);
    let mut answer = [0; 272];
    query_object(context, handle.0, name, &input, &mut answer)?;
    let port = word(&answer, at) >> PORT_SHIFT & PORT_MASK;
    let active = match port {
        1 => word(&bond, 0xc),
        2 => word(&bond, 0xc) >> 8,
        _ => return Err(NO_PORT),
    };
    Ok([port as u8, (active & PORT_MASK) as u8])
}

/// Changes the port of a queue pair, which must be ready to send unless it is a raw packet
/// queue pair.
///
/// # Errors
/// [`CreateError::Unsupported`]; the device's.
pub fn set_lag_port(
    context: &Context,
    capabilities: &Capabilities,
    handle: QpHandle,
    queue: LagQueue,
    port: u8,
) -> Result<(), CreateError> {
    const CHANGE_INTERFACE: u32 = 1 << 2;
    const CHANGE_QP: u32 = 1 << 15;
    let port = (u32::from(port) & PORT_MASK) << PORT_SHIFT;
    match queue {
        LagQueue::Interface(number) => {
            let mut input = Input::<192>::new(opcode::MODIFY_TIS);
            input.set(8, number & 0xff_ffff);
            input.set(0x14, CHANGE_INTERFACE);
            input.set(0x20, port);
            modify(context, handle, "MODIFY_TIS", &input)
        }
        LagQueue::QueuePair(_) if !capabilities.lag_change => Err(CreateError::Unsupported {
            what: "changing the port of a bond",
        }),
        LagQueue::QueuePair(number) => {
            let mut input = on_qp(opcode::RTS2RTS_QP, number, false, 0);
            input.set(0x10, CHANGE_QP);
            input.set(0x18, port);
            modify(context, handle, "RTS2RTS_QP", &input)
        }
    }
}
