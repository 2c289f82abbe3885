//! Devices that do what the specification allows and programs may not expect.

use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use embedded::softhca::chaos::{Chaos, Decision, Kind};

use crate::config::{Config, print_error};
use crate::hooks::Wc;
use crate::internal;

/// The source of this process's decisions, and the number of its first device.
static CHAOS: OnceLock<(Chaos, u16)> = OnceLock::new();

/// Completions that have failed.
static FAILED: AtomicU32 = AtomicU32::new(0);

/// Opcodes of completions: SEND, RDMA_WRITE, RDMA_READ, RECV, RECV_RDMA_WITH_IMM, and one that
/// does not exist.
const OPCODES: [u32; 6] = [0, 1, 2, 128, 129, 0x5eed];

/// Returns the source of the devices' decisions, which writes them to a file if one is named.
pub(crate) fn of(config: &Config) -> Option<Chaos> {
    let chaos = config.chaos.clone()?;
    let Some(path) = &config.decisions else {
        return Some(chaos);
    };
    match OpenOptions::new().append(true).create(true).open(path) {
        // A line in one call, so that those of several processes do not mix. One that cannot be
        // written is lost.
        Ok(file) => Some(chaos.observed_by(Arc::new(move |decision| {
            let _ = (&file).write_all(format!("{decision}\n").as_bytes());
        }))),
        Err(error) => {
            print_error(&format!("{}: {error}", path.display()));
            Some(chaos)
        }
    }
}

/// Decides for the process from now on, with the number of its first device.
pub(crate) fn start(chaos: Chaos, device: usize) {
    let _ = CHAOS.set((chaos, u16::try_from(device).unwrap_or_default()));
}

/// Returns whether fields of completions that have no meaning are filled.
pub(crate) fn fills_fields() -> bool {
    CHAOS.get().is_some()
}

/// Fills the fields of a failed completion that have no meaning: all but `wr_id`, `status`,
/// `qp_num` and `vendor_err`.
pub(crate) fn fill_fields(completion: &mut Wc) {
    if completion.status == 0 || internal::is_in_handler() {
        return;
    }
    let Some((chaos, device)) = CHAOS.get() else {
        return;
    };
    // The observer allocates, and writes to a file.
    let _scope = internal::enter();
    let choice = chaos.decide(Decision {
        kind: Kind::Field,
        device: *device,
        queue: 0,
        index: FAILED.fetch_add(1, Ordering::Relaxed),
    });
    let Some(bits) = choice.map(|choice| choice.bits()) else {
        return;
    };
    let word = (bits >> 16) as u32;
    completion.opcode = OPCODES[(bits >> 8) as usize % OPCODES.len()];
    completion.byte_len = word;
    completion.imm_data = word.rotate_left(8);
    completion.src_qp = word >> 8;
    completion.wc_flags = word & 0xf;
    completion.pkey_index = word as u16;
    completion.slid = (word >> 8) as u16;
    completion.sl = word as u8 & 0xf;
    completion.dlid_path_bits = word as u8;
}
