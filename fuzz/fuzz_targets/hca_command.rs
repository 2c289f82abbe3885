//! The software HCA with commands of arbitrary contents, directly and by the command queue
//! with its mailboxes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_softhca::testing::hostile;

fuzz_target!(|script: &[u8]| hostile::commands(script));
