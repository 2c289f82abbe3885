//! Device queries: what ConnectX devices have and others lack.

use uverbs::DeviceAttrEx;

use super::Mlx5;
use crate::abi::*;
use crate::context::CtxRef;
use crate::device::QueryOps;
use crate::errno::Errno;

impl QueryOps for Mlx5 {
    fn add_own(
        ctx: &CtxRef,
        from: &DeviceAttrEx,
        attr: &mut ibv_device_attr_ex,
    ) -> Result<(), Errno> {
        // Without work queues there is nothing to ask for.
        let hash = match from.max_wq_type_rq {
            0 => (0, 0),
            _ => ctx.mlx5()?.features(ctx)?.packet_hash,
        };
        add(from, hash, attr);
        Ok(())
    }
}

/// Adds the kernel's answer, and which fields and functions of a hash the driver has.
fn add(from: &DeviceAttrEx, hash: (u64, u8), attr: &mut ibv_device_attr_ex) {
    attr.raw_packet_caps = from.raw_packet_caps & IBV_RAW_PACKET_CAP_IP_CSUM;
    attr.max_wq_type_rq = from.max_wq_type_rq;
    let caps = &from.rss_caps;
    attr.rss_caps = ibv_rss_caps {
        supported_qpts: caps.supported_qpts,
        max_rwq_indirection_tables: caps.max_rwq_indirection_tables,
        max_rwq_indirection_table_size: caps.max_rwq_indirection_table_size,
        rx_hash_fields_mask: hash.0,
        rx_hash_function: hash.1,
    };
}

#[cfg(test)]
mod tests {
    use uverbs::DeviceAttrEx;
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn packets_and_work_queues_are_announced() {
        let mut from = DeviceAttrEx::new_zeroed();
        from.raw_packet_caps = 7;
        from.max_wq_type_rq = 8;
        from.rss_caps.max_rwq_indirection_tables = 9;
        from.tm_caps.max_num_tags = 1;
        // SAFETY: integers, of which any bytes are one.
        let mut attr: ibv_device_attr_ex = unsafe { core::mem::zeroed() };
        add(&from, (0xf, 1), &mut attr);
        assert_eq!((attr.raw_packet_caps, attr.max_wq_type_rq), (4, 8));
        assert_eq!(attr.rss_caps.max_rwq_indirection_tables, 9);
        let hash = (
            attr.rss_caps.rx_hash_fields_mask,
            attr.rss_caps.rx_hash_function,
        );
        assert_eq!(hash, (0xf, 1));
        assert_eq!(attr.tm_caps.max_num_tags, 0);
    }
}
