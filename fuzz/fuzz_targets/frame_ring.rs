//! A ring of frames between two processes, either of which may write any word of the
//! shared memory at any time.
//!
//! The input is a script: frames sent and received by this project's code, and words
//! written by the other side. For every input: no panic, no access outside the memory, and
//! no frame longer than its buffer. Without such writes, frames arrive as they were sent.

#![no_main]

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use libfuzzer_sys::fuzz_target;
use ring::{FrameReceiver, FrameSender, Mapping};

/// Bytes of a receiver's buffer.
const CAPACITY: usize = 4352;
/// The words of the header, and those before the first frame.
const HEADER: usize = 96;
const START: usize = 1024;

fuzz_target!(|script: &[u8]| run(script));

fn run(script: &[u8]) {
    // Fails only without file descriptors or memory.
    let Ok((mut sender, fd)) = FrameSender::create() else {
        return;
    };
    let Ok(mut receiver) = FrameReceiver::new(fd.as_fd()) else {
        return;
    };
    let file = File::from(fd);
    let size = file.metadata().map_or(0, |found| found.len()) as usize;
    let Ok(memory) = Mapping::new(file.as_fd(), 0, size) else {
        return;
    };
    let mut sent = VecDeque::new();
    let mut is_unmodified = true;
    let mut buffer = vec![0; CAPACITY];
    for step in script.chunks_exact(8) {
        let [what, a, b, c, word @ ..] = *<&[u8; 8]>::try_from(step).expect("eight bytes");
        let (number, word) = (
            usize::from(a) | usize::from(b) << 8,
            u32::from_le_bytes(word),
        );
        match what % 8 {
            0 | 1 => {
                let frame = vec![c; number % (CAPACITY + 1)];
                if sender.push(a, &frame) == Ok(true) {
                    sent.push_back((a, frame));
                }
            }
            2..=4 => match receiver.pop(&mut buffer) {
                Ok(Some((tag, length))) => {
                    assert!(length <= CAPACITY);
                    if is_unmodified {
                        assert_eq!(sent.pop_front(), Some((tag, buffer[..length].to_vec())));
                    }
                }
                Ok(None) => assert!(!is_unmodified || sent.is_empty()),
                Err(_) => assert!(!is_unmodified),
            },
            5 => {
                let (armed, unread) = (receiver.arm(), sender.is_unread());
                let woken = sender.takes_wake_up();
                assert!(!is_unmodified || (Ok(armed) == unread && woken));
            }
            kind => {
                is_unmodified = false;
                let at = match (kind, c % 2) {
                    (6, _) => number % HEADER,
                    (_, 0) => START + number % 64,
                    _ => number | usize::from(c) << 16,
                };
                let at = at % (size / 4);
                // SAFETY: in the mapping, and aligned; all accesses are atomic.
                let to =
                    unsafe { AtomicU32::from_ptr(memory.as_ptr().cast::<u32>().add(at).as_ptr()) };
                to.store(word, Ordering::Relaxed);
            }
        }
    }
}
