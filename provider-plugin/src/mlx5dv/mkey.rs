//! Indirect memory keys, whose layout work requests configure.

use core::ffi::c_int;

use mlx5::commands::IndirectKey;

use super::abi::*;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::pd::pd_of;

/// A key. Its context is where libmlx5's key has it: its third member leads to an object
/// that begins with it.
#[repr(C)]
pub struct Mkey {
    public: mlx5dv_mkey,
    holder: *mut *mut ibv_context,
    context: *mut ibv_context,
    key: IndirectKey<CtxRef>,
}

impl Mkey {
    /// Elements that its layout may have.
    pub fn entries(&self) -> u16 {
        self.key.entries
    }
}

exported! {
    /// `mlx5dv_create_mkey`. EOPNOTSUPP for signatures and encryption.
    fn mlx5dv_create_mkey(attr: *mut mlx5dv_mkey_init_attr) -> *mut mlx5dv_mkey
    where is_ours((*(*attr).pd).context), else ringverbs_refused_object().cast() => {
        // SAFETY: the application's attributes, with a live protection domain.
        entry::pointer(|| unsafe {
            let attr = &mut *attr;
            let known = mkey_flag::INDIRECT | mkey_flag::REMOTE_INVALIDATE;
            if attr.create_flags == 0 || attr.create_flags & !known != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let context = (*attr.pd).context;
            let key = IndirectKey::create(
                &CtxRef::of(context),
                pd_of(attr.pd).number,
                attr.max_entries,
                attr.create_flags & mkey_flag::REMOTE_INVALIDATE != 0,
            )?;
            attr.max_entries = key.entries;
            let mut mkey = try_box(Mkey {
                public: mlx5dv_mkey { lkey: key.key, rkey: key.key },
                holder: core::ptr::null_mut(),
                context,
                key,
            })
            .map_err(|(_, errno)| errno)?;
            mkey.holder = &raw mut mkey.context;
            Ok(Box::into_raw(mkey).cast())
        })
    }

    /// `mlx5dv_destroy_mkey`. EBUSY, and the key stays, while it is used.
    fn mlx5dv_destroy_mkey(mkey: *mut mlx5dv_mkey) -> c_int
    where is_ours(*(*mkey.cast::<Mkey>()).holder), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_create_mkey` made, once.
        entry::int(|| unsafe {
            let mkey = mkey.cast::<Mkey>();
            destroyed((*mkey).key.object.destroy().map_err(Into::into))?;
            drop(Box::from_raw(mkey));
            Ok(())
        })
    }
}
