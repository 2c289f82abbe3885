//! RoCE v2 datagrams of another host, as a UDP socket receives them, and messages of its
//! connection manager.
//!
//! The input is a script: datagrams of arbitrary bytes, and with a valid ICRC but arbitrary
//! headers; messages to queue pair 1; replies of the program. For every input: no panic,
//! accepted frames have a valid ICRC, and the number of conversations is bounded.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_embedded::hostile;

fuzz_target!(|script: &[u8]| hostile::datagrams(script));
