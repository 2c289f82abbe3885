//! Commands that start and stop the HCA, and its capabilities.

use roce::bits::{Field, field, get64, put_bytes, put32, put64};

use super::{NUMBER, OP_MOD};
use crate::engine::core::Core;
use crate::engine::mkey;
use crate::hca::Hca;
use crate::platform::Platform;
use crate::profile::{Group, WRITABLE};
use crate::status::{Outcome, Rule, invalid, too_many};

const CURRENT_ISSI: Field = field(8, 15, 0);
const SUPPORTED_ISSI: usize = 0x6c;

const PAGES_BOOT: u32 = 1;
const PAGES_INIT: u32 = 2;
const NUM_PAGES: usize = 12;
/// Pages requested before and at INIT_HCA. The device needs none; it requests some
/// so that the driver takes the same path as for hardware.
const BOOT_PAGES: usize = 16;
const INIT_PAGES: usize = 48;

const PAGES_CANT_GIVE: u32 = 0;
const PAGES_GIVE: u32 = 1;
const PAGES_TAKE: u32 = 2;
const PAGE_COUNT: Field = field(12, 31, 0);
const PAGE_LIST: usize = 16;
/// Limit of pages accepted from the driver.
const MAX_PAGES: usize = 1 << 16;

const CAPABILITIES: usize = 0x10;

impl<P: Platform> Core<P> {
    pub(crate) fn query_issi(&mut self, output: &mut [u8]) -> Outcome {
        CURRENT_ISSI.put(output, u32::from(self.issi));
        // Bits 0 and 1: supported versions.
        put32(output, SUPPORTED_ISSI, 0b11);
        Ok(())
    }

    pub(crate) fn set_issi(&mut self, input: &[u8]) -> Outcome {
        match CURRENT_ISSI.get(input) {
            issi @ (0 | 1) => {
                self.issi = issi as u8;
                Ok(())
            }
            _ => Err(invalid(
                "current_issi",
                CURRENT_ISSI.get(input),
                Rule::AtMost(1),
            )),
        }
    }

    pub(crate) fn query_pages(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let requested = match OP_MOD.get(input) {
            PAGES_BOOT => BOOT_PAGES.saturating_sub(self.pages.len()),
            PAGES_INIT => (BOOT_PAGES + INIT_PAGES).saturating_sub(self.pages.len()),
            _ => 0,
        };
        put32(output, NUM_PAGES, requested as u32);
        Ok(())
    }

    pub(crate) fn manage_pages(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let count = PAGE_COUNT.get(input) as usize;
        match OP_MOD.get(input) {
            PAGES_CANT_GIVE => {}
            PAGES_GIVE => {
                if self.pages.len().saturating_add(count) > MAX_PAGES {
                    return Err(too_many(
                        "pages",
                        self.pages.len().saturating_add(count),
                        MAX_PAGES as u64,
                    ));
                }
                for n in 0..count {
                    self.pages.push(get64(input, PAGE_LIST + 8 * n));
                }
            }
            PAGES_TAKE => {
                let max_count = output.len().saturating_sub(PAGE_LIST) / 8;
                let count = count.min(max_count).min(self.pages.len());
                let rest = self.pages.len() - count;
                for (n, page) in self.pages.drain(rest..).enumerate() {
                    put64(output, PAGE_LIST + 8 * n, page);
                }
                put32(output, 8, count as u32);
            }
            _ => {
                return Err(invalid(
                    "op_mod",
                    OP_MOD.get(input),
                    Rule::AtMost(PAGES_TAKE.into()),
                ));
            }
        }
        Ok(())
    }

    fn group_of(&self, input: &[u8]) -> Option<Group> {
        let number = OP_MOD.get(input) >> 1;
        Group::ALL.into_iter().find(|group| *group as u32 == number)
    }

    pub(crate) fn query_hca_cap(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        // An unknown group reads as zeros.
        if let Some(group) = self.group_of(input) {
            let current = OP_MOD.get(input) & 1 != 0;
            let bytes = if current {
                self.capabilities.current(group)
            } else {
                self.capabilities.max(group)
            };
            put_bytes(output, CAPABILITIES, bytes);
        }
        Ok(())
    }

    pub(crate) fn set_hca_cap(&mut self, input: &[u8]) -> Outcome {
        let Some(group) = self.group_of(input) else {
            return Err(invalid("op_mod", OP_MOD.get(input), Rule::Known));
        };
        for (_, field) in WRITABLE
            .iter()
            .filter(|(field_group, _)| *field_group == group)
        {
            let value = field.at(CAPABILITIES).get(input);
            field.put(self.capabilities.current_mut(group), value);
        }
        Ok(())
    }

    pub(crate) fn query_adapter(&mut self, output: &mut [u8]) -> Outcome {
        const VENDOR: Field = field(0x28, 23, 0);
        const PSID: usize = 0x100;
        VENDOR.put(output, 0x2c9);
        put_bytes(output, PSID, b"SOFTHCA000000001");
        Ok(())
    }

    pub(crate) fn query_special_contexts(&mut self, output: &mut [u8]) -> Outcome {
        put32(output, 0x8, mkey::NULL_KEY);
        put32(output, 0xc, mkey::RESERVED_LKEY);
        put32(output, 0x10, mkey::NULL_KEY);
        Ok(())
    }
}

impl<P: Platform> Hca<P> {
    /// TEARDOWN_HCA: destroys all objects that the driver left.
    pub(crate) fn teardown(&mut self) -> Outcome {
        self.destroy_objects();
        Ok(())
    }
}

/// The object number, where most inputs have it.
pub(crate) fn object_number(input: &[u8]) -> u32 {
    NUMBER.get(input)
}
