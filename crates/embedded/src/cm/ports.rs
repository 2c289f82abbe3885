//! Port spaces of a network, and connections between the two ends.
//!
//! In a network of a directory, each connection to a listening port is a pair of Unix sockets,
//! which carry the messages of two ends. The system closes the sockets of a process that ends.
//! Each bound port has files in the directory; locks on them show which processes own the
//! port, and for which addresses. In a network of one process a connection is in memory, so
//! that it needs no descriptors, and other processes have nothing to connect to.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{Backlog, SockFlag, accept4, listen};
use roce::packet::gid_of_ip;
use uverbs::Errno;

use super::gateway::Dialer;
use super::link::{End, Link};
use crate::addresses::SharedPorts;
use crate::directory::Directory;
use crate::random::random;
use crate::{Result, refuse};

/// First ephemeral port; the last is 65534.
const FIRST_EPHEMERAL: u16 = 32768;

/// The port spaces of a network.
#[derive(Debug)]
pub(super) enum Ports {
    /// Ports of this process alone.
    Process(Mutex<PortTable>),
    /// Ports shared by the processes of a directory.
    Directory(Arc<Directory>, Mutex<PortTable>),
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

/// A port space, and a port of it.
pub(super) type PortKey = (u16, u16);

/// The address that a port is bound at. Rules are those of rdma_cm (`cma_check_port`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) ip: IpAddr,
    /// The other address family is not affected, unless its owner affects this one.
    pub(super) family_only: bool,
}

impl Binding {
    /// Returns that of the IPv4 wildcard.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn to_all() -> Self {
        Self {
            ip: Ipv4Addr::UNSPECIFIED.into(),
            family_only: true,
        }
    }

    /// Returns whether the address stands for all: as in rdma_cm, also a loopback address.
    fn is_any(self) -> bool {
        self.ip.is_unspecified() || self.ip.is_loopback()
    }

    /// Returns whether the binding affects an address family.
    fn has_family(self, is_ipv4: bool) -> bool {
        !self.family_only || self.ip.is_ipv4() == is_ipv4
    }

    /// Returns whether the binding needs the port of an address.
    fn covers(self, ip: IpAddr) -> bool {
        match self.is_any() {
            true => self.has_family(ip.is_ipv4()),
            false => self.ip == ip,
        }
    }

    /// Checks that both can have the same port.
    ///
    /// # Errors
    /// EADDRNOTAVAIL, EADDRINUSE.
    fn check(self, other: Self) -> Result<()> {
        let same_family = self.ip.is_ipv4() == other.ip.is_ipv4();
        if self.family_only && other.family_only && !same_family {
            return Ok(());
        }
        if self.is_any() || other.is_any() {
            return refuse(libc::EADDRNOTAVAIL);
        }
        if self.ip == other.ip {
            return refuse(libc::EADDRINUSE);
        }
        Ok(())
    }
}

/// Returns the addresses at which requests to an address may be accepted, the best one first.
/// Whether one is, its listener decides.
fn listening_addresses(to: IpAddr) -> [IpAddr; 3] {
    let (v4, v6) = (Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into());
    [to, if to.is_ipv4() { v4 } else { v6 }, v6]
}

/// Ports of this process.
pub(super) type PortTable = HashMap<PortKey, PortEntry>;

/// A port of this process.
#[derive(Debug, Default)]
pub(super) struct PortEntry {
    owners: Vec<Owner>,
    /// Locks on the port of each address, if other processes share the addresses.
    locks: Vec<(IpAddr, Flock<File>)>,
    /// Locks on the port's files in a directory.
    files: Vec<LockedFile>,
}

/// One that has a port.
#[derive(Debug)]
struct Owner {
    binding: Binding,
    /// Shares the port with others that do, until one listens.
    reuses: bool,
    queue: Arc<Queue>,
}

/// A locked file in a directory.
#[derive(Debug)]
struct LockedFile {
    name: String,
    exclusive: bool,
    lock: Flock<File>,
}

/// Connections to a listener of the same process, which it has not accepted.
#[derive(Debug, Default)]
struct Queue(Mutex<Option<Waiting>>);

#[derive(Debug)]
struct Waiting {
    ends: VecDeque<End>,
    backlog: usize,
    /// Counts the ends.
    ready: EventFd,
}

impl Queue {
    /// Returns a descriptor that is readable while connections wait.
    fn listen(&self, backlog: u32) -> Result<OwnedFd> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_SEMAPHORE;
        let ready = EventFd::from_value_and_flags(0, flags).map_err(to_errno)?;
        let descriptor = OwnedFd::from(ready);
        let ready = descriptor
            .try_clone()
            .map_err(|_| Errno::new(libc::EMFILE))?;
        // SAFETY: a copy of an eventfd.
        let ready = unsafe { EventFd::from_owned_fd(ready) };
        *lock(&self.0) = Some(Waiting {
            ends: VecDeque::new(),
            // The kernel accepts one connection with a backlog of 0.
            backlog: backlog.max(1) as usize,
            ready,
        });
        Ok(descriptor)
    }

    fn is_listening(&self) -> bool {
        lock(&self.0).is_some()
    }

    /// Hands over one end of a new connection, and returns the other one.
    fn connect(&self) -> Result<Option<End>> {
        let mut waiting = lock(&self.0);
        let Some(waiting) = waiting.as_mut() else {
            return Ok(None);
        };
        if waiting.ends.len() >= waiting.backlog {
            return refuse(libc::EAGAIN);
        }
        let (near, far) = End::pair();
        waiting.ends.push_back(far);
        // Fails only if the counter is full, which also wakes.
        let _ = waiting.ready.write(1);
        Ok(Some(near))
    }

    fn accept(&self) -> Option<End> {
        let mut waiting = lock(&self.0);
        let waiting = waiting.as_mut()?;
        let _ = waiting.ready.read();
        waiting.ends.pop_front()
    }
}

/// A port in use. Dropping it releases the port.
#[derive(Debug)]
pub(super) struct BoundPort {
    ports: Arc<Ports>,
    key: PortKey,
    ip: IpAddr,
    queue: Arc<Queue>,
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

/// Name of the lock on a port of an address.
fn lock_name_of((space, port): PortKey, address: IpAddr) -> String {
    let bits = u128::from_be_bytes(gid_of_ip(address));
    format!("cm-{space:x}-{port}-{bits:032x}.lock")
}

/// Name of the lock on a port of all addresses of a family. Owners of one address share it.
fn family_lock_name((space, port): PortKey, is_ipv4: bool) -> String {
    let family = if is_ipv4 { 4 } else { 6 };
    format!("cm-{space:x}-{port}-{family}.lock")
}

/// Name of the socket that listens at an address.
fn socket_name((space, port): PortKey, address: IpAddr) -> String {
    let bits = u128::from_be_bytes(gid_of_ip(address));
    format!("cm-{space:x}-{port}-{bits:032x}.socket")
}

/// Returns the names of the files in a directory that a binding locks, whether exclusively,
/// and the error if another process has the lock.
fn files_of(key: PortKey, binding: Binding) -> Vec<(String, bool, i32)> {
    let all = binding.is_any();
    let families = [true, false].into_iter();
    let families = families.filter(|it| binding.has_family(*it));
    let mut names: Vec<_> = families
        .map(|it| (family_lock_name(key, it), all, libc::EADDRNOTAVAIL))
        .collect();
    if !all {
        names.push((lock_name_of(key, binding.ip), true, libc::EADDRINUSE));
    }
    names
}

/// Locks the files of a port in a directory, but those that are locked for another owner of
/// this process.
fn lock_in(
    directory: &Directory,
    key: PortKey,
    binding: Binding,
    files: &mut Vec<LockedFile>,
) -> Result<()> {
    let known = files.len();
    for (name, exclusive, errno) in files_of(key, binding) {
        let held = files.iter().find(|it| it.name == name);
        let locked = match held {
            Some(held) if held.exclusive || !exclusive => continue,
            // A shared lock cannot be converted without losing it.
            Some(_) => Ok(None),
            None if exclusive => directory.lock(&name),
            None => directory.lock_shared(&name),
        };
        match locked {
            Ok(Some(lock)) => files.push(LockedFile {
                name,
                exclusive,
                lock,
            }),
            other => {
                unlock_in(directory, files.split_off(known));
                return other.and(refuse(errno));
            }
        }
    }
    Ok(())
}

/// Releases locks, and removes the files of those that no other process shares.
fn unlock_in(directory: &Directory, files: Vec<LockedFile>) {
    for file in files {
        // A process that has just opened the file detects that it was removed.
        if file.lock.relock(FlockArg::LockExclusiveNonblock).is_ok() {
            directory.remove_lock(&file.name);
        }
    }
}

/// Beside the member's number in the file of a lock: the owner has the port of all addresses.
const OF_ALL: &str = "all";

impl SharedPorts {
    /// Reserves a port of all addresses that a binding covers.
    ///
    /// # Errors
    /// Those of a port that another process has; errors of the directory.
    fn reserve(&self, key: PortKey, binding: Binding, entry: &mut PortEntry) -> Result<()> {
        let known = entry.locks.len();
        for address in self.addresses.all() {
            if binding.covers(address.ip) {
                if let Err(errno) = self.reserve_at(key, address.ip, binding, entry) {
                    self.release(key, entry.locks.split_off(known));
                    return Err(errno);
                }
            }
        }
        Ok(())
    }

    /// Reserves a port also at one more address.
    ///
    /// # Errors
    /// As for [`reserve`](Self::reserve).
    fn reserve_at(
        &self,
        key: PortKey,
        address: IpAddr,
        binding: Binding,
        entry: &mut PortEntry,
    ) -> Result<()> {
        if entry.locks.iter().any(|(known, _)| *known == address) {
            return Ok(());
        }
        let name = lock_name_of(key, address);
        let Some(lock) = self.directory.lock(&name)? else {
            let text = self.directory.read(&name).unwrap_or_default();
            return refuse(match binding.is_any() || text.ends_with(OF_ALL) {
                true => libc::EADDRNOTAVAIL,
                false => libc::EADDRINUSE,
            });
        };
        entry.locks.push((address, lock));
        // Tells other members which one owns the port.
        let of_all = if binding.is_any() { OF_ALL } else { "" };
        let text = format!("{} {of_all}", self.member);
        self.directory.write(&name, &text)
    }

    /// Removes the files of the locks, which are held until then.
    fn release(&self, key: PortKey, locks: Vec<(IpAddr, Flock<File>)>) {
        for (address, _lock) in locks {
            self.directory.remove_lock(&lock_name_of(key, address));
        }
    }

    /// Returns the number of the process that has a port of an address.
    fn member_of(&self, key: PortKey, address: IpAddr) -> Option<u8> {
        let text = self.directory.read(&lock_name_of(key, address))?;
        text.split(' ').next()?.parse().ok()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ports {
    pub(super) fn new(directory: Option<Arc<Directory>>) -> Self {
        match directory {
            None => Self::Process(Mutex::default()),
            Some(directory) => Self::Directory(directory, Mutex::default()),
        }
    }

    fn table(&self) -> &Mutex<PortTable> {
        match self {
            Self::Process(table) | Self::Directory(_, table) => table,
            Self::Hosts(hosts) => &hosts.table,
        }
    }

    /// Reserves a port; 0 selects any free one. One that `reuses` it shares it with others of
    /// this process that do.
    ///
    /// # Errors
    /// EADDRNOTAVAIL, EADDRINUSE, as in rdma_cm; errors of the directory.
    pub(super) fn reserve(
        self: &Arc<Self>,
        space: u16,
        port: u16,
        binding: Binding,
        reuses: bool,
    ) -> Result<BoundPort> {
        if port != 0 {
            return self.reserve_exactly((space, port), binding, reuses);
        }
        let count = u16::MAX - FIRST_EPHEMERAL;
        let first = (random() % u64::from(count)) as u16;
        for step in 0..count {
            let port = FIRST_EPHEMERAL + (first + step) % count;
            match self.reserve_exactly((space, port), binding, reuses) {
                Err(errno) if [libc::EADDRINUSE, libc::EADDRNOTAVAIL].contains(&errno.raw()) => {}
                other => return other,
            }
        }
        refuse(libc::EADDRNOTAVAIL)
    }

    fn reserve_exactly(
        self: &Arc<Self>,
        key: PortKey,
        binding: Binding,
        reuses: bool,
    ) -> Result<BoundPort> {
        let queue = Arc::<Queue>::default();
        let mut table = lock(self.table());
        let mut new = PortEntry::default();
        let entry = table.get_mut(&key).unwrap_or(&mut new);
        for owner in &entry.owners {
            if !(reuses && owner.reuses) {
                binding.check(owner.binding)?;
            }
        }
        if let Some(shared) = self.shared() {
            shared.reserve(key, binding, entry)?;
        }
        if let Self::Directory(directory, _) = &**self {
            lock_in(directory, key, binding, &mut entry.files)?;
        }
        entry.owners.push(Owner {
            binding,
            reuses,
            queue: Arc::clone(&queue),
        });
        if !new.owners.is_empty() {
            table.insert(key, new);
        }
        drop(table);
        Ok(BoundPort {
            ports: Arc::clone(self),
            key,
            ip: binding.ip,
            queue,
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
            let mut owners = entry.owners.iter().map(|owner| owner.binding);
            let Some(binding) = owners.find(|it| it.covers(address)) else {
                continue;
            };
            if let Err(errno) = shared.reserve_at(*key, address, binding, entry) {
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

    /// Connects to the listener on a port of an address; `None` if there is none. A connection
    /// to another host always succeeds at first.
    ///
    /// # Errors
    /// EAGAIN if the backlog is full.
    pub(super) fn connect(&self, key: PortKey, to: IpAddr) -> Result<Option<Link>> {
        match self {
            Self::Hosts(hosts) => Ok(Some(Link::Memory(hosts.dialer.dial()))),
            Self::Process(_) => Ok(self.connect_within(key, to)?.map(Link::Memory)),
            Self::Directory(directory, _) => {
                for address in listening_addresses(to) {
                    let socket = directory.connect(&socket_name(key, address))?;
                    if socket.is_some() {
                        return Ok(socket.map(Link::Socket));
                    }
                }
                Ok(None)
            }
        }
    }

    /// As [`connect`](Self::connect), to a listener of this process, unless a directory has
    /// the ports.
    pub(super) fn connect_within(&self, key: PortKey, to: IpAddr) -> Result<Option<End>> {
        let addresses = listening_addresses(to);
        let (Self::Process(table) | Self::Hosts(HostPorts { table, .. })) = self else {
            return Ok(None);
        };
        let table = lock(table);
        let Some(entry) = table.get(&key) else {
            return Ok(None);
        };
        // A loopback address stands for others, too.
        let rank = |binding: &Binding| {
            let at = addresses.iter().position(|it| *it == binding.ip);
            at.unwrap_or(addresses.len())
        };
        let listening = entry.owners.iter().filter(|it| it.queue.is_listening());
        let best = listening.min_by_key(|it| rank(&it.binding));
        best.map_or(Ok(None), |it| it.queue.connect())
    }
}

impl BoundPort {
    pub(super) fn port(&self) -> u16 {
        self.key.1
    }

    /// Changes this owner of the port.
    fn change(&self, change: impl FnOnce(&mut Owner)) {
        let mut table = lock(self.ports.table());
        let entry = table.get_mut(&self.key);
        let mut owners = entry.into_iter().flat_map(|it| &mut it.owners);
        if let Some(owner) = owners.find(|it| Arc::ptr_eq(&it.queue, &self.queue)) {
            change(owner);
        }
    }

    /// Shares the port from now on.
    pub(super) fn reuse(&self) {
        self.change(|owner| owner.reuses = true);
    }

    /// Sets whether the other address family is affected, for later owners of the port.
    pub(super) fn set_family_only(&self, family_only: bool) {
        self.change(|owner| owner.binding.family_only = family_only);
    }

    /// Ends the sharing of the port by this owner.
    ///
    /// # Errors
    /// EADDRNOTAVAIL, EADDRINUSE: another owner shares it.
    fn own(&self) -> Result<()> {
        let mut table = lock(self.ports.table());
        let Some(entry) = table.get_mut(&self.key) else {
            return Ok(());
        };
        let is_own = |it: &Owner| Arc::ptr_eq(&it.queue, &self.queue);
        let Some(index) = entry.owners.iter().position(is_own) else {
            return Ok(());
        };
        let binding = entry.owners[index].binding;
        for other in entry.owners.iter().filter(|it| !is_own(it)) {
            binding.check(other.binding)?;
        }
        entry.owners[index].reuses = false;
        Ok(())
    }

    /// Listens; at most `backlog` connections are queued.
    ///
    /// # Errors
    /// EADDRNOTAVAIL, EADDRINUSE: another owner shares the port; EMFILE, ENFILE, ENOMEM.
    pub(super) fn listen(&self, backlog: u32) -> Result<OwnedFd> {
        self.own()?;
        let Ports::Directory(directory, _) = &*self.ports else {
            return self.queue.listen(backlog);
        };
        let name = socket_name(self.key, self.ip);
        let Some(listener) = directory.bind(&name)? else {
            return refuse(libc::EADDRINUSE);
        };
        // The kernel queues one connection more than requested.
        let waiting = i32::try_from(backlog.saturating_sub(1)).unwrap_or(i32::MAX);
        let backlog = Backlog::new(waiting.min(i32::from(u16::MAX >> 4))).map_err(to_errno)?;
        listen(&listener, backlog).map_err(to_errno)?;
        Ok(listener)
    }

    /// Accepts the next connection to the listener; `None` if there is none.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM: the connection stays queued.
    pub(super) fn accept(&self, listener: &OwnedFd) -> Result<Option<Link>> {
        let Ports::Directory(..) = &*self.ports else {
            return Ok(self.queue.accept().map(Link::Memory));
        };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        match accept4(listener.as_raw_fd(), flags) {
            // SAFETY: the descriptor is new and owned by nothing else.
            Ok(fd) => Ok(Some(Link::Socket(unsafe { OwnedFd::from_raw_fd(fd) }))),
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => Ok(None),
            Err(errno) => Err(to_errno(errno)),
        }
    }
}

impl Drop for BoundPort {
    fn drop(&mut self) {
        let mut table = lock(self.ports.table());
        let Some(entry) = table.get_mut(&self.key) else {
            return;
        };
        entry
            .owners
            .retain(|owner| !Arc::ptr_eq(&owner.queue, &self.queue));
        let bindings: Vec<Binding> = entry.owners.iter().map(|owner| owner.binding).collect();
        if let Some(shared) = self.ports.shared() {
            let (kept, free) = std::mem::take(&mut entry.locks)
                .into_iter()
                .partition(|(ip, _)| bindings.iter().any(|it| it.covers(*ip)));
            entry.locks = kept;
            shared.release(self.key, free);
        }
        if let Ports::Directory(directory, _) = &*self.ports {
            // The socket exists only if the port was listening.
            directory.remove_socket(&socket_name(self.key, self.ip));
            let needed = |file: &LockedFile| {
                let mut names = bindings.iter().flat_map(|it| files_of(self.key, *it));
                names.any(|(name, ..)| name == file.name)
            };
            let (kept, free) = std::mem::take(&mut entry.files)
                .into_iter()
                .partition(needed);
            entry.files = kept;
            unlock_in(directory, free);
        }
        if entry.owners.is_empty() {
            table.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use nix::sys::socket::{UnixAddr, bind, getsockname};

    use super::*;
    use crate::directory::{Sharing, new_socket};

    const SPACE: u16 = 0x106;
    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const AT: Binding = Binding {
        ip: LOCAL,
        family_only: true,
    };

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
            let entry = ports().reserve(SPACE, 7471, AT, false).unwrap();
            let again = ports().reserve(SPACE, 7471, AT, false).unwrap_err();
            assert_eq!(again.raw(), libc::EADDRNOTAVAIL);
            ports().reserve(SPACE + 1, 7471, AT, false).unwrap();
            drop(entry);
            let entry = ports().reserve(SPACE, 7471, AT, false).unwrap();
            let chosen: Vec<_> = (0..20)
                .map(|_| ports().reserve(SPACE, 0, AT, false).unwrap())
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
            let entry = ports().reserve(SPACE, 7471, AT, false).unwrap();
            let connect = || ports().connect((SPACE, 7471), LOCAL);
            assert!(connect().unwrap().is_none(), "bound but not listening");
            let listener = entry.listen(3).unwrap();
            let waiting: Vec<_> = (0..3).map(|_| connect().unwrap().unwrap()).collect();
            assert_eq!(connect().unwrap_err().raw(), libc::EAGAIN);
            for _ in &waiting {
                entry.accept(&listener).unwrap().unwrap();
            }
            assert!(entry.accept(&listener).unwrap().is_none());
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
        File::create(directory.join(family_lock_name(key, true))).unwrap();
        let left = new_socket().unwrap();
        let at = UnixAddr::new(&directory.join(socket_name(key, LOCAL))).unwrap();
        bind(left.as_raw_fd(), &at).unwrap();
        drop(left);
        assert!(ports.connect(key, LOCAL).unwrap().is_none());
        let entry = ports.reserve(SPACE, 7471, AT, false).unwrap();
        let listener = entry.listen(0).unwrap();
        let reached = ports.connect(key, LOCAL).unwrap();
        assert!(reached.is_some() && entry.accept(&listener).unwrap().is_some());
        drop(entry);
        std::fs::remove_dir(&directory).unwrap();
    }

    /// A name that exists but is not a file of this user counts as a port in use.
    #[test]
    fn a_bound_port_is_in_use() {
        let name = format!("ringverbs-ports-other-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let ports = joined(&directory);
        std::os::unix::fs::symlink(
            "/dev/null",
            directory.join(family_lock_name((SPACE, 1), true)),
        )
        .unwrap();
        std::fs::create_dir(directory.join(family_lock_name((SPACE, 2), true))).unwrap();
        for port in [1, 2] {
            let error = ports.reserve(SPACE, port, AT, false).unwrap_err();
            assert_eq!(error.raw(), libc::EADDRNOTAVAIL);
        }
        File::create(directory.join(socket_name((SPACE, 3), LOCAL))).unwrap();
        let entry = ports.reserve(SPACE, 3, AT, false).unwrap();
        assert_eq!(entry.listen(1).unwrap_err().raw(), libc::EADDRINUSE);
        assert!(ports.connect((SPACE, 3), LOCAL).unwrap().is_none());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// The rules of rdma_cm, seen with Linux 6.12.
    #[test]
    fn addresses_share_a_port_as_in_rdma_cm() {
        const NONE: i32 = 0;
        let (not_available, in_use) = (libc::EADDRNOTAVAIL, libc::EADDRINUSE);
        let cases = [
            ("0.0.0.0", true, "0.0.0.0", true, not_available),
            ("127.0.0.1", true, "127.0.0.1", true, not_available),
            ("127.0.0.1", true, "127.0.0.2", true, not_available),
            ("0.0.0.0", true, "192.0.2.1", true, not_available),
            ("192.0.2.1", true, "0.0.0.0", true, not_available),
            ("192.0.2.1", true, "127.0.0.1", true, not_available),
            ("192.0.2.1", true, "192.0.2.1", true, in_use),
            ("192.0.2.1", true, "192.0.2.2", true, NONE),
            ("2001:db8::1", false, "2001:db8::1", false, in_use),
            ("2001:db8::1", false, "2001:db8::1", true, in_use),
            ("2001:db8::1", false, "192.0.2.1", true, NONE),
            ("2001:db8::1", false, "0.0.0.0", true, not_available),
            ("2001:db8::1", true, "0.0.0.0", true, NONE),
            ("::", false, "0.0.0.0", true, not_available),
            ("::", true, "0.0.0.0", true, NONE),
            ("::", true, "0.0.0.0", false, not_available),
            ("::", true, "192.0.2.1", true, NONE),
            ("::1", true, "127.0.0.1", true, NONE),
            ("::1", false, "127.0.0.1", true, not_available),
        ];
        let binding = |ip: &str, family_only| Binding {
            ip: ip.parse().unwrap(),
            family_only,
        };
        with_both_kinds("rules", |ports| {
            for (a, a_only, b, b_only, expected) in cases {
                for swapped in [false, true] {
                    let (mut one, mut two) = (binding(a, a_only), binding(b, b_only));
                    if swapped {
                        std::mem::swap(&mut one, &mut two);
                    }
                    let first = ports().reserve(SPACE, 7471, one, false).unwrap();
                    let second = ports().reserve(SPACE, 7471, two, false);
                    let errno = second.as_ref().map_or_else(|errno| errno.raw(), |_| NONE);
                    assert_eq!(errno, expected, "{a} {a_only}, {b} {b_only}, {swapped}");
                    if let Ok(second) = second {
                        let there = second.listen(2).unwrap();
                        let here = first.listen(2).unwrap();
                        let key = (SPACE, 7471);
                        let _to_second = ports().connect(key, two.ip).unwrap().unwrap();
                        assert!(second.accept(&there).unwrap().is_some());
                        assert!(first.accept(&here).unwrap().is_none());
                        let _to_first = ports().connect(key, one.ip).unwrap().unwrap();
                        assert!(first.accept(&here).unwrap().is_some());
                        drop(second);
                        // The other one keeps the port.
                        assert!(ports().reserve(SPACE, 7471, one, false).is_err());
                    }
                    drop(first);
                    ports().reserve(SPACE, 7471, two, false).unwrap();
                }
            }
        });
    }

    /// Ids of a process share a port until one listens, as in rdma_cm.
    #[test]
    fn a_reused_port_has_one_listener() {
        let mixed = [
            AT,
            Binding {
                ip: Ipv4Addr::new(192, 0, 2, 1).into(),
                ..AT
            },
        ];
        for other in mixed {
            with_both_kinds("reused", |ports| {
                let process = ports();
                let reserve = |binding, reuses| process.reserve(SPACE, 7471, binding, reuses);
                let refused = |result: Result<BoundPort>| result.map(drop).unwrap_err().raw();
                let (first, second) = (reserve(AT, true).unwrap(), reserve(other, true).unwrap());
                assert_eq!(refused(reserve(AT, false)), libc::EADDRNOTAVAIL);
                assert_eq!(
                    first.listen(1).map(drop).unwrap_err().raw(),
                    libc::EADDRNOTAVAIL
                );
                drop(second);
                let _listener = first.listen(1).unwrap();
                assert_eq!(refused(reserve(other, true)), libc::EADDRNOTAVAIL);
                drop(first);
                let first = reserve(AT, false).unwrap();
                assert_eq!(refused(reserve(other, true)), libc::EADDRNOTAVAIL);
                first.reuse();
                let second = reserve(other, true).unwrap();
                drop(first);
                assert!(ports().reserve(SPACE, 7471, other, false).is_err());
                drop(second);
                ports().reserve(SPACE, 7471, AT, false).unwrap();
            });
        }
    }

    /// Other processes have nothing to connect to: a listener in a network of one process is
    /// no socket.
    #[test]
    fn a_network_of_one_process_has_no_listening_socket() {
        let ports = Arc::new(Ports::new(None));
        let entry = ports.reserve(SPACE, 1, AT, false).unwrap();
        let listener = entry.listen(2).unwrap();
        let own = std::fs::metadata(format!("/proc/self/fd/{}", listener.as_raw_fd()));
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        let number = own.unwrap().ino().to_string();
        assert!(
            !sockets
                .lines()
                .any(|it| it.split_whitespace().nth(6) == Some(&number))
        );
        assert!(getsockname::<UnixAddr>(listener.as_raw_fd()).is_err());
        let socket = ports.connect((SPACE, 1), LOCAL).unwrap();
        assert!(socket.is_some() && entry.accept(&listener).unwrap().is_some());
    }
}
