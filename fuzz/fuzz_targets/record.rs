//! Records of anybody, replayed beside a record of the same lines. For every input: no panic, and
//! a replay that ends, since none of its events waits.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use replay::{Options, Record};
use ringverbs_embedded::{Drive, Network};

fuzz_target!(|text: &[u8]| {
    let Ok(record) = Record::read(text) else {
        return;
    };
    let Ok(network) = Network::new(Drive::Thread) else {
        return;
    };
    let options = Options {
        profile: None,
        patience: Duration::ZERO,
    };
    let outcome = replay::replay(&[record.clone(), record], &network, &options);
    drop(outcome);
});
