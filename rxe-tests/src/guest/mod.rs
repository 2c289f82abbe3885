//! Guests: Debian's kernel and tree under QEMU, so that tests use the real driver
//! without changing the host.

pub mod apt;
pub mod compile;
pub mod compiler;
mod cpio;
pub mod host;
mod initramfs;
pub mod progress;
pub mod qemu;
pub mod static_guest;
pub mod stock;
pub mod suite;
pub mod tree;
pub mod vm;

pub use compiler::Compiler;
pub use qemu::Qemu;
pub use suite::{Architecture, Suite};
pub use tree::Image;
pub use vm::{Hardware, Job, JobExit};
