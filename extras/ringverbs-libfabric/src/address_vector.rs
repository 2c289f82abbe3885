//! Address vectors: the peers of datagrams, by index.

use std::collections::HashMap;

use ringverbs::AddressHandle;
use ringverbs::completion::RawAddress;

/// The index of a peer in an [`AddressVector`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(u32);

/// The values needed to send datagrams to a peer.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The address that identifies it.
    pub address: RawAddress,
    /// The path to its port.
    pub path: AddressHandle,
    /// The queue key of its queue pair.
    pub qkey: u32,
}

/// The peers of datagrams, by index (`fi_av`).
#[derive(Debug)]
pub struct AddressVector<P = Peer> {
    peers: Vec<Option<P>>,
    numbers: HashMap<RawAddress, PeerId>,
    strict: bool,
}

impl<P> Default for AddressVector<P> {
    fn default() -> Self {
        Self {
            peers: Vec::new(),
            numbers: HashMap::new(),
            strict: false,
        }
    }
}

impl<P> AddressVector<P> {
    /// Creates an empty address vector, in which unknown senders are "not
    /// available".
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes unknown senders an error (`FI_SOURCE_ERR`): their messages are read
    /// out of band, with the sender's address.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Inserts a peer, or replaces the peer with this address and keeps its index.
    pub fn insert(&mut self, address: RawAddress, peer: P) -> PeerId {
        if let Some(&id) = self.numbers.get(&address) {
            self.peers[id.0 as usize] = Some(peer);
            return id;
        }
        let id = PeerId(self.peers.len() as u32);
        self.peers.push(Some(peer));
        self.numbers.insert(address, id);
        id
    }

    /// Removes a peer. Its index is not reused.
    pub fn remove(&mut self, id: PeerId) -> Option<P> {
        self.numbers.retain(|_, other| *other != id);
        self.peers.get_mut(id.0 as usize)?.take()
    }

    /// Returns the peer with this index.
    pub fn get(&self, id: PeerId) -> Option<&P> {
        self.peers.get(id.0 as usize)?.as_ref()
    }

    /// Returns the index of the peer with this address.
    pub fn find(&self, address: &RawAddress) -> Option<PeerId> {
        self.numbers.get(address).copied()
    }

    /// Returns the sender of a message from `address`, for
    /// [`CompletionReader::read_from`](ringverbs::completion::CompletionReader::read_from);
    /// `None` if it is unknown and the address vector is [strict](Self::strict).
    pub fn sender(&self, address: &RawAddress) -> Option<Sender> {
        match self.find(address) {
            Some(peer) => Some(Sender::Peer(peer)),
            None if self.strict => None,
            None => Some(Sender::NotAvailable),
        }
    }
}

/// The sender of a received message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sender {
    /// A peer of the address vector.
    Peer(PeerId),
    /// Not available (`FI_ADDR_NOTAVAIL`): not a datagram, or the address vector
    /// does not contain the sender.
    #[default]
    NotAvailable,
}

#[cfg(test)]
mod tests {
    use ringverbs::Gid;

    use super::*;

    #[test]
    fn peer_keeps_its_index() {
        let mut peers = AddressVector::<&str>::new();
        let address = |qp_num| RawAddress {
            gid: Gid([1; 16]),
            qp_num,
        };
        let a = peers.insert(address(1), "a");
        let b = peers.insert(address(2), "b");
        assert_ne!(a, b);
        assert_eq!(peers.insert(address(1), "A"), a);
        assert_eq!(peers.get(a), Some(&"A"));
        assert_eq!(peers.find(&address(2)), Some(b));
        assert_eq!(peers.remove(b), Some("b"));
        assert_eq!((peers.get(b), peers.find(&address(2))), (None, None));
        assert!(peers.insert(address(3), "c") > b);
        assert_eq!(peers.sender(&address(1)), Some(Sender::Peer(a)));
        assert_eq!(peers.sender(&address(2)), Some(Sender::NotAvailable));
        assert_eq!(peers.strict().sender(&address(2)), None);
    }
}
