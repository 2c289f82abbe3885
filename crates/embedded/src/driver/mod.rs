//! Verbs commands to commands of the device, as mlx5_ib and the kernel do: objects, files,
//! regions, flows, DevX. [`state::State`] is a device; it has no thread and no socket, and
//! addresses of the host only as [`PortAddresses`](crate::addresses::PortAddresses).

pub mod cause;
pub(crate) mod command;
pub(crate) mod counters;
pub(crate) mod cq;
pub(crate) mod data;
pub(crate) mod descriptors;
pub(crate) mod device_memory;
pub(crate) mod devx;
pub(crate) mod dma_buffer;
pub(crate) mod dynamic;
pub(crate) mod event;
pub(crate) mod explanations;
pub(crate) mod file_limit;
pub(crate) mod files;
pub(crate) mod flow;
pub(crate) mod gids;
pub(crate) mod inherited;
pub(crate) mod injected;
pub(crate) mod matcher;
pub(crate) mod memory;
pub(crate) mod methods;
pub(crate) mod moved;
pub(crate) mod object;
pub(crate) mod packet;
pub(crate) mod pages;
pub(crate) mod pinned;
pub(crate) mod qp;
pub(crate) mod query;
pub(crate) mod queues;
pub(crate) mod region;
pub(crate) mod request;
pub(crate) mod spec;
pub(crate) mod srq;
pub(crate) mod state;
pub(crate) mod subscriptions;
pub(crate) mod watch;
pub(crate) mod work_queue;
pub(crate) mod writes;
pub(crate) mod xrc;

#[cfg(test)]
mod tests;
