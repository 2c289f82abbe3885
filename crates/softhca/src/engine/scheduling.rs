//! Scheduling elements.

/// An element that has other elements as children.
pub(crate) const ARBITER: u32 = 0;
/// An element that queues are assigned to.
pub(crate) const QUEUE_GROUP: u32 = 4;

/// The element types, as reported in the capabilities.
pub(crate) const TYPES: u32 = 1 << ARBITER | 1 << QUEUE_GROUP;
/// Limit of scheduling elements.
pub(crate) const MAX_ELEMENTS: usize = 1 << 16;

/// An element of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) group: bool,
    pub(crate) parent: Option<u32>,
    pub(crate) bw_share: u32,
    pub(crate) max_average_bw: u32,
}
