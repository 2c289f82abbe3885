//! The quick way to read completions against the long one.

use std::mem::MaybeUninit;

use proptest::prelude::*;

use super::*;
use crate::{Opcode, Role, SendFlags, Usual, WorkCompletion};

/// A queue pair with one send and one receive outstanding, and its completion
/// queue.
fn outstanding() -> (CompletionRing, Device, Pair) {
    let mut ring = CompletionRing::plain(2).unwrap();
    let device = Device::of(&ring);
    let mut pair = Pair::new(70, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.work, Role::SEND | Role::RECEIVE).unwrap();
    pair.send.begin();
    let open = pair.send.open(40, Opcode::SEND, SendFlags::SIGNALED);
    open.unwrap().no_data();
    pair.send.accept();
    pair.recv.begin();
    pair.recv.push(50, &[]).unwrap();
    // SAFETY: there is no device but the test, and no memory is named.
    unsafe {
        pair.send.publish();
        pair.recv.publish();
    }
    (ring, device, pair)
}

proptest! {
    /// What goes the quick way is told as it is the other way; the rest is
    /// left as it was.
    #[test]
    fn the_quick_way_tells_what_the_long_one_does(
        (opcode, request, user_index, slot) in (0u8..=15, 0u8..0x26, 69u32..72, 0u16..2),
        (byte_count, immediate, flags_rqpn) in (any::<u32>(), any::<u32>(), any::<u32>()),
        (slid, path, time) in (any::<u16>(), any::<u8>(), any::<u64>()),
        common in any::<bool>(),
    ) {
        let raised = Raised {
            opcode: if common { [0, 2, 3][opcode as usize % 3] } else { opcode },
            request: if common { [0x0a, 0x08][request as usize % 2] } else { request },
            user_index: if common { 70 } else { user_index },
            slot: if common { 0 } else { slot },
            byte_count,
            immediate,
            flags_rqpn,
            slid,
            path,
            time,
            ..Raised::default()
        };
        let (mut quick, mut quick_device, pair) = outstanding();
        let (mut long, mut long_device, _other) = outstanding();
        quick_device.raise(&raised);
        long_device.raise(&raised);
        let mut out = MaybeUninit::<WorkCompletion>::uninit();
        // SAFETY: no work request names memory.
        match unsafe { quick.read_usual(&mut out) } {
            Usual::Taken => {
                // SAFETY: it was written.
                let wc = unsafe { out.assume_init() };
                // SAFETY: as above.
                let expected = unsafe { long.read() };
                prop_assert_eq!(expected, Some(Ok(wc)));
                prop_assert_eq!((quick.time(), quick.position()), (long.time(), 1));
                // It is outstanding no more.
                let queue = if raised.opcode == 0 { &pair.work.sends } else { &pair.work.receives };
                prop_assert_eq!(queue.find(0), None);
            }
            Usual::Nothing => prop_assert_eq!(raised.opcode, 15),
            Usual::Other => {
                prop_assert!(!common);
                prop_assert_eq!(quick.position(), 0);
                prop_assert!(pair.work.sends.find(0).is_some());
                prop_assert!(pair.work.receives.find(0).is_some());
            }
        }
    }
}
