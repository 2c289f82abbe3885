//! Commands about the network interface: send and receive queues, and the
//! steering between them, of which little more than numbers is kept.

use std::collections::HashMap;

use super::NUMBER;
use super::load::number;
use super::opcode as op;
use super::resource::created;
use super::srq::{
    WQ, WQ_DOORBELL, WQ_LOG_PAGE_SIZE, WQ_LOG_SIZE, WQ_LOG_STRIDE, WQ_PAGE_OFFSET, WQ_PD,
};
use super::status::{Outcome, Status, refuse};
use crate::bits::{Field, field, get64, put_bytes};
use crate::engine::buffer::{Buffer, PAGES_AT};
use crate::engine::core::Core;
use crate::engine::qp::{Queue, Ring, Rq, Sq};
use crate::hca::Hca;
use crate::platform::Platform;

const CONTEXT: usize = 0x20;
const CONTEXT_SIZE: usize = 0xf0;
const STATE: Field = field(0, 23, 20);
const USER_INDEX: Field = field(4, 23, 0);
const CQN: Field = field(8, 23, 0);
const READY: u32 = 1;

/// What is kept of steering: which objects there are.
#[derive(Debug)]
pub(crate) struct Steering {
    next: u32,
    objects: HashMap<u32, u16>,
}

impl Default for Steering {
    fn default() -> Self {
        Steering {
            next: FIRST,
            objects: HashMap::new(),
        }
    }
}

const FIRST: u32 = 0x100;
const MOST: usize = 1 << 16;

impl Steering {
    pub(crate) fn clear(&mut self) {
        self.objects.clear();
    }
}

/// The opcode that makes what another one destroys.
fn creator(opcode: u16) -> u16 {
    match opcode {
        op::DESTROY_TIR | op::MODIFY_TIR => op::CREATE_TIR,
        op::DESTROY_TIS | op::MODIFY_TIS => op::CREATE_TIS,
        op::DESTROY_RQT | op::MODIFY_RQT => op::CREATE_RQT,
        op::DESTROY_FLOW_TABLE => op::CREATE_FLOW_TABLE,
        op::DESTROY_FLOW_GROUP => op::CREATE_FLOW_GROUP,
        _ => op::ALLOC_FLOW_COUNTER,
    }
}

/// Flow tables and groups are named in another place than the rest.
const STEERED: Field = field(0x14, 23, 0);
const GROUP: Field = field(0x18, 31, 0);
const COUNTER: Field = field(0x8, 31, 0);

impl<P: Platform> Core<P> {
    pub(crate) fn create_steering(
        &mut self,
        opcode: u16,
        _input: &[u8],
        output: &mut [u8],
    ) -> Outcome {
        if self.steering.objects.len() >= MOST {
            return Err(refuse(
                Status::ExceedsLimit,
                "there are too many steering objects",
            ));
        }
        let number = self.steering.next;
        self.steering.next = (number + 1) & 0xff_ffff;
        self.steering.objects.insert(number, opcode);
        NUMBER.put(output, number);
        Ok(())
    }

    pub(crate) fn destroy_steering(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        let number = match opcode {
            op::DESTROY_FLOW_TABLE => STEERED.get(input),
            op::DESTROY_FLOW_GROUP => GROUP.get(input),
            op::DEALLOC_FLOW_COUNTER => COUNTER.get(input),
            _ => number(input),
        };
        if self.steering.objects.get(&number) == Some(&creator(opcode)) {
            self.steering.objects.remove(&number);
            Ok(())
        } else {
            Err(refuse(Status::BadResource, "no such steering object"))
        }
    }

    pub(crate) fn modify_steering(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        let named = matches!(opcode, op::MODIFY_TIR | op::MODIFY_TIS | op::MODIFY_RQT);
        let exists = self.steering.objects.get(&number(input)) == Some(&creator(opcode));
        if named && !exists {
            return Err(refuse(Status::BadResource, "no such steering object"));
        }
        Ok(())
    }

    /// The queue that a context describes.
    fn ring(&self, input: &[u8], send: bool) -> Result<(Ring, u32), super::Refused> {
        let wq = &input[(CONTEXT + WQ).min(input.len())..];
        let log_size = WQ_LOG_SIZE.get(wq);
        let log_stride = WQ_LOG_STRIDE.get(wq);
        if log_size > 15 || !(4..=9).contains(&log_stride) || (send && log_stride != 6) {
            return Err(refuse(Status::ExceedsLimit, "the work queue's size"));
        }
        let pd = WQ_PD.get(wq);
        if !self.has_pd(pd) {
            return Err(refuse(
                Status::BadResource,
                "the work queue's protection domain",
            ));
        }
        let buffer = Buffer::listed(
            input,
            PAGES_AT,
            1 << (log_size + log_stride),
            WQ_LOG_PAGE_SIZE.get(wq),
            WQ_PAGE_OFFSET.get(wq),
        )
        .ok_or(refuse(
            Status::BadInputLength,
            "pages of the work queue are missing",
        ))?;
        let doorbell = get64(wq, WQ_DOORBELL);
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
                head: 0,
                tail: 0,
            },
            pd,
        ))
    }

    /// The completion queue and user index of a context, and its bytes.
    fn queue_context(&self, input: &[u8]) -> Result<(u32, u32, Vec<u8>), super::Refused> {
        let context = &input[CONTEXT.min(input.len())..];
        let cqn = CQN.get(context);
        if self.cqs.get(cqn).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the work queue's completion queue",
            ));
        }
        let kept = context[..CONTEXT_SIZE.min(context.len())].to_vec();
        Ok((cqn, USER_INDEX.get(context), kept))
    }

    pub(crate) fn create_rq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let (ring, pd) = self.ring(input, false)?;
        let (cqn, uidx, context) = self.queue_context(input)?;
        created(
            output,
            self.queues.insert(Queue::Rq(Box::new(Rq {
                pd,
                cqn,
                uidx,
                state: 0,
                ring,
                context,
            }))),
        )
    }

    pub(crate) fn modify_rq(&mut self, input: &[u8]) -> Outcome {
        match self.queues.get_mut(number(input)) {
            Some(Queue::Rq(rq)) => {
                rq.state = STATE.at(CONTEXT).get(input);
                if rq.state == 0 {
                    (rq.ring.head, rq.ring.tail) = (0, 0);
                }
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such receive queue")),
        }
    }

    pub(crate) fn destroy_rq(&mut self, input: &[u8]) -> Outcome {
        let rqn = number(input);
        match self.queues.get(rqn) {
            Some(Queue::Rq(_)) => {
                self.queues.remove(rqn);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such receive queue")),
        }
    }

    pub(crate) fn query_rq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match self.queues.get(number(input)) {
            Some(Queue::Rq(rq)) => {
                put_bytes(output, CONTEXT, &rq.context);
                STATE.at(CONTEXT).put(output, rq.state);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such receive queue")),
        }
    }

    pub(crate) fn query_sq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match self.queues.get(number(input)) {
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
        created(
            output,
            core.queues.insert(Queue::Sq(Box::new(Sq {
                pd,
                cqn,
                uidx,
                state: 0,
                ring,
                context,
                blue_flame: None,
            }))),
        )
    }

    pub(crate) fn modify_sq(&mut self, input: &[u8]) -> Outcome {
        let sqn = number(input);
        match self.core.queues.get_mut(sqn) {
            Some(Queue::Sq(sq)) => {
                sq.state = STATE.at(CONTEXT).get(input);
                match sq.state {
                    0 => (sq.ring.head, sq.ring.tail) = (0, 0),
                    READY => self.rung.push(sqn),
                    _ => {}
                }
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such send queue")),
        }
    }

    pub(crate) fn destroy_sq(&mut self, input: &[u8]) -> Outcome {
        let sqn = number(input);
        match self.core.queues.get(sqn) {
            Some(Queue::Sq(_)) => {
                self.core.queues.remove(sqn);
                Ok(())
            }
            _ => Err(refuse(Status::BadResource, "no such send queue")),
        }
    }
}
