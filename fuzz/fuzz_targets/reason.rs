//! Questions and answers about why requests fail, as queue pair 1 receives them from other hosts.
//!
//! The input is a script: datagrams of arbitrary bytes, and of this class about existing queue
//! pairs, with questions of the program between them. For every input: no panic, not more sent
//! than received, and only to the peer of a queue pair.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_embedded::hostile;

fuzz_target!(|script: &[u8]| hostile::reasons(script));
