//! Device queries: the kernel's answer without work queues, tag matching, and what
//! raw packets lack.

use super::Mlx5;
use crate::abi::*;
use crate::device::QueryOps;

impl QueryOps for Mlx5 {
    fn remove_unsupported(attr: &mut ibv_device_attr_ex) {
        attr.tso_caps = ibv_tso_caps::default();
        attr.rss_caps = ibv_rss_caps::default();
        attr.max_wq_type_rq = 0;
        attr.packet_pacing_caps = ibv_packet_pacing_caps::default();
        attr.raw_packet_caps &= IBV_RAW_PACKET_CAP_IP_CSUM;
        attr.tm_caps = ibv_tm_caps::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_device_attributes_are_cleared() {
        // SAFETY: integers, of which any bytes are one.
        let mut attr: ibv_device_attr_ex = unsafe { core::mem::zeroed() };
        attr.tm_caps.max_num_tags = 1;
        attr.rss_caps.supported_qpts = 1;
        attr.max_wq_type_rq = 1;
        attr.raw_packet_caps = 7;
        attr.max_dm_size = 1;
        Mlx5::remove_unsupported(&mut attr);
        assert_eq!(attr.tm_caps.max_num_tags, 0);
        assert_eq!((attr.rss_caps.supported_qpts, attr.max_wq_type_rq), (0, 0));
        assert_eq!((attr.raw_packet_caps, attr.max_dm_size), (4, 1));
    }
}
