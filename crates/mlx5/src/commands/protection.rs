//! Device objects for the protection of memory keys: PSVs, data encryption keys, logins;
//! queue pairs that stop at a wrong signature.

use uverbs::{Context, ContextRef, QpHandle};

use super::{
    ANSWER, Capabilities, Input, create, create_with, devx, group, modify, object_type, on_qp,
    opcode, query, query_object, query_qp, word,
};
use crate::{CreateError, CryptoEngine};

/// Offset of an object in a command and in an answer.
const OBJECT: usize = 16;

/// The signatures that the device computes and checks; none if `is_supported` is false.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignatureSupport {
    /// The device supports signatures, also in keys of programs.
    pub is_supported: bool,
    /// Of blocks of 4048 bytes.
    pub block_4048: bool,
    /// By Castagnoli's CRC.
    pub crc32c: bool,
    /// By the CRC of XP10.
    pub crc64_xp10: bool,
}

/// Support of encryption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncryptionSupport {
    /// The device has encryption capabilities.
    pub is_supported: bool,
    /// Its engine, if it has one.
    pub engine: Option<CryptoEngine>,
}

/// The encryption capabilities of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncryptionLimits {
    /// Self-tests that have failed, as bits.
    pub failed_selftests: u16,
    /// Encryption keys may, and must, be wrapped.
    pub imports_wrapped: bool,
    /// Binary logarithm of the number of encryption keys.
    pub log_max_keys: u8,
    /// Wrapped keys can be used, after a login.
    pub wrapped_operational: bool,
    /// Wrapped keys can still be configured.
    pub going_to_commissioning: bool,
}

impl EncryptionLimits {
    /// Queries the capabilities.
    ///
    /// # Errors
    /// As [`Capabilities::query`].
    pub fn query(context: &Context) -> Result<Self, CreateError> {
        const AES: u32 = 1 << 2;
        query(context, group::CRYPTO, |word| Self {
            failed_selftests: (word(8) >> 16) as u16,
            imports_wrapped: word(0) & AES != 0,
            log_max_keys: (word(4) >> 16 & 0x1f) as u8,
            wrapped_operational: word(0) & 1 << 31 != 0,
            going_to_commissioning: word(0) & 1 << 30 != 0,
        })
    }
}

/// The state of a signature in the device (protection signature value).
#[derive(Debug)]
pub struct Psv<C: ContextRef> {
    /// The kernel's object.
    pub object: devx::DevxObject<C>,
    /// Its number.
    pub number: u32,
}

impl<C: ContextRef> Psv<C> {
    /// Creates a PSV in the protection domain with number `pdn`.
    ///
    /// # Errors
    /// The device's.
    pub fn create(context: &C, pdn: u32) -> Result<Self, CreateError> {
        const NUMBER: usize = 16;
        let mut input = Input::<16>::new(opcode::CREATE_PSV);
        input.set(8, 1 << 28 | pdn & 0xff_ffff);
        let mut answer = [0; 32];
        let object = create_with(context, "CREATE_PSV", &input, &mut answer)?;
        Ok(Self {
            object,
            number: word(&answer, NUMBER) & 0xff_ffff,
        })
    }
}

/// Attributes of an [`EncryptionKey`].
#[derive(Clone, Copy, Debug)]
pub struct EncryptionKeyInit<'a> {
    /// The number of the protection domain.
    pub pdn: u32,
    /// The key has 256 bits, not 128.
    pub is_long: bool,
    /// The key ends with a tag, which its users must give.
    pub has_tag: bool,
    /// Returned by a query.
    pub opaque: [u8; 8],
    /// The key, wrapped or not.
    pub key: &'a [u8; 128],
}

/// A data encryption key.
#[derive(Debug)]
pub struct EncryptionKey<C: ContextRef> {
    /// The kernel's object.
    pub object: devx::DevxObject<C>,
    /// Its number.
    pub number: u32,
}

impl<C: ContextRef> EncryptionKey<C> {
    const KEY: usize = OBJECT + 0x40;
    const OPAQUE: usize = OBJECT + 0x30;

    /// Creates a key.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`]; the device's.
    pub fn create(context: &C, init: &EncryptionKeyInit<'_>) -> Result<Self, CreateError> {
        const AES_XTS: u32 = 3;
        const HAS_TAG: u32 = 1 << 7;
        let caps = Capabilities::query(context)?;
        if caps.encryption.engine.is_none() || !caps.has_object(object_type::DEK) {
            return Err(CreateError::Unsupported {
                what: "data encryption keys",
            });
        }
        let mut input = Input::<272>::general(opcode::CREATE_GENERAL_OBJECT, object_type::DEK);
        let tag = if init.has_tag { HAS_TAG } else { 0 };
        input.set(OBJECT + 8, u32::from(init.is_long) << 8 | tag | AES_XTS);
        input.set(OBJECT + 0xc, init.pdn & 0xff_ffff);
        input.0[Self::OPAQUE..][..8].copy_from_slice(&init.opaque);
        input.0[Self::KEY..][..128].copy_from_slice(init.key);
        let (object, number) = create(context, "CREATE_GENERAL_OBJECT", &input)?;
        Ok(Self { object, number })
    }

    /// Queries whether the key is ready, and its opaque bytes.
    ///
    /// # Errors
    /// The device's; [`CreateError::BadAnswer`].
    pub fn query(&self) -> Result<(bool, [u8; 8]), CreateError> {
        let mut answer = [0; OBJECT + 256];
        query_general(&self.object, object_type::DEK, self.number, &mut answer)?;
        let usable = match word(&answer, OBJECT + 8) >> 24 {
            0 => true,
            1 => false,
            _ => {
                return Err(CreateError::BadAnswer {
                    what: "the state of a data encryption key",
                });
            }
        };
        let mut opaque = [0; 8];
        opaque.copy_from_slice(&answer[Self::OPAQUE..][..8]);
        Ok((usable, opaque))
    }
}

/// A login, which wrapped encryption keys require.
#[derive(Debug)]
pub struct Login<C: ContextRef> {
    /// The kernel's object.
    pub object: devx::DevxObject<C>,
    number: u32,
}

impl<C: ContextRef> Login<C> {
    /// Maximum bytes of a credential.
    pub const MAX_CREDENTIAL: usize = 48;

    /// Logs in with a credential. The ids are those of the credential and of the key that
    /// unwraps keys.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`]; [`CreateError::TooLarge`]; the device's.
    pub fn create(
        context: &C,
        credential_id: u32,
        import_key_id: u32,
        credential: &[u8],
    ) -> Result<Self, CreateError> {
        const CREDENTIAL: usize = OBJECT + 0x40;
        let caps = Capabilities::query(context)?;
        let operational = caps.encryption.is_supported
            && EncryptionLimits::query(context)?.wrapped_operational
            && caps.has_object(object_type::CRYPTO_LOGIN);
        if !operational {
            return Err(CreateError::Unsupported {
                what: "logins for wrapped encryption keys",
            });
        }
        let too_large = |what| CreateError::TooLarge { what };
        if (credential_id | import_key_id) >> 24 != 0 {
            return Err(too_large("the number of a credential or an import key"));
        }
        let mut input =
            Input::<272>::general(opcode::CREATE_GENERAL_OBJECT, object_type::CRYPTO_LOGIN);
        input.set(OBJECT + 0x10, credential_id);
        input.set(OBJECT + 0x14, import_key_id);
        (input.0[CREDENTIAL..][..Self::MAX_CREDENTIAL].get_mut(..credential.len()))
            .ok_or(too_large("credential_len"))?
            .copy_from_slice(credential);
        let (object, number) = create(context, "CREATE_GENERAL_OBJECT", &input)?;
        Ok(Self { object, number })
    }

    /// Returns whether the login is valid.
    ///
    /// # Errors
    /// As [`EncryptionKey::query`].
    pub fn is_valid(&self) -> Result<bool, CreateError> {
        let mut answer = [0; OBJECT + 256];
        let kind = object_type::CRYPTO_LOGIN;
        query_general(&self.object, kind, self.number, &mut answer)?;
        match word(&answer, OBJECT + 0x10) >> 24 & 0xf {
            0 => Ok(true),
            1 => Ok(false),
            _ => Err(CreateError::BadAnswer {
                what: "the state of a login",
            }),
        }
    }
}

fn query_general<C: ContextRef>(
    object: &devx::DevxObject<C>,
    kind: u32,
    number: u32,
    answer: &mut [u8],
) -> Result<(), CreateError> {
    let mut input = Input::<ANSWER>::general(opcode::QUERY_GENERAL_OBJECT, kind);
    input.set(8, number);
    let (context, handle) = (object.context(), object.handle().0);
    query_object(context, handle, "QUERY_GENERAL_OBJECT", &input, answer)
}

/// Makes a queue pair in the state INIT stop (SQD) after a work request with a wrong
/// signature.
///
/// # Errors
/// The device's.
pub fn stop_at_wrong_signatures(
    context: &Context,
    handle: QpHandle,
    number: u32,
) -> Result<(), CreateError> {
    const CONTEXT: usize = 0x18;
    const DRAIN_SIGERR: u32 = 1 << 26;
    const MASK: usize = 0x10;
    const CHANGES_DRAIN_SIGERR: u32 = 1 << 11;
    let mut input = on_qp(opcode::INIT2INIT_QP, number, false, 0);
    input.set(MASK, CHANGES_DRAIN_SIGERR);
    input.set(CONTEXT + 4, DRAIN_SIGERR);
    modify(context, handle, "INIT2INIT_QP", &input)
}

/// Returns the block at which a queue pair's send queue has stopped (SQD), modulo 2^16.
///
/// # Errors
/// [`CreateError::TooLarge`] (EINVAL) if it has not; the device's.
pub fn stopped_at(context: &Context, handle: QpHandle, number: u32) -> Result<u16, CreateError> {
    const CONTEXT: usize = 0x18;
    const STOPPED: u32 = 5;
    let answer = query_qp(context, handle, number)?;
    if word(&answer, CONTEXT) >> 28 != STOPPED {
        return Err(CreateError::TooLarge {
            what: "the state of a queue pair",
        });
    }
    Ok((word(&answer, CONTEXT + 0xb4) >> 16) as u16)
}
