//! The software HCA with registers read and written anywhere: doorbells, BlueFlame,
//! arming, the device's own memory.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::testing::hostile;

fuzz_target!(|script: &[u8]| hostile::registers(script));
