//! Memory key commands.

use roce::bits::{Field, field, flag, get64, put64};

use super::NUMBER;
use super::load::object_number;
use crate::engine::core::Core;
use crate::engine::mkey::{Klm, MAX_LOG_PAGE_SIZE, Mkey, READABLE, Translation, WRITABLE, rights};
use crate::platform::Platform;
use crate::status::{CommandError, Outcome, Status, refuse};

pub(crate) const CONTEXT: usize = 0x10;
const FREE: Field = flag(0, 30);
const MODE_HIGH: Field = field(0, 28, 26);
const UMR_EN: Field = flag(0, 15);
const MODE_LOW: Field = field(0, 9, 8);
const QPN: Field = field(4, 31, 8);
const VARIANT: Field = field(4, 7, 0);
const LENGTH64: Field = flag(0xc, 31);
const BSF_EN: Field = flag(0xc, 30);
const REMOTE_INVALIDATE: Field = flag(0xc, 24);
const PD: Field = field(0xc, 23, 0);
const START: usize = 0x10;
const LENGTH: usize = 0x18;
/// 16-byte units of byte stream formats.
const BSF_OCTWORDS: Field = field(0x20, 31, 0);
const CAPACITY: Field = field(0x34, 31, 0);
const LOG_PAGE_SIZE: Field = field(0x38, 5, 0);
/// The number of 16-byte units of translation entries in the command.
const ACTUAL_OCTWORDS: Field = field(0x60, 31, 0);
const LIST: usize = 0x110;
/// The memory of a program, in place of a list of pages.
const IN_UMEM: Field = flag(0xc, 30);
const UMEM: Field = field(0x64, 31, 0);
const UMEM_OFFSET: usize = 0x68;

const MODE_PA: u32 = 0;
const MODE_MTT: u32 = 1;
const MODE_KLMS: u32 = 2;
const MODE_KSM: u32 = 3;
const MODE_MEMIC: u32 = 5;

/// Mask for a page entry: the address and the bits for readable and writable.
const PAGE: u64 = !0x4;
/// Set if the page entries have access bits; otherwise all pages are present.
const PAGE_ACCESS: Field = flag(0xc, 31);

/// Decodes a translation from its entries.
pub(crate) fn translation(
    mode: u32,
    log_page_size: u32,
    entries: &[u8],
    start: u64,
) -> Result<Translation, CommandError> {
    let keys = || entries.chunks_exact(16).map(Klm::parse).collect();
    // The driver gives 0 if there is only one page size.
    let shift = if log_page_size == 0 {
        12
    } else {
        log_page_size
    };
    match mode {
        MODE_PA => Ok(Translation::Contiguous(start)),
        MODE_MEMIC => Ok(Translation::Device(start)),
        MODE_MTT | MODE_KSM if shift > MAX_LOG_PAGE_SIZE => Err(refuse(
            Status::BadParameter,
            "invalid page size of the memory key",
        )),
        MODE_MTT => Ok(Translation::Pages {
            pages: entries
                .chunks_exact(8)
                .map(|entry| get64(entry, 0) & PAGE)
                .collect(),
            shift,
        }),
        MODE_KLMS => Ok(Translation::Klms(keys())),
        MODE_KSM => Ok(Translation::Ksms {
            keys: keys(),
            shift,
        }),
        _ => Err(refuse(
            Status::BadParameter,
            "this access mode is not modelled",
        )),
    }
}

impl<P: Platform> Core<P> {
    pub(crate) fn create_mkey(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[CONTEXT.min(input.len())..];
        let pd = PD.get(context);
        let free = FREE.is_set(context);
        if !free && !self.has_pd(pd) {
            return Err(refuse(
                Status::BadResource,
                "the memory key's protection domain does not exist",
            ));
        }
        let mode = MODE_HIGH.get(context) << 2 | MODE_LOW.get(context);
        let driver_only = matches!(mode, MODE_PA | MODE_MEMIC);
        if driver_only && self.object_owners.is_program() {
            return Err(refuse(
                Status::BadParameter,
                "only the driver may create this memory key",
            ));
        }
        let log_page_size = LOG_PAGE_SIZE.get(context);
        let octwords = ACTUAL_OCTWORDS.get(input) as usize;
        let list = &input[LIST.min(input.len())..];
        let bytes = octwords
            .checked_mul(16)
            .and_then(|bytes| list.get(..bytes))
            .ok_or(refuse(
                Status::BadInputLength,
                "entries of the memory key are missing",
            ))?;
        let start = get64(context, START);
        let length = get64(context, LENGTH);
        if mode == MODE_MEMIC && !self.device_memory.is_allocated(start, length) {
            return Err(refuse(
                Status::BadParameter,
                "the memory key's device memory is not allocated",
            ));
        }
        let in_umem = IN_UMEM.is_set(input);
        let mut translation = match in_umem {
            true => self.umem_translation(input, mode)?,
            false => translation(mode, log_page_size, bytes, start)?,
        };
        if let Translation::Pages { pages, .. } = &mut translation {
            if in_umem || !PAGE_ACCESS.is_set(input) {
                for page in pages {
                    *page |= READABLE | WRITABLE;
                }
            }
        }
        let mkey = Mkey {
            variant: VARIANT.get(context) as u8,
            free,
            pd,
            qpn: QPN.get(context),
            rights: rights(context),
            // Keys of device memory are zero-based: addresses are offsets into
            // their range.
            start: if mode == MODE_MEMIC { 0 } else { start },
            length,
            length64: LENGTH64.is_set(context),
            umr: UMR_EN.is_set(context),
            remote_invalidate: REMOTE_INVALIDATE.is_set(context),
            forbids_binding: false,
            created_by_driver: !self.object_owners.is_program(),
            translation,
            capacity: CAPACITY.get(context),
            mode,
            log_page_size,
            bsf_octwords: match BSF_EN.is_set(context) {
                true => BSF_OCTWORDS.get(context),
                false => 0,
            },
            protection: None,
            signature_errors: 0,
            awaited_error: 0,
        };
        super::resource::return_number(output, self.mkeys.insert(mkey))
    }

    /// Returns the translation of a key to a umem.
    fn umem_translation(&mut self, input: &[u8], mode: u32) -> Result<Translation, CommandError> {
        let context = &input[CONTEXT.min(input.len())..];
        if mode != MODE_MTT {
            return Err(refuse(
                Status::BadParameter,
                "unsupported access mode of a key to a program's memory",
            ));
        }
        let shift = LOG_PAGE_SIZE.get(context);
        if !(12..=MAX_LOG_PAGE_SIZE).contains(&shift) {
            return Err(refuse(
                Status::BadParameter,
                "invalid page size of the memory key",
            ));
        }
        let page = 1u64 << shift;
        let page_offset = get64(context, START) & (page - 1);
        let Some(length) = page_offset.checked_add(get64(context, LENGTH)) else {
            return Err(refuse(
                Status::BadParameter,
                "invalid length of the memory key",
            ));
        };
        let umem = (UMEM.get(input), get64(input, UMEM_OFFSET));
        let (pages, writable) = self.umem_pages(umem, shift, length.div_ceil(page))?;
        if rights(context).writes() && !writable {
            return Err(refuse(
                Status::BadParameter,
                "the program's memory is read-only",
            ));
        }
        Ok(Translation::Pages { pages, shift })
    }

    pub(crate) fn destroy_mkey(&mut self, input: &[u8]) -> Outcome {
        match self.mkeys.remove(object_number(input)) {
            Some(mkey) => {
                self.protected_keys -= usize::from(mkey.protection.is_some());
                self.partial_blocks
                    .retain(|(key, _), _| *key != object_number(input));
                Ok(())
            }
            None => Err(refuse(Status::BadResource, "no such memory key")),
        }
    }

    pub(crate) fn query_mkey(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(mkey) = self.mkeys.get(NUMBER.get(input)) else {
            return Err(refuse(Status::BadResource, "no such memory key"));
        };
        FREE.at(CONTEXT).put(output, u32::from(mkey.free));
        MODE_LOW.at(CONTEXT).put(output, mkey.mode);
        MODE_HIGH.at(CONTEXT).put(output, mkey.mode >> 2);
        UMR_EN.at(CONTEXT).put(output, u32::from(mkey.umr));
        VARIANT.at(CONTEXT).put(output, u32::from(mkey.variant));
        QPN.at(CONTEXT).put(output, mkey.qpn);
        PD.at(CONTEXT).put(output, mkey.pd);
        LENGTH64.at(CONTEXT).put(output, u32::from(mkey.length64));
        put64(output, CONTEXT + START, mkey.start);
        put64(output, CONTEXT + LENGTH, mkey.length);
        CAPACITY.at(CONTEXT).put(output, mkey.capacity);
        LOG_PAGE_SIZE.at(CONTEXT).put(output, mkey.log_page_size);
        Ok(())
    }
}
