//! Commands of signatures and encryption of memory keys: PSVs, data encryption keys, logins.

use roce::bits::{Field, field, flag, get_array, put_bytes};

use super::NUMBER;
use super::general::OBJECT;
use super::resource::{full, insert, remove};
use crate::engine::core::Core;
use crate::engine::key_wrap;
use crate::engine::protection::EncryptionKey;
use crate::engine::signed::Psv;
use crate::platform::Platform;
use crate::profile::Group;
use crate::profile::cap::WRAPPED_IMPORT_METHOD;
use crate::status::{Outcome, Rule, Status, invalid, no_object, refuse};

/// Object type of logins, which wrapped encryption keys need.
pub(crate) const LOGIN: u32 = 0x1f;
/// `MLX5_CRYPTO_CAPS_WRAPPED_IMPORT_METHOD_AES`: encryption keys are wrapped.
pub(crate) const WRAPPED_AES: u32 = 1 << 2;
/// The key that wraps encryption keys and credentials, and the credential: number 0 of both.
/// There are no others.
const IMPORT_KEY: &[u8; 16] = b"softhca's KEK 0.";
const CREDENTIAL: &[u8; 40] = b"softhca's credential 0, of forty bytes..";
/// Object type of data encryption keys.
pub(crate) const ENCRYPTION_KEY: u32 = 0xc;
/// How many PSVs a command creates. Hardware has up to four; drivers create one.
const COUNT: Field = field(8, 31, 28);
const MAX_PSVS: u32 = 4;
const PD: Field = field(8, 23, 0);
const FIRST_PSV: usize = 0x10;

/// Offset of the object after the header.
const KEY_OBJECT: usize = 0x10;
const KEY_SIZE: Field = field(KEY_OBJECT + 8, 11, 8);
const HAS_TAG: Field = flag(KEY_OBJECT + 8, 7);
const PURPOSE: Field = field(KEY_OBJECT + 8, 3, 0);
const KEY_PD: Field = field(KEY_OBJECT + 0xc, 23, 0);
const OPAQUE: usize = KEY_OBJECT + 0x30;
const KEY: usize = KEY_OBJECT + 0x40;
const TAG: usize = 8;

const CREDENTIAL_NUMBER: Field = field(KEY_OBJECT + 0x10, 23, 0);
const IMPORT_KEY_NUMBER: Field = field(KEY_OBJECT + 0x14, 23, 0);
const WRAPPED_CREDENTIAL: usize = KEY_OBJECT + 0x40;

const PURPOSE_AES_XTS: u32 = 3;

/// Unwraps the bytes at an offset; `None` if the import key did not wrap them.
fn unwrap_at(input: &[u8], at: usize, length: usize) -> Option<Vec<u8>> {
    key_wrap::unwrap(IMPORT_KEY, input.get(at..at + length + key_wrap::LONGER)?)
}

impl<P: Platform> Core<P> {
    pub(crate) fn create_psv(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let (count, pd) = (COUNT.get(input), PD.get(input));
        if !(1..=MAX_PSVS).contains(&count) {
            return Err(invalid("num_psv", count, Rule::Between(1, MAX_PSVS.into())));
        }
        if !self.has_pd(pd) {
            return Err(no_object("protection domain", pd));
        }
        let mut created = Vec::new();
        for n in 0..count {
            let Ok(number) = self.psvs.insert(Psv { pd, ready: false }) else {
                for number in created {
                    self.psvs.remove(number);
                }
                return Err(full(&self.psvs, "PSV"));
            };
            created.push(number);
            field(FIRST_PSV + 4 * n as usize, 23, 0).put(output, number);
        }
        Ok(())
    }

    pub(crate) fn destroy_psv(&mut self, input: &[u8]) -> Outcome {
        remove(&mut self.psvs, "PSV", NUMBER.get(input))
    }

    pub(crate) fn create_encryption_key(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let pd = KEY_PD.get(input);
        if !self.has_pd(pd) {
            return Err(no_object("protection domain", pd));
        }
        let bytes = match (PURPOSE.get(input), KEY_SIZE.get(input)) {
            (PURPOSE_AES_XTS, 0) => 32,
            (PURPOSE_AES_XTS, 1) => 64,
            _ => {
                return Err(invalid("key_purpose", PURPOSE.get(input), Rule::Supported));
            }
        };
        let has_tag = HAS_TAG.is_set(input);
        let length = bytes + if has_tag { TAG } else { 0 };
        let key = match self.wraps_keys() {
            false => input.get(KEY..KEY + length).map(<[u8]>::to_vec),
            true if !self.has_login() => {
                return Err(no_object(
                    "login of the user context",
                    self.object_owners.uid(),
                ));
            }
            true => unwrap_at(input, KEY, length),
        };
        let key = key.ok_or_else(|| invalid("key", length, Rule::WellFormed))?;
        let key = EncryptionKey {
            pd,
            keys: key[..bytes].to_vec(),
            tag: has_tag.then(|| get_array(&key, bytes)),
            opaque: get_array(input, OPAQUE),
        };
        insert(output, &mut self.encryption_keys, "encryption key", key)
    }

    /// Whether encryption keys have to be wrapped.
    fn wraps_keys(&self) -> bool {
        let method = WRAPPED_IMPORT_METHOD.get(self.capabilities.current(Group::Crypto));
        method & WRAPPED_AES != 0
    }

    /// Whether the user context of the command has logged in.
    fn has_login(&self) -> bool {
        let mut logins = self.logins.iter();
        logins.any(|(_, uid)| *uid == self.object_owners.uid())
    }

    pub(crate) fn create_login(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        if !self.wraps_keys() || self.has_login() {
            return Err(refuse(
                Status::BadResourceState,
                "login of the user context",
                self.object_owners.uid(),
                Rule::Free,
            ));
        }
        if CREDENTIAL_NUMBER.get(input) != 0 || IMPORT_KEY_NUMBER.get(input) != 0 {
            return Err(no_object(
                "credential_pointer",
                CREDENTIAL_NUMBER
                    .get(input)
                    .max(IMPORT_KEY_NUMBER.get(input)),
            ));
        }
        let credential = unwrap_at(input, WRAPPED_CREDENTIAL, CREDENTIAL.len());
        if credential.is_none_or(|credential| credential != CREDENTIAL) {
            return Err(invalid(
                "credential",
                CREDENTIAL_NUMBER.get(input),
                Rule::WellFormed,
            ));
        }
        insert(output, &mut self.logins, "login", self.object_owners.uid())
    }

    pub(crate) fn query_encryption_key(&self, input: &[u8], output: &mut [u8]) -> Outcome {
        if self.wraps_keys() && !self.has_login() {
            return Err(no_object(
                "login of the user context",
                self.object_owners.uid(),
            ));
        }
        let Some(key) = self.encryption_keys.get(OBJECT.get(input)) else {
            return Err(no_object("encryption key", OBJECT.get(input)));
        };
        PURPOSE.put(output, PURPOSE_AES_XTS);
        KEY_SIZE.put(output, u32::from(key.keys.len() > 32));
        HAS_TAG.put(output, key.tag.is_some().into());
        KEY_PD.put(output, key.pd);
        put_bytes(output, OPAQUE, &key.opaque);
        Ok(())
    }
}
