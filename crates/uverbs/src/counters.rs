//! Counters of flows.

use crate::abi::ids;
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, CountersHandle, Error};

pub(crate) enum CountersKind {}

impl Kind for CountersKind {
    type Handle = CountersHandle;
    type Events = ();
    const DESTROY: Command = Command::DestroyCounters;
    fn destroy(context: &Context, handle: CountersHandle) -> Result<(), Error> {
        let (object, method) = (ids::OBJECT_COUNTERS, ids::METHOD_COUNTERS_DESTROY);
        let mut ioctl = Ioctl::new(Self::DESTROY, object, method);
        ioctl.acts_on(handle.0);
        ioctl.handle(ids::ATTR_DESTROY_COUNTERS_HANDLE, handle.0);
        ioctl.run(context).map(drop)
    }
}

/// Counters of flows. Which of a flow's events each of them counts is said when the flow
/// is created, by the device's driver data.
#[derive(Debug)]
pub struct Counters<C: ContextRef> {
    owned: Owned<C, CountersKind>,
}

owned_methods!(
    Counters,
    CountersHandle,
    (),
    "Flows may still use them: EBUSY."
);

impl<C: ContextRef> Counters<C> {
    /// Creates counters that no flow uses yet.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device has none.
    pub fn create(context: &C) -> Result<Self, Error> {
        let (object, method) = (ids::OBJECT_COUNTERS, ids::METHOD_COUNTERS_CREATE);
        let mut ioctl = Ioctl::new(Command::CreateCounters, object, method);
        let counters = ioctl.new_object(ids::ATTR_CREATE_COUNTERS_HANDLE);
        let handle = CountersHandle(ioctl.run(context)?.handle(counters)?);
        Ok(Self {
            owned: Owned::new(context, handle),
        })
    }

    /// Reads the values of the counters with the numbers 0 and on. `flags` are
    /// `IBV_READ_COUNTERS_ATTR_*`.
    ///
    /// # Errors
    /// EINVAL before a flow uses them, and for more values than they have.
    pub fn read(&self, values: &mut [u64], flags: u32) -> Result<(), Error> {
        let (object, method) = (ids::OBJECT_COUNTERS, ids::METHOD_COUNTERS_READ);
        let mut ioctl = Ioctl::new(Command::ReadCounters, object, method);
        ioctl.acts_on(self.handle().0);
        ioctl.handle(ids::ATTR_READ_COUNTERS_HANDLE, self.handle().0);
        let answer = ioctl.output(
            ids::ATTR_READ_COUNTERS_BUFF,
            zerocopy::IntoBytes::as_mut_bytes(values),
        );
        ioctl.u32(ids::ATTR_READ_COUNTERS_FLAGS, flags);
        ioctl.run(self.context())?.written(answer)
    }
}
