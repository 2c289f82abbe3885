//! Raw packet queue pairs: a send queue with its transport interface (TIS), and a
//! receive queue with a TIR, which is the destination of flows
//! (`create_raw_packet_qp` of mlx5_ib).

use std::os::fd::RawFd;

use mlx5_abi::{CreateQpResp, qp_object};
use softhca::command::opcode as op;
use softhca::layout::rqc::state;
use softhca::layout::{PAGE_LIST, rqc, sqc, tirc, tisc, wq};
use uverbs::abi::ids::*;
use uverbs::abi::verbs::QpCap;
use uverbs::abi::write::ModifyQp;
use uverbs::{QpAttrMask as Mask, QpCreateFlags, QpState, QpType};

use crate::driver::command::{Input, NUMBER, make, run};
use crate::driver::data::Packet;
use crate::driver::object::{MemoryRange, Object, Qp};
use crate::driver::qp::lag_port;
use crate::driver::queues::{
    LOG_STRIDES, MAX_QUEUE_ENTRIES, NO_REGISTER, QpDriver, SEND_BLOCK, SIGNAL_ALL, WQ,
    create_flags, is_queue_size, loopback_flags, queried_cap, require,
};
use crate::driver::request::Request;
use crate::driver::state::State;
use crate::{Result, refuse};

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
    pub(crate) fn receive_input(&self, strips_vlan: bool) -> Result<Input> {
        let input = self.input(op::CREATE_RQ)?;
        let keeps = u32::from(!strips_vlan);
        Ok(input
            .set(rqc::VSD.at(rqc::AT), keeps)
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

impl State {
    /// Returns whether raw packets are supported: not if frames are carried in UDP.
    pub(crate) fn has_packets(&self) -> bool {
        self.is_ethernet() && !self.has_host_addresses()
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
        if !self.has_packets() || request.has(ATTR_CREATE_QP_SOURCE_QPN) {
            return refuse(libc::EOPNOTSUPP);
        }
        if let Some(table) = request.optional_handle(ATTR_CREATE_QP_IND_TABLE_HANDLE) {
            return self.create_rss_qp(fd, request, table);
        }
        let pd = request.handle(ATTR_CREATE_QP_PD_HANDLE)?;
        let send_cq = request.handle(ATTR_CREATE_QP_SEND_CQ_HANDLE)?;
        let recv_cq = request.handle(ATTR_CREATE_QP_RECV_CQ_HANDLE)?;
        let excluded = [ATTR_CREATE_QP_SRQ_HANDLE, ATTR_CREATE_QP_XRCD_HANDLE];
        require(!excluded.into_iter().any(|id| request.has(id)))?;
        let create = create_flags(request, QpType::RAW_PACKET)?;
        const STRIP_VLAN: u32 = QpCreateFlags::CVLAN_STRIPPING.bits();
        // Raw packets have no multicast groups.
        const UNUSED: u32 = QpCreateFlags::BLOCK_MULTICAST_LOOPBACK.bits();
        if create & !(SIGNAL_ALL | STRIP_VLAN | UNUSED) != 0 {
            return refuse(libc::EOPNOTSUPP);
        }
        let driver = QpDriver::new(request)?;
        let named_uar = driver.uar_page();
        let uar = match named_uar {
            Some(uar) => self.check_uar(fd, uar)?,
            None => self.default_uar(fd)?,
        };
        let [blocks, receives, shift] = [
            driver.sq_wqe_count,
            driver.rq_wqe_count,
            driver.rq_wqe_shift,
        ];
        let cap: QpCap = request.value(ATTR_CREATE_QP_CAP)?;
        require(cap.max_recv_wr <= MAX_QUEUE_ENTRIES && (blocks != 0 || cap.max_recv_wr != 0))?;
        require(blocks == 0 || is_queue_size(blocks))?;
        require(match cap.max_recv_wr {
            0 => receives == 0 && shift == 0,
            _ => is_queue_size(receives) && LOG_STRIDES.contains(&shift),
        })?;
        let addresses = driver.addresses();
        let entries = [
            (driver.access_key, u64::from(blocks) * SEND_BLOCK),
            (addresses.entries, u64::from(receives) << shift),
        ];
        let (pd_number, uid) = (self.objects.pd(fd, pd)?, self.uid(fd));
        let cqs = [
            self.objects.cq(fd, send_cq)?.number,
            self.objects.cq(fd, recv_cq)?.number,
        ];
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let domain = self.transport_domain(fd)?;
        let queue = |cq, entries, log_size, log_stride| PacketQueueContext {
            uid,
            user_index: driver.uidx,
            cq,
            pd: pd_number,
            entries,
            log_size,
            log_stride,
            records: addresses.records,
        };
        let send = match blocks {
            0 => None,
            _ => {
                let context = queue(cqs[0], entries[0], blocks.ilog2(), LOG_BLOCK);
                let input = context.input(op::CREATE_SQ)?.set(wq::UAR_PAGE.at(WQ), uar);
                Some(
                    input
                        .set(sqc::TIS_LST_SZ.at(sqc::AT), 1)
                        .set(sqc::FLUSH_IN_ERROR_EN.at(sqc::AT), 1),
                )
            }
        };
        let receive = match receives {
            0 => None,
            _ => {
                let context = queue(cqs[1], entries[1], receives.ilog2(), shift);
                let input = context.receive_input(create & STRIP_VLAN != 0)?;
                Some(input.set(wq::UAR_PAGE.at(WQ), uar))
            }
        };
        let mut ranges = addresses.ranges(0)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.grant_memory(&ranges) }?;
        let mut packet_objects = Packet {
            state: QpState::RESET,
            tis: None,
            sq: None,
            rq: None,
            tir: None,
        };
        let create_objects = |state: &mut Self| {
            if let Some(send) = send {
                let interface = Input::new(op::CREATE_TIS, INTERFACE_LENGTH).by(uid);
                let tis = make(
                    &mut state.hca,
                    &interface.set(tirc::TRANSPORT_DOMAIN.at(tirc::AT), domain),
                )?;
                packet_objects.tis = Some(tis);
                let input = send.set(sqc::TIS_NUM_0.at(sqc::AT), tis);
                // SAFETY: guaranteed by the caller.
                packet_objects.sq =
                    Some(unsafe { state.create_with_memory(&[entries[0]], &input) }?);
                ranges.push(entries[0]);
            }
            if let Some(input) = receive {
                // SAFETY: guaranteed by the caller.
                let rq = unsafe { state.create_with_memory(&[entries[1]], &input) }?;
                packet_objects.rq = Some(rq);
                ranges.push(entries[1]);
                let interface = Input::new(op::CREATE_TIR, INTERFACE_LENGTH).by(uid);
                let interface = interface.fields(
                    tirc::AT,
                    [
                        (tirc::INLINE_RQN, rq),
                        (tirc::SELF_LB_BLOCK, loopback_flags(driver.flags)),
                        (tirc::TRANSPORT_DOMAIN, domain),
                    ],
                );
                packet_objects.tir = Some(make(&mut state.hca, &interface)?);
            }
            Ok(())
        };
        let result = create_objects(self);
        if result.is_err() {
            // Logged if the device refuses.
            let _ = self.destroy_packet_objects(&mut packet_objects);
            for (address, length) in ranges {
                self.hca.platform_mut().revoke(address, length);
            }
            return result;
        }
        let number = packet_objects.sq.or(packet_objects.rq).unwrap_or_default();
        // SAFETY: as in `create_cq`.
        unsafe { self.watch.add_queue(number, addresses.records) };
        let register = self.register(fd, named_uar)?;
        let qp = Qp {
            cap: queried_cap(cap, receives),
            signal_all: create & SIGNAL_ALL != 0,
            register,
            packet: Some(packet_objects),
            ..Qp::without_queues(number, QpType::RAW_PACKET, events)
        };
        let object = Object::new(fd, qp)
            .using(vec![pd, send_cq, recv_cq])
            .with_memory(ranges);
        let answer = answer(&packet_objects, register.unwrap_or(NO_REGISTER), uid);
        self.add_qp(request, object, number, zerocopy::transmute!(cap), answer);
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
            return refuse(libc::EINVAL);
        };
        let rest = mask - Mask::STATE;
        require(rest.contains(must) && (rest - must - may).is_empty())?;
        if rest.contains(Mask::RATE_LIMIT) {
            return refuse(libc::EOPNOTSUPP);
        }
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
