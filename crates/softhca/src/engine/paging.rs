//! On-demand paging: events that request absent pages of a memory key, and the driver's
//! replies. Pages are requested by memory, as by devices with the memory scheme;
//! the queue pair that needed a page retries the access by itself.

use roce::bits::{put32, put64};
use roce::transport::Fault;

use super::core::Core;
use super::eq::event;
use super::mkey::AbsentPage;
use crate::platform::Platform;

const PAGE: u64 = 4096;
/// Maximum number of pages in one request. The rest is requested when these are
/// present.
const MAX_PAGES: u64 = 1024;
/// Maximum number of concurrent requests; the driver's queue is longer.
const MAX_REQUESTS: usize = 1024;
/// Number of refusals after which an access fails. The driver refuses pages that it is
/// about to provide through another key, such as those of a part of an implicit region
/// that was removed and is created again.
const MAX_REFUSALS: u8 = 8;
/// Delay after the first refusal in nanoseconds, doubled with each further one: the
/// driver works in threads that have to be scheduled.
const FIRST_RETRY_DELAY: u64 = 1_000_000;
/// Time after the delay, in nanoseconds, after which the refusals of a page are forgotten
/// unless the page is requested again.
const REFUSAL_LIFETIME: u64 = 2_000_000_000;
/// The event is about memory, not about a work request.
const SUBTYPE_MEMORY: u8 = 2;
/// The driver is to reply when it is done.
const FLAG_LAST: u8 = 1 << 7;

/// A request for pages.
#[derive(Debug)]
struct PageRequest {
    token: u64,
    key: u32,
    va: u64,
    /// The driver has not replied yet.
    is_pending: bool,
    /// Number of refusals.
    refusals: u8,
    /// Not to be requested again before this time.
    not_before: u64,
}

/// All requests.
#[derive(Debug, Default)]
pub(crate) struct Paging {
    requests: Vec<PageRequest>,
    last_token: u64,
}

impl Paging {
    /// Handles the driver's reply for a token. Returns false if no request has this
    /// token.
    pub(crate) fn resume(&mut self, token: u64, failed: bool, now: u64) -> bool {
        let is_answered = |request: &PageRequest| request.is_pending && request.token == token;
        let Some(at) = self.requests.iter().position(is_answered) else {
            return false;
        };
        if failed {
            // Kept for the next attempt.
            let request = &mut self.requests[at];
            request.is_pending = false;
            request.not_before = now + (FIRST_RETRY_DELAY << request.refusals);
            request.refusals += 1;
        } else {
            let va = self.requests.swap_remove(at).va;
            // Drops refused requests for the same address: they used the key of a part
            // that was removed, and the page is present now through another key.
            self.requests
                .retain(|request| request.is_pending || request.va != va);
        }
        true
    }

    /// Drops all requests.
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
    }
}

impl<P: Platform> Core<P> {
    /// Requests the page that the last translation found absent, unless a request is
    /// pending. Returns the fault of the access: retry or fail.
    fn request_page(&mut self) -> Fault {
        let Some(absent) = self.absent_page.take() else {
            return Fault::Protection;
        };
        let va = absent.va & !(PAGE - 1);
        let now = self.platform.now();
        let requests = &mut self.paging.requests;
        let is_same_page = |request: &PageRequest| request.key == absent.key && request.va == va;
        let mut refusals = 0;
        if let Some(at) = requests.iter().position(is_same_page) {
            if requests[at].is_pending || now < requests[at].not_before {
                return Fault::Absent;
            }
            let previous = requests.swap_remove(at);
            if now - previous.not_before < REFUSAL_LIFETIME {
                refusals = previous.refusals;
            }
            if refusals >= MAX_REFUSALS {
                return Fault::Protection;
            }
        }
        let Some(eqn) = self.event_queue_for(event::PAGE_FAULT) else {
            return Fault::Protection;
        };
        if self.paging.requests.len() >= MAX_REQUESTS {
            return Fault::Absent;
        }
        self.paging.last_token = (self.paging.last_token + 1) & 0xffff_ffff_ffff;
        let token = self.paging.last_token;
        self.paging.requests.push(PageRequest {
            token,
            key: absent.key,
            va,
            is_pending: true,
            refusals,
            not_before: now,
        });
        self.stats.page_faults += 1;
        let data = page_fault(token, va, &absent);
        self.post_event(eqn, event::PAGE_FAULT, SUBTYPE_MEMORY, &data);
        Fault::Absent
    }

    /// Requests the absent page if an access failed because of one.
    pub(crate) fn request_absent_page<T>(&mut self, result: Result<T, Fault>) -> Result<T, Fault> {
        match result {
            Err(Fault::Absent) => Err(self.request_page()),
            other => other,
        }
    }
}

/// Returns the data of a page fault event.
fn page_fault(token: u64, va: u64, absent: &AbsentPage) -> [u8; 28] {
    let end = absent.va.saturating_add(absent.length);
    let pages = (end - va).div_ceil(PAGE).clamp(1, MAX_PAGES) as u32;
    let mut data = [0; 28];
    data[0] = FLAG_LAST;
    data[6..8].copy_from_slice(&((token >> 32) as u16).to_be_bytes());
    put32(&mut data, 8, token as u32);
    put32(&mut data, 12, pages << 12);
    put32(&mut data, 16, absent.key);
    put64(&mut data, 20, va);
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A part of an implicit region can be removed and created again with every
    /// message, and each time the driver refuses a page of the removed part.
    #[test]
    fn a_page_provided_through_another_key_clears_refusals() {
        let request = |token, key, va| PageRequest {
            token,
            key,
            va,
            is_pending: true,
            refusals: 0,
            not_before: 0,
        };
        let mut paging = Paging {
            requests: vec![request(1, 0x100, 0x7000), request(2, 0x200, 0x8000)],
            last_token: 2,
        };
        assert!(paging.resume(1, true, 50) && paging.resume(2, true, 50));
        assert!(!paging.resume(1, true, 60), "it was answered");
        let refusals: Vec<_> = paging.requests.iter().map(|a| a.refusals).collect();
        assert_eq!(refusals, [1, 1]);
        assert_eq!(paging.requests[0].not_before, 50 + FIRST_RETRY_DELAY);
        paging.requests.push(request(3, 0x300, 0x7000));
        assert!(paging.resume(3, false, 70));
        let left: Vec<_> = paging.requests.iter().map(|a| a.va).collect();
        assert_eq!(left, [0x8000]);
    }

    #[test]
    fn a_request_covers_all_pages_of_the_access() {
        let absent = AbsentPage {
            key: 0x1234,
            va: 0x7fff_0000_0ffc,
            length: 8,
        };
        let data = page_fault(0x1_0000_0002, 0x7fff_0000_0000, &absent);
        assert_eq!(data[..2], [0x80, 0]);
        assert_eq!(data[6..12], [0, 1, 0, 0, 0, 2], "the token");
        assert_eq!(data[12..16], [0, 0, 0x20, 0], "two pages");
        assert_eq!(data[16..20], [0, 0, 0x12, 0x34]);
        assert_eq!(data[20..], [0, 0, 0x7f, 0xff, 0, 0, 0, 0]);
    }
}
