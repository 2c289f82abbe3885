//! What the kernel knows by number and names in events: ids and multicast
//! memberships.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use crate::PortSpace;
use crate::channel::Channel;
use crate::event::{EventKind, Form};
use crate::state::State;

/// Which id or membership an event is of. Never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub(crate) u64);

/// The next key. It counts and orders nothing, so relaxed will do; 64 bits do
/// not wrap.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

impl Key {
    fn new() -> Self {
        Self(NEXT_KEY.fetch_add(1, Ordering::Relaxed))
    }

    /// The number that the kernel knows it by.
    pub fn as_u64(self) -> u64 {
        self.0
    }

    /// Whether the number has been a key.
    pub(crate) fn was_given(number: u64) -> bool {
        (1..NEXT_KEY.load(Ordering::Relaxed)).contains(&number)
    }
}

/// Takes a lock whose data no panic can leave half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Life {
    state: State,
    /// Events handed out and given back.
    read: u32,
    acknowledged: u32,
}

/// An id or a membership, shared with the events that are of it.
#[derive(Debug)]
pub(crate) struct Entity {
    pub key: Key,
    /// The kernel's number; set as soon as that is known.
    pub number: OnceLock<u32>,
    pub port_space: PortSpace,
    /// What its events' parameters are.
    pub form: Form,
    /// The id that a membership belongs to.
    pub owner: Option<Arc<Entity>>,
    /// Whether the kernel still has it. Held while it is destroyed or moved, so
    /// that a membership's number is not used after its id took it along.
    pub alive: Mutex<bool>,
    /// The channel that it is on.
    home: Mutex<Arc<Channel>>,
    /// The memberships that it is the owner of.
    members: Mutex<Vec<Weak<Entity>>>,
    life: Mutex<Life>,
    all_acknowledged: Condvar,
    /// The tables that it is in: one, and one for each channel that it left.
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
            home: Mutex::new(Arc::clone(channel)),
            members: Mutex::new(Vec::new()),
            life: Mutex::new(Life {
                state,
                read: 0,
                acknowledged: 0,
            }),
            all_acknowledged: Condvar::new(),
            tables: Mutex::new(Vec::new()),
        });
        entity.enter_table(&channel.table);
        if let Some(owner) = &entity.owner {
            let mut members = lock(&owner.members);
            members.retain(|member| member.strong_count() > 0);
            members.push(Arc::downgrade(&entity));
        }
        entity
    }

    fn enter_table(self: &Arc<Self>, table: &Arc<Table>) {
        lock(&self.tables).push(Arc::downgrade(table));
        lock(&table.0).insert(self.key.0, Arc::downgrade(self));
    }

    /// Lets events that are read from that channel find it and its memberships.
    pub fn expect_on(self: &Arc<Self>, channel: &Channel) {
        self.enter_table(&channel.table);
        let members = lock(&self.members).clone();
        for member in members.iter().filter_map(Weak::upgrade) {
            member.enter_table(&channel.table);
        }
    }

    /// The channel that it is on.
    pub fn home(&self) -> Arc<Channel> {
        Arc::clone(&lock(&self.home))
    }

    /// It is on another channel now.
    pub fn move_to(&self, channel: &Arc<Channel>) {
        let former = core::mem::replace(&mut *lock(&self.home), Arc::clone(channel));
        drop(former);
    }

    pub fn number(&self) -> u32 {
        // Set before anyone is given the entity.
        self.number.get().copied().unwrap_or(u32::MAX)
    }

    pub fn state(&self) -> State {
        lock(&self.life).state
    }

    /// Goes to a state before the command that leads there, since its event
    /// may be read before the command is back. Gives the former one.
    pub fn enter(&self, state: State) -> State {
        core::mem::replace(&mut lock(&self.life).state, state)
    }

    /// Goes back, if nothing has happened meanwhile.
    pub fn back(&self, from: State, to: State) {
        let mut life = lock(&self.life);
        if life.state == from {
            life.state = to;
        }
    }

    /// An event of it was read.
    pub fn read(&self, kind: EventKind) {
        let mut life = lock(&self.life);
        life.read = life.read.wrapping_add(1);
        life.state = match kind {
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
            _ => life.state,
        };
        drop(life);
        if let Some(owner) = &self.owner {
            owner.read(kind);
        }
    }

    /// An event of it is done with.
    pub fn acknowledge(&self) {
        let mut life = lock(&self.life);
        life.acknowledged = life.acknowledged.wrapping_add(1);
        drop(life);
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
        // Upgraded under the lock, dropped by the caller outside of it: the
        // last one removes itself from here.
        lock(&self.0).get(&uid)?.upgrade()
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

/// What was left of an id or a membership when the kernel destroyed it: the
/// events that were read, and may be in use in another thread.
///
/// They stay valid; who does not care drops this.
#[derive(Debug)]
pub struct Reported {
    pub(crate) entity: Arc<Entity>,
    pub(crate) reported: u32,
}

impl Reported {
    /// How many events the kernel says were read.
    pub fn events_reported(&self) -> u32 {
        self.reported
    }

    /// How many of them have not been dropped.
    pub fn unacknowledged(&self) -> u32 {
        self.reported
            .saturating_sub(lock(&self.entity.life).acknowledged)
    }

    /// Waits until all are dropped, at most that long (none: for ever). False
    /// on timeout. A thread that holds one itself waits in vain.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        // A time too far to say is no time.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut life = lock(&self.entity.life);
        while life.acknowledged < self.reported {
            life = match deadline {
                None => self
                    .entity
                    .all_acknowledged
                    .wait(life)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    let waited = self.entity.all_acknowledged.wait_timeout(life, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }
}
