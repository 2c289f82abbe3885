//! vfio-user server: presents the HCA as a PCI device to QEMU.
//!
//! QEMU connects to a socket and forwards the guest's accesses to the device;
//! [`connection`] answers them. The guest's memory is mapped into this process
//! ([`dma`]), and its interrupts are event file descriptors.

pub mod connection;
pub mod dma;
pub mod message;
pub mod pci;
pub mod server;
