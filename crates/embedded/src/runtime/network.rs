//! Networks that connect devices.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use roce::fabric::Fabric;
use roce::packet::Pool;
use softhca::Settings;
use softhca::card::Card;
use softhca::chaos::Chaos;
use softhca::link_shape::LinkShape;
use softhca::profile::{PortKind, Profile};
use softhca::profiles::PROFILES;
use uverbs::{Command, Errno, Error};

use crate::addresses::PortAddresses;
use crate::capture::{CaptureClock, CaptureEnd, CaptureOptions, Recorder};
use crate::directory::{Directory, OTHER_VERSION, Sharing};
use crate::drive::Drive;
use crate::driver::gids::GidTable;
use crate::driver::memory::Process;
use crate::driver::state::State;
use crate::links::PortLink;
use crate::random::{Random, random};
use crate::runtime::device::Device;
use crate::runtime::embedded::Embedded;
use crate::runtime::runner::{Runner, WireConfig};
use crate::runtime::time::{self, Progress, SimulatedTime};
use crate::wires::link_file;
use crate::wires::segment::MAX_NUMBER;
use crate::wires::udp::{self, UdpPorts};
use crate::{Result, refuse};

/// A set of devices that can reach each other.
///
/// A handle: clones refer to the same network. The devices exist as long as the
/// network, and the network as long as any handle of it, of a device or of a
/// context.
#[derive(Clone)]
pub struct Network {
    runner: Arc<Runner>,
}

pub(crate) fn refused(command: Command) -> impl Fn(Errno) -> Error {
    move |errno| Error::refused(command, None, errno)
}

/// Sets the first numbers of queue pairs and memory keys. Those of different devices differ, so
/// that a program that takes one for the other fails; and who sends datagrams must guess them.
fn number_from(random: u64, settings: &mut Settings) {
    // The ranges are those of `Settings`; the last queue pair number is that of multicast.
    const QUEUES: u32 = (1 << 24) - 1 - (1 << 17);
    const KEYS: u32 = (1 << 24) - (1 << 22);
    settings.first_qpn = 0x40 + random as u32 % (QUEUES - 0x40);
    settings.first_mkey = 0x10 + (random >> 32) as u32 % (KEYS - 0x10);
}

/// A device without a card, whose frames leave at once.
const PLAIN: (&Card, LinkShape) = (&Card::SOFTHCA, LinkShape::NONE);

impl Network {
    /// Creates a network without devices.
    ///
    /// # Errors
    /// EAGAIN and similar if a thread cannot be created.
    pub fn new(drive: Drive) -> std::result::Result<Self, Error> {
        Self::with_wire(drive, WireConfig::None, None)
    }

    /// Creates a network without devices whose time is simulated: it passes only
    /// when nothing else can happen. There is no thread. A poll that finds nothing and
    /// a wait for an event perform pending work, or move the clock to what is due
    /// next. Calls by one thread in the same order have the same results, for the same
    /// seed.
    ///
    /// If several threads use the network, the clock moves after a millisecond without
    /// activity, since another one may be about to post.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn simulated(seed: u64) -> std::result::Result<Self, Error> {
        Self::with_wire(
            Drive::Caller,
            WireConfig::None,
            Some(SimulatedTime::new(seed)),
        )
    }

    /// Creates a network without devices that is shared with other processes:
    /// those that name the same directory, in which each process has a socket.
    /// If the directory does not exist it is created, accessible to this user
    /// only. An existing one must belong to this user or root, must not be
    /// writable by others, and must not be a symbolic link; so only this user
    /// and root can participate. Requires `/proc`.
    ///
    /// Input from other processes is as untrusted as that from any network: it
    /// can only reach what a queue pair or a key permits. A process that has
    /// ended, for whatever reason, no longer responds.
    ///
    /// # Errors
    /// [`Error::Invalid`], with what to do, if the directory belongs to another
    /// user, is writable by others, or is a symbolic link, or if a process of another version
    /// participates; EUSERS if 256
    /// processes already participate; errors of creating files and sockets
    /// there; and those of [`new`](Self::new).
    pub fn joined(drive: Drive, directory: &Path) -> std::result::Result<Self, Error> {
        Self::joined_with(drive, directory, Sharing::Own)
    }

    /// As [`joined`](Self::joined), for a directory that may be shared with
    /// other users.
    ///
    /// # Errors
    /// As [`joined`](Self::joined).
    pub fn joined_with(
        drive: Drive,
        directory: &Path,
        sharing: Sharing,
    ) -> std::result::Result<Self, Error> {
        let directory = Arc::new(Directory::open(directory, sharing)?);
        let joined = Self::with_wire(drive, WireConfig::Directory(directory), None);
        joined.map_err(|error| match error.errno().raw() {
            libc::EPROTONOSUPPORT => Error::Invalid {
                command: Command::Open,
                what: OTHER_VERSION,
            },
            _ => error,
        })
    }

    /// Creates a network without devices that reaches other hosts: RoCE v2 in UDP
    /// datagrams, as rdma_rxe and RDMA cards send them. `name` is an IP address of this
    /// host, or a network interface, whose addresses it follows. Its one device has an
    /// Ethernet port.
    ///
    /// It takes UDP port 4791 of each address for this user's processes, up to 64, and
    /// needs no right that sending datagrams does not need. Processes find each other by
    /// [`default_directory`](Self::default_directory); without it, the addresses are for
    /// this process alone. Whoever can send datagrams to the host can send
    /// packets to the device, and forge their source: RoCE does not protect.
    ///
    /// # Errors
    /// [`Error::Invalid`], with what to do, if there is no such interface or address,
    /// if it has no address, if the port is in use, also by a process of another version, or if
    /// the MTU is too small; errors
    /// of creating sockets; and those of [`new`](Self::new).
    pub fn roce(drive: Drive, name: &str) -> std::result::Result<Self, Error> {
        Self::with_wire(drive, WireConfig::Udp(UdpPorts::open(name)?), None)
    }

    /// Ends the connections of killed processes with a device of [`roce`](Self::roce) with this
    /// name, if no other process of its addresses does: tells their peers, and waits for their
    /// answers, at most two seconds.
    ///
    /// # Errors
    /// Those of [`roce`](Self::roce), if there are such connections.
    pub fn end_left_connections(name: &str) -> std::result::Result<(), Error> {
        const MAX_WAIT: Duration = Duration::from_secs(2);
        const TURN: Duration = Duration::from_millis(1);
        if !udp::has_left_connections() {
            return Ok(());
        }
        // Joining takes them over.
        let network = Self::roce(Drive::Caller, name)?;
        let begin = Instant::now();
        loop {
            let is_busy = network.runner.turn() != Some(false);
            let is_done = !is_busy && !network.runner.manager().awaits_end();
            if is_done || begin.elapsed() > MAX_WAIT {
                return Ok(());
            }
            thread::sleep(TURN);
        }
    }

    /// Returns the network interface that has the addresses of a device of [`roce`](Self::roce)
    /// with this name.
    pub fn interface_of(name: &str) -> Option<String> {
        udp::interface_of(name)
    }

    /// Returns the directory that commands use if none is named: `ringverbs` in
    /// `$XDG_RUNTIME_DIR`, or a folder in `/tmp` with the user's number in its name.
    pub fn default_directory() -> PathBuf {
        Directory::default_path()
    }

    /// Creates the directory of a network, if it does not exist, and checks it as
    /// [`joined`](Self::joined) does. Returns its absolute path.
    ///
    /// # Errors
    /// Those of [`joined`](Self::joined) that concern the directory.
    pub fn own_directory(directory: &Path) -> std::result::Result<PathBuf, Error> {
        Directory::open(directory, Sharing::Own)?;
        let refused = refused(Command::Open);
        let absolute = std::path::absolute(directory);
        absolute.map_err(|error| refused(Errno::new(error.raw_os_error().unwrap_or(libc::EIO))))
    }

    /// Sets the links of ports in a network of several processes ([`joined`](Self::joined)) up
    /// or down: of the device with this index in its process, in the process with this number
    /// or in all, also in those that join later. Programs receive `PORT_ERR` and `PORT_ACTIVE`,
    /// and packets are lost while a link is down. Returns the number of processes in the
    /// network.
    ///
    /// # Errors
    /// Those of [`joined`](Self::joined) that concern the directory; EPERM for a directory of
    /// another user; ENODEV for an index from 64 on; ENOSPC if more than 256 links are down.
    pub fn set_link(
        directory: &Path,
        device: u16,
        process: Option<u32>,
        up: bool,
    ) -> std::result::Result<usize, Error> {
        let directory = Directory::open(directory, Sharing::Own)?;
        link_file::write(&directory, device, process, up).map_err(refused(Command::Open))
    }

    fn with_wire(
        drive: Drive,
        config: WireConfig,
        time: Option<SimulatedTime>,
    ) -> std::result::Result<Self, Error> {
        let pool = Pool::with_deferred_icrc();
        let runner = Runner::new(Fabric::new(1), pool, drive, config, time);
        let runner = runner.map_err(refused(Command::Open))?;
        Ok(Self { runner })
    }

    /// Sets the names of the devices, in the order in which they are added, for commands that
    /// look at running processes ([`RunningProcesses`](crate::RunningProcesses)); `mlx5_0`,
    /// `mlx5_1` and so on without this. Only the first call counts.
    pub fn set_names(&self, names: &[String]) {
        self.runner.set_names(names);
    }

    /// Adds a device with a profile ([`profiles`](Self::profiles)). Each device
    /// has addresses of its own.
    ///
    /// # Errors
    /// ENODEV if the profile does not exist, or has an InfiniBand port on a network
    /// that reaches other hosts; ENOMEM, also for a second device on such a network.
    pub fn device(&self, profile: &str) -> std::result::Result<Embedded, Error> {
        self.add(profile, PLAIN, false, &GidTable::default())
            .map_err(refused(Command::Open))
    }

    /// As [`device`](Self::device), with other GIDs. They are those of Ethernet ports that reach
    /// no other hosts; other devices ignore them.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn device_with_gids(
        &self,
        profile: &str,
        gids: &GidTable,
    ) -> std::result::Result<Embedded, Error> {
        let (card, link) = PLAIN;
        self.device_of_card(profile, card, link, gids)
    }

    /// As [`device_with_gids`](Self::device_with_gids), which says that it is a card, and has a
    /// link with properties. Messages of the connection manager do not pass that link.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn device_of_card(
        &self,
        profile: &str,
        card: &'static Card,
        link: LinkShape,
        gids: &GidTable,
    ) -> std::result::Result<Embedded, Error> {
        self.add(profile, (card, link), false, gids)
            .map_err(refused(Command::Open))
    }

    /// As [`device`](Self::device), with a strict device: reserved fields that
    /// are set, and work requests that contradict their queue, are recorded as
    /// complaints ([`Embedded::complaints`]) and are errors.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn strict_device(&self, profile: &str) -> std::result::Result<Embedded, Error> {
        self.add(profile, PLAIN, true, &GidTable::default())
            .map_err(refused(Command::Open))
    }

    /// Lets the numbers of queue pairs and memory keys of devices that are added from now on
    /// follow from a seed and the device's number in the network. Without this they begin at
    /// random numbers, but in simulated time always at the same. Only the first call counts.
    pub fn set_seed(&self, seed: u64) {
        self.runner.set_seed(seed);
    }

    /// Lets peers on other hosts be silent for a time before the retries of requests to them
    /// count, with devices that are added from now on: their processes may be stopped, where a
    /// card would answer. A peer that has neither answered nor sent a request is excepted. Only
    /// the first call counts, and only on a network of [`roce`](Self::roce).
    pub fn set_patience(&self, patience: Duration) {
        self.runner.set_patience(patience);
    }

    /// Lets devices that are added from now on do what the specification allows and programs may
    /// not expect. Only the first call counts.
    pub fn set_chaos(&self, chaos: Chaos) {
        self.runner.set_chaos(chaos);
    }

    fn add(
        &self,
        profile: &str,
        (card, link): (&'static Card, LinkShape),
        strict: bool,
        gids: &GidTable,
    ) -> Result<Embedded> {
        let Some(profile) = Profile::named(profile) else {
            return refuse(libc::ENODEV);
        };
        let profile = profile.with_devx();
        let device = self.runner.add(|number, index, fabric, pool| {
            let number = u16::try_from(number).ok();
            let number = number.filter(|number| *number < MAX_NUMBER);
            let number = number.ok_or(Errno::new(libc::ENOMEM))?;
            let mut settings = Settings {
                card,
                link,
                strict,
                chaos: self.runner.chaos(),
                ..Settings::numbered(profile, number)
            };
            settings.mac[2..4].copy_from_slice(&self.runner.network().to_be_bytes());
            let mut process = Process::new(self.runner.time().map(SimulatedTime::clock));
            if let Some(peers) = self.runner.peers() {
                process.set_peers(Arc::clone(peers));
            }
            let addresses = self.runner.addresses();
            if addresses.is_some() {
                process.set_patience(self.runner.patience());
            }
            if self.runner.time().is_none() {
                let random = match self.runner.seed() {
                    Some(seed) => Random::seeded(seed ^ u64::from(number) << 48).next(),
                    None => random(),
                };
                number_from(random, &mut settings);
            }
            if let Some(addresses) = addresses {
                if settings.profile.port != PortKind::Ethernet {
                    return Err(Errno::new(libc::ENODEV));
                }
                addresses.apply_to(&mut settings);
            }
            let of_host = addresses.map(|it| Arc::new(it.clone()) as Arc<dyn PortAddresses>);
            let mut state = State::new(process, settings, of_host, gids, fabric, pool)?;
            if addresses.is_none() {
                // The index is not above the number.
                state.node_guid = Settings::numbered(profile, index as u16).guid;
            }
            state.has_thread = self.runner.has_thread();
            if let Some(links) = self.runner.links() {
                state.follow_link(PortLink::new(Arc::clone(links), index));
            }
            Ok(Arc::new(Device::new(state, number.into())))
        })?;
        Ok(Embedded {
            device,
            runner: Arc::clone(&self.runner),
            completions: None,
        })
    }

    pub(crate) fn devices(&self) -> Vec<Arc<Device>> {
        self.runner.devices()
    }

    /// Sets what ends this process, if a fault says so; it is called with the device locked.
    /// Without it the device falls silent. Only the first call has an effect.
    pub fn set_on_die(&self, die: fn()) {
        let _ = self.runner.on_die().set(die);
    }

    pub(crate) fn on_die(&self) -> Option<fn()> {
        self.runner.on_die().get().copied()
    }

    /// Wakes the threads that drive the network.
    pub(crate) fn wake(&self) {
        self.runner.wake();
    }

    /// Returns the fabric of the network, for faults and captures. Ports are numbered as the
    /// devices are.
    pub fn fabric(&self) -> &Fabric {
        self.runner.fabric()
    }

    /// Captures the frames that the devices of this process send and receive, also those that are
    /// added later, in pcapng files for Wireshark and tshark. Each frame has its direction, and
    /// a comment with process, device, queue pair, and why it was dropped or refused. Requests
    /// between queue pairs of one device are captured as frames, too; messages of the connection
    /// manager within a process are none. Replaces an earlier capture.
    ///
    /// The files are written under the locks of the devices, when these have no more frames for
    /// now. A write that fails ends the capture: `on_end` is called, under these locks, with the
    /// file and the error, and the file ends with the last frame that was written.
    ///
    /// # Errors
    /// Those of creating the first file and writing to it.
    pub fn capture(&self, options: &CaptureOptions, on_end: Option<CaptureEnd>) -> io::Result<()> {
        let clock = match self.runner.time() {
            Some(time) => CaptureClock::Simulated(time.clock()),
            None => CaptureClock::Host,
        };
        let recorder = Recorder::create(options, clock, on_end)?;
        if let Some(earlier) = self.runner.record_frames(Some(recorder)) {
            earlier.end();
        }
        Ok(())
    }

    /// Ends the capture. Returns its last file; `None` if there is none.
    pub fn end_capture(&self) -> Option<PathBuf> {
        self.runner.record_frames(None)?.end()
    }

    /// Returns the simulated time, from 0; `None` if time is the system's.
    pub fn now(&self) -> Option<Duration> {
        let time = self.runner.time()?;
        Some(Duration::from_nanos(time.now() - 1))
    }

    /// Assumes from now on that several threads use the network, before a second one does
    /// ([`simulated`](Self::simulated)).
    pub fn share_time(&self) {
        if let Some(time) = self.runner.time() {
            time.use_several_threads();
        }
    }

    /// Performs a bounded amount of pending work. Returns true if there was any, if
    /// more is left, or if another thread is driving. Simulated time does not pass.
    pub fn turn(&self) -> bool {
        self.runner.turn().unwrap_or(true)
    }

    /// Performs pending work or, if there is none, moves simulated time to what is due
    /// next. Returns false if nothing can happen without a command or a doorbell.
    pub fn step(&self) -> bool {
        let time = self.runner.time();
        time.map_or_else(
            || self.turn(),
            |time| time::step(&self.runner, time) != Progress::Stuck,
        )
    }

    /// As [`step`](Self::step), for a task of an executor: the clock moves after other tasks
    /// have run. If this returns false, the next command or doorbell wakes the task.
    pub fn poll_step(&self, task: &Waker) -> bool {
        let time = self.runner.time();
        time.map_or_else(
            || self.turn(),
            |time| time::poll(&self.runner, time, Some(task)),
        )
    }

    /// Moves simulated time by a duration, and runs what becomes due on the way.
    pub fn advance(&self, by: Duration) {
        if let Some(time) = self.runner.time() {
            time::advance(&self.runner, time, by);
        }
    }

    /// Returns the names and descriptions of the profiles.
    pub fn profiles() -> impl Iterator<Item = (&'static str, &'static str)> {
        PROFILES.iter().map(|profile| (profile.name, profile.about))
    }
}

impl Embedded {
    /// Creates a device on a network of its own, driven by a thread.
    ///
    /// # Errors
    /// As [`Network::new`] and [`Network::device`].
    pub fn new(profile: &str) -> std::result::Result<Self, Error> {
        Network::new(Drive::Thread)?.device(profile)
    }

    /// Returns the network that contains the device.
    pub fn network(&self) -> Network {
        Network {
            runner: Arc::clone(&self.runner),
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").finish_non_exhaustive()
    }
}
