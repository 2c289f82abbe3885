//! Objects, methods and attributes that mlx5_ib adds to the ioctl interface.

pub use mlx5_abi::ids::*;
pub use uverbs::abi::ids::{
    ATTR_DESTROY_FLOW_ACTION_HANDLE, METHOD_FLOW_ACTION_DESTROY, OBJECT_FLOW, OBJECT_FLOW_ACTION,
};

const _: () = assert!(NAMESPACE == uverbs::driver::NAMESPACE);
