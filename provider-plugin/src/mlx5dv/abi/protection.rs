//! Structures of `mlx5dv.h` for signatures and encryption of memory keys.

use core::ffi::c_void;

use crate::abi::ibv_pd;

/// `struct mlx5dv_sig_t10dif`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct mlx5dv_sig_t10dif {
    pub bg_type: u32,
    pub bg: u16,
    pub app_tag: u16,
    pub ref_tag: u32,
    pub flags: u16,
}

/// `enum mlx5dv_sig_t10dif_bg_type`.
pub mod guard {
    pub const CRC: u32 = 0;
    pub const CSUM: u32 = 1;
}

/// `enum mlx5dv_sig_t10dif_flags`.
pub mod dif_flag {
    pub const REF_REMAP: u16 = 1 << 0;
    pub const APP_ESCAPE: u16 = 1 << 1;
    pub const APP_REF_ESCAPE: u16 = 1 << 2;
}

/// `struct mlx5dv_sig_crc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct mlx5dv_sig_crc {
    /// C: `type`.
    pub kind: u32,
    pub seed: u64,
}

/// `enum mlx5dv_sig_crc_type`.
pub mod crc {
    pub const CRC32: u32 = 0;
    pub const CRC32C: u32 = 1;
    pub const CRC64_XP10: u32 = 2;
}

/// `struct mlx5dv_sig_block_domain`.
#[repr(C)]
pub struct mlx5dv_sig_block_domain {
    pub sig_type: u32,
    pub sig: Signature,
    pub block_size: u32,
    pub comp_mask: u64,
}

/// Which member is set, the domain's type says.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Signature {
    pub dif: *const mlx5dv_sig_t10dif,
    pub crc: *const mlx5dv_sig_crc,
}

/// `enum mlx5dv_sig_type`.
pub mod sig_type {
    pub const T10DIF: u32 = 0;
    pub const CRC: u32 = 1;
}

/// `enum mlx5dv_block_size`.
pub mod block_size {
    pub const BYTES_512: u32 = 0;
    pub const BYTES_520: u32 = 1;
    pub const BYTES_4048: u32 = 2;
    pub const BYTES_4096: u32 = 3;
    pub const BYTES_4160: u32 = 4;
}

/// `struct mlx5dv_sig_block_attr`.
#[repr(C)]
pub struct mlx5dv_sig_block_attr {
    pub mem: *const mlx5dv_sig_block_domain,
    pub wire: *const mlx5dv_sig_block_domain,
    pub flags: u32,
    pub check_mask: u8,
    pub copy_mask: u8,
    pub comp_mask: u64,
}

/// `MLX5DV_SIG_BLOCK_ATTR_FLAG_COPY_MASK`.
pub const SIG_BLOCK_COPY_MASK: u32 = 1 << 0;

/// `struct mlx5dv_crypto_attr`.
#[repr(C)]
pub struct mlx5dv_crypto_attr {
    pub crypto_standard: u32,
    pub encrypt_on_tx: bool,
    pub signature_crypto_order: u32,
    pub data_unit_size: u32,
    pub initial_tweak: [u8; 16],
    pub dek: *mut c_void,
    pub keytag: [u8; 8],
    pub comp_mask: u64,
}

/// `MLX5DV_CRYPTO_STANDARD_AES_XTS`.
pub const CRYPTO_AES_XTS: u32 = 0;
/// `MLX5DV_SIGNATURE_CRYPTO_ORDER_SIGNATURE_AFTER_CRYPTO_ON_TX`.
pub const SIGNATURE_AFTER_CRYPTO: u32 = 0;
/// `MLX5DV_SIGNATURE_CRYPTO_ORDER_SIGNATURE_BEFORE_CRYPTO_ON_TX`.
pub const SIGNATURE_BEFORE_CRYPTO: u32 = 1;

/// `struct mlx5dv_mkey_err`, of which the value is `struct mlx5dv_sig_err`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct mlx5dv_mkey_err {
    pub err_type: u32,
    pub err: mlx5dv_sig_err,
}

/// `struct mlx5dv_sig_err`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct mlx5dv_sig_err {
    pub actual_value: u64,
    pub expected_value: u64,
    pub offset: u64,
}

/// `enum mlx5dv_mkey_err_type`.
pub mod mkey_err {
    pub const NONE: u32 = 0;
    pub const BAD_GUARD: u32 = 1;
    pub const BAD_REFTAG: u32 = 2;
    pub const BAD_APPTAG: u32 = 3;
}

/// `struct mlx5dv_crypto_login_attr`.
#[repr(C)]
pub struct mlx5dv_crypto_login_attr {
    pub credential_id: u32,
    pub import_kek_id: u32,
    pub credential: [u8; 48],
    pub comp_mask: u64,
}

/// `struct mlx5dv_crypto_login_attr_ex`.
#[repr(C)]
pub struct mlx5dv_crypto_login_attr_ex {
    pub credential_id: u32,
    pub import_kek_id: u32,
    pub credential: *const c_void,
    pub credential_len: usize,
    pub comp_mask: u64,
}

/// `struct mlx5dv_crypto_login_query_attr`.
#[repr(C)]
pub struct mlx5dv_crypto_login_query_attr {
    pub state: u32,
    pub comp_mask: u64,
}

/// `enum mlx5dv_crypto_login_state`.
pub mod login_state {
    pub const VALID: u32 = 0;
    pub const NO_LOGIN: u32 = 1;
    pub const INVALID: u32 = 2;
}

/// `struct mlx5dv_dek_init_attr`.
#[repr(C)]
pub struct mlx5dv_dek_init_attr {
    pub key_size: u32,
    pub has_keytag: bool,
    pub key_purpose: u32,
    pub pd: *mut ibv_pd,
    pub opaque: [u8; 8],
    pub key: [u8; 128],
    pub comp_mask: u64,
    pub crypto_login: *mut c_void,
}

/// `MLX5DV_DEK_INIT_ATTR_CRYPTO_LOGIN`.
pub const DEK_MASK_LOGIN: u64 = 1 << 0;
/// `MLX5DV_CRYPTO_KEY_SIZE_128`.
pub const KEY_SIZE_128: u32 = 0;
/// `MLX5DV_CRYPTO_KEY_SIZE_256`.
pub const KEY_SIZE_256: u32 = 1;
/// `MLX5DV_CRYPTO_KEY_PURPOSE_AES_XTS`.
pub const PURPOSE_AES_XTS: u32 = 0;

/// `struct mlx5dv_dek_attr`.
#[repr(C)]
pub struct mlx5dv_dek_attr {
    pub state: u32,
    pub opaque: [u8; 8],
    pub comp_mask: u64,
}

/// `MLX5DV_DEK_STATE_READY`.
pub const DEK_READY: u32 = 0;
/// `MLX5DV_DEK_STATE_ERROR`.
pub const DEK_ERROR: u32 = 1;

/// Members of [`mlx5dv_context`](super::mlx5dv_context).
pub mod protection_caps {
    /// `enum mlx5dv_sig_prot_caps`: both.
    pub const PROT_BOTH: u32 = 1 << super::sig_type::T10DIF | 1 << super::sig_type::CRC;
    /// `enum mlx5dv_sig_t10dif_bg_caps`: both.
    pub const BG_BOTH: u16 = 1 << super::guard::CRC | 1 << super::guard::CSUM;
    /// `MLX5DV_CRYPTO_ENGINES_CAP_AES_XTS_SINGLE_BLOCK`.
    pub const SINGLE_BLOCK: u8 = 1 << 1;
    /// `MLX5DV_CRYPTO_ENGINES_CAP_AES_XTS_MULTI_BLOCK`.
    pub const MULTI_BLOCK: u8 = 1 << 2;
    /// `MLX5DV_CRYPTO_WRAPPED_IMPORT_METHOD_CAP_AES_XTS`.
    pub const WRAPPED_AES_XTS: u8 = 1 << 0;
    /// `MLX5DV_CRYPTO_CAPS_CRYPTO`.
    pub const CRYPTO: u32 = 1 << 0;
    /// `MLX5DV_CRYPTO_CAPS_WRAPPED_CRYPTO_OPERATIONAL`.
    pub const WRAPPED_OPERATIONAL: u32 = 1 << 1;
    /// `MLX5DV_CRYPTO_CAPS_WRAPPED_CRYPTO_GOING_TO_COMMISSIONING`.
    pub const GOING_TO_COMMISSIONING: u32 = 1 << 2;
}

/// `struct mlx5dv_sig_caps`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct mlx5dv_sig_caps {
    pub block_size: u64,
    pub block_prot: u32,
    pub t10dif_bg: u16,
    pub crc_type: u16,
}

/// `struct mlx5dv_crypto_caps`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct mlx5dv_crypto_caps {
    pub failed_selftests: u16,
    pub crypto_engines: u8,
    pub wrapped_import_method: u8,
    pub log_max_num_deks: u8,
    pub flags: u32,
}
