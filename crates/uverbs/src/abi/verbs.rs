//! Structures of the ioctl methods, from `ib_user_ioctl_verbs.h`.

use super::kernel_structs;
use super::write::QueryPortResp;

/// Core support bit: optional memory region access flags may be passed and are
/// ignored by a driver that lacks them.
pub const CORE_SUPPORT_OPTIONAL_MR_ACCESS: u64 = 1 << 0;
/// Core support bit of newer kernels: driver data of any length is safe to pass.
pub const CORE_SUPPORT_ROBUST_UDATA: u64 = 1 << 1;

/// Port flag: a global route header is required in every address vector.
pub const QUERY_PORT_GRH_REQUIRED: u8 = 1 << 0;

kernel_structs! {
    /// `struct ib_uverbs_qp_cap`: sizes of a queue pair's queues, as requested and as
    /// created.
    QpCap, 20 { max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32 }

    /// `struct ib_uverbs_query_port_resp_ex`. `active_speed_ex` is zero on
    /// kernels before 6.12, where it was reserved.
    QueryPortRespEx, 48 { legacy: QueryPortResp, port_cap_flags2: u16, reserved: [u8; 2], active_speed_ex: u32 }

    /// `struct ib_uverbs_gid_entry`. `netdev_ifindex` is zero if there is none.
    GidEntry, 32 { gid: [u8; 16], gid_index: u32, port_num: u32, gid_type: u32, netdev_ifindex: u32 }
}

const _: () = {
    assert!(core::mem::offset_of!(QueryPortRespEx, port_cap_flags2) == 40);
    assert!(core::mem::offset_of!(QueryPortRespEx, active_speed_ex) == 44);
    assert!(core::mem::offset_of!(GidEntry, gid_index) == 16);
};
