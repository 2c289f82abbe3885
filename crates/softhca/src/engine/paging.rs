//! On-demand paging: what is asked for when a page of a memory key is not there,
//! and what the driver answers. Pages are asked for by memory, as devices do
//! that have the memory scheme; who needed them tries again by itself.

use super::core::Core;
use super::eq::event;
use super::mkey::Missing;
use crate::bits::{put32, put64};
use crate::platform::Platform;
use crate::transport::Fault;

const PAGE: u64 = 4096;
/// Pages that are asked for at once, at most. The rest is asked for when these
/// are there.
const MOST_PAGES: u64 = 1024;
/// What is asked for at the same time, at most: the driver's queue is longer.
const MOST_ASKED: usize = 1024;
/// How often the driver may refuse. It refuses what it is about to put elsewhere,
/// such as a part of an implicit key that has gone and comes again.
const MOST_REFUSED: u8 = 8;
/// In nanoseconds, how long to wait after a refusal, doubled with each one: what
/// the driver is about to do is done by threads that must find a processor.
const FIRST_PAUSE: u64 = 1_000_000;
/// A refusal is forgotten when nobody has asked again for so long after the
/// pause.
const FORGOTTEN: u64 = 2_000_000_000;
/// The event is about memory, not about a work request.
const SUBTYPE_MEMORY: u8 = 2;
/// The driver is to say when it is done.
const FLAG_LAST: u8 = 1 << 7;

/// Something that was asked for.
#[derive(Debug)]
struct Asked {
    token: u64,
    key: u32,
    va: u64,
    /// The driver has not answered yet.
    waiting: bool,
    /// How often it has refused.
    refused: u8,
    /// Not to be asked for again before this time.
    not_before: u64,
}

/// All that was asked for.
#[derive(Debug, Default)]
pub(crate) struct Paging {
    asked: Vec<Asked>,
    last_token: u64,
}

impl Paging {
    /// The driver is done with a token; false if nothing has it.
    pub(crate) fn resume(&mut self, token: u64, failed: bool, now: u64) -> bool {
        let answered = |asked: &Asked| asked.waiting && asked.token == token;
        let Some(at) = self.asked.iter().position(answered) else {
            return false;
        };
        if failed {
            // Kept for whoever tries again.
            let asked = &mut self.asked[at];
            asked.waiting = false;
            asked.not_before = now + (FIRST_PAUSE << asked.refused);
            asked.refused += 1;
        } else {
            let va = self.asked.swap_remove(at).va;
            // What was refused by the key of a part that has gone, and is there
            // now by another one.
            self.asked.retain(|asked| asked.waiting || asked.va != va);
        }
        true
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.asked.clear();
    }
}

impl<P: Platform> Core<P> {
    /// Asks for the page that the last translation found missing, unless that is
    /// done already. What the one who needed it is to do: wait, or fail.
    fn ask_for_page(&mut self) -> Fault {
        let Some(missing) = self.missing.take() else {
            return Fault::Protection;
        };
        let va = missing.va & !(PAGE - 1);
        let now = self.platform.now();
        let asked = &mut self.paging.asked;
        let same = |asked: &Asked| asked.key == missing.key && asked.va == va;
        let mut refused = 0;
        if let Some(at) = asked.iter().position(same) {
            if asked[at].waiting || now < asked[at].not_before {
                return Fault::Absent;
            }
            let before = asked.swap_remove(at);
            if now - before.not_before < FORGOTTEN {
                refused = before.refused;
            }
            if refused >= MOST_REFUSED {
                return Fault::Protection;
            }
        }
        let Some(eqn) = self.event_queue_for(event::PAGE_FAULT) else {
            return Fault::Protection;
        };
        if self.paging.asked.len() >= MOST_ASKED {
            return Fault::Absent;
        }
        self.paging.last_token = (self.paging.last_token + 1) & 0xffff_ffff_ffff;
        let token = self.paging.last_token;
        self.paging.asked.push(Asked {
            token,
            key: missing.key,
            va,
            waiting: true,
            refused,
            not_before: now,
        });
        self.stats.page_faults += 1;
        let data = page_fault(token, va, &missing);
        self.post_event(eqn, event::PAGE_FAULT, SUBTYPE_MEMORY, &data);
        Fault::Absent
    }

    /// What came of an access, and of a page that was missing for it.
    pub(crate) fn paged<T>(&mut self, result: Result<T, Fault>) -> Result<T, Fault> {
        match result {
            Err(Fault::Absent) => Err(self.ask_for_page()),
            other => other,
        }
    }
}

/// The data of the event.
fn page_fault(token: u64, va: u64, missing: &Missing) -> [u8; 28] {
    let end = missing.va.saturating_add(missing.length);
    let pages = (end - va).div_ceil(PAGE).clamp(1, MOST_PAGES) as u32;
    let mut data = [0; 28];
    data[0] = FLAG_LAST;
    data[6..8].copy_from_slice(&((token >> 32) as u16).to_be_bytes());
    put32(&mut data, 8, token as u32);
    put32(&mut data, 12, pages << 12);
    put32(&mut data, 16, missing.key);
    put64(&mut data, 20, va);
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An implicit region's part can go and come again with every message, and
    /// each time the driver refuses a page of the part that has gone.
    #[test]
    fn a_page_that_came_by_another_key_was_not_refused() {
        let asked = |token, key, va| Asked {
            token,
            key,
            va,
            waiting: true,
            refused: 0,
            not_before: 0,
        };
        let mut paging = Paging {
            asked: vec![asked(1, 0x100, 0x7000), asked(2, 0x200, 0x8000)],
            last_token: 2,
        };
        assert!(paging.resume(1, true, 50) && paging.resume(2, true, 50));
        assert!(!paging.resume(1, true, 60), "it was answered");
        let refused: Vec<_> = paging.asked.iter().map(|a| a.refused).collect();
        assert_eq!(refused, [1, 1]);
        assert_eq!(paging.asked[0].not_before, 50 + FIRST_PAUSE);
        paging.asked.push(asked(3, 0x300, 0x7000));
        assert!(paging.resume(3, false, 70));
        let left: Vec<_> = paging.asked.iter().map(|a| a.va).collect();
        assert_eq!(left, [0x8000]);
    }

    #[test]
    fn the_event_covers_what_is_missing() {
        let missing = Missing {
            key: 0x1234,
            va: 0x7fff_0000_0ffc,
            length: 8,
        };
        let data = page_fault(0x1_0000_0002, 0x7fff_0000_0000, &missing);
        assert_eq!(data[..2], [0x80, 0]);
        assert_eq!(data[6..12], [0, 1, 0, 0, 0, 2], "the token");
        assert_eq!(data[12..16], [0, 0, 0x20, 0], "two pages");
        assert_eq!(data[16..20], [0, 0, 0x12, 0x34]);
        assert_eq!(data[20..], [0, 0, 0x7f, 0xff, 0, 0, 0, 0]);
    }
}
