//! Commands of any kind for the embedded device, beside a client that does
//! nothing wrong: the sequences of the device's own test, chosen by bytes.

#![no_main]

#[path = "../../crates/embedded/tests/driver/mod.rs"]
mod driver;
#[path = "../../crates/embedded/tests/raw/mod.rs"]
mod raw;
#[path = "../../crates/embedded/tests/world/mod.rs"]
mod world;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    world::sequence(world::Random::of_bytes(script));
});
