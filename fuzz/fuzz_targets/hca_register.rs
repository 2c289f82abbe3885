//! The software HCA with arbitrary accesses to registers: doorbells, BlueFlame, arming,
//! device memory.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::testing::hostile;

fuzz_target!(|script: &[u8]| hostile::registers(script));
