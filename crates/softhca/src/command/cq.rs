//! Completion queue commands.

use std::sync::Arc;

use roce::bits::{get64, put64};

use super::load::object_number;
use super::resource::insert;
use crate::engine::buffer::Buffer;
use crate::engine::compression::{Format, Session};
use crate::engine::core::Core;
use crate::engine::cq::{self, ArmState, Completion, Cq, UnreportedCompletions};
use crate::layout::{cqc, header};
use crate::platform::Platform;
use crate::status::{Outcome, Rule, Status, in_use, invalid, no_object, refuse, too_many};

/// Base-2 logarithm of the limit of queue length.
const MAX_LOG_SIZE: u32 = 22;
/// Context status of a queue in error.
const FAILED: u32 = 0xa;

/// The compression format that a context asks for, if any. The stride index format
/// is refused.
fn compression(context: &[u8]) -> Result<Option<Format>, super::CommandError> {
    if !cqc::CQE_COMPRESSION_EN.is_set(context) {
        return Ok(None);
    }
    if cqc::CQE_COMPRESSION_LAYOUT.is_set(context) {
        return Err(invalid("cqe_compression_layout", 1u32, Rule::Is(0)));
    }
    match cqc::MINI_CQE_RES_FORMAT.get(context) {
        cqc::mini_cqe::HASH => Ok(Some(Format::Hash)),
        cqc::mini_cqe::CSUM => Ok(Some(Format::Checksum)),
        format => Err(invalid("mini_cqe_res_format", format, Rule::Supported)),
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
        let context = &input[cqc::AT.min(input.len())..];
        let entry: u64 = if wide { 128 } else { 64 };
        let umem = (cqc::CQ_UMEM_VALID.is_set(input)).then(|| {
            (
                cqc::CQ_UMEM_ID.get(input),
                get64(input, cqc::CQ_UMEM_OFFSET),
            )
        });
        let pages = (
            cqc::LOG_PAGE_SIZE.get(context),
            cqc::PAGE_OFFSET.get(context),
        );
        self.queue_buffer(input, entry << log_size, umem, pages, true)
    }

    pub(crate) fn create_cq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[cqc::AT.min(input.len())..];
        let log_size = cqc::LOG_CQ_SIZE.get(context);
        if log_size > MAX_LOG_SIZE {
            return Err(too_many("log_cq_size", log_size, MAX_LOG_SIZE.into()));
        }
        let wide = match cqc::CQE_SZ.get(context) {
            cqc::cqe_sz::BYTES_64 => false,
            cqc::cqe_sz::BYTES_128 | cqc::cqe_sz::BYTES_128_PAD => true,
            _ => {
                return Err(invalid("cqe_sz", cqc::CQE_SZ.get(context), Rule::Known));
            }
        };
        if self.uars.get(cqc::UAR_PAGE.get(context)).is_none() {
            return Err(no_object("UAR", cqc::UAR_PAGE.get(context)));
        }
        let eqn = cqc::C_EQN.get(context);
        if self.eqs.get(eqn).is_none() {
            return Err(no_object("event queue", eqn));
        }
        let umem = cqc::DBR_UMEM_VALID
            .is_set(context)
            .then(|| cqc::DBR_UMEM_ID.get(context));
        let doorbell = self.doorbell_address(get64(context, cqc::DBR_ADDR), umem)?;
        if doorbell & 7 != 0 {
            return Err(invalid("dbr_addr", doorbell, Rule::MultipleOf(8)));
        }
        let cq = Cq {
            eqn,
            buffer: self.cq_buffer(input, log_size, wide)?,
            log_size,
            wide,
            doorbell,
            ignore_overrun: cqc::OI.is_set(context),
            producer: 0,
            written: Arc::default(),
            consumer: 0,
            armed: ArmState::Disarmed,
            solicited: 0,
            unreported: UnreportedCompletions::Nothing,
            failed: false,
            session: compression(context)?.map(|format| Box::new(Session::new(format))),
        };
        insert(output, &mut self.cqs, "completion queue", cq)
    }

    pub(crate) fn destroy_cq(&mut self, input: &[u8]) -> Outcome {
        let cqn = object_number(input);
        let used = self.queues.iter().any(|(_, queue)| queue.completes_to(cqn))
            || self
                .srqs
                .iter()
                .any(|(_, srq)| srq.has_cq() && srq.cqn == cqn);
        if used {
            return Err(in_use("completion queue", cqn));
        }
        match self.cqs.remove(cqn) {
            Some(_) => {
                if let Some(chaos) = &mut self.chaos {
                    chaos.queue_destroyed(cqn);
                }
                Ok(())
            }
            None => Err(no_object("completion queue", cqn)),
        }
    }

    pub(crate) fn modify_cq(&mut self, input: &[u8]) -> Outcome {
        if header::OP_MOD.get(input) != cqc::OP_MOD_RESIZE {
            // Moderation is ignored: events are generated immediately.
            return match self.cqs.get(object_number(input)) {
                Some(_) => Ok(()),
                None => Err(no_object("completion queue", object_number(input))),
            };
        }
        let context = &input[cqc::AT.min(input.len())..];
        let log_size = cqc::LOG_CQ_SIZE.get(context);
        if log_size > MAX_LOG_SIZE {
            return Err(too_many("log_cq_size", log_size, MAX_LOG_SIZE.into()));
        }
        let wide = matches!(
            cqc::CQE_SZ.get(context),
            cqc::cqe_sz::BYTES_128 | cqc::cqe_sz::BYTES_128_PAD
        );
        let new = self.cq_buffer(input, log_size, wide)?;
        self.write_session(object_number(input));
        let time = self.platform.now();
        let Some(cq) = self.cqs.get_mut(object_number(input)) else {
            return Err(no_object("completion queue", object_number(input)));
        };
        if let Ok(consumer) = self.platform.read_index(cq.doorbell) {
            cq.consumer = consumer & 0xff_ffff;
        }
        // One more entry is needed, for the RESIZED CQE that sends the driver to
        // the new buffer.
        if cq.outstanding() >= 1 << log_size {
            return Err(refuse(
                Status::BadSizeOutstandingCqes,
                "outstanding completions",
                cq.outstanding(),
                Rule::AtMost((1 << log_size) - 1),
            ));
        }
        let last = Completion {
            opcode: cq::opcode::RESIZED,
            ..Completion::default()
        };
        cq::write(&self.platform, cq, &last, time).map_err(|_| {
            refuse(
                Status::BadResourceState,
                "completion queue",
                object_number(input),
                Rule::Writable,
            )
        })?;
        cq.producer = cq.producer.wrapping_add(1);
        cq.buffer = new;
        cq.log_size = log_size;
        cq.wide = wide;
        Ok(())
    }

    pub(crate) fn query_cq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(cq) = self.cqs.get(object_number(input)) else {
            return Err(no_object("completion queue", object_number(input)));
        };
        if cq.failed {
            cqc::STATUS.at(cqc::AT).put(output, FAILED);
        }
        cqc::CQE_SZ.at(cqc::AT).put(output, u32::from(cq.wide));
        if let Some(session) = &cq.session {
            cqc::CQE_COMPRESSION_EN.at(cqc::AT).put(output, 1);
            let format = match session.format {
                Format::Hash => cqc::mini_cqe::HASH,
                Format::Checksum => cqc::mini_cqe::CSUM,
            };
            cqc::MINI_CQE_RES_FORMAT.at(cqc::AT).put(output, format);
        }
        cqc::LOG_CQ_SIZE.at(cqc::AT).put(output, cq.log_size);
        cqc::C_EQN.at(cqc::AT).put(output, cq.eqn);
        cqc::CONSUMER_COUNTER.at(cqc::AT).put(output, cq.consumer);
        cqc::PRODUCER_COUNTER.at(cqc::AT).put(output, cq.producer);
        put64(output, cqc::AT + cqc::DBR_ADDR, cq.doorbell);
        Ok(())
    }
}
