//! Commands for the send and receive queues of the network interface.

use roce::bits::{get64, put_bytes};

use super::load::object_number;
use super::resource::insert;
use super::srq::{wq_records_umem, wq_umem};
use crate::engine::core::Core;
use crate::engine::qp::{Queue, Ring, Rq, Sq, Strides};
use crate::hca::Hca;
use crate::layout::rqc::state::{ERR, RDY, RST};
use crate::layout::wq::wq_type;
use crate::layout::{rqc, sqc, wq};
use crate::platform::Platform;
use crate::status::{Outcome, Rule, Status, in_use, invalid, no_object, refuse, too_many};

/// Base-2 logarithm of the limit of queue length.
const MAX_LOG_SIZE: u32 = 15;
const MIN_LOG_STRIDES: u32 = 9;
const MIN_LOG_STRIDE_BYTES: u32 = 6;
/// Greater values of the field are numbers below the least one, of devices with
/// `ext_stride_num_range`.
const MAX_LOG_STRIDES: u32 = 16;

/// Returns the state that a command moves a queue to.
fn state(input: &[u8]) -> Result<u32, super::CommandError> {
    match rqc::STATE.at(rqc::AT).get(input) {
        state @ (RST | RDY | ERR) => Ok(state),
        state => Err(invalid("state", state, Rule::Known)),
    }
}

/// Decodes the strides of a work queue, if it has any.
fn strides(wq: &[u8]) -> Result<Option<Strides>, super::CommandError> {
    let log_count = wq::LOG_WQE_NUM_OF_STRIDES.get(wq) + MIN_LOG_STRIDES;
    match wq::WQ_TYPE.get(wq) {
        wq_type::CYCLIC_STRIDING if log_count > MAX_LOG_STRIDES => Err(invalid(
            "single_wqe_log_num_of_strides",
            log_count,
            Rule::AtMost(MAX_LOG_STRIDES.into()),
        )),
        wq_type::CYCLIC_STRIDING => Ok(Some(Strides {
            size: 1 << (wq::LOG_WQE_STRIDE_SIZE.get(wq) + MIN_LOG_STRIDE_BYTES),
            count: 1 << log_count,
            shift: 2 * wq::TWO_BYTE_SHIFT_EN.get(wq),
            current: None,
        })),
        wq_type::LINKED_LIST_STRIDING => Err(invalid(
            "wq_type",
            wq_type::LINKED_LIST_STRIDING,
            Rule::Supported,
        )),
        _ => Ok(None),
    }
}

impl<P: Platform> Core<P> {
    /// Decodes the work queue of a context. Returns its ring and protection domain.
    fn ring(&mut self, input: &[u8], send: bool) -> Result<(Ring, u32), super::CommandError> {
        let wq = &input[(rqc::AT + rqc::WQ).min(input.len())..];
        let log_size = wq::LOG_WQ_SZ.get(wq);
        let log_stride = wq::LOG_WQ_STRIDE.get(wq);
        if log_size > MAX_LOG_SIZE {
            return Err(too_many("log_wq_sz", log_size, MAX_LOG_SIZE.into()));
        }
        let (least, most) = if send { (6, 6) } else { (4, 9) };
        if !(least..=most).contains(&log_stride) {
            let rule = Rule::Between(least.into(), most.into());
            return Err(refuse(
                Status::ExceedsLimit,
                "log_wq_stride",
                log_stride,
                rule,
            ));
        }
        let pd = wq::PD.get(wq);
        if !self.has_pd(pd) {
            return Err(no_object("protection domain", pd));
        }
        let length = 1 << (log_size + log_stride);
        let pages = (wq::LOG_WQ_PG_SZ.get(wq), wq::PAGE_OFFSET.get(wq));
        let buffer = self.queue_buffer(input, length, wq_umem(wq), pages, false)?;
        let doorbell = self.doorbell_address(get64(wq, wq::DBR_ADDR), wq_records_umem(wq))?;
        Ok((
            Ring {
                buffer,
                offset: 0,
                log_size,
                log_stride,
                doorbell: if send {
                    doorbell.wrapping_add(4)
                } else {
                    doorbell
                },
                ..Ring::default()
            },
            pd,
        ))
    }

    /// Returns the completion queue, the user index and the bytes of a context.
    fn queue_context(&self, input: &[u8]) -> Result<(u32, u32, Vec<u8>), super::CommandError> {
        let context = &input[rqc::AT.min(input.len())..];
        let cqn = rqc::CQN.get(context);
        if self.cqs.get(cqn).is_none() {
            return Err(no_object("completion queue", cqn));
        }
        if rqc::RLKY.is_set(context) && self.object_owners.is_program() {
            return Err(invalid("rlky", 1u32, Rule::Permitted));
        }
        let saved_context = context[..rqc::SIZE.min(context.len())].to_vec();
        Ok((cqn, rqc::USER_INDEX.get(context), saved_context))
    }

    pub(crate) fn create_rq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let (ring, pd) = self.ring(input, false)?;
        let (cqn, uidx, context) = self.queue_context(input)?;
        let strides = strides(&input[(rqc::AT + rqc::WQ).min(input.len())..])?;
        let queue = Queue::Rq(Box::new(Rq {
            pd,
            privileged: rqc::RLKY.is_set(&context),
            cqn,
            uidx,
            state: RST,
            flushes: rqc::FLUSH_IN_ERROR_EN.is_set(&context),
            strips_vlan: rqc::VSD.get(&context) == 0,
            counter_set: rqc::COUNTER_SET_ID.get(&context),
            strides,
            ring,
            context,
        }));
        insert(output, &mut self.queues, "queue", queue)
    }

    pub(crate) fn modify_rq(&mut self, input: &[u8]) -> Outcome {
        let (rqn, state) = (object_number(input), state(input)?);
        match self.queues.get_mut(rqn) {
            Some(Queue::Rq(rq)) => {
                rq.state = state;
                let changes = get64(input, rqc::MODIFY_BITMASK);
                if changes & rqc::MODIFY_VSD != 0 {
                    rq.strips_vlan = rqc::VSD.at(rqc::AT).get(input) == 0;
                }
                if changes & rqc::MODIFY_COUNTER_SET != 0 {
                    rq.counter_set = rqc::COUNTER_SET_ID.at(rqc::AT).get(input);
                }
                if state == RST {
                    (rq.ring.head, rq.ring.tail) = (0, 0);
                    if let Some(strides) = &mut rq.strides {
                        strides.current = None;
                    }
                }
                self.flush_rq(rqn);
                Ok(())
            }
            _ => Err(no_object("receive queue", rqn)),
        }
    }

    pub(crate) fn destroy_rq(&mut self, input: &[u8]) -> Outcome {
        let rqn = object_number(input);
        match self.queues.get(rqn) {
            Some(Queue::Rq(_)) if self.steering.is_queue_referenced(rqn) => {
                Err(in_use("receive queue", rqn))
            }
            Some(Queue::Rq(_)) => {
                self.queues.remove(rqn);
                Ok(())
            }
            _ => Err(no_object("receive queue", rqn)),
        }
    }

    pub(crate) fn query_rq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match self.queues.get(object_number(input)) {
            Some(Queue::Rq(rq)) => {
                put_bytes(output, rqc::AT, &rq.context);
                rqc::STATE.at(rqc::AT).put(output, rq.state);
                let disable = rqc::VSD.at(rqc::AT);
                disable.put(output, u32::from(!rq.strips_vlan));
                let counter_set = rqc::COUNTER_SET_ID.at(rqc::AT);
                counter_set.put(output, rq.counter_set);
                Ok(())
            }
            _ => Err(no_object("receive queue", object_number(input))),
        }
    }

    pub(crate) fn query_sq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match self.queues.get(object_number(input)) {
            Some(Queue::Sq(sq)) => {
                put_bytes(output, rqc::AT, &sq.context);
                rqc::STATE.at(rqc::AT).put(output, sq.state);
                Ok(())
            }
            _ => Err(no_object("send queue", object_number(input))),
        }
    }
}

impl<P: Platform> Hca<P> {
    pub(crate) fn create_sq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let core = &mut self.core;
        let (ring, pd) = core.ring(input, true)?;
        let (cqn, uidx, context) = core.queue_context(input)?;
        let queue = Queue::Sq(Box::new(Sq {
            pd,
            privileged: rqc::RLKY.is_set(&context),
            cqn,
            uidx,
            state: RST,
            flushes: sqc::FLUSH_IN_ERROR_EN.is_set(&context),
            tis: sqc::TIS_NUM_0.get(&context),
            ring,
            context,
            blue_flame: None,
        }));
        insert(output, &mut core.queues, "queue", queue)
    }

    pub(crate) fn modify_sq(&mut self, input: &[u8]) -> Outcome {
        let (sqn, state) = (object_number(input), state(input)?);
        match self.core.queues.get_mut(sqn) {
            Some(Queue::Sq(sq)) => {
                sq.state = state;
                match state {
                    RST => {
                        sq.ring.reset();
                        sq.blue_flame = None;
                        self.active_sqs.retain(|active| *active != sqn);
                    }
                    // Flushes the posted WQEs.
                    ERR => self.active_sqs.push(sqn),
                    _ => {}
                }
                Ok(())
            }
            _ => Err(no_object("send queue", sqn)),
        }
    }

    pub(crate) fn destroy_sq(&mut self, input: &[u8]) -> Outcome {
        let sqn = object_number(input);
        match self.core.queues.get(sqn) {
            Some(Queue::Sq(_)) => {
                self.core.queues.remove(sqn);
                Ok(())
            }
            _ => Err(no_object("send queue", sqn)),
        }
    }
}
