//! Queue pair commands.

use std::collections::VecDeque;

use roce::bits::{Field, field, flag, get_array, get32, get64, put_bytes};
use roce::packet::{DEFAULT_PKEY, Mtu};
use roce::transport::{QpConfig, QpState, Service};

use super::NUMBER;
use super::load::object_number;
use super::opcode as op;
use crate::engine::core::Core;
use crate::engine::qp::{Address, CONTEXT_SIZE, Qp, Queue, Ring};
use crate::hca::Hca;
use crate::platform::Platform;
use crate::profile::PortKind;
use crate::status::{Outcome, Status, refuse};

const OPT_PARAM_MASK: usize = 0x10;
/// Enhanced connection options (ECE): the requested, and the supported ones.
const ECE: Field = field(0x14, 31, 0);
const SUPPORTED_ECE: Field = field(0xc, 31, 0);
/// The version of the options, and the supported ones, which have no effect here.
const ECE_VERSION: u32 = 1 << 28;
const ECE_OPTIONS: u32 = ECE_VERSION | 3;
const CONTEXT: usize = 0x18;
/// Upper bits of the mask, after the context.
const OPT_PARAM_MASK_HIGH: usize = 0x108;
const OPTIONAL_STREAM: u64 = 1 << 0;
const OPTIONAL_QUEUE_GROUP: u64 = 1 << 1;
const OPTIONAL_UDP_SPORT: u64 = 1 << 2;
/// The context is followed by an extension.
const EXTENDED: Field = flag(0x8, 31);
const STREAM: Field = field(0x110, 15, 0);
const GROUP_REQUESTER: Field = field(0x114, 31, 0);
const GROUP_RESPONDER: Field = field(0x118, 31, 0);
const STATE: Field = field(0x0, 31, 28);
/// The port of a bond that packets leave through.
const LAG_PORT: Field = field(0x0, 27, 24);
const ST: Field = field(0x0, 23, 16);
const OFFLOAD: Field = field(0x0, 7, 4);
const DATA_IN_ORDER: Field = flag(0x8, 5);
const BLOCK_LB_MC: Field = flag(0x4, 30);
/// Ordering of data is selected by the second bit below, not by the port.
const DP_ORDERING_FORCE: Field = flag(0x4, 24);
const PD: Field = field(0x4, 23, 0);
const MTU: Field = field(0x8, 31, 29);
const LOG_RQ_SIZE: Field = field(0x8, 22, 19);
const LOG_RQ_STRIDE: Field = field(0x8, 18, 16);
const NO_SQ: Field = flag(0x8, 15);
const LOG_SQ_SIZE: Field = field(0x8, 14, 11);
const RLKY: Field = flag(0x8, 4);
const COUNTER_SET: Field = field(0xc, 31, 24);
const USER_INDEX: Field = field(0x10, 23, 0);
const LOG_PAGE_SIZE: Field = field(0x14, 28, 24);
const REMOTE_QPN: Field = field(0x14, 23, 0);
const PATH: usize = 0x18;
const LOG_SRA_MAX: Field = field(0x70, 23, 21);
const RETRY_COUNT: Field = field(0x70, 18, 16);
const RNR_RETRY: Field = field(0x70, 15, 13);
const NEXT_SEND_PSN: Field = field(0x78, 23, 0);
const CQN_SND: Field = field(0x7c, 23, 0);
const LOG_ERRORED_STREAMS: Field = field(0x80, 28, 24);
const LOG_RRA_MAX: Field = field(0x90, 23, 21);
const RRE: Field = flag(0x90, 15);
const RWE: Field = flag(0x90, 14);
const RAE: Field = flag(0x90, 13);
const PAGE_OFFSET: Field = field(0x90, 11, 6);
/// Receives are consumed in any order.
const DP_ORDERING_1: Field = flag(0x90, 3);
const MIN_RNR_NAK: Field = field(0x94, 28, 24);
const NEXT_RCV_PSN: Field = field(0x94, 23, 0);
const XRC_DOMAIN: Field = field(0x98, 23, 0);
const CQN_RCV: Field = field(0x9c, 23, 0);
const DOORBELL: usize = 0xa0;
const Q_KEY: Field = field(0xa8, 31, 0);
const RQ_TYPE: Field = field(0xac, 26, 24);
const SRQN: Field = field(0xac, 23, 0);
/// The block of the send queue at which the next work request begins.
const NEXT_SEND_BLOCK: Field = field(0xb4, 31, 16);
/// The queue pair stops (SQD) behind a wrong signature.
const DRAIN_SIGERR: Field = flag(0x4, 26);
const CS_REQ: Field = field(0xc4, 15, 8);
const CS_RES: Field = field(0xc4, 7, 0);
const RECORDS_IN_UMEM: Field = flag(0xd0, 28);
const RECORDS_UMEM: Field = field(0xe4, 31, 0);
/// The umem of the entries, after the context.
const UMEM_OFFSET: usize = 0x100;
const UMEM: Field = field(0x108, 31, 0);
const IN_UMEM: Field = flag(0x10c, 31);

// Fields of the address path.
const PKEY_INDEX: Field = field(0x0, 15, 0);
/// An empty entry of the table of partition keys, which matches no key.
const NO_PKEY: u16 = 0;
const GRH: Field = flag(0x4, 23);
const MLID: Field = field(0x4, 22, 16);
const RLID: Field = field(0x4, 15, 0);
const ACK_TIMEOUT: Field = field(0x8, 31, 27);
const SRC_ADDR_INDEX: Field = field(0x8, 23, 16);
const HOP_LIMIT: Field = field(0x8, 7, 0);
const TCLASS: Field = field(0xc, 27, 20);
const FLOW_LABEL: Field = field(0xc, 19, 0);
const RGID: usize = 0x10;
const UDP_SPORT: Field = field(0x20, 15, 0);
const SL: Field = field(0x24, 27, 24);
const PORT: Field = field(0x24, 23, 16);
const RMAC: usize = 0x26;

const ST_RC: u32 = 0;
const ST_UC: u32 = 1;
const ST_UD: u32 = 2;
const ST_XRC: u32 = 3;
const ST_QP0: u32 = 7;
const ST_GSI: u32 = 8;
/// For UMR work requests.
const ST_REG_UMR: u32 = 0xc;

/// The device transfers the data of rendezvous.
const OFFLOAD_RENDEZVOUS: u32 = 1;

const RQ_TYPE_REGULAR: u32 = 0;
const RQ_TYPE_SRQ: u32 = 1;

/// The initiator of dynamic connections.
pub(super) const ST_DCI: u32 = 5;

const SCATTER_32: u32 = 1;
const SCATTER_64: u32 = 2;

/// State codes in the context.
mod state {
    pub const RST: u32 = 0;
    pub const INIT: u32 = 1;
    pub const RTR: u32 = 2;
    pub const RTS: u32 = 3;
    pub const SQER: u32 = 4;
    pub const SQD: u32 = 5;
    pub const ERR: u32 = 6;
}

/// Bits of the mask of optional parameters.
mod optional {
    pub const RRE: u32 = 1 << 1;
    pub const RAE: u32 = 1 << 2;
    pub const RWE: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const Q_KEY: u32 = 1 << 5;
    pub const DRAIN_SIGERR: u32 = 1 << 11;
    pub const RNR_TIMEOUT: u32 = 1 << 6;
    pub const PRIMARY_PATH: u32 = 1 << 7;
    pub const SRA_MAX: u32 = 1 << 8;
    pub const RRA_MAX: u32 = 1 << 9;
    pub const RETRY_COUNT: u32 = 1 << 12;
    pub const RNR_RETRY: u32 = 1 << 13;
    pub const ACK_TIMEOUT: u32 = 1 << 14;
    pub const LAG_PORT: u32 = 1 << 15;
    pub const COUNTER_SET: u32 = 1 << 25;
}

/// Returns the code of a transport state.
fn state_code(state: QpState) -> u32 {
    match state {
        QpState::Reset => state::RST,
        QpState::Init => state::INIT,
        QpState::ReadyToReceive => state::RTR,
        QpState::ReadyToSend => state::RTS,
        QpState::SendQueueDrain => state::SQD,
        QpState::SendQueueError => state::SQER,
        QpState::Error => state::ERR,
    }
}

/// Context fields that a transition takes from its input: each field with the mask
/// bit that it requires, or `ALWAYS`.
type TransitionFields = &'static [(Field, u32)];

const ALWAYS: u32 = 0;

const ACCESS: [(Field, u32); 3] = [
    (RRE, optional::RRE),
    (RWE, optional::RWE),
    (RAE, optional::RAE),
];

const TO_INIT: TransitionFields = &[
    (RRE, ALWAYS),
    (RWE, ALWAYS),
    (RAE, ALWAYS),
    (PKEY_INDEX.at(PATH), ALWAYS),
    (PORT.at(PATH), ALWAYS),
    (Q_KEY, ALWAYS),
    (COUNTER_SET, ALWAYS),
    (LAG_PORT, ALWAYS),
];

const INIT_TO_INIT: TransitionFields = &[
    (DRAIN_SIGERR, optional::DRAIN_SIGERR),
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
    (PKEY_INDEX.at(PATH), optional::PKEY_INDEX),
    (Q_KEY, optional::Q_KEY),
    (COUNTER_SET, optional::COUNTER_SET),
];

const TO_RTR: TransitionFields = &[
    (MTU, ALWAYS),
    (REMOTE_QPN, ALWAYS),
    (NEXT_RCV_PSN, ALWAYS),
    (DP_ORDERING_FORCE, ALWAYS),
    (DP_ORDERING_1, ALWAYS),
    (LOG_RRA_MAX, ALWAYS),
    (MIN_RNR_NAK, ALWAYS),
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
    (PKEY_INDEX.at(PATH), optional::PKEY_INDEX),
    (Q_KEY, optional::Q_KEY),
];

const TO_RTS: TransitionFields = &[
    (NEXT_SEND_PSN, ALWAYS),
    (LOG_SRA_MAX, ALWAYS),
    (RETRY_COUNT, ALWAYS),
    (RNR_RETRY, ALWAYS),
    (ACK_TIMEOUT.at(PATH), ALWAYS),
    (MIN_RNR_NAK, optional::RNR_TIMEOUT),
    (Q_KEY, optional::Q_KEY),
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
];

const RTS_TO_RTS: TransitionFields = &[
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
    (PKEY_INDEX.at(PATH), optional::PKEY_INDEX),
    (Q_KEY, optional::Q_KEY),
    (MIN_RNR_NAK, optional::RNR_TIMEOUT),
    (LOG_SRA_MAX, optional::SRA_MAX),
    (LOG_RRA_MAX, optional::RRA_MAX),
    (RETRY_COUNT, optional::RETRY_COUNT),
    (RNR_RETRY, optional::RNR_RETRY),
    (ACK_TIMEOUT.at(PATH), optional::ACK_TIMEOUT),
    (LAG_PORT, optional::LAG_PORT),
    (COUNTER_SET, optional::COUNTER_SET),
];

/// Fields of the address path that the lists above do not have.
const PATH_FIELDS: &[Field] = &[
    GRH,
    MLID,
    RLID,
    SRC_ADDR_INDEX,
    HOP_LIMIT,
    TCLASS,
    FLOW_LABEL,
    UDP_SPORT,
    SL,
];

impl<P: Platform> Hca<P> {
    pub(crate) fn create_qp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context: [u8; CONTEXT_SIZE] = padded(input, CONTEXT);
        let context = &context[..];
        let core = &mut self.core;
        let st = ST.get(context);
        let no_sq = NO_SQ.is_set(context);
        let service = match st {
            ST_RC | ST_REG_UMR => Service::Rc,
            ST_UC => Service::Uc,
            ST_UD | ST_QP0 | ST_GSI => Service::Ud,
            ST_XRC if no_sq => Service::XrcTarget,
            ST_XRC => Service::XrcInitiator,
            ST_DCI => Service::DcInitiator,
            _ => {
                return Err(refuse(
                    Status::BadParameter,
                    "this service type is not modelled",
                ));
            }
        };
        let driver_only = matches!(st, ST_QP0 | ST_GSI | ST_REG_UMR) || RLKY.is_set(context);
        if driver_only && core.object_owners.is_program() {
            return Err(refuse(
                Status::BadParameter,
                "only the driver may create this queue pair",
            ));
        }
        let pd = PD.get(context);
        if !core.has_pd(pd) {
            return Err(refuse(
                Status::BadResource,
                "the queue pair's protection domain does not exist",
            ));
        }
        let (send_cq, recv_cq) = (CQN_SND.get(context), CQN_RCV.get(context));
        let rq_type = RQ_TYPE.get(context);
        let is_send_only = matches!(service, Service::XrcInitiator | Service::DcInitiator);
        let srqn = (rq_type == RQ_TYPE_SRQ && !is_send_only)
            .then(|| SRQN.get(context))
            .filter(|_| service != Service::XrcTarget);
        if let Some(srqn) = srqn {
            match core.srqs.get(srqn) {
                None => {
                    return Err(refuse(
                        Status::BadResource,
                        "the queue pair's SRQ does not exist",
                    ));
                }
                Some(srq) if srq.tags.is_some() && service != Service::Rc => {
                    return Err(refuse(
                        Status::BadParameter,
                        "only RC and DC targets can use an SRQ with tag matching",
                    ));
                }
                Some(_) => {}
            }
        }
        // The buffer of a DC initiator may contain a receive ring, which is unused.
        let has_ring = rq_type == RQ_TYPE_REGULAR
            && !matches!(service, Service::XrcInitiator | Service::XrcTarget);
        let has_recv = has_ring && !is_send_only;
        let recv_stride = LOG_RQ_STRIDE.get(context) + 4;
        let recv_bytes = if has_ring {
            1u64 << (LOG_RQ_SIZE.get(context) + recv_stride)
        } else {
            0
        };
        let send_bytes = if no_sq {
            0
        } else {
            64u64 << LOG_SQ_SIZE.get(context)
        };
        for (cqn, is_required) in [(send_cq, !no_sq), (recv_cq, has_recv || srqn.is_some())] {
            if is_required && core.cqs.get(cqn).is_none() {
                return Err(refuse(
                    Status::BadResource,
                    "the queue pair's completion queue does not exist",
                ));
            }
        }
        let umem = (IN_UMEM.is_set(input)).then(|| (UMEM.get(input), get64(input, UMEM_OFFSET)));
        let pages = (LOG_PAGE_SIZE.get(context), PAGE_OFFSET.get(context));
        let buffer = core.queue_buffer(input, recv_bytes + send_bytes, umem, pages, false)?;
        // Targets of XRC have no records.
        let umem = (RECORDS_IN_UMEM.is_set(context) && (has_recv || !no_sq))
            .then(|| RECORDS_UMEM.get(context));
        let doorbell = core.doorbell_address(get64(context, DOORBELL), umem)?;
        let recv = has_recv.then(|| Ring {
            buffer: buffer.clone(),
            offset: 0,
            log_size: LOG_RQ_SIZE.get(context),
            log_stride: recv_stride,
            doorbell,
            ..Ring::default()
        });
        let send = (!no_sq).then(|| Ring {
            buffer,
            offset: recv_bytes,
            log_size: LOG_SQ_SIZE.get(context),
            log_stride: 6,
            doorbell: doorbell.wrapping_add(4),
            ..Ring::default()
        });
        let wide = |cqn| core.cqs.get(cqn).is_some_and(|cq| cq.wide);
        let is_special = matches!(st, ST_QP0 | ST_GSI);
        let config = QpConfig {
            service,
            any_pkey: is_special,
            srq: srqn.is_some() || service == Service::XrcTarget,
            wire_qpn: is_special.then_some(u32::from(st == ST_GSI)),
            block_multicast_loopback: BLOCK_LB_MC.is_set(context),
            log_errored_streams: LOG_ERRORED_STREAMS.get(context) as u8,
            ..QpConfig::default()
        };
        let qp = Qp {
            service,
            pd,
            privileged: RLKY.is_set(context),
            uidx: USER_INDEX.get(context),
            send_cq,
            recv_cq,
            srqn,
            xrcd: (service == Service::XrcTarget).then(|| XRC_DOMAIN.get(context)),
            counter_set: COUNTER_SET.get(context),
            send,
            recv,
            out_of_order: false,
            skipped_receive: None,
            blue_flame: None,
            recv_scatter_limit: scatter_limit(CS_RES.get(context), wide(recv_cq)),
            read_scatter_limit: scatter_limit(CS_REQ.get(context), wide(send_cq)),
            context: Box::new(padded(input, CONTEXT)),
            config: config.clone(),
            in_error: false,
            offloads_rendezvous: OFFLOAD.get(context) == OFFLOAD_RENDEZVOUS,
            transfers: 0,
            device_requests: VecDeque::new(),
            drains_on_signature_error: false,
            drain_pending: false,
        };
        let Ok(qpn) = core.queues.insert(Queue::Qp(Box::new(qp))) else {
            return Err(refuse(
                Status::ExceedsLimit,
                "there are too many queue pairs",
            ));
        };
        if self.transport.create(qpn, config).is_err() {
            core.queues.remove(qpn);
            return Err(refuse(
                Status::Internal,
                "the transport has this queue pair already",
            ));
        }
        match st {
            ST_QP0 => self.transport.alias(0, Some(qpn)),
            ST_GSI => self.transport.alias(1, Some(qpn)),
            _ => {}
        }
        NUMBER.put(output, qpn);
        // All supported options, if the driver knows the version.
        if ECE.get(input) & ECE_VERSION != 0 {
            SUPPORTED_ECE.put(output, ECE_OPTIONS);
        }
        Ok(())
    }

    pub(crate) fn destroy_qp(&mut self, input: &[u8]) -> Outcome {
        let qpn = object_number(input);
        if self.core.queue_pair(qpn).is_none() {
            return Err(refuse(Status::BadResource, "no such queue pair"));
        }
        self.core.queues.remove(qpn);
        self.transport.destroy(qpn);
        Ok(())
    }

    pub(crate) fn query_qp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let qpn = object_number(input);
        let Some(qp) = self.core.queue_pair(qpn) else {
            return Err(refuse(Status::BadResource, "no such queue pair"));
        };
        let mut context = qp.context.clone();
        if let Some(view) = self.transport.query(qpn) {
            STATE.put(&mut *context, state_code(view.state));
            NEXT_SEND_PSN.put(&mut *context, view.send_psn);
            NEXT_RCV_PSN.put(&mut *context, view.recv_psn);
            DATA_IN_ORDER.put(&mut *context, u32::from(!qp.out_of_order));
        }
        if let Some(ring) = &qp.send {
            NEXT_SEND_BLOCK.put(&mut *context, ring.head.into());
        }
        put_bytes(output, CONTEXT, &*context);
        Ok(())
    }

    pub(crate) fn modify_qp(&mut self, opcode: u16, input: &[u8], output: &mut [u8]) -> Outcome {
        if matches!(opcode, op::RST2INIT_QP | op::INIT2RTR_QP | op::RTR2RTS_QP) {
            SUPPORTED_ECE.put(output, ECE.get(input) & ECE_OPTIONS);
        }
        let qpn = object_number(input);
        let view = self.core.queue_pair(qpn).and(self.transport.query(qpn));
        let Some(view) = view else {
            return Err(refuse(Status::BadResource, "no such queue pair"));
        };
        let (from, to, fields): (&[QpState], QpState, TransitionFields) = match opcode {
            op::RST2INIT_QP => (&[QpState::Reset], QpState::Init, TO_INIT),
            op::INIT2INIT_QP => (&[QpState::Init], QpState::Init, INIT_TO_INIT),
            op::INIT2RTR_QP => (&[QpState::Init], QpState::ReadyToReceive, TO_RTR),
            op::RTR2RTS_QP => (&[QpState::ReadyToReceive], QpState::ReadyToSend, TO_RTS),
            op::RTS2RTS_QP => (&[QpState::ReadyToSend], QpState::ReadyToSend, RTS_TO_RTS),
            op::SQERR2RTS_QP => (&[QpState::SendQueueError], QpState::ReadyToSend, RTS_TO_RTS),
            op::SQD_RTS_QP => (&[QpState::SendQueueDrain], QpState::ReadyToSend, RTS_TO_RTS),
            op::TO_ERR_QP => (&[], QpState::Error, &[]),
            _ => (&[], QpState::Reset, &[]),
        };
        if !from.is_empty() && !from.contains(&view.state) {
            return Err(refuse(
                Status::BadQpState,
                "invalid state transition of the queue pair",
            ));
        }
        let mask = get32(input, OPT_PARAM_MASK);
        self.modify_extension(opcode, qpn, input)?;
        let input_context: [u8; CONTEXT_SIZE] = padded(input, CONTEXT);
        let Some(qp) = self.core.qp_mut(qpn) else {
            return Err(refuse(Status::BadResource, "no such queue pair"));
        };
        let context = &mut qp.context[..];
        for (field, required_bit) in fields {
            if *required_bit == ALWAYS || mask & required_bit != 0 {
                field.put(context, field.get(&input_context));
            }
        }
        let path = opcode == op::INIT2RTR_QP || mask & optional::PRIMARY_PATH != 0;
        if path && to != QpState::Error && to != QpState::Reset {
            for field in PATH_FIELDS {
                field
                    .at(PATH)
                    .put(context, field.at(PATH).get(&input_context));
            }
            put_bytes(
                context,
                PATH + RGID,
                &input_context[PATH + RGID..PATH + RGID + 16],
            );
            put_bytes(
                context,
                PATH + RMAC,
                &input_context[PATH + RMAC..PATH + RMAC + 6],
            );
        }
        if opcode == op::RTS2RTS_QP && get64(input, OPT_PARAM_MASK_HIGH) & OPTIONAL_UDP_SPORT != 0 {
            let port = UDP_SPORT.at(PATH);
            port.put(context, port.get(&input_context));
        }
        if opcode == op::INIT2RTR_QP
            && qp.service != Service::Ud
            && Mtu::from_code(MTU.get(context) as u8).is_none()
        {
            return Err(refuse(Status::BadParameter, "invalid path MTU"));
        }
        qp.counter_set = COUNTER_SET.get(context);
        qp.drains_on_signature_error = DRAIN_SIGERR.is_set(context);
        qp.drain_pending = false;
        qp.out_of_order = DP_ORDERING_FORCE.is_set(context) && DP_ORDERING_1.is_set(context);
        if to == QpState::Reset {
            qp.skipped_receive = None;
            for ring in [&mut qp.send, &mut qp.recv].into_iter().flatten() {
                ring.reset();
            }
            qp.blue_flame = None;
            qp.discard_transfers();
        }
        qp.in_error = to == QpState::Error;
        let context = qp.context.clone();
        let config = self.config(qpn, &context[..]);
        if let Some(qp) = self.core.qp_mut(qpn) {
            qp.config = config.clone();
        }
        let now = self.core.platform.now();
        self.transport
            .modify(&mut self.core, now, qpn, to, config)
            .map_err(|_| refuse(Status::BadResource, "the transport has no such queue pair"))
    }

    /// Applies the extension of the context.
    fn modify_extension(&mut self, opcode: u16, qpn: u32, input: &[u8]) -> Outcome {
        if !EXTENDED.is_set(input) || !matches!(opcode, op::INIT2INIT_QP | op::RTS2RTS_QP) {
            return Ok(());
        }
        let mask = get64(input, OPT_PARAM_MASK_HIGH);
        // Rates are not enforced; only the existence of the groups is checked.
        let groups = [GROUP_REQUESTER, GROUP_RESPONDER].map(|group| group.get(input));
        if mask & OPTIONAL_QUEUE_GROUP != 0 && !groups.iter().all(|g| self.core.is_queue_group(*g))
        {
            return Err(refuse(
                Status::BadResource,
                "the queue pair's scheduling element is not a queue group",
            ));
        }
        let stream = STREAM.get(input) as u16;
        if mask & OPTIONAL_STREAM != 0 && !self.transport.restore_stream(qpn, stream) {
            return Err(refuse(Status::BadParameter, "the stream is not in error"));
        }
        Ok(())
    }

    /// Builds the transport configuration of a queue pair from its context.
    fn config(&self, qpn: u32, context: &[u8]) -> QpConfig {
        let Some(qp) = self.core.qp(qpn) else {
            return QpConfig::default();
        };
        let path = &context[PATH..];
        let address = Address {
            grh: GRH.is_set(path),
            rlid: RLID.get(path) as u16,
            path_bits: MLID.get(path) as u8,
            sl: SL.get(path) as u8,
            sgid_index: SRC_ADDR_INDEX.get(path) as usize,
            flow_label: FLOW_LABEL.get(path),
            traffic_class: TCLASS.get(path) as u8,
            hop_limit: HOP_LIMIT.get(path) as u8,
            dgid: get_array(path, RGID),
            dmac: get_array(path, RMAC),
            udp_source: UDP_SPORT.get(path) as u16,
        };
        let connected = qp.service != Service::Ud && REMOTE_QPN.get(context) != 0;
        // All entries of the table but the first are empty; RoCE has the default partition alone.
        let ethernet = self.core.settings.profile.port == PortKind::Ethernet;
        let is_default = ethernet || qp.config.any_pkey || PKEY_INDEX.get(path) == 0;
        QpConfig {
            pkey: if is_default { DEFAULT_PKEY } else { NO_PKEY },
            qkey: Q_KEY.get(context),
            mtu: match qp.service {
                Service::Ud => self.core.settings.mtu,
                _ => Mtu::from_code(MTU.get(context) as u8).unwrap_or_default(),
            },
            path: connected.then(|| self.core.path(&address)),
            remote_qpn: REMOTE_QPN.get(context),
            send_psn: NEXT_SEND_PSN.get(context),
            recv_psn: NEXT_RCV_PSN.get(context),
            ack_timeout: ACK_TIMEOUT.get(path) as u8,
            retry_count: RETRY_COUNT.get(context) as u8,
            rnr_retry: RNR_RETRY.get(context) as u8,
            min_rnr_timer: MIN_RNR_NAK.get(context) as u8,
            max_rd_atomic: 1 << LOG_SRA_MAX.get(context),
            max_dest_rd_atomic: 1 << LOG_RRA_MAX.get(context),
            allow_read: RRE.is_set(context),
            allow_write: RWE.is_set(context),
            allow_atomic: RAE.is_set(context),
            ..qp.config.clone()
        }
    }
}

impl<P: Platform> Core<P> {
    /// Returns a queue pair by number, unless it is a DC target, which has commands
    /// of its own.
    fn queue_pair(&self, qpn: u32) -> Option<&Qp> {
        self.qp(qpn).filter(|qp| qp.service != Service::DcTarget)
    }
}

/// The most payload bytes that a CQE may hold, from the requested code.
pub(crate) fn scatter_limit(code: u32, wide: bool) -> u8 {
    match code & 0xf {
        SCATTER_32 => 32,
        SCATTER_64 if wide => 64,
        SCATTER_64 => 32,
        _ => 0,
    }
}

/// Copies a structure out of an input, padded with zeros where the input is too
/// short.
fn padded<const N: usize>(input: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    put_bytes(&mut out, 0, input.get(at..).unwrap_or(&[]));
    out
}
