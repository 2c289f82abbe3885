//! Commands of any kind for the embedded device, beside a client that does
//! nothing wrong: the sequences of the device's own test, chosen by bytes.

#![no_main]

use embedded_testing::random;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    random::sequence(random::Random::from_bytes(script));
});
