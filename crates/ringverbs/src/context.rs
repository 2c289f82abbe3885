//! Devices and contexts.

use std::fmt;
#[cfg(feature = "embedded")]
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use uverbs::discovery;
use uverbs::kernel::{Kernel, RealKernel};
use uverbs::{AsyncEventFile, ContextInfo, Udata};

#[cfg(feature = "embedded")]
use crate::check;
use crate::device::Provider;
use crate::inflight::{Registry, UnorderedTable};
use crate::qp::FlushTo;
use crate::query::{Inspector, PORT_ACTIVE};
use crate::{CloseError, Error, Result};

/// `IB_UVERBS_DEVICE_FLUSH_GLOBAL`.
const DEVICE_FLUSH_GLOBAL: u64 = 1 << 38;
/// `IB_UVERBS_DEVICE_FLUSH_PERSISTENT`.
const DEVICE_FLUSH_PERSISTENT: u64 = 1 << 39;
/// `IB_UVERBS_DEVICE_ATOMIC_WRITE`.
const DEVICE_ATOMIC_WRITE: u64 = 1 << 40;

/// Environment variable that names the device.
const VARIABLE: &str = "RINGVERBS_DEVICE";

/// A reference to the kernel's context, which objects hold.
pub(crate) type Ctx = Arc<uverbs::Context>;

/// An RDMA device of this host that is visible to the process.
#[derive(Clone, PartialEq, Eq)]
pub struct Device {
    found: discovery::Device,
    /// Set for an embedded device, which runs in this process.
    #[cfg(feature = "embedded")]
    embedded: Option<embedded::Embedded>,
}

/// Returns all RDMA devices that are visible to this process, in the kernel's
/// order. The list is empty if there is no device or the kernel has no RDMA.
///
/// # Errors
/// If neither netlink nor sysfs can be queried.
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

    /// Returns the embedded device: a ConnectX in software, in this process. It
    /// needs no root, kernel module or hardware, and reaches nothing outside the
    /// process. Every call returns the same device, with one Ethernet (RoCE) port;
    /// the first call starts a thread that runs it. Its name for
    /// [`named`](Self::named) is `embedded`; [`devices`] does not list it.
    ///
    /// It is for learning, development and tests, not for performance. For another
    /// type of port, several devices on a network, or a device without a thread,
    /// create one with the crate `ringverbs-embedded` and convert it to a `Device`.
    ///
    /// # Errors
    /// Errors of creating a thread; ENOMEM.
    #[cfg(feature = "embedded")]
    pub fn embedded() -> Result<Self> {
        embedded_device(Location::Process)
    }

    /// Returns an embedded device that is connected to those of other processes that
    /// use the same directory, up to 256 processes. The directory is created, for this
    /// user only, if it does not exist. An existing directory must belong to this user
    /// or root, must not be writable by anybody else, and must not be a symbolic link.
    /// The device's name for [`named`](Self::named) is `embedded:DIRECTORY`;
    /// `embedded:` stands for the default directory of this user, `ringverbs` in
    /// `$XDG_RUNTIME_DIR`, else `/tmp/ringverbs-UID`.
    ///
    /// Input from other processes is validated like packets from a network: a process
    /// reaches only memory and queues that a queue pair or key of this process gives
    /// access to. After a process has ended, for whatever reason, operations to it
    /// fail when their retries are exhausted.
    ///
    /// # Errors
    /// EINVAL, with advice, if other users can write to the directory; errors of
    /// creating files and sockets there; EUSERS if there are 256 processes; and as
    /// [`embedded`](Self::embedded).
    #[cfg(feature = "embedded")]
    pub fn embedded_at(directory: impl AsRef<Path>) -> Result<Self> {
        embedded_device(Location::Directory(
            directory.as_ref().to_owned(),
            embedded::Sharing::Own,
        ))
    }

    /// As [`embedded_at`](Self::embedded_at), in a directory that is shared with
    /// other users. Users with search permission can send to this process; users
    /// with write permission can take part, and can deny others access. Its name for
    /// [`named`](Self::named) is `embedded-shared:DIRECTORY`.
    ///
    /// # Errors
    /// As [`embedded_at`](Self::embedded_at).
    #[cfg(feature = "embedded")]
    pub fn embedded_shared_at(directory: impl AsRef<Path>) -> Result<Self> {
        embedded_device(Location::Directory(
            directory.as_ref().to_owned(),
            embedded::Sharing::Others,
        ))
    }

    /// Returns an embedded device that reaches other hosts: RDMA cards, rdma_rxe, and
    /// embedded devices. It speaks RoCE v2 over UDP port 4791 of one address of this
    /// host, or of all addresses of a network interface; `name` is the address or the
    /// interface. Up to 64 processes of a user can share it. Its name for
    /// [`named`](Self::named) is `roce:NAME`.
    ///
    /// RoCE packets are neither encrypted nor authenticated: use it only in networks
    /// whose hosts are trusted.
    ///
    /// # Errors
    /// EINVAL, with advice, if there is no such address or interface, the port is in
    /// use, or the MTU is too small; errors of creating sockets; and as
    /// [`embedded`](Self::embedded).
    #[cfg(feature = "embedded")]
    pub fn roce(name: &str) -> Result<Self> {
        embedded_device(Location::Hosts(name.to_owned()))
    }

    /// Returns the device with this name, such as `rxe0`, or, with the feature
    /// `embedded`, `embedded`, `embedded:DIRECTORY`, `embedded-shared:DIRECTORY`,
    /// `roce:ADDRESS` or `roce:INTERFACE`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is none.
    pub fn named(name: &str) -> Result<Self> {
        #[cfg(feature = "embedded")]
        if let Some(location) = embedded_location(name) {
            return embedded_device(location);
        }
        let mut devices = devices()?.into_iter();
        devices
            .find(|device| device.name() == name)
            .ok_or_else(|| Error::NoDevice {
                name: Some(name.to_owned()),
            })
    }

    /// Returns the device that the environment variable `RINGVERBS_DEVICE` names;
    /// if it is not set, the first device that has an active port, in the kernel's
    /// order; if none has, the first.
    ///
    /// A privileged program (set-user-ID, set-group-ID, file capabilities) ignores the
    /// variable.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no device, or none with that name.
    pub fn first() -> Result<Self> {
        if let Some(device) = Self::from_environment()? {
            return Ok(device);
        }
        let devices = devices()?;
        let active = devices.iter().find(|device| device.is_active());
        let device = active.or(devices.first());
        device.cloned().ok_or(Error::NoDevice { name: None })
    }

    /// As [`first`](Self::first), but returns the embedded device if no device has an
    /// active port. For examples and tests: the program should print which device it
    /// uses.
    ///
    /// # Errors
    /// As [`embedded`](Self::embedded); [`Error::NoDevice`] if there is no device with
    /// the name in `RINGVERBS_DEVICE`.
    #[cfg(feature = "embedded")]
    pub fn first_or_embedded() -> Result<Self> {
        Self::first_or("embedded")
    }

    /// As [`first`](Self::first), but returns the device with this name if no device
    /// has an active port. `embedded:` is a device that several processes share.
    ///
    /// # Errors
    /// As [`named`](Self::named), also for the name in `RINGVERBS_DEVICE`.
    pub fn first_or(name: &str) -> Result<Self> {
        if let Some(device) = Self::from_environment()? {
            return Ok(device);
        }
        // A kernel without RDMA has no devices.
        let devices = devices().unwrap_or_default().into_iter();
        match devices.into_iter().find(Self::is_active) {
            Some(device) => Ok(device),
            None => Self::named(name),
        }
    }

    /// Returns the device that the environment variable `RINGVERBS_DEVICE` names (see
    /// [`named`](Self::named)); `None` if the variable is not set or empty, or in a
    /// privileged program (see [`first`](Self::first)).
    ///
    /// # Errors
    /// As [`named`](Self::named); [`Error::NoDevice`] also if the name is not UTF-8.
    pub fn from_environment() -> Result<Option<Self>> {
        let name = uverbs::environment::variable(VARIABLE).filter(|name| !name.is_empty());
        let Some(name) = name else {
            return Ok(None);
        };
        match name.into_string() {
            Ok(name) => Self::named(&name).map(Some),
            Err(name) => Err(Error::NoDevice {
                name: Some(name.to_string_lossy().into_owned()),
            }),
        }
    }

    /// Returns whether this crate supports the device, and one of its ports is active.
    fn is_active(&self) -> bool {
        let active = |inspector: &Inspector, port| {
            let attr = inspector.query_port(port);
            attr.is_ok_and(|attr| attr.legacy.state == PORT_ACTIVE)
        };
        let ports = self.found.num_ports.unwrap_or(1);
        Provider::supports(self.found.driver_id)
            && (self.inspect())
                .is_ok_and(|inspector| (1..=ports).any(|port| active(&inspector, port as u8)))
    }

    /// Returns the connection manager of an embedded device's network.
    #[cfg(feature = "embedded")]
    pub(crate) fn connection_manager(&self) -> Option<Box<dyn Kernel>> {
        let embedded = self.embedded.as_ref()?;
        Some(embedded.connection_manager())
    }

    /// Returns whether this is an embedded device.
    #[cfg(feature = "embedded")]
    pub fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }

    /// From now on looks for errors of the program that no device reports, as far as an embedded
    /// device sees them ([`check`]), and tells `report` each, with the device locked: it must not
    /// use devices, and must not wait. Replaces what an earlier call, or `RINGVERBS_CHECK`, has
    /// set. Applies to all devices that the network has so far.
    ///
    /// ```
    /// # use ringverbs::Device;
    /// # fn main() -> ringverbs::Result<()> {
    /// let device = Device::embedded()?;
    /// device.check(|error| eprintln!("{error}"))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other devices.
    #[cfg(feature = "embedded")]
    pub fn check(
        &self,
        report: impl Fn(&check::ProgramError) + Send + Sync + 'static,
    ) -> Result<()> {
        let embedded = self.embedded.as_ref().ok_or(Error::Unsupported {
            what: "looking for errors of the program, by another device than an embedded one",
        })?;
        embedded.network().check(report);
        Ok(())
    }

    /// Returns the embedded device's handle.
    #[cfg(feature = "embedded")]
    pub(crate) fn embedded_handle(&self) -> Option<&embedded::Embedded> {
        self.embedded.as_ref()
    }

    /// Runs an embedded device and its network in the calling thread, for a bounded
    /// amount of work. A polling loop that calls this after an empty poll does not
    /// depend on the device's own thread, which may be asleep or not scheduled.
    ///
    /// Returns true if there was progress, if work is left, or if another thread is
    /// running the device. For other devices it does nothing and returns false.
    #[cfg(feature = "embedded")]
    pub fn drive(&self) -> bool {
        self.embedded
            .as_ref()
            .is_some_and(embedded::Embedded::drive)
    }

    /// Returns the name, such as `rxe0`.
    pub fn name(&self) -> &str {
        &self.found.name
    }

    /// Returns the result of device discovery.
    pub fn found(&self) -> &discovery::Device {
        &self.found
    }

    /// Opens the device.
    ///
    /// # Errors
    /// EACCES without permission on its character device;
    /// [`Error::UnsupportedDriver`] if this crate has no data path for the
    /// driver.
    pub fn open(&self) -> Result<Context> {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            let (context, driver) = (embedded.context()?, self.found.driver_id);
            return Context::from_uverbs(context, driver, Some(self.clone()));
        }
        Context::open_with(Box::new(RealKernel), self)
    }

    /// Opens the device for queries only. Unlike [`open`](Self::open) this works
    /// with any driver.
    ///
    /// # Errors
    /// EACCES without permission on its character device.
    pub fn inspect(&self) -> Result<Inspector> {
        let context = self.kernel_context()?;
        let (info, _) = Provider::open(&context, self.found.driver_id)?;
        Ok(Inspector::new(context, info))
    }

    /// Opens the kernel's context without GET_CONTEXT, which the provider sends.
    fn kernel_context(&self) -> Result<uverbs::Context> {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            return Ok(embedded.context()?);
        }
        Ok(uverbs::Context::open(Box::new(RealKernel), &self.found)?)
    }
}

/// Name of the embedded device.
#[cfg(feature = "embedded")]
const EMBEDDED: &str = "embedded";

/// Prefix of the name of an embedded device that reaches other hosts.
#[cfg(feature = "embedded")]
const ROCE: &str = "roce:";

/// The network of an embedded device.
#[cfg(feature = "embedded")]
#[derive(Clone, PartialEq, Eq)]
enum Location {
    /// A network within the process.
    Process,
    /// The network of the processes that share a directory.
    Directory(PathBuf, embedded::Sharing),
    /// The network of an address or an interface.
    Hosts(String),
}

#[cfg(feature = "embedded")]
impl Location {
    /// Returns the device name by which any process selects this network.
    fn device_name(&self) -> String {
        match self {
            Self::Process => EMBEDDED.to_owned(),
            Self::Directory(directory, sharing) => {
                let shared = match sharing {
                    embedded::Sharing::Own => "",
                    embedded::Sharing::Others => "-shared",
                };
                format!("{EMBEDDED}{shared}:{}", directory.display())
            }
            Self::Hosts(name) => format!("{ROCE}{name}"),
        }
    }
}

/// Parses the name of an embedded device.
#[cfg(feature = "embedded")]
fn embedded_location(name: &str) -> Option<Location> {
    if let Some(name) = name.strip_prefix(ROCE) {
        return Some(Location::Hosts(name.to_owned()));
    }
    let rest = name.strip_prefix(EMBEDDED)?;
    if rest.is_empty() {
        return Some(Location::Process);
    }
    let (sharing, directory) = match rest.strip_prefix("-shared") {
        Some(rest) => (embedded::Sharing::Others, rest),
        None => (embedded::Sharing::Own, rest),
    };
    let directory = directory.strip_prefix(':')?;
    let directory = match (directory, sharing) {
        ("", embedded::Sharing::Own) => embedded::Network::default_directory(),
        _ => directory.into(),
    };
    Some(Location::Directory(directory, sharing))
}

/// Returns this process's embedded device for `location`, created on first use.
#[cfg(feature = "embedded")]
fn embedded_device(location: Location) -> Result<Device> {
    static DEVICES: Mutex<Vec<(Location, Device)>> = Mutex::new(Vec::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = devices.iter().find(|(at, _)| *at == location) {
        return Ok(device.clone());
    }
    let reports = check::Reports::of_environment()?;
    let drive = embedded::Drive::Thread;
    let network = match &location {
        Location::Process => embedded::Network::new(drive),
        Location::Directory(directory, sharing) => {
            embedded::Network::joined_with(drive, directory, *sharing)
        }
        Location::Hosts(name) => embedded::Network::roce(drive, name),
    };
    let mut device = Device::from(network?.device("roce")?);
    device.found.name = location.device_name();
    if let Some(reports) = reports {
        let name = device.found.name.clone();
        device.check(move |error| reports.report(&name, error))?;
    }
    devices.push((location, device.clone()));
    Ok(device)
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

/// An open device (`ibv_context`), in which all other objects are created.
///
/// A handle: clones refer to the same context, which is closed when the last
/// clone and the last object created in it are dropped. Any thread may use it.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) uverbs: Ctx,
    pub(crate) provider: Provider,
    info: ContextInfo,
    device: Option<Device>,
    /// The first event file of a context, which receives the events of all its
    /// objects.
    pub(crate) events: AsyncEventFile<Ctx>,
    /// In-flight lists of shared receive queues, by the number in their work
    /// request ids.
    pub(crate) srq_tables: Registry<UnorderedTable>,
    next_id: Mutex<u64>,
    /// Device capabilities, `IB_UVERBS_DEVICE_...`.
    optional: u64,
    /// Maximum RDMA reads and atomics outstanding on a QP: as responder, as initiator.
    read_depths: (u8, u8),
}

impl Context {
    fn open_with(kernel: Box<dyn Kernel>, device: &Device) -> Result<Self> {
        if !Provider::supports(device.found.driver_id) {
            return Err(Error::UnsupportedDriver {
                device: device.found.name.clone(),
                driver: device.found.driver_id.0,
            });
        }
        let context = uverbs::Context::open(kernel, &device.found)?;
        Self::from_uverbs(context, device.found.driver_id, Some(device.clone()))
    }

    fn from_uverbs(
        context: uverbs::Context,
        driver: discovery::DriverId,
        device: Option<Device>,
    ) -> Result<Self> {
        let (info, provider) = Provider::open(&context, driver)?;
        let uverbs = Arc::new(context);
        let events = AsyncEventFile::alloc(&uverbs)?;
        events.set_nonblocking(true)?;
        // A kernel without this query has none of these capabilities.
        let attr = uverbs.query_device_ex(Udata::none()).unwrap_or_default();
        let depth = |limit: u32| match limit.min(u8::MAX.into()) as u8 {
            // Unknown limit: the kernel refuses values that are too large.
            0 => u8::MAX,
            limit => limit,
        };
        let read_depths = (
            depth(attr.base.max_qp_rd_atom),
            depth(attr.base.max_qp_init_rd_atom),
        );
        Ok(Self {
            inner: Arc::new(Inner {
                uverbs,
                provider,
                info,
                device,
                events,
                optional: attr.device_cap_flags_ex,
                read_depths,
                srq_tables: Registry::new(),
                next_id: Mutex::new(0),
            }),
        })
    }

    /// Returns why the last work request of a queue pair, or the last request of its peer, has
    /// failed, with both sides of what was compared: "work request failed: its local buffers:
    /// [...]: the key is for 4096 bytes from 0x7f0000 on". If the peer is on a device of the same
    /// network in this process, what that has found follows ("the other end"); otherwise its own
    /// context knows why it has refused a request.
    ///
    /// `qp_num` is that of the completion. `None` if nothing has failed, and on devices that are
    /// not embedded, which do not tell. The last 64 queue pairs are remembered.
    #[cfg(feature = "embedded")]
    pub fn explanation(&self, qp_num: u32) -> Option<String> {
        let device = self.inner.device.as_ref()?;
        device.embedded_handle()?.explanation(qp_num)
    }

    /// Creates a context from a kernel context that the caller has opened, such as a
    /// recorded kernel in a test.
    ///
    /// # Errors
    /// Errors of GET_CONTEXT.
    ///
    /// # Safety
    /// Nothing else sends commands on the context. A mapping that its kernel provides stays
    /// valid as long as the kernel reports it.
    #[cfg(any(test, feature = "fake"))]
    #[doc(hidden)]
    pub unsafe fn over(context: uverbs::Context) -> Result<Self> {
        let driver = context.driver_id();
        Self::from_uverbs(context, driver, None)
    }

    /// As [`over`](Self::over), with the data path of `driver` instead of the driver that
    /// the context reports.
    ///
    /// # Errors
    /// As [`over`](Self::over).
    ///
    /// # Safety
    /// As [`over`](Self::over).
    #[cfg(any(test, feature = "fake"))]
    #[doc(hidden)]
    pub unsafe fn over_as(context: uverbs::Context, driver: discovery::DriverId) -> Result<Self> {
        Self::from_uverbs(context, driver, None)
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

    /// Returns a number that is unique among the objects of this context. Events
    /// name objects by it.
    pub(crate) fn next_id(&self) -> u64 {
        let mut next = self
            .inner
            .next_id
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *next += 1;
        *next
    }

    /// Returns the maximum RDMA reads and atomics outstanding on a QP: as responder, as
    /// initiator.
    pub(crate) fn read_depths(&self) -> (u8, u8) {
        self.inner.read_depths
    }

    /// Returns whether the device supports the flush operation for at least one placement
    /// type.
    pub fn can_flush(&self) -> bool {
        self.inner.optional & (DEVICE_FLUSH_GLOBAL | DEVICE_FLUSH_PERSISTENT) != 0
    }

    /// Returns whether the device supports the flush operation with placement type `to`. A
    /// device may support one type and lack the other.
    pub fn can_flush_to(&self, to: FlushTo) -> bool {
        let needed = match to {
            FlushTo::GlobalVisibility => DEVICE_FLUSH_GLOBAL,
            FlushTo::Persistence => DEVICE_FLUSH_PERSISTENT,
        };
        self.inner.optional & needed != 0
    }

    /// Returns whether the device supports atomic writes of 8 bytes to remote
    /// memory.
    pub fn can_write_atomically(&self) -> bool {
        self.inner.optional & DEVICE_ATOMIC_WRITE != 0
    }

    /// Returns whether `other` is a handle of the same context.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the device that the context was opened on.
    pub fn device(&self) -> Option<&Device> {
        self.inner.device.as_ref()
    }

    /// Returns the number of completion vectors, over which completion events can
    /// be spread. Valid vectors are less than this.
    pub fn num_comp_vectors(&self) -> u32 {
        self.inner.info.num_comp_vectors
    }

    /// Closes the context.
    ///
    /// # Errors
    /// Returns the context with [`Error::Busy`] while objects created in it or
    /// other handles of it exist.
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
