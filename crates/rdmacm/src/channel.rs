//! Event channels: the open device file, and the events that are read from it.

use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use uverbs::QpType;
use uverbs::kernel::{Descriptor, Kernel, RealKernel};

use crate::command::Ucm;
use crate::entity::{Entity, Key, Table};
use crate::event::{EventKind, Form, Message};
use crate::state::State;
use crate::{Command, Error, Id, PortSpace, abi, device};

/// The open file. It stays open while there are ids on it.
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

/// An event channel: what ids are made on, and their events read from.
///
/// A clone is the same channel. Any thread may read; each event goes to one.
/// Its file is readable when there is an event, for `poll` and the like.
#[derive(Clone, Debug)]
pub struct EventChannel {
    pub(crate) inner: Arc<Channel>,
}

impl EventChannel {
    /// Opens a channel of the running kernel's.
    ///
    /// # Errors
    /// If there is no connection manager (module `rdma_ucm`), no permission,
    /// or its ABI is another.
    pub fn open() -> Result<Self, Error> {
        Self::open_on(Box::new(RealKernel))
    }

    /// Opens a channel of a given kernel's.
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

    /// Makes an id of a port space; its queue pair will be of that space's type.
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

    /// Makes an id for queue pairs of a type. Only [`PortSpace::IB`] has a
    /// choice; of the others the kernel knows it.
    ///
    /// # Errors
    /// As [`create_id`](Self::create_id).
    pub fn create_id_of(&self, port_space: PortSpace, qp_type: QpType) -> Result<Id, Error> {
        let command = Command::CreateId;
        let kernel_type = u8::try_from(qp_type.0).map_err(|_| Error::Invalid {
            command,
            what: "a queue pair type over 255",
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

    /// Takes the next event, if there is one.
    ///
    /// # Errors
    /// [`Error::BadAnswer`] for an event that makes no sense; it is gone, and
    /// the channel goes on.
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

    /// Waits for the next event, at most that long (none: for ever). None on
    /// timeout. Signals do not end the wait.
    ///
    /// # Errors
    /// As [`try_event`](Self::try_event).
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<Event>, Error> {
        // A time too far to say is no time.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(event) = self.try_event()? {
                return Ok(Some(event));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            // Rounded up, so as not to wake early and spin.
            let millis = left.map_or(-1, |left| {
                i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
            });
            match self.inner.file.wait_readable(millis) {
                Ok(_) => {}
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

    /// Finds whose event it is. None if nobody's any more.
    fn deliver(&self, event: &abi::EventResp) -> Result<Option<Event>, Error> {
        let bad = |what| {
            Err(Error::BadAnswer {
                command: Command::GetEvent,
                what,
            })
        };
        let kind = EventKind(event.event);
        let Some(entity) = self.inner.table.find(event.uid) else {
            if !Key::was_given(event.uid) {
                return bad("an event of an id that was never made");
            }
            // Read by this thread while another destroyed the id.
            if kind == EventKind::CONNECT_REQUEST {
                self.refuse_request(event.id);
            }
            return Ok(None);
        };
        entity.read(kind);
        // From here on the event is acknowledged whatever happens.
        let mut found = Event {
            message: Message::new(event, entity.form),
            entity,
            request: None,
        };
        let entity = &found.entity;
        if kind.is_multicast() != entity.owner.is_some() {
            return bad("an event of a group for an id, or the other way round");
        }
        let destroyed = !*crate::entity::lock(&entity.alive);
        if kind == EventKind::CONNECT_REQUEST {
            if destroyed {
                self.refuse_request(event.id);
                return Ok(None);
            }
            let kind = (entity.port_space, entity.form);
            let request = Entity::new(&self.inner, kind, State::Requested, None);
            found.request = Some(Id::new(&self.inner, request, event.id));
        } else if entity
            .number
            .get()
            .is_some_and(|number| *number != event.id)
        {
            return bad("an event whose id is not the one that it names");
        }
        Ok((!destroyed).then_some(found))
    }

    /// Destroys a connection request that nobody will answer: the kernel
    /// rejects it then.
    fn refuse_request(&self, number: u32) {
        if let Err(error) = self.inner.ucm().destroy_id(number) {
            tracing::error!(%error, "a connection request to a destroyed id is left over");
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

/// An event. It counts as acknowledged when it is dropped.
///
/// What it says is [`Message`]'s; a connection request also has an [`Id`] of
/// its own, and is rejected if that is not taken.
#[derive(Debug)]
pub struct Event {
    message: Message,
    entity: Arc<Entity>,
    request: Option<Id>,
}

impl Event {
    /// Which id it is of: the listening one for a request, the owner for a
    /// multicast group.
    pub fn key(&self) -> Key {
        self.entity.owner.as_ref().unwrap_or(&self.entity).key
    }

    /// Whether it is of that id.
    pub fn is_of(&self, id: &Id) -> bool {
        self.key() == id.key()
    }

    /// Which multicast membership it is of.
    pub fn membership(&self) -> Option<Key> {
        self.entity.owner.is_some().then_some(self.entity.key)
    }

    /// What it says.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// What has happened.
    pub fn kind(&self) -> EventKind {
        self.message.kind()
    }

    /// Takes the connection request's id, to accept or reject. None if it was
    /// taken, or there is none.
    pub fn take_request(&mut self) -> Option<Id> {
        self.request.take()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.entity.acknowledge();
    }
}
