//! Raw packet queue pairs: a send queue with its transport interface (TIS), and a
//! receive queue with a TIR, which is the destination of flows
//! (`create_raw_packet_qp` of mlx5_ib).

use std::os::fd::RawFd;
use std::sync::Arc;

use mlx5_abi::{CreateQpResp, qp_object};
use softhca::command::opcode as op;
use softhca::layout::rqc::state;
use softhca::layout::{PAGE_LIST, rqc, sqc, tirc, tisc, wq};
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::verbs::QpCap;
use uverbs::abi::write::ModifyQp;
use uverbs::{QpAttrMask as Mask, QpCreateFlags, QpState, QpType};

use crate::addresses::PacketAccess;
use crate::driver::cause::{
    PACKET_SOCKET, Result, at_most, is, require, require_support, supported_bits, system,
};
use crate::driver::command::{Input, NUMBER, make, run};
use crate::driver::data::Packet;
use crate::driver::object::{MemoryRange, Object, Qp};
use crate::driver::qp::{check_mask, lag_port, no_transition};
use crate::driver::queues::{
    MAX_QUEUE_ENTRIES, NO_REGISTER, QpDriver, SEND_BLOCK, SIGNAL_ALL, WQ, check_absent,
    check_no_source, check_queue_size, check_receives, create_flags, loopback_flags, queried_cap,
};
use crate::driver::request::Request;
use crate::driver::state::State;

const LOG_BLOCK: u32 = 6;
pub(crate) const INTERFACE_LENGTH: usize = rqc::AT + rqc::SIZE;

/// The context of a send or receive queue of packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PacketQueueContext {
    pub(crate) uid: u32,
    pub(crate) user_index: u32,
    pub(crate) cq: u32,
    pub(crate) pd: u32,
    pub(crate) entries: MemoryRange,
    pub(crate) log_size: u32,
    pub(crate) log_stride: u32,
    /// Address of the doorbell records.
    pub(crate) records: u64,
}

impl PacketQueueContext {
    /// Builds the command that creates the queue.
    ///
    /// # Errors
    /// As for [`Input::pages`].
    fn input(&self, opcode: u16) -> Result<Input> {
        Input::new(opcode, PAGE_LIST + 8)
            .by(self.uid)
            .fields(
                rqc::AT,
                [(rqc::USER_INDEX, self.user_index), (rqc::CQN, self.cq)],
            )
            .fields(
                WQ,
                [
                    (wq::PD, self.pd),
                    (wq::LOG_WQ_STRIDE, self.log_stride),
                    (wq::LOG_WQ_SZ, self.log_size),
                ],
            )
            .long(WQ + wq::DBR_ADDR, self.records)
            .pages(
                (wq::LOG_WQ_PG_SZ.at(WQ), wq::PAGE_OFFSET.at(WQ)),
                self.entries,
            )
    }

    /// As [`input`](Self::input), of a receive queue.
    pub(crate) fn receive_input(&self, strips_vlan: bool, counter_set: u32) -> Result<Input> {
        let input = self.input(op::CREATE_RQ)?;
        let keeps = u32::from(!strips_vlan);
        Ok(input
            .set(rqc::VSD.at(rqc::AT), keeps)
            .set(rqc::COUNTER_SET_ID.at(rqc::AT), counter_set)
            .set(rqc::FLUSH_IN_ERROR_EN.at(rqc::AT), 1))
    }
}

impl Packet {
    /// Returns whether work queues receive its packets: it has no state then.
    pub(crate) fn has_work_queues(&self) -> bool {
        self.sq.is_none() && self.rq.is_none()
    }

    /// Returns the device objects, with the commands that create them.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (u16, u32)> + use<> {
        let all = [
            (op::CREATE_TIS, self.tis),
            (op::CREATE_SQ, self.sq),
            (op::CREATE_RQ, self.rq),
            (op::CREATE_TIR, self.tir),
        ];
        all.into_iter()
            .filter_map(|(by, number)| Some((by, number?)))
    }
}

/// Returns the states of the send and receive queue after a transition, `None` for
/// those that stay, and the attributes that the transition takes.
fn transition(from: QpState, to: QpState) -> Option<([Option<u32>; 2], Mask, Mask)> {
    let none = Mask::empty();
    Some(match (from, to) {
        (_, QpState::RESET) => ([Some(state::RST), Some(state::RST)], none, none),
        (_, QpState::ERR) => ([Some(state::ERR), Some(state::ERR)], none, none),
        (QpState::RESET, QpState::INIT) => ([None, Some(state::RDY)], Mask::PORT, none),
        (QpState::INIT, QpState::INIT) => ([None, None], none, Mask::PORT),
        (QpState::INIT, QpState::RTR) => ([None, None], none, none),
        (QpState::RTR, QpState::RTS) => ([Some(state::RDY), None], none, Mask::RATE_LIMIT),
        (QpState::RTS, QpState::RTS) => ([None, None], none, Mask::RATE_LIMIT),
        _ => return None,
    })
}

const STRIP_VLAN: u32 = QpCreateFlags::CVLAN_STRIPPING.bits();

/// A command that creates a raw packet queue pair.
struct PacketQpRequest {
    /// Handles of the objects that it uses.
    pd: u32,
    send_cq: u32,
    recv_cq: u32,
    create: u32,
    driver: QpDriver,
    uar: u32,
    cap: QpCap,
}

impl PacketQpRequest {
    /// Returns the memory of the send queue, and of the receive queue.
    fn entries(&self) -> [MemoryRange; 2] {
        let driver = &self.driver;
        [
            (
                driver.access_key,
                u64::from(driver.sq_wqe_count) * SEND_BLOCK,
            ),
            (
                driver.buf_addr,
                u64::from(driver.rq_wqe_count) << driver.rq_wqe_shift,
            ),
        ]
    }
}

impl State {
    /// Returns whether raw packets are supported: on a device with addresses of the host if
    /// its interface has a MAC address.
    pub(crate) fn has_packets(&self) -> bool {
        let of_host = self.host_addresses();
        self.is_ethernet() && of_host.is_none_or(|it| it.has_packets())
    }

    /// Opens the interface of a device with addresses of the host for raw packets.
    pub(crate) fn open_packets(&self) -> Result<Option<Arc<dyn PacketAccess>>> {
        let Some(addresses) = self.host_addresses() else {
            return Ok(None);
        };
        let interface = addresses.interface();
        let opened = addresses.open_packets();
        opened.map(Some).map_err(system(PACKET_SOCKET, interface))
    }

    /// Returns the transport domain of a context, within which a queue receives looped back
    /// frames only on request.
    pub(crate) fn transport_domain(&mut self, fd: RawFd) -> Result<u32> {
        if let Some(domain) = self.context(fd)?.transport_domain {
            return Ok(domain);
        }
        let input = Input::new(op::ALLOC_TRANSPORT_DOMAIN, 16).by(self.uid(fd));
        let domain = make(&mut self.hca, &input)?;
        self.context(fd)?.transport_domain = Some(domain);
        Ok(domain)
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_packet_qp(
        &mut self,
        fd: RawFd,
        request: &mut Request,
    ) -> Result<()> {
        require_support(
            self.has_packets(),
            "qp_type",
            QpType::RAW_PACKET.0,
            Rule::Supported,
        )?;
        check_no_source(request)?;
        if let Some(table) = request.optional_handle(ATTR_CREATE_QP_IND_TABLE_HANDLE) {
            return self.create_rss_qp(fd, request, table);
        }
        let parsed = self.parse_packet_qp(fd, request)?;
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let access = self.open_packets()?;
        let domain = self.transport_domain(fd)?;
        let queues = self.encode_packet_qp(fd, &parsed)?;
        let addresses = parsed.driver.addresses();
        let mut ranges = addresses.ranges(0)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.grant_memory(&ranges) }?;
        let mut packet = Packet {
            state: QpState::RESET,
            tis: None,
            sq: None,
            rq: None,
            tir: None,
        };
        // SAFETY: guaranteed by the caller.
        let created = unsafe {
            self.create_packet_objects(&parsed, queues, (self.uid(fd), domain), &mut packet)
        };
        let entries = parsed.entries();
        ranges.extend(packet.sq.map(|_| entries[0]));
        ranges.extend(packet.rq.map(|_| entries[1]));
        if created.is_err() {
            // Reported if the device refuses.
            let _ = self.destroy_packet_objects(&mut packet);
            for (address, length) in ranges {
                self.hca.platform_mut().revoke(address, length);
            }
            return created;
        }
        let number = packet.sq.or(packet.rq).unwrap_or_default();
        // SAFETY: as in `create_cq`.
        unsafe { self.watch.add_queue(number, addresses.records) };
        let register = self.register(fd, parsed.driver.uar_page())?;
        let qp = Qp {
            cap: queried_cap(parsed.cap, parsed.driver.rq_wqe_count),
            signal_all: parsed.create & SIGNAL_ALL != 0,
            send_blocks: parsed.driver.sq_wqe_count,
            register,
            packet: Some(packet),
            _access: access,
            ..Qp::without_queues(number, QpType::RAW_PACKET, events)
        };
        let object = Object::new(fd, qp)
            .using(vec![parsed.pd, parsed.send_cq, parsed.recv_cq])
            .with_memory(ranges);
        let answer = answer(&packet, register.unwrap_or(NO_REGISTER), self.uid(fd));
        let cap = zerocopy::transmute!(parsed.cap);
        self.add_qp(request, object, number, cap, answer);
        Ok(())
    }

    /// Reads and checks the attributes of a new raw packet queue pair.
    fn parse_packet_qp(&self, fd: RawFd, request: &Request) -> Result<PacketQpRequest> {
        let pd = request.handle(ATTR_CREATE_QP_PD_HANDLE)?;
        let send_cq = request.handle(ATTR_CREATE_QP_SEND_CQ_HANDLE)?;
        let recv_cq = request.handle(ATTR_CREATE_QP_RECV_CQ_HANDLE)?;
        let excluded = [ATTR_CREATE_QP_SRQ_HANDLE, ATTR_CREATE_QP_XRCD_HANDLE];
        check_absent(request, &excluded)?;
        let create = create_flags(request, QpType::RAW_PACKET)?;
        // Raw packets have no multicast groups.
        const UNUSED: u32 = QpCreateFlags::BLOCK_MULTICAST_LOOPBACK.bits();
        supported_bits("flags", create, (SIGNAL_ALL | STRIP_VLAN | UNUSED).into())?;
        let driver = QpDriver::new(request)?;
        let uar = match driver.uar_page() {
            Some(uar) => self.check_uar(fd, uar)?,
            None => self.default_uar(fd)?,
        };
        let (blocks, receives) = (driver.sq_wqe_count, driver.rq_wqe_count);
        let shift = driver.rq_wqe_shift;
        let cap: QpCap = request.value(ATTR_CREATE_QP_CAP)?;
        at_most("max_recv_wr", cap.max_recv_wr, MAX_QUEUE_ENTRIES.into())?;
        if blocks != 0 {
            check_queue_size("sq_wqe_count", blocks)?;
        } else {
            let receives = cap.max_recv_wr;
            require(receives != 0, "max_recv_wr", receives, Rule::NonZero)?;
        }
        if cap.max_recv_wr == 0 {
            is("rq_wqe_count", receives, 0)?;
            is("rq_wqe_shift", shift, 0)?;
        } else {
            check_receives(receives, shift)?;
        }
        Ok(PacketQpRequest {
            pd,
            send_cq,
            recv_cq,
            create,
            driver,
            uar,
            cap,
        })
    }

    /// Encodes the commands that create the send and the receive queue, except numbers of
    /// objects that do not exist yet.
    fn encode_packet_qp(&self, fd: RawFd, parsed: &PacketQpRequest) -> Result<[Option<Input>; 2]> {
        let driver = parsed.driver;
        let (pd, uid) = (self.objects.pd(fd, parsed.pd)?, self.uid(fd));
        let cqs = [
            self.objects.cq(fd, parsed.send_cq)?.number,
            self.objects.cq(fd, parsed.recv_cq)?.number,
        ];
        let entries = parsed.entries();
        let queue = |cq, entries, log_size, log_stride| PacketQueueContext {
            uid,
            user_index: driver.uidx,
            cq,
            pd,
            entries,
            log_size,
            log_stride,
            records: driver.db_addr,
        };
        let uar = |input: Input| input.set(wq::UAR_PAGE.at(WQ), parsed.uar);
        let send = match driver.sq_wqe_count {
            0 => None,
            blocks => {
                let context = queue(cqs[0], entries[0], blocks.ilog2(), LOG_BLOCK);
                let input = uar(context.input(op::CREATE_SQ)?);
                Some(
                    input
                        .set(sqc::TIS_LST_SZ.at(sqc::AT), 1)
                        .set(sqc::FLUSH_IN_ERROR_EN.at(sqc::AT), 1),
                )
            }
        };
        let receive = match driver.rq_wqe_count {
            0 => None,
            receives => {
                let context = queue(cqs[1], entries[1], receives.ilog2(), driver.rq_wqe_shift);
                let strips_vlan = parsed.create & STRIP_VLAN != 0;
                Some(uar(context.receive_input(strips_vlan, self.counter_set)?))
            }
        };
        Ok([send, receive])
    }

    /// Creates the device objects of a raw packet queue pair. On failure, `packet` has those
    /// that were created.
    ///
    /// # Safety
    /// As for [`State::execute`].
    unsafe fn create_packet_objects(
        &mut self,
        parsed: &PacketQpRequest,
        [send, receive]: [Option<Input>; 2],
        (uid, domain): (u32, u32),
        packet: &mut Packet,
    ) -> Result<()> {
        let [send_memory, receive_memory] = parsed.entries();
        let interface = |opcode| Input::new(opcode, INTERFACE_LENGTH).by(uid);
        if let Some(input) = send {
            let tis = interface(op::CREATE_TIS).set(tirc::TRANSPORT_DOMAIN.at(tirc::AT), domain);
            let tis = make(&mut self.hca, &tis)?;
            packet.tis = Some(tis);
            let input = input.set(sqc::TIS_NUM_0.at(sqc::AT), tis);
            // SAFETY: guaranteed by the caller.
            packet.sq = Some(unsafe { self.create_with_memory(&[send_memory], &input) }?);
        }
        if let Some(input) = receive {
            // SAFETY: guaranteed by the caller.
            let rq = unsafe { self.create_with_memory(&[receive_memory], &input) }?;
            packet.rq = Some(rq);
            let tir = interface(op::CREATE_TIR).fields(
                tirc::AT,
                [
                    (tirc::INLINE_RQN, rq),
                    (tirc::SELF_LB_BLOCK, loopback_flags(parsed.driver.flags)),
                    (tirc::TRANSPORT_DOMAIN, domain),
                ],
            );
            packet.tir = Some(make(&mut self.hca, &tir)?);
        }
        Ok(())
    }

    /// Moves a raw packet queue pair to another state.
    pub(crate) fn modify_packet_qp(
        &mut self,
        fd: RawFd,
        (handle, packet): (u32, Packet),
        (attributes, to): (&ModifyQp, Option<QpState>),
        mask: Mask,
    ) -> Result<()> {
        let now = self.packet_state(&packet)?;
        let to = to.unwrap_or(now);
        let Some((states, must, may)) = transition(now, to) else {
            return no_transition(now, to);
        };
        let rest = mask - Mask::STATE;
        check_mask(rest, must, may)?;
        let has_rate = rest.contains(Mask::RATE_LIMIT);
        require_support(!has_rate, "attr_mask", rest.bits(), Rule::Supported)?;
        let queues = [
            (op::MODIFY_SQ, packet.sq, states[0]),
            (op::MODIFY_RQ, packet.rq, states[1]),
        ];
        if let (QpState::RESET, QpState::INIT, Some(tis)) = (now, to, packet.tis) {
            let input = Input::new(op::MODIFY_TIS, INTERFACE_LENGTH)
                .set(NUMBER, tis)
                .set(tisc::MODIFY_LAG_TX_PORT_AFFINITY, 1)
                .set(tisc::LAG_TX_PORT_AFFINITY.at(tisc::AT), lag_port(tis));
            run(&mut self.hca, &input, 16)?;
        }
        for (opcode, number, state) in queues {
            if let (Some(number), Some(state)) = (number, state) {
                let input = Input::new(opcode, rqc::AT + rqc::SIZE)
                    .set(NUMBER, number)
                    .set(rqc::STATE.at(rqc::AT), state);
                run(&mut self.hca, &input, 16)?;
                if opcode == op::MODIFY_SQ && state == state::RST {
                    self.watch.reset_sends(number);
                }
            }
        }
        let qp = self.objects.qp_mut(fd, handle)?;
        qp.packet = Some(Packet {
            state: to,
            ..packet
        });
        qp.attributes = match to {
            QpState::RESET => ModifyQp::default(),
            _ => *attributes,
        };
        Ok(())
    }

    /// Returns the state of a raw packet queue pair, which a failed send changes.
    pub(crate) fn packet_state(&mut self, packet: &Packet) -> Result<QpState> {
        let Some(sq) = packet.sq.filter(|_| packet.state == QpState::RTS) else {
            return Ok(packet.state);
        };
        let input = Input::about(op::QUERY_SQ, sq);
        let output = run(&mut self.hca, &input, rqc::AT + rqc::SIZE)?;
        Ok(match rqc::STATE.at(rqc::AT).get(&output) {
            state::ERR => QpState::SQE,
            _ => packet.state,
        })
    }

    /// Destroys the device objects of a raw packet queue pair. On an error, the remaining
    /// ones are in use by others.
    pub(crate) fn destroy_packet_objects(&mut self, packet: &mut Packet) -> Result<()> {
        let all = [
            (op::DESTROY_TIR, &mut packet.tir),
            (op::DESTROY_RQ, &mut packet.rq),
            (op::DESTROY_SQ, &mut packet.sq),
            (op::DESTROY_TIS, &mut packet.tis),
        ];
        for (opcode, number) in all {
            if let Some(which) = *number {
                run(&mut self.hca, &Input::about(opcode, which), 16)?;
                *number = None;
            }
        }
        Ok(())
    }
}

/// Returns the answer about a new queue pair, with the objects' numbers if the context may
/// issue commands.
pub(crate) fn answer(packet: &Packet, register: u32, uid: u32) -> CreateQpResp {
    let mut answer = CreateQpResp {
        bfreg_index: register,
        ..CreateQpResp::default()
    };
    if uid != 0 {
        let has = |number: Option<u32>, bit| if number.is_some() { bit } else { 0 };
        answer.comp_mask = has(packet.tir, qp_object::TIRN)
            | has(packet.tis, qp_object::TISN)
            | has(packet.rq, qp_object::RQN)
            | has(packet.sq, qp_object::SQN);
        answer.tirn = packet.tir.unwrap_or_default();
        answer.tisn = packet.tis.unwrap_or_default();
        answer.rqn = packet.rq.unwrap_or_default();
        answer.sqn = packet.sq.unwrap_or_default();
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receiving_begins_in_init_and_sending_in_rts() {
        let states = |from, to| transition(from, to).map(|it| it.0);
        assert_eq!(
            states(QpState::RESET, QpState::INIT),
            Some([None, Some(state::RDY)])
        );
        assert_eq!(states(QpState::INIT, QpState::RTR), Some([None, None]));
        assert_eq!(
            states(QpState::RTR, QpState::RTS),
            Some([Some(state::RDY), None])
        );
        assert_eq!(states(QpState::RESET, QpState::RTS), None);
        assert_eq!(states(QpState::SQE, QpState::RTS), None);
        assert_eq!(
            states(QpState::SQE, QpState::RESET),
            Some([Some(state::RST), Some(state::RST)])
        );
    }
}
