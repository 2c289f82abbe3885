//! The software HCA with work requests, receives and doorbell records of arbitrary
//! contents.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::testing::hostile;

fuzz_target!(|script: &[u8]| hostile::work_requests(script));
