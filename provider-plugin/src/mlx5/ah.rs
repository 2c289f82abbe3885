//! Address handles: the address vector of a datagram's work request.

use std::sync::OnceLock;

use mlx5::ioctl::devx::DevxObject;
use mlx5::{Address, AddressHandle, Link};
use uverbs::{AhAttr, AhHandle, PdHandle};

use super::Mlx5;
use crate::ah::AhOps;
use crate::context::CtxRef;
use crate::errno::Errno;

/// `IBV_LINK_LAYER_ETHERNET`.
pub const ETHERNET: u8 = 2;
/// `IBV_GID_TYPE_ROCE_V2` of the kernel's GID entries.
const ROCE_V2: u32 = 2;

impl AhOps for Mlx5 {
    type Address = Address;
    /// The queue pair that the address belongs to, once it is known.
    type AhData = OnceLock<DevxObject<CtxRef>>;

    fn make_ah(
        ctx: &CtxRef,
        pd: PdHandle,
        attr: &AhAttr,
        _user_handle: u64,
    ) -> Result<(Address, Option<AhHandle>), Errno> {
        let handle = AddressHandle::create(ctx, pd, attr, 0, link(ctx, attr)?)?;
        Ok((handle.address, handle.object.map(uverbs::Ah::into_handle)))
    }
}

/// The link layer of the path.
fn link(ctx: &uverbs::Context, attr: &AhAttr) -> Result<Link, Errno> {
    let port = ctx.query_port(attr.port_num)?;
    if port.legacy.link_layer != ETHERNET {
        return Ok(Link::InfiniBand);
    }
    if !attr.is_global {
        return Err(Errno::INVAL);
    }
    let index = attr.grh.sgid_index.into();
    let gid = ctx.query_gid_entry(attr.port_num.into(), index)?;
    Ok(Link::Ethernet {
        udp: gid.gid_type == ROCE_V2,
    })
}
