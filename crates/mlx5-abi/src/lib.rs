//! Driver data of verbs commands on ConnectX: structures and flags of the kernel's
//! `include/uapi/rdma/mlx5-abi.h`, in native byte order, and the numbers of its ioctl
//! interface ([`ids`]).
//!
//! Structures are named as in C, without the prefix `mlx5_ib_`; fields have the same
//! names. They convert to and from bytes, so they have no hidden padding. Kernels add
//! fields at the end: `offset_of!` of the first new field is the length of an older version.
//! A test compares everything with the installed C headers.

#[cfg(test)]
mod c_headers;
pub mod ids;

/// Declares structures: the name in C, the name in Rust, the size in bytes.
macro_rules! driver_data {
    ($($(#[$doc:meta])* $c:literal $name:ident, $size:literal {
        $($(#[$fdoc:meta])* $field:ident: $ty:ty),+ $(,)?
    })+) => {
        $(
            $(#[$doc])*
            #[doc = concat!("\n\n`struct ", $c, "`.")]
            #[repr(C)]
            #[derive(
                Clone,
                Copy,
                Debug,
                PartialEq,
                Eq,
                ::zerocopy::FromBytes,
                ::zerocopy::IntoBytes,
                ::zerocopy::Immutable,
                ::zerocopy::KnownLayout,
            )]
            #[allow(missing_docs, reason = "the fields are the kernel header's, by the same names")]
            pub struct $name { $($(#[$fdoc])* pub $field: $ty),+ }

            const _: () = assert!(size_of::<$name>() == $size);

            impl Default for $name {
                fn default() -> Self {
                    ::zerocopy::FromZeros::new_zeroed()
                }
            }
        )+

        /// All structures.
        #[cfg(test)]
        const STRUCTURES: &[c_headers::Structure] = &[$(c_headers::Structure {
            name: $c,
            size: $size,
            fields: &[$((
                stringify!($field),
                ::std::mem::offset_of!($name, $field),
                size_of::<$ty>(),
            )),+],
        }),+];
    };
}

driver_data! {
    /// Input of GET_CONTEXT.
    "mlx5_ib_alloc_ucontext_req_v2" AllocUcontextReq, 32 {
        total_num_bfregs: u32,
        num_low_latency_bfregs: u32,
        /// [`ALLOC_UCTX_DEVX`].
        flags: u32,
        comp_mask: u32,
        max_cqe_version: u8,
        reserved0: u8,
        reserved1: u16,
        reserved2: u32,
        /// [`LIB_CAP_4K_UAR`], [`LIB_CAP_DYN_UAR`].
        lib_caps: u64,
    }

    /// Answer to GET_CONTEXT.
    "mlx5_ib_alloc_ucontext_resp" AllocUcontextResp, 72 {
        qp_tab_size: u32,
        bf_reg_size: u32,
        tot_bfregs: u32,
        cache_line_size: u32,
        max_sq_desc_sz: u16,
        max_rq_desc_sz: u16,
        max_send_wqebb: u32,
        max_recv_wr: u32,
        max_srq_recv_wr: u32,
        num_ports: u16,
        flow_action_flags: u16,
        /// [`context_flag`].
        comp_mask: u32,
        response_length: u32,
        cqe_version: u8,
        /// [`commands_with_driver_data`].
        cmds_supp_uhw: u8,
        /// [`INLINE_MODE_NONE`].
        eth_min_inline: u8,
        /// [`CLOCK_INFO_V1`].
        clock_info_versions: u8,
        hca_core_clock_offset: u64,
        log_uar_size: u32,
        num_uars_per_page: u32,
        num_dyn_bfregs: u32,
        dump_fill_mkey: u32,
    }

    /// A register of the port's steering.
    "mlx5_ib_uapi_reg" Reg, 8 {
        value: u32,
        mask: u32,
    }

    /// Answer to the driver's QUERY_PORT ([`ids::METHOD_QUERY_DRIVER_PORT`]).
    "mlx5_ib_uapi_query_port" QueryPort, 40 {
        /// [`port_flag`]: the valid fields.
        flags: u64,
        vport: u16,
        vport_vhca_id: u16,
        esw_owner_vhca_id: u16,
        rsvd0: u16,
        vport_steering_icm_rx: u64,
        vport_steering_icm_tx: u64,
        reg_c0: Reg,
    }

    /// Answer to ALLOC_PD.
    "mlx5_ib_alloc_pd_resp" AllocPdResp, 4 {
        pdn: u32,
    }

    /// Segmentation of TCP packets.
    "mlx5_ib_tso_caps" TsoCaps, 8 {
        /// Bytes.
        max_tso: u32,
        /// A bit for each type of queue pairs.
        supported_qpts: u32,
    }

    /// Hashes of packets.
    "mlx5_ib_rss_caps" RssCaps, 16 {
        /// [`hash_field`].
        rx_hash_fields_mask: u64,
        /// [`HASH_TOEPLITZ`].
        rx_hash_function: u8,
        reserved: [u8; 7],
    }

    /// Compressed CQEs.
    "mlx5_ib_cqe_comp_caps" CqeCompCaps, 8 {
        max_num: u32,
        /// [`mini_format`].
        supported_format: u32,
    }

    /// Rate limits.
    "mlx5_packet_pacing_caps" PacketPacingCaps, 16 {
        /// Kilobits per second.
        qp_rate_limit_min: u32,
        qp_rate_limit_max: u32,
        supported_qpts: u32,
        cap_flags: u8,
        reserved: [u8; 3],
    }

    /// Parsing of packets that the program describes.
    "mlx5_ib_sw_parsing_caps" SwParsingCaps, 8 {
        sw_parsing_offloads: u32,
        supported_qpts: u32,
    }

    /// Receives with strides.
    "mlx5_ib_striding_rq_caps" StridingRqCaps, 24 {
        min_single_stride_log_num_of_bytes: u32,
        max_single_stride_log_num_of_bytes: u32,
        min_single_wqe_log_num_of_strides: u32,
        max_single_wqe_log_num_of_strides: u32,
        supported_qpts: u32,
        reserved: u32,
    }

    /// Streams of DC initiators.
    "mlx5_ib_dci_streams_caps" DciStreamsCaps, 2 {
        max_log_num_concurent: u8,
        max_log_num_errored: u8,
    }

    /// Answer to QUERY_DEVICE_EX.
    "mlx5_ib_query_device_resp" QueryDeviceResp, 104 {
        comp_mask: u32,
        response_length: u32,
        tso_caps: TsoCaps,
        rss_caps: RssCaps,
        cqe_comp_caps: CqeCompCaps,
        packet_pacing_caps: PacketPacingCaps,
        /// [`multi_packet`].
        mlx5_ib_support_multi_pkt_send_wqes: u32,
        /// [`device_flag`].
        flags: u32,
        sw_parsing_caps: SwParsingCaps,
        striding_rq_caps: StridingRqCaps,
        tunnel_offloads_caps: u32,
        dci_streams_caps: DciStreamsCaps,
        reserved: u16,
    }

    /// Input of CREATE_CQ.
    "mlx5_ib_create_cq" CreateCq, 32 {
        buf_addr: u64,
        db_addr: u64,
        cqe_size: u32,
        cqe_comp_en: u8,
        /// [`mini_format`].
        cqe_comp_res_format: u8,
        /// [`CQ_FLAG_CQE_128B_PAD`] and the following.
        flags: u16,
        uar_page_index: u16,
        reserved0: u16,
        reserved1: u32,
    }

    /// Answer to CREATE_CQ.
    "mlx5_ib_create_cq_resp" CreateCqResp, 8 {
        cqn: u32,
        reserved: u32,
    }

    /// Input of RESIZE_CQ.
    "mlx5_ib_resize_cq" ResizeCq, 16 {
        buf_addr: u64,
        cqe_size: u16,
        reserved0: u16,
        reserved1: u32,
    }

    /// Input of CREATE_SRQ.
    "mlx5_ib_create_srq" CreateSrq, 32 {
        buf_addr: u64,
        db_addr: u64,
        /// [`SRQ_FLAG_SIGNATURE`].
        flags: u32,
        reserved0: u32,
        uidx: u32,
        reserved1: u32,
    }

    /// Answer to CREATE_SRQ.
    "mlx5_ib_create_srq_resp" CreateSrqResp, 8 {
        srqn: u32,
        reserved: u32,
    }

    /// Streams of a DC initiator, as binary logarithms.
    "mlx5_ib_create_qp_dci_streams" DciStreams, 2 {
        log_num_concurent: u8,
        log_num_errored: u8,
    }

    /// Input of CREATE_QP.
    "mlx5_ib_create_qp" CreateQp, 56 {
        buf_addr: u64,
        db_addr: u64,
        sq_wqe_count: u32,
        rq_wqe_count: u32,
        rq_wqe_shift: u32,
        /// [`QP_FLAG_SCATTER_CQE`] and the following.
        flags: u32,
        uidx: u32,
        bfreg_index: u32,
        /// Of a DC target; of raw packets the address of their send queue (`sq_buf_addr`).
        access_key: u64,
        ece_options: u32,
        dci_streams: DciStreams,
        reserved: u16,
    }

    /// Input of CREATE_QP of a queue pair whose packets work queues receive.
    "mlx5_ib_create_qp_rss" CreateQpRss, 152 {
        /// [`hash_field`].
        rx_hash_fields_mask: u64,
        /// [`HASH_TOEPLITZ`].
        rx_hash_function: u8,
        rx_key_len: u8,
        reserved: [u8; 6],
        rx_hash_key: [u8; 128],
        comp_mask: u32,
        flags: u32,
    }

    /// Answer to CREATE_QP.
    "mlx5_ib_create_qp_resp" CreateQpResp, 40 {
        bfreg_index: u32,
        ece_options: u32,
        comp_mask: u32,
        tirn: u32,
        tisn: u32,
        rqn: u32,
        sqn: u32,
        reserved1: u32,
        tir_icm_addr: u64,
    }

    /// Input of ALLOC_MW.
    "mlx5_ib_alloc_mw" AllocMw, 8 {
        comp_mask: u32,
        num_klms: u8,
        reserved1: u8,
        reserved2: u16,
    }

    /// Input of CREATE_WQ.
    "mlx5_ib_create_wq" CreateWq, 48 {
        buf_addr: u64,
        db_addr: u64,
        rq_wqe_count: u32,
        rq_wqe_shift: u32,
        user_index: u32,
        flags: u32,
        /// [`CREATE_WQ_STRIDES`].
        comp_mask: u32,
        single_stride_log_num_of_bytes: u32,
        single_wqe_log_num_of_strides: u32,
        two_byte_shift_en: u32,
    }

    /// Answer to CREATE_WQ.
    "mlx5_ib_create_wq_resp" CreateWqResp, 8 {
        response_length: u32,
        reserved: u32,
    }

    /// Input of MODIFY_WQ.
    "mlx5_ib_modify_wq" ModifyWq, 8 {
        comp_mask: u32,
        reserved: u32,
    }

    /// Answer to CREATE_AH.
    "mlx5_ib_create_ah_resp" CreateAhResp, 16 {
        response_length: u32,
        dmac: [u8; 6],
        reserved: [u8; 6],
    }

    /// Bursts of a queue pair with a rate limit.
    "mlx5_ib_burst_info" BurstInfo, 8 {
        max_burst_sz: u32,
        typical_pkt_sz: u16,
        reserved: u16,
    }

    /// Input of MODIFY_QP.
    "mlx5_ib_modify_qp" ModifyQp, 16 {
        /// [`MODIFY_QP_OUT_OF_ORDER`].
        comp_mask: u32,
        burst_info: BurstInfo,
        ece_options: u32,
    }

    /// Answer to MODIFY_QP.
    "mlx5_ib_modify_qp_resp" ModifyQpResp, 16 {
        response_length: u32,
        dctn: u32,
        ece_options: u32,
        reserved: u32,
    }

    /// Relation of the device's clock to the wall clock, which mlx5_core updates in a page that
    /// programs map.
    "mlx5_ib_clock_info" ClockInfo, 56 {
        /// Odd during an update.
        sign: u32,
        resv: u32,
        /// Wall clock time of the record in nanoseconds.
        nsec: u64,
        /// The device's time of the record in ticks.
        cycles: u64,
        /// The fraction of a nanosecond in `nsec`, scaled by `2^shift`.
        frac: u64,
        /// A tick in nanoseconds, scaled by `2^shift`.
        mult: u32,
        /// Binary logarithm of the scale.
        shift: u32,
        /// The bits of the device's time.
        mask: u64,
        /// Nanoseconds until which the record is updated.
        overflow_period: u64,
    }

    /// A counter of a flow, and its kind.
    "mlx5_ib_flow_counters_desc" FlowCountersDesc, 8 {
        /// `enum ibv_counter_description`: 0 packets, 1 bytes.
        description: u32,
        /// The counter's number.
        index: u32,
    }

    /// The counters of a flow.
    "mlx5_ib_flow_counters_data" FlowCountersData, 16 {
        /// Address of the [`FlowCountersDesc`]s.
        counters_data: u64,
        ncounters: u32,
        reserved: u32,
    }

    /// Input of CREATE_FLOW, with the counters of one specification. Without counters it ends
    /// before `data`.
    "mlx5_ib_create_flow" CreateFlow, 24 {
        ncounters_data: u32,
        reserved: u32,
        data: FlowCountersData,
    }
}

/// `MLX5_IB_ALLOC_UCTX_DEVX`: the context may use DevX.
pub const ALLOC_UCTX_DEVX: u32 = 1 << 0;

/// `MLX5_LIB_CAP_4K_UAR`: several UARs in a page are understood.
pub const LIB_CAP_4K_UAR: u64 = 1 << 0;
/// `MLX5_LIB_CAP_DYN_UAR`: UARs are allocated by the process, none are given.
pub const LIB_CAP_DYN_UAR: u64 = 1 << 1;

/// Bits of [`AllocUcontextResp::comp_mask`] (`MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_...`).
pub mod context_flag {
    /// `hca_core_clock_offset` is there.
    pub const CORE_CLOCK_OFFSET: u32 = 1 << 0;
    /// `dump_fill_mkey` is there.
    pub const DUMP_FILL_MKEY: u32 = 1 << 1;
    /// Queue pairs have enhanced connection options.
    pub const ECE: u32 = 1 << 2;
    /// Queue pairs can leave the state SQD for RTS.
    pub const SQD2RTS: u32 = 1 << 3;
    /// The low bits of keys can be changed.
    pub const MKEY_UPDATE_TAG: u32 = 1 << 5;
}

/// Bits of [`AllocUcontextResp::cmds_supp_uhw`] (`MLX5_USER_CMDS_SUPP_UHW_...`).
pub mod commands_with_driver_data {
    /// More attributes of the device are reported.
    pub const QUERY_DEVICE: u8 = 1 << 0;
    /// The MAC address of an address handle is resolved.
    pub const CREATE_AH: u8 = 1 << 1;
}

/// [`AllocUcontextResp::eth_min_inline`]: WQEs of raw packets need no headers
/// (`MLX5_USER_INLINE_MODE_NONE`). Any other value, also of a kernel without the field,
/// asks for those of Ethernet.
pub const INLINE_MODE_NONE: u8 = 1;

/// Bit of [`AllocUcontextResp::clock_info_versions`] for [`ClockInfo`]
/// (`1 << MLX5_IB_CLOCK_INFO_V1`).
pub const CLOCK_INFO_V1: u8 = 1 << 0;

/// Commands in the offsets of mappings (`enum mlx5_ib_mmap_cmd`).
pub mod mmap {
    /// A UAR, of the memory type that the driver chooses.
    pub const REGULAR_PAGE: u8 = 0;
    /// A UAR, write-combining.
    pub const WC_PAGE: u8 = 2;
    /// A UAR, not cached.
    pub const NC_PAGE: u8 = 3;
    /// The device's clock.
    pub const CORE_CLOCK: u8 = 5;
    /// [`ClockInfo`](super::ClockInfo); the index is the version, 0.
    pub const CLOCK_INFO: u8 = 7;
    /// Memory on the device.
    pub const DEVICE_MEM: u8 = 8;
}

/// `MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD`: CQEs are written whole.
pub const CQ_FLAG_CQE_128B_PAD: u16 = 1 << 0;
/// `MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX`: `uar_page_index` is the number of a
/// page of registers that was allocated, in which the queue is armed.
pub const CQ_FLAG_UAR_PAGE_INDEX: u16 = 1 << 1;
/// `MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS`: timestamps in real time.
pub const CQ_FLAG_REAL_TIME_TS: u16 = 1 << 2;

/// `MLX5_IB_CQE_RES_FORMAT_...`: contents of mini CQEs.
pub mod mini_format {
    /// The hash of a packet.
    pub const HASH: u8 = 1 << 0;
    /// The checksum of a packet.
    pub const CSUM: u8 = 1 << 1;
    /// The checksum, and the index of a stride.
    pub const CSUM_STRIDX: u8 = 1 << 2;
}

/// Bits of [`QueryDeviceResp::mlx5_ib_support_multi_pkt_send_wqes`]
/// (`enum mlx5_ib_mpw_caps`).
pub mod multi_packet {
    /// `MLX5_IB_ALLOW_MPW`.
    pub const ALLOWED: u32 = 1 << 1;
    /// `MLX5_IB_SUPPORT_EMPW`.
    pub const ENHANCED: u32 = 1 << 2;
}

/// Bits of [`QueryDeviceResp::flags`] (`MLX5_IB_QUERY_DEV_RESP_...`).
pub mod device_flag {
    /// CQEs of 128 bytes can be compressed.
    pub const CQE_128B_COMP: u32 = 1 << 0;
    /// CQEs of 128 bytes can be written whole.
    pub const CQE_128B_PAD: u32 = 1 << 1;
    /// Credits can be counted by packets.
    pub const PACKET_BASED_CREDIT_MODE: u32 = 1 << 2;
    /// CQEs of DC targets can carry data.
    pub const SCAT2CQE_DCT: u32 = 1 << 3;
    /// Receives can be consumed in any order.
    pub const OOO_DP: u32 = 1 << 4;
}

/// Bits of [`QueryPort::flags`]: the field is valid (`MLX5_IB_UAPI_QUERY_PORT_...`).
pub mod port_flag {
    /// `vport`.
    pub const VPORT: u64 = 1 << 0;
    /// `vport_vhca_id`.
    pub const VPORT_VHCA_ID: u64 = 1 << 1;
    /// `vport_steering_icm_rx`.
    pub const VPORT_STEERING_ICM_RX: u64 = 1 << 2;
    /// `vport_steering_icm_tx`.
    pub const VPORT_STEERING_ICM_TX: u64 = 1 << 3;
    /// `reg_c0`.
    pub const VPORT_REG_C0: u64 = 1 << 4;
    /// `esw_owner_vhca_id`.
    pub const ESW_OWNER_VHCA_ID: u64 = 1 << 5;
}

/// `MLX5_SRQ_FLAG_SIGNATURE`: receives begin with a signature.
pub const SRQ_FLAG_SIGNATURE: u32 = 1 << 0;

/// `MLX5_QP_FLAG_SCATTER_CQE`: CQEs may carry data.
pub const QP_FLAG_SCATTER_CQE: u32 = 1 << 1;
/// `MLX5_QP_FLAG_TUNNEL_OFFLOADS`: checksums and hashes of packets inside tunnels.
pub const QP_FLAG_TUNNEL_OFFLOADS: u32 = 1 << 2;
/// `MLX5_QP_FLAG_TYPE_DCT`: a DC target.
pub const QP_FLAG_TYPE_DCT: u32 = 1 << 4;
/// `MLX5_QP_FLAG_TYPE_DCI`: a DC initiator.
pub const QP_FLAG_TYPE_DCI: u32 = 1 << 5;
/// `MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC`: unicast packets of the same context are received.
pub const QP_FLAG_TIR_ALLOW_SELF_LB_UC: u32 = 1 << 6;
/// `MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC`: as [`QP_FLAG_TIR_ALLOW_SELF_LB_UC`], multicast packets.
pub const QP_FLAG_TIR_ALLOW_SELF_LB_MC: u32 = 1 << 7;
/// `MLX5_QP_FLAG_ALLOW_SCATTER_CQE`: also where not every send is signalled.
pub const QP_FLAG_ALLOW_SCATTER_CQE: u32 = 1 << 8;
/// `MLX5_QP_FLAG_PACKET_BASED_CREDIT_MODE`: credits are counted by packets.
pub const QP_FLAG_PACKET_BASED_CREDIT_MODE: u32 = 1 << 9;
/// `MLX5_QP_FLAG_UAR_PAGE_INDEX`: `bfreg_index` is the number of a page of
/// registers that was allocated.
pub const QP_FLAG_UAR_PAGE_INDEX: u32 = 1 << 10;
/// `MLX5_QP_FLAG_DCI_STREAM`: a DC initiator with streams.
pub const QP_FLAG_DCI_STREAM: u32 = 1 << 11;

/// Bits of [`CreateQpResp::comp_mask`]: the field is there
/// (`MLX5_IB_CREATE_QP_RESP_MASK_...`).
pub mod qp_object {
    /// `tirn`.
    pub const TIRN: u32 = 1 << 0;
    /// `tisn`.
    pub const TISN: u32 = 1 << 1;
    /// `rqn`.
    pub const RQN: u32 = 1 << 2;
    /// `sqn`.
    pub const SQN: u32 = 1 << 3;
}

/// `MLX5_RX_HASH_FUNC_TOEPLITZ`.
pub const HASH_TOEPLITZ: u8 = 1 << 0;

/// Fields of headers that a hash covers (`MLX5_RX_HASH_...`): of each kind source and
/// destination.
pub mod hash_field {
    /// IPv4 addresses.
    pub const IPV4: u64 = 0b11;
    /// IPv6 addresses.
    pub const IPV6: u64 = 0b11 << 2;
    /// Ports of TCP.
    pub const PORT_TCP: u64 = 0b11 << 4;
    /// Ports of UDP.
    pub const PORT_UDP: u64 = 0b11 << 6;
}

/// In [`ModifyQp::comp_mask`]: receives may be consumed in any order
/// (`MLX5_IB_MODIFY_QP_OOO_DP`).
pub const MODIFY_QP_OUT_OF_ORDER: u32 = 1 << 0;

/// Bit of [`CreateWq::comp_mask`]: it has strides (`MLX5_IB_CREATE_WQ_STRIDING_RQ`).
pub const CREATE_WQ_STRIDES: u32 = 1 << 0;
