//! Leaked objects, memory and work requests.

use std::fmt;

/// Something that a test left behind on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leak {
    /// An object that was not destroyed.
    Object {
        /// Index of the node.
        node: usize,
        /// Its type, such as "queue pair".
        kind: &'static str,
        /// Its number in the device; the key of a memory region.
        number: u32,
    },
    /// Registered memory that was not released.
    Memory {
        /// Index of the node.
        node: usize,
        /// The region's key.
        key: u32,
        /// The region's length.
        bytes: u64,
    },
    /// Sends, writes, reads or atomics that have not completed: of a queue pair that
    /// exists, or when it was destroyed.
    Sends {
        /// Index of the node.
        node: usize,
        /// Number of the queue pair.
        qp_num: u32,
        /// Number of work requests; those that the device has not read yet count as one.
        count: usize,
    },
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object { node, kind, number } => {
                write!(f, "node {node}: {kind} {number:#x} exists")
            }
            Self::Memory { node, key, bytes } => {
                write!(f, "node {node}: {bytes} bytes are registered, key {key:#x}")
            }
            Self::Sends {
                node,
                qp_num,
                count,
            } => write!(
                f,
                "node {node}: queue pair {qp_num:#x} has {count} work requests that never completed"
            ),
        }
    }
}
