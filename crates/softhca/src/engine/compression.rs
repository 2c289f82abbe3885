//! Compressed CQEs: a title and mini CQEs of eight bytes for several completions of one
//! kind.
//!
//! A session of `n` completions occupies `n` entries. The first holds the title: the
//! CQE of the first completion, but with the format of a title and the byte count `n`.
//! The second holds the array of the first eight mini CQEs, every eighth entry after
//! the title the array of the next eight; the other entries are not written. Software
//! consumes a whole session by its title. So only the title has an owner bit, and it is
//! written last.
//!
//! A session ends when a completion differs in more than a mini CQE can express, when
//! it is full, at the end of the ring, and when the device has nothing more to do at once.

use roce::bits::put32;

use super::core::Core;
use super::cq::{self, Completion, Cq, opcode};
use crate::platform::{Platform, Unmapped};

/// Number of mini CQEs in an array.
const MINI_CQES_PER_ARRAY: usize = 8;
/// Size of a mini CQE in bytes.
const MINI_CQE_SIZE: usize = 8;
/// Maximum number of completions in a session.
pub(crate) const MAX_SESSION: u32 = 64;

/// Field of the mini CQE of a receive, besides its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// RX hash. It is not computed, and always zero.
    Hash,
    /// Checksum of the IP packet.
    Checksum,
}

/// A session of completions that is not written yet.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) format: Format,
    title: Completion<'static>,
    minis: Vec<[u8; MINI_CQE_SIZE]>,
}

impl Session {
    pub(crate) fn new(format: Format) -> Session {
        Session {
            format,
            title: Completion::default(),
            minis: Vec::new(),
        }
    }

    /// Returns the number of completions in the session.
    pub(crate) fn len(&self) -> u32 {
        self.minis.len() as u32
    }

    /// Returns whether a mini CQE can express a completion.
    fn can_express(&self, next: &Completion<'_>) -> bool {
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

    /// Adds a completion to the session. Returns false if it cannot be part of it.
    fn try_push(&mut self, next: &Completion<'_>) -> bool {
        if self.minis.is_empty() {
            self.title = Completion {
                data: &[],
                signature: None,
                ..*next
            };
        } else if !self.can_express(next) {
            return false;
        }
        let mut mini = [0; MINI_CQE_SIZE];
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

    /// Writes the session, or a plain CQE if it has a single completion.
    fn write<P: Platform>(&self, platform: &P, cq: &Cq, time: u64) -> Result<(), Unmapped> {
        if self.len() == 1 {
            return cq::write(platform, cq, &self.title, time);
        }
        for (n, array) in self.minis.chunks(MINI_CQES_PER_ARRAY).enumerate() {
            let mut bytes = [0; MINI_CQES_PER_ARRAY * MINI_CQE_SIZE];
            for (slot, mini) in bytes.chunks_exact_mut(MINI_CQE_SIZE).zip(array) {
                slot.copy_from_slice(mini);
            }
            let after_title = (n * MINI_CQES_PER_ARRAY).max(1) as u32;
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

/// Returns whether a completion can be in any session.
fn compressible(completion: &Completion<'_>) -> bool {
    completion.opcode <= opcode::SEND_INVALIDATE
        && completion.error.is_none()
        && completion.tag.is_none()
        && completion.data.is_empty()
}

impl<P: Platform> Core<P> {
    /// Adds a completion to the session of a queue with compression. Returns false if
    /// the caller has to write it as a plain CQE; the session is then written already.
    pub(super) fn compress(&mut self, cqn: u32, completion: &Completion<'_>) -> bool {
        let compressible = compressible(completion);
        let Some(session) = self.session(cqn) else {
            return false;
        };
        if compressible && session.try_push(completion) {
            let length = session.len();
            if length == 1 {
                self.cqs_with_session.push(cqn);
            }
            if length >= self.max_session(cqn) {
                self.write_session(cqn);
            }
            return true;
        }
        self.write_session(cqn);
        // The session is empty now and accepts any compressible completion.
        compressible && self.compress(cqn, completion)
    }

    fn session(&mut self, cqn: u32) -> Option<&mut Session> {
        self.cqs.get_mut(cqn)?.session.as_deref_mut()
    }

    /// Returns how long a session that begins now may become. DPDK's driver reads its
    /// arrays as contiguous, so that none continues at the beginning of the ring.
    fn max_session(&self, cqn: u32) -> u32 {
        self.cqs.get(cqn).map_or(1, |cq| {
            let size = 1 << cq.log_size;
            MAX_SESSION.min(size - (cq.producer & (size - 1)))
        })
    }

    /// Writes the session of a completion queue, if it has completions.
    pub(crate) fn write_session(&mut self, cqn: u32) {
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

    /// Writes all sessions, because the device has nothing more to do at once.
    pub(crate) fn write_sessions(&mut self) {
        while let Some(cqn) = self.cqs_with_session.pop() {
            self.write_session(cqn);
        }
    }
}
