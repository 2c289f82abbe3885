//! Modification and queries of queue pairs.

use std::os::fd::RawFd;

use mlx5_abi::MODIFY_QP_OUT_OF_ORDER;
use roce::bits::{get64, put_bytes};
use softhca::command::opcode as op;
use softhca::layout::qpc::{optional, state};
use softhca::layout::{ads, qpc};
use softhca::rule::Rule;
use uverbs::abi::ids::{ATTR_DESTROY_QP_RESP, OBJECT_QP};
use uverbs::abi::write::{AttachMcast, ModifyQp, QpDest, QueryQp, QueryQpResp};
use uverbs::{AccessFlags, QpAttrMask as Mask, QpState, QpType};

use crate::driver::cause::{
    Result, at_most, between, invalid, is, known_bits, require, require_support, reserved,
    supported_bits, system,
};
use crate::driver::command::{Input, NUMBER, run};
use crate::driver::data::Packet;
use crate::driver::descriptors::{ObjectChange, QueuePairAttributes};
use crate::driver::dynamic;
use crate::driver::gids::multicast_mac;
use crate::driver::object::{Created, Events, ObjectData, Qp, Summary};
use crate::driver::query::PKEYS;
use crate::driver::request::Request;
use crate::driver::state::State;

const PATH: usize = qpc::AT + qpc::PRIMARY_ADDRESS_PATH;

/// Bits of the mask of optional parameters for [`qpc::ACCESS`].
const RIGHTS: u32 = optional::RRE | optional::RAE | optional::RWE;

const MAX_READS: u8 = 16;

/// A state transition: the command, and the required and optional attributes.
pub(crate) struct Transition {
    pub(crate) opcode: u16,
    pub(crate) must: Mask,
    pub(crate) may: Mask,
}

/// Returns the transition between two states; `None` if it is not allowed.
fn transition(kind: QpType, from: QpState, to: QpState) -> Option<Transition> {
    let connected = kind != QpType::UD;
    // XRC splits the two halves of a reliable connection into two queue pairs.
    let requests = matches!(kind, QpType::RC | QpType::XRC_INI);
    let responds = matches!(kind, QpType::RC | QpType::XRC_TGT);
    let reliable = requests || responds;
    let when = |condition: bool, mask: Mask| if condition { mask } else { Mask::empty() };
    let rights = if connected {
        Mask::ACCESS_FLAGS
    } else {
        Mask::QKEY
    };
    let alternate = when(connected, Mask::ALT_PATH);
    let migration = when(connected, Mask::PATH_MIG_STATE | Mask::ALT_PATH);
    let with = |opcode, must, may| Some(Transition { opcode, must, may });
    let none = Mask::empty();
    match (from, to) {
        (_, QpState::RESET) => with(op::TO_RST_QP, none, none),
        (_, QpState::ERR) => with(op::TO_ERR_QP, none, none),
        (QpState::RESET, QpState::INIT) => with(
            op::RST2INIT_QP,
            Mask::PKEY_INDEX | Mask::PORT | rights,
            none,
        ),
        (QpState::INIT, QpState::INIT) => with(
            op::INIT2INIT_QP,
            none,
            Mask::PKEY_INDEX | Mask::PORT | rights,
        ),
        (QpState::INIT, QpState::RTR) => {
            let path = Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
            let reads = Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER;
            let must = when(connected, path) | when(responds, reads);
            with(op::INIT2RTR_QP, must, Mask::PKEY_INDEX | rights | alternate)
        }
        (QpState::RTR, QpState::RTS) => {
            let retries = Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC;
            let must = Mask::SQ_PSN | when(reliable, Mask::TIMEOUT) | when(requests, retries);
            let may = Mask::CUR_STATE | rights | migration | when(responds, Mask::MIN_RNR_TIMER);
            with(op::RTR2RTS_QP, must, may)
        }
        (QpState::RTS | QpState::SQE | QpState::SQD, QpState::RTS) => {
            let opcode = match from {
                QpState::RTS => op::RTS2RTS_QP,
                QpState::SQE if reliable => return None,
                QpState::SQE => op::SQERR2RTS_QP,
                _ => op::SQD_RTS_QP,
            };
            let may = Mask::CUR_STATE | rights | migration | when(responds, Mask::MIN_RNR_TIMER);
            with(opcode, none, may)
        }
        // The device does not support draining a send queue.
        _ => None,
    }
}

/// Converts the device's state to that of the verbs.
fn state(number: u32) -> QpState {
    match number {
        state::RST => QpState::RESET,
        state::INIT => QpState::INIT,
        state::RTR => QpState::RTR,
        state::RTS => QpState::RTS,
        state::SQER => QpState::SQE,
        state::SQD => QpState::SQD,
        _ => QpState::ERR,
    }
}

/// Returns the port of the device's bond that the driver chooses for a new queue: the
/// ports take turns.
pub(crate) fn lag_port(number: u32) -> u32 {
    const PORTS: u32 = 2;
    number % PORTS + 1
}

/// Returns the logarithm of the number of outstanding reads.
fn log_reads(count: u8) -> u32 {
    u32::from(count.max(1)).next_power_of_two().ilog2()
}

fn rights(access: u32) -> u32 {
    let access = AccessFlags::from_bits_retain(access);
    let bit = |flag, bit: u32| if access.contains(flag) { bit } else { 0 };
    bit(AccessFlags::REMOTE_READ, 1 << 2)
        | bit(AccessFlags::REMOTE_WRITE, 1 << 1)
        | bit(AccessFlags::REMOTE_ATOMIC, 1 << 0)
}

/// Copies the attributes in `mask`.
fn merge(to: &mut ModifyQp, from: &ModifyQp, mask: Mask) {
    macro_rules! take {
        ($($flag:ident => $($field:ident),+;)+) => {
            $(if mask.contains(Mask::$flag) { $(to.$field = from.$field;)+ })+
        };
    }
    take! {
        QKEY => qkey;
        ACCESS_FLAGS => qp_access_flags;
        PKEY_INDEX => pkey_index;
        PORT => port_num;
        AV => dest;
        PATH_MTU => path_mtu;
        TIMEOUT => timeout;
        RETRY_CNT => retry_cnt;
        RNR_RETRY => rnr_retry;
        RQ_PSN => rq_psn;
        SQ_PSN => sq_psn;
        MAX_QP_RD_ATOMIC => max_rd_atomic;
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        ALT_PATH => alt_dest, alt_pkey_index, alt_port_num, alt_timeout;
        MIN_RNR_TIMER => min_rnr_timer;
        PATH_MIG_STATE => path_mig_state;
        DEST_QPN => dest_qp_num;
    }
}

/// Returns attributes that are ignored, because they belong to the other half
/// of an XRC connection.
fn ignored_attributes(kind: QpType) -> Mask {
    match kind {
        QpType::XRC_INI => Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER,
        QpType::XRC_TGT => Mask::MAX_QP_RD_ATOMIC | Mask::RETRY_CNT | Mask::RNR_RETRY,
        _ => Mask::empty(),
    }
}

/// Checks the driver data of a modification.
/// Returns whether its receives are to be consumed in any order.
fn check_driver(request: &Request) -> Result<bool> {
    const LENGTH: usize = size_of::<mlx5_abi::ModifyQp>();
    let driver: mlx5_abi::ModifyQp = request.driver();
    let requested = driver.comp_mask;
    let length = request.driver_length();
    if length == 0 {
        return Ok(false);
    }
    let least = LENGTH as u64;
    let what = "length of the driver input";
    require(length >= LENGTH, what, length, Rule::AtLeast(least))?;
    supported_bits("comp_mask", requested, MODIFY_QP_OUT_OF_ORDER.into())?;
    reserved("burst_info.reserved", driver.burst_info.reserved)?;
    let is_known = request.driver_is_cleared(LENGTH);
    require_support(is_known, what, length, Rule::AtMost(least))?;
    Ok(requested != 0)
}

/// Cuts attributes to the widths of the device's fields, as mlx5_ib does.
fn cut(attributes: &mut ModifyQp) {
    attributes.timeout &= 0x1f;
    attributes.alt_timeout &= 0x1f;
    attributes.min_rnr_timer &= 0x1f;
    attributes.retry_cnt &= 0x7;
    attributes.rnr_retry &= 0x7;
    attributes.dest_qp_num &= 0xff_ffff;
}

fn check(attributes: &ModifyQp, mask: Mask) -> Result<()> {
    // The limit of the device, which is above that of an Ethernet port.
    let last_pkey = u64::from(PKEYS) - 1;
    let reads = u64::from(MAX_READS);
    if mask.contains(Mask::PORT) {
        is("port_num", attributes.port_num, 1)?;
    }
    if mask.contains(Mask::PKEY_INDEX) {
        at_most("pkey_index", attributes.pkey_index, last_pkey)?;
    }
    if mask.contains(Mask::PATH_MTU) {
        between("path_mtu", attributes.path_mtu, (1, 5))?;
    }
    if mask.contains(Mask::MAX_QP_RD_ATOMIC) {
        at_most("max_rd_atomic", attributes.max_rd_atomic, reads)?;
    }
    if mask.contains(Mask::MAX_DEST_RD_ATOMIC) {
        at_most("max_dest_rd_atomic", attributes.max_dest_rd_atomic, reads)?;
    }
    if mask.contains(Mask::AV) {
        is("dest.port_num", attributes.dest.port_num, 1)?;
    }
    if mask.contains(Mask::ALT_PATH) {
        is("alt_port_num", attributes.alt_port_num, 1)?;
        is("alt_dest.port_num", attributes.alt_dest.port_num, 1)?;
        at_most("alt_pkey_index", attributes.alt_pkey_index, last_pkey)?;
    }
    Ok(())
}

/// Refuses a transition that does not exist.
pub(crate) fn no_transition<T>(from: QpState, to: QpState) -> Result<T> {
    let rule = Rule::Transition {
        from: from.0,
        to: to.0,
    };
    invalid("qp_state", to.0, rule)
}

/// Checks that a transition has the attributes that it must have, and no others than it may.
pub(crate) fn check_mask(mask: Mask, must: Mask, may: Mask) -> Result<()> {
    let (bits, needed) = (mask.bits(), must.bits().into());
    require(
        mask.contains(must),
        "attr_mask",
        bits,
        Rule::Contains(needed),
    )?;
    known_bits("attr_mask", bits, (must | may).bits().into())
}

/// Refuses commands on a queue pair whose work queues are objects of their own.
fn require_own_queues(packet: Option<Packet>, handle: u32) -> Result<()> {
    let has_others = packet.is_some_and(|packet| packet.has_work_queues());
    let rule = Rule::Without("an indirection table");
    require_support(!has_others, "queue pair", handle, rule)
}

impl ObjectData for Qp {
    fn kind(&self) -> u16 {
        OBJECT_QP
    }

    fn creation(&self) -> Option<ObjectChange> {
        let [sends, receives, _, _, max_inline] = self.cap;
        Some(ObjectChange::QueuePairCreated {
            number: self.number,
            kind: QpType(self.kind),
            user_handle: self.events.user_handle,
            entries: [sends, receives],
            send_blocks: self.send_blocks,
            signals_all: self.signal_all,
            max_inline,
            shared_queue: self.shared_queue,
            receive_queue: self.receive_queue,
        })
    }

    fn destruction(&self) -> Option<ObjectChange> {
        let number = self.number;
        Some(ObjectChange::QueuePairDestroyed { number })
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "queue pair",
            number: self.number,
            length: 0,
        }
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn send_queue(&self) -> Option<u32> {
        Some(self.number)
    }

    fn events(&self) -> Option<&Events> {
        Some(&self.events)
    }

    /// Multicast groups must be left before.
    fn is_busy(&self) -> bool {
        !self.groups.is_empty()
    }

    fn represents(&self, object: Created) -> bool {
        let is = |(opcode, number)| object == Created::new(opcode, number);
        match (&self.target, &self.packet) {
            (Some(_), _) => is((op::CREATE_DCT, self.number)),
            (None, Some(packet)) => packet.objects().any(is),
            (None, None) => is((op::CREATE_QP, self.number)),
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        if self.domain.is_some() && state.objects.qps(self.number).next().is_some() {
            // It was opened several times, and stays until the last one is destroyed.
            return Ok(());
        }
        if self.target.is_some() {
            return state.destroy_dc_target(self.number);
        }
        match &mut self.packet {
            Some(packet) => state.destroy_packet_objects(packet)?,
            None => state.destroy_number(op::DESTROY_QP, self.number)?,
        }
        state.watch.remove_queue(self.number);
        Ok(())
    }

    fn release(&self, state: &mut State, file: RawFd, _: u32) {
        if let (Some(register), Ok(context)) = (self.register, state.context(file)) {
            context.free_register(register);
        }
    }

    fn report(&self, request: &mut Request) {
        self.events.report(request, ATTR_DESTROY_QP_RESP);
    }
}

impl State {
    /// Queries the device's context of a queue pair.
    fn query(&mut self, number: u32) -> Result<Vec<u8>> {
        let input = Input::new(op::QUERY_QP, 16).set(NUMBER, number);
        run(&mut self.hca, &input, qpc::AT + qpc::SIZE)
    }

    /// Adds the address path to a peer.
    fn path(&self, mut input: Input, dest: &QpDest, kind: QpType, peer: u32) -> Result<Input> {
        input = input.fields(
            PATH,
            [
                (ads::SL, dest.sl.into()),
                (ads::VHCA_PORT_NUM, dest.port_num.into()),
            ],
        );
        if dest.is_global != 0 {
            let index = dest.sgid_index;
            let known = self.gid_at(index.into()).is_some();
            require(known, "sgid_index", index, Rule::Exists)?;
            input = input
                .fields(
                    PATH,
                    [
                        (ads::GRH, u32::from(!self.is_ethernet())),
                        (ads::SRC_ADDR_INDEX, dest.sgid_index.into()),
                        (ads::HOP_LIMIT, dest.hop_limit.into()),
                        (ads::TCLASS, dest.traffic_class.into()),
                        (ads::FLOW_LABEL, dest.flow_label),
                    ],
                )
                .bytes(PATH + ads::RGID_RIP, &dest.dgid);
        }
        if self.is_ethernet() {
            is("is_global", dest.is_global.min(1), 1)?;
            let is_connected = kind != QpType::UD;
            require(
                is_connected,
                "attr_mask",
                Mask::AV.bits(),
                Rule::Without("a UD queue pair"),
            )?;
            // RoCE v2 source port derived from the flow, in the range that the
            // specification gives.
            let flow = dest.flow_label ^ peer;
            let source = 0xc000 | (flow ^ flow >> 14) & 0x3fff;
            return Ok(input
                .set(ads::UDP_SPORT.at(PATH), source)
                .bytes(PATH + ads::RMAC, &self.resolve(&dest.dgid)?));
        }
        Ok(input
            .set(ads::MLID.at(PATH), dest.src_path_bits.into())
            .set(ads::RLID.at(PATH), dest.dlid.into()))
    }

    /// Modifies attributes. `knows` contains those that the command supports.
    pub(crate) fn modify_qp(
        &mut self,
        fd: RawFd,
        request: &mut Request,
        given: &ModifyQp,
        knows: u32,
    ) -> Result<()> {
        let modified = self.modify_qp_attributes(fd, request, given, knows);
        modified.map_err(|error| match self.objects.qp(fd, given.qp_handle) {
            Ok(qp) => error.of_queue_pair(qp.number),
            Err(_) => error.of(given.qp_handle),
        })?;
        let has_state = Mask::from_bits_retain(given.attr_mask).contains(Mask::STATE);
        if has_state && self.objects.changes.is_some() {
            let qp = self.objects.qp(fd, given.qp_handle)?;
            let change = ObjectChange::QueuePairModified {
                number: qp.number,
                state: QpState(given.qp_state),
                attributes: self.public_attributes(&qp.attributes),
            };
            self.objects
                .changes
                .iter_mut()
                .for_each(|it| it.push(change));
        }
        Ok(())
    }

    fn public_attributes(&self, given: &ModifyQp) -> QueuePairAttributes {
        let index = given.dest.sgid_index;
        QueuePairAttributes {
            is_global: given.dest.is_global != 0,
            source: (
                index,
                self.gid_at(index.into()).map_or([0; 16], |entry| entry.gid),
            ),
            destination: match given.dest.is_global {
                0 => u128::from(given.dest.dlid).to_be_bytes(),
                _ => given.dest.dgid,
            },
            hop_limit: given.dest.hop_limit,
            timeout: given.timeout,
            retry_count: given.retry_cnt,
            rnr_retry: given.rnr_retry,
            max_dest_rd_atomic: given.max_dest_rd_atomic,
            access: AccessFlags::from_bits_retain(given.qp_access_flags),
        }
    }

    fn modify_qp_attributes(
        &mut self,
        fd: RawFd,
        request: &mut Request,
        given: &ModifyQp,
        knows: u32,
    ) -> Result<()> {
        supported_bits("attr_mask", given.attr_mask, knows.into())?;
        let qp = self.objects.qp(fd, given.qp_handle)?;
        let (number, kind, mut attributes) = (qp.number, QpType(qp.kind), qp.attributes);
        let (target, packet, qp_is_out_of_order) = (qp.target, qp.packet, qp.out_of_order);
        let mask = Mask::from_bits_retain(given.attr_mask) - ignored_attributes(kind);
        let out_of_order = check_driver(request)?;
        if out_of_order {
            // Raw packets are no service that has it (`get_dp_ooo_cap`).
            require_support(
                packet.is_none(),
                "comp_mask",
                MODIFY_QP_OUT_OF_ORDER,
                Rule::Without("raw packets"),
            )?;
            self.objects.qp_mut(fd, given.qp_handle)?.out_of_order = true;
        }
        let out_of_order = out_of_order || qp_is_out_of_order;
        if let Some(target) = target {
            self.merge_checked(&mut attributes, given, mask)?;
            attributes.qp_state = given.qp_state;
            let named = (given.qp_handle, target);
            return self.modify_dc_target(fd, request, named, (&attributes, mask), out_of_order);
        }
        require_own_queues(packet, given.qp_handle)?;
        if let Some(packet) = packet {
            self.merge_checked(&mut attributes, given, mask)?;
            let to = mask
                .contains(Mask::STATE)
                .then_some(QpState(given.qp_state));
            if to == Some(QpState::ERR) {
                self.flush_sends(Some(number));
            }
            let named = (given.qp_handle, packet);
            return self.modify_packet_qp(fd, named, (&attributes, to), mask);
        }
        let now = state(qpc::STATE.at(qpc::AT).get(&self.query(number)?));
        if mask.contains(Mask::CUR_STATE) {
            is("cur_qp_state", given.cur_qp_state, now.0.into())?;
        }
        let to = if mask.contains(Mask::STATE) {
            QpState(given.qp_state)
        } else {
            now
        };
        let found = match kind {
            QpType::DRIVER => dynamic::transition(now, to),
            _ => transition(kind, now, to),
        };
        let Some(transition) = found else {
            return no_transition(now, to);
        };
        let rest = mask - Mask::STATE;
        check_mask(rest, transition.must, transition.may)?;
        if to == QpState::ERR && now == QpState::RTS {
            self.flush_sends(Some(number));
        }
        self.merge_checked(&mut attributes, given, mask)?;
        let opcode = transition.opcode;
        let input = Input::new(opcode, 0x110).set(NUMBER, number);
        let input = match opcode {
            op::RST2INIT_QP => input
                .set(qpc::LAG_TX_PORT_AFFINITY.at(qpc::AT), lag_port(number))
                .set(qpc::COUNTER_SET_ID.at(qpc::AT), self.counter_set),
            op::INIT2RTR_QP if out_of_order => input
                .set(qpc::DP_ORDERING_FORCE.at(qpc::AT), 1)
                .set(qpc::DP_ORDERING_1.at(qpc::AT), 1),
            _ => input,
        };
        let input = match opcode {
            op::TO_RST_QP | op::TO_ERR_QP => input,
            _ => self.describe(input, &attributes, mask, kind)?,
        };
        run(&mut self.hca, &input, 16)?;
        if to == QpState::RESET {
            attributes = ModifyQp::default();
            self.watch.reset_sends(number);
        }
        let qp = self.objects.qp_mut(fd, given.qp_handle)?;
        qp.attributes = attributes;
        // An XRC target may have been opened several times.
        if qp.domain.is_some() {
            self.objects.set_attributes(number, attributes);
        }
        Ok(())
    }

    /// Copies the attributes in `mask`, if their values are valid.
    fn merge_checked(&self, to: &mut ModifyQp, from: &ModifyQp, mask: Mask) -> Result<()> {
        check(from, mask)?;
        if mask.contains(Mask::PATH_MTU) {
            at_most("path_mtu", from.path_mtu, self.mtu().into())?;
        }
        merge(to, from, mask);
        cut(to);
        Ok(())
    }

    /// Encodes the attributes for the device: all known ones, and the mask of
    /// those that change.
    fn describe(&self, input: Input, it: &ModifyQp, mask: Mask, kind: QpType) -> Result<Input> {
        // A peer without resources for reads may not read.
        let access = match it.max_dest_rd_atomic {
            0 => it.qp_access_flags & AccessFlags::REMOTE_WRITE.bits(),
            _ => it.qp_access_flags,
        };
        let mut new = 0;
        for (flag, bit) in [
            (Mask::ACCESS_FLAGS, RIGHTS),
            (Mask::MAX_DEST_RD_ATOMIC, RIGHTS),
            (Mask::PKEY_INDEX, optional::PKEY_INDEX),
            (Mask::QKEY, optional::Q_KEY),
            (Mask::MIN_RNR_TIMER, optional::RNR_TIMEOUT),
            (Mask::AV, optional::PRIMARY_PATH),
        ] {
            if mask.contains(flag) {
                new |= bit;
            }
        }
        let mut input = input
            .set(qpc::OPT_PARAM_MASK, new)
            .fields(
                qpc::AT,
                [
                    (qpc::ACCESS, rights(access)),
                    (qpc::MTU, it.path_mtu.into()),
                    (qpc::REMOTE_QPN, it.dest_qp_num),
                ],
            )
            .fields(
                PATH,
                [
                    (ads::PKEY_INDEX, it.pkey_index.into()),
                    (ads::ACK_TIMEOUT, it.timeout.into()),
                    (ads::VHCA_PORT_NUM, it.port_num.into()),
                ],
            )
            .fields(
                qpc::AT,
                [
                    (qpc::LOG_SRA_MAX, log_reads(it.max_rd_atomic)),
                    (qpc::RETRY_COUNT, it.retry_cnt.into()),
                    (qpc::RNR_RETRY, it.rnr_retry.into()),
                    (qpc::NEXT_SEND_PSN, it.sq_psn),
                    (qpc::LOG_RRA_MAX, log_reads(it.max_dest_rd_atomic)),
                    (qpc::MIN_RNR_NAK, it.min_rnr_timer.into()),
                    (qpc::NEXT_RCV_PSN, it.rq_psn),
                    (qpc::Q_KEY, it.qkey),
                ],
            );
        // An initiator's destinations are in its work requests.
        if mask.contains(Mask::AV) && kind != QpType::DRIVER {
            input = self.path(input, &it.dest, kind, it.dest_qp_num)?;
        }
        Ok(input)
    }

    /// Returns the context of a queue pair in the device, zeros for one that has none, and its
    /// state.
    fn queried(&mut self, fd: RawFd, handle: u32) -> Result<(Vec<u8>, u8)> {
        let qp = self.objects.qp(fd, handle)?;
        let (number, target, packet) = (qp.number, qp.target, qp.packet);
        require_own_queues(packet, handle)?;
        let empty = || vec![0; qpc::AT + qpc::SIZE];
        Ok(match (target, packet) {
            (Some(target), _) => (empty(), target.state.0),
            (None, Some(packet)) => (empty(), self.packet_state(&packet)?.0),
            (None, None) => {
                let context = self.query(number)?;
                let now = state(qpc::STATE.at(qpc::AT).get(&context)).0;
                (context, now)
            }
        })
    }

    /// Returns the state of a queue pair, and the packet numbers that it expects and sends next.
    pub(crate) fn queried_qp(&mut self, fd: RawFd, handle: u32) -> Result<(u8, u32, u32)> {
        let (context, now) = self.queried(fd, handle)?;
        Ok((
            now,
            qpc::NEXT_RCV_PSN.at(qpc::AT).get(&context),
            qpc::NEXT_SEND_PSN.at(qpc::AT).get(&context),
        ))
    }

    pub(crate) fn query_qp(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: QueryQp = request.core()?;
        let (context, now) = self.queried(fd, requested.qp_handle)?;
        let qp: &Qp = self.objects.qp(fd, requested.qp_handle)?;
        let it = &qp.attributes;
        let [
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
        ] = qp.cap;
        request.core_answer(&QueryQpResp {
            dest: it.dest,
            alt_dest: it.alt_dest,
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
            qkey: it.qkey,
            rq_psn: qpc::NEXT_RCV_PSN.at(qpc::AT).get(&context),
            sq_psn: qpc::NEXT_SEND_PSN.at(qpc::AT).get(&context),
            dest_qp_num: it.dest_qp_num,
            qp_access_flags: it.qp_access_flags,
            pkey_index: it.pkey_index,
            alt_pkey_index: it.alt_pkey_index,
            qp_state: now,
            cur_qp_state: now,
            path_mtu: it.path_mtu,
            path_mig_state: it.path_mig_state,
            max_rd_atomic: it.max_rd_atomic,
            max_dest_rd_atomic: it.max_dest_rd_atomic,
            min_rnr_timer: it.min_rnr_timer,
            port_num: it.port_num,
            timeout: it.timeout,
            retry_cnt: it.retry_cnt,
            rnr_retry: it.rnr_retry,
            alt_port_num: it.alt_port_num,
            alt_timeout: it.alt_timeout,
            sq_sig_all: qp.signal_all.into(),
            ..QueryQpResp::default()
        });
        Ok(())
    }

    /// Joins a multicast group, or leaves it.
    pub(crate) fn group(&mut self, fd: RawFd, requested: &AttachMcast, join: bool) -> Result<()> {
        let qp = self.objects.qp(fd, requested.qp_handle)?;
        let is_multicast = multicast_mac(&requested.gid).is_some();
        let start = get64(&requested.gid, 0);
        require(is_multicast, "GID", start, Rule::OfType("multicast GID"))?;
        is("qp_type", qp.kind, QpType::UD.0.into())?;
        let member = qp.groups.contains(&requested.gid);
        let number = qp.number;
        if join == member {
            // Joining twice has no effect; leaving requires membership.
            return require(join, "GID", start, Rule::InState("joined"));
        }
        self.group_in_device(number, &requested.gid, join)?;
        let groups = &mut self.objects.qp_mut(fd, requested.qp_handle)?.groups;
        groups.retain(|gid| *gid != requested.gid);
        if join {
            groups.push(requested.gid);
        }
        Ok(())
    }

    fn group_in_device(&mut self, number: u32, gid: &[u8; 16], join: bool) -> Result<()> {
        let opcode = if join {
            op::ATTACH_TO_MCG
        } else {
            op::DETACH_FROM_MCG
        };
        let mut bytes = [0; 16];
        put_bytes(&mut bytes, 0, gid);
        let input = Input::new(opcode, 0x20)
            .set(NUMBER, number)
            .bytes(0x10, &bytes);
        let other_hosts = self.host_addresses();
        if let (Some(addresses), true) = (&other_hosts, join) {
            let start = get64(gid, 0);
            (addresses.join(gid)).map_err(system("membership of the GID", start))?;
        }
        let done = run(&mut self.hca, &input, 16).map(drop);
        if let (Some(addresses), false) = (&other_hosts, join && done.is_ok()) {
            addresses.leave(gid);
        }
        done
    }

    /// Leaves all multicast groups of an object, if it is a queue pair.
    pub(crate) fn leave_groups(&mut self, fd: RawFd, handle: u32) {
        let Ok(qp) = self.objects.qp_mut(fd, handle) else {
            return;
        };
        let (number, groups) = (qp.number, std::mem::take(&mut qp.groups));
        for gid in groups {
            // Errors are ignored: destroying the queue pair ends its
            // memberships.
            let _ = self.group_in_device(number, &gid, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitions_are_those_of_the_specification() {
        let of = |kind, from, to| transition(kind, from, to).map(|it| it.opcode);
        assert_eq!(
            of(QpType::RC, QpState::RTR, QpState::RTS),
            Some(op::RTR2RTS_QP)
        );
        assert_eq!(of(QpType::RC, QpState::RESET, QpState::RTR), None);
        assert_eq!(of(QpType::RC, QpState::SQE, QpState::RTS), None);
        assert_eq!(
            of(QpType::UD, QpState::SQE, QpState::RTS),
            Some(op::SQERR2RTS_QP)
        );
        assert_eq!(of(QpType::RC, QpState::ERR, QpState::INIT), None);
        assert_eq!(
            of(QpType::UC, QpState::ERR, QpState::RESET),
            Some(op::TO_RST_QP)
        );
        let must = |kind, from, to| transition(kind, from, to).unwrap().must;
        assert!(must(QpType::UD, QpState::INIT, QpState::RTR).is_empty());
        let ready = |kind| must(kind, QpState::INIT, QpState::RTR);
        let sends = |kind| must(kind, QpState::RTR, QpState::RTS);
        // XRC: initiator and target.
        assert_eq!(ready(QpType::XRC_TGT), ready(QpType::RC));
        assert_eq!(ready(QpType::XRC_INI), ready(QpType::UC));
        assert_eq!(sends(QpType::XRC_INI), sends(QpType::RC));
        assert_eq!(sends(QpType::XRC_TGT), Mask::SQ_PSN | Mask::TIMEOUT);
    }

    #[test]
    fn reads_are_counted_in_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 16].map(log_reads), [0, 0, 1, 2, 4]);
    }
}
