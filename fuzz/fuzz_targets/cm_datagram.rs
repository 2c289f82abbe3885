//! Connection manager messages of other hosts, as queue pair 1 receives them.
//!
//! The input is a script: messages of any bytes, and of this class to conversations
//! that exist, with replies, rejections and requests of the program between them.
//! Whatever comes: no panic, conversations stay bounded, and answers are well formed.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_embedded::hostile;

fuzz_target!(|script: &[u8]| hostile::messages(script));
