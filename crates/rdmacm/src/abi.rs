//! The kernel's rdma_ucm ABI: structures and numbers of `rdma_user_cm.h`, and
//! those that it uses of `ib_user_sa.h`, `ib_user_verbs.h` and `rdma/ib.h`.
//!
//! A command is one write(2): [`CmdHdr`], then the command's structure. The
//! kernel writes the answer to the address in its `response` field. A test
//! compares everything with the installed C headers.

use uverbs::abi::write::AhAttr;

/// ABI version that this crate implements.
pub const ABI_VERSION: u32 = 4;
/// Size of the private data field of a structure, in bytes.
pub const MAX_PRIVATE_DATA: usize = 256;
/// Address family of InfiniBand addresses.
pub const AF_IB: u16 = 27;
/// Size of `struct sockaddr_in`.
pub const SOCKADDR_IN: usize = 16;
/// Size of `struct sockaddr_in6`.
pub const SOCKADDR_IN6: usize = 28;
/// Size of `struct sockaddr_ib`.
pub const SOCKADDR_IB: usize = 48;

/// Command numbers, without the `RDMA_USER_CM_` prefix.
#[allow(missing_docs, reason = "the names are the kernel header's")]
pub mod cmd {
    pub const CMD_CREATE_ID: u32 = 0;
    pub const CMD_DESTROY_ID: u32 = 1;
    pub const CMD_BIND_IP: u32 = 2;
    pub const CMD_RESOLVE_IP: u32 = 3;
    pub const CMD_RESOLVE_ROUTE: u32 = 4;
    pub const CMD_QUERY_ROUTE: u32 = 5;
    pub const CMD_CONNECT: u32 = 6;
    pub const CMD_LISTEN: u32 = 7;
    pub const CMD_ACCEPT: u32 = 8;
    pub const CMD_REJECT: u32 = 9;
    pub const CMD_DISCONNECT: u32 = 10;
    pub const CMD_INIT_QP_ATTR: u32 = 11;
    pub const CMD_GET_EVENT: u32 = 12;
    pub const CMD_GET_OPTION: u32 = 13;
    pub const CMD_SET_OPTION: u32 = 14;
    pub const CMD_NOTIFY: u32 = 15;
    pub const CMD_JOIN_IP_MCAST: u32 = 16;
    pub const CMD_LEAVE_MCAST: u32 = 17;
    pub const CMD_MIGRATE_ID: u32 = 18;
    pub const CMD_QUERY: u32 = 19;
    pub const CMD_BIND: u32 = 20;
    pub const CMD_RESOLVE_ADDR: u32 = 21;
    pub const CMD_JOIN_MCAST: u32 = 22;
}

/// Numbers that installed headers may be too old for, without the
/// `RDMA_USER_CM_` prefix.
pub mod newer {
    /// Adds an event to the queue of the file (not in Linux 6.12).
    pub const CMD_WRITE_CM_EVENT: u32 = 24;
}

/// Values of `option` in [`Query`], without the `RDMA_USER_CM_` prefix.
#[allow(missing_docs, reason = "the names are the kernel header's")]
pub mod query {
    pub const QUERY_ADDR: u32 = 0;
    pub const QUERY_PATH: u32 = 1;
    pub const QUERY_GID: u32 = 2;
}

/// Levels and names of [`SetOption`], without the `RDMA_` prefix.
#[allow(missing_docs, reason = "the names are the kernel header's")]
pub mod option {
    pub const OPTION_ID: u32 = 0;
    pub const OPTION_IB: u32 = 1;
    pub const OPTION_ID_TOS: u32 = 0;
    pub const OPTION_ID_REUSEADDR: u32 = 1;
    pub const OPTION_ID_AFONLY: u32 = 2;
    pub const OPTION_ID_ACK_TIMEOUT: u32 = 3;
    pub const OPTION_IB_PATH: u32 = 1;
}

/// Declares kernel structures: `#[repr(C)]`, public fields, convertible to and
/// from plain bytes (so no hidden padding), and an asserted size.
macro_rules! kernel_structs {
    ($($(#[$doc:meta])* $name:ident, $c:literal, $size:literal { $($field:ident : $ty:ty),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[doc = concat!("`struct ", $c, "`.")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ::zerocopy::FromBytes,
                 ::zerocopy::IntoBytes, ::zerocopy::Immutable, ::zerocopy::KnownLayout)]
        #[allow(missing_docs, reason = "the fields are the kernel header's, by the same names")]
        pub struct $name { $(pub $field: $ty),+ }
        const _: () = assert!(::core::mem::size_of::<$name>() == $size);
        impl Default for $name {
            fn default() -> Self {
                ::zerocopy::FromZeros::new_zeroed()
            }
        }
    )+
        /// C name, size, and fields (name, offset, size) of every structure.
        #[cfg(test)]
        pub(crate) const STRUCTURES: &[(&str, usize, &[(&str, usize, usize)])] = &[$(
            ($c, $size, &[$((stringify!($field), ::core::mem::offset_of!($name, $field), ::core::mem::size_of::<$ty>())),+]),
        )+];
    };
}

kernel_structs! {
    /// Starts every command. `in_len` is the length of the structure after it,
    /// `out_len` that of the answer.
    CmdHdr, "rdma_ucm_cmd_hdr", 8 { cmd: u32, in_len: u16, out_len: u16 }

    CreateId, "rdma_ucm_create_id", 24 { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5] }
    CreateIdResp, "rdma_ucm_create_id_resp", 4 { id: u32 }

    /// Also used to leave a multicast group.
    DestroyId, "rdma_ucm_destroy_id", 16 { response: u64, id: u32, reserved: u32 }
    DestroyIdResp, "rdma_ucm_destroy_id_resp", 4 { events_reported: u32 }

    BindIp, "rdma_ucm_bind_ip", 40 { response: u64, addr: [u8; 28], id: u32 }
    Bind, "rdma_ucm_bind", 136 { id: u32, addr_size: u16, reserved: u16, addr: [u8; 128] }

    ResolveIp, "rdma_ucm_resolve_ip", 64 { src_addr: [u8; 28], dst_addr: [u8; 28], id: u32, timeout_ms: u32 }
    ResolveAddr, "rdma_ucm_resolve_addr", 272 { id: u32, timeout_ms: u32, src_size: u16, dst_size: u16, reserved: u32, src_addr: [u8; 128], dst_addr: [u8; 128] }
    ResolveRoute, "rdma_ucm_resolve_route", 8 { id: u32, timeout_ms: u32 }

    Query, "rdma_ucm_query", 16 { response: u64, id: u32, option: u32 }
    /// A path, unpacked. Big endian: `dlid`, `slid`, `flow_label`, `pkey`.
    UserPathRec, "ib_user_path_rec", 64 { dgid: [u8; 16], sgid: [u8; 16], dlid: [u8; 2], slid: [u8; 2], raw_traffic: u32, flow_label: [u8; 4], reversible: u32, mtu: u32, pkey: [u8; 2], hop_limit: u8, traffic_class: u8, numb_path: u8, sl: u8, mtu_selector: u8, rate_selector: u8, rate: u8, packet_life_time_selector: u8, packet_life_time: u8, preference: u8 }
    QueryRouteResp, "rdma_ucm_query_route_resp", 208 { node_guid: u64, ib_route: [UserPathRec; 2], src_addr: [u8; 28], dst_addr: [u8; 28], num_paths: u32, port_num: u8, reserved: [u8; 3], ibdev_index: u32, reserved1: u32 }
    QueryAddrResp, "rdma_ucm_query_addr_resp", 280 { node_guid: u64, port_num: u8, reserved: u8, pkey: u16, src_size: u16, dst_size: u16, src_addr: [u8; 128], dst_addr: [u8; 128], ibdev_index: u32, reserved1: u32 }
    /// A path in the subnet administrator's wire format.
    PathRecData, "ib_path_rec_data", 72 { flags: u32, reserved: u32, path_rec: [u32; 16] }
    /// The paths follow.
    QueryPathResp, "rdma_ucm_query_path_resp", 8 { num_paths: u32, reserved: u32 }

    ConnParam, "rdma_ucm_conn_param", 272 { qp_num: u32, qkey: u32, private_data: [u8; MAX_PRIVATE_DATA], private_data_len: u8, srq: u8, responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8, rnr_retry_count: u8, valid: u8 }
    UdParam, "rdma_ucm_ud_param", 304 { qp_num: u32, qkey: u32, ah_attr: AhAttr, private_data: [u8; MAX_PRIVATE_DATA], private_data_len: u8, reserved: [u8; 7] }
    Ece, "rdma_ucm_ece", 8 { vendor_id: u32, attr_mod: u32 }

    Connect, "rdma_ucm_connect", 288 { conn_param: ConnParam, id: u32, reserved: u32, ece: Ece }
    Listen, "rdma_ucm_listen", 8 { id: u32, backlog: u32 }
    Accept, "rdma_ucm_accept", 296 { uid: u64, conn_param: ConnParam, id: u32, reserved: u32, ece: Ece }
    Reject, "rdma_ucm_reject", 264 { id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; MAX_PRIVATE_DATA] }
    Disconnect, "rdma_ucm_disconnect", 4 { id: u32 }
    InitQpAttr, "rdma_ucm_init_qp_attr", 16 { response: u64, id: u32, qp_state: u32 }
    QpAttr, "ib_uverbs_qp_attr", 144 { qp_attr_mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32, rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, ah_attr: AhAttr, alt_ah_attr: AhAttr, max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, pkey_index: u16, alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: [u8; 5] }
    Notify, "rdma_ucm_notify", 8 { id: u32, event: u32 }

    JoinIpMcast, "rdma_ucm_join_ip_mcast", 48 { response: u64, uid: u64, addr: [u8; 28], id: u32 }
    JoinMcast, "rdma_ucm_join_mcast", 152 { response: u64, uid: u64, id: u32, addr_size: u16, join_flags: u16, addr: [u8; 128] }

    GetEvent, "rdma_ucm_get_event", 8 { response: u64 }
    /// `param` is a [`ConnParam`] or a [`UdParam`], depending on the type of
    /// the id.
    EventResp, "rdma_ucm_event_resp", 336 { uid: u64, id: u32, event: u32, status: u32, param: [u8; 304], reserved: u32, ece: Ece }

    SetOption, "rdma_ucm_set_option", 24 { optval: u64, id: u32, level: u32, optname: u32, optlen: u32 }
    MigrateId, "rdma_ucm_migrate_id", 16 { response: u64, id: u32, fd: u32 }
    MigrateResp, "rdma_ucm_migrate_resp", 4 { events_reported: u32 }
}

/// `struct rdma_ucm_write_cm_event`, for kernels with
/// [`newer::CMD_WRITE_CM_EVENT`]. Of the union, only the argument is declared.
#[repr(C)]
#[derive(Clone, Copy, Debug, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable)]
#[allow(
    missing_docs,
    reason = "the fields are the kernel header's, by the same names"
)]
pub struct WriteCmEvent {
    pub id: u32,
    pub reserved: u32,
    pub event: u32,
    pub status: u32,
    pub arg: u64,
    pub rest: [u8; 296],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<WriteCmEvent>() == 320);
    assert!(offset_of!(EventResp, param) == 20);
    assert!(size_of::<UdParam>() == 304 && size_of::<ConnParam>() <= 304);
    assert!(offset_of!(Connect, id) == 272);
    assert!(offset_of!(Accept, conn_param) == 8);
    assert!(offset_of!(QueryAddrResp, ibdev_index) == 272);
    assert!(offset_of!(QueryRouteResp, ibdev_index) == 200);
};
