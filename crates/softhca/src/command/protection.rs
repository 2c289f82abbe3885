//! Commands of signatures and encryption of memory keys: PSVs, data encryption keys.

use super::NUMBER;
use super::general::OBJECT;
use super::resource::{created, removed};
use crate::bits::{Field, field, flag, get_array, put_bytes};
use crate::engine::core::Core;
use crate::engine::protection::EncryptionKey;
use crate::engine::signed::Psv;
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

/// Object type of data encryption keys.
pub(crate) const ENCRYPTION_KEY: u32 = 0xc;
/// Base-2 logarithm of the number of encryption keys.
pub(crate) const LOG_MOST_KEYS: u32 = 12;

/// How many PSVs a command creates. Hardware has up to four; drivers create one.
const COUNT: Field = field(8, 31, 28);
const MOST_AT_ONCE: u32 = 4;
const PD: Field = field(8, 23, 0);
const FIRST_PSV: usize = 0x10;

/// Where an object is behind the header.
const KEY_OBJECT: usize = 0x10;
const KEY_SIZE: Field = field(KEY_OBJECT + 8, 11, 8);
const HAS_TAG: Field = flag(KEY_OBJECT + 8, 7);
const PURPOSE: Field = field(KEY_OBJECT + 8, 3, 0);
const KEY_PD: Field = field(KEY_OBJECT + 0xc, 23, 0);
const OPAQUE: usize = KEY_OBJECT + 0x30;
const KEY: usize = KEY_OBJECT + 0x40;
const TAG: usize = 8;

const PURPOSE_AES_XTS: u32 = 3;

impl<P: Platform> Core<P> {
    pub(crate) fn create_psv(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let (count, pd) = (COUNT.get(input), PD.get(input));
        if !(1..=MOST_AT_ONCE).contains(&count) {
            return Err(refuse(Status::BadParameter, "the number of PSVs"));
        }
        if !self.has_pd(pd) {
            return Err(refuse(Status::BadResource, "the PSV's protection domain"));
        }
        let mut made = Vec::new();
        for n in 0..count {
            let Ok(number) = self.psvs.insert(Psv { pd, ready: false }) else {
                for number in made {
                    self.psvs.remove(number);
                }
                return Err(refuse(Status::ExceedsLimit, "there are too many PSVs"));
            };
            made.push(number);
            field(FIRST_PSV + 4 * n as usize, 23, 0).put(output, number);
        }
        Ok(())
    }

    pub(crate) fn destroy_psv(&mut self, input: &[u8]) -> Outcome {
        removed(self.psvs.remove(NUMBER.get(input)))
    }

    pub(crate) fn create_encryption_key(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let pd = KEY_PD.get(input);
        if !self.has_pd(pd) {
            return Err(refuse(
                Status::BadResource,
                "the encryption key's protection domain",
            ));
        }
        let bytes = match (PURPOSE.get(input), KEY_SIZE.get(input)) {
            (PURPOSE_AES_XTS, 0) => 32,
            (PURPOSE_AES_XTS, 1) => 64,
            _ => {
                return Err(refuse(
                    Status::BadParameter,
                    "the purpose or the size of an encryption key",
                ));
            }
        };
        let Some((keys, tag)) = input
            .get(KEY..KEY + bytes + TAG)
            .map(|key| key.split_at(bytes))
        else {
            return Err(refuse(Status::BadInputLength, "the encryption key"));
        };
        let key = EncryptionKey {
            pd,
            keys: keys.to_vec(),
            tag: HAS_TAG.is_set(input).then(|| get_array(tag, 0)),
            opaque: get_array(input, OPAQUE),
        };
        created(output, self.encryption_keys.insert(key).map_err(drop))
    }

    pub(crate) fn query_encryption_key(&self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(key) = self.encryption_keys.get(OBJECT.get(input)) else {
            return Err(refuse(Status::BadResource, "no such encryption key"));
        };
        PURPOSE.put(output, PURPOSE_AES_XTS);
        KEY_SIZE.put(output, u32::from(key.keys.len() > 32));
        HAS_TAG.put(output, key.tag.is_some().into());
        KEY_PD.put(output, key.pd);
        put_bytes(output, OPAQUE, &key.opaque);
        Ok(())
    }
}
