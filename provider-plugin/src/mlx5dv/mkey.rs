//! Indirect memory keys, whose layout and protection work requests configure.

use core::ffi::c_int;

use mlx5::commands::{Capabilities, IndirectKey, KeyOptions};

use super::abi::*;
use super::protection::Protection;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::pd::pd_of;

/// A key. Its context is at the same place as in libmlx5's key: its third member points to an
/// object that begins with the context pointer.
#[repr(C)]
pub struct Mkey {
    public: mlx5dv_mkey,
    holder: *mut *mut ibv_context,
    context: *mut ibv_context,
    key: IndirectKey<CtxRef>,
    /// Exclusive limit of a layout's elements; 0 for a key with protection.
    plain_limit: usize,
    /// Signatures and encryption, if it may have any.
    protection: Option<Box<Protection>>,
}

impl Mkey {
    /// Elements that its layout may have.
    pub fn entries(&self) -> u16 {
        self.key.entries
    }

    /// Exclusive limit of the elements of a layout that needs no other check; 0 with
    /// protection.
    pub fn plain_limit(&self) -> usize {
        self.plain_limit
    }

    /// Its signatures and encryption, if it may have any.
    pub fn protection(&self) -> Option<&Protection> {
        self.protection.as_deref()
    }

    /// The pointer to the context pointer, also in libmlx5's keys.
    pub fn holder(&self) -> *mut *mut ibv_context {
        self.holder
    }
}

exported! {
    /// `mlx5dv_create_mkey`. EOPNOTSUPP for signatures or encryption that the device does
    /// not have.
    fn mlx5dv_create_mkey(attr: *mut mlx5dv_mkey_init_attr) -> *mut mlx5dv_mkey
    where is_ours((*(*attr).pd).context), else ringverbs_refused_object().cast() => {
        // SAFETY: the application's attributes, with a live protection domain.
        entry::pointer(|| unsafe { create(&mut *attr) })
    }

    /// `mlx5dv_destroy_mkey`. EBUSY, and the key is unchanged, while it is in use.
    fn mlx5dv_destroy_mkey(mkey: *mut mlx5dv_mkey) -> c_int
    where is_ours(*(*mkey.cast::<Mkey>()).holder), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_create_mkey` made, once.
        entry::int(|| unsafe {
            let mkey = mkey.cast::<Mkey>();
            if let Some(protection) = &mut (*mkey).protection {
                protection.destroy_psvs()?;
            }
            destroyed((*mkey).key.object.destroy().map_err(Into::into))?;
            drop(Box::from_raw(mkey));
            Ok(())
        })
    }
}

/// # Safety
/// A live protection domain of ours.
unsafe fn create(attr: &mut mlx5dv_mkey_init_attr) -> Result<*mut mlx5dv_mkey, Errno> {
    // SAFETY: as the caller says.
    let (context, ctx, pdn) = unsafe {
        let context = (*attr.pd).context;
        (context, CtxRef::of(context), pd_of(attr.pd).number)
    };
    let has = |flag| attr.create_flags & flag != 0;
    let mut known = mkey_flag::INDIRECT
        | mkey_flag::BLOCK_SIGNATURE
        | mkey_flag::CRYPTO
        | mkey_flag::REMOTE_INVALIDATE;
    if ctx.mlx5()?.changes_key_tags() {
        known |= mkey_flag::UPDATE_TAG;
    }
    if attr.create_flags == 0 || has(!known) {
        return Err(Errno::OPNOTSUPP);
    }
    let options = KeyOptions {
        remote_invalidate: has(mkey_flag::REMOTE_INVALIDATE),
        signatures: has(mkey_flag::BLOCK_SIGNATURE),
        encryption: has(mkey_flag::CRYPTO),
    };
    let is_protected = options.signatures || options.encryption;
    let caps = match is_protected {
        true => Capabilities::query(&ctx)?,
        false => Capabilities::default(),
    };
    let engine = caps.encryption.engine.filter(|_| options.encryption);
    if (options.signatures && !caps.signatures.is_supported)
        || (options.encryption && engine.is_none())
    {
        return Err(Errno::OPNOTSUPP);
    }
    let psvs = match options.signatures {
        true => Protection::psvs(&ctx, pdn)?,
        false => Vec::new(),
    };
    let key = IndirectKey::create(&ctx, pdn, attr.max_entries, options)?;
    let protection = match is_protected {
        true => {
            let protection = Protection::new(&ctx, key.key, psvs, engine)?;
            Some(try_box(protection).map_err(|(_, errno)| errno)?)
        }
        false => None,
    };
    let entries = key.entries;
    let mut mkey = try_box(Mkey {
        public: mlx5dv_mkey {
            lkey: key.key,
            rkey: key.key,
        },
        holder: core::ptr::null_mut(),
        context,
        key,
        plain_limit: match protection {
            Some(_) => 0,
            None => usize::from(entries) + 1,
        },
        protection,
    })
    .map_err(|(_, errno)| errno)?;
    attr.max_entries = entries;
    mkey.holder = &raw mut mkey.context;
    Ok(Box::into_raw(mkey).cast())
}
