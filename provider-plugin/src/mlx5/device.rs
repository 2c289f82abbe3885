//! Device queries: features that only ConnectX devices have.

use mlx5::Features;
use uverbs::DeviceAttrEx;

use super::Mlx5;
use crate::abi::*;
use crate::context::CtxRef;
use crate::device::QueryOps;
use crate::errno::Errno;

impl QueryOps for Mlx5 {
    fn add_device_attributes(
        ctx: &CtxRef,
        from: &DeviceAttrEx,
        attr: &mut ibv_device_attr_ex,
    ) -> Result<(), Errno> {
        // Devices without Ethernet ports have none of these features.
        let features = match from.max_wq_type_rq {
            0 => Features::default(),
            _ => ctx.mlx5()?.features(ctx)?,
        };
        add(from, &features, attr);
        Ok(())
    }
}

/// Adds the kernel's answer, and the driver's.
fn add(from: &DeviceAttrEx, features: &Features, attr: &mut ibv_device_attr_ex) {
    let (hash, segmentation) = (features.packet_hash, features.segmentation);
    attr.tso_caps = ibv_tso_caps {
        max_tso: segmentation.0,
        supported_qpts: segmentation.1,
    };
    let [least, most, types, _] = features.pacing;
    attr.packet_pacing_caps = ibv_packet_pacing_caps {
        qp_rate_limit_min: least,
        qp_rate_limit_max: most,
        supported_qpts: types,
    };
    let caps = &from.tm_caps;
    attr.tm_caps = ibv_tm_caps {
        max_rndv_hdr_size: caps.max_rndv_hdr_size,
        max_num_tags: caps.max_num_tags,
        flags: caps.flags,
        max_ops: caps.max_ops,
        max_sge: caps.max_sge,
    };
    attr.raw_packet_caps = from.raw_packet_caps;
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
    fn packets_work_queues_and_tags_are_announced() {
        let mut from = DeviceAttrEx::new_zeroed();
        from.raw_packet_caps = 7;
        from.max_wq_type_rq = 8;
        from.rss_caps.max_rwq_indirection_tables = 9;
        from.tm_caps.max_num_tags = 1;
        // SAFETY: integers, of which any bytes are one.
        let mut attr: ibv_device_attr_ex = unsafe { core::mem::zeroed() };
        let features = Features {
            packet_hash: (0xf, 1),
            segmentation: (1 << 16, 1 << 8),
            ..Features::default()
        };
        add(&from, &features, &mut attr);
        assert_eq!(attr.tso_caps.max_tso, 1 << 16);
        assert_eq!(attr.tso_caps.supported_qpts, 1 << IBV_QPT_RAW_PACKET);
        assert_eq!((attr.raw_packet_caps, attr.max_wq_type_rq), (7, 8));
        assert_eq!(attr.rss_caps.max_rwq_indirection_tables, 9);
        let hash = (
            attr.rss_caps.rx_hash_fields_mask,
            attr.rss_caps.rx_hash_function,
        );
        assert_eq!(hash, (0xf, 1));
        assert_eq!(attr.tm_caps.max_num_tags, 1);
    }
}
