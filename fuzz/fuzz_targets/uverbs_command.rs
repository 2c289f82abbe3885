//! Arbitrary commands for the embedded device, beside a well-behaved client: the sequences
//! of the device's random test, selected by the input.

#![no_main]

use device_testing::embedded::random;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    random::sequence(random::Random::from_bytes(script));
});
