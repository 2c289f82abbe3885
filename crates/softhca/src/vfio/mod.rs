//! The vfio-user front end: the HCA as a PCI device of QEMU.
//!
//! QEMU connects to a socket and passes on what the guest does to the
//! device: [`server`] answers. The guest's memory is mapped into this process
//! ([`dma`]), its interrupts are event file descriptors.

pub mod dma;
pub mod message;
pub mod pci;
pub mod serve;
pub mod server;
