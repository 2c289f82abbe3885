//! The interface between the wire and the connection manager: management datagrams of hosts.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::Result;

/// Size of a management datagram in bytes.
pub(crate) const MAD_SIZE: usize = 256;
/// Offset of a management datagram in a UDP datagram: after BTH and DETH.
pub(super) const MAD: usize = 20;
/// Offsets in a management datagram of the connection manager: the attribute, the body and the
/// ids at its beginning.
pub(crate) const ATTRIBUTE: usize = 16;
pub(crate) const LOCAL_ID: usize = 24;
pub(crate) const REMOTE_ID: usize = 28;
/// Attributes of requests, which are for no known id, and of the message that names the
/// receiver's id as the sender's.
pub(crate) const REQUEST: u16 = 0x10;
pub(crate) const SERVICE_REQUEST: u16 = 0x17;
pub(crate) const SERVICE_REPLY: u16 = 0x18;
/// The queue pair of the general services interface, and its queue key.
pub(crate) const QPN: u32 = 1;
pub(crate) const QKEY: u32 = 0x8001_0000;

/// A management datagram to send, from and to these addresses.
pub(crate) struct Outgoing {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) bytes: [u8; MAD_SIZE],
}

/// Handles management datagrams. Nothing blocks.
pub(crate) trait ManagementAgent: Send {
    /// Returns the descriptor that is readable when [`turn`](Self::turn) has something to do.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Watches a socket for errors, under the number of its address.
    fn watch_errors(&self, socket: BorrowedFd<'_>, number: usize) -> Result<()>;

    /// Returns the number of a watched socket that reports errors.
    fn pop_failed(&mut self) -> Option<usize>;

    /// Called for a new address of the device.
    fn add_address(&self, address: IpAddr);

    /// Returns the next datagram to send.
    fn pop(&mut self) -> Option<Outgoing>;

    /// Does what is due. Returns whether there was anything.
    fn turn(&mut self) -> bool;

    /// Ends all communications, since the process ends.
    fn close(&mut self);

    /// Returns the number of the other process that a datagram is for; `None` if it is for
    /// this process, or for none that shares the address.
    fn other_member(&self, destination: IpAddr, bytes: &[u8]) -> Option<u8>;

    /// Handles a datagram of another host.
    fn receive(&mut self, source: IpAddr, destination: IpAddr, bytes: &[u8]);

    /// Handles the report that nobody had the port of another host to which a datagram was
    /// sent. Returns when it was sent, for [`end_peers`](Self::end_peers) of other processes;
    /// `None` if the report is not about a message that waits for an answer.
    fn handle_refusal(&mut self, both: (IpAddr, IpAddr), bytes: &[u8]) -> Option<Duration>;

    /// Ends the communications with a host that were last heard before `time`, after which
    /// nobody had its port: the peers' processes have ended.
    fn end_peers(&mut self, both: (IpAddr, IpAddr), time: Duration);
}
