//! Completion queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use roce::bits::{put32, put64};

use super::buffer::Buffer;
use super::compression::Session;
use super::core::Core;
use super::protection::SignatureError;
use super::tags::TagFields;
use crate::cause::Misuse;
use crate::platform::{Platform, Unmapped};

/// Opcodes of CQEs, in the high half of the last byte.
#[allow(missing_docs)]
pub mod opcode {
    pub const REQUESTER: u8 = 0;
    pub const WRITE_IMM: u8 = 1;
    pub const SEND: u8 = 2;
    pub const SEND_IMM: u8 = 3;
    pub const SEND_INVALIDATE: u8 = 4;
    pub const RESIZED: u8 = 5;
    pub const NO_PACKET: u8 = 6;
    pub const SIGNATURE_ERROR: u8 = 12;
    pub const REQUESTER_ERROR: u8 = 13;
    pub const RESPONDER_ERROR: u8 = 14;
}

/// Size of the part of a CQE that holds the fields, in bytes; it is the second half of
/// a 128-byte CQE.
const ENTRY: usize = 64;
const SCATTERED_32: u8 = 0x4;
const SCATTERED_64: u8 = 0x8;
const COMPRESSED: u8 = 0xc;
const SOLICITED: u8 = 0x2;

const WQE_ID: usize = 2;
const ML_PATH: usize = 17;
const CHECKSUM: usize = 20;
const SLID: usize = 22;
const FLAGS_RQPN: usize = 24;
const CHECKED: usize = 28;
const L3_L4: usize = 29;
const VLAN: usize = 30;
const UIDX: usize = 32;
const IMMEDIATE: usize = 36;
const APP: usize = 40;
const APP_OPERATION: usize = 41;
const APP_INFO: usize = 42;
const BYTE_COUNT: usize = 44;
const TIMESTAMP: usize = 48;
/// In the CQE of an error, instead of the time.
const HARDWARE_SYNDROME: usize = 52;
const VENDOR_SYNDROME: usize = 54;
const SYNDROME: usize = 55;
const QPN: usize = 56;
const WQE_COUNTER: usize = 60;
const OWNER: usize = 63;

/// Application of a CQE: tag matching.
const APP_TAG_MATCHING: u8 = 1;

/// Offset of the consumer index in the doorbell record of a completion queue.
pub(crate) const CONSUMED: u64 = 0;

/// Syndromes in a CQ error event.
const SYNDROME_OVERRUN: u8 = 1;
const SYNDROME_ACCESS: u8 = 2;

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) eqn: u32,
    pub(crate) buffer: Buffer,
    pub(crate) log_size: u32,
    /// CQEs have 128 bytes.
    pub(crate) wide: bool,
    pub(crate) doorbell: u64,
    /// Overruns are not detected; the driver prevents them.
    pub(crate) ignore_overrun: bool,
    pub(crate) producer: u32,
    /// The producer index, for threads that wait for completions.
    pub(crate) written: Arc<AtomicU32>,
    /// Consumer index, as last read from the doorbell record or the arm doorbell.
    pub(crate) consumer: u32,
    pub(crate) armed: ArmState,
    /// One past the last completion that was solicited or an error.
    pub(crate) solicited: u32,
    /// Completions since the last event.
    pub(crate) unreported: UnreportedCompletions,
    pub(crate) failed: bool,
    /// Session of compressed CQEs, if compression is enabled.
    pub(crate) session: Option<Box<Session>>,
}

/// Completions for which an event is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArmState {
    Disarmed,
    Solicited,
    Any,
}

/// Completions that no event has reported yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UnreportedCompletions {
    Nothing,
    Some,
    /// At least one of them is solicited or an error.
    Solicited,
}

/// Syndromes in the CQE of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CqeError {
    pub(crate) syndrome: u8,
    pub(crate) vendor: u8,
    pub(crate) hardware: u8,
}

impl CqeError {
    pub(crate) const fn new(syndrome: u8, vendor: u8, hardware: u8) -> Self {
        Self {
            syndrome,
            vendor,
            hardware,
        }
    }
}

/// Contents of a CQE.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Completion<'a> {
    pub(crate) opcode: u8,
    /// It is the title of a session ([`super::compression`]).
    pub(crate) is_title: bool,
    pub(crate) qpn: u32,
    /// Opcode of the work request, in completions of sends.
    pub(crate) request: u8,
    pub(crate) uidx: u32,
    pub(crate) wqe_counter: u16,
    /// Index of the WQE, where `wqe_counter` is that of a stride.
    pub(crate) wqe_id: u16,
    pub(crate) byte_count: u32,
    pub(crate) immediate: u32,
    pub(crate) solicited: bool,
    pub(crate) flags_rqpn: u32,
    /// Checksum of the IP packet of an Ethernet frame.
    pub(crate) checksum: u16,
    /// Which layers of an Ethernet frame have right checksums.
    pub(crate) checked: u8,
    pub(crate) slid: u16,
    pub(crate) ml_path: u8,
    pub(crate) l3_l4: u8,
    pub(crate) vlan: u16,
    pub(crate) error: Option<CqeError>,
    /// Fields of tag matching.
    pub(crate) tag: Option<TagFields>,
    /// Data scattered into the CQE.
    pub(crate) data: &'a [u8],
    /// Instead of a work request.
    pub(crate) signature: Option<&'a SignatureErrorCqe>,
}

impl Cq {
    fn entry_size(&self) -> u64 {
        if self.wide { 128 } else { 64 }
    }

    fn full(&self) -> bool {
        let held = self.session.as_ref().map_or(0, |session| session.len());
        self.outstanding() + held >= 1 << self.log_size
    }

    /// Returns the number of CQEs that the driver has not consumed, as last seen. Of the
    /// consumer index only what tells a full queue from an empty one counts: DPDK's driver
    /// writes the low 16 bits.
    pub(crate) fn outstanding(&self) -> u32 {
        self.unread(self.consumer)
    }

    /// As [`outstanding`](Self::outstanding), with a consumer index of the driver's.
    pub(crate) fn unread(&self, consumer: u32) -> u32 {
        self.producer.wrapping_sub(consumer) & ((2 << self.log_size) - 1)
    }

    /// Returns the address of a CQE.
    fn entry(&self, index: u32) -> Result<u64, Unmapped> {
        let size = self.entry_size();
        let index = index & ((1 << self.log_size) - 1);
        self.buffer.entry(u64::from(index) * size, size)
    }

    /// Returns the address of the part of a CQE that holds the fields.
    pub(super) fn fields(&self, index: u32) -> Result<u64, Unmapped> {
        let padding = self.entry_size() - ENTRY as u64;
        Ok(self.entry(index)? + padding)
    }
}

impl<P: Platform> Core<P> {
    /// Writes a completion, and posts an event if one is requested.
    pub(crate) fn complete(&mut self, cqn: u32, completion: &Completion<'_>) {
        if self.chaos.is_none() || !self.holds_completion(cqn, completion) {
            self.write_completion(cqn, completion);
        }
    }

    pub(super) fn write_completion(&mut self, cqn: u32, completion: &Completion<'_>) {
        let Some(cq) = self.cqs.get_mut(cqn) else {
            self.report_misuse(Misuse::NoQueue {
                what: "completion queue",
                number: cqn,
                by: "a completion for",
            });
            return;
        };
        if cq.failed {
            return;
        }
        if cq.full() {
            if let Ok(consumer) = self.platform.read_index(cq.doorbell + CONSUMED) {
                cq.consumer = consumer & 0xff_ffff;
            }
        }
        if cq.full() && !cq.ignore_overrun {
            self.write_session(cqn);
            self.break_cq(cqn, SYNDROME_OVERRUN);
            return;
        }
        if self.faults.lose_completion(|| self.platform.now()) {
            return;
        }
        if completion.error.is_some() {
            self.stats.cqes_with_error += 1;
        }
        if !completion.data.is_empty() {
            self.stats.cqes_inline += 1;
        }
        if self.compress(cqn, completion) {
            return;
        }
        let Some(cq) = self.cqs.get(cqn) else {
            return;
        };
        let time = self.platform.now();
        let written = write(&self.platform, cq, completion, time);
        let notable = completion.solicited || completion.error.is_some();
        self.written(cqn, 1, notable, written);
    }

    /// Accounts for CQEs that were written, and posts an event if one is requested.
    pub(super) fn written(
        &mut self,
        cqn: u32,
        count: u32,
        notable: bool,
        written: Result<(), Unmapped>,
    ) {
        if written.is_err() {
            self.break_cq(cqn, SYNDROME_ACCESS);
            return;
        }
        let Some(cq) = self.cqs.get_mut(cqn) else {
            return;
        };
        cq.producer = cq.producer.wrapping_add(count);
        cq.written.store(cq.producer, Ordering::Release);
        self.stats.cqes += u64::from(count);
        if notable {
            cq.solicited = cq.producer;
            cq.unreported = UnreportedCompletions::Solicited;
        } else {
            cq.unreported = cq.unreported.max(UnreportedCompletions::Some);
        }
        if cq.armed == ArmState::Any || (cq.armed == ArmState::Solicited && notable) {
            self.post_requested_event(cqn);
        }
    }

    /// Posts the requested completion event.
    fn post_requested_event(&mut self, cqn: u32) {
        if let Some(cq) = self.cqs.get_mut(cqn) {
            cq.armed = ArmState::Disarmed;
            cq.unreported = UnreportedCompletions::Nothing;
            let eqn = cq.eqn;
            if self.chaos.is_none() || !self.holds_wake_up(cqn) {
                self.post_completion_event(eqn, cqn);
            }
        }
    }

    /// Moves the queue to the error state because of misuse by the driver.
    fn break_cq(&mut self, cqn: u32, syndrome: u8) {
        let log_size = self.cqs.get(cqn).map_or(0, |cq| cq.log_size);
        self.report_misuse(match syndrome {
            SYNDROME_OVERRUN => Misuse::CqOverrun {
                cqn,
                entries: 1 << log_size,
            },
            _ => Misuse::Unmapped {
                what: "completion queue",
                number: cqn,
            },
        });
        self.fail_cq(cqn, syndrome);
    }

    /// Moves the queue to the error state: it accepts no more completions.
    pub(crate) fn fail_cq(&mut self, cqn: u32, syndrome: u8) {
        if let Some(cq) = self.cqs.get_mut(cqn) {
            cq.failed = true;
            self.post_cq_error(cqn, syndrome);
        }
    }

    /// Handles the arm doorbell: the driver has seen all CQEs before an index and
    /// requests an event for the next one. An event is posted at once if there were
    /// completions since the last event that the driver has not seen. Completions that
    /// the last event reported cause no second one, seen or not. Of two requests before an
    /// event the one for any completion stays.
    pub(crate) fn arm_cq(&mut self, word: u32, cqn: u32) {
        const SOLICITED_ONLY: u32 = 1 << 24;
        self.stats.arms += 1;
        let cqn = cqn & 0xff_ffff;
        let Some(cq) = self.cqs.get_mut(cqn) else {
            self.report_misuse(Misuse::NoQueue {
                what: "completion queue",
                number: cqn,
                by: "a request for an event of",
            });
            return;
        };
        let consumer = word & 0xff_ffff;
        cq.consumer = consumer;
        let ahead = |index: u32| {
            let distance = index.wrapping_sub(consumer) & 0xff_ffff;
            distance != 0 && distance < 1 << 23
        };
        let solicited_only = word & SOLICITED_ONLY != 0;
        let missed = if solicited_only {
            cq.unreported == UnreportedCompletions::Solicited && ahead(cq.solicited)
        } else {
            cq.unreported != UnreportedCompletions::Nothing && ahead(cq.producer)
        };
        if missed {
            self.post_requested_event(cqn);
        } else if !solicited_only {
            cq.armed = ArmState::Any;
        } else if cq.armed == ArmState::Disarmed {
            // A request for any completion stays until its event.
            cq.armed = ArmState::Solicited;
        }
    }
}

/// A signature error, whose CQE names a memory key and no work request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SignatureErrorCqe {
    pub(crate) error: SignatureError,
    pub(crate) key: u32,
    /// Offset in the data of the key.
    pub(crate) offset: u64,
}

impl SignatureErrorCqe {
    /// Returns the CQE except its last byte.
    fn bytes(&self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        let SignatureError {
            syndrome,
            expected,
            actual,
            of_memory,
            offset: _,
        } = self.error;
        put32(&mut bytes, 0x10, (expected >> 32) as u32);
        put32(&mut bytes, 0x14, (actual >> 32) as u32);
        put32(&mut bytes, 0x18, expected as u32);
        put32(&mut bytes, 0x1c, actual as u32);
        put32(
            &mut bytes,
            0x20,
            u32::from(syndrome) << 16 | u32::from(of_memory),
        );
        put32(&mut bytes, 0x24, self.key);
        put64(&mut bytes, 0x28, self.offset);
        bytes
    }
}

/// Writes a CQE at the producer index, its owner bit last.
pub(crate) fn write<P: Platform>(
    platform: &P,
    cq: &Cq,
    completion: &Completion<'_>,
    time: u64,
) -> Result<(), Unmapped> {
    let address = cq.fields(cq.producer)?;
    let owner = (cq.producer >> cq.log_size & 1) as u8;
    let mut last = completion.opcode << 4 | owner;
    if completion.solicited {
        last |= SOLICITED;
    }
    if completion.is_title {
        last |= COMPRESSED;
    }

    let mut bytes = [0; ENTRY];
    bytes[WQE_ID..WQE_ID + 2].copy_from_slice(&completion.wqe_id.to_be_bytes());
    bytes[ML_PATH] = completion.ml_path;
    bytes[CHECKSUM..CHECKSUM + 2].copy_from_slice(&completion.checksum.to_be_bytes());
    bytes[SLID..SLID + 2].copy_from_slice(&completion.slid.to_be_bytes());
    put32(&mut bytes, FLAGS_RQPN, completion.flags_rqpn);
    bytes[CHECKED] = completion.checked;
    bytes[L3_L4] = completion.l3_l4;
    bytes[VLAN..VLAN + 2].copy_from_slice(&completion.vlan.to_be_bytes());
    put32(&mut bytes, UIDX, completion.uidx & 0xff_ffff);
    put32(&mut bytes, IMMEDIATE, completion.immediate);
    put32(&mut bytes, BYTE_COUNT, completion.byte_count);
    match completion.error {
        Some(error) => {
            bytes[HARDWARE_SYNDROME] = error.hardware;
            bytes[VENDOR_SYNDROME] = error.vendor;
            bytes[SYNDROME] = error.syndrome;
        }
        None => put64(&mut bytes, TIMESTAMP, time),
    }
    put32(
        &mut bytes,
        QPN,
        u32::from(completion.request) << 24 | completion.qpn & 0xff_ffff,
    );
    bytes[WQE_COUNTER..WQE_COUNTER + 2].copy_from_slice(&completion.wqe_counter.to_be_bytes());

    let mut short = 32;
    if let Some(tag) = &completion.tag {
        bytes[..tag.header.len()].copy_from_slice(&tag.header);
        bytes[APP] = APP_TAG_MATCHING;
        bytes[APP_OPERATION] = tag.operation;
        bytes[APP_INFO..APP_INFO + 2].copy_from_slice(&tag.index.to_be_bytes());
        if tag.has_header() {
            short = 0;
        }
    }
    if let Some(signature) = completion.signature {
        bytes = signature.bytes();
    }
    let data = completion.data;
    match data.len() {
        0 => {}
        n if n <= short => {
            // The first 32 bytes hold only fields of datagrams and frames, for which
            // drivers request no scatter to the CQE.
            bytes[..data.len()].copy_from_slice(data);
            last |= SCATTERED_32;
        }
        _ => {
            let n = data.len().min(64);
            platform.write(cq.entry(cq.producer)?, &data[..n])?;
            last |= SCATTERED_64;
        }
    }
    platform.write(address, &bytes[..OWNER])?;
    platform.publish(address + OWNER as u64, last)
}
