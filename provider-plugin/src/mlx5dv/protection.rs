//! Signatures and encryption of memory keys: attributes that work requests set, errors,
//! cancelled work requests.

use core::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mlx5::commands::{EncryptionLimits, Psv, stopped_at};
use mlx5::{
    BlockSignature, BlockSize, CrcKind, CryptoEngine, Encryption, Escape, KeyProtection, Signature,
    SignatureDomain, SignatureField, T10Dif,
};

use super::abi::*;
use super::crypto::Dek;
use super::mkey::Mkey;
use super::wr::{is_functions, queue_pair};
use super::{exported, is_ours};
use crate::access::locked;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::mlx5::qp::Qp;

/// The protection of a key.
pub struct Protection {
    /// Work requests on any queue pair change it.
    state: Mutex<KeyProtection>,
    /// The PSVs of memory and wire, if the key may have signatures.
    psvs: Vec<Psv<CtxRef>>,
}

impl Protection {
    /// Creates the PSVs of a key that may have signatures.
    pub fn psvs(ctx: &CtxRef, pdn: u32) -> Result<Vec<Psv<CtxRef>>, Errno> {
        let mut psvs = Vec::new();
        psvs.try_reserve_exact(2).map_err(|_| Errno::NOMEM)?;
        for _ in 0..2 {
            psvs.push(Psv::create(ctx, pdn)?);
        }
        Ok(psvs)
    }

    pub fn new(
        ctx: &CtxRef,
        key: u32,
        psvs: Vec<Psv<CtxRef>>,
        encryption: Option<CryptoEngine>,
    ) -> Result<Self, Errno> {
        let numbers = match &psvs[..] {
            [memory, wire] => Some([memory.number, wire.number]),
            _ => None,
        };
        let keys = ctx.mlx5()?.protected_keys();
        let state = KeyProtection::new(key, numbers, encryption, keys);
        Ok(Self {
            state: Mutex::new(state),
            psvs,
        })
    }

    /// Locks the state.
    pub fn lock(&self) -> MutexGuard<'_, KeyProtection> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Destroys the PSVs, up to the first error.
    pub fn destroy_psvs(&mut self) -> Result<(), Errno> {
        while let Some(psv) = self.psvs.last() {
            destroyed(psv.object.destroy().map_err(Into::into))?;
            self.psvs.pop();
        }
        Ok(())
    }
}

/// Converts the signature attributes of the program.
///
/// # Errors
/// EINVAL.
///
/// # Safety
/// The attributes are the application's.
pub unsafe fn signatures(attr: &mlx5dv_sig_block_attr) -> Result<BlockSignature, c_int> {
    // SAFETY: as the caller says.
    let [memory, wire] = unsafe { [attr.mem.as_ref(), attr.wire.as_ref()] };
    let is_known = attr.comp_mask == 0 && attr.flags & !SIG_BLOCK_COPY_MASK == 0;
    if !is_known || (memory.is_none() && wire.is_none()) {
        return Err(libc::EINVAL);
    }
    // SAFETY: as the caller says.
    let domain = |attr: Option<&_>| attr.map(|attr| unsafe { domain(attr) }).transpose();
    let copies = attr.flags & SIG_BLOCK_COPY_MASK != 0;
    Ok(BlockSignature {
        memory: domain(memory)?,
        wire: domain(wire)?,
        check_mask: attr.check_mask,
        copy_mask: copies.then_some(attr.copy_mask),
    })
}

/// # Safety
/// As for [`signatures`].
unsafe fn domain(attr: &mlx5dv_sig_block_domain) -> Result<SignatureDomain, c_int> {
    let block = block(attr.block_size)?;
    if attr.comp_mask != 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: as the caller says; the type says which member is set.
    let signature = unsafe {
        match attr.sig_type {
            sig_type::T10DIF => attr.sig.dif.as_ref().and_then(dif),
            sig_type::CRC => attr.sig.crc.as_ref().and_then(crc),
            _ => None,
        }
    };
    Ok(SignatureDomain {
        block,
        signature: signature.ok_or(libc::EINVAL)?,
    })
}

fn dif(attr: &mlx5dv_sig_t10dif) -> Option<Signature> {
    use dif_flag::*;
    let is_known = matches!(attr.bg, 0 | u16::MAX)
        && matches!(attr.bg_type, guard::CRC | guard::CSUM)
        && attr.flags & !(REF_REMAP | APP_ESCAPE | APP_REF_ESCAPE) == 0;
    let has = |flag| attr.flags & flag != 0;
    is_known.then_some(Signature::T10Dif(T10Dif {
        checksum: attr.bg_type == guard::CSUM,
        seed: attr.bg,
        app_tag: attr.app_tag,
        ref_tag: attr.ref_tag,
        increments: has(REF_REMAP),
        escape: match (has(APP_REF_ESCAPE), has(APP_ESCAPE)) {
            (true, _) => Escape::BothTags,
            (false, true) => Escape::AppTag,
            (false, false) => Escape::Never,
        },
    }))
}

fn crc(attr: &mlx5dv_sig_crc) -> Option<Signature> {
    let (kind, ones) = match attr.kind {
        crc::CRC32 => (CrcKind::Crc32, u32::MAX.into()),
        crc::CRC32C => (CrcKind::Crc32c, u32::MAX.into()),
        crc::CRC64_XP10 => (CrcKind::Crc64Xp10, u64::MAX),
        _ => return None,
    };
    let seed = attr.seed;
    (seed == 0 || seed == ones).then_some(Signature::Crc { kind, seed })
}

fn block(size: u32) -> Result<BlockSize, c_int> {
    Ok(match size {
        block_size::BYTES_512 => BlockSize::Bytes512,
        block_size::BYTES_520 => BlockSize::Bytes520,
        block_size::BYTES_4048 => BlockSize::Bytes4048,
        block_size::BYTES_4096 => BlockSize::Bytes4096,
        block_size::BYTES_4160 => BlockSize::Bytes4160,
        _ => return Err(libc::EINVAL),
    })
}

/// Converts the encryption attributes of the program.
///
/// # Errors
/// EINVAL.
///
/// # Safety
/// The key is live.
pub unsafe fn encryption(attr: &mlx5dv_crypto_attr) -> Result<Encryption, c_int> {
    let is_known = attr.comp_mask == 0 && attr.crypto_standard == CRYPTO_AES_XTS;
    let signature_first = match attr.signature_crypto_order {
        SIGNATURE_AFTER_CRYPTO => false,
        SIGNATURE_BEFORE_CRYPTO => true,
        _ => return Err(libc::EINVAL),
    };
    // SAFETY: as the caller says.
    match unsafe { attr.dek.cast::<Dek>().as_ref() } {
        Some(dek) if is_known => Ok(Encryption {
            encrypts_sent: attr.encrypt_on_tx,
            signature_first,
            unit: block(attr.data_unit_size)?,
            tweak: attr.initial_tweak,
            key: dek.number(),
            key_tag: attr.keytag,
        }),
        _ => Err(libc::EINVAL),
    }
}

/// The features of the device, for `mlx5dv_query_device`.
pub fn caps(
    ctx: &CtxRef,
    caps: &mlx5::commands::Capabilities,
) -> (mlx5dv_sig_caps, mlx5dv_crypto_caps) {
    use block_size::*;
    use protection_caps::*;
    let mut signatures = mlx5dv_sig_caps::default();
    let support = caps.signatures;
    if support.is_supported {
        signatures = mlx5dv_sig_caps {
            block_size: 1 << BYTES_512
                | 1 << BYTES_520
                | 1 << BYTES_4096
                | 1 << BYTES_4160
                | u64::from(support.block_4048) << BYTES_4048,
            block_prot: PROT_BOTH,
            t10dif_bg: BG_BOTH,
            crc_type: 1 << crc::CRC32
                | u16::from(support.crc32c) << crc::CRC32C
                | u16::from(support.crc64_xp10) << crc::CRC64_XP10,
        };
    }
    let mut encryption = mlx5dv_crypto_caps {
        crypto_engines: match caps.encryption.engine {
            None => 0,
            Some(CryptoEngine::SingleBlock) => SINGLE_BLOCK,
            Some(CryptoEngine::MultiBlock) => SINGLE_BLOCK | MULTI_BLOCK,
        },
        ..mlx5dv_crypto_caps::default()
    };
    if caps.encryption.is_supported {
        let flag = |has: bool, flag: u32| if has { flag } else { 0 };
        let limits = EncryptionLimits::query(ctx).unwrap_or_default();
        encryption.failed_selftests = limits.failed_selftests;
        encryption.wrapped_import_method =
            flag(limits.imports_wrapped, WRAPPED_AES_XTS.into()) as u8;
        encryption.log_max_num_deks = limits.log_max_keys;
        encryption.flags = CRYPTO
            | flag(limits.wrapped_operational, WRAPPED_OPERATIONAL)
            | flag(limits.going_to_commissioning, GOING_TO_COMMISSIONING);
    }
    (signatures, encryption)
}

exported! {
    /// `mlx5dv_mkey_check`: the last wrong signature that a completion queue has reported.
    /// EINVAL for a key without signatures.
    fn _mlx5dv_mkey_check(
        mkey: *mut mlx5dv_mkey,
        error: *mut mlx5dv_mkey_err,
        size: usize
    ) -> c_int
    where is_ours(*(*mkey.cast::<Mkey>()).holder()), else libc::EOPNOTSUPP => {
        // SAFETY: a live key of ours, and room for the answer.
        entry::int(|| unsafe {
            let protection = (*mkey.cast::<Mkey>()).protection().ok_or(Errno::INVAL)?;
            if size < size_of::<mlx5dv_mkey_err>() {
                return Err(Errno::INVAL);
            }
            let found = protection.lock().take_error().map_err(|_| Errno::INVAL)?;
            let Some(found) = found else {
                (*error).err_type = mkey_err::NONE;
                return Ok(());
            };
            error.write(mlx5dv_mkey_err {
                err_type: match found.field {
                    SignatureField::Guard => mkey_err::BAD_GUARD,
                    SignatureField::RefTag => mkey_err::BAD_REFTAG,
                    SignatureField::AppTag => mkey_err::BAD_APPTAG,
                },
                err: mlx5dv_sig_err {
                    actual_value: found.actual,
                    expected_value: found.expected,
                    offset: found.offset,
                },
            });
            Ok(())
        })
    }

    /// `mlx5dv_qp_cancel_posted_send_wrs`: the number of work requests, or a negative
    /// errno: EINVAL if the queue pair has not stopped.
    fn mlx5dv_qp_cancel_posted_send_wrs(functions: *mut mlx5dv_qp_ex, wr_id: u64) -> c_int
    where is_functions(functions), else -libc::EOPNOTSUPP => {
        let mut cancelled = 0;
        // SAFETY: a live queue pair of ours. The send queue is used in its lock's critical
        // section.
        let failed = entry::int(|| unsafe {
            let ibqp = queue_pair(functions);
            let (qp, ctx) = (&*ibqp.cast::<Qp>(), CtxRef::of((*ibqp).qp_base.context));
            cancelled = locked(qp.single, &qp.send_lock, || -> Result<u32, Errno> {
                let object = &qp.object;
                let from = stopped_at(&ctx, object.handle(), object.qp_num())?;
                (*qp.send.get()).cancel(from, wr_id).map_err(|_| Errno::INVAL)
            })?;
            Ok(())
        });
        match failed {
            0 => c_int::try_from(cancelled).unwrap_or(c_int::MAX),
            errno => -errno,
        }
    }
}
