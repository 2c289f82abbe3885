//! The operations of a queue pair with futures.
//!
//! An operation with a future has a slot from before it is posted until its completion has
//! arrived and the future was dropped. Receives have no slots: completed receives are in a
//! queue of messages, and futures that wait for a message are *claims*, in the order of their
//! creation. The third claim gets the third message, among those with the same type of
//! memory. A message is assigned only when its future is polled, and a withdrawn claim leaves
//! its message to the next claim.
//!
//! No code of a task runs while a table is locked: wakers are collected in
//! [`WakeList`], or returned, to be woken or dropped afterwards.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::task::Waker;

use crate::completion::{Completion, ReadError};
use crate::data::{Kind, Payload};
use crate::{Failure, Success};

/// Number of wakers that are collected without an allocation.
const INLINE_WAKERS: usize = 16;

/// Wakers to be woken after all locks are released.
#[derive(Default)]
pub(super) struct WakeList {
    first: [Option<Waker>; INLINE_WAKERS],
    count: usize,
    more: Vec<Waker>,
}

impl WakeList {
    pub fn push(&mut self, waker: Waker) {
        match self.first.get_mut(self.count) {
            Some(entry) => *entry = Some(waker),
            None => self.more.push(waker),
        }
        self.count += 1;
    }

    pub fn wake(self) {
        let first = self.first.into_iter().take(self.count).flatten();
        first.chain(self.more).for_each(Waker::wake);
    }
}

/// The reason why operations end without a completion.
#[derive(Clone, Debug)]
pub(super) enum EndReason {
    /// The queue pair has failed, and no receive is in flight.
    Failed(Failure),
    /// The batch was not posted.
    Abandoned,
    /// The queue pair was destroyed.
    Closed,
    /// The completion queue can no longer be read.
    Queue(Arc<ReadError>),
}

/// The result of an operation, with its memory.
#[derive(Debug)]
pub(super) struct Outcome {
    pub result: Result<Success, EndReason>,
    pub payload: Payload,
}

impl Outcome {
    fn ended(end: &EndReason, payload: Payload) -> Self {
        Self {
            result: Err(end.clone()),
            payload,
        }
    }
}

impl From<Completion> for Outcome {
    fn from(completion: Completion) -> Self {
        Self {
            result: completion.result.map_err(EndReason::Failed),
            payload: completion.payload,
        }
    }
}

/// A slot of an operation.
#[derive(Debug)]
pub(super) enum Slot {
    Free,
    /// In flight, with the waker of the task that waits.
    Waiting(Option<Waker>),
    /// Completed; the future was not polled since.
    Done(Outcome),
    /// In flight, and its future was dropped.
    Abandoned,
}

/// A future that waits for a message in this type of memory.
#[derive(Debug)]
struct Claim {
    id: u64,
    kind: Kind,
    waker: Option<Waker>,
}

/// The slots of a queue pair, its claims and messages.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The futures that wait for a message, oldest first.
    claims: VecDeque<Claim>,
    /// The identifier of the next claim.
    next_claim: u64,
    /// Messages that no future has taken, oldest first, followed by failed receives, at most as
    /// many as there are claims.
    messages: VecDeque<Outcome>,
    /// Receives in flight.
    receives: u32,
    /// Tasks that wait for room in the send queue.
    room: Vec<Waker>,
    /// The first failure.
    failure: Option<Failure>,
    end: Option<EndReason>,
}

impl Slots {
    /// Creates a table that allocates only for more than `sends` and `receives`
    /// futures at once.
    pub fn new(sends: usize, receives: usize) -> Self {
        Self {
            slots: (0..sends).map(|_| Slot::Free).collect(),
            free: (0..sends as u32).rev().collect(),
            claims: VecDeque::with_capacity(receives),
            messages: VecDeque::with_capacity(receives),
            ..Self::default()
        }
    }

    /// Returns the first failure of an operation.
    pub fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// Returns an error if nothing completes any more.
    pub fn check(&self) -> Result<(), EndReason> {
        self.end.clone().map_or(Ok(()), Err)
    }

    fn take(&mut self) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::Free);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Slot::Waiting(None);
        slot
    }

    /// Allocates a slot for an operation to be posted.
    pub fn begin(&mut self) -> Result<u32, EndReason> {
        self.check()?;
        Ok(self.take())
    }

    /// Releases a slot and returns what it held.
    fn release(&mut self, slot: u32) -> Slot {
        self.free.push(slot);
        mem::replace(&mut self.slots[slot as usize], Slot::Free)
    }

    /// Releases the slot of an operation that was not posted and has no future.
    pub fn release_unposted(&mut self, slot: u32) {
        self.release(slot);
    }

    /// Records the outcome of an operation.
    pub fn complete(&mut self, slot: u32, outcome: Outcome, wake_list: &mut WakeList) {
        let Some(entry) = self.slots.get_mut(slot as usize) else {
            return;
        };
        match entry {
            Slot::Waiting(waker) => {
                if let Some(waker) = waker.take() {
                    wake_list.push(waker);
                }
                *entry = Slot::Done(outcome);
            }
            Slot::Abandoned => drop(self.release(slot)),
            Slot::Free | Slot::Done(_) => {}
        }
    }

    /// Ends an operation whose batch was not posted.
    pub fn cancel(&mut self, slot: u32, wake_list: &mut WakeList) {
        self.complete(
            slot,
            Outcome::ended(&EndReason::Abandoned, Payload::None),
            wake_list,
        );
    }

    /// Records a failure of the queue pair, which ends claims without a receive in flight.
    pub fn record_failure(&mut self, failure: Failure, wake_list: &mut WakeList) {
        self.failure.get_or_insert(failure);
        self.end_claims(wake_list);
    }

    /// Wakes the tasks that wait for room.
    pub fn wake_room_waiters(&mut self, wake_list: &mut WakeList) {
        self.room.drain(..).for_each(|waker| wake_list.push(waker));
    }

    /// Registers a task that waits for room.
    pub fn wait_for_room(&mut self, waker: &Waker) {
        if !self
            .room
            .iter()
            .any(|registered| registered.will_wake(waker))
        {
            self.room.push(waker.clone());
        }
    }

    /// Takes the outcome of a slot and frees it, or registers the task and returns the replaced
    /// waker, which the caller drops.
    pub fn poll(&mut self, slot: u32, waker: &Waker) -> Result<Outcome, Option<Waker>> {
        match &mut self.slots[slot as usize] {
            Slot::Waiting(Some(registered)) if registered.will_wake(waker) => Err(None),
            Slot::Waiting(registered) => Err(registered.replace(waker.clone())),
            _ => match self.release(slot) {
                Slot::Done(outcome) => Ok(outcome),
                _ => Ok(Outcome::ended(&EndReason::Closed, Payload::None)),
            },
        }
    }

    /// Takes the outcome of a slot, if there is one.
    pub fn try_take(&mut self, slot: u32) -> Option<Outcome> {
        if !matches!(self.slots[slot as usize], Slot::Done(_)) {
            return None;
        }
        match self.release(slot) {
            Slot::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Called when the future of an operation was dropped. Returns the slot's contents, which
    /// the caller drops.
    pub fn abandon(&mut self, slot: u32) -> Slot {
        match &mut self.slots[slot as usize] {
            waiting @ Slot::Waiting(_) => mem::replace(waiting, Slot::Abandoned),
            _ => self.release(slot),
        }
    }

    /// Counts a receive that is about to be posted.
    pub fn begin_receive(&mut self) -> Result<(), EndReason> {
        self.check()?;
        self.receives += 1;
        Ok(())
    }

    /// Called when the receive was not posted.
    pub fn cancel_receive(&mut self, wake_list: &mut WakeList) {
        self.receives = self.receives.saturating_sub(1);
        self.end_claims(wake_list);
    }

    /// Adds a claim; returns its identifier.
    pub fn claim(&mut self, kind: Kind) -> u64 {
        let id = self.next_claim;
        self.next_claim += 1;
        let waker = None;
        self.claims.push_back(Claim { id, kind, waker });
        id
    }

    /// Returns the position of a claim, and how many of its kind precede it.
    fn find_claim(&self, id: u64) -> Option<(usize, Kind, usize)> {
        let at = self
            .claims
            .binary_search_by_key(&id, |claim| claim.id)
            .ok()?;
        let kind = self.claims[at].kind;
        let rank = self.claims.range(..at).filter(|claim| claim.kind == kind);
        Some((at, kind, rank.count()))
    }

    /// Returns the position of the message that `rank` messages of its kind precede.
    fn find_message(&self, kind: Kind, rank: usize) -> Option<usize> {
        let messages = self.messages.iter().enumerate();
        let mut of_kind = messages.filter(|(_, message)| message.payload.kind() == kind);
        of_kind.nth(rank).map(|(at, _)| at)
    }

    /// Takes the message of a claim, or the reason why there will be none; otherwise registers
    /// the task and returns the replaced waker, which the caller drops.
    pub fn poll_claim(&mut self, id: u64, waker: &Waker) -> Result<Outcome, Option<Waker>> {
        let Some((at, kind, rank)) = self.find_claim(id) else {
            return Ok(Outcome::ended(&EndReason::Closed, Payload::None));
        };
        if let Some(outcome) = self.take_message(at, kind, rank) {
            return Ok(outcome);
        }
        if let Some(end) = self.end_reason() {
            self.claims.remove(at);
            return Ok(Outcome::ended(&end, Payload::None));
        }
        match &mut self.claims[at].waker {
            Some(registered) if registered.will_wake(waker) => Err(None),
            registered => Err(registered.replace(waker.clone())),
        }
    }

    /// Takes the message of a claim, if it has arrived.
    pub fn try_take_message(&mut self, id: u64) -> Option<Outcome> {
        let (at, kind, rank) = self.find_claim(id)?;
        self.take_message(at, kind, rank)
    }

    fn take_message(&mut self, at: usize, kind: Kind, rank: usize) -> Option<Outcome> {
        let message = self.find_message(kind, rank)?;
        // No waker is dropped here: it was removed when the message arrived.
        self.claims.remove(at);
        self.messages.remove(message)
    }

    /// Wakes the claim that `rank` claims of its kind precede, if any.
    fn wake_claim(&mut self, kind: Kind, rank: usize, wake_list: &mut WakeList) -> bool {
        let claim = (self.claims.iter_mut())
            .filter(|claim| claim.kind == kind)
            .nth(rank);
        let Some(claim) = claim else { return false };
        if let Some(waker) = claim.waker.take() {
            wake_list.push(waker);
        }
        true
    }

    /// Returns the reason why there will be no further message.
    fn end_reason(&self) -> Option<EndReason> {
        let failed = self.failure.filter(|_| self.receives == 0);
        self.end.clone().or(failed.map(EndReason::Failed))
    }

    /// Wakes all claims if there will be no further message.
    fn end_claims(&mut self, wake_list: &mut WakeList) {
        if self.claims.is_empty() || self.end_reason().is_none() {
            return;
        }
        for claim in &mut self.claims {
            if let Some(waker) = claim.waker.take() {
                wake_list.push(waker);
            }
        }
    }

    fn messages_of(&self, kind: Kind) -> usize {
        let messages = self.messages.iter();
        messages
            .filter(|message| message.payload.kind() == kind)
            .count()
    }

    /// Records the outcome of a receive. A message is queued; a failure is queued if there is a
    /// claim for it, otherwise its memory is released.
    pub fn complete_receive(&mut self, outcome: Outcome, wake_list: &mut WakeList) {
        self.receives = self.receives.saturating_sub(1);
        let kind = outcome.payload.kind();
        let rank = self.messages_of(kind);
        if self.wake_claim(kind, rank, wake_list) || outcome.result.is_ok() {
            self.messages.push_back(outcome);
        }
        self.end_claims(wake_list);
    }

    /// Called when the future of a claim was dropped; the next claim gets its message. Returns
    /// its waker and the memory of a failed receive, which the caller drops.
    pub fn withdraw(
        &mut self,
        id: u64,
        wake_list: &mut WakeList,
    ) -> (Option<Waker>, Option<Outcome>) {
        let Some((at, kind, rank)) = self.find_claim(id) else {
            return (None, None);
        };
        let claim = self.claims.remove(at);
        let messages = self.messages_of(kind);
        let mut failed = None;
        if rank < messages && !self.wake_claim(kind, messages - 1, wake_list) {
            // The last message no longer has a claim.
            failed = self.find_message(kind, messages - 1);
            failed = failed.filter(|&at| self.messages[at].result.is_err());
        }
        let failed = failed.and_then(|at| self.messages.remove(at));
        (claim.and_then(|claim| claim.waker), failed)
    }

    /// Ends all waiting operations and claims, because nothing completes any more.
    pub fn end(&mut self, end: &EndReason, wake_list: &mut WakeList) {
        self.end.get_or_insert_with(|| end.clone());
        self.end_claims(wake_list);
        for slot in 0..self.slots.len() {
            if matches!(self.slots[slot], Slot::Waiting(_)) {
                let outcome = Outcome::ended(end, Payload::None);
                self.complete(slot as u32, outcome, wake_list);
            }
        }
        self.wake_room_waiters(wake_list);
    }

    /// Ends an operation that was in flight when the queue pair was destroyed.
    pub fn close_slot(&mut self, slot: u32, payload: Payload, wake_list: &mut WakeList) {
        self.complete(slot, Outcome::ended(&EndReason::Closed, payload), wake_list);
    }

    /// Ends a receive that was in flight when the queue pair was destroyed.
    pub fn close_receive(&mut self, payload: Payload, wake_list: &mut WakeList) {
        self.complete_receive(Outcome::ended(&EndReason::Closed, payload), wake_list);
    }

    /// Wakes every task, for example after the driver has ended.
    pub fn wake_all(&mut self, wake_list: &mut WakeList) {
        for slot in &mut self.slots {
            if let Slot::Waiting(waker) = slot {
                if let Some(waker) = waker.take() {
                    wake_list.push(waker);
                }
            }
        }
        for claim in &mut self.claims {
            if let Some(waker) = claim.waker.take() {
                wake_list.push(waker);
            }
        }
        self.wake_room_waiters(wake_list);
    }
}
