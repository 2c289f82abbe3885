//! Capabilities of the device.

use crate::card::Card;
use crate::profile::{Group, Profile};

/// Capabilities: the current values and the largest possible ones.
#[derive(Debug)]
pub(crate) struct Capabilities {
    max: Vec<(Group, Vec<u8>)>,
    current: Vec<(Group, Vec<u8>)>,
}

impl Capabilities {
    pub(crate) fn new(profile: &Profile, card: &Card) -> Self {
        let mut all: Vec<_> = Group::ALL
            .into_iter()
            .map(|group| (group, profile.group(group)))
            .collect();
        for (group, field, value) in card.caps() {
            if let Some((_, bytes)) = all.iter_mut().find(|(of, _)| *of == group) {
                field.put(bytes, value);
            }
        }
        Capabilities {
            max: all.clone(),
            current: all,
        }
    }

    fn find(field_group: &[(Group, Vec<u8>)], group: Group) -> &[u8] {
        field_group
            .iter()
            .find(|(g, _)| *g == group)
            .map_or(&[], |(_, bytes)| bytes)
    }

    pub(crate) fn max(&self, group: Group) -> &[u8] {
        Self::find(&self.max, group)
    }

    pub(crate) fn current(&self, group: Group) -> &[u8] {
        Self::find(&self.current, group)
    }

    pub(crate) fn current_mut(&mut self, group: Group) -> &mut [u8] {
        self.current
            .iter_mut()
            .find(|(g, _)| *g == group)
            .map_or(&mut [], |(_, bytes)| bytes)
    }
}
