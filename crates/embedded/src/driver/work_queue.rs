//! Work queues: receive queues of their own, and indirection tables, which spread the
//! packets of a raw packet queue pair over several of them by a hash of their headers
//! (`mlx5_ib_create_wq`, `create_rss_raw_qp_tir`).

use std::mem::offset_of;
use std::os::fd::RawFd;

use mlx5_abi::{CREATE_WQ_STRIDES, CreateQpRss, CreateWq, CreateWqResp, HASH_TOEPLITZ, hash_field};
use roce::bits::put32;
use softhca::command::opcode as op;
use softhca::layout::wq::wq_type;
use softhca::layout::{rqc, rqtc, tirc, wq};
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::write::{ExCreateRwqIndTable, ExCreateRwqIndTableResp, ExModifyWq};
use uverbs::{QpState, QpType};
use zerocopy::FromBytes;

use crate::driver::cause::{
    Class, Result, at_most, between, invalid, is, refuse, require, require_support, reserved,
    supported_bits,
};
use crate::driver::command::{Input, NUMBER, make, run};
use crate::driver::data::{Packet, WorkQueue};
use crate::driver::object::{Created, Events, Object, ObjectData, Qp, Summary};
use crate::driver::packet::{INTERFACE_LENGTH, PacketQueueContext};
use crate::driver::queues::{
    FLAGS_OF_LOOPBACK, NO_REGISTER, QueueAddresses, WQ, check_absent, check_driver_length,
    check_receives, check_user_index, loopback_flags,
};
use crate::driver::request::{Request, word};
use crate::driver::state::State;

/// Logarithms of the numbers of bytes of a stride, and of strides of a receive.
pub(crate) const STRIDE_BYTES: std::ops::RangeInclusive<u32> = 6..=13;
pub(crate) const STRIDES_PER_RECEIVE: std::ops::RangeInclusive<u32> = 9..=16;

/// `IB_UVERBS_WQ_FLAGS_CVLAN_STRIPPING`, the flag that the device has, and all that exist.
const STRIP_VLAN: u32 = 1 << 0;
const WQ_FLAGS: u32 = (1 << 4) - 1;

/// Logarithm of the largest table.
pub(crate) const LOG_MAX_TABLE: u32 = 12;

/// Bytes of a TIR's key.
const KEY_LENGTH: usize = 40;

/// Fields of headers that a hash can cover.
pub(crate) const HASH_FIELDS: u64 =
    hash_field::IPV4 | hash_field::IPV6 | hash_field::PORT_TCP | hash_field::PORT_UDP;

/// Returns the kind of addresses and ports that a hash covers, as a TIR says it: IPv6,
/// UDP, and the fields.
///
/// # Errors
/// EINVAL for both kinds of addresses or of ports; EOPNOTSUPP for unknown fields.
fn hash_fields(mask: u64) -> Result<(bool, bool, u32)> {
    supported_bits("rx_hash_fields_mask", mask, HASH_FIELDS)?;
    let of = |kind: u64| (mask & kind) >> kind.trailing_zeros();
    let (ipv4, ipv6) = (of(hash_field::IPV4), of(hash_field::IPV6));
    let (tcp, udp) = (of(hash_field::PORT_TCP), of(hash_field::PORT_UDP));
    let what = "rx_hash_fields_mask";
    require(
        ipv4 == 0 || ipv6 == 0,
        what,
        mask,
        Rule::Excludes(hash_field::IPV6),
    )?;
    require(
        tcp == 0 || udp == 0,
        what,
        mask,
        Rule::Excludes(hash_field::PORT_UDP),
    )?;
    let fields = ipv4 | ipv6 | (tcp | udp) << 2;
    Ok((ipv6 != 0, udp != 0, fields as u32))
}

impl ObjectData for WorkQueue {
    fn kind(&self) -> u16 {
        OBJECT_WQ
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "work queue",
            number: self.number,
            length: 0,
        }
    }

    fn events(&self) -> Option<&Events> {
        Some(&self.events)
    }

    fn represents(&self, object: Created) -> bool {
        object == Created::new(op::CREATE_RQ, self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_RQ, self.number)
    }

    fn report(&self, request: &mut Request) {
        self.events.report(request, ATTR_DESTROY_WQ_RESP);
    }
}

/// An indirection table of work queues.
#[derive(Debug)]
struct WqTable {
    number: u32,
}

impl ObjectData for WqTable {
    fn kind(&self) -> u16 {
        OBJECT_RWQ_IND_TBL
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "indirection table",
            number: self.number,
            length: 0,
        }
    }

    fn represents(&self, object: Created) -> bool {
        object == Created::new(op::CREATE_RQT, self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_RQT, self.number)
    }
}

/// Refuses a command with driver data that are not zero.
fn check_no_driver_data(request: &Request) -> Result<()> {
    let length = request.driver_length();
    require_support(
        request.driver_is_cleared(0),
        "driver input",
        length,
        Rule::Zero,
    )
}

impl State {
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_wq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// The version without strides.
        const MIN_LENGTH: usize = offset_of!(CreateWq, single_stride_log_num_of_bytes);
        let kind: u32 = request.constant(ATTR_CREATE_WQ_TYPE)?;
        require_support(self.has_packets(), "wq_type", kind, Rule::Supported)?;
        is("wq_type", kind, 0)?;
        check_driver_length(request, MIN_LENGTH)?;
        let flags = request.flags(ATTR_CREATE_WQ_FLAGS, WQ_FLAGS)?;
        let driver: CreateWq = request.driver();
        let (receives, shift) = (driver.rq_wqe_count, driver.rq_wqe_shift);
        let (user_index, features) = (driver.user_index, driver.comp_mask);
        // Signatures are not supported.
        supported_bits("flags", flags, STRIP_VLAN.into())?;
        supported_bits("comp_mask", features, CREATE_WQ_STRIDES.into())?;
        reserved("driver flags", driver.flags)?;
        check_receives(receives, shift)?;
        check_user_index(user_index)?;
        let pd = request.handle(ATTR_CREATE_WQ_PD_HANDLE)?;
        let cq = request.handle(ATTR_CREATE_WQ_CQ_HANDLE)?;
        let max_wr: u32 = request.value(ATTR_CREATE_WQ_MAX_WR)?;
        let max_sge: u32 = request.value(ATTR_CREATE_WQ_MAX_SGE)?;
        at_most("max_wr", max_wr, receives.into())?;
        let user_handle = request.value(ATTR_CREATE_WQ_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_WQ_EVENT_FD);
        let addresses = QueueAddresses {
            entries: driver.buf_addr,
            records: driver.db_addr,
        };
        let bytes = u64::from(receives) << shift;
        let context = PacketQueueContext {
            uid: self.uid(fd),
            user_index,
            cq: self.objects.cq(fd, cq)?.number,
            pd: self.objects.pd(fd, pd)?,
            entries: (addresses.entries, bytes),
            log_size: receives.ilog2(),
            log_stride: shift,
            records: addresses.records,
        };
        let input = context.receive_input(flags & STRIP_VLAN != 0, self.counter_set)?;
        let mut input = input.set(wq::WQ_TYPE.at(WQ), wq_type::CYCLIC);
        if features & CREATE_WQ_STRIDES != 0 {
            let log_bytes = driver.single_stride_log_num_of_bytes;
            let log_strides = driver.single_wqe_log_num_of_strides;
            let (least, most) = (*STRIDE_BYTES.start(), *STRIDE_BYTES.end());
            let bounds = (least.into(), most.into());
            between("single_stride_log_num_of_bytes", log_bytes, bounds)?;
            let (least, most) = (*STRIDES_PER_RECEIVE.start(), *STRIDES_PER_RECEIVE.end());
            let bounds = (least.into(), most.into());
            between("single_wqe_log_num_of_strides", log_strides, bounds)?;
            input = input.fields(
                WQ,
                [
                    (wq::WQ_TYPE, wq_type::CYCLIC_STRIDING),
                    (wq::LOG_WQE_STRIDE_SIZE, log_bytes - STRIDE_BYTES.start()),
                    (
                        wq::LOG_WQE_NUM_OF_STRIDES,
                        log_strides - STRIDES_PER_RECEIVE.start(),
                    ),
                    (
                        wq::TWO_BYTE_SHIFT_EN,
                        u32::from(driver.two_byte_shift_en != 0),
                    ),
                ],
            );
        }
        let ranges = addresses.ranges(bytes)?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        let handle = self.objects.insert(
            Object::new(
                fd,
                WorkQueue {
                    number,
                    state: RESET,
                    events,
                },
            )
            .using(vec![pd, cq])
            .with_memory(ranges),
        );
        request.set_handle(ATTR_CREATE_WQ_HANDLE, handle);
        request.answer(ATTR_CREATE_WQ_RESP_MAX_WR, &max_wr);
        request.answer(ATTR_CREATE_WQ_RESP_MAX_SGE, &max_sge);
        request.answer(ATTR_CREATE_WQ_RESP_WQ_NUM, &number);
        request.driver_answer(&CreateWqResp {
            response_length: size_of::<CreateWqResp>() as u32,
            reserved: 0,
        });
        Ok(())
    }

    pub(crate) fn modify_wq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        const CHANGE_STATE: u32 = 1 << 0;
        const CHECK_STATE: u32 = 1 << 1;
        const CHANGE_FLAGS: u32 = 1 << 2;
        let requested: ExModifyWq = request.core()?;
        let known = CHANGE_STATE | CHECK_STATE | CHANGE_FLAGS;
        between("attr_mask", requested.attr_mask, (1, known.into()))?;
        check_no_driver_data(request)?;
        let has = |bit: u32| requested.attr_mask & bit != 0;
        let WorkQueue { number, state, .. } = *self.objects.wq(fd, requested.wq_handle)?;
        let current = if has(CHECK_STATE) {
            requested.curr_wq_state
        } else {
            state
        };
        let next = if has(CHANGE_STATE) {
            requested.wq_state
        } else {
            current
        };
        is("curr_wq_state", current, state.into())?;
        at_most("wq_state", next, ERROR.into())?;
        let mut input = Input::new(op::MODIFY_RQ, INTERFACE_LENGTH)
            .set(NUMBER, number)
            .set(rqc::RQ_STATE, device_state(current))
            .set(rqc::STATE.at(rqc::AT), device_state(next));
        if has(CHANGE_FLAGS) && requested.flags_mask != 0 {
            supported_bits("flags_mask", requested.flags_mask, STRIP_VLAN.into())?;
            input = input.long(rqc::MODIFY_BITMASK, rqc::MODIFY_VSD).set(
                rqc::VSD.at(rqc::AT),
                u32::from(requested.flags & STRIP_VLAN == 0),
            );
        }
        run(&mut self.hca, &input, 16)?;
        self.objects.wq_mut(fd, requested.wq_handle)?.state = next;
        Ok(())
    }

    pub(crate) fn create_wq_table(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let bytes = request.bytes(ATTR_CORE_IN).unwrap_or_default();
        let Ok((requested, list)) = ExCreateRwqIndTable::read_from_prefix(&bytes) else {
            let least = Rule::AtLeast(size_of::<ExCreateRwqIndTable>() as u64);
            return refuse(Class::NoSpace, "length of the input", bytes.len(), least);
        };
        reserved("comp_mask", requested.comp_mask)?;
        check_no_driver_data(request)?;
        at_most(
            "log_ind_tbl_size",
            requested.log_ind_tbl_size,
            LOG_MAX_TABLE.into(),
        )?;
        let count = 1 << requested.log_ind_tbl_size;
        let Some((list, padding)) = list.split_at_checked(4 * count) else {
            let least = Rule::AtLeast(4 * count as u64);
            return invalid("length of the list", list.len(), least);
        };
        let is_padding = padding.iter().all(|byte| *byte == 0);
        require(is_padding, "length of the input", bytes.len(), Rule::Zero)?;
        let mut input = vec![0; 4 * count];
        let mut dependencies = Vec::with_capacity(count);
        for (at, handle) in list.chunks_exact(4).enumerate() {
            let handle = word(handle, 0);
            put32(&mut input, 4 * at, self.objects.wq(fd, handle)?.number);
            dependencies.push(handle);
        }
        let input = Input::new(op::CREATE_RQT, rqtc::AT + rqtc::RQ_NUM + input.len())
            .by(self.uid(fd))
            .fields(
                rqtc::AT,
                [
                    (rqtc::RQT_MAX_SIZE, count as u32),
                    (rqtc::RQT_ACTUAL_SIZE, count as u32),
                ],
            )
            .bytes(rqtc::AT + rqtc::RQ_NUM, &input);
        let number = make(&mut self.hca, &input)?;
        let ind_tbl_handle = self
            .objects
            .insert(Object::new(fd, WqTable { number }).using(dependencies));
        request.core_answer(&ExCreateRwqIndTableResp {
            response_length: size_of::<ExCreateRwqIndTableResp>() as u32,
            ind_tbl_handle,
            ind_tbl_num: number,
            ..ExCreateRwqIndTableResp::default()
        });
        Ok(())
    }

    /// Creates a queue pair whose packets the work queues of a table receive. It has no
    /// queue and no state of its own.
    pub(crate) fn create_rss_qp(
        &mut self,
        fd: RawFd,
        request: &mut Request,
        table: u32,
    ) -> Result<()> {
        check_driver_length(request, size_of::<CreateQpRss>())?;
        let queues = [
            ATTR_CREATE_QP_SEND_CQ_HANDLE,
            ATTR_CREATE_QP_RECV_CQ_HANDLE,
            ATTR_CREATE_QP_SRQ_HANDLE,
        ];
        check_absent(request, &queues)?;
        request.flags(ATTR_CREATE_QP_FLAGS, 0)?;
        let driver: CreateQpRss = request.driver();
        reserved("comp_mask", driver.comp_mask)?;
        supported_bits("driver flags", driver.flags, FLAGS_OF_LOOPBACK.into())?;
        for byte in driver.reserved {
            reserved("reserved", byte)?;
        }
        let (ipv6, udp, fields) = hash_fields(driver.rx_hash_fields_mask)?;
        let number = self.objects.typed::<WqTable>(fd, table)?.number;
        let pd = request.handle(ATTR_CREATE_QP_PD_HANDLE)?;
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let mut input = Input::new(op::CREATE_TIR, INTERFACE_LENGTH)
            .by(self.uid(fd))
            .fields(
                tirc::AT,
                [
                    (tirc::DISP_TYPE, tirc::DISP_TYPE_INDIRECT),
                    (tirc::INDIRECT_TABLE, number),
                    (tirc::SELF_LB_BLOCK, loopback_flags(driver.flags)),
                    (tirc::TRANSPORT_DOMAIN, self.transport_domain(fd)?),
                ],
            );
        // Without fields all packets have the same hash.
        if fields != 0 {
            let function = driver.rx_hash_function;
            let known = Rule::Is(HASH_TOEPLITZ.into());
            require_support(
                function == HASH_TOEPLITZ,
                "rx_hash_function",
                function,
                known,
            )?;
            is("rx_key_len", driver.rx_key_len, KEY_LENGTH as u64)?;
            input = input
                .set(tirc::RX_HASH_FN.at(tirc::AT), tirc::RX_HASH_FN_TOEPLITZ)
                .bytes(
                    tirc::AT + tirc::RX_HASH_TOEPLITZ_KEY,
                    &driver.rx_hash_key[..KEY_LENGTH],
                )
                .fields(
                    tirc::AT,
                    [
                        (tirc::L3_PROT_TYPE, ipv6.into()),
                        (tirc::L4_PROT_TYPE, udp.into()),
                        (tirc::SELECTED_FIELDS, fields),
                    ],
                );
        }
        let access = self.open_packets()?;
        let packet = Packet {
            state: QpState::RESET,
            tis: None,
            sq: None,
            rq: None,
            tir: Some(make(&mut self.hca, &input)?),
        };
        let qp = Qp {
            _access: access,
            packet: Some(packet),
            ..Qp::without_queues(0, QpType::RAW_PACKET, events)
        };
        let object = Object::new(fd, qp).using(vec![pd, table]);
        let answer = crate::driver::packet::answer(&packet, NO_REGISTER, self.uid(fd));
        self.add_qp(request, object, 0, [0; 5], answer);
        Ok(())
    }
}

/// States of a work queue (`IB_UVERBS_WQS_*`), and of the device's receive queue.
const RESET: u32 = 0;
const ERROR: u32 = 2;

fn device_state(state: u32) -> u32 {
    if state == ERROR {
        rqc::state::ERR
    } else {
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_covers_one_kind_of_addresses_and_ports() {
        let fields = |mask| hash_fields(mask).map_err(|error| error.errno().raw());
        assert_eq!(fields(0), Ok((false, false, 0)));
        assert_eq!(fields(0b11 | 0b10 << 4), Ok((false, false, 0b1011)));
        assert_eq!(fields(0b01 << 2 | 0b11 << 6), Ok((true, true, 0b1101)));
        assert_eq!(fields(0b01 | 0b01 << 2), Err(libc::EINVAL));
        assert_eq!(fields(0b01 << 4 | 0b01 << 6), Err(libc::EINVAL));
        assert_eq!(fields(1 << 31), Err(libc::EOPNOTSUPP));
    }
}
