//! The connections of a process, in a file that survives it.
//!
//! A killed process tells its peers nothing. Another member of the group, or the next process
//! that joins it, takes the lock on the file, which the killed one held, and tells them.

use std::collections::HashMap;
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::FileExt;

use nix::fcntl::Flock;
use roce::packet::{gid_of_ip, ip_of_gid};

use crate::Result;
use crate::directory::Directory;
use crate::wires::agent::{ConnectionChange, HostConnection};

/// Length of an entry: both addresses, the ids, the peer's queue pair, and whether it is used.
const ENTRY: usize = 48;
/// Maximum number of entries; further connections are not told of.
const MAX_ENTRIES: usize = 1 << 16;

fn file_name(member: u8) -> String {
    format!("{member}.connections")
}

fn encode(connection: &HostConnection) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[..16].copy_from_slice(&gid_of_ip(connection.local));
    entry[16..32].copy_from_slice(&gid_of_ip(connection.remote));
    entry[32..36].copy_from_slice(&connection.local_id.to_be_bytes());
    entry[36..40].copy_from_slice(&connection.remote_id.to_be_bytes());
    entry[40..44].copy_from_slice(&connection.remote_qpn.to_be_bytes());
    entry[44] = 1;
    entry
}

fn decode(entry: &[u8; ENTRY]) -> Option<HostConnection> {
    let address = |at: usize| -> Option<IpAddr> {
        let gid = entry[at..at + 16].try_into().ok()?;
        Some(ip_of_gid(gid))
    };
    let number = |at: usize| {
        let bytes = entry[at..at + 4].try_into();
        bytes.map_or(0, u32::from_be_bytes)
    };
    (entry[44] == 1).then_some(())?;
    Some(HostConnection {
        local: address(0)?,
        remote: address(16)?,
        local_id: number(32),
        remote_id: number(36),
        remote_qpn: number(40),
    })
}

/// The table of a process.
#[derive(Debug)]
pub(super) struct ConnectionTable {
    file: Flock<File>,
    /// Places of the entries, by id.
    places: HashMap<u32, usize>,
    free: Vec<usize>,
    /// Number of places in the file.
    length: usize,
}

impl ConnectionTable {
    /// Creates the table of a member. Returns it with the connections of a member that had the
    /// number before; `None` if another process has it.
    pub(super) fn create(
        directory: &Directory,
        member: u8,
    ) -> Result<Option<(Self, Vec<HostConnection>)>> {
        let Some(file) = directory.lock(&file_name(member))? else {
            return Ok(None);
        };
        // They stay, in case this process is killed before it has told their peers.
        let (mut places, mut free, mut left) = (HashMap::new(), Vec::new(), Vec::new());
        let entries = read(&file);
        for (place, entry) in entries.iter().enumerate() {
            match entry {
                Some(connection) => {
                    places.insert(connection.local_id, place);
                    left.push(*connection);
                }
                None => free.push(place),
            }
        }
        let table = Self {
            file,
            places,
            free,
            length: entries.len(),
        };
        Ok(Some((table, left)))
    }

    /// Stores a change.
    pub(super) fn apply(&mut self, change: &ConnectionChange) {
        let (place, entry) = match change {
            ConnectionChange::Begins(connection) => {
                let known = self.places.get(&connection.local_id).copied();
                let free = || self.free.pop().unwrap_or(self.length);
                let place = known.unwrap_or_else(free);
                if place >= MAX_ENTRIES {
                    return;
                }
                self.length = self.length.max(place + 1);
                self.places.insert(connection.local_id, place);
                (place, encode(connection))
            }
            ConnectionChange::Ends(id) => {
                let Some(place) = self.places.remove(id) else {
                    return;
                };
                self.free.push(place);
                (place, [0; ENTRY])
            }
        };
        if let Err(error) = self.file.write_all_at(&entry, (place * ENTRY) as u64) {
            tracing::debug!(%error, "connection not stored for other processes");
        }
    }

    /// Removes the file, unless another process has to tell peers.
    pub(super) fn close(&mut self, directory: &Directory, member: u8) {
        if self.places.is_empty() {
            directory.remove_lock(&file_name(member));
        }
    }
}

/// Reads the entries of a file.
fn read(file: &File) -> Vec<Option<HostConnection>> {
    let mut entry = [0; ENTRY];
    let mut next = |place: usize| {
        let read = file.read_exact_at(&mut entry, (place * ENTRY) as u64);
        read.ok().map(|()| decode(&entry))
    };
    (0..MAX_ENTRIES).map_while(&mut next).collect()
}

/// The table of a member that has ended. Dropping it lets another process take it over.
#[derive(Debug)]
pub(super) struct LeftTable {
    member: u8,
    pub(super) connections: Vec<HostConnection>,
    _file: Flock<File>,
}

impl LeftTable {
    /// Takes over the table of a member; `None` if a process has it.
    pub(super) fn take_over(directory: &Directory, member: u8) -> Option<Self> {
        let file = directory.lock(&file_name(member)).ok()??;
        Some(Self {
            member,
            connections: read(&file).into_iter().flatten().collect(),
            _file: file,
        })
    }

    /// Removes the file, once the connections are in the table of this process.
    pub(super) fn finish(self, directory: &Directory) {
        directory.remove_lock(&file_name(self.member));
    }
}

/// Returns whether a member has a table, or has left one.
pub(super) fn exists(directory: &Directory, member: u8) -> bool {
    directory.has_file(&file_name(member))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Sharing;

    #[test]
    fn connections_are_taken_over_once() {
        let path = std::env::temp_dir().join(format!("connection-table-{}", std::process::id()));
        let directory = Directory::open(&path, Sharing::Own).unwrap();
        let connection = |id: u32| HostConnection {
            local: [192, 0, 2, 1].into(),
            remote: "fd00::2".parse().unwrap(),
            local_id: id,
            remote_id: id + 100,
            remote_qpn: id + 200,
        };
        let (mut table, left) = ConnectionTable::create(&directory, 3).unwrap().unwrap();
        assert_eq!(left, []);
        assert!(exists(&directory, 3) && !exists(&directory, 4));
        for id in 1..5 {
            table.apply(&ConnectionChange::Begins(connection(id)));
        }
        table.apply(&ConnectionChange::Ends(2));
        table.apply(&ConnectionChange::Ends(9));
        table.apply(&ConnectionChange::Begins(connection(7)));
        let take_over = || LeftTable::take_over(&directory, 3);
        assert!(take_over().is_none(), "its process lives");
        table.close(&directory, 3);
        drop(table);
        let expected = [1, 7, 3, 4].map(connection);
        // Whoever takes it over may be killed, too.
        assert_eq!(take_over().unwrap().connections, expected);
        let left = take_over().unwrap();
        assert!(take_over().is_none());
        left.finish(&directory);
        assert!(!exists(&directory, 3));
        // The next process with the number does it as well.
        let (mut table, _) = ConnectionTable::create(&directory, 3).unwrap().unwrap();
        table.apply(&ConnectionChange::Begins(connection(1)));
        drop(table);
        let (mut table, left) = ConnectionTable::create(&directory, 3).unwrap().unwrap();
        assert_eq!(left, [connection(1)]);
        table.apply(&ConnectionChange::Begins(connection(1)));
        table.apply(&ConnectionChange::Ends(1));
        table.close(&directory, 3);
        drop(table);
        std::fs::remove_dir(&path).unwrap();
    }
}
