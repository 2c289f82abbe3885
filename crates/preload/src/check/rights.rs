//! Rights that regions and queue pairs give to peers, and which of them peers have used.

use std::collections::BTreeMap;
use std::sync::Mutex;

use embedded::roce::transport::Access;
use uverbs::AccessFlags;

use super::{Finding, Rule};
use crate::explain::{Origin, lock};

/// Maximum number of places in the program; others are not followed.
const MAX_PLACES: usize = 1024;

static RIGHTS: Mutex<Rights> = Mutex::new(Rights {
    objects: BTreeMap::new(),
    places: BTreeMap::new(),
    work: 0,
});

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Region,
    QueuePair,
}

/// Kind, key or number, and device of an object.
type Object = (Kind, u32, usize);
/// Kind and place of the call that has given the rights.
type Place = (Kind, usize);

struct Rights {
    objects: BTreeMap<Object, Given>,
    places: BTreeMap<Place, Together>,
    /// Number of completions without errors, and of accesses of peers.
    work: u64,
}

/// The rights of an object.
struct Given {
    place: Place,
    /// The work before.
    since: u64,
}

/// The objects of a place in the program.
struct Together {
    device: usize,
    origin: Origin,
    given: AccessFlags,
    used: AccessFlags,
    /// Those that were destroyed after some work.
    ended: u64,
}

/// Returns the rights that concern peers.
fn of_peers(access: AccessFlags) -> AccessFlags {
    access & (AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC)
}

impl Rights {
    fn give(&mut self, (kind, number, device): Object, access: AccessFlags, origin: Origin) {
        let given = of_peers(access);
        let place = (kind, origin.stack.site());
        let is_known = self.places.contains_key(&place);
        if given.is_empty() || !is_known && self.places.len() >= MAX_PLACES {
            return;
        }
        let together = self.places.entry(place).or_insert_with(|| Together {
            device,
            origin,
            given,
            used: AccessFlags::empty(),
            ended: 0,
        });
        together.given |= given;
        let since = self.work;
        let object = (kind, number, device);
        self.objects.insert(object, Given { place, since });
    }

    fn end(&mut self, object: Object) {
        let Some(Given { place, since }) = self.objects.remove(&object) else {
            return;
        };
        if let Some(together) = self.places.get_mut(&place).filter(|_| since < self.work) {
            together.ended += 1;
        }
    }

    /// Notes that a peer has used a right of the objects of this kind and number: which device
    /// it is is not known.
    fn used(&mut self, kind: Kind, number: u32, right: AccessFlags) {
        let objects = (kind, number, 0)..=(kind, number, usize::MAX);
        for (_, Given { place, .. }) in self.objects.range(objects) {
            if let Some(together) = self.places.get_mut(place) {
                together.used |= right;
            }
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let ended = self.places.iter().filter(|(_, it)| it.ended != 0);
        let finding = |(&(kind, _), together): (&Place, &Together)| {
            let unused = together.given & !together.used;
            if unused.is_empty() {
                return None;
            }
            let (what, called) = match kind {
                Kind::Region => ("memory regions", "registered"),
                Kind::QueuePair => ("queue pairs", "modified"),
            };
            let unused: Vec<&str> = unused.iter_names().map(|(name, _)| name).collect();
            Some(Finding {
                rule: Rule::UnusedRights,
                device: together.device,
                queue_pair: None,
                message: format!(
                    "{} {what} gave peers {}, which none has used",
                    together.ended,
                    unused.join(" and "),
                ),
                origins: vec![(called, together.origin.clone())],
            })
        };
        ended.filter_map(finding).collect()
    }
}

/// Called when a device has found a request of a peer permitted.
pub(super) fn used(qpn: u32, key: u32, access: Access) {
    let right = match access {
        Access::Read => AccessFlags::REMOTE_READ,
        Access::Write => AccessFlags::REMOTE_WRITE,
        Access::Atomic => AccessFlags::REMOTE_ATOMIC,
    };
    let rights = &mut *lock(&RIGHTS);
    rights.work += 1;
    rights.used(Kind::QueuePair, qpn, right);
    rights.used(Kind::Region, key, right);
}

/// Notes that a work request has succeeded.
pub(super) fn worked() {
    lock(&RIGHTS).work += 1;
}

pub(super) fn region_registered((device, key): (usize, u32), access: AccessFlags) {
    lock(&RIGHTS).give((Kind::Region, key, device), access, Origin::here());
}

pub(super) fn region_deregistered((device, key): (usize, u32)) {
    lock(&RIGHTS).end((Kind::Region, key, device));
}

/// Notes the rights of a queue pair that has a new state.
pub(super) fn queue_pair_modified((device, number): (usize, u32), access: AccessFlags) {
    let rights = &mut *lock(&RIGHTS);
    let object = (Kind::QueuePair, number, device);
    // Those that it has been given first.
    if !rights.objects.contains_key(&object) {
        rights.give(object, access, Origin::here());
    }
}

pub(super) fn queue_pair_destroyed((device, number): (usize, u32)) {
    lock(&RIGHTS).end((Kind::QueuePair, number, device));
}

/// Returns the rights that no peer has used of objects that were destroyed.
pub(super) fn findings() -> Vec<Finding> {
    lock(&RIGHTS).findings()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_access_uses_its_own_right() {
        // Which no other test has.
        const DEVICE: usize = 901;
        let all = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        let unused = || {
            let mut rights = lock(&RIGHTS);
            rights.places.retain(|_, it| it.device == DEVICE);
            let messages = rights.findings().into_iter().map(|it| it.message);
            Vec::from_iter(messages)
        };
        region_registered((DEVICE, 7), all);
        used(1, 7, Access::Atomic);
        region_deregistered((DEVICE, 7));
        let [message] = &unused()[..] else { panic!() };
        assert!(message.ends_with("REMOTE_WRITE and REMOTE_READ, which none has used"));
        region_registered((DEVICE, 8), all);
        used(1, 8, Access::Read);
        region_deregistered((DEVICE, 8));
        let [message] = &unused()[..] else { panic!() };
        assert!(
            message.ends_with(" REMOTE_WRITE, which none has used"),
            "{message}"
        );
        region_registered((DEVICE, 9), all);
        used(1, 9, Access::Write);
        region_deregistered((DEVICE, 9));
        assert!(unused().is_empty());
    }
}
