//! A machine of our own: Debian's kernel and tree under QEMU, so that tests
//! meet the real driver without touching the machine they run on.

pub mod apt;
pub mod bare;
pub mod compile;
pub mod compiler;
mod cpio;
pub mod host;
mod initramfs;
pub mod progress;
pub mod qemu;
pub mod stock;
pub mod suite;
pub mod tree;
pub mod vm;

pub use compiler::Compiler;
pub use qemu::Qemu;
pub use suite::{Architecture, Suite};
pub use tree::Image;
pub use vm::{Ended, Hardware, Job};
