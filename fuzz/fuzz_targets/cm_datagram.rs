//! Connection manager messages of other hosts, as queue pair 1 receives them.
//!
//! The input is a script: messages of arbitrary bytes, and of this class to existing
//! conversations, with replies, rejections and requests of the program between them.
//! For every input: no panic, a bounded number of conversations, well-formed answers.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_embedded::hostile;

fuzz_target!(|script: &[u8]| hostile::messages(script));
