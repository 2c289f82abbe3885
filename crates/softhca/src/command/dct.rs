//! DC target commands.

use std::collections::VecDeque;

use roce::bits::{get64, put_bytes};
use roce::packet::Mtu;
use roce::transport::{QpConfig, QpState, Service};

use super::load::object_number;
use super::qp::scatter_limit;
use super::resource::full;
use crate::engine::core::Core;
use crate::engine::qp::{CONTEXT_SIZE, Qp, Queue};
use crate::hca::Hca;
use crate::layout::{dctc, header};
use crate::platform::Platform;
use crate::status::{CommandError, Outcome, Rule, Status, invalid, no_object, refuse};

/// State codes of a DC target.
const ACTIVE: u32 = 0;
const DRAINED: u32 = 2;

/// Base-2 logarithm of the outstanding reads and atomics per initiator.
pub(crate) const LOG_MAX_READS: u32 = 4;

impl<P: Platform> Core<P> {
    /// Returns a DC target by number.
    fn dct_mut(&mut self, number: u32) -> Option<&mut Qp> {
        self.qp_mut(number)
            .filter(|qp| qp.service == Service::DcTarget)
    }
}

impl<P: Platform> Hca<P> {
    pub(crate) fn create_dct(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let mut context = [0; CONTEXT_SIZE];
        let input_context = input.get(dctc::AT..).unwrap_or(&[]);
        put_bytes(
            &mut context,
            0,
            &input_context[..input_context.len().min(dctc::SIZE)],
        );
        let core = &mut self.core;
        let (pd, cqn, srqn) = (
            dctc::PD.get(&context),
            dctc::CQN.get(&context),
            dctc::SRQN.get(&context),
        );
        if dctc::RLKY.is_set(&context) && core.object_owners.is_program() {
            return Err(invalid("rlky", 1u32, Rule::Permitted));
        }
        if !core.has_pd(pd) {
            return Err(no_object("protection domain", pd));
        }
        if core.srqs.get(srqn).is_none() {
            return Err(no_object("SRQ", srqn));
        }
        let Some(cq) = core.cqs.get(cqn) else {
            return Err(no_object("completion queue", cqn));
        };
        let Some(mtu) = Mtu::from_code(dctc::MTU.get(&context) as u8) else {
            return Err(invalid("mtu", dctc::MTU.get(&context), Rule::Between(1, 5)));
        };
        let config = QpConfig {
            service: Service::DcTarget,
            mtu,
            srq: true,
            dc_key: get64(&context, dctc::DC_ACCESS_KEY),
            min_rnr_timer: dctc::MIN_RNR_NAK.get(&context) as u8,
            max_dest_rd_atomic: 1 << LOG_MAX_READS,
            allow_read: dctc::RRE.is_set(&context),
            allow_write: dctc::RWE.is_set(&context),
            allow_atomic: dctc::RAE.is_set(&context),
            ..QpConfig::default()
        };
        dctc::STATE.put(&mut context, ACTIVE);
        let qp = Qp {
            service: Service::DcTarget,
            pd,
            privileged: dctc::RLKY.is_set(&context),
            uidx: dctc::USER_INDEX.get(&context),
            send_cq: 0,
            recv_cq: cqn,
            srqn: Some(srqn),
            xrcd: None,
            counter_set: dctc::COUNTER_SET_ID.get(&context),
            send: None,
            recv: None,
            out_of_order: false,
            skipped_receive: None,
            blue_flame: None,
            recv_scatter_limit: scatter_limit(dctc::CS_RES.get(&context), cq.wide),
            read_scatter_limit: 0,
            context: Box::new(context),
            config: config.clone(),
            in_error: false,
            offloads_rendezvous: false,
            transfers: 0,
            device_requests: VecDeque::new(),
            drains_on_signature_error: false,
            drain_pending: false,
        };
        let Ok(dctn) = core.queues.insert(Queue::Qp(Box::new(qp))) else {
            return Err(full(&core.queues, "queue"));
        };
        let now = core.platform.now();
        let ready = QpState::ReadyToReceive;
        let result = self
            .transport
            .create(dctn, config.clone())
            .and_then(|()| self.transport.modify(core, now, dctn, ready, config));
        if result.is_err() {
            core.queues.remove(dctn);
            return Err(refuse(Status::Internal, "queue pair", dctn, Rule::Free));
        }
        header::NUMBER.put(output, dctn);
        Ok(())
    }

    /// Stops receiving and reports the drained event, both immediately.
    pub(crate) fn drain_dct(&mut self, input: &[u8]) -> Outcome {
        let dctn = object_number(input);
        let Some(qp) = self.core.dct_mut(dctn) else {
            return Err(unknown(input));
        };
        dctc::STATE.put(&mut *qp.context, DRAINED);
        self.transport.destroy(dctn);
        self.core.post_dct_drained(dctn);
        Ok(())
    }

    pub(crate) fn destroy_dct(&mut self, input: &[u8]) -> Outcome {
        let dctn = object_number(input);
        let Some(qp) = self.core.dct_mut(dctn) else {
            return Err(unknown(input));
        };
        if dctc::STATE.get(&*qp.context) != DRAINED {
            return Err(refuse(
                Status::BadResourceState,
                "DC target",
                dctn,
                Rule::InState("drained"),
            ));
        }
        self.core.queues.remove(dctn);
        Ok(())
    }

    pub(crate) fn query_dct(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(qp) = self.core.dct_mut(object_number(input)) else {
            return Err(unknown(input));
        };
        put_bytes(output, dctc::AT, &qp.context[..dctc::SIZE]);
        Ok(())
    }
}

fn unknown(input: &[u8]) -> CommandError {
    no_object("DC target", object_number(input))
}
