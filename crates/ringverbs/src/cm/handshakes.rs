//! Connections that are being established on the passive side.
//!
//! A request costs a table entry until it is accepted. Accepting needs a queue pair, since
//! the answer contains its number, so the number of accepted requests whose peers have not
//! confirmed is limited, in total and for each source address: sources may be forged, and
//! such a peer never answers. All of them share the listener's channel.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use rdmacm::{EventKind, Key};

use super::listener::{Arrival, HalfOpen};
use super::{Error, Listener, Request};

/// Maximum number of accepted requests whose peers have not confirmed.
const MAX_ACCEPTED: usize = 48;
/// Maximum number of them from one source while others wait.
const MAX_OF_SOURCE: usize = MAX_ACCEPTED / 2;
/// Maximum number of requests that wait to be accepted.
const MAX_WAITING: usize = 1024;
/// Time after which an accepted request may be given up in favour of another. A peer confirms
/// within milliseconds, unless its confirmation was lost, or its host is busy with as many
/// connections.
const GRACE: Duration = Duration::from_millis(400);
/// The same in favour of another one of its source, while other sources have room: a host that
/// makes many connections at once takes its time.
const SOURCE_GRACE: Duration = Duration::from_secs(4);
/// Time for which the caller waits once more before it is: while the caller was busy, for
/// instance with memory of other connections, its device may have read no messages.
const LAST_WAIT: Duration = Duration::from_millis(100);

/// Accepted requests of a [`Listener`] whose peers have not confirmed yet.
///
/// [`next`](Self::next) accepts requests, and returns each connection when it is
/// established. Requests that are never confirmed, as an attacker sends them, do not
/// keep others from being accepted: at most 48 are accepted at once, and under pressure
/// the oldest are given up after half a second, or, if only those of one source are too many,
/// after four. The value `T` belongs to a connection, and
/// should contain its queue pair and nothing else that is expensive.
#[derive(Debug)]
pub struct Handshakes<T> {
    waiting: VecDeque<Waiting>,
    accepted: Vec<Accepted<T>>,
    /// To be returned next.
    established: Option<Accepted<T>>,
    /// Number of accepted requests of each source.
    sources: HashMap<IpAddr, usize>,
}

#[derive(Debug)]
struct Waiting {
    source: IpAddr,
    request: Request,
}

#[derive(Debug)]
struct Accepted<T> {
    key: Key,
    source: IpAddr,
    since: Instant,
    /// Until when the caller waits once more.
    last_wait: Option<Instant>,
    /// Dropped before the queue pair in `value`.
    half_open: HalfOpen,
    value: T,
}

/// The result of [`Handshakes::next`].
#[derive(Debug)]
pub enum Handshake<T> {
    /// A peer has confirmed. The connection is still on the listener's channel.
    Established(HalfOpen, T),
    /// Nothing to do before the listener is readable, or until this instant.
    Pending(Option<Instant>),
}

impl<T> Default for Handshakes<T> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            accepted: Vec::new(),
            established: None,
            sources: HashMap::new(),
        }
    }
}

impl<T> Handshakes<T> {
    /// Returns an empty table. A listener has one table, which reads all its events.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the next established connection; does not wait. `accept` creates a queue pair
    /// for a request and calls [`Request::begin_accept`]; with `None` the request is rejected.
    ///
    /// # Errors
    /// As [`Listener::next_request`]; the error of `accept`, whose request is rejected. The
    /// table can still be used.
    pub fn next<E: From<Error>>(
        &mut self,
        listener: &Listener,
        mut accept: impl FnMut(Request) -> Result<Option<(HalfOpen, T)>, E>,
    ) -> Result<Handshake<T>, E> {
        loop {
            while let Some(request) = self.next_with_room() {
                let Waiting { source, request } = request;
                let Some((half_open, value)) = accept(request)? else {
                    continue;
                };
                *self.sources.entry(source).or_default() += 1;
                self.accepted.push(Accepted {
                    key: half_open.key(),
                    source,
                    since: Instant::now(),
                    last_wait: None,
                    half_open,
                    value,
                });
            }
            if let Some(entry) = self.established.take() {
                return Ok(Handshake::Established(entry.half_open, entry.value));
            }
            match listener.next_arrival()? {
                Some(Arrival::Request(request)) => self.push(request),
                Some(Arrival::Event(key, kind)) => {
                    let entry = self.take(key, kind);
                    self.established = entry.filter(|_| kind == EventKind::ESTABLISHED);
                }
                // Confirmations may be behind requests, so all events are read before an
                // accepted request is given up.
                None => {
                    if let Err(until) = self.give_up_oldest(Instant::now()) {
                        return Ok(Handshake::Pending(until));
                    }
                }
            }
        }
    }

    /// Adds a request to those that wait; if there are too many, the oldest one of the source
    /// with the most requests is rejected.
    fn push(&mut self, request: Request) {
        let address = request.peer_addr().ok().flatten();
        let source = address.map_or(Ipv4Addr::UNSPECIFIED.into(), |it| it.ip());
        self.waiting.push_back(Waiting { source, request });
        if self.waiting.len() <= MAX_WAITING {
            return;
        }
        let mut counts = HashMap::<IpAddr, usize>::new();
        for waiting in &self.waiting {
            *counts.entry(waiting.source).or_default() += 1;
        }
        let most = counts.values().max().copied();
        let oldest = (self.waiting.iter()).position(|it| counts.get(&it.source).copied() == most);
        if let Some(at) = oldest {
            tracing::debug!("rejected a connection request: too many wait");
            self.waiting.remove(at);
        }
    }

    /// Returns the index of the request to accept next: the oldest one of a source with the
    /// fewest accepted requests.
    fn next_waiting(&self) -> Option<usize> {
        let all = self.waiting.iter().enumerate();
        all.min_by_key(|(_, it)| self.of_source(it.source))
            .map(|(at, _)| at)
    }

    fn of_source(&self, source: IpAddr) -> usize {
        self.sources.get(&source).copied().unwrap_or(0)
    }

    /// Removes the request to accept next, if there is room for it.
    fn next_with_room(&mut self) -> Option<Waiting> {
        let at = self.next_waiting()?;
        let has_room = self.accepted.len() < MAX_ACCEPTED
            && self.of_source(self.waiting[at].source) < MAX_OF_SOURCE;
        has_room.then(|| self.waiting.remove(at)).flatten()
    }

    /// Gives up an accepted request in favour of the one to accept next, for which there is
    /// no room.
    ///
    /// # Errors
    /// The instant from which one may be given up; `None` if no request waits.
    fn give_up_oldest(&mut self, now: Instant) -> Result<(), Option<Instant>> {
        let source = self.waiting[self.next_waiting().ok_or(None)?].source;
        let of_source = self.of_source(source) >= MAX_OF_SOURCE;
        // They are in the order of their age.
        let oldest = (self.accepted.iter()).position(|it| !of_source || it.source == source);
        let at = oldest.ok_or(None)?;
        let grace = match self.accepted.len() < MAX_ACCEPTED {
            true => SOURCE_GRACE,
            false => GRACE,
        };
        let entry = &mut self.accepted[at];
        let mut until = entry.since + grace;
        if until <= now {
            until = *entry.last_wait.get_or_insert(now + LAST_WAIT);
        }
        if until > now {
            return Err(Some(until));
        }
        tracing::debug!(source = %self.accepted[at].source, "gave up a silent peer");
        self.remove(at);
        Ok(())
    }

    fn remove(&mut self, at: usize) -> Accepted<T> {
        let entry = self.accepted.remove(at);
        if let Some(count) = self.sources.get_mut(&entry.source) {
            *count -= 1;
            if *count == 0 {
                self.sources.remove(&entry.source);
            }
        }
        entry
    }

    /// Removes the entry of an event, if the event ends the handshake.
    fn take(&mut self, key: Key, kind: EventKind) -> Option<Accepted<T>> {
        let ends = matches!(
            kind,
            EventKind::ESTABLISHED
                | EventKind::REJECTED
                | EventKind::UNREACHABLE
                | EventKind::CONNECT_ERROR
                | EventKind::DISCONNECTED
                | EventKind::DEVICE_REMOVAL
        );
        let at = self.accepted.iter().position(|it| it.key == key)?;
        ends.then(|| self.remove(at))
    }
}
