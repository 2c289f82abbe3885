//! Objects with a number in the kernel and events: ids and multicast memberships.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use uverbs::kernel::{Descriptor, Kernel};

use crate::PortSpace;
use crate::command::Ucm;
use crate::event::{EventKind, Form};
use crate::state::State;

/// The open file. It stays open while ids use it.
#[derive(Debug)]
pub(crate) struct Channel {
    pub file: Descriptor<Box<dyn Kernel>>,
    pub table: Arc<Table>,
}

impl Channel {
    pub fn ucm(&self) -> Ucm<'_> {
        Ucm { file: &self.file }
    }
}

/// Identifies the id or membership of an event. Never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub(crate) u64);

/// The next key. Relaxed suffices: it only counts, and orders no other access.
/// 64 bits do not wrap.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

impl Key {
    fn new() -> Self {
        Self(NEXT_KEY.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the number that the kernel stores (`uid`).
    pub fn as_u64(self) -> u64 {
        self.0
    }

    /// Returns whether `number` has been assigned as a key.
    pub(crate) fn was_assigned(number: u64) -> bool {
        (1..NEXT_KEY.load(Ordering::Relaxed)).contains(&number)
    }
}

/// Locks a mutex, ignoring poison: no panic can leave its data inconsistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct EntityState {
    state: State,
    /// Events delivered, and events acknowledged.
    read: u32,
    acknowledged: u32,
}

/// An id or a membership, shared with its events.
#[derive(Debug)]
pub(crate) struct Entity {
    pub key: Key,
    /// The kernel's number; set as soon as it is known.
    pub number: OnceLock<u32>,
    pub port_space: PortSpace,
    /// Format of the parameters of its events.
    pub form: Form,
    /// The id of a membership.
    pub owner: Option<Arc<Entity>>,
    /// Whether the object exists in the kernel. Locked while the object is
    /// destroyed or moved, so that a membership's number is not used after its
    /// id has been destroyed.
    pub alive: Mutex<bool>,
    /// The channel of the object.
    channel: Mutex<Arc<Channel>>,
    /// The memberships of an id.
    memberships: Mutex<Vec<Weak<Entity>>>,
    state_and_events: Mutex<EntityState>,
    all_acknowledged: Condvar,
    /// The tables that contain the object: those of its channel, and of former
    /// channels.
    tables: Mutex<Vec<Weak<Table>>>,
}

impl Entity {
    pub fn new(
        channel: &Arc<Channel>,
        (port_space, form): (PortSpace, Form),
        state: State,
        owner: Option<Arc<Entity>>,
    ) -> Arc<Self> {
        let entity = Arc::new(Self {
            key: Key::new(),
            number: OnceLock::new(),
            port_space,
            form,
            owner,
            alive: Mutex::new(true),
            channel: Mutex::new(Arc::clone(channel)),
            memberships: Mutex::new(Vec::new()),
            state_and_events: Mutex::new(EntityState {
                state,
                read: 0,
                acknowledged: 0,
            }),
            all_acknowledged: Condvar::new(),
            tables: Mutex::new(Vec::new()),
        });
        entity.register_in(&channel.table);
        if let Some(owner) = &entity.owner {
            let mut memberships = lock(&owner.memberships);
            memberships.retain(|membership| membership.strong_count() > 0);
            memberships.push(Arc::downgrade(&entity));
        }
        entity
    }

    fn register_in(self: &Arc<Self>, table: &Arc<Table>) {
        lock(&self.tables).push(Arc::downgrade(table));
        lock(&table.0).insert(self.key.0, Arc::downgrade(self));
    }

    /// Registers the object and its memberships for events read from `channel`.
    pub fn register_for(self: &Arc<Self>, channel: &Channel) {
        self.register_in(&channel.table);
        let memberships = lock(&self.memberships).clone();
        for membership in memberships.iter().filter_map(Weak::upgrade) {
            membership.register_in(&channel.table);
        }
    }

    /// Returns the channel of the object.
    pub fn channel(&self) -> Arc<Channel> {
        Arc::clone(&lock(&self.channel))
    }

    /// Sets the channel of the object.
    pub fn set_channel(&self, channel: &Arc<Channel>) {
        let former = core::mem::replace(&mut *lock(&self.channel), Arc::clone(channel));
        drop(former);
    }

    pub fn number(&self) -> u32 {
        // Set before the entity is shared.
        self.number.get().copied().unwrap_or(u32::MAX)
    }

    pub fn state(&self) -> State {
        lock(&self.state_and_events).state
    }

    /// Enters a state and returns the former one. Called before the command,
    /// since the command's event may be read before the command returns.
    pub fn enter_state(&self, state: State) -> State {
        core::mem::replace(&mut lock(&self.state_and_events).state, state)
    }

    /// Restores the former state, unless the state has changed since.
    pub fn restore_state(&self, from: State, to: State) {
        let mut state_and_events = lock(&self.state_and_events);
        if state_and_events.state == from {
            state_and_events.state = to;
        }
    }

    /// Records that an event was read.
    pub fn record_event(&self, kind: EventKind) {
        let mut state_and_events = lock(&self.state_and_events);
        state_and_events.read = state_and_events.read.wrapping_add(1);
        state_and_events.state = match kind {
            EventKind::ADDR_RESOLVED => State::AddressResolved,
            EventKind::ADDR_ERROR => State::Bound,
            EventKind::ROUTE_RESOLVED => State::RouteResolved,
            EventKind::ROUTE_ERROR => State::AddressResolved,
            EventKind::CONNECT_RESPONSE => State::Responded,
            EventKind::ESTABLISHED => State::Established,
            EventKind::CONNECT_ERROR | EventKind::UNREACHABLE | EventKind::REJECTED => {
                State::Failed
            }
            EventKind::DISCONNECTED => State::Disconnected,
            EventKind::DEVICE_REMOVAL => State::DeviceRemoved,
            _ => state_and_events.state,
        };
        drop(state_and_events);
        if let Some(owner) = &self.owner {
            owner.record_event(kind);
        }
    }

    /// Records that an event was acknowledged.
    pub fn acknowledge(&self) {
        let mut state_and_events = lock(&self.state_and_events);
        state_and_events.acknowledged = state_and_events.acknowledged.wrapping_add(1);
        drop(state_and_events);
        self.all_acknowledged.notify_all();
        if let Some(owner) = &self.owner {
            owner.acknowledge();
        }
    }
}

impl Drop for Entity {
    fn drop(&mut self) {
        for table in lock(&self.tables).drain(..) {
            if let Some(table) = table.upgrade() {
                lock(&table.0).remove(&self.key.0);
            }
        }
    }
}

/// The entities whose events a channel may read.
#[derive(Debug, Default)]
pub(crate) struct Table(Mutex<BTreeMap<u64, Weak<Entity>>>);

impl Table {
    pub fn find(&self, uid: u64) -> Option<Arc<Entity>> {
        // Upgraded under the lock, but dropped by the caller outside of it:
        // dropping the last reference locks this table.
        lock(&self.0).get(&uid)?.upgrade()
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

/// The events of a destroyed id or membership that were read, and may be in use by
/// other threads.
///
/// Those events stay valid; dropping this value without waiting is permitted.
#[derive(Debug)]
pub struct ReportedEvents {
    pub(crate) entity: Arc<Entity>,
    pub(crate) count: u32,
}

impl ReportedEvents {
    /// Returns the number of events that were read, as the kernel counts them.
    pub fn events_reported(&self) -> u32 {
        self.count
    }

    /// Returns how many of them have not been dropped.
    pub fn unacknowledged(&self) -> u32 {
        self.count
            .saturating_sub(lock(&self.entity.state_and_events).acknowledged)
    }

    /// Waits until all are dropped, at most `timeout` (`None`: without limit).
    /// Returns false on timeout. A thread must not wait for an event that it
    /// holds itself.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        // A deadline that overflows the clock counts as none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state_and_events = lock(&self.entity.state_and_events);
        while state_and_events.acknowledged < self.count {
            state_and_events = match deadline {
                None => self
                    .entity
                    .all_acknowledged
                    .wait(state_and_events)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    let waited = self
                        .entity
                        .all_acknowledged
                        .wait_timeout(state_and_events, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }
}
