//! The software HCA's transport with a peer that sends any packets.
//!
//! The input is a script: packets with right lengths and ICRC but any headers,
//! frames of any bytes, posted work requests, state changes, time, loss. Whatever
//! comes: no panic, work requests end once and in order, and memory without a key
//! is not touched.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::packet::{LinkKind, View};
use ringverbs_softhca::transport::hostile;

fuzz_target!(|script: &[u8]| {
    for kind in [LinkKind::Ib, LinkKind::Ethernet] {
        let _ = View::read(kind, script);
    }
    hostile::play(script);
});
