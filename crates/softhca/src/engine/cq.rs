//! Completion queues.

use super::buffer::Buffer;
use super::compression::Session;
use super::core::Core;
use crate::bits::{put32, put64};
use crate::platform::{Platform, Unmapped};

/// What a completion is, in the high half of its last byte.
#[allow(missing_docs)]
pub mod opcode {
    pub const REQUESTER: u8 = 0;
    pub const WRITE_IMM: u8 = 1;
    pub const SEND: u8 = 2;
    pub const SEND_IMM: u8 = 3;
    pub const SEND_INVALIDATE: u8 = 4;
    pub const RESIZED: u8 = 5;
    pub const REQUESTER_ERROR: u8 = 13;
    pub const RESPONDER_ERROR: u8 = 14;
}

/// Bytes of the part of an entry that has the fields; in longer entries it is
/// the second half.
const ENTRY: usize = 64;
const SCATTERED_32: u8 = 0x4;
const SCATTERED_64: u8 = 0x8;
const COMPRESSED: u8 = 0xc;
const SOLICITED: u8 = 0x2;

const ML_PATH: usize = 17;
const CHECKSUM: usize = 20;
const SLID: usize = 22;
const FLAGS_RQPN: usize = 24;
const L3_L4: usize = 29;
const VLAN: usize = 30;
const UIDX: usize = 32;
const IMMEDIATE: usize = 36;
const BYTE_COUNT: usize = 44;
const TIMESTAMP: usize = 48;
const VENDOR_SYNDROME: usize = 54;
const SYNDROME: usize = 55;
const QPN: usize = 56;
const WQE_COUNTER: usize = 60;
const OWNER: usize = 63;

/// A completion queue's doorbell record: what the driver has consumed.
const CONSUMED: u64 = 0;

/// Syndromes of a queue in error, in the event.
const SYNDROME_OVERRUN: u8 = 1;
const SYNDROME_ACCESS: u8 = 2;

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) eqn: u32,
    pub(crate) buffer: Buffer,
    pub(crate) log_size: u32,
    /// Entries of 128 bytes.
    pub(crate) wide: bool,
    pub(crate) doorbell: u64,
    /// Overruns are the driver's business.
    pub(crate) ignore_overrun: bool,
    pub(crate) producer: u32,
    /// As last read from the doorbell record.
    pub(crate) consumer: u32,
    pub(crate) armed: Armed,
    /// One past the last completion that is solicited or an error.
    pub(crate) solicited: u32,
    /// What came since the last event.
    pub(crate) untold: Untold,
    pub(crate) failed: bool,
    /// Of a queue that compresses: what is not written yet.
    pub(crate) session: Option<Box<Session>>,
}

/// What the driver wants an event for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    Solicited,
    Any,
}

/// The completions that no event has told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Untold {
    Nothing,
    Some,
    /// One of them is solicited or an error.
    Solicited,
}

/// A completion to be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Completion<'a> {
    pub(crate) opcode: u8,
    /// It stands for several ([`super::compression`]).
    pub(crate) is_title: bool,
    pub(crate) qpn: u32,
    /// The work request's opcode, for the requester.
    pub(crate) request: u8,
    pub(crate) uidx: u32,
    pub(crate) wqe_counter: u16,
    pub(crate) byte_count: u32,
    pub(crate) immediate: u32,
    pub(crate) solicited: bool,
    pub(crate) flags_rqpn: u32,
    /// Of an Ethernet frame: the sum of its IP packet.
    pub(crate) checksum: u16,
    pub(crate) slid: u16,
    pub(crate) ml_path: u8,
    pub(crate) l3_l4: u8,
    pub(crate) vlan: u16,
    /// Syndrome and vendor's syndrome.
    pub(crate) error: Option<(u8, u8)>,
    /// Data that goes into the entry itself.
    pub(crate) data: &'a [u8],
}

impl Cq {
    fn entry_size(&self) -> u64 {
        if self.wide { 128 } else { 64 }
    }

    fn full(&self) -> bool {
        let held = self.session.as_ref().map_or(0, |session| session.len());
        self.outstanding() + held >= 1 << self.log_size
    }

    /// How many entries the driver has not consumed, as last seen.
    pub(crate) fn outstanding(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & 0xff_ffff
    }

    /// Where an entry is.
    fn entry(&self, index: u32) -> Result<u64, Unmapped> {
        let size = self.entry_size();
        let index = index & ((1 << self.log_size) - 1);
        self.buffer.entry(u64::from(index) * size, size)
    }

    /// Where the part of an entry is that has the fields.
    pub(super) fn fields(&self, index: u32) -> Result<u64, Unmapped> {
        let padding = self.entry_size() - ENTRY as u64;
        Ok(self.entry(index)? + padding)
    }
}

impl<P: Platform> Core<P> {
    /// Writes a completion and, if the driver waits for it, an event.
    pub(crate) fn complete(&mut self, cqn: u32, completion: &Completion<'_>) {
        let Some(cq) = self.cqs.get_mut(cqn) else {
            self.complain(|| format!("a completion for queue {cqn}, which does not exist"));
            return;
        };
        if cq.failed {
            return;
        }
        if cq.full()
            && let Ok(consumer) = self.platform.read_index(cq.doorbell + CONSUMED)
        {
            cq.consumer = consumer & 0xff_ffff;
        }
        if cq.full() && !cq.ignore_overrun {
            self.release(cqn);
            self.break_cq(cqn, SYNDROME_OVERRUN, "overrun");
            return;
        }
        if self.faults.lose_completion() {
            return;
        }
        if completion.error.is_some() {
            self.stats.cqes_with_error += 1;
        }
        if !completion.data.is_empty() {
            self.stats.cqes_inline += 1;
        }
        if self.hold(cqn, completion) {
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

    /// Entries were written: what the driver waits for has come.
    pub(super) fn written(
        &mut self,
        cqn: u32,
        count: u32,
        notable: bool,
        written: Result<(), Unmapped>,
    ) {
        if written.is_err() {
            self.break_cq(cqn, SYNDROME_ACCESS, "not in memory");
            return;
        }
        let Some(cq) = self.cqs.get_mut(cqn) else {
            return;
        };
        cq.producer = cq.producer.wrapping_add(count);
        self.stats.cqes += u64::from(count);
        if notable {
            cq.solicited = cq.producer;
            cq.untold = Untold::Solicited;
        } else {
            cq.untold = cq.untold.max(Untold::Some);
        }
        if cq.armed == Armed::Any || (cq.armed == Armed::Solicited && notable) {
            self.tell_of_completions(cqn);
        }
    }

    /// The event that the driver waits for.
    fn tell_of_completions(&mut self, cqn: u32) {
        if let Some(cq) = self.cqs.get_mut(cqn) {
            cq.armed = Armed::No;
            cq.untold = Untold::Nothing;
            let eqn = cq.eqn;
            self.post_completion_event(eqn, cqn);
        }
    }

    /// The queue takes no more completions, and it is the driver's doing.
    fn break_cq(&mut self, cqn: u32, syndrome: u8, why: &str) {
        self.complain(|| format!("completion queue {cqn} is in error: {why}"));
        self.fail_cq(cqn, syndrome);
    }

    /// The queue takes no more completions.
    pub(crate) fn fail_cq(&mut self, cqn: u32, syndrome: u8) {
        if let Some(cq) = self.cqs.get_mut(cqn) {
            cq.failed = true;
            self.post_cq_error(cqn, syndrome);
        }
    }

    /// What the driver writes to a UAR page: it has seen all up to an index
    /// and wants an event for what comes next. What came since the last event
    /// and is not among what it has seen is told of at once; what that event
    /// told of is not told of again, seen or not.
    pub(crate) fn arm_cq(&mut self, word: u32, cqn: u32) {
        const SOLICITED_ONLY: u32 = 1 << 24;
        self.stats.arms += 1;
        let cqn = cqn & 0xff_ffff;
        let Some(cq) = self.cqs.get_mut(cqn) else {
            self.complain(|| format!("arming completion queue {cqn}, which does not exist"));
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
            cq.untold == Untold::Solicited && ahead(cq.solicited)
        } else {
            cq.untold != Untold::Nothing && ahead(cq.producer)
        };
        if missed {
            self.tell_of_completions(cqn);
        } else {
            cq.armed = if solicited_only {
                Armed::Solicited
            } else {
                Armed::Any
            };
        }
    }
}

/// Writes an entry at the producer's index, its owner bit last.
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
    bytes[ML_PATH] = completion.ml_path;
    bytes[CHECKSUM..CHECKSUM + 2].copy_from_slice(&completion.checksum.to_be_bytes());
    bytes[SLID..SLID + 2].copy_from_slice(&completion.slid.to_be_bytes());
    put32(&mut bytes, FLAGS_RQPN, completion.flags_rqpn);
    bytes[L3_L4] = completion.l3_l4;
    bytes[VLAN..VLAN + 2].copy_from_slice(&completion.vlan.to_be_bytes());
    put32(&mut bytes, UIDX, completion.uidx & 0xff_ffff);
    put32(&mut bytes, IMMEDIATE, completion.immediate);
    put32(&mut bytes, BYTE_COUNT, completion.byte_count);
    put64(&mut bytes, TIMESTAMP, time);
    if let Some((syndrome, vendor)) = completion.error {
        bytes[VENDOR_SYNDROME] = vendor;
        bytes[SYNDROME] = syndrome;
    }
    put32(
        &mut bytes,
        QPN,
        u32::from(completion.request) << 24 | completion.qpn & 0xff_ffff,
    );
    bytes[WQE_COUNTER..WQE_COUNTER + 2].copy_from_slice(&completion.wqe_counter.to_be_bytes());

    let data = completion.data;
    match data.len() {
        0 => {}
        1..=32 => {
            // The fields begin after the first 32 bytes, but for those of
            // datagrams, which are not scattered here.
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
