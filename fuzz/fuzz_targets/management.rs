//! The fabric's subnet manager with arbitrary requests.
//!
//! The input is a script: requests to subnet administration with arbitrary components and
//! records, and messages of arbitrary bytes to its queue pair. For every input: no panic,
//! answers only to requesters, and a port can still join.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::testing::hostile;

fuzz_target!(|script: &[u8]| hostile::management(script));
