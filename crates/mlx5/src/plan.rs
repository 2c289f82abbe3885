//! Sizes of queues, from the request and the device's limits.

use uverbs::QpCap;

use crate::abi::{BLOCK, SEGMENT};
use crate::send::{keys, packets};
use crate::{CreateError, Limits, Service};

/// Maximum segments of a work request: the count has 6 bits.
const MAX_SEGMENTS: usize = 63;
/// Maximum blocks of a send queue: indices have 16 bits, and a full queue must not look
/// like an empty one.
const MAX_BLOCKS: usize = 1 << 15;

/// Which memory keys work requests may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyChanges {
    /// None.
    #[default]
    None,
    /// Memory windows may be bound, and local keys invalidated. Every work request then
    /// takes three blocks, instead of usually one.
    Windows,
    /// Also layouts of indirect keys: three blocks, and as many elements as fit into the
    /// room for inline data.
    Layouts,
}

/// Sizes of a send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendPlan {
    /// Blocks, a power of two, or none.
    pub blocks: u32,
    /// Capacity in work requests of the maximum size.
    pub capacity: u32,
    pub max_sge: u32,
    pub max_inline: u32,
    /// Maximum bytes of a packet's headers in its WQE.
    pub max_headers: u32,
    pub keys: KeyChanges,
}

/// Sizes of a receive queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecvPlan {
    /// Entries, a power of two, or none.
    pub entries: u32,
    /// Binary logarithm of an entry's bytes.
    pub shift: u32,
    pub max_sge: u32,
}

fn too_large(what: &'static str) -> CreateError {
    CreateError::TooLarge { what }
}

/// Maximum bytes of the segments before the data, for packets with `headers` bytes of
/// headers.
fn overhead(service: Service, headers: usize) -> usize {
    SEGMENT
        + match service {
            // Remote address and atomic operands.
            Service::ReliableConnection | Service::XrcInitiator | Service::DcInitiator => {
                2 * SEGMENT
            }
            Service::UnreliableConnection => SEGMENT,
            Service::Packet => packets::segments(headers) * SEGMENT,
            Service::Underlay => {
                packets::PADDING + packets::segments(packets::MAX_INLINE_HEADERS) * SEGMENT
            }
            Service::Datagram | Service::Target => 0,
        }
        + usize::from(service.address()) * SEGMENT
}

impl SendPlan {
    /// Plans a send queue. With `keys`, each work request may change memory keys, if the
    /// service and the device allow it. `max_headers` is the maximum bytes of a packet's
    /// headers, if that is more than an Ethernet header.
    pub(crate) fn new(
        cap: &QpCap,
        service: Service,
        limits: &Limits,
        keys: KeyChanges,
        max_headers: u16,
    ) -> Result<Self, CreateError> {
        if cap.max_send_wr == 0 || service == Service::Target {
            return Ok(Self::default());
        }
        let max_headers = packets::MAX_INLINE_HEADERS.max(max_headers.into());
        let mut overhead = overhead(service, max_headers);
        let longest = limits.max_send_entry.min(MAX_SEGMENTS * SEGMENT);
        let keys = match service {
            Service::Datagram | Service::Packet | Service::Underlay => KeyChanges::None,
            _ if longest < keys::LONGEST => KeyChanges::None,
            _ => keys,
        };
        if keys == KeyChanges::Layouts {
            overhead = overhead.max(keys::LEADING_SEGMENTS as usize * SEGMENT);
        }
        let inline = match cap.max_inline_data as usize {
            0 => 0,
            bytes => (bytes.checked_add(4))
                .and_then(|bytes| bytes.checked_next_multiple_of(SEGMENT))
                .ok_or(too_large("max_inline_data"))?,
        };
        let elements = (cap.max_send_sge as usize)
            .checked_mul(SEGMENT)
            .ok_or(too_large("max_send_sge"))?;
        let room = (longest.checked_sub(overhead)).ok_or(too_large("max_tso_header"))?;
        if elements > room {
            return Err(too_large("max_send_sge"));
        }
        if inline > room {
            return Err(too_large("max_inline_data"));
        }
        let entry = (overhead + elements.max(inline))
            .max(match keys {
                KeyChanges::None => 0,
                _ => keys::LONGEST,
            })
            .next_multiple_of(BLOCK);
        let bytes = (cap.max_send_wr as usize)
            .checked_mul(entry)
            .and_then(usize::checked_next_power_of_two)
            .ok_or(too_large("max_send_wr"))?;
        let blocks = bytes / BLOCK;
        if blocks > (limits.max_send_blocks as usize).min(MAX_BLOCKS) {
            return Err(too_large("max_send_wr"));
        }
        Ok(Self {
            blocks: blocks as u32,
            capacity: (bytes / entry) as u32,
            max_sge: cap.max_send_sge,
            // Without elements there may be no room for the data's first word.
            max_inline: entry.min(longest).saturating_sub(overhead + 4) as u32,
            max_headers: max_headers as u32,
            keys,
        })
    }

    /// Bytes of the queue.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks as usize * BLOCK
    }
}

impl RecvPlan {
    /// Plans a receive queue; `out_of_order` if receives complete in any order. Then it
    /// has twice the entries, since one that is outstanding keeps its place.
    pub(crate) fn new_for(
        cap: &QpCap,
        limits: &Limits,
        out_of_order: bool,
    ) -> Result<Self, CreateError> {
        let mut cap = *cap;
        if out_of_order && cap.max_recv_wr > 1 {
            let doubled = cap.max_recv_wr.checked_mul(2);
            cap.max_recv_wr = doubled.ok_or(too_large("max_recv_wr"))?;
        }
        Self::new(&cap, limits)
    }

    /// Plans a receive queue.
    pub(crate) fn new(cap: &QpCap, limits: &Limits) -> Result<Self, CreateError> {
        if cap.max_recv_wr == 0 {
            return Ok(Self::default());
        }
        if cap.max_recv_wr > limits.max_recv_wr {
            return Err(too_large("max_recv_wr"));
        }
        let entry = (cap.max_recv_sge.max(1) as usize)
            .checked_mul(SEGMENT)
            .and_then(usize::checked_next_power_of_two)
            .filter(|entry| *entry <= limits.max_recv_entry)
            .ok_or(too_large("max_recv_sge"))?;
        // The send queue after it begins at a block.
        let entries = (cap.max_recv_wr as usize)
            .next_power_of_two()
            .max(BLOCK / entry);
        if entries > MAX_BLOCKS {
            return Err(too_large("max_recv_wr"));
        }
        Ok(Self {
            entries: entries as u32,
            shift: entry.ilog2(),
            max_sge: (entry / SEGMENT) as u32,
        })
    }

    /// Bytes of the queue.
    pub(crate) fn bytes(&self) -> usize {
        (self.entries as usize) << self.shift
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hostile::LIMITS;

    const RC: Service = Service::ReliableConnection;
    const NONE: KeyChanges = KeyChanges::None;
    const WINDOWS: KeyChanges = KeyChanges::Windows;

    fn cap(wr: u32, sge: u32, inline: u32) -> QpCap {
        QpCap {
            max_send_wr: wr,
            max_recv_wr: wr,
            max_send_sge: sge,
            max_recv_sge: sge,
            max_inline_data: inline,
        }
    }

    #[test]
    fn a_write_of_one_element_takes_a_block() {
        let plan = SendPlan::new(&cap(10, 1, 0), RC, &LIMITS, NONE, 0).unwrap();
        assert_eq!((plan.blocks, plan.capacity, plan.max_inline), (16, 16, 12));
        let plan = SendPlan::new(&cap(10, 1, 60), RC, &LIMITS, NONE, 0).unwrap();
        assert_eq!((plan.blocks, plan.capacity, plan.max_inline), (32, 16, 76));
        // One that may change keys takes three.
        let plan = SendPlan::new(&cap(10, 1, 0), RC, &LIMITS, WINDOWS, 0).unwrap();
        assert_eq!((plan.blocks, plan.capacity, plan.max_inline), (32, 10, 140));
        assert_eq!(plan.keys, WINDOWS);
        let plan = SendPlan::new(&cap(10, 1, 0), Service::Datagram, &LIMITS, WINDOWS, 0).unwrap();
        assert_eq!(plan.keys, NONE);
    }

    #[test]
    fn segments_before_the_data_may_fill_an_entry() {
        for service in [Service::Datagram, Service::XrcInitiator] {
            let plan = SendPlan::new(&cap(10, 0, 0), service, &LIMITS, NONE, 0).unwrap();
            assert_eq!((plan.blocks, plan.capacity, plan.max_inline), (16, 16, 0));
        }
    }

    #[test]
    fn no_work_requests_are_no_queue() {
        let none = cap(0, 9999, 9999);
        let plan = SendPlan::new(&none, Service::Datagram, &LIMITS, WINDOWS, 0).unwrap();
        assert_eq!(plan, SendPlan::default());
        assert_eq!(RecvPlan::new(&none, &LIMITS).unwrap(), RecvPlan::default());
    }

    #[test]
    fn a_receive_queue_fills_a_block() {
        let plan = RecvPlan::new(&cap(1, 1, 0), &LIMITS).unwrap();
        assert_eq!((plan.entries, plan.shift, plan.max_sge), (4, 4, 1));
        let plan = RecvPlan::new(&cap(5, 3, 0), &LIMITS).unwrap();
        assert_eq!((plan.entries, plan.shift, plan.max_sge), (8, 6, 4));
    }

    proptest! {
        #[test]
        fn a_plan_holds_what_it_promises(
            wr in any::<u32>().prop_map(|n| n >> (n % 32)),
            sge in any::<u32>().prop_map(|n| n >> (n % 32)),
            inline in any::<u32>().prop_map(|n| n >> (n % 32)),
            keys in prop_oneof![Just(NONE), Just(WINDOWS), Just(KeyChanges::Layouts)],
            service in prop_oneof![
                Just(Service::ReliableConnection),
                Just(Service::UnreliableConnection),
                Just(Service::Datagram),
                Just(Service::XrcInitiator),
                Just(Service::DcInitiator),
                Just(Service::Packet),
                Just(Service::Underlay),
            ],
            headers in any::<u16>().prop_map(|n| n >> (n % 16)),
        ) {
            let cap = cap(wr, sge, inline);
            if let Ok(plan) = SendPlan::new(&cap, service, &LIMITS, keys, headers) { if wr != 0 {
                prop_assert!(plan.blocks.is_power_of_two() && plan.blocks <= 1 << 15);
                prop_assert!(plan.capacity >= wr && plan.max_sge >= sge && plan.max_inline >= inline);
                // The longest work requests, as many as it holds, fit.
                let inline = match plan.max_inline as usize {
                    0 => 0,
                    bytes => (bytes + 4).next_multiple_of(16),
                };
                let data = (plan.max_sge as usize * 16).max(inline);
                let headers = packets::MAX_INLINE_HEADERS.max(headers.into());
                let segments = (overhead(service, headers) + data) / 16;
                prop_assert!(segments <= 63);
                let segments = segments.max(if plan.keys == NONE { 0 } else { 12 });
                let blocks = (segments * 16).div_ceil(64);
                prop_assert!(blocks * plan.capacity as usize <= plan.blocks as usize);
            } }
            if let Ok(plan) = RecvPlan::new(&cap, &LIMITS) { if wr != 0 {
                prop_assert!(plan.entries.is_power_of_two() && plan.entries >= wr);
                prop_assert!(plan.max_sge >= sge && plan.bytes() % 64 == 0);
            } }
        }
    }
}
