//! Port spaces of a network, and who has a port.
//!
//! In a network of a directory, each bound port has files there; locks on them show which
//! processes own the port, and for which addresses. One that listens writes its number to the
//! files that it alone locks, and gets the requests of others. Such a number may be out of date:
//! the process that it names rejects the request. A child of fork has the same open files, so the
//! locks last until the last process with them has closed them, or one has released them.

use std::collections::HashMap;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{Flock, FlockArg};
use roce::packet::gid_of_ip;
use uverbs::Errno;

use super::message::Message;
use crate::addresses::SharedPorts;
use crate::directory::Directory;
use crate::random::{Random, random};
use crate::wires::agent::Peer;
use crate::{Result, refuse};

/// First ephemeral port; the last is 65534.
const FIRST_EPHEMERAL: u16 = 32768;

/// The port spaces of a network.
#[derive(Debug)]
pub(super) struct Ports {
    table: Mutex<PortTable>,
    reach: Reach,
    /// Ephemeral ports, and packet sequence numbers of ids.
    pub(super) random: Random,
}

/// The scope of the port spaces.
#[derive(Debug)]
enum Reach {
    /// This process alone.
    Process,
    /// The nodes of a simulated network, which share them.
    Nodes,
    /// The processes of a directory, in which this one has a number.
    Directory(Arc<Directory>, u16),
    /// Other hosts reach them. They are of this process, or of all that share its addresses.
    Hosts(Option<SharedPorts>),
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

/// Returns how well a listener at an address suits requests to another one; less is better.
/// Whether it accepts them, it decides itself.
pub(super) fn rank(at: IpAddr, to: IpAddr) -> u8 {
    match at {
        _ if at == to => 0,
        _ if at.is_unspecified() && at.is_ipv4() == to.is_ipv4() => 1,
        _ if at.is_unspecified() => 2,
        // A loopback address stands for others, too.
        _ => 3,
    }
}

/// Ports of this process.
type PortTable = HashMap<PortKey, PortEntry>;

/// A port of this process.
#[derive(Debug, Default)]
struct PortEntry {
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
    number: u64,
}

/// A locked file in a directory.
#[derive(Debug)]
struct LockedFile {
    name: String,
    exclusive: bool,
    lock: Flock<File>,
}

/// A port in use. Dropping it releases the port.
#[derive(Debug)]
pub(super) struct BoundPort {
    ports: Arc<Ports>,
    key: PortKey,
    /// Number of this owner.
    owner: u64,
}

/// A port of a parent process, with the descriptors of its locks.
#[derive(Clone, Debug)]
pub(super) struct InheritedPort {
    key: PortKey,
    binding: Binding,
    reuses: bool,
    locks: Vec<(IpAddr, RawFd)>,
    /// With names, and whether they are exclusive.
    files: Vec<(String, bool, RawFd)>,
}

impl InheritedPort {
    /// Returns the descriptors.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let locks = self.locks.iter().map(|(_, fd)| *fd);
        locks.chain(self.files.iter().map(|(.., fd)| *fd))
    }
}

/// Returns the lock that a parent process has, which the descriptor shares.
fn inherited_lock(fd: RawFd, exclusive: bool) -> Result<Flock<File>> {
    // SAFETY: a descriptor that the parent process has left open in this one.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let owned = fd.try_clone_to_owned();
    let owned = owned.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EBADF)))?;
    let kind = match exclusive {
        true => FlockArg::LockExclusiveNonblock,
        false => FlockArg::LockSharedNonblock,
    };
    Flock::lock(File::from(owned), kind).or_else(|_| refuse(libc::EADDRINUSE))
}

/// Closes the file of a lock, which stays locked while another process has the file.
fn close_unreleased(lock: Flock<File>) {
    // SAFETY: the descriptor is the lock's, which is forgotten instead of dropped.
    drop(unsafe { OwnedFd::from_raw_fd(lock.as_raw_fd()) });
    std::mem::forget(lock);
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
/// In the file of a lock, after all else: a child of fork may come to listen in the place of the
/// process that is named.
const INHERITED: &str = "inherited";

/// Returns the words of the file of a lock.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.lines().next().unwrap_or_default().split(' ')
}

/// Returns the number of a process in the file of a lock.
fn number_in<T: FromStr>(text: &str) -> Option<T> {
    words(text).next()?.parse().ok()
}

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
            let is_of_all = words(&text).any(|word| word == OF_ALL);
            return refuse(match binding.is_any() || is_of_all {
                true => libc::EADDRNOTAVAIL,
                false => libc::EADDRINUSE,
            });
        };
        entry.locks.push((address, lock));
        self.publish(key, address, binding, "")
    }

    /// Tells other members that this one owns a port, and more.
    fn publish(&self, key: PortKey, address: IpAddr, binding: Binding, more: &str) -> Result<()> {
        let of_all = if binding.is_any() { OF_ALL } else { "" };
        let text = format!("{} {of_all} {more}", self.member);
        let name = lock_name_of(key, address);
        self.directory.publish(&name, text.trim_end())
    }

    /// Removes the files of the locks, which are held until then.
    fn release(&self, key: PortKey, locks: Vec<(IpAddr, Flock<File>)>) {
        for (address, _lock) in locks {
            self.directory.remove_lock(&lock_name_of(key, address));
        }
    }

    /// Returns the number of the process that has a port of an address.
    fn member_of(&self, key: PortKey, address: IpAddr) -> Option<u8> {
        number_in(&self.directory.read(&lock_name_of(key, address))?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ports {
    /// Returns the ports of a process, or those of a directory, in which the process has a number.
    pub(super) fn new(directory: Option<(Arc<Directory>, u16)>) -> Self {
        Self::of(match directory {
            None => Reach::Process,
            Some((directory, member)) => Reach::Directory(directory, member),
        })
    }

    /// Returns the ports of a simulated network, whose random numbers a seed determines.
    pub(super) fn of_nodes(seed: u64) -> Self {
        Self {
            random: Random::seeded(seed),
            ..Self::of(Reach::Nodes)
        }
    }

    /// Returns ports that other hosts reach.
    pub(super) fn of_hosts(shared: Option<SharedPorts>) -> Self {
        Self::of(Reach::Hosts(shared))
    }

    fn of(reach: Reach) -> Self {
        Self {
            table: Mutex::default(),
            reach,
            random: Random::Host,
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
        let first = (self.random.next() % u64::from(count)) as u16;
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
        let number = random();
        let mut table = lock(&self.table);
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
        if let Reach::Directory(directory, _) = &self.reach {
            lock_in(directory, key, binding, &mut entry.files)?;
        }
        entry.owners.push(Owner {
            binding,
            reuses,
            number,
        });
        if !new.owners.is_empty() {
            table.insert(key, new);
        }
        drop(table);
        Ok(BoundPort {
            ports: Arc::clone(self),
            key,
            owner: number,
        })
    }

    /// Takes a port of the parent process.
    ///
    /// # Errors
    /// EADDRINUSE: the parent no longer has it; errors of the directory.
    pub(super) fn inherit(self: &Arc<Self>, port: &InheritedPort) -> Result<BoundPort> {
        let number = random();
        let mut table = lock(&self.table);
        let mut new = PortEntry::default();
        let entry = table.get_mut(&port.key).unwrap_or(&mut new);
        for (ip, fd) in &port.locks {
            if entry.locks.iter().all(|(known, _)| known != ip) {
                entry.locks.push((*ip, inherited_lock(*fd, true)?));
                if let Some(shared) = self.shared() {
                    shared.publish(port.key, *ip, port.binding, "")?;
                }
            }
        }
        for (name, exclusive, fd) in &port.files {
            if entry.files.iter().all(|it| it.name != *name) {
                entry.files.push(LockedFile {
                    name: name.clone(),
                    exclusive: *exclusive,
                    lock: inherited_lock(*fd, *exclusive)?,
                });
            }
        }
        entry.owners.push(Owner {
            binding: port.binding,
            reuses: port.reuses,
            number,
        });
        if !new.owners.is_empty() {
            table.insert(port.key, new);
        }
        drop(table);
        Ok(BoundPort {
            ports: Arc::clone(self),
            key: port.key,
            owner: number,
        })
    }

    /// Reserves the ports of this process also at a new address. A port that another process
    /// has there stays with that process.
    pub(super) fn add_address(&self, address: IpAddr) {
        let Some(shared) = self.shared() else {
            return;
        };
        for (key, entry) in &mut *lock(&self.table) {
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

    /// Tells other processes that a child of fork may come to listen on a port. If that fails,
    /// requests are rejected until then.
    fn mark_inherited(&self, key: PortKey, binding: Binding, entry: &PortEntry) {
        if let Some(shared) = self.shared() {
            for (ip, _) in &entry.locks {
                let _ = shared.publish(key, *ip, binding, INHERITED);
            }
        }
        if let Reach::Directory(directory, member) = &self.reach {
            for file in entry.files.iter().filter(|it| it.exclusive) {
                let _ = directory.publish(&file.name, &format!("{member} {INHERITED}"));
            }
        }
    }

    /// Returns whether other processes may share the addresses.
    pub(super) fn is_shared(&self) -> bool {
        self.shared().is_some()
    }

    fn shared(&self) -> Option<&SharedPorts> {
        match &self.reach {
            Reach::Hosts(shared) => shared.as_ref(),
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

    /// Returns whether the processes that have the ports are nodes of a simulated network.
    pub(super) fn are_of_nodes(&self) -> bool {
        matches!(self.reach, Reach::Nodes)
    }

    /// Returns whether a child of fork may come to listen on the port that a request is for, which
    /// nobody has until then: the process that listened has ended or not, and its locks last.
    pub(super) fn awaits_heir(&self, request: &Message) -> bool {
        let (key, to) = ((request.space, request.to.port()), request.to);
        let own = [
            lock_name_of(key, to.ip()),
            family_lock_name(key, to.is_ipv4()),
        ];
        let (directory, names) = match &self.reach {
            Reach::Directory(directory, _) => (directory, &own[..]),
            Reach::Hosts(Some(shared)) => (&shared.directory, &own[..1]),
            _ => return false,
        };
        names.iter().any(|name| {
            let text = directory.read(name).unwrap_or_default();
            words(&text).any(|word| word == INHERITED) && directory.is_locked(name)
        })
    }

    /// Returns who may have the port that a request is for, and is not in `asked`; `None` if
    /// nobody has it, or if nodes share the ports.
    pub(super) fn peer_with(&self, request: &Message, asked: &[Peer]) -> Option<Peer> {
        let to = request.to;
        match &self.reach {
            Reach::Process => Some(Peer::Member(0)),
            Reach::Nodes => None,
            Reach::Hosts(_) => Some(Peer::Host {
                local: request.from.ip(),
                remote: to.ip(),
            }),
            Reach::Directory(directory, _) => {
                let key = (request.space, to.port());
                let names = [
                    lock_name_of(key, to.ip()),
                    family_lock_name(key, to.is_ipv4()),
                ];
                let named = |name: &String| number_in(&directory.read_any(name)?);
                let mut found = names.iter().filter_map(named).map(Peer::Member);
                found.find(|it| !asked.contains(it))
            }
        }
    }
}

impl BoundPort {
    pub(super) fn port(&self) -> u16 {
        self.key.1
    }

    /// Returns what a child of fork needs to have the port in the place of this process, which
    /// listens on it or not.
    pub(super) fn inheritable(&self, listens: bool) -> Option<InheritedPort> {
        let table = lock(&self.ports.table);
        let entry = table.get(&self.key)?;
        let owner = entry.owners.iter().find(|it| it.number == self.owner)?;
        if listens {
            self.ports.mark_inherited(self.key, owner.binding, entry);
        }
        let fd = |lock: &Flock<File>| lock.as_fd().as_raw_fd();
        Some(InheritedPort {
            key: self.key,
            binding: owner.binding,
            reuses: owner.reuses,
            locks: (entry.locks.iter())
                .map(|(ip, lock)| (*ip, fd(lock)))
                .collect(),
            files: (entry.files.iter())
                .map(|it| (it.name.clone(), it.exclusive, fd(&it.lock)))
                .collect(),
        })
    }

    /// Leaves the port to another process that has the files of its locks.
    pub(super) fn leave(self) {
        let mut table = lock(&self.ports.table);
        let Some(entry) = table.get_mut(&self.key) else {
            return;
        };
        entry.owners.retain(|owner| owner.number != self.owner);
        if !entry.owners.is_empty() {
            return;
        }
        let (locks, files) = (
            std::mem::take(&mut entry.locks),
            std::mem::take(&mut entry.files),
        );
        table.remove(&self.key);
        drop(table);
        let mut names = Vec::new();
        for (ip, lock) in locks {
            names.push(lock_name_of(self.key, ip));
            close_unreleased(lock);
        }
        for file in files {
            names.push(file.name);
            close_unreleased(file.lock);
        }
        let directory = match &self.ports.reach {
            Reach::Directory(directory, _) => Some(directory),
            Reach::Hosts(shared) => shared.as_ref().map(|it| &it.directory),
            _ => None,
        };
        let Some(directory) = directory else { return };
        for name in names {
            // If no other process has the file.
            if let Ok(Some(_lock)) = directory.lock(&name) {
                directory.remove_lock(&name);
            }
        }
    }

    /// Changes this owner of the port.
    fn change(&self, change: impl FnOnce(&mut Owner)) {
        let mut table = lock(&self.ports.table);
        let entry = table.get_mut(&self.key);
        let mut owners = entry.into_iter().flat_map(|it| &mut it.owners);
        if let Some(owner) = owners.find(|it| it.number == self.owner) {
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

    /// Ends the sharing of the port by this owner, which listens.
    ///
    /// # Errors
    /// EADDRNOTAVAIL, EADDRINUSE: another owner shares it; errors of the directory.
    pub(super) fn take(&self) -> Result<()> {
        let mut table = lock(&self.ports.table);
        let Some(entry) = table.get_mut(&self.key) else {
            return Ok(());
        };
        let is_own = |it: &Owner| it.number == self.owner;
        let Some(index) = entry.owners.iter().position(is_own) else {
            return Ok(());
        };
        let binding = entry.owners[index].binding;
        for other in entry.owners.iter().filter(|it| !is_own(it)) {
            binding.check(other.binding)?;
        }
        entry.owners[index].reuses = false;
        if let Reach::Directory(directory, member) = &self.ports.reach {
            let files = files_of(self.key, binding).into_iter();
            for (name, ..) in files.filter(|(_, exclusive, _)| *exclusive) {
                directory.publish(&name, &member.to_string())?;
            }
        }
        Ok(())
    }
}

impl Drop for BoundPort {
    fn drop(&mut self) {
        let mut table = lock(&self.ports.table);
        let Some(entry) = table.get_mut(&self.key) else {
            return;
        };
        entry.owners.retain(|owner| owner.number != self.owner);
        let bindings: Vec<Binding> = entry.owners.iter().map(|owner| owner.binding).collect();
        if let Some(shared) = self.ports.shared() {
            let (kept, free) = std::mem::take(&mut entry.locks)
                .into_iter()
                .partition(|(ip, _)| bindings.iter().any(|it| it.covers(*ip)));
            entry.locks = kept;
            shared.release(self.key, free);
        }
        if let Reach::Directory(directory, _) = &self.ports.reach {
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
    use std::net::{Ipv4Addr, SocketAddr};
    use std::path::Path;

    use super::super::message::MessageKind;
    use super::*;
    use crate::directory::Sharing;

    const SPACE: u16 = 0x106;
    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const AT: Binding = Binding {
        ip: LOCAL,
        family_only: true,
    };

    fn joined(path: &Path, member: u16) -> Arc<Ports> {
        let directory = Directory::open(path, Sharing::Own).unwrap();
        Arc::new(Ports::new(Some((Arc::new(directory), member))))
    }

    fn request_for(ip: IpAddr) -> Message {
        let to = SocketAddr::from((ip, 7471));
        let mut request = Message::new(MessageKind::Request, &[]).with_addresses(to, to);
        request.space = SPACE;
        request
    }

    /// Returns who has a port of an address.
    fn owner(ports: &Ports, ip: IpAddr, asked: &[Peer]) -> Option<Peer> {
        ports.peer_with(&request_for(ip), asked)
    }

    fn with_both_kinds(name: &str, test: impl Fn(&dyn Fn() -> Arc<Ports>)) {
        let process = Arc::new(Ports::new(None));
        test(&|| Arc::clone(&process));
        let name = format!("ringverbs-ports-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        // Two instances, as in two processes.
        test(&|| joined(&directory, 1));
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

    /// A process that listens is found by its address, or by all of its family.
    #[test]
    fn requests_find_the_process_that_listens() {
        let name = format!("ringverbs-ports-found-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let [one, two, other] = [1, 2, 3].map(|member| joined(&directory, member));
        let at = |ip: [u8; 4]| Binding {
            ip: ip.into(),
            family_only: true,
        };
        let port = two.reserve(SPACE, 7471, AT, false).unwrap();
        assert_eq!(owner(&one, LOCAL, &[]), None, "bound but not listening");
        port.take().unwrap();
        let second = Peer::Member(2);
        assert_eq!(owner(&one, LOCAL, &[]), Some(second));
        assert_eq!(owner(&one, LOCAL, &[second]), None);
        assert_eq!(owner(&one, [192, 0, 2, 1].into(), &[]), Some(second));
        drop(port);
        assert_eq!(owner(&one, LOCAL, &[]), None);
        let ports = [(&two, [192, 0, 2, 2]), (&other, [192, 0, 2, 3])].map(|(ports, ip)| {
            let port = ports.reserve(SPACE, 7471, at(ip), false).unwrap();
            port.take().unwrap();
            port
        });
        assert_eq!(owner(&one, [192, 0, 2, 2].into(), &[]), Some(second));
        assert_eq!(
            owner(&one, [192, 0, 2, 3].into(), &[]),
            Some(Peer::Member(3))
        );
        assert_eq!(owner(&one, [192, 0, 2, 4].into(), &[]), None);
        drop(ports);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        std::fs::remove_dir(&directory).unwrap();
    }

    /// A port that a process leaves is in use while its child has the files of the locks, and the
    /// child's once that has taken it.
    #[test]
    fn a_child_has_the_port_that_its_parent_leaves() {
        let name = format!("ringverbs-ports-child-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let [parent, child, other] = [1, 2, 3].map(|member| joined(&directory, member));
        let free = |ports: &Arc<Ports>| ports.reserve(SPACE, 7471, AT, false).is_ok();
        for takes in [true, false] {
            let port = parent.reserve(SPACE, 7471, AT, false).unwrap();
            port.take().unwrap();
            let request = request_for(LOCAL);
            assert!(!other.awaits_heir(&request));
            let mut inherited = port.inheritable(true).unwrap();
            // As fork does.
            let copies: Vec<_> = (inherited.files.iter_mut())
                .map(|(.., fd)| {
                    // SAFETY: the parent's descriptor, which is open.
                    let copy = unsafe { BorrowedFd::borrow_raw(*fd) };
                    let copy = copy.try_clone_to_owned().unwrap();
                    *fd = copy.as_raw_fd();
                    copy
                })
                .collect();
            port.leave();
            assert!(!free(&parent) && !free(&other));
            assert!(other.awaits_heir(&request) && parent.awaits_heir(&request));
            assert_eq!(owner(&other, LOCAL, &[]), Some(Peer::Member(1)));
            if takes {
                let port = child.inherit(&inherited).unwrap();
                port.take().unwrap();
                assert!(!other.awaits_heir(&request));
                assert_eq!(owner(&other, LOCAL, &[]), Some(Peer::Member(2)));
                assert!(!free(&parent) && !free(&other));
            }
            drop(copies);
            assert!(free(&parent) && free(&other));
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// The file of an address that a killed process had does not hide who has all addresses.
    #[test]
    fn leftovers_of_a_killed_process_are_replaced() {
        let name = format!("ringverbs-ports-left-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let ports = joined(&directory, 1);
        let key = (SPACE, 7471);
        let specific: IpAddr = [192, 0, 2, 2].into();
        for name in [family_lock_name(key, true), lock_name_of(key, specific)] {
            std::fs::write(directory.join(name), "9").unwrap();
        }
        assert_eq!(owner(&ports, LOCAL, &[]), Some(Peer::Member(9)));
        let entry = ports.reserve(SPACE, 7471, AT, false).unwrap();
        entry.take().unwrap();
        let own = Some(Peer::Member(1));
        assert_eq!(owner(&ports, LOCAL, &[]), own);
        assert_eq!(owner(&ports, specific, &[Peer::Member(9)]), own);
        drop(entry);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// A name that exists but is not a file of this user counts as a port in use.
    #[test]
    fn a_bound_port_is_in_use() {
        let name = format!("ringverbs-ports-other-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let ports = joined(&directory, 1);
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
                        second.take().unwrap();
                        first.take().unwrap();
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
                assert_eq!(first.take().unwrap_err().raw(), libc::EADDRNOTAVAIL);
                drop(second);
                first.take().unwrap();
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
}
