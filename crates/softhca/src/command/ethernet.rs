//! Commands for the send and receive queues of the network interface.

use roce::bits::{Field, field, flag, get64, put_bytes};

use super::load::object_number;
use super::resource::return_number;
use super::srq::{
    WQ, WQ_DOORBELL, WQ_LOG_PAGE_SIZE, WQ_LOG_SIZE, WQ_LOG_STRIDE, WQ_PAGE_OFFSET, WQ_PD,
    wq_records_umem, wq_umem,
};
use crate::engine::core::Core;
use crate::engine::ethernet::{ERROR, READY, RESET};
use crate::engine::qp::{Queue, Ring, Rq, Sq, Strides};
use crate::hca::Hca;
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

const CONTEXT: usize = 0x20;
const CONTEXT_SIZE: usize = 0xf0;
/// The queue may use the reserved lkey.
const RLKY: Field = flag(0, 31);
const STATE: Field = field(0, 23, 20);
/// WQEs are completed in the error state, of a send queue and of a receive queue.
const SQ_FLUSH_IN_ERROR: Field = flag(0, 28);
const RQ_FLUSH_IN_ERROR: Field = flag(0, 18);
/// VLAN tags of received frames are not removed.
const VLAN_STRIP_DISABLE: Field = flag(0, 28);
/// Types of work queues with strides, as a list and cyclic. The sizes of strides are
/// logarithms, less their least values.
const WQ_TYPE: Field = field(0, 31, 28);
const WQ_TYPE_STRIDING_LIST: u32 = 2;
const WQ_TYPE_STRIDING: u32 = 3;
const WQ_LOG_STRIDES: Field = field(0x24, 11, 8);
const WQ_STRIDE_SHIFT: Field = flag(0x24, 7);
const WQ_LOG_STRIDE_BYTES: Field = field(0x24, 2, 0);
const MIN_LOG_STRIDES: u32 = 9;
const MIN_LOG_STRIDE_BYTES: u32 = 6;
/// Greater values of the field are numbers below the least one, of devices with
/// `ext_stride_num_range`.
const MAX_LOG_STRIDES: u32 = 16;
/// Which of a receive queue's properties MODIFY_RQ changes.
const MODIFY_MASK: usize = 0x10;
const MODIFY_VLAN: u64 = 1 << 1;
const USER_INDEX: Field = field(4, 23, 0);
const CQN: Field = field(8, 23, 0);
/// The first TIS of a send queue, and its only one.
const TIS: Field = field(0x2c, 23, 0);

/// Returns the state that a command moves a queue to.
fn state(input: &[u8]) -> Result<u32, super::CommandError> {
    match STATE.at(CONTEXT).get(input) {
        state @ (RESET | READY | ERROR) => Ok(state),
        _ => Err(refuse(Status::BadParameter, "unknown queue state")),
    }
}

/// Decodes the strides of a work queue, if it has any.
fn strides(wq: &[u8]) -> Result<Option<Strides>, super::CommandError> {
    let log_count = WQ_LOG_STRIDES.get(wq) + MIN_LOG_STRIDES;
    match WQ_TYPE.get(wq) {
        WQ_TYPE_STRIDING if log_count > MAX_LOG_STRIDES => Err(refuse(
            Status::BadParameter,
            "unsupported number of strides",
        )),
        WQ_TYPE_STRIDING => Ok(Some(Strides {
            size: 1 << (WQ_LOG_STRIDE_BYTES.get(wq) + MIN_LOG_STRIDE_BYTES),
            count: 1 << log_count,
            shift: 2 * WQ_STRIDE_SHIFT.get(wq),
            current: None,
        })),
        WQ_TYPE_STRIDING_LIST => Err(refuse(
            Status::BadParameter,
            "lists of striding WQEs are not modelled",
        )),
        _ => Ok(None),
    }
}

impl<P: Platform> Core<P> {
    /// Decodes the work queue of a context. Returns its ring and protection domain.
    fn ring(&mut self, input: &[u8], send: bool) -> Result<(Ring, u32), super::CommandError> {
        let wq = &input[(CONTEXT + WQ).min(input.len())..];
        let log_size = WQ_LOG_SIZE.get(wq);
        let log_stride = WQ_LOG_STRIDE.get(wq);
        if log_size > 15 || !(4..=9).contains(&log_stride) || (send && log_stride != 6) {
            return Err(refuse(
                Status::ExceedsLimit,
                "unsupported size of the work queue",
            ));
        }
        let pd = WQ_PD.get(wq);
        if !self.has_pd(pd) {
            return Err(refuse(
                Status::BadResource,
                "the work queue's protection domain does not exist",
            ));
        }
        let length = 1 << (log_size + log_stride);
        let pages = (WQ_LOG_PAGE_SIZE.get(wq), WQ_PAGE_OFFSET.get(wq));
        let buffer = self.queue_buffer(input, length, wq_umem(wq), pages, false)?;
        let doorbell = self.doorbell_address(get64(wq, WQ_DOORBELL), wq_records_umem(wq))?;
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
        let context = &input[CONTEXT.min(input.len())..];
        let cqn = CQN.get(context);
        if self.cqs.get(cqn).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the work queue's completion queue does not exist",
            ));
        }
        if RLKY.is_set(context) && self.object_owners.is_program() {
            return Err(refuse(
                Status::BadParameter,
                "programs may not use the reserved lkey",
            ));
        }
        let saved_context = context[..CONTEXT_SIZE.min(context.len())].to_vec();
        Ok((cqn, USER_INDEX.get(context), saved_context))
    }

    pub(crate) fn create_rq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let (ring, pd) = self.ring(input, false)?;
        let (cqn, uidx, context) = self.queue_context(input)?;
        let strides = strides(&input[(CONTEXT + WQ).min(input.len())..])?;
        return_number(
            output,
            self.queues.insert(Queue::Rq(Box::new(Rq {
                pd,
                privileged: RLKY.is_set(&context),
                cqn,
                uidx,
                state: RESET,
                flushes: RQ_FLUSH_IN_ERROR.is_set(&context),
                strips_vlan: VLAN_STRIP_DISABLE.get(&context) == 0,
                strides,
                ring,
                context,
            }))),
        )
    }

    pub(crate) fn modify_rq(&mut self, input: &[u8]) -> Outcome {
        let (rqn, state) = (object_number(input), state(input)?);
        match self.queues.get_mut(rqn) {
            Some(Queue::Rq(rq)) => {
                rq.state = state;
                if get64(input, MODIFY_MASK) & MODIFY_VLAN != 0 {
                    rq.strips_vlan = VLAN_STRIP_DISABLE.at(CONTEXT).get(input) == 0;
                }
                if state == RESET {
                    (rq.ring.head, rq.ring.tail) = (0, 0);
                    if let Some(strides) = &mut rq.strides {
                        strides.current = None;
                    }
                }
                self.flush_rq(rqn);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such receive queue")),
        }
    }

    pub(crate) fn destroy_rq(&mut self, input: &[u8]) -> Outcome {
        let rqn = object_number(input);
        match self.queues.get(rqn) {
            Some(Queue::Rq(_)) if self.steering.is_queue_referenced(rqn) => Err(refuse(
                Status::ResourceBusy,
                "TIRs or RQTs still refer to the receive queue",
            )),
            Some(Queue::Rq(_)) => {
                self.queues.remove(rqn);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such receive queue")),
        }
    }

    pub(crate) fn query_rq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match self.queues.get(object_number(input)) {
            Some(Queue::Rq(rq)) => {
                put_bytes(output, CONTEXT, &rq.context);
                STATE.at(CONTEXT).put(output, rq.state);
                let disable = VLAN_STRIP_DISABLE.at(CONTEXT);
                disable.put(output, u32::from(!rq.strips_vlan));
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such receive queue")),
        }
    }

    pub(crate) fn query_sq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match self.queues.get(object_number(input)) {
            Some(Queue::Sq(sq)) => {
                put_bytes(output, CONTEXT, &sq.context);
                STATE.at(CONTEXT).put(output, sq.state);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such send queue")),
        }
    }
}

impl<P: Platform> Hca<P> {
    pub(crate) fn create_sq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let core = &mut self.core;
        let (ring, pd) = core.ring(input, true)?;
        let (cqn, uidx, context) = core.queue_context(input)?;
        return_number(
            output,
            core.queues.insert(Queue::Sq(Box::new(Sq {
                pd,
                privileged: RLKY.is_set(&context),
                cqn,
                uidx,
                state: RESET,
                flushes: SQ_FLUSH_IN_ERROR.is_set(&context),
                tis: TIS.get(&context),
                ring,
                context,
                blue_flame: None,
            }))),
        )
    }

    pub(crate) fn modify_sq(&mut self, input: &[u8]) -> Outcome {
        let (sqn, state) = (object_number(input), state(input)?);
        match self.core.queues.get_mut(sqn) {
            Some(Queue::Sq(sq)) => {
                sq.state = state;
                match state {
                    RESET => {
                        sq.ring.reset();
                        sq.blue_flame = None;
                        self.active_sqs.retain(|active| *active != sqn);
                    }
                    // Flushes the posted WQEs.
                    ERROR => self.active_sqs.push(sqn),
                    _ => {}
                }
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such send queue")),
        }
    }

    pub(crate) fn destroy_sq(&mut self, input: &[u8]) -> Outcome {
        let sqn = object_number(input);
        match self.core.queues.get(sqn) {
            Some(Queue::Sq(_)) => {
                self.core.queues.remove(sqn);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such send queue")),
        }
    }
}
