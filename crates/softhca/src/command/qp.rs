//! Queue pair commands.

use std::collections::VecDeque;

use roce::bits::{Field, field, flag, get_array, get64, put_bytes};
use roce::packet::{DEFAULT_PKEY, Mtu};
use roce::transport::{QpConfig, QpState, Service};

use super::load::object_number;
use super::opcode as op;
use super::resource::full;
use crate::engine::core::Core;
use crate::engine::qp::{Address, CONTEXT_SIZE, Qp, Queue, Ring};
use crate::hca::Hca;
use crate::layout::qpc::{optional, rq_type, scatter, st, state};
use crate::layout::{ads, header, qpc};
use crate::platform::Platform;
use crate::profile::PortKind;
use crate::status::{CommandError, Outcome, Rule, Status, invalid, no_object, refuse};

const SUPPORTED_ECE: Field = field(0xc, 31, 0);
/// The version of the options, and the supported ones, which have no effect here.
const ECE_VERSION: u32 = 1 << 28;
const ECE_OPTIONS: u32 = ECE_VERSION | 3;
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

/// An empty entry of the table of partition keys, which matches no key.
const NO_PKEY: u16 = 0;

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
    (qpc::RRE, optional::RRE),
    (qpc::RWE, optional::RWE),
    (qpc::RAE, optional::RAE),
];

const TO_INIT: TransitionFields = &[
    (qpc::RRE, ALWAYS),
    (qpc::RWE, ALWAYS),
    (qpc::RAE, ALWAYS),
    (ads::PKEY_INDEX.at(qpc::PRIMARY_ADDRESS_PATH), ALWAYS),
    (ads::VHCA_PORT_NUM.at(qpc::PRIMARY_ADDRESS_PATH), ALWAYS),
    (qpc::Q_KEY, ALWAYS),
    (qpc::COUNTER_SET_ID, ALWAYS),
    (qpc::LAG_TX_PORT_AFFINITY, ALWAYS),
];

const INIT_TO_INIT: TransitionFields = &[
    (qpc::DRAIN_SIGERR, optional::DRAIN_SIGERR),
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
    (
        ads::PKEY_INDEX.at(qpc::PRIMARY_ADDRESS_PATH),
        optional::PKEY_INDEX,
    ),
    (qpc::Q_KEY, optional::Q_KEY),
    (qpc::COUNTER_SET_ID, optional::COUNTER_SET),
];

const TO_RTR: TransitionFields = &[
    (qpc::MTU, ALWAYS),
    (qpc::REMOTE_QPN, ALWAYS),
    (qpc::NEXT_RCV_PSN, ALWAYS),
    (qpc::DP_ORDERING_FORCE, ALWAYS),
    (qpc::DP_ORDERING_1, ALWAYS),
    (qpc::LOG_RRA_MAX, ALWAYS),
    (qpc::MIN_RNR_NAK, ALWAYS),
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
    (
        ads::PKEY_INDEX.at(qpc::PRIMARY_ADDRESS_PATH),
        optional::PKEY_INDEX,
    ),
    (qpc::Q_KEY, optional::Q_KEY),
];

const TO_RTS: TransitionFields = &[
    (qpc::NEXT_SEND_PSN, ALWAYS),
    (qpc::LOG_SRA_MAX, ALWAYS),
    (qpc::RETRY_COUNT, ALWAYS),
    (qpc::RNR_RETRY, ALWAYS),
    (ads::ACK_TIMEOUT.at(qpc::PRIMARY_ADDRESS_PATH), ALWAYS),
    (qpc::MIN_RNR_NAK, optional::RNR_TIMEOUT),
    (qpc::Q_KEY, optional::Q_KEY),
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
];

const RTS_TO_RTS: TransitionFields = &[
    ACCESS[0],
    ACCESS[1],
    ACCESS[2],
    (
        ads::PKEY_INDEX.at(qpc::PRIMARY_ADDRESS_PATH),
        optional::PKEY_INDEX,
    ),
    (qpc::Q_KEY, optional::Q_KEY),
    (qpc::MIN_RNR_NAK, optional::RNR_TIMEOUT),
    (qpc::LOG_SRA_MAX, optional::SRA_MAX),
    (qpc::LOG_RRA_MAX, optional::RRA_MAX),
    (qpc::RETRY_COUNT, optional::RETRY_COUNT),
    (qpc::RNR_RETRY, optional::RNR_RETRY),
    (
        ads::ACK_TIMEOUT.at(qpc::PRIMARY_ADDRESS_PATH),
        optional::ACK_TIMEOUT,
    ),
    (qpc::LAG_TX_PORT_AFFINITY, optional::LAG_PORT),
    (qpc::COUNTER_SET_ID, optional::COUNTER_SET),
];

/// Fields of the address path that the lists above do not have.
const PATH_FIELDS: &[Field] = &[
    ads::GRH,
    ads::MLID,
    ads::RLID,
    ads::SRC_ADDR_INDEX,
    ads::HOP_LIMIT,
    ads::TCLASS,
    ads::FLOW_LABEL,
    ads::UDP_SPORT,
    ads::SL,
];

/// A command that creates a queue pair.
struct QpRequest<'i> {
    input: &'i [u8],
    context: [u8; CONTEXT_SIZE],
    st: u32,
    service: Service,
    send_cq: u32,
    recv_cq: u32,
    srqn: Option<u32>,
    has_send: bool,
    /// Whether its buffer contains a receive ring. That of a DC initiator is unused.
    has_recv_ring: bool,
}

impl<'i> QpRequest<'i> {
    fn parse(input: &'i [u8]) -> Result<Self, CommandError> {
        let context: [u8; CONTEXT_SIZE] = padded(input, qpc::AT);
        let st = qpc::ST.get(&context);
        let has_send = !qpc::NO_SQ.is_set(&context);
        let service = match st {
            st::RC | st::REG_UMR => Service::Rc,
            st::UC => Service::Uc,
            st::UD | st::QP0 | st::QP1 => Service::Ud,
            st::XRC if !has_send => Service::XrcTarget,
            st::XRC => Service::XrcInitiator,
            st::DCI => Service::DcInitiator,
            _ => {
                return Err(invalid("st", st, Rule::Supported));
            }
        };
        let rq_type = qpc::RQ_TYPE.get(&context);
        let is_of_xrc = matches!(service, Service::XrcInitiator | Service::XrcTarget);
        let takes_from_srq =
            rq_type == rq_type::SRQ && !is_of_xrc && service != Service::DcInitiator;
        Ok(Self {
            input,
            st,
            service,
            send_cq: qpc::CQN_SND.get(&context),
            recv_cq: qpc::CQN_RCV.get(&context),
            srqn: takes_from_srq.then(|| qpc::SRQN.get(&context)),
            has_send,
            has_recv_ring: rq_type == rq_type::REGULAR && !is_of_xrc,
            context,
        })
    }

    fn has_recv(&self) -> bool {
        self.has_recv_ring && self.service != Service::DcInitiator
    }

    fn log_recv_stride(&self) -> u32 {
        qpc::LOG_RQ_STRIDE.get(&self.context) + 4
    }

    fn recv_bytes(&self) -> u64 {
        match self.has_recv_ring {
            true => 1 << (qpc::LOG_RQ_SIZE.get(&self.context) + self.log_recv_stride()),
            false => 0,
        }
    }

    fn send_bytes(&self) -> u64 {
        match self.has_send {
            true => 64 << qpc::LOG_SQ_SIZE.get(&self.context),
            false => 0,
        }
    }

    fn is_special(&self) -> bool {
        matches!(self.st, st::QP0 | st::QP1)
    }

    /// Checks that the program may create the queue pair, and that what it uses exists.
    fn check<P: Platform>(&self, core: &Core<P>) -> Outcome {
        let is_for_driver =
            self.is_special() || self.st == st::REG_UMR || qpc::RLKY.is_set(&self.context);
        if is_for_driver && core.object_owners.is_program() {
            return Err(invalid("st", self.st, Rule::Permitted));
        }
        let pd = qpc::PD.get(&self.context);
        if !core.has_pd(pd) {
            return Err(no_object("protection domain", pd));
        }
        if let Some(srqn) = self.srqn {
            let srq = core.srqs.get(srqn).ok_or_else(|| no_object("SRQ", srqn))?;
            if srq.tags.is_some() && self.service != Service::Rc {
                let rule = Rule::With("an RC queue pair");
                return Err(invalid("SRQ with tag matching", srqn, rule));
            }
        }
        let receives = self.has_recv() || self.srqn.is_some();
        for (cqn, is_required) in [(self.send_cq, self.has_send), (self.recv_cq, receives)] {
            if is_required && core.cqs.get(cqn).is_none() {
                return Err(no_object("completion queue", cqn));
            }
        }
        Ok(())
    }

    /// Returns the rings of the send queue and the receive queue, which share a buffer.
    fn rings<P: Platform>(
        &self,
        core: &mut Core<P>,
    ) -> Result<(Option<Ring>, Option<Ring>), CommandError> {
        let (input, context) = (self.input, &self.context);
        let (has_send, has_recv) = (self.has_send, self.has_recv());
        let umem = (qpc::WQ_UMEM_VALID.is_set(input)).then(|| {
            (
                qpc::WQ_UMEM_ID.get(input),
                get64(input, qpc::WQ_UMEM_OFFSET),
            )
        });
        let pages = (
            qpc::LOG_PAGE_SIZE.get(context),
            qpc::PAGE_OFFSET.get(context),
        );
        let bytes = self.recv_bytes() + self.send_bytes();
        let buffer = core.queue_buffer(input, bytes, umem, pages, false)?;
        // Targets of XRC have no records.
        let umem = (qpc::DBR_UMEM_VALID.is_set(context) && (has_recv || has_send))
            .then(|| qpc::DBR_UMEM_ID.get(context));
        let doorbell = core.doorbell_address(get64(context, qpc::DBR_ADDR), umem)?;
        let recv = has_recv.then(|| Ring {
            buffer: buffer.clone(),
            offset: 0,
            log_size: qpc::LOG_RQ_SIZE.get(context),
            log_stride: self.log_recv_stride(),
            doorbell,
            ..Ring::default()
        });
        let send = has_send.then(|| Ring {
            buffer,
            offset: self.recv_bytes(),
            log_size: qpc::LOG_SQ_SIZE.get(context),
            log_stride: 6,
            doorbell: doorbell.wrapping_add(4),
            ..Ring::default()
        });
        Ok((send, recv))
    }

    /// Returns the transport's configuration.
    fn config(&self) -> QpConfig {
        let is_special = self.is_special();
        QpConfig {
            service: self.service,
            any_pkey: is_special,
            srq: self.srqn.is_some() || self.service == Service::XrcTarget,
            wire_qpn: is_special.then_some(u32::from(self.st == st::QP1)),
            block_multicast_loopback: qpc::BLOCK_LB_MC.is_set(&self.context),
            log_errored_streams: qpc::LOG_NUM_DCI_ERRORED_STREAMS.get(&self.context) as u8,
            ..QpConfig::default()
        }
    }

    /// Returns the queue pair.
    fn qp<P: Platform>(&self, core: &mut Core<P>) -> Result<Qp, CommandError> {
        let (send, recv) = self.rings(core)?;
        let context = &self.context;
        let wide = |cqn| core.cqs.get(cqn).is_some_and(|cq| cq.wide);
        let is_target = self.service == Service::XrcTarget;
        Ok(Qp {
            service: self.service,
            pd: qpc::PD.get(context),
            privileged: qpc::RLKY.is_set(context),
            uidx: qpc::USER_INDEX.get(context),
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            srqn: self.srqn,
            xrcd: is_target.then(|| qpc::XRCD.get(context)),
            counter_set: qpc::COUNTER_SET_ID.get(context),
            send,
            recv,
            out_of_order: false,
            skipped_receive: None,
            blue_flame: None,
            recv_scatter_limit: scatter_limit(qpc::CS_RES.get(context), wide(self.recv_cq)),
            read_scatter_limit: scatter_limit(qpc::CS_REQ.get(context), wide(self.send_cq)),
            context: Box::new(padded(self.input, qpc::AT)),
            config: self.config(),
            in_error: false,
            offloads_rendezvous: qpc::OFFLOAD_TYPE.get(context) == qpc::OFFLOAD_TYPE_RNDV,
            transfers: 0,
            device_requests: VecDeque::new(),
            drains_on_signature_error: false,
            drain_pending: false,
        })
    }
}

impl<P: Platform> Hca<P> {
    pub(crate) fn create_qp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let core = &mut self.core;
        let request = QpRequest::parse(input)?;
        request.check(core)?;
        let qp = request.qp(core)?;
        let config = qp.config.clone();
        let Ok(qpn) = core.queues.insert(Queue::Qp(Box::new(qp))) else {
            return Err(full(&core.queues, "queue"));
        };
        if self.transport.create(qpn, config).is_err() {
            core.queues.remove(qpn);
            return Err(refuse(Status::Internal, "queue pair", qpn, Rule::Free));
        }
        match request.st {
            st::QP0 => self.transport.alias(0, Some(qpn)),
            st::QP1 => self.transport.alias(1, Some(qpn)),
            _ => {}
        }
        if let Some(chaos) = &mut core.chaos {
            chaos.created(qpn);
        }
        header::NUMBER.put(output, qpn);
        // All supported options, if the driver knows the version.
        if qpc::ECE.get(input) & ECE_VERSION != 0 {
            SUPPORTED_ECE.put(output, ECE_OPTIONS);
        }
        Ok(())
    }

    pub(crate) fn destroy_qp(&mut self, input: &[u8]) -> Outcome {
        let qpn = object_number(input);
        if self.core.queue_pair(qpn).is_none() {
            return Err(no_object("queue pair", qpn));
        }
        self.core.queues.remove(qpn);
        self.transport.destroy(qpn);
        if let Some(follower) = &mut self.core.follower {
            follower.empty(qpn);
        }
        if let Some(chaos) = &mut self.core.chaos {
            chaos.destroyed(qpn);
        }
        Ok(())
    }

    pub(crate) fn query_qp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let qpn = object_number(input);
        let Some(qp) = self.core.queue_pair(qpn) else {
            return Err(no_object("queue pair", qpn));
        };
        let mut context = qp.context.clone();
        if let Some(view) = self.transport.query(qpn) {
            qpc::STATE.put(&mut *context, state_code(view.state));
            qpc::NEXT_SEND_PSN.put(&mut *context, view.send_psn);
            qpc::NEXT_RCV_PSN.put(&mut *context, view.recv_psn);
            qpc::DATA_IN_ORDER.put(&mut *context, u32::from(!qp.out_of_order));
        }
        if let Some(ring) = &qp.send {
            qpc::HW_SQ_WQEBB_COUNTER.put(&mut *context, ring.head.into());
        }
        put_bytes(output, qpc::AT, &*context);
        Ok(())
    }

    pub(crate) fn modify_qp(&mut self, opcode: u16, input: &[u8], output: &mut [u8]) -> Outcome {
        if matches!(opcode, op::RST2INIT_QP | op::INIT2RTR_QP | op::RTR2RTS_QP) {
            SUPPORTED_ECE.put(output, qpc::ECE.get(input) & ECE_OPTIONS);
        }
        let qpn = object_number(input);
        let view = self.core.queue_pair(qpn).and(self.transport.query(qpn));
        let Some(view) = view else {
            return Err(no_object("queue pair", qpn));
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
                "queue pair",
                qpn,
                Rule::Transition {
                    from: view.state as u8,
                    to: to as u8,
                },
            ));
        }
        let mask = qpc::OPT_PARAM_MASK.get(input);
        self.modify_extension(opcode, qpn, input)?;
        let input_context: [u8; CONTEXT_SIZE] = padded(input, qpc::AT);
        let Some(qp) = self.core.qp_mut(qpn) else {
            return Err(no_object("queue pair", qpn));
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
                field.at(qpc::PRIMARY_ADDRESS_PATH).put(
                    context,
                    field.at(qpc::PRIMARY_ADDRESS_PATH).get(&input_context),
                );
            }
            put_bytes(
                context,
                qpc::PRIMARY_ADDRESS_PATH + ads::RGID_RIP,
                &input_context[qpc::PRIMARY_ADDRESS_PATH + ads::RGID_RIP
                    ..qpc::PRIMARY_ADDRESS_PATH + ads::RGID_RIP + 16],
            );
            put_bytes(
                context,
                qpc::PRIMARY_ADDRESS_PATH + ads::RMAC,
                &input_context[qpc::PRIMARY_ADDRESS_PATH + ads::RMAC
                    ..qpc::PRIMARY_ADDRESS_PATH + ads::RMAC + 6],
            );
        }
        if opcode == op::RTS2RTS_QP && get64(input, OPT_PARAM_MASK_HIGH) & OPTIONAL_UDP_SPORT != 0 {
            let port = ads::UDP_SPORT.at(qpc::PRIMARY_ADDRESS_PATH);
            port.put(context, port.get(&input_context));
        }
        if opcode == op::INIT2RTR_QP
            && qp.service != Service::Ud
            && Mtu::from_code(qpc::MTU.get(context) as u8).is_none()
        {
            return Err(invalid("mtu", qpc::MTU.get(context), Rule::Between(1, 5)));
        }
        qp.counter_set = qpc::COUNTER_SET_ID.get(context);
        qp.drains_on_signature_error = qpc::DRAIN_SIGERR.is_set(context);
        qp.drain_pending = false;
        qp.out_of_order =
            qpc::DP_ORDERING_FORCE.is_set(context) && qpc::DP_ORDERING_1.is_set(context);
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
        if let (Some(chaos), QpState::Reset) = (&mut self.core.chaos, to) {
            chaos.reset(qpn);
        }
        if let (Some(follower), QpState::Reset) = (&mut self.core.follower, to) {
            follower.empty(qpn);
        }
        let config = self.config(qpn, &context[..]);
        if let Some(qp) = self.core.qp_mut(qpn) {
            qp.config = config.clone();
        }
        let now = self.core.platform.now();
        self.transport
            .modify(&mut self.core, now, qpn, to, config)
            .map_err(|_| no_object("queue pair", qpn))
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
                "scheduling element",
                groups[0].max(groups[1]),
                Rule::OfType("queue group"),
            ));
        }
        let stream = STREAM.get(input) as u16;
        if mask & OPTIONAL_STREAM != 0 && !self.transport.restore_stream(qpn, stream) {
            return Err(invalid("stream", stream, Rule::InState("in error")));
        }
        Ok(())
    }

    /// Builds the transport configuration of a queue pair from its context.
    fn config(&self, qpn: u32, context: &[u8]) -> QpConfig {
        let Some(qp) = self.core.qp(qpn) else {
            return QpConfig::default();
        };
        let path = &context[qpc::PRIMARY_ADDRESS_PATH..];
        let address = Address {
            grh: ads::GRH.is_set(path),
            rlid: ads::RLID.get(path) as u16,
            path_bits: ads::MLID.get(path) as u8,
            sl: ads::SL.get(path) as u8,
            sgid_index: ads::SRC_ADDR_INDEX.get(path) as usize,
            flow_label: ads::FLOW_LABEL.get(path),
            traffic_class: ads::TCLASS.get(path) as u8,
            hop_limit: ads::HOP_LIMIT.get(path) as u8,
            dgid: get_array(path, ads::RGID_RIP),
            dmac: get_array(path, ads::RMAC),
            udp_source: ads::UDP_SPORT.get(path) as u16,
        };
        let connected = qp.service != Service::Ud && qpc::REMOTE_QPN.get(context) != 0;
        // All entries of the table but the first are empty; RoCE has the default partition alone.
        let ethernet = self.core.settings.profile.port == PortKind::Ethernet;
        let is_default = ethernet || qp.config.any_pkey || ads::PKEY_INDEX.get(path) == 0;
        QpConfig {
            pkey: if is_default { DEFAULT_PKEY } else { NO_PKEY },
            qkey: qpc::Q_KEY.get(context),
            mtu: match qp.service {
                Service::Ud => self.core.settings.mtu,
                _ => Mtu::from_code(qpc::MTU.get(context) as u8).unwrap_or_default(),
            },
            path: connected.then(|| self.core.path(&address)),
            remote_qpn: qpc::REMOTE_QPN.get(context),
            send_psn: qpc::NEXT_SEND_PSN.get(context),
            recv_psn: qpc::NEXT_RCV_PSN.get(context),
            ack_timeout: ads::ACK_TIMEOUT.get(path) as u8,
            retry_count: qpc::RETRY_COUNT.get(context) as u8,
            rnr_retry: qpc::RNR_RETRY.get(context) as u8,
            min_rnr_timer: qpc::MIN_RNR_NAK.get(context) as u8,
            max_rd_atomic: 1 << qpc::LOG_SRA_MAX.get(context),
            max_dest_rd_atomic: 1 << qpc::LOG_RRA_MAX.get(context),
            allow_read: qpc::RRE.is_set(context),
            allow_write: qpc::RWE.is_set(context),
            allow_atomic: qpc::RAE.is_set(context),
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
        scatter::RES_32 => 32,
        scatter::RES_64 if wide => 64,
        scatter::RES_64 => 32,
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
