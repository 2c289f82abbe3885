//! The fabric's subnet manager, asked for anything.
//!
//! The input is a script: requests to subnet administration with any components
//! and records, and messages of any bytes to its queue pair. Whatever comes: no
//! panic, nobody who did not ask is answered, and a port can join as before.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::testing::hostile;

fuzz_target!(|script: &[u8]| hostile::management(script));
