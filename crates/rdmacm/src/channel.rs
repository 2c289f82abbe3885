//! Event channels: the open device file, and the events read from it.

use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use uverbs::QpType;
use uverbs::kernel::{Kernel, RealKernel};

use crate::entity::{Channel, Entity, Key, lock};
use crate::event::{EventKind, Form, Message};
use crate::state::State;
use crate::{Command, Error, Id, PortSpace, abi, device};

/// An event channel, on which ids are created and from which their events are
/// read.
///
/// A clone refers to the same channel. Any thread may read; each event is
/// delivered once. The file is readable when there is an event, for `poll` and
/// similar calls.
#[derive(Clone, Debug)]
pub struct EventChannel {
    pub(crate) inner: Arc<Channel>,
}

impl EventChannel {
    /// Opens a channel of the running kernel.
    ///
    /// # Errors
    /// The connection manager is not available (module `rdma_ucm`), permission
    /// is denied, or its ABI version differs.
    pub fn open() -> Result<Self, Error> {
        Self::open_on(Box::new(RealKernel))
    }

    /// Opens a channel of the given kernel.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_on(kernel: Box<dyn Kernel>) -> Result<Self, Error> {
        let inner = Arc::new(Channel {
            file: device::open(kernel)?,
            table: Arc::default(),
        });
        Ok(Self { inner })
    }

    /// Creates an id in a port space. The port space determines the type of its
    /// queue pair.
    ///
    /// # Errors
    /// EINVAL for an unknown port space, ENOMEM.
    pub fn create_id(&self, port_space: PortSpace) -> Result<Id, Error> {
        let qp_type = match port_space {
            PortSpace::UDP | PortSpace::IPOIB => QpType::UD,
            _ => QpType::RC,
        };
        self.create_id_of(port_space, qp_type)
    }

    /// Creates an id for queue pairs of a given type. Only [`PortSpace::IB`]
    /// permits a choice; for the others the kernel determines the type.
    ///
    /// # Errors
    /// As [`create_id`](Self::create_id).
    pub fn create_id_of(&self, port_space: PortSpace, qp_type: QpType) -> Result<Id, Error> {
        let command = Command::CreateId;
        let kernel_type = u8::try_from(qp_type.0).map_err(|_| Error::Invalid {
            command,
            what: "the queue pair type exceeds 255",
        })?;
        let form = if qp_type == QpType::UD {
            Form::Datagram
        } else {
            Form::Connection
        };
        let entity = Entity::new(&self.inner, (port_space, form), State::Idle, None);
        let ucm = self.inner.ucm();
        let number = ucm.create_id(entity.key.0, port_space.0, kernel_type)?;
        Ok(Id::new(&self.inner, entity, number))
    }

    /// Reads the next event, if any.
    ///
    /// # Errors
    /// [`Error::BadAnswer`] for a malformed event, which is consumed; the
    /// channel stays usable.
    pub fn try_event(&self) -> Result<Option<Event>, Error> {
        loop {
            let event = match self.inner.ucm().get_event() {
                Ok(event) => event,
                Err(error) => match error.errno().raw() {
                    libc::EAGAIN => return Ok(None),
                    libc::EINTR => continue,
                    _ => return Err(error),
                },
            };
            if let Some(event) = self.deliver(&event)? {
                return Ok(Some(event));
            }
        }
    }

    /// Waits for the next event, at most `timeout` (`None`: without limit).
    /// Returns `None` on timeout. Signals do not end the wait.
    ///
    /// # Errors
    /// As [`try_event`](Self::try_event).
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<Event>, Error> {
        // A deadline that overflows the clock counts as none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(event) = self.try_event()? {
                return Ok(Some(event));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            // Rounded up, so that the wait does not end early and spin.
            let millis = left.map_or(-1, |left| {
                i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
            });
            match self.inner.file.wait_readable(millis) {
                Ok(true) => {}
                // Also if that was in the simulated time of a device.
                Ok(false) => return self.try_event(),
                Err(errno) if errno.raw() == libc::EINTR => {}
                Err(errno) => {
                    return Err(Error::Refused {
                        command: Command::GetEvent,
                        id: None,
                        errno,
                    });
                }
            }
        }
    }

    /// Resolves the id of an event. Returns `None` for a stale event.
    fn deliver(&self, event: &abi::EventResp) -> Result<Option<Event>, Error> {
        let bad_answer = |what| {
            Err(Error::BadAnswer {
                command: Command::GetEvent,
                what,
            })
        };
        let kind = EventKind(event.event);
        let Some(entity) = self.inner.table.find(event.uid) else {
            if !Key::was_assigned(event.uid) {
                return bad_answer("an event with an unknown id");
            }
            // Another thread destroyed the id after this one read the event.
            if kind == EventKind::CONNECT_REQUEST {
                self.destroy_request(event.id);
            }
            return Ok(None);
        };
        entity.record_event(kind);
        // From here on every path acknowledges the event.
        let mut delivered = Event {
            message: Message::new(event, entity.form),
            entity,
            request: None,
        };
        let entity = &delivered.entity;
        if kind.is_multicast() != entity.owner.is_some() {
            return bad_answer("a multicast event for an id, or another event for a membership");
        }
        let destroyed = !*crate::entity::lock(&entity.alive);
        if kind == EventKind::CONNECT_REQUEST {
            if destroyed {
                self.destroy_request(event.id);
                return Ok(None);
            }
            let kind = (entity.port_space, entity.form);
            let request = Entity::new(&self.inner, kind, State::Requested, None);
            delivered.request = Some(Id::new(&self.inner, request, event.id));
        } else if entity
            .number
            .get()
            .is_some_and(|number| *number != event.id)
        {
            return bad_answer("an event whose id and key do not match");
        }
        Ok((!destroyed).then_some(delivered))
    }

    /// Destroys a connection request whose listener is gone, which makes the
    /// kernel reject it.
    fn destroy_request(&self, number: u32) {
        if let Err(error) = self.inner.ucm().destroy_id(number) {
            tracing::error!(%error, "destroying a connection request to a destroyed id failed");
        }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.file.as_fd()
    }
}

impl AsRawFd for EventChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.file.as_raw_fd()
    }
}

/// An event. Dropping it acknowledges it.
///
/// Its content is a [`Message`]. A connection request also has an [`Id`] of its
/// own, and is rejected if the id is not taken.
#[derive(Debug)]
pub struct Event {
    message: Message,
    entity: Arc<Entity>,
    request: Option<Id>,
}

impl Event {
    /// Returns the key of its id: of the listening id for a request, of the
    /// owner for a multicast group.
    pub fn key(&self) -> Key {
        self.entity.owner.as_ref().unwrap_or(&self.entity).key
    }

    /// Returns whether it is an event of `id`.
    pub fn is_of(&self, id: &Id) -> bool {
        self.key() == id.key()
    }

    /// Returns the key of its multicast membership, if it has one.
    pub fn membership(&self) -> Option<Key> {
        self.entity.owner.is_some().then_some(self.entity.key)
    }

    /// Returns its content.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Returns its type.
    pub fn kind(&self) -> EventKind {
        self.message.kind()
    }

    /// Takes the id of a connection request, to accept or reject it. Returns
    /// `None` if it was already taken, or the event is not a request.
    pub fn take_request(&mut self) -> Option<Id> {
        self.request.take()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.entity.acknowledge();
    }
}

impl Id {
    /// Returns the channel that it belongs to.
    pub fn channel(&self) -> EventChannel {
        EventChannel {
            inner: Arc::clone(&self.channel),
        }
    }

    /// Moves the id to another channel, with its unread events. Returns the
    /// number of its events that were read from the former channel.
    ///
    /// # Errors
    /// The kernel's reason; the id then stays on its channel.
    pub fn migrate(&mut self, to: &EventChannel) -> Result<u32, Error> {
        let _alive = lock(&self.entity.alive);
        self.entity.register_for(&to.inner);
        let number = self.number();
        let reported = to
            .inner
            .ucm()
            .migrate_id(number, self.channel.file.as_fd())?;
        self.entity.set_channel(&to.inner);
        self.channel = Arc::clone(&to.inner);
        Ok(reported)
    }
}
