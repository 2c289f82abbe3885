//! Devices, and the contexts opened on them.

use std::fmt;
#[cfg(feature = "embedded")]
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use uverbs::discovery;
use uverbs::kernel::{Kernel, RealKernel};
use uverbs::{AsyncEventFile, ContextInfo, Udata};

use crate::device::Provider;
use crate::inflight::{Registry, Slab};
use crate::qp::FlushTo;
use crate::query::Inspector;
use crate::{CloseError, Error, Result};

/// `IB_UVERBS_DEVICE_FLUSH_GLOBAL`.
const DEVICE_FLUSH_GLOBAL: u64 = 1 << 38;
/// `IB_UVERBS_DEVICE_FLUSH_PERSISTENT`.
const DEVICE_FLUSH_PERSISTENT: u64 = 1 << 39;
/// `IB_UVERBS_DEVICE_ATOMIC_WRITE`.
const DEVICE_ATOMIC_WRITE: u64 = 1 << 40;

/// How objects refer to the kernel's context.
pub(crate) type Ctx = Arc<uverbs::Context>;

/// An RDMA device of this machine that the process may see.
#[derive(Clone, PartialEq, Eq)]
pub struct Device {
    found: discovery::Device,
    /// It is this process's own, and no kernel's.
    #[cfg(feature = "embedded")]
    embedded: Option<embedded::Embedded>,
}

/// All RDMA devices that this process can see, in the kernel's order. No
/// device, or no RDMA in the kernel at all, is an empty list.
///
/// # Errors
/// If neither netlink nor sysfs could be asked.
pub fn devices() -> Result<Vec<Device>> {
    let found = discovery::devices(&RealKernel)?;
    Ok(found.into_iter().map(Device::of).collect())
}

impl Device {
    fn of(found: discovery::Device) -> Self {
        Self {
            found,
            #[cfg(feature = "embedded")]
            embedded: None,
        }
    }

    /// A ConnectX in software, in this process: no root, kernel module or
    /// hardware is needed, and nobody outside of the process is reached. The
    /// same device each time, with a port of Ethernet (RoCE); a thread of its
    /// own runs it from now on. [`named`](Self::named) knows it as `embedded`;
    /// [`devices`] does not list it.
    ///
    /// It is there to learn, to develop and to test with, not for speed. For
    /// another port, several devices on a network, or one that no thread runs,
    /// make one of the crate `ringverbs-embedded`: a `Device` is made from it.
    ///
    /// # Errors
    /// Those of making a thread, and ENOMEM.
    #[cfg(feature = "embedded")]
    pub fn embedded() -> Result<Self> {
        embedded_device(None)
    }

    /// The same, which reaches those of other processes that name the same
    /// directory, up to 32; it is made, for this user alone, if there is none.
    /// One that is there must be this user's or root's, with nobody else who may
    /// write there, and no symbolic link. [`named`](Self::named) knows it as
    /// `embedded:DIRECTORY`.
    ///
    /// What another process sends is checked as what comes from a network is: it
    /// reaches what a queue pair or a key of this process lets it reach. When a
    /// process has ended, by whatever means, what is sent to it fails, once all
    /// retries were of no use.
    ///
    /// # Errors
    /// EINVAL, with what to do, for a directory that others have a hand in; those
    /// of making files and sockets there; EUSERS if there are 32 processes; and as
    /// [`embedded`](Self::embedded).
    #[cfg(feature = "embedded")]
    pub fn embedded_at(directory: &Path) -> Result<Self> {
        embedded_device(Some((directory, embedded::Sharing::Own)))
    }

    /// The same in a directory that is shared with other users: who may search
    /// there can send to this process, and who may write there can take part, and
    /// keep others out. [`named`](Self::named) knows it as
    /// `embedded-shared:DIRECTORY`.
    ///
    /// # Errors
    /// As [`embedded_at`](Self::embedded_at).
    #[cfg(feature = "embedded")]
    pub fn embedded_shared_at(directory: &Path) -> Result<Self> {
        embedded_device(Some((directory, embedded::Sharing::Others)))
    }

    /// The device of that name, such as `rxe0`, or, with the feature `embedded`,
    /// `embedded`, `embedded:DIRECTORY` or `embedded-shared:DIRECTORY`.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    pub fn named(name: &str) -> Result<Self> {
        #[cfg(feature = "embedded")]
        if let Some(place) = embedded_place(name) {
            return embedded_device(place);
        }
        let mut devices = devices()?.into_iter();
        devices
            .find(|device| device.name() == name)
            .ok_or_else(|| Error::NoDevice {
                name: Some(name.to_owned()),
            })
    }

    /// The first device that there is.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    pub fn first() -> Result<Self> {
        let mut devices = devices()?.into_iter();
        devices.next().ok_or(Error::NoDevice { name: None })
    }

    /// Whether it is a name that [`named`](Self::named) knows an embedded device
    /// by.
    #[cfg(feature = "embedded")]
    pub(crate) fn is_embedded_name(name: &str) -> bool {
        embedded_place(name).is_some()
    }

    /// The connection manager of an embedded device's network.
    #[cfg(feature = "embedded")]
    pub(crate) fn connection_manager(&self) -> Option<Box<dyn Kernel>> {
        let embedded = self.embedded.as_ref()?;
        Some(embedded.connection_manager())
    }

    /// Whether it is in this process, and no kernel's.
    #[cfg(feature = "embedded")]
    pub fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }

    /// Does in this thread what an embedded device has to do, and its network,
    /// within bounds: a loop that polls and calls this while it finds nothing need
    /// not wait for the device's own thread, which may be asleep or without a
    /// processor. True if something happened, is left to do, or is being done by
    /// another thread. Of other devices false, and nothing is done.
    #[cfg(feature = "embedded")]
    pub fn drive(&self) -> bool {
        self.embedded
            .as_ref()
            .is_some_and(embedded::Embedded::drive)
    }

    /// Its name, such as `rxe0`.
    pub fn name(&self) -> &str {
        &self.found.name
    }

    /// What discovery found out about it.
    pub fn found(&self) -> &discovery::Device {
        &self.found
    }

    /// Opens it.
    ///
    /// # Errors
    /// EACCES without permission on its character device;
    /// [`Error::UnsupportedDriver`].
    pub fn open(&self) -> Result<Context> {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            let (context, driver) = (embedded.context()?, self.found.driver_id);
            return Context::begin(context, driver, Some(self.clone()));
        }
        Context::open_with(Box::new(RealKernel), self)
    }

    /// Opens it to be queried only, whatever its driver: [`open`](Self::open) is
    /// for those devices that there is a data path for.
    ///
    /// # Errors
    /// EACCES without permission on its character device.
    pub fn inspect(&self) -> Result<Inspector> {
        let context = self.kernel_context()?;
        let (info, _) = Provider::open(&context, self.found.driver_id)?;
        Ok(Inspector::new(context, info))
    }

    /// Without the kernel's context in it, which the driver's code asks for.
    fn kernel_context(&self) -> Result<uverbs::Context> {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            return Ok(embedded.context()?);
        }
        Ok(uverbs::Context::open(Box::new(RealKernel), &self.found)?)
    }
}

/// The name of the process's own device.
#[cfg(feature = "embedded")]
const EMBEDDED: &str = "embedded";

/// Where an embedded device is reached from: nowhere else, or a directory.
#[cfg(feature = "embedded")]
type Place<'a> = Option<(&'a Path, embedded::Sharing)>;

/// What a name says of an embedded device, if it is one's.
#[cfg(feature = "embedded")]
fn embedded_place(name: &str) -> Option<Place<'_>> {
    let rest = name.strip_prefix(EMBEDDED)?;
    if rest.is_empty() {
        return Some(None);
    }
    let (sharing, directory) = match rest.strip_prefix("-shared") {
        Some(rest) => (embedded::Sharing::Others, rest),
        None => (embedded::Sharing::Own, rest),
    };
    let directory = directory.strip_prefix(':').filter(|it| !it.is_empty())?;
    Some(Some((Path::new(directory), sharing)))
}

/// The process's own device, on a network of its own or on that of a directory:
/// one for each.
#[cfg(feature = "embedded")]
fn embedded_device(place: Place) -> Result<Device> {
    type Devices = Vec<(Option<(PathBuf, embedded::Sharing)>, embedded::Embedded)>;
    static DEVICES: Mutex<Devices> = Mutex::new(Vec::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let place = place.map(|(directory, sharing)| (directory.to_owned(), sharing));
    if let Some((_, device)) = devices.iter().find(|(at, _)| *at == place) {
        return Ok(device.clone().into());
    }
    let drive = embedded::Drive::Thread;
    let network = match &place {
        Some((directory, sharing)) => embedded::Network::joined_with(drive, directory, *sharing),
        None => embedded::Network::new(drive),
    };
    let device = network?.device("roce")?;
    devices.push((place, device.clone()));
    Ok(device.into())
}

#[cfg(feature = "embedded")]
impl From<embedded::Embedded> for Device {
    fn from(embedded: embedded::Embedded) -> Self {
        let found = discovery::Device {
            name: EMBEDDED.to_owned(),
            index: None,
            driver_id: discovery::DriverId::MLX5,
            node_type: discovery::NodeType::CA,
            node_guid: Some(embedded.node_guid()),
            num_ports: Some(1),
            uverbs_name: String::new(),
            dev_t: 0,
            abi_version: 1,
            ibdev_path: String::new(),
        };
        Self {
            found,
            embedded: Some(embedded),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.found.name).finish()
    }
}

/// An open device, which all objects of a process on it live in.
///
/// A handle: clones refer to the same context, which is closed when the last
/// clone and the last object made in it are gone. Any thread.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) uverbs: Ctx,
    pub(crate) provider: Provider,
    info: ContextInfo,
    device: Option<Device>,
    /// The first event file of a context takes the events of all its objects.
    pub(crate) events: AsyncEventFile<Ctx>,
    /// Shared receive queues, by what their work requests are numbered with.
    pub(crate) slabs: Registry<Slab>,
    next_id: Mutex<u64>,
    /// Abilities of the device, `IB_UVERBS_DEVICE_...`.
    optional: u64,
    /// Reads and atomics that a queue pair may have outstanding: of the peer's,
    /// of its own.
    read_depths: (u8, u8),
}

impl Context {
    fn open_with(kernel: Box<dyn Kernel>, device: &Device) -> Result<Self> {
        if !Provider::serves(device.found.driver_id) {
            return Err(Error::UnsupportedDriver {
                device: device.found.name.clone(),
                driver: device.found.driver_id.0,
            });
        }
        let context = uverbs::Context::open(kernel, &device.found)?;
        Self::begin(context, device.found.driver_id, Some(device.clone()))
    }

    fn begin(
        context: uverbs::Context,
        driver: discovery::DriverId,
        device: Option<Device>,
    ) -> Result<Self> {
        let (info, provider) = Provider::open(&context, driver)?;
        let uverbs = Arc::new(context);
        let events = AsyncEventFile::alloc(&uverbs)?;
        events.set_nonblocking(true)?;
        // A kernel that does not answer has none of what is asked for here.
        let able = uverbs.query_device_ex(Udata::none()).unwrap_or_default();
        let depth = |limit: u32| match limit.min(u8::MAX.into()) as u8 {
            // Not told: the kernel refuses what is too much.
            0 => u8::MAX,
            limit => limit,
        };
        let read_depths = (
            depth(able.base.max_qp_rd_atom),
            depth(able.base.max_qp_init_rd_atom),
        );
        Ok(Self {
            inner: Arc::new(Inner {
                uverbs,
                provider,
                info,
                device,
                events,
                optional: able.device_cap_flags_ex,
                read_depths,
                slabs: Registry::new(),
                next_id: Mutex::new(0),
            }),
        })
    }

    /// A context over one that the caller has made: a recorded kernel in a
    /// test.
    ///
    /// # Errors
    /// Those of GET_CONTEXT.
    ///
    /// # Safety
    /// Nobody else gives the context commands. What its kernel lets be mapped
    /// stays there, as long as it says that it does.
    #[cfg(any(test, feature = "fake"))]
    #[doc(hidden)]
    pub unsafe fn over(context: uverbs::Context) -> Result<Self> {
        let driver = context.driver_id();
        Self::begin(context, driver, None)
    }

    /// The same, with the data path of another driver than the kernel that is
    /// played says it has.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    #[cfg(any(test, feature = "fake"))]
    #[doc(hidden)]
    pub unsafe fn over_as(context: uverbs::Context, driver: discovery::DriverId) -> Result<Self> {
        Self::begin(context, driver, None)
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn provider(&self) -> &Provider {
        &self.inner.provider
    }

    pub(crate) fn uverbs(&self) -> &Ctx {
        &self.inner.uverbs
    }

    /// Whether a command has failed because the device is gone, and with it all
    /// objects: what they used can be let go of. The kernel's word is believed
    /// only when it is given twice: EIO may also be what a driver says of a
    /// device that is alive.
    pub(crate) fn is_gone_by(&self, error: &uverbs::Error) -> bool {
        error.is_device_gone() && self.inner.uverbs.is_gone()
    }

    /// A number that no other object of this context has had: what events name
    /// the object by.
    pub(crate) fn next_id(&self) -> u64 {
        let mut next = self
            .inner
            .next_id
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *next += 1;
        *next
    }

    /// Reads and atomics that a queue pair may have outstanding: of the peer's,
    /// of its own.
    pub(crate) fn read_depths(&self) -> (u8, u8) {
        self.inner.read_depths
    }

    /// Whether the device can flush memory of a peer's, at least one way.
    pub fn can_flush(&self) -> bool {
        self.inner.optional & (DEVICE_FLUSH_GLOBAL | DEVICE_FLUSH_PERSISTENT) != 0
    }

    /// Whether the device can flush memory of a peer's that far. A device may
    /// have one way and lack the other.
    pub fn can_flush_to(&self, to: FlushTo) -> bool {
        let needed = match to {
            FlushTo::GlobalVisibility => DEVICE_FLUSH_GLOBAL,
            FlushTo::Persistence => DEVICE_FLUSH_PERSISTENT,
        };
        self.inner.optional & needed != 0
    }

    /// Whether the device can write 8 bytes of a peer's memory all at once.
    pub fn can_write_atomically(&self) -> bool {
        self.inner.optional & DEVICE_ATOMIC_WRITE != 0
    }

    /// Whether `other` is a handle of the same context.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The device that it was opened on.
    pub fn device(&self) -> Option<&Device> {
        self.inner.device.as_ref()
    }

    /// Completion vectors that events of completion queues can be spread over;
    /// valid ones are less than this.
    pub fn num_comp_vectors(&self) -> u32 {
        self.inner.info.num_comp_vectors
    }

    /// Closes the device.
    ///
    /// # Errors
    /// [`Error::Busy`] with the context, while objects made in it or other
    /// handles of it are alive.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => {
                drop(inner);
                Ok(())
            }
            Err(inner) => {
                let error = Error::Busy {
                    object: "context",
                    users: "objects made in it, or other handles of it",
                };
                Err(CloseError::new(Self { inner }, error))
            }
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.inner.device.as_ref().map(Device::name);
        f.debug_tuple("Context").field(&name).finish()
    }
}
