//! RoCE v2 datagrams of another host, as a UDP socket receives them, and its
//! connection manager's messages.
//!
//! The input is a script: datagrams of any bytes, and of right ICRC but any headers;
//! messages to queue pair 1; replies of the program. Whatever comes: no panic, a frame
//! that passes has a right ICRC, and conversations stay bounded.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ringverbs_embedded::hostile;

fuzz_target!(|script: &[u8]| hostile::datagrams(script));
