//! Protection of the data behind a memory key: signatures of its blocks, encryption.
//!
//! Such a key has byte stream formats (BSF): one for signatures, one for encryption. A
//! change of its layout carries them behind the elements. The state of a signature is in a
//! PSV of the device, one for memory and one for the wire, which SET_PSV work requests set.
//! The device reports a wrong signature by a CQE that names the key and no work request
//! ([`ProtectedKeys`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::PostError;
use crate::abi::{SignatureErrorCqe, umr_mask};
use crate::send::words;

/// Size of a block of data: the selector in a byte stream format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockSize {
    /// 512 bytes.
    Bytes512 = 1,
    /// 520 bytes.
    Bytes520 = 2,
    /// 4096 bytes.
    Bytes4096 = 3,
    /// 4160 bytes.
    Bytes4160 = 4,
    /// 4048 bytes.
    Bytes4048 = 6,
}

impl BlockSize {
    /// The size in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Bytes512 => 512,
            Self::Bytes520 => 520,
            Self::Bytes4048 => 4048,
            Self::Bytes4096 => 4096,
            Self::Bytes4160 => 4160,
        }
    }
}

/// A kind of checksum ([`Signature::Crc`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrcKind {
    /// CRC-32, as in Fibre Channel.
    Crc32,
    /// CRC-32C (Castagnoli).
    Crc32c,
    /// CRC-64 of XP10.
    Crc64Xp10,
}

/// Tag values of a [`T10Dif`] that exempt its guard from the check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Escape {
    /// Never.
    #[default]
    Never,
    /// If the application tag is all ones.
    AppTag,
    /// If both tags are all ones.
    BothTags,
}

/// The integrity field of T10: guard, application tag, reference tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct T10Dif {
    /// The guard is an Internet checksum, not a CRC.
    pub checksum: bool,
    /// The guard's initial value: 0 or all ones.
    pub seed: u16,
    /// The application tag.
    pub app_tag: u16,
    /// The first block's reference tag.
    pub ref_tag: u32,
    /// The reference tag grows by one with each block.
    pub increments: bool,
    /// Blocks that are not checked.
    pub escape: Escape,
}

/// The signature behind each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// An integrity field.
    T10Dif(T10Dif),
    /// A checksum.
    Crc {
        /// Its kind.
        kind: CrcKind,
        /// The initial value: 0 or all ones.
        seed: u64,
    },
}

/// Blocks and their signatures, in memory or on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignatureDomain {
    /// Bytes of a block.
    pub block: BlockSize,
    /// The signature behind it.
    pub signature: Signature,
}

/// SignatureState of a key's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSignature {
    /// In memory.
    pub memory: Option<SignatureDomain>,
    /// On the wire.
    pub wire: Option<SignatureDomain>,
    /// Bytes of an arriving signature that are checked, as bits.
    pub check_mask: u8,
    /// Bytes that are copied instead of computed; `None`: the bytes that both domains share.
    pub copy_mask: Option<u8>,
}

/// Encryption of a key's data by AES-XTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// Data is encrypted when it is sent and decrypted when it is received; if false, the
    /// reverse.
    pub encrypts_sent: bool,
    /// SignatureState are computed before encryption or decryption when data is sent, and
    /// after it when data is received.
    pub signature_first: bool,
    /// Bytes of a unit.
    pub unit: BlockSize,
    /// The first unit's tweak.
    pub tweak: [u8; 16],
    /// The number of the data encryption key ([`crate::commands::EncryptionKey`]).
    pub key: u32,
    /// The tag at the end of the encryption key, if it was created with one.
    pub key_tag: [u8; 8],
}

/// The device's AES-XTS engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CryptoEngine {
    /// A key spans at most one unit.
    #[default]
    SingleBlock,
    /// A key may span several units; the tweak is big-endian.
    MultiBlock,
}

/// A wrong signature that the device has reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignatureError {
    /// The wrong field.
    pub field: SignatureField,
    /// The value that was computed.
    pub expected: u64,
    /// The value that was received.
    pub actual: u64,
    /// The offset in the key's data.
    pub offset: u64,
}

/// A field of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureField {
    /// The guard, or the checksum.
    Guard,
    /// The reference tag.
    RefTag,
    /// The application tag.
    AppTag,
}

/// The last signature error of a key: completion queues write it, the key's owner takes it.
#[derive(Debug, Default)]
struct ReportedErrors {
    last: Option<SignatureErrorCqe>,
    count: u32,
    /// The count changed since the last work request that told the device.
    is_new: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The keys with signatures of a context: completion queues find the key of an error. Any
/// thread; locks, off the fast path.
#[derive(Debug, Default)]
pub struct ProtectedKeys(Mutex<BTreeMap<u32, Arc<Mutex<ReportedErrors>>>>);

impl ProtectedKeys {
    /// Records an error. Returns false if the key is unknown.
    pub(crate) fn report(&self, cqe: SignatureErrorCqe) -> bool {
        let keys = locked(&self.0);
        let Some(errors) = keys.get(&(u32::from_be(cqe.mkey) >> 8)) else {
            return false;
        };
        let mut errors = locked(errors);
        errors.last = Some(cqe);
        errors.count = errors.count.wrapping_add(1);
        errors.is_new = true;
        true
    }
}

/// State of a byte stream format in the open configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BsfState {
    /// The key has no such format.
    #[default]
    Absent,
    /// The configuration removes it.
    Removed,
    /// An earlier configuration set it.
    Set,
    /// The configuration sets it.
    New,
}

#[derive(Debug)]
struct SignatureState {
    block: BlockSignature,
    bsf_state: BsfState,
    /// The numbers of the PSVs, of memory and wire.
    psvs: [u32; 2],
    errors: Arc<Mutex<ReportedErrors>>,
    keys: Arc<ProtectedKeys>,
    index: u32,
}

impl Drop for SignatureState {
    fn drop(&mut self) {
        locked(&self.keys.0).remove(&self.index);
    }
}

#[derive(Debug)]
struct EncryptionState {
    attributes: Option<Encryption>,
    bsf_state: BsfState,
    engine: CryptoEngine,
}

/// The protection of an indirect key
/// ([`IndirectKey`](crate::commands::IndirectKey)), which work requests configure.
#[derive(Debug)]
pub struct KeyProtection {
    signatures: Option<SignatureState>,
    encrypted: Option<EncryptionState>,
    /// Bytes of the last layout.
    length: u64,
}

/// Segments of a byte stream format.
const BSF_SEGMENTS: usize = 4;
const SIGNATURES_ONLY: u8 = 2 << 6;
const WITH_ENCRYPTION: u8 = 3 << 6;
const ENCRYPTION: u8 = 1;
const SAME_STRUCTURE: u8 = 1 << 4;

/// The part of a work request that changes a key's protection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProtectionChange {
    formats: [[u64; 2]; 2 * BSF_SEGMENTS],
    segments: usize,
    /// Whether the key has formats, if that changes.
    enables: Option<bool>,
    /// The lowest bit of the count of reported errors, if it has changed.
    errors: Option<u32>,
    /// PSVs and their new values.
    pub(crate) psvs: [Option<(u32, u64)>; 2],
}

impl ProtectionChange {
    /// The segments of the formats.
    pub(crate) fn formats(&self) -> &[[u64; 2]] {
        &self.formats[..self.segments]
    }

    /// The mask bits of the work request.
    pub(crate) fn mask(&self) -> u64 {
        let bit = |changes: bool, bit: u64| if changes { bit } else { 0 };
        bit(self.enables.is_some(), umr_mask::BSF_ENABLE)
            | bit(self.errors.is_some(), umr_mask::SIG_ERR)
    }

    /// Whether work requests that set PSVs follow.
    pub(crate) fn sets_psvs(&self) -> bool {
        self.psvs.iter().any(Option::is_some)
    }

    /// The key's flags.
    pub(crate) fn key_flags(&self) -> u32 {
        let enabled = if self.enables == Some(true) {
            1 << 30
        } else {
            0
        };
        enabled | self.errors.unwrap_or(0) << 26
    }

    fn push(&mut self, format: [[u64; 2]; BSF_SEGMENTS]) {
        self.formats[self.segments..][..BSF_SEGMENTS].copy_from_slice(&format);
        self.segments += BSF_SEGMENTS;
    }
}

impl KeyProtection {
    /// The protection of a new key, without signatures or encryption set.
    ///
    /// `psvs` are the PSVs of memory and wire, of a key that may have signatures.
    pub fn new(
        key: u32,
        psvs: Option<[u32; 2]>,
        encryption: Option<CryptoEngine>,
        keys: &Arc<ProtectedKeys>,
    ) -> Self {
        let signatures = psvs.map(|psvs| {
            // The device counts from 0; a new count makes the first configuration start the
            // check.
            let errors = ReportedErrors {
                count: 1,
                is_new: true,
                ..ReportedErrors::default()
            };
            let errors = Arc::new(Mutex::new(errors));
            locked(&keys.0).insert(key >> 8, Arc::clone(&errors));
            SignatureState {
                block: BlockSignature::default(),
                bsf_state: BsfState::Absent,
                psvs,
                errors,
                keys: Arc::clone(keys),
                index: key >> 8,
            }
        });
        Self {
            signatures,
            encrypted: encryption.map(|engine| EncryptionState {
                attributes: None,
                bsf_state: BsfState::Absent,
                engine,
            }),
            length: 0,
        }
    }

    /// Opens a configuration. With `reset` the key's signatures are removed.
    pub fn open(&mut self, reset: bool) {
        if let Some(signatures) = &mut self.signatures {
            signatures.bsf_state = match (reset, signatures.bsf_state) {
                (true, _) => {
                    signatures.block = BlockSignature::default();
                    BsfState::Removed
                }
                (false, BsfState::New) => BsfState::Set,
                (false, BsfState::Removed) => BsfState::Absent,
                (false, bsf_state) => bsf_state,
            };
        }
        if let Some(encrypted) = &mut self.encrypted {
            if encrypted.bsf_state == BsfState::New {
                encrypted.bsf_state = BsfState::Set;
            }
        }
    }

    /// Sets the signatures, once in a configuration.
    ///
    /// # Errors
    /// [`PostError::BadOperation`], also for a key that was not created for signatures.
    pub fn set_signatures(&mut self, block: BlockSignature) -> Result<(), PostError> {
        let signatures = self.signatures.as_mut();
        let signatures = signatures.filter(|signatures| signatures.bsf_state != BsfState::New);
        let signatures = signatures.ok_or(PostError::BadOperation)?;
        (signatures.block, signatures.bsf_state) = (block, BsfState::New);
        Ok(())
    }

    /// Sets the encryption, once in a configuration.
    ///
    /// # Errors
    /// As [`KeyProtection::set_signatures`].
    pub fn set_encryption(&mut self, attributes: Encryption) -> Result<(), PostError> {
        let encrypted = self.encrypted.as_mut();
        let encrypted = encrypted.filter(|encrypted| encrypted.bsf_state != BsfState::New);
        let encrypted = encrypted.ok_or(PostError::BadOperation)?;
        (encrypted.attributes, encrypted.bsf_state) = (Some(attributes), BsfState::New);
        Ok(())
    }

    /// Returns the protection change of the open configuration. `length` is that of a new
    /// layout.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] for attributes that cannot be combined.
    pub(crate) fn change(&mut self, length: Option<u64>) -> Result<ProtectionChange, PostError> {
        self.length = length.unwrap_or(self.length);
        let mut change = ProtectionChange::default();
        let (bsf_state, encryption) = (
            self.signatures
                .as_ref()
                .map(|signatures| signatures.bsf_state),
            self.encryption()?,
        );
        let mut sets_psvs = bsf_state == Some(BsfState::New);
        if let Some(signatures) = &self.signatures {
            let mut errors = locked(&signatures.errors);
            if std::mem::take(&mut errors.is_new) {
                change.errors = Some(errors.count & 1);
                // The device has stopped checking: set the PSVs again.
                sets_psvs |= signatures.bsf_state == BsfState::Set;
            }
        }
        let new_encryption =
            (self.encrypted.as_ref()).is_some_and(|all| all.bsf_state == BsfState::New);
        let has_formats = match (bsf_state, &self.encrypted) {
            (_, None) => bsf_state == Some(BsfState::New),
            (Some(BsfState::New | BsfState::Removed), Some(_)) => true,
            (_, Some(_)) => new_encryption,
        };
        if has_formats {
            if self.length > u32::MAX.into() {
                return Err(PostError::BadOperation);
            }
            if let Some(signatures) = &self.signatures {
                change.push(signatures.format(encryption.is_some())?);
            }
            if let Some((attributes, engine)) = encryption {
                let block = self.signatures.as_ref().map(|signatures| &signatures.block);
                change.push(encryption_format(attributes, engine, block)?);
            }
            change.enables = Some(true);
        } else if self.encrypted.is_none()
            && matches!(bsf_state, Some(BsfState::Absent | BsfState::Removed))
        {
            change.enables = Some(false);
        }
        if let (true, Some(signatures)) = (sets_psvs, &self.signatures) {
            change.psvs = signatures.psv_values();
        }
        Ok(change)
    }

    /// The key's encryption and the device's engine.
    fn encryption(&self) -> Result<Option<(&Encryption, CryptoEngine)>, PostError> {
        let Some(encrypted) = &self.encrypted else {
            return Ok(None);
        };
        let Some(attributes) = &encrypted.attributes else {
            return Ok(None);
        };
        if encrypted.engine == CryptoEngine::SingleBlock
            && self.length > attributes.unit.bytes().into()
        {
            return Err(PostError::BadOperation);
        }
        Ok(Some((attributes, encrypted.engine)))
    }

    /// Takes the last error that the device has reported.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] for a key without signatures, or a malformed error.
    pub fn take_error(&mut self) -> Result<Option<SignatureError>, PostError> {
        let signatures = self.signatures.as_ref().ok_or(PostError::BadOperation)?;
        let mut errors = locked(&signatures.errors);
        let Some(last) = &errors.last else {
            return Ok(None);
        };
        let error = signatures.decode(last).ok_or(PostError::BadOperation)?;
        errors.last = None;
        Ok(Some(error))
    }
}

impl SignatureState {
    fn domains(&self) -> [Option<&SignatureDomain>; 2] {
        [self.block.memory.as_ref(), self.block.wire.as_ref()]
    }

    fn psv_values(&self) -> [Option<(u32, u64)>; 2] {
        let mut psvs = self.psvs.into_iter();
        self.domains().map(|domain| {
            let psv = psvs.next().unwrap_or_default();
            domain.map(|domain| (psv, domain.signature.first_value()))
        })
    }

    /// The byte stream format of the signatures.
    fn format(&self, encrypted: bool) -> Result<[[u64; 2]; BSF_SEGMENTS], PostError> {
        const INDEX: u32 = 0xff_ffff;
        let [memory, wire] = self.domains();
        let mut first = match encrypted {
            true => WITH_ENCRYPTION,
            false => SIGNATURES_ONLY,
        };
        let [mut of_memory, mut of_wire] = [0; 2];
        let [mut memory_psv, mut wire_psv] = [0; 2];
        let mut inline = [[0; 2]; 2];
        if let Some(domain) = memory {
            of_memory = domain.block as u8;
            memory_psv = domain.signature.selector() | self.psvs[0] & INDEX;
            inline[1] = domain.signature.inline();
        }
        if let Some(domain) = wire {
            let same = memory.and_then(|memory| domain.copied(memory));
            let copied = match (same, self.block.copy_mask) {
                (None, Some(_)) => return Err(PostError::BadOperation),
                (same, asked) => asked.or(same),
            };
            of_wire = copied.unwrap_or(domain.block as u8);
            if copied.is_some() {
                first |= SAME_STRUCTURE;
            }
            wire_psv = domain.signature.selector() | self.psvs[1] & INDEX;
            inline[0] = domain.signature.inline();
        }
        let check = match (memory, wire) {
            (None, None) => 0,
            _ => self.block.check_mask,
        };
        let head = u32::from_be_bytes([first, check, of_wire, of_memory]);
        Ok([
            [words(head, u32::MAX), words(wire_psv, memory_psv)],
            [0; 2],
            inline[0],
            inline[1],
        ])
    }

    fn decode(&self, cqe: &SignatureErrorCqe) -> Option<SignatureError> {
        let domain = match (cqe.sig_type & 7, cqe.domain & 7) {
            (0, 0) => self.block.wire.as_ref(),
            (0, 1) => self.block.memory.as_ref(),
            _ => None,
        }?;
        let pair = |high: u32, low: u32| {
            u64::from(u32::from_be(high)) << 32 | u64::from(u32::from_be(low))
        };
        let values = [
            pair(cqe.expected_trans_sig, cqe.expected_ref_tag),
            pair(cqe.actual_trans_sig, cqe.actual_ref_tag),
        ];
        let syndrome = u16::from_be(cqe.syndrome);
        let is = |bit: u32| syndrome & 1 << bit != 0;
        let (field, [expected, actual]) = if is(11) {
            (
                SignatureField::RefTag,
                values.map(|value| value & 0xffff_ffff),
            )
        } else if is(12) {
            (
                SignatureField::AppTag,
                values.map(|value| value >> 32 & 0xffff),
            )
        } else if is(13) {
            let shift = match domain.signature {
                Signature::T10Dif(_) => 48,
                Signature::Crc {
                    kind: CrcKind::Crc64Xp10,
                    ..
                } => 0,
                Signature::Crc { .. } => 32,
            };
            (SignatureField::Guard, values.map(|value| value >> shift))
        } else {
            return None;
        };
        Some(SignatureError {
            field,
            expected,
            actual,
            offset: u64::from_be(cqe.sig_err_offset),
        })
    }
}

impl Signature {
    /// The value of a PSV before the first block.
    fn first_value(&self) -> u64 {
        match *self {
            Self::T10Dif(dif) => {
                u64::from(dif.seed) << 48 | u64::from(dif.app_tag) << 32 | u64::from(dif.ref_tag)
            }
            Self::Crc {
                kind: CrcKind::Crc64Xp10,
                seed,
            } => seed,
            Self::Crc { seed, .. } => seed << 32,
        }
    }

    /// The selector of a checksum, above the number of the PSV.
    fn selector(&self) -> u32 {
        const REPEATS: u32 = 0x2;
        const ZERO_SEED: u32 = 0x1;
        let Self::Crc { kind, seed } = self else {
            return 0;
        };
        let base = match kind {
            CrcKind::Crc32 => 0x20,
            CrcKind::Crc32c => 0x40,
            CrcKind::Crc64Xp10 => 0x50,
        };
        let seed = if *seed == 0 { ZERO_SEED } else { 0 };
        (base | REPEATS | seed) << 24
    }

    /// The inline section of an integrity field.
    fn inline(&self) -> [u64; 2] {
        const VALID: u32 = 1 << 31;
        const REFRESHES: u32 = 1 << 30;
        const CRC: u32 = 0x1;
        const CHECKSUM: u32 = 0x2;
        const REPEATS: u32 = 1 << 7;
        const SEED: u32 = 1 << 3;
        const INCREMENTS: u32 = 1 << 6;
        const WHOLE_APP_TAG: u32 = 0xffff;
        let Self::T10Dif(dif) = self else {
            return [0; 2];
        };
        let kind = if dif.checksum { CHECKSUM } else { CRC };
        let seed = if dif.seed == 0 { 0 } else { SEED };
        let escape = match dif.escape {
            Escape::Never => 0,
            Escape::AppTag => 1,
            Escape::BothTags => 2,
        };
        let increments = if dif.increments { INCREMENTS } else { 0 };
        [
            words(VALID | REFRESHES | u32::from(dif.app_tag), dif.ref_tag),
            words(
                kind << 24 | (REPEATS | seed) << 16,
                (escape | increments) << 16 | WHOLE_APP_TAG,
            ),
        ]
    }
}

impl SignatureDomain {
    /// Bytes of the signature that are the same in memory, as bits, if blocks and kind of
    /// signature are.
    fn copied(&self, memory: &Self) -> Option<u8> {
        if self.block != memory.block {
            return None;
        }
        let part = |same: bool, mask: u8| if same { mask } else { 0 };
        match (self.signature, memory.signature) {
            (Signature::Crc { kind, .. }, Signature::Crc { kind: other, .. }) => (kind == other)
                .then_some(match kind {
                    CrcKind::Crc64Xp10 => 0xff,
                    _ => 0xf0,
                }),
            (Signature::T10Dif(wire), Signature::T10Dif(memory)) => {
                let guard = (wire.checksum, wire.seed) == (memory.checksum, memory.seed);
                Some(
                    part(guard, 0xc0)
                        | part(wire.app_tag == memory.app_tag, 0x30)
                        | part(wire.ref_tag == memory.ref_tag, 0x0f),
                )
            }
            _ => None,
        }
    }
}

/// The byte stream format of encryption; `block` are the signatures of a key that has both.
fn encryption_format(
    attributes: &Encryption,
    engine: CryptoEngine,
    block: Option<&BlockSignature>,
) -> Result<[[u64; 2]; BSF_SEGMENTS], PostError> {
    let order = match (attributes.encrypts_sent, attributes.signature_first) {
        (true, true) => 0,
        (false, false) => 1,
        (true, false) => 2,
        (false, true) => 3,
    };
    // The device has no such order of signatures on both sides.
    if order >= 2 && block.is_some_and(|block| block.memory.is_some() && block.wire.is_some()) {
        return Err(PostError::BadOperation);
    }
    let size = match block {
        Some(_) => WITH_ENCRYPTION,
        None => SIGNATURES_ONLY,
    };
    let head = u32::from_be_bytes([size | ENCRYPTION, order, 0, 0]);
    let mut tweak = attributes.tweak;
    if engine == CryptoEngine::MultiBlock {
        tweak.reverse();
    }
    let [low, high]: [[u8; 8]; 2] = [0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&tweak[at..at + 8]);
        half
    });
    Ok([
        [
            words(head, u32::MAX),
            words(u32::from(attributes.unit as u8) << 24, 0),
        ],
        [u64::from_ne_bytes(low), u64::from_ne_bytes(high)],
        [
            words(attributes.key & 0xff_ffff, 0),
            u64::from_ne_bytes(attributes.key_tag),
        ],
        [0; 2],
    ])
}
