//! Port spaces of a network, and connections between the two ends.
//!
//! Each listening port is a Unix socket; each connection to it carries the messages of two
//! ends. The system closes the sockets of a process that ends. In a network of one process
//! the sockets are abstract, and accept only this process. In a network of a directory, each
//! bound port is a file there; the holder of the lock on that file owns the port.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::Flock;
use nix::sys::socket::{
    Backlog, SockFlag, UnixAddr, accept4, bind, connect, getsockname, getsockopt, listen, sockopt,
};
use softhca::packet::gid_of_ip;
use uverbs::Errno;

use super::gateway::Dialer;
use crate::addresses::AddressList;
use crate::directory::{Directory, new_socket};
use crate::{Result, refuse};

/// First ephemeral port; the last is 65534.
const FIRST_EPHEMERAL: u16 = 32768;

/// The port spaces of a network.
#[derive(Debug)]
pub(super) enum Ports {
    /// Ports of this process alone.
    Process(Mutex<PortTable>),
    /// Ports shared by the processes of a directory.
    Directory(Arc<Directory>),
    /// Ports that other hosts reach.
    Hosts(HostPorts),
}

/// Ports that other hosts reach: of this process, or of all that share its addresses.
#[derive(Debug)]
pub(super) struct HostPorts {
    pub(super) table: Mutex<PortTable>,
    pub(super) dialer: Arc<Dialer>,
    pub(super) shared: Option<SharedPorts>,
}

/// The directory in which processes with the same addresses reserve ports.
#[derive(Clone, Debug)]
pub(crate) struct SharedPorts {
    pub(crate) directory: Arc<Directory>,
    /// The member number of this process.
    pub(crate) member: u8,
    pub(crate) addresses: Arc<AddressList>,
}

/// A port space, and a port of it.
pub(super) type PortKey = (u16, u16);

/// Ports of this process.
pub(super) type PortTable = HashMap<PortKey, PortEntry>;

/// A port of this process.
#[derive(Debug, Default)]
pub(super) struct PortEntry {
    /// The address of its listener.
    listener: Option<UnixAddr>,
    /// Locks on the port of each address, if other processes share the addresses.
    locks: Vec<(IpAddr, Flock<File>)>,
}

/// A port in use. Dropping it releases the port.
#[derive(Debug)]
pub(super) struct BoundPort {
    ports: Arc<Ports>,
    key: PortKey,
    /// The lock on its file in a directory.
    lock: Option<Flock<File>>,
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

/// Returns a number that cannot be guessed.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn lock_name((space, port): PortKey) -> String {
    format!("cm-{space:x}-{port}.lock")
}

/// Name of the lock on a port of an address.
fn lock_name_of((space, port): PortKey, address: IpAddr) -> String {
    let bits = u128::from_be_bytes(gid_of_ip(address));
    format!("cm-{space:x}-{port}-{bits:032x}.lock")
}

impl SharedPorts {
    /// Reserves a port of all addresses.
    ///
    /// # Errors
    /// EADDRINUSE if another process has the port of one address; errors of the directory.
    fn reserve(&self, key: PortKey) -> Result<PortEntry> {
        let mut entry = PortEntry::default();
        for address in self.addresses.all() {
            if let Err(errno) = self.reserve_at(key, address.ip, &mut entry) {
                self.release(key, entry);
                return Err(errno);
            }
        }
        Ok(entry)
    }

    /// Reserves a port also at one more address.
    ///
    /// # Errors
    /// As for [`reserve`](Self::reserve).
    fn reserve_at(&self, key: PortKey, address: IpAddr, entry: &mut PortEntry) -> Result<()> {
        if entry.locks.iter().any(|(known, _)| *known == address) {
            return Ok(());
        }
        let name = lock_name_of(key, address);
        let Some(lock) = self.directory.lock(&name)? else {
            return refuse(libc::EADDRINUSE);
        };
        entry.locks.push((address, lock));
        // Tells other members which one owns the port.
        self.directory.write(&name, &self.member.to_string())
    }

    /// Removes the files of the locks, which are held until then.
    fn release(&self, key: PortKey, entry: PortEntry) {
        for (address, _lock) in entry.locks {
            self.directory.remove_lock(&lock_name_of(key, address));
        }
    }

    /// Returns the number of the process that has a port of an address.
    fn member_of(&self, key: PortKey, address: IpAddr) -> Option<u8> {
        let text = self.directory.read(&lock_name_of(key, address))?;
        text.parse().ok()
    }
}

fn socket_name((space, port): PortKey) -> String {
    format!("cm-{space:x}-{port}.socket")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ports {
    pub(super) fn new(directory: Option<Arc<Directory>>) -> Self {
        match directory {
            None => Self::Process(Mutex::default()),
            Some(directory) => Self::Directory(directory),
        }
    }

    /// Reserves a port; 0 selects any free one.
    pub(super) fn reserve(self: &Arc<Self>, space: u16, port: u16) -> Result<BoundPort> {
        if port != 0 {
            return self.reserve_exactly((space, port));
        }
        let count = u16::MAX - FIRST_EPHEMERAL;
        let first = (random() % u64::from(count)) as u16;
        for step in 0..count {
            let port = FIRST_EPHEMERAL + (first + step) % count;
            match self.reserve_exactly((space, port)) {
                Err(errno) if errno.raw() == libc::EADDRINUSE => {}
                other => return other,
            }
        }
        refuse(libc::EADDRNOTAVAIL)
    }

    fn reserve_exactly(self: &Arc<Self>, key: PortKey) -> Result<BoundPort> {
        let lock = match &**self {
            Self::Process(table) | Self::Hosts(HostPorts { table, .. }) => {
                let mut table = lock(table);
                if table.contains_key(&key) {
                    return refuse(libc::EADDRINUSE);
                }
                let entry = self.shared().map(|shared| shared.reserve(key));
                table.insert(key, entry.transpose()?.unwrap_or_default());
                None
            }
            Self::Directory(directory) => match directory.lock(&lock_name(key))? {
                Some(lock) => Some(lock),
                None => return refuse(libc::EADDRINUSE),
            },
        };
        Ok(BoundPort {
            ports: Arc::clone(self),
            key,
            lock,
        })
    }

    /// Reserves the ports of this process also at a new address. A port that another process
    /// has there stays with that process.
    pub(super) fn add_address(&self, address: IpAddr) {
        let Self::Hosts(HostPorts {
            table,
            shared: Some(shared),
            ..
        }) = self
        else {
            return;
        };
        for (key, entry) in &mut *lock(table) {
            if let Err(errno) = shared.reserve_at(*key, address, entry) {
                let (_, port) = key;
                tracing::warn!(%address, port, %errno, "port not reserved at a new address");
            }
        }
    }

    fn shared(&self) -> Option<&SharedPorts> {
        match self {
            Self::Hosts(hosts) => hosts.shared.as_ref(),
            _ => None,
        }
    }

    /// Returns the number of the other process that has a port of an address.
    pub(super) fn other_member(&self, key: PortKey, address: IpAddr) -> Option<u8> {
        let shared = self.shared()?;
        let member = shared.member_of(key, address);
        member.filter(|member| *member != shared.member)
    }

    /// Returns the number of this process among those that share its addresses.
    pub(super) fn member(&self) -> u8 {
        self.shared().map_or(0, |shared| shared.member)
    }

    /// Connects to the listener on a port; `None` if there is none. A connection to another
    /// host always succeeds at first.
    ///
    /// # Errors
    /// EAGAIN if the backlog is full.
    pub(super) fn connect(&self, key: PortKey) -> Result<Option<OwnedFd>> {
        match self {
            Self::Hosts(hosts) => hosts.dialer.dial().map(Some),
            _ => self.connect_local(key),
        }
    }

    /// As [`connect`](Self::connect), to a listener on this host.
    pub(super) fn connect_local(&self, key: PortKey) -> Result<Option<OwnedFd>> {
        let table = match self {
            Self::Process(table) | Self::Hosts(HostPorts { table, .. }) => table,
            Self::Directory(directory) => return directory.connect(&socket_name(key)),
        };
        let at = lock(table).get(&key).and_then(|entry| entry.listener);
        let Some(at) = at else {
            return Ok(None);
        };
        let socket = new_socket()?;
        match connect(socket.as_raw_fd(), &at) {
            Ok(()) => {}
            Err(nix::Error::ECONNREFUSED) => return Ok(None),
            Err(errno) => return Err(to_errno(errno)),
        }
        Ok(self.is_peer_allowed(&socket).then_some(socket))
    }

    /// Accepts the next connection to a listening socket; `None` if there is none, or the
    /// peer is not part of this network.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM: the connection stays queued.
    pub(super) fn accept(&self, listener: &OwnedFd) -> Result<Option<OwnedFd>> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = match accept4(listener.as_raw_fd(), flags) {
            Ok(fd) => fd,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => return Ok(None),
            Err(errno) => return Err(to_errno(errno)),
        };
        // SAFETY: the descriptor is new and owned by nothing else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(self.is_peer_allowed(&socket).then_some(socket))
    }

    /// Returns whether the peer may be part of this network. The permissions of a directory
    /// protect its sockets; abstract sockets are open to all processes of the host.
    fn is_peer_allowed(&self, socket: &OwnedFd) -> bool {
        match self {
            Self::Directory(_) => true,
            Self::Process(_) | Self::Hosts(..) => {
                getsockopt(&socket.as_fd(), sockopt::PeerCredentials)
                    .is_ok_and(|peer| u32::try_from(peer.pid()) == Ok(std::process::id()))
            }
        }
    }
}

impl BoundPort {
    pub(super) fn port(&self) -> u16 {
        self.key.1
    }

    /// Listens; at most `backlog` connections are queued.
    pub(super) fn listen(&self, backlog: u32) -> Result<OwnedFd> {
        let listener = match &*self.ports {
            Ports::Process(_) | Ports::Hosts(..) => {
                let listener = new_socket()?;
                bind(listener.as_raw_fd(), &UnixAddr::new_unnamed()).map_err(to_errno)?;
                listener
            }
            Ports::Directory(directory) => match directory.bind(&socket_name(self.key))? {
                Some(listener) => listener,
                None => return refuse(libc::EADDRINUSE),
            },
        };
        // The kernel queues one connection more than requested.
        let waiting = i32::try_from(backlog.saturating_sub(1)).unwrap_or(i32::MAX);
        let backlog = Backlog::new(waiting.min(i32::from(u16::MAX >> 4))).map_err(to_errno)?;
        listen(&listener, backlog).map_err(to_errno)?;
        if let Ports::Process(table) | Ports::Hosts(HostPorts { table, .. }) = &*self.ports {
            let name = getsockname::<UnixAddr>(listener.as_raw_fd()).map_err(to_errno)?;
            lock(table).entry(self.key).or_default().listener = Some(name);
        }
        Ok(listener)
    }
}

impl Drop for BoundPort {
    fn drop(&mut self) {
        match &*self.ports {
            Ports::Process(table) | Ports::Hosts(HostPorts { table, .. }) => {
                let mut table = lock(table);
                if let (Some(entry), Some(shared)) = (table.remove(&self.key), self.ports.shared())
                {
                    shared.release(self.key, entry);
                }
            }
            Ports::Directory(directory) => {
                // The socket exists only if the port was listening. The lock's
                // file is removed while locked: a process that has just opened
                // it detects that.
                directory.remove_socket(&socket_name(self.key));
                directory.remove_lock(&lock_name(self.key));
            }
        }
        drop(self.lock.take());
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::directory::Sharing;

    const SPACE: u16 = 0x106;

    fn joined(path: &Path) -> Arc<Ports> {
        let directory = Directory::open(path, Sharing::Own).unwrap();
        Arc::new(Ports::new(Some(Arc::new(directory))))
    }

    fn with_both_kinds(name: &str, test: impl Fn(&dyn Fn() -> Arc<Ports>)) {
        let process = Arc::new(Ports::new(None));
        test(&|| Arc::clone(&process));
        let name = format!("ringverbs-ports-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        // Two instances, as in two processes.
        test(&|| joined(&directory));
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        std::fs::remove_dir(&directory).unwrap();
    }

    #[test]
    fn a_port_is_exclusive_until_released() {
        with_both_kinds("taken", |ports| {
            let entry = ports().reserve(SPACE, 7471).unwrap();
            let again = ports().reserve(SPACE, 7471).unwrap_err();
            assert_eq!(again.raw(), libc::EADDRINUSE);
            ports().reserve(SPACE + 1, 7471).unwrap();
            drop(entry);
            let entry = ports().reserve(SPACE, 7471).unwrap();
            let chosen: Vec<_> = (0..20)
                .map(|_| ports().reserve(SPACE, 0).unwrap())
                .collect();
            let mut numbers: Vec<u16> = chosen.iter().map(BoundPort::port).collect();
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!((numbers.len(), entry.port()), (20, 7471));
            assert!(numbers.iter().all(|port| *port >= FIRST_EPHEMERAL));
        });
    }

    #[test]
    fn the_backlog_is_limited() {
        with_both_kinds("backlog", |ports| {
            let entry = ports().reserve(SPACE, 7471).unwrap();
            let connect = || ports().connect((SPACE, 7471));
            assert!(connect().unwrap().is_none(), "bound but not listening");
            let listener = entry.listen(3).unwrap();
            let waiting: Vec<_> = (0..3).map(|_| connect().unwrap().unwrap()).collect();
            assert_eq!(connect().unwrap_err().raw(), libc::EAGAIN);
            for _ in &waiting {
                ports().accept(&listener).unwrap().unwrap();
            }
            assert!(ports().accept(&listener).unwrap().is_none());
            drop((entry, listener));
            assert!(connect().unwrap().is_none());
        });
    }

    #[test]
    fn leftovers_of_a_killed_process_are_replaced() {
        let name = format!("ringverbs-ports-left-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let ports = joined(&directory);
        let key = (SPACE, 7471);
        File::create(directory.join(lock_name(key))).unwrap();
        let left = new_socket().unwrap();
        let at = UnixAddr::new(&directory.join(socket_name(key))).unwrap();
        bind(left.as_raw_fd(), &at).unwrap();
        drop(left);
        assert!(ports.connect(key).unwrap().is_none());
        let entry = ports.reserve(SPACE, 7471).unwrap();
        let listener = entry.listen(0).unwrap();
        let reached = ports.connect(key).unwrap();
        assert!(reached.is_some() && ports.accept(&listener).unwrap().is_some());
        drop(entry);
        std::fs::remove_dir(&directory).unwrap();
    }

    /// A name that exists but is not a file of this user counts as a port in use.
    #[test]
    fn a_bound_port_is_in_use() {
        let name = format!("ringverbs-ports-other-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let ports = joined(&directory);
        std::os::unix::fs::symlink("/dev/null", directory.join(lock_name((SPACE, 1)))).unwrap();
        std::fs::create_dir(directory.join(lock_name((SPACE, 2)))).unwrap();
        for port in [1, 2] {
            let error = ports.reserve(SPACE, port).unwrap_err();
            assert_eq!(error.raw(), libc::EADDRINUSE);
        }
        File::create(directory.join(socket_name((SPACE, 3)))).unwrap();
        let entry = ports.reserve(SPACE, 3).unwrap();
        assert_eq!(entry.listen(1).unwrap_err().raw(), libc::EADDRINUSE);
        assert!(ports.connect((SPACE, 3)).unwrap().is_none());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// A process's own ports reject other processes that have found the name.
    /// Runs this program again as the other process.
    #[test]
    fn only_processes_of_this_user_are_admitted() {
        const NAME: &str = "RINGVERBS_PORT_OF_ANOTHER";
        if let Ok(name) = std::env::var(NAME) {
            let at = UnixAddr::new_abstract(name.as_bytes()).unwrap();
            return connect(new_socket().unwrap().as_raw_fd(), &at).unwrap();
        }
        let ports = Arc::new(Ports::new(None));
        let entry = ports.reserve(SPACE, 1).unwrap();
        let listener = entry.listen(2).unwrap();
        let name = getsockname::<UnixAddr>(listener.as_raw_fd()).unwrap();
        let name = String::from_utf8(name.as_abstract().unwrap().to_vec()).unwrap();
        let other_process = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "cm::ports::tests::only_processes_of_this_user_are_admitted",
                "--exact",
            ])
            .env(NAME, name)
            .stdout(std::process::Stdio::null())
            .status();
        assert!(other_process.unwrap().success());
        assert!(ports.accept(&listener).unwrap().is_none());
        let own = ports.connect((SPACE, 1)).unwrap();
        assert!(own.is_some() && ports.accept(&listener).unwrap().is_some());
    }
}
