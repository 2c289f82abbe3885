//! Memory key commands.

use roce::bits::{get64, put64};

use super::load::object_number;
use super::resource::insert;
use crate::engine::core::Core;
use crate::engine::mkey::{Klm, MAX_LOG_PAGE_SIZE, Mkey, READABLE, Translation, WRITABLE, rights};
use crate::layout::mkc::access_mode;
use crate::layout::{PAGE_LIST, header, mkc};
use crate::platform::Platform;
use crate::status::{CommandError, Outcome, Rule, Status, invalid, no_object, refuse};

/// Mask for a page entry: the address and the bits for readable and writable.
const PAGE: u64 = !0x4;

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
        access_mode::PA => Ok(Translation::Contiguous(start)),
        access_mode::MEMIC => Ok(Translation::Device(start)),
        access_mode::MTT | access_mode::KSM if shift > MAX_LOG_PAGE_SIZE => Err(invalid(
            "log_page_size",
            shift,
            Rule::AtMost(MAX_LOG_PAGE_SIZE.into()),
        )),
        access_mode::MTT => Ok(Translation::Pages {
            pages: entries
                .chunks_exact(8)
                .map(|entry| get64(entry, 0) & PAGE)
                .collect(),
            shift,
        }),
        access_mode::KLMS => Ok(Translation::Klms(keys())),
        access_mode::KSM => Ok(Translation::Ksms {
            keys: keys(),
            shift,
        }),
        _ => Err(invalid("access_mode", mode, Rule::Supported)),
    }
}

impl<P: Platform> Core<P> {
    pub(crate) fn create_mkey(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[mkc::AT.min(input.len())..];
        let pd = mkc::PD.get(context);
        let free = mkc::FREE.is_set(context);
        if !free && !self.has_pd(pd) {
            return Err(no_object("protection domain", pd));
        }
        let mode = mkc::ACCESS_MODE_4_2.get(context) << 2 | mkc::ACCESS_MODE_1_0.get(context);
        let driver_only = matches!(mode, access_mode::PA | access_mode::MEMIC);
        if driver_only && self.object_owners.is_program() {
            return Err(invalid("access_mode", mode, Rule::Permitted));
        }
        let log_page_size = mkc::LOG_PAGE_SIZE.get(context);
        let octwords = mkc::TRANSLATIONS_OCTWORD_ACTUAL_SIZE.get(input) as usize;
        let list = &input[PAGE_LIST.min(input.len())..];
        let bytes = octwords
            .checked_mul(16)
            .and_then(|bytes| list.get(..bytes))
            .ok_or_else(|| {
                refuse(
                    Status::BadInputLength,
                    "translations_octword_actual_size",
                    octwords,
                    Rule::AtMost(list.len() as u64 / 16),
                )
            })?;
        let start = get64(context, mkc::START_ADDR);
        let length = get64(context, mkc::LEN);
        if mode == access_mode::MEMIC && !self.device_memory.is_allocated(start, length) {
            return Err(invalid("start_addr", start, Rule::Exists));
        }
        let in_umem = mkc::MKEY_UMEM_VALID.is_set(input);
        let mut translation = match in_umem {
            true => self.umem_translation(input, mode)?,
            false => translation(mode, log_page_size, bytes, start)?,
        };
        if let Translation::Pages { pages, .. } = &mut translation {
            if in_umem || !mkc::PG_ACCESS.is_set(input) {
                for page in pages {
                    *page |= READABLE | WRITABLE;
                }
            }
        }
        let mkey = Mkey {
            variant: mkc::MKEY_7_0.get(context) as u8,
            free,
            pd,
            qpn: mkc::QPN.get(context),
            rights: rights(context),
            // Keys of device memory are zero-based: addresses are offsets into
            // their range.
            start: if mode == access_mode::MEMIC { 0 } else { start },
            length,
            length64: mkc::LENGTH64.is_set(context),
            umr: mkc::UMR_EN.is_set(context),
            remote_invalidate: mkc::EN_RINVAL.is_set(context),
            forbids_binding: false,
            created_by_driver: !self.object_owners.is_program(),
            translation,
            capacity: mkc::TRANSLATIONS_OCTWORD_SIZE.get(context),
            mode,
            log_page_size,
            bsf_octwords: match mkc::BSF_EN.is_set(context) {
                true => mkc::BSF_OCTWORD_SIZE.get(context),
                false => 0,
            },
            protection: None,
            signature_errors: 0,
            awaited_error: 0,
        };
        insert(output, &mut self.mkeys, "memory key", mkey)
    }

    /// Returns the translation of a key to a umem.
    fn umem_translation(&mut self, input: &[u8], mode: u32) -> Result<Translation, CommandError> {
        let context = &input[mkc::AT.min(input.len())..];
        if mode != access_mode::MTT {
            return Err(invalid(
                "access_mode",
                mode,
                Rule::Is(access_mode::MTT.into()),
            ));
        }
        let shift = mkc::LOG_PAGE_SIZE.get(context);
        if !(12..=MAX_LOG_PAGE_SIZE).contains(&shift) {
            return Err(invalid(
                "log_page_size",
                shift,
                Rule::Between(12, MAX_LOG_PAGE_SIZE.into()),
            ));
        }
        let page = 1u64 << shift;
        let page_offset = get64(context, mkc::START_ADDR) & (page - 1);
        let Some(length) = page_offset.checked_add(get64(context, mkc::LEN)) else {
            return Err(invalid("len", get64(context, mkc::LEN), Rule::NoWrap));
        };
        let umem = (
            mkc::MKEY_UMEM_ID.get(input),
            get64(input, mkc::MKEY_UMEM_OFFSET),
        );
        let (pages, writable) = self.umem_pages(umem, shift, length.div_ceil(page))?;
        if rights(context).writes() && !writable {
            return Err(invalid("umem", umem.0, Rule::Writable));
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
            None => Err(no_object("memory key", object_number(input))),
        }
    }

    pub(crate) fn query_mkey(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(mkey) = self.mkeys.get(header::NUMBER.get(input)) else {
            return Err(no_object("memory key", object_number(input)));
        };
        mkc::FREE.at(mkc::AT).put(output, u32::from(mkey.free));
        mkc::ACCESS_MODE_1_0.at(mkc::AT).put(output, mkey.mode);
        mkc::ACCESS_MODE_4_2.at(mkc::AT).put(output, mkey.mode >> 2);
        mkc::UMR_EN.at(mkc::AT).put(output, u32::from(mkey.umr));
        mkc::MKEY_7_0
            .at(mkc::AT)
            .put(output, u32::from(mkey.variant));
        mkc::QPN.at(mkc::AT).put(output, mkey.qpn);
        mkc::PD.at(mkc::AT).put(output, mkey.pd);
        mkc::LENGTH64
            .at(mkc::AT)
            .put(output, u32::from(mkey.length64));
        put64(output, mkc::AT + mkc::START_ADDR, mkey.start);
        put64(output, mkc::AT + mkc::LEN, mkey.length);
        mkc::TRANSLATIONS_OCTWORD_SIZE
            .at(mkc::AT)
            .put(output, mkey.capacity);
        mkc::LOG_PAGE_SIZE
            .at(mkc::AT)
            .put(output, mkey.log_page_size);
        Ok(())
    }
}
