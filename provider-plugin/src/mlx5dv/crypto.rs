//! Data encryption keys, and the logins that wrapped keys require.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::slice;
use std::sync::{Mutex, PoisonError};

use mlx5::commands::{Capabilities, EncryptionKey, EncryptionKeyInit, EncryptionLimits, Login};

use super::abi::*;
use super::devx::boxed;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::pd::pd_of;

/// The login of a context, for keys that name no login.
#[derive(Debug, Default)]
pub struct LoginSession(Mutex<Option<Login<CtxRef>>>);

impl LoginSession {
    fn locked<T>(&self, what: impl FnOnce(&mut Option<Login<CtxRef>>) -> T) -> T {
        what(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Logs out, before the context is closed.
    pub fn end(&self) {
        self.locked(Option::take);
    }
}

/// An object whose context is at the same place as in libmlx5's: its first member points to
/// an object that begins with the context pointer.
#[repr(C)]
pub struct CryptoObject<T> {
    holder: *mut *mut ibv_context,
    context: *mut ibv_context,
    object: T,
}

impl<T> CryptoObject<T> {
    fn boxed(context: *mut ibv_context, object: T) -> Result<*mut Self, Errno> {
        let session: *mut Self = boxed(Self {
            holder: null_mut(),
            context,
            object,
        })?;
        // SAFETY: it was made just now.
        unsafe { (*session).holder = &raw mut (*session).context };
        Ok(session)
    }
}

/// `struct mlx5dv_dek`.
pub type Dek = CryptoObject<EncryptionKey<CtxRef>>;
/// `struct mlx5dv_crypto_login_obj`.
pub type LoginObject = CryptoObject<Login<CtxRef>>;

impl Dek {
    /// The device's number of the object.
    pub fn number(&self) -> u32 {
        self.object.number
    }
}

fn state_of(login: &Login<CtxRef>) -> Result<u32, Errno> {
    Ok(match login.is_valid()? {
        true => login_state::VALID,
        false => login_state::INVALID,
    })
}

exported! {
    /// `mlx5dv_crypto_login`. EEXIST if the context has a login.
    fn mlx5dv_crypto_login(
        context: *mut ibv_context,
        attr: *mut mlx5dv_crypto_login_attr
    ) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context, and the application's attributes.
        entry::int(|| unsafe {
            let (ctx, attr) = (CtxRef::of(context), &*attr);
            if attr.comp_mask != 0 {
                return Err(Errno::INVAL);
            }
            ctx.session().locked(|login| {
                if login.is_some() {
                    return Err(Errno(libc::EEXIST));
                }
                let (id, import) = (attr.credential_id, attr.import_kek_id);
                *login = Some(Login::create(&ctx, id, import, &attr.credential)?);
                Ok(())
            })
        })
    }

    /// `mlx5dv_crypto_login_query_state`.
    fn mlx5dv_crypto_login_query_state(context: *mut ibv_context, state: *mut u32) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context, and room for the answer.
        entry::int(|| unsafe {
            state.write(CtxRef::of(context).session().locked(|login| match login {
                None => Ok(login_state::NO_LOGIN),
                Some(login) => state_of(login),
            })?);
            Ok(())
        })
    }

    /// `mlx5dv_crypto_logout`. ENOENT without a login.
    fn mlx5dv_crypto_logout(context: *mut ibv_context) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context.
        entry::int(|| unsafe {
            CtxRef::of(context).session().locked(|login| {
                let open = login.as_ref().ok_or(Errno(libc::ENOENT))?;
                destroyed(open.object.destroy().map_err(Into::into))?;
                *login = None;
                Ok(())
            })
        })
    }

    /// `mlx5dv_crypto_login_create`.
    fn mlx5dv_crypto_login_create(
        context: *mut ibv_context,
        attr: *mut mlx5dv_crypto_login_attr_ex
    ) -> *mut LoginObject
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and the application's attributes.
        entry::pointer(|| unsafe {
            let (ctx, attr) = (CtxRef::of(context), &*attr);
            if attr.comp_mask != 0 || attr.credential_len > Login::<CtxRef>::MAX_CREDENTIAL {
                return Err(Errno::INVAL);
            }
            let credential = match attr.credential_len {
                0 => &[],
                length => slice::from_raw_parts(attr.credential.cast(), length),
            };
            let (id, import) = (attr.credential_id, attr.import_kek_id);
            CryptoObject::boxed(context, Login::create(&ctx, id, import, credential)?)
        })
    }

    /// `mlx5dv_crypto_login_query`.
    fn mlx5dv_crypto_login_query(
        login: *mut LoginObject,
        attr: *mut mlx5dv_crypto_login_query_attr
    ) -> c_int
    where is_ours(*(*login).holder), else libc::EOPNOTSUPP => {
        // SAFETY: a live login, and room for the answer.
        entry::int(|| unsafe {
            if (*attr).comp_mask != 0 {
                return Err(Errno::INVAL);
            }
            (*attr).state = state_of(&(*login).object)?;
            Ok(())
        })
    }

    /// `mlx5dv_crypto_login_destroy`. A login in use is unchanged.
    fn mlx5dv_crypto_login_destroy(login: *mut LoginObject) -> c_int
    where is_ours(*(*login).holder), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_crypto_login_create` made, once.
        entry::int(|| unsafe {
            destroyed((*login).object.object.destroy().map_err(Into::into))?;
            drop(Box::from_raw(login));
            Ok(())
        })
    }

    /// `mlx5dv_dek_create`. EINVAL for a wrapped key without a login or support of the device,
    /// and for a plaintext key if the device requires wrapped keys.
    fn mlx5dv_dek_create(
        context: *mut ibv_context,
        attr: *mut mlx5dv_dek_init_attr
    ) -> *mut Dek
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and the application's attributes.
        entry::pointer(|| unsafe { create_dek(context, attr) })
    }

    /// `mlx5dv_dek_query`.
    fn mlx5dv_dek_query(dek: *mut Dek, attr: *mut mlx5dv_dek_attr) -> c_int
    where is_ours(*(*dek).holder), else libc::EOPNOTSUPP => {
        // SAFETY: a live key, and room for the answer.
        entry::int(|| unsafe {
            if (*attr).comp_mask != 0 {
                return Err(Errno::INVAL);
            }
            let (usable, opaque) = (*dek).object.query()?;
            (*attr).state = if usable { DEK_READY } else { DEK_ERROR };
            (*attr).opaque = opaque;
            Ok(())
        })
    }

    /// `mlx5dv_dek_destroy`. A key in use is unchanged.
    fn mlx5dv_dek_destroy(dek: *mut Dek) -> c_int
    where is_ours(*(*dek).holder), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_dek_create` made, once.
        entry::int(|| unsafe {
            destroyed((*dek).object.object.destroy().map_err(Into::into))?;
            drop(Box::from_raw(dek));
            Ok(())
        })
    }
}

/// # Safety
/// An open context of ours, and the application's attributes.
unsafe fn create_dek(
    context: *mut ibv_context,
    attr: *const mlx5dv_dek_init_attr,
) -> Result<*mut Dek, Errno> {
    // SAFETY: as the caller says. The login is a member that only the mask promises.
    let (ctx, attr, login): (_, &mlx5dv_dek_init_attr, *mut c_void) = unsafe {
        let named = (*attr).comp_mask & DEK_MASK_LOGIN != 0;
        let login = if named {
            (*attr).crypto_login
        } else {
            null_mut()
        };
        (CtxRef::of(context), &*attr, login)
    };
    let caps = Capabilities::query(&ctx)?.encryption;
    if caps.engine.is_none() {
        return Err(Errno::OPNOTSUPP);
    }
    let is_known = attr.key_purpose == PURPOSE_AES_XTS
        && matches!(attr.key_size, KEY_SIZE_128 | KEY_SIZE_256)
        && attr.comp_mask & !DEK_MASK_LOGIN == 0;
    let imports_wrapped = caps.is_supported && EncryptionLimits::query(&ctx)?.imports_wrapped;
    let is_wrapped = match attr.comp_mask & DEK_MASK_LOGIN {
        0 if ctx.session().locked(|login| login.is_none()) => return Err(Errno::INVAL),
        0 => true,
        _ => !login.is_null(),
    };
    if !is_known || is_wrapped != imports_wrapped {
        return Err(Errno::INVAL);
    }
    // SAFETY: a live protection domain, as the caller says.
    let pdn = unsafe { pd_of(attr.pd).number };
    let init = EncryptionKeyInit {
        pdn,
        is_long: attr.key_size == KEY_SIZE_256,
        has_tag: attr.has_keytag,
        opaque: attr.opaque,
        key: &attr.key,
    };
    CryptoObject::boxed(context, EncryptionKey::create(&ctx, &init)?)
}
