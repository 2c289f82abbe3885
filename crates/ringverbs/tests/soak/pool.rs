//! Buffers that are counted: each is here, posted, or was let go of along with
//! its queue pair; and each comes back exactly once.

use ringverbs::{Buffer, ProtectionDomain};

/// Bytes of a buffer.
pub const SIZE: usize = 12_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    Posted,
    LetGo,
}

/// The buffers of a thread.
pub struct Pool {
    domain: ProtectionDomain,
    /// Where each buffer is, by its number, and its address.
    buffers: Vec<(Place, usize)>,
    here: Vec<(u32, Buffer)>,
    /// Times that a buffer was taken.
    pub taken: u64,
    /// Times that one came back.
    pub returned: u64,
    /// Those that went with a queue pair that was dropped.
    pub let_go: u64,
}

impl Pool {
    pub fn new(domain: &ProtectionDomain) -> Self {
        Self {
            domain: domain.clone(),
            buffers: Vec::new(),
            here: Vec::new(),
            taken: 0,
            returned: 0,
            let_go: 0,
        }
    }

    /// A buffer to be posted, with its number.
    pub fn take(&mut self) -> (u32, Buffer) {
        let (number, mut buffer) = self.here.pop().unwrap_or_else(|| {
            // One to a region, which can be had back and closed at the end.
            let buffer = self.domain.alloc(SIZE).unwrap().into_buffer();
            self.buffers.push((Place::Here, buffer.as_ptr().addr()));
            (self.buffers.len() as u32 - 1, buffer)
        });
        self.buffers[number as usize].0 = Place::Posted;
        self.taken += 1;
        buffer.fill_up();
        (number, buffer)
    }

    /// A buffer that was posted is here again.
    pub fn back(&mut self, number: u32, buffer: Buffer) {
        let (place, address) = &mut self.buffers[number as usize];
        assert_eq!(*place, Place::Posted, "buffer {number} comes back twice");
        assert_eq!(*address, buffer.as_ptr().addr(), "not buffer {number}");
        *place = Place::Here;
        self.returned += 1;
        self.here.push((number, buffer));
    }

    /// A buffer went with its queue pair.
    pub fn let_go(&mut self, number: u32) {
        let place = &mut self.buffers[number as usize].0;
        assert_eq!(*place, Place::Posted, "buffer {number} was not posted");
        *place = Place::LetGo;
        self.let_go += 1;
    }

    /// Nothing is posted any more, and nobody else has a part of what is here.
    pub fn close(self) -> [u64; 3] {
        for (number, (place, _)) in self.buffers.iter().enumerate() {
            assert_ne!(*place, Place::Posted, "buffer {number} never came back");
        }
        assert_eq!(self.taken, self.returned + self.let_go);
        for (number, buffer) in self.here {
            let region = buffer.try_into_region();
            let region = region.unwrap_or_else(|_| panic!("buffer {number} is in use"));
            region.close().unwrap();
        }
        [self.taken, self.returned, self.let_go]
    }
}
