//! Completion queue commands.

use std::sync::Arc;

use roce::bits::{Field, field, flag, get64, put64};

use super::OP_MOD;
use super::load::object_number;
use super::resource::return_number;
use crate::engine::buffer::Buffer;
use crate::engine::compression::{Format, Session};
use crate::engine::core::Core;
use crate::engine::cq::{self, ArmState, Completion, Cq, UnreportedCompletions};
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

const CONTEXT: usize = 0x10;
const STATUS: Field = field(0, 31, 28);
const CQE_SIZE: Field = field(0, 23, 21);
const IGNORE_OVERRUN: Field = flag(0, 17);
const COMPRESS: Field = flag(0, 14);
const MINI_FORMAT: Field = field(0, 13, 12);
const COMPRESSION_LAYOUT: Field = field(0, 1, 0);
const PAGE_OFFSET: Field = field(0x8, 11, 6);
const LOG_SIZE: Field = field(0xc, 28, 24);
const UAR: Field = field(0xc, 23, 0);
const EQN: Field = field(0x14, 7, 0);
const LOG_PAGE_SIZE: Field = field(0x18, 28, 24);
const CONSUMER: Field = field(0x28, 23, 0);
const PRODUCER: Field = field(0x2c, 23, 0);
const DOORBELL: usize = 0x38;
const RECORDS_IN_UMEM: Field = flag(0, 25);
const RECORDS_UMEM: Field = field(4, 31, 0);
/// The umem of the entries, after the context.
const UMEM_OFFSET: usize = 0x50;
const UMEM: Field = field(0x58, 31, 0);
const IN_UMEM: Field = flag(0x5c, 31);

const CQE_64: u32 = 0;
const CQE_128: u32 = 1;
const CQE_128_PADDED: u32 = 2;

const MINI_HASH: u32 = 0;
const MINI_CHECKSUM: u32 = 1;

const RESIZE: u32 = 1;
/// Context status of a queue in error.
const FAILED: u32 = 0xa;

/// The compression format that a context asks for, if any. The stride index format
/// is refused.
fn compression(context: &[u8]) -> Result<Option<Format>, super::CommandError> {
    if !COMPRESS.is_set(context) {
        return Ok(None);
    }
    let unknown = refuse(
        Status::BadParameter,
        "unsupported compression of completions",
    );
    if COMPRESSION_LAYOUT.is_set(context) {
        return Err(unknown);
    }
    match MINI_FORMAT.get(context) {
        MINI_HASH => Ok(Some(Format::Hash)),
        MINI_CHECKSUM => Ok(Some(Format::Checksum)),
        _ => Err(unknown),
    }
}

impl<P: Platform> Core<P> {
    /// Returns the buffer that a context describes.
    fn cq_buffer(
        &mut self,
        input: &[u8],
        log_size: u32,
        wide: bool,
    ) -> Result<Buffer, super::CommandError> {
        let context = &input[CONTEXT.min(input.len())..];
        let entry: u64 = if wide { 128 } else { 64 };
        let umem = (IN_UMEM.is_set(input)).then(|| (UMEM.get(input), get64(input, UMEM_OFFSET)));
        let pages = (LOG_PAGE_SIZE.get(context), PAGE_OFFSET.get(context));
        self.queue_buffer(input, entry << log_size, umem, pages, true)
    }

    pub(crate) fn create_cq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[CONTEXT.min(input.len())..];
        let log_size = LOG_SIZE.get(context);
        if log_size > 22 {
            return Err(refuse(
                Status::ExceedsLimit,
                "the completion queue is too long",
            ));
        }
        let wide = match CQE_SIZE.get(context) {
            CQE_64 => false,
            CQE_128 | CQE_128_PADDED => true,
            _ => {
                return Err(refuse(Status::BadParameter, "invalid CQE size"));
            }
        };
        if self.uars.get(UAR.get(context)).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the completion queue's UAR does not exist",
            ));
        }
        let eqn = EQN.get(context);
        if self.eqs.get(eqn).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the completion queue's event queue does not exist",
            ));
        }
        let umem = RECORDS_IN_UMEM
            .is_set(context)
            .then(|| RECORDS_UMEM.get(context));
        let doorbell = self.doorbell_address(get64(context, DOORBELL), umem)?;
        if doorbell & 7 != 0 {
            return Err(refuse(
                Status::BadParameter,
                "the doorbell record is not aligned",
            ));
        }
        let cq = Cq {
            eqn,
            buffer: self.cq_buffer(input, log_size, wide)?,
            log_size,
            wide,
            doorbell,
            ignore_overrun: IGNORE_OVERRUN.is_set(context),
            producer: 0,
            written: Arc::default(),
            consumer: 0,
            armed: ArmState::Disarmed,
            solicited: 0,
            unreported: UnreportedCompletions::Nothing,
            failed: false,
            session: compression(context)?.map(|format| Box::new(Session::new(format))),
        };
        return_number(output, self.cqs.insert(cq))
    }

    pub(crate) fn destroy_cq(&mut self, input: &[u8]) -> Outcome {
        let cqn = object_number(input);
        let used = self.queues.iter().any(|(_, queue)| queue.completes_to(cqn))
            || self
                .srqs
                .iter()
                .any(|(_, srq)| srq.has_cq() && srq.cqn == cqn);
        if used {
            return Err(refuse(Status::ResourceBusy, "queues still complete to it"));
        }
        match self.cqs.remove(cqn) {
            Some(_) => Ok(()),
            None => Err(refuse(Status::BadResource, "no such completion queue")),
        }
    }

    pub(crate) fn modify_cq(&mut self, input: &[u8]) -> Outcome {
        if OP_MOD.get(input) != RESIZE {
            // Moderation is ignored: events are generated immediately.
            return match self.cqs.get(object_number(input)) {
                Some(_) => Ok(()),
                None => Err(refuse(Status::BadResource, "no such completion queue")),
            };
        }
        let context = &input[CONTEXT.min(input.len())..];
        let log_size = LOG_SIZE.get(context);
        if log_size > 22 {
            return Err(refuse(
                Status::ExceedsLimit,
                "the completion queue is too long",
            ));
        }
        let wide = matches!(CQE_SIZE.get(context), CQE_128 | CQE_128_PADDED);
        let new = self.cq_buffer(input, log_size, wide)?;
        self.write_session(object_number(input));
        let time = self.platform.now();
        let Some(cq) = self.cqs.get_mut(object_number(input)) else {
            return Err(refuse(Status::BadResource, "no such completion queue"));
        };
        if let Ok(consumer) = self.platform.read_index(cq.doorbell) {
            cq.consumer = consumer & 0xff_ffff;
        }
        // One more entry is needed, for the RESIZED CQE that sends the driver to
        // the new buffer.
        if cq.outstanding() >= 1 << log_size {
            return Err(refuse(
                Status::BadSizeOutstandingCqes,
                "outstanding completions do not fit",
            ));
        }
        let last = Completion {
            opcode: cq::opcode::RESIZED,
            ..Completion::default()
        };
        cq::write(&self.platform, cq, &last, time)
            .map_err(|_| refuse(Status::BadResourceState, "the old buffer is not in memory"))?;
        cq.producer = cq.producer.wrapping_add(1);
        cq.buffer = new;
        cq.log_size = log_size;
        cq.wide = wide;
        Ok(())
    }

    pub(crate) fn query_cq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(cq) = self.cqs.get(object_number(input)) else {
            return Err(refuse(Status::BadResource, "no such completion queue"));
        };
        if cq.failed {
            STATUS.at(CONTEXT).put(output, FAILED);
        }
        CQE_SIZE.at(CONTEXT).put(output, u32::from(cq.wide));
        if let Some(session) = &cq.session {
            COMPRESS.at(CONTEXT).put(output, 1);
            let format = match session.format {
                Format::Hash => MINI_HASH,
                Format::Checksum => MINI_CHECKSUM,
            };
            MINI_FORMAT.at(CONTEXT).put(output, format);
        }
        LOG_SIZE.at(CONTEXT).put(output, cq.log_size);
        EQN.at(CONTEXT).put(output, cq.eqn);
        CONSUMER.at(CONTEXT).put(output, cq.consumer);
        PRODUCER.at(CONTEXT).put(output, cq.producer);
        put64(output, CONTEXT + DOORBELL, cq.doorbell);
        Ok(())
    }
}
