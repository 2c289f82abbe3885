//! The files of sysfs and `/dev/infiniband` that show devices: for the preloaded library, which
//! redirects paths to them, and for programs that it does not reach, which see them mounted.

mod attributes;
mod files;
mod function;
mod names;
mod node;
mod values;

pub use attributes::mask;
pub use files::{
    Content, Described, File, GidAttribute, MANAGER, MANAGER_ABI, UVERBS_ABI, UVERBS_MAJOR,
    UVERBS_MINOR, dynamic, files, is_ethernet, write,
};
pub use function::Function;
pub use names::{DEFAULT_NAME, MAX_DEVICES, NameError, default_name, device_names};
pub use node::{Node, Place};
pub use values::{PortState, content, hw_counters, port_state};
