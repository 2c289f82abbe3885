//! Compressed completions: many of one kind as a title and eight bytes for each.
//!
//! A session of `n` completions takes the places of `n` entries. The first place
//! has the title: an entry like the first completion's, whose format says what it
//! is and whose byte count is `n`. The second place has an array of the first
//! eight, every eighth place after the title the array of the next eight; the
//! other places stay as they are. Whoever polls takes the whole session by its
//! title, so that alone has an owner bit, and is written last.
//!
//! A session ends with a completion that differs in more than an array can tell,
//! when it is full, and when the device has nothing more to do at once.

use super::core::Core;
use super::cq::{self, Completion, Cq, opcode};
use crate::bits::put32;
use crate::platform::{Platform, Unmapped};

/// Completions in an array.
const ARRAY: usize = 8;
/// Bytes of one of them.
const MINI: usize = 8;
/// Completions in a session at most.
pub(crate) const MOST: u32 = 64;

/// What an array tells of what was received, besides its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// A hash of its addresses. There is none: it is zero.
    Hash,
    /// The sum of its IP packet.
    Checksum,
}

/// Completions that wait to be written together.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) format: Format,
    title: Completion<'static>,
    minis: Vec<[u8; MINI]>,
}

impl Session {
    pub(crate) fn new(format: Format) -> Session {
        Session {
            format,
            title: Completion::default(),
            minis: Vec::new(),
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> u32 {
        self.minis.len() as u32
    }

    /// Whether a completion can be told as one of the session.
    fn continues(&self, next: &Completion<'_>) -> bool {
        let mut expected = self.title;
        expected.byte_count = next.byte_count;
        if next.opcode == opcode::REQUESTER {
            expected.wqe_counter = next.wqe_counter;
            expected.request = next.request;
        } else {
            expected.wqe_counter = expected.wqe_counter.wrapping_add(self.len() as u16);
            if self.format == Format::Checksum {
                expected.checksum = next.checksum;
            }
        }
        expected == *next
    }

    /// Keeps a completion, if it can be one of the session.
    fn keep(&mut self, next: &Completion<'_>) -> bool {
        if self.minis.is_empty() {
            self.title = Completion { data: &[], ..*next };
        } else if !self.continues(next) {
            return false;
        }
        let mut mini = [0; MINI];
        if next.opcode == opcode::REQUESTER {
            mini[..2].copy_from_slice(&next.wqe_counter.to_be_bytes());
            mini[2] = next.request;
        } else if self.format == Format::Checksum {
            mini[..2].copy_from_slice(&next.checksum.to_be_bytes());
        }
        put32(&mut mini, 4, next.byte_count);
        self.minis.push(mini);
        true
    }

    /// Writes the session, or the only entry.
    fn write<P: Platform>(&self, platform: &P, cq: &Cq, time: u64) -> Result<(), Unmapped> {
        if self.len() == 1 {
            return cq::write(platform, cq, &self.title, time);
        }
        for (n, array) in self.minis.chunks(ARRAY).enumerate() {
            let mut bytes = [0; ARRAY * MINI];
            for (place, mini) in bytes.chunks_exact_mut(MINI).zip(array) {
                place.copy_from_slice(mini);
            }
            let after_title = (n * ARRAY).max(1) as u32;
            let address = cq.fields(cq.producer.wrapping_add(after_title))?;
            platform.write(address, &bytes)?;
        }
        let title = Completion {
            byte_count: self.len(),
            is_title: true,
            ..self.title
        };
        cq::write(platform, cq, &title, time)
    }
}

/// Whether a completion can be in a session at all.
fn compressible(completion: &Completion<'_>) -> bool {
    completion.opcode <= opcode::SEND_INVALIDATE
        && completion.error.is_none()
        && completion.data.is_empty()
}

impl<P: Platform> Core<P> {
    /// Keeps a completion of a queue that compresses. False if it has to be
    /// written by itself; what waited before it is then written.
    pub(super) fn hold(&mut self, cqn: u32, completion: &Completion<'_>) -> bool {
        let compressible = compressible(completion);
        let Some(session) = self.session(cqn) else {
            return false;
        };
        if compressible && session.keep(completion) {
            let held = session.len();
            if held == 1 {
                self.holding.push(cqn);
            }
            if held >= self.longest_session(cqn) {
                self.release(cqn);
            }
            return true;
        }
        self.release(cqn);
        // Now the session is empty and takes any.
        compressible && self.hold(cqn, completion)
    }

    fn session(&mut self, cqn: u32) -> Option<&mut Session> {
        self.cqs.get_mut(cqn)?.session.as_deref_mut()
    }

    fn longest_session(&self, cqn: u32) -> u32 {
        self.cqs.get(cqn).map_or(1, |cq| MOST.min(1 << cq.log_size))
    }

    /// Writes what waits for one queue.
    pub(crate) fn release(&mut self, cqn: u32) {
        let Some(cq) = self.cqs.get_mut(cqn) else {
            return;
        };
        let Some(mut session) = cq.session.take_if(|session| session.len() > 0) else {
            return;
        };
        if cq.failed {
            session.minis.clear();
            cq.session = Some(session);
            return;
        }
        let time = self.platform.now();
        let written = session.write(&self.platform, cq, time);
        let count = session.len();
        session.minis.clear();
        let solicited = session.title.solicited;
        cq.session = Some(session);
        if count > 1 {
            self.stats.cqes_compressed += u64::from(count);
        }
        self.written(cqn, count, solicited, written);
    }

    /// Writes all that waits: the device has nothing more to do at once.
    pub(crate) fn release_all(&mut self) {
        while let Some(cqn) = self.holding.pop() {
            self.release(cqn);
        }
    }
}
