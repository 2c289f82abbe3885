//! The command queue: entries of 64 bytes that the driver hands over with a
//! doorbell. Data beyond the entry is in chains of mailboxes.

use roce::bits::{Field, field, get32, get64};

use super::core::Core;
use crate::cause::{Misuse, SlotFault};
use crate::layout::event;
use crate::platform::{Platform, Unmapped};

/// Limit of an input or output. Registering a terabyte in pages of 4 KiB would
/// exceed it; drivers do not do that.
const MAX_DATA: usize = 16 << 20;

/// Bytes of data in a mailbox.
const BLOCK: usize = 512;
const BLOCK_NEXT: usize = 560;
const BLOCK_NUMBER: usize = 568;
const BLOCK_TOKEN: usize = 573;
const BLOCK_SIZE: usize = 576;

const TYPE: Field = field(0, 31, 24);
const INPUT_LENGTH: usize = 4;
const INPUT_POINTER: usize = 8;
const INPUT: usize = 16;
const OUTPUT: usize = 32;
const OUTPUT_POINTER: usize = 48;
const OUTPUT_LENGTH: usize = 56;
const TOKEN: usize = 60;
const STATUS_OWNER: usize = 63;
const ENTRY: usize = 64;

/// The only type of entry.
const TYPE_PCI: u32 = 7;
/// Bytes of an input or output that are in the entry itself.
const INLINE_BYTES: usize = 16;
/// Set while the device owns the entry.
const OWNED: u8 = 1;

/// Delivery status: why a command was not fetched, or its output not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum DeliveryStatus {
    Token = 2,
    BlockNumber = 3,
    OutputPointer = 4,
    InputPointer = 5,
    InputLength = 7,
    OutputLength = 8,
    Descriptor = 0x10,
}

/// The queue has 32 slots, of which the driver uses one for page requests.
pub(crate) const LOG_SIZE: u32 = 5;
/// Entries are 64 bytes apart.
pub(crate) const LOG_STRIDE: u32 = 6;

/// A command taken from the queue.
#[derive(Debug)]
pub(crate) struct FetchedCommand {
    /// The whole input.
    pub(crate) input: Vec<u8>,
    output_length: usize,
    output_pointer: u64,
    token: u8,
}

impl<P: Platform> Core<P> {
    /// Fetches the command in a slot. Returns `None` if the driver still owns the slot.
    fn fetch_command(
        &mut self,
        entry: u64,
    ) -> Result<Option<Result<FetchedCommand, DeliveryStatus>>, Unmapped> {
        let mut bytes = [0; ENTRY];
        self.platform.read(entry, &mut bytes)?;
        if bytes[STATUS_OWNER] & OWNED == 0 {
            return Ok(None);
        }
        Ok(Some(self.read(&bytes)))
    }

    fn read(&mut self, bytes: &[u8; ENTRY]) -> Result<FetchedCommand, DeliveryStatus> {
        if TYPE.get(bytes) != TYPE_PCI {
            return Err(DeliveryStatus::Descriptor);
        }
        let length = get32(bytes, INPUT_LENGTH) as usize;
        if length > MAX_DATA {
            return Err(DeliveryStatus::InputLength);
        }
        let output_length = get32(bytes, OUTPUT_LENGTH) as usize;
        if output_length > MAX_DATA {
            return Err(DeliveryStatus::OutputLength);
        }
        let token = bytes[TOKEN];
        let mut input = vec![0; length];
        let inline = length.min(INLINE_BYTES);
        input[..inline].copy_from_slice(&bytes[INPUT..INPUT + inline]);
        let mut next = get64(bytes, INPUT_POINTER);
        for (number, part) in input[inline..].chunks_mut(BLOCK).enumerate() {
            let mut block = [0; BLOCK_SIZE];
            self.platform
                .read(next, &mut block)
                .map_err(|_| DeliveryStatus::InputPointer)?;
            if block[BLOCK_TOKEN] != token {
                return Err(DeliveryStatus::Token);
            }
            if get32(&block, BLOCK_NUMBER) != number as u32 {
                return Err(DeliveryStatus::BlockNumber);
            }
            part.copy_from_slice(&block[..part.len()]);
            next = get64(&block, BLOCK_NEXT);
        }
        Ok(FetchedCommand {
            input,
            output_length,
            output_pointer: get64(bytes, OUTPUT_POINTER),
            token,
        })
    }

    /// Writes the output. The caller publishes the owner bit afterwards.
    fn write_output(
        &mut self,
        entry: u64,
        command: &FetchedCommand,
        output: &[u8],
    ) -> Result<(), DeliveryStatus> {
        let output = &output[..output.len().min(command.output_length)];
        let inline = output.len().min(INLINE_BYTES);
        self.platform
            .write(entry + OUTPUT as u64, &output[..inline])
            .map_err(|_| DeliveryStatus::Descriptor)?;
        let mut next = command.output_pointer;
        for (number, part) in output[inline..].chunks(BLOCK).enumerate() {
            let mut block = [0; BLOCK_SIZE];
            self.platform
                .read(next, &mut block)
                .map_err(|_| DeliveryStatus::OutputPointer)?;
            if block[BLOCK_TOKEN] != command.token {
                return Err(DeliveryStatus::Token);
            }
            if get32(&block, BLOCK_NUMBER) != number as u32 {
                return Err(DeliveryStatus::BlockNumber);
            }
            self.platform
                .write(next, part)
                .map_err(|_| DeliveryStatus::OutputPointer)?;
            next = get64(&block, BLOCK_NEXT);
        }
        Ok(())
    }
}

/// Executes the commands of the slots in `doorbell`.
///
/// `execute` gets an input and an output length, and returns the output.
pub(crate) fn ring<P: Platform, H: AsMut<Core<P>>>(
    hca: &mut H,
    doorbell: u32,
    mut execute: impl FnMut(&mut H, &[u8], usize) -> Vec<u8>,
) {
    let mut done = 0u32;
    let events_before = hca.as_mut().event_queue_for(event::COMMAND).is_some();
    for slot in (0..32).filter(|slot| doorbell & 1 << slot != 0) {
        let core = hca.as_mut();
        let entry = core.registers.commands.address() + (u64::from(slot as u32) << LOG_STRIDE);
        let misuse = |fault| Misuse::CommandSlot {
            slot: slot as u32,
            entry,
            fault,
        };
        let status = match core.fetch_command(entry) {
            Ok(Some(Ok(command))) => {
                let output = execute(hca, &command.input, command.output_length);
                match hca.as_mut().write_output(entry, &command, &output) {
                    Ok(()) => 0,
                    Err(error) => error as u8,
                }
            }
            Ok(Some(Err(error))) => error as u8,
            Ok(None) => {
                core.report_misuse(misuse(SlotFault::NotHandedOver));
                continue;
            }
            Err(_) => {
                core.report_misuse(misuse(SlotFault::Unmapped));
                continue;
            }
        };
        let core = hca.as_mut();
        if status != 0 {
            core.report_misuse(misuse(SlotFault::Delivery(status)));
        }
        let _ = core
            .platform
            .publish(entry + STATUS_OWNER as u64, status << 1);
        done |= 1 << slot;
    }
    // Without a command event queue the driver polls the owner bit. It also polls
    // for the command that creates that queue, hence the state before the commands.
    if done != 0 && events_before {
        hca.as_mut().post_command_event(done);
    }
}
