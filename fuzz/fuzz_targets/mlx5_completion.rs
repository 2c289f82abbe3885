//! Completion queues of a hostile ConnectX.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| mlx5::hostile::completions(script));
