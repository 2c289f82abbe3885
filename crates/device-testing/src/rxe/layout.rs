//! Offsets of fields, counted by hand in the kernel's include/uapi/rdma/rdma_user_rxe.h and
//! include/uapi/rdma/ib_user_verbs.h. They are independent of the library's structures,
//! which tests compare with them.

/// A field: offset and size in bytes.
pub type Field = (usize, usize);

/// `struct rxe_send_wqe`.
pub mod send {
    use super::Field;

    pub const WR_ID: Field = (0, 8);
    pub const OPCODE: Field = (12, 4);
    pub const SEND_FLAGS: Field = (16, 4);
    pub const EX: Field = (20, 4);

    pub const RDMA_REMOTE_ADDR: Field = (24, 8);
    pub const RDMA_RKEY: Field = (32, 4);

    pub const ATOMIC_REMOTE_ADDR: Field = (24, 8);
    pub const ATOMIC_COMPARE_ADD: Field = (32, 8);
    pub const ATOMIC_SWAP: Field = (40, 8);
    pub const ATOMIC_RKEY: Field = (48, 4);

    pub const FLUSH_REMOTE_ADDR: Field = (24, 8);
    pub const FLUSH_LENGTH: Field = (32, 4);
    pub const FLUSH_RKEY: Field = (36, 4);
    pub const FLUSH_TYPE: Field = (40, 1);
    pub const FLUSH_LEVEL: Field = (41, 1);

    pub const UD_REMOTE_QPN: Field = (24, 4);
    pub const UD_REMOTE_QKEY: Field = (28, 4);
    pub const UD_PKEY_INDEX: Field = (32, 2);
    pub const UD_AH_NUM: Field = (36, 4);

    pub const MW_ADDR: Field = (24, 8);
    pub const MW_LENGTH: Field = (32, 8);
    pub const MW_MR_LKEY: Field = (40, 4);
    pub const MW_MW_RKEY: Field = (44, 4);
    pub const MW_RKEY: Field = (48, 4);
    pub const MW_ACCESS: Field = (52, 4);

    pub const STATUS: Field = (144, 4);
    pub const STATE: Field = (148, 4);
    pub const IOVA: Field = (152, 8);
    pub const DMA_LENGTH: Field = (184, 4);
    pub const DMA_RESID: Field = (188, 4);
    pub const DMA_CUR_SGE: Field = (192, 4);
    pub const DMA_NUM_SGE: Field = (196, 4);
    pub const DMA_SGE_OFFSET: Field = (200, 4);
    /// Scatter/gather list, inline data, or the value of an atomic write.
    pub const DATA: usize = 208;
}

/// `struct rxe_recv_wqe`.
pub mod recv {
    use super::Field;

    pub const WR_ID: Field = (0, 8);
    pub const DMA_LENGTH: Field = (16, 4);
    pub const DMA_RESID: Field = (20, 4);
    pub const DMA_CUR_SGE: Field = (24, 4);
    pub const DMA_NUM_SGE: Field = (28, 4);
    pub const DMA_SGE_OFFSET: Field = (32, 4);
    pub const DATA: usize = 40;
}

/// `struct ib_uverbs_wc`.
pub mod wc {
    use super::Field;

    pub const WR_ID: Field = (0, 8);
    pub const STATUS: Field = (8, 4);
    pub const OPCODE: Field = (12, 4);
    pub const VENDOR_ERR: Field = (16, 4);
    pub const BYTE_LEN: Field = (20, 4);
    pub const EX: Field = (24, 4);
    pub const QP_NUM: Field = (28, 4);
    pub const SRC_QP: Field = (32, 4);
    pub const WC_FLAGS: Field = (36, 4);
    pub const PKEY_INDEX: Field = (40, 2);
    pub const SLID: Field = (42, 2);
    pub const SL: Field = (44, 1);
    pub const DLID_PATH_BITS: Field = (45, 1);
    pub const SIZE: usize = 48;
}

/// Returns the value of a field.
pub fn read(entry: &[u8], (offset, bytes): Field) -> u64 {
    let mut value = [0; 8];
    value[..bytes].copy_from_slice(&entry[offset..offset + bytes]);
    u64::from_ne_bytes(value)
}

/// Sets a field (on a little-endian machine).
pub fn write(entry: &mut [u8], (offset, bytes): Field, value: u64) {
    entry[offset..offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
}

/// Asserts the values of fields.
#[track_caller]
pub fn check(what: &str, entry: &[u8], fields: &[(Field, u64)]) {
    for &(field, value) in fields {
        assert_eq!(
            read(entry, field),
            value,
            "{what}: field of {} bytes at {}",
            field.1,
            field.0
        );
    }
}

/// Encodes a scatter/gather list as the driver reads it.
pub fn sges(list: &[uverbs::Sge]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sge in list {
        bytes.extend(sge.addr.to_ne_bytes());
        bytes.extend(sge.length.to_ne_bytes());
        bytes.extend(sge.lkey.to_ne_bytes());
    }
    bytes
}
