//! Counted buffers: each is available, posted, or was released with its queue
//! pair, and each is returned exactly once.

use ringverbs::{Buffer, ProtectionDomain};

/// Bytes of a buffer.
pub const SIZE: usize = 12_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BufferState {
    Available,
    Posted,
    Released,
}

/// The buffers of a thread.
pub struct Pool {
    domain: ProtectionDomain,
    /// State and address of each buffer, by its number.
    buffers: Vec<(BufferState, usize)>,
    here: Vec<(u32, Buffer)>,
    /// Times that a buffer was taken.
    pub taken: u64,
    /// Times that one was returned.
    pub returned: u64,
    /// Buffers that were released with a dropped queue pair.
    pub released: u64,
}

impl Pool {
    pub fn new(domain: &ProtectionDomain) -> Self {
        Self {
            domain: domain.clone(),
            buffers: Vec::new(),
            here: Vec::new(),
            taken: 0,
            returned: 0,
            released: 0,
        }
    }

    /// A buffer to be posted, with its number.
    pub fn take(&mut self) -> (u32, Buffer) {
        let (number, mut buffer) = self.here.pop().unwrap_or_else(|| {
            // One to a region, which is closed at the end.
            let buffer = self.domain.alloc(SIZE).unwrap().into_buffer();
            self.buffers
                .push((BufferState::Available, buffer.as_ptr().addr()));
            (self.buffers.len() as u32 - 1, buffer)
        });
        self.buffers[number as usize].0 = BufferState::Posted;
        self.taken += 1;
        buffer.fill_up();
        (number, buffer)
    }

    /// Returns a posted buffer.
    pub fn put_back(&mut self, number: u32, buffer: Buffer) {
        let (place, address) = &mut self.buffers[number as usize];
        assert_eq!(
            *place,
            BufferState::Posted,
            "buffer {number} comes back twice"
        );
        assert_eq!(*address, buffer.as_ptr().addr(), "not buffer {number}");
        *place = BufferState::Available;
        self.returned += 1;
        self.here.push((number, buffer));
    }

    /// Counts a buffer that was released with its queue pair.
    pub fn released(&mut self, number: u32) {
        let place = &mut self.buffers[number as usize].0;
        assert_eq!(
            *place,
            BufferState::Posted,
            "buffer {number} was not posted"
        );
        *place = BufferState::Released;
        self.released += 1;
    }

    /// Closes all regions: nothing is posted, and no part of a buffer is used.
    pub fn close(self) -> [u64; 3] {
        for (number, (place, _)) in self.buffers.iter().enumerate() {
            assert_ne!(
                *place,
                BufferState::Posted,
                "buffer {number} never came back"
            );
        }
        assert_eq!(self.taken, self.returned + self.released);
        for (number, buffer) in self.here {
            let region = buffer.try_into_region();
            let region = region.unwrap_or_else(|_| panic!("buffer {number} is in use"));
            region.close().unwrap();
        }
        [self.taken, self.returned, self.released]
    }
}
