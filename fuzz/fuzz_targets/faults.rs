//! Texts of faults. For every input: no panic; what is accepted is the same after it was written,
//! and what is refused has a place in the text.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::fault;

fuzz_target!(|text: &str| fault::check_text(text));
