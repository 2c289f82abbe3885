//! The preloaded stand-in for the kernel (`provider-plugin/bench/standin.c`),
//! and the device's side of the queues that it made, which this program plays.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::standin::symbol;

/// Which of a stand-in's queues, as it numbers them.
#[derive(Clone, Copy)]
pub enum Kind {
    Completions,
    Sends,
    Receives,
}

/// `enum standin_queue_kind` and a handle; 0 is the newest queue of the kind.
type FindQueue = unsafe extern "C" fn(c_int, u32) -> *mut c_void;
type Doorbells = unsafe extern "C" fn() -> u64;

/// What the stand-in can be asked.
#[derive(Clone, Copy)]
pub struct StandIn {
    find_queue: FindQueue,
    doorbells: Doorbells,
}

impl StandIn {
    /// None if it was not preloaded.
    pub fn find() -> Option<Self> {
        let (queue, doorbells) = (symbol(c"standin_queue")?, symbol(c"standin_doorbells")?);
        // SAFETY: the stand-in's functions, declared so in its header.
        unsafe {
            Some(Self {
                find_queue: std::mem::transmute::<NonNull<c_void>, FindQueue>(queue),
                doorbells: std::mem::transmute::<NonNull<c_void>, Doorbells>(doorbells),
            })
        }
    }

    /// How many doorbells the device has heard.
    pub fn doorbells(&self) -> u64 {
        // SAFETY: it has no preconditions.
        unsafe { (self.doorbells)() }
    }

    /// The queue of that kind that was made last.
    pub fn newest(&self, kind: Kind) -> Ring {
        // SAFETY: it has no preconditions.
        let buf = unsafe { (self.find_queue)(kind as c_int, 0) };
        let buf = NonNull::new(buf.cast::<u8>()).expect("a queue of this kind");
        // SAFETY: the queue's header: the logarithm of an entry's size, and the
        // number of entries less one.
        let (log, mask) = unsafe { (buf.cast::<u32>().read(), buf.cast::<u32>().add(1).read()) };
        Ring { buf, log, mask }
    }
}

/// A queue's memory from the device's side; the stand-in never unmaps it.
#[derive(Clone, Copy)]
pub struct Ring {
    buf: NonNull<u8>,
    log: u32,
    mask: u32,
}

const PRODUCER: usize = 128;
const CONSUMER: usize = 256;
const DATA: usize = 384;

impl Ring {
    fn index(&self, at: usize) -> &AtomicU32 {
        // SAFETY: in the header, aligned, and reached by atomics alone.
        unsafe { self.buf.add(at).cast().as_ref() }
    }

    /// Where the next entry is put.
    pub fn producer(&self) -> u32 {
        self.index(PRODUCER).load(Ordering::Acquire)
    }

    /// Where the next entry is taken.
    pub fn consumer(&self) -> u32 {
        self.index(CONSUMER).load(Ordering::Acquire)
    }

    pub fn set_producer(&self, at: u32) {
        self.index(PRODUCER)
            .store(at & self.mask, Ordering::Release);
    }

    pub fn set_consumer(&self, at: u32) {
        self.index(CONSUMER)
            .store(at & self.mask, Ordering::Release);
    }

    /// The place after this one.
    pub fn after(&self, at: u32) -> u32 {
        (at + 1) & self.mask
    }

    /// How many places there are from one to another.
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        to.wrapping_sub(from) & self.mask
    }

    /// An entry, as words.
    pub fn entry(&self, at: u32) -> *mut u64 {
        let offset = DATA + ((at & self.mask) as usize) * (1 << self.log);
        // SAFETY: the queue has `mask` + 1 entries behind its header.
        unsafe { self.buf.add(offset).cast().as_ptr() }
    }

    /// The same where an entry's size is known, as a device crate knows it; `at`
    /// is one of the queue's places.
    pub fn entry_of<const SIZE: usize>(&self, at: u32) -> *mut u64 {
        // SAFETY: as above.
        unsafe { self.buf.add(DATA + at as usize * SIZE).cast().as_ptr() }
    }

    /// How many entries there are.
    pub fn slots(&self) -> u32 {
        self.mask + 1
    }

    /// The device takes all that was posted.
    pub fn drain(&self) {
        self.set_consumer(self.producer());
    }

    /// The device completes as many entries as they are written.
    pub fn fill(&self, entries: u32) {
        self.set_producer(self.consumer() + entries);
    }

    /// The device takes all that was posted: identifiers, which entries of both
    /// kinds begin with.
    pub fn consume(&self, ids: &mut Vec<u64>) {
        ids.clear();
        let (mut at, end) = (self.consumer(), self.producer());
        while at != end {
            // SAFETY: an entry has more than a word.
            ids.push(unsafe { self.entry(at).read() });
            at = self.after(at);
        }
        self.set_consumer(end);
    }

    /// Writes a completion without producing it: a success of so many bytes.
    pub fn write_completion(&self, at: u32, id: u64, bytes: u32) {
        // SAFETY: a completion has 48 bytes: identifier, status and operation,
        // vendor's error and length, and more.
        unsafe {
            let entry = self.entry(at);
            entry.write_bytes(0, 6);
            entry.write(id);
            entry.add(2).write(u64::from(bytes) << 32);
        }
    }

    /// The device completes work requests.
    pub fn complete(&self, ids: &[u64]) {
        let mut at = self.producer();
        for id in ids {
            self.write_completion(at, *id, 0);
            at = self.after(at);
        }
        self.set_producer(at);
    }
}
