//! Completion queues of rdma_rxe with a hostile device.
//!
//! The queue's memory (geometry, both indices, entries) comes from the input, and the
//! device overwrites any of it between the cursor's steps. For every input: no access
//! outside the mapping, no panic, and the completions are those of a model of the
//! protocol, in order and once.

#![no_main]

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use libfuzzer_sys::fuzz_target;
use ring::{Mapping, Ring, Span};
use rxe::{WcRing, WorkCompletion};

const SIZE: usize = 4 * 4096;
const HEADER: usize = 384;
const MASK: usize = 4;
const PRODUCER: usize = 128;
const CONSUMER: usize = 256;
const ENTRY: usize = size_of::<WorkCompletion>();

thread_local! {
    static MEMORY: OwnedFd = memory();
}

fn memory() -> OwnedFd {
    // SAFETY: a fresh descriptor without another owner, or -1.
    let fd = unsafe {
        let fd = libc::memfd_create(c"queue".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "memfd_create");
        assert_eq!(libc::ftruncate(fd, SIZE as libc::off_t), 0);
        OwnedFd::from_raw_fd(fd)
    };
    fd
}

/// The rest of the input; zeros at its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.0.len());
        out[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        out
    }

    fn byte(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }
}

/// The device, which maps the same memory at another address.
struct Device {
    view: Mapping,
}

impl Device {
    fn word(&self, at: usize) -> u32 {
        assert!(at + 4 <= SIZE);
        // SAFETY: inside the mapping, aligned; volatile since others write it.
        unsafe { self.view.as_ptr().add(at).cast::<u32>().read_volatile() }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= SIZE);
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: inside the mapping.
            unsafe { self.view.as_ptr().add(at + i).write_volatile(*byte) };
        }
    }

    fn entry(&self, at: usize) -> [u8; ENTRY] {
        assert!(at + ENTRY <= SIZE);
        // SAFETY: inside the mapping; any bytes are bytes.
        unsafe {
            self.view
                .as_ptr()
                .add(at)
                .cast::<[u8; ENTRY]>()
                .read_volatile()
        }
    }

    /// Overwrites an index, the geometry, or an entry.
    fn overwrite(&self, input: &mut Input<'_>) {
        match input.byte() % 8 {
            0..=3 => self.write(PRODUCER, &input.bytes::<4>()),
            4 => self.write(CONSUMER, &input.bytes::<4>()),
            5 => self.write(0, &input.bytes::<8>()),
            _ => {
                let at = input.word() as usize % (SIZE - HEADER - ENTRY);
                self.write(HEADER + at, &input.bytes::<ENTRY>());
            }
        }
    }
}

fn bytes_of(completion: &WorkCompletion) -> [u8; ENTRY] {
    // SAFETY: the structure is 48 bytes of integers without padding.
    unsafe { std::mem::transmute_copy(completion) }
}

/// Reads every field once, as the plugin and the Rust crate do.
fn fields(entry: &rxe::Entry<'_>) -> u64 {
    entry
        .wr_id()
        .wrapping_add(u64::from(entry.status()))
        .wrapping_add(u64::from(entry.opcode()))
        .wrapping_add(u64::from(entry.vendor_err()))
        .wrapping_add(u64::from(entry.byte_len()))
        .wrapping_add(u64::from(entry.ex()))
        .wrapping_add(u64::from(entry.qp_num()))
        .wrapping_add(u64::from(entry.src_qp()))
        .wrapping_add(u64::from(entry.wc_flags()))
        .wrapping_add(u64::from(entry.slid()))
        .wrapping_add(u64::from(entry.sl()))
        .wrapping_add(u64::from(entry.dlid_path_bits()))
}

/// The queue under test, and the model of its consumer index.
struct CheckedQueue<'a> {
    ring: WcRing,
    device: &'a Device,
    mask: u32,
    stride: usize,
    /// The consumer index, independent of the shared word.
    at: Cell<u32>,
}

impl CheckedQueue<'_> {
    fn slot(&self, at: u32) -> usize {
        HEADER + (at & self.mask) as usize * self.stride
    }

    /// Takes a batch of completions, as `ibv_poll_cq` does.
    fn take(&self, want: usize) {
        let at = self.at.get();
        let end = self.device.word(PRODUCER) & self.mask;
        let available = (end.wrapping_sub(at) & self.mask) as usize;
        let before = self.device.word(CONSUMER);

        let mut out = [const { MaybeUninit::<WorkCompletion>::uninit() }; 80];
        let want = want.min(out.len());
        let got = self.ring.take(&mut out[..want]);
        assert_eq!(got, available.min(want));
        for (i, completion) in out[..got].iter().enumerate() {
            // SAFETY: `take` has written the first `got`.
            let completion = unsafe { completion.assume_init_ref() };
            let slot = self.slot(at.wrapping_add(i as u32));
            assert_eq!(bytes_of(completion), self.device.entry(slot));
        }
        let after = if got == 0 {
            before
        } else {
            self.at.set(at.wrapping_add(got as u32) & self.mask);
            self.at.get()
        };
        assert_eq!(self.device.word(CONSUMER), after);
    }

    /// Reads completions with the cursor, while the device overwrites memory.
    fn read_with_cursor(&self, steps: u8, input: &mut Input<'_>) -> u64 {
        let mut sum = 0u64;
        let mut span: Span = self.ring.available();
        if span.at == span.end {
            return sum;
        }
        let mut slot = self.offset(&span);
        assert_eq!(slot, self.slot(self.at.get()));
        for _ in 0..=steps {
            sum = sum.wrapping_add(fields(&self.ring.entry(&span)));
            if input.byte() % 4 == 0 {
                self.device.overwrite(input);
            }
            if !self.ring.step(&mut span) {
                assert_eq!(self.offset(&span), slot, "a failed step moved the cursor");
                break;
            }
            slot = self.after(slot);
            assert_eq!(self.offset(&span), slot);
        }
        self.ring.release(&span);
        self.at.set(self.device.word(CONSUMER));
        assert_eq!(self.slot(self.at.get()), self.after(slot));
        assert!(self.at.get() <= self.mask);
        sum
    }

    /// Returns the offset in the mapping of the entry at the cursor.
    fn offset(&self, span: &Span) -> usize {
        let offset = self.ring.entry(span).as_ptr().addr() - self.base();
        assert!(offset >= HEADER && offset + ENTRY <= SIZE);
        offset
    }

    /// Returns the offset of the entry after the one at `offset`.
    fn after(&self, offset: usize) -> usize {
        let at = (offset - HEADER) / self.stride;
        self.slot(at as u32 + 1)
    }

    fn base(&self) -> usize {
        self.ring.consumer().indices().header_ptr().addr().get()
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let map = || {
        MEMORY
            .with(|memory| Mapping::new(memory.as_fd(), 0, SIZE))
            .expect("a mapping of a memfd")
    };
    let device = Device { view: map() };

    // Half of the inputs have an arbitrary geometry, the others a valid one.
    let (log2_stride, mask) = if input.byte() % 2 == 0 {
        (input.word(), input.word())
    } else {
        let log2_stride = 6 + u32::from(input.byte() % 4);
        let slots = 1u32 << (input.byte() % 6);
        (log2_stride, slots - 1)
    };
    device.write(0, &log2_stride.to_le_bytes());
    device.write(MASK, &mask.to_le_bytes());
    device.write(PRODUCER, &input.bytes::<4>());
    device.write(CONSUMER, &input.bytes::<4>());

    let fits = (u64::from(mask) + 1).is_power_of_two()
        && log2_stride < 32
        && 1u64 << log2_stride >= ENTRY as u64
        && (u64::from(mask) + 1) << log2_stride <= (SIZE - HEADER) as u64;
    let ring = match Ring::new(map(), WcRing::ENTRY_SIZE) {
        Ok(ring) => ring,
        Err(_) => {
            assert!(!fits, "a valid geometry was refused");
            return;
        }
    };
    assert!(fits, "an invalid geometry was accepted");

    let queue = CheckedQueue {
        ring: WcRing::new(ring),
        device: &device,
        mask,
        stride: 1 << log2_stride,
        at: Cell::new(device.word(CONSUMER) & mask),
    };
    while !input.0.is_empty() {
        match input.byte() % 4 {
            0 => {
                let want = usize::from(input.byte());
                queue.take(want);
            }
            1 => {
                let steps = input.byte();
                std::hint::black_box(queue.read_with_cursor(steps, &mut input));
            }
            _ => queue.device.overwrite(&mut input),
        }
    }
});
