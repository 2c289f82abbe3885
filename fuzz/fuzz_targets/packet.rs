//! The software HCA's transport with a hostile peer.
//!
//! The input is a script: packets with valid lengths and ICRC but arbitrary headers,
//! frames of arbitrary bytes, posted work requests, state changes, time, loss. For every
//! input: no panic, work requests complete once and in order, and no access to memory
//! without a key.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_roce::packet::{LinkKind, View};
use ringverbs_roce::transport::hostile;

fuzz_target!(|script: &[u8]| {
    for kind in [LinkKind::Ib, LinkKind::Ethernet, LinkKind::Ip] {
        let _ = View::read(kind, script);
    }
    hostile::play(script);
});
