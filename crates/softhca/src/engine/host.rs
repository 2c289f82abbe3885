//! Implementation of the transport's [`Host`]: work requests, memory, completions.

use std::sync::Arc;

use roce::packet::{L3, Link, Path, Payload};
use roce::rule::{Rule, Violation};
use roce::transport::{
    Access, AtomicOp, Counted, EngineError, Failure, Fault, Host, MessageStart, Operation,
    QpConfig, QpEvent, QpState, RecvDone, RecvKind, RecvWork, SendDone, SendWork, Service, Source,
    Status, Target,
};

use super::core::Core;
use super::cq::{self, Completion, CqeError};
use super::eq::event;
use super::mkey::{Accessor, BrokenRule, Location, Rights, Translation};
use super::qp::{Qp, SendId};
use super::signed::AccessingQp;
use super::srq::{SRQN_SHIFT, Srq};
use super::tag_matching::{self, MatchResult};
use super::tags::TaggedReceive;
use super::wqe::{CqeScatter, LocalBuffers, opcode};
use crate::cause::{AccessError, AccessRule, Cause, WorkRequest};
use crate::platform::{LONGEST_COPY, Platform};
use crate::profile::{Group, cap};
use crate::work::MAX_DATA;

/// Of an access to memory that is not mapped, though all rules of keys hold.
const NOT_MAPPED: BrokenRule = BrokenRule {
    rule: AccessRule::Mapped,
    inner: None,
};

/// Returns the syndromes of a send that ended with a status. Those of ConnectX cards, as far
/// as they are known.
fn send_error(status: Status, request: u8) -> CqeError {
    let (syndrome, vendor, hardware) = match status {
        Status::Success => (0, 0, 0),
        Status::LocalLength => (0x01, 0x6b, 0),
        Status::LocalQpOperation => (0x02, 0x61, 0x01),
        Status::LocalProtection if is_send(request) => (0x04, 0x52, 0x93),
        Status::LocalProtection => (0x04, 0x53, 0x9d),
        Status::Flushed => (0x05, 0xf9, 0),
        Status::MemoryBind => (0x06, 0x53, 0),
        Status::BadResponse => (0x10, 0x69, 0),
        Status::LocalAccess => (0x11, 0x52, 0),
        Status::RemoteInvalidRequest => (0x12, 0x8a, 0),
        Status::RemoteAccess => (0x13, 0x88, 0),
        Status::RemoteOperation => (0x14, 0x89, 0),
        Status::RetryExceeded => (0x15, 0x81, 0),
        Status::RnrRetryExceeded => (0x16, 0x87, 0),
        Status::RemoteAborted => (0x22, 0x8b, 0),
        Status::Returned => (0x22, 0x93, 0),
        Status::Fatal => (0x02, 0x01, 0),
    };
    CqeError::new(syndrome, vendor, hardware)
}

fn is_send(request: u8) -> bool {
    matches!(
        request,
        opcode::SEND | opcode::SEND_IMM | opcode::SEND_INVALIDATE
    )
}

/// As [`send_error`], of a receive.
fn receive_error(status: Status) -> CqeError {
    match status {
        Status::LocalLength => CqeError::new(0x01, 0xd7, 0),
        Status::LocalProtection => CqeError::new(0x04, 0x32, 0x92),
        Status::LocalAccess => CqeError::new(0x11, 0xc2, 0x92),
        other => send_error(other, opcode::NOP),
    }
}

impl<P: Platform> Core<P> {
    /// Returns whether the peer retransmits a message that the queue pair cannot accept now.
    pub(super) fn peer_retransmits(&self, qpn: u32) -> bool {
        self.qp(qpn)
            .is_some_and(|qp| qp.config.service.is_reliable() && !qp.is_in_error())
    }

    /// Returns the accessor for remote access through a queue pair.
    fn accessor(&self, target: Target) -> Result<Accessor, Fault> {
        let qp = self.qp(target.qpn).ok_or(Fault::Protection)?;
        let srq = match target.xrc_srqn {
            Some(srqn) => Some(self.xrc_srq(qp, srqn).ok_or(Fault::Protection)?),
            None => None,
        };
        Ok(Accessor {
            qpn: target.qpn,
            pd: srq.map_or(qp.pd, |srq| srq.pd),
            privileged: false,
        })
    }

    /// Returns the SRQ that the peer of an XRC target names; it must be in the target's
    /// XRC domain.
    fn xrc_srq(&self, target: &Qp, srqn: u32) -> Option<&Srq> {
        let srq = self.srqs.get(srqn)?;
        (srq.xrcd.is_some() && srq.xrcd == target.xrcd).then_some(srq)
    }

    fn local_accessor(qpn: u32, local: &LocalBuffers) -> Accessor {
        Accessor {
            qpn,
            pd: local.pd,
            privileged: local.privileged,
        }
    }

    /// Returns whether atomics use the host's byte order.
    fn has_little_endian_atomics(&self) -> bool {
        cap::ATOMIC_ENDIANNESS_MODE.get(self.capabilities.current(Group::Atomic)) == 1
    }

    /// Calls `each` for the parts of a scatter/gather list that hold `length` bytes
    /// from `offset` on.
    fn each_segment(
        local: &LocalBuffers,
        offset: u32,
        length: usize,
        mut each: impl FnMut(u32, u64, std::ops::Range<usize>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut skip = u64::from(offset);
        let mut done = 0usize;
        for segment in local.segments.iter() {
            if done == length {
                return Ok(());
            }
            let of = u64::from(segment.length);
            if skip >= of {
                skip -= of;
                continue;
            }
            let n = (length - done).min((of - skip) as usize);
            each(segment.key, segment.va.wrapping_add(skip), done..done + n)?;
            skip = 0;
            done += n;
        }
        if done == length {
            Ok(())
        } else {
            Err(Fault::Protection)
        }
    }

    /// Tells the observer why an access with a key has failed.
    #[inline]
    pub(super) fn observe_access<T>(
        &mut self,
        result: &Result<T, Fault>,
        accessor: Accessor,
        key: u32,
        (va, length): (u64, u64),
        rights: Rights,
    ) {
        if matches!(result, Err(Fault::Protection | Fault::Memory)) {
            self.tell_broken_rule(accessor, key, (va, length), rights);
        }
    }

    #[cold]
    fn tell_broken_rule(
        &mut self,
        accessor: Accessor,
        key: u32,
        (va, length): (u64, u64),
        rights: Rights,
    ) {
        self.observe(|core| {
            let broken = core.broken_rule(accessor, key, (va, length), rights);
            // All rules of keys hold: the access itself has failed.
            let broken = broken.unwrap_or(NOT_MAPPED);
            Some(Cause::Access(AccessError {
                qpn: accessor.qpn,
                key,
                va,
                length,
                rule: broken.rule,
                inner: broken.inner,
            }))
        });
    }

    /// Tells the observer that a key could not be invalidated.
    fn observe_invalidation(&mut self, result: Result<(), Fault>, qpn: u32, key: u32) {
        if result.is_err() {
            self.observe(|_| {
                Some(Cause::Access(AccessError {
                    qpn,
                    key,
                    va: 0,
                    length: 0,
                    rule: AccessRule::Invalidation,
                    inner: None,
                }))
            });
        }
    }

    /// Tells the observer why an access to `length` bytes of a scatter/gather list has failed.
    fn observe_list(
        &mut self,
        result: Result<(), Fault>,
        local: &LocalBuffers,
        qpn: u32,
        (offset, length): (u32, usize),
        rights: Rights,
    ) {
        if !matches!(result, Err(Fault::Protection | Fault::Memory)) {
            return;
        }
        self.observe(|core| {
            let accessor = Self::local_accessor(qpn, local);
            let mut last = (0, 0, 0);
            let mut broken = None;
            let walked = Self::each_segment(local, offset, length, |key, va, range| {
                last = (key, va, range.len() as u64);
                broken = core.broken_rule(accessor, key, (va, last.2), rights);
                broken.map_or(Ok(()), |_| Err(Fault::Protection))
            });
            let bytes = || local.segments.iter().map(|it| u64::from(it.length)).sum();
            let (key, va, length) = last;
            let BrokenRule { rule, inner } = match (broken, walked) {
                (Some(broken), _) => broken,
                (None, Err(_)) => BrokenRule {
                    rule: AccessRule::List(bytes()),
                    inner: None,
                },
                (None, Ok(())) => NOT_MAPPED,
            };
            Some(Cause::Access(AccessError {
                qpn,
                key,
                va,
                length,
                rule,
                inner,
            }))
        });
    }

    /// Describes a work request of a send queue.
    pub(super) fn described_send(
        &self,
        qpn: u32,
        work: &SendWork<LocalBuffers>,
    ) -> Option<WorkRequest> {
        let config = &self.qp(qpn)?.config;
        let is_malformed = work.refused.is_some();
        let is_local = is_malformed || matches!(work.operation, Operation::Local);
        let has_remote = !is_malformed
            && (work.operation.is_read_or_atomic()
                || matches!(work.operation, Operation::Write | Operation::WriteImm));
        let connected = (config.service != Service::Ud).then_some(config.remote_qpn);
        let datagram = work.datagram.as_ref();
        let path = datagram.map(|it| &it.path).or(config.path.as_ref());
        let is_loopback = path.is_some_and(|path| match (path.grh, path.link) {
            (Some(grh), _) => grh.sgid == grh.dgid,
            (None, Link::Ib { slid, dlid, .. }) => slid == dlid,
            _ => false,
        });
        let (buffers, buffer_count) = work.local.listed();
        Some(WorkRequest {
            qpn,
            service: config.service,
            number: Some(SendId::unpack(work.id).number),
            operation: Some(work.operation),
            length: if is_local { 0 } else { work.length },
            buffers,
            buffer_count: if is_local { 0 } else { buffer_count },
            remote: has_remote.then_some((work.va, work.rkey)),
            peer: datagram.map(|it| it.qpn).or(connected),
            path: path.copied(),
            is_loopback,
            is_malformed,
        })
    }

    /// Returns the data of an RDMA write as they are now, unless it is too long or its data are
    /// made as they are read.
    pub(super) fn posted_data(&self, qpn: u32, work: &SendWork<LocalBuffers>) -> Option<Arc<[u8]>> {
        let is_write = matches!(work.operation, Operation::Write | Operation::WriteImm);
        if !is_write || work.refused.is_some() || work.length > MAX_DATA {
            return None;
        }
        let local = &work.local;
        let mut data = local.inline.clone();
        let start = data.len();
        data.resize(start.max(work.length as usize), 0);
        let out = &mut data[start..];
        let accessor = Self::local_accessor(qpn, local);
        let read = Self::each_segment(local, 0, out.len(), |key, va, range| {
            match self.is_protected(key) {
                true => Err(Fault::Protection),
                false => self.read_key(accessor, key, va, &mut out[range], Rights::LOCAL_READ),
            }
        });
        read.is_ok().then(|| data.into())
    }

    /// Describes a work request of a receive queue.
    pub(super) fn described_receive(
        &self,
        qpn: u32,
        work: &RecvWork<LocalBuffers>,
    ) -> Option<WorkRequest> {
        let (buffers, buffer_count) = work.local.listed();
        Some(WorkRequest {
            qpn,
            service: self.qp(qpn)?.service,
            // Those of an SRQ are not taken in the order of its ring.
            number: (work.id >> SRQN_SHIFT == 0).then_some(work.id as u32),
            operation: None,
            length: work.length,
            buffers,
            buffer_count,
            remote: None,
            peer: None,
            path: None,
            is_loopback: false,
            is_malformed: false,
        })
    }

    fn store(
        &mut self,
        qpn: u32,
        local: &LocalBuffers,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Fault> {
        let accessor = Self::local_accessor(qpn, local);
        let accessing_qp = AccessingQp {
            qpn,
            is_requester: !local.receives,
        };
        Self::each_segment(local, offset, data.len(), |key, va, range| {
            let data = &data[range];
            self.write_in_wire_format(accessing_qp, accessor, key, va, data, Rights::LOCAL_WRITE)
        })
    }

    /// Returns whether the poller can write to the buffers by their addresses: those of device
    /// memory and of regions that begin at 0 are offsets. Of a ConnectX it is not known what it
    /// does with these; the poller would write elsewhere.
    fn has_addresses(&self, local: &LocalBuffers) -> bool {
        local.segments.iter().all(|segment| {
            let mkey = self.mkeys.get(segment.key >> 8);
            mkey.is_none_or(|mkey| {
                let has_start = mkey.start != 0 || mkey.length64;
                has_start && !matches!(mkey.translation, Translation::Device(_))
            })
        })
    }

    /// Stores received data in memory, or keeps it to be scattered into the CQE.
    fn scatter_or_store(
        &mut self,
        qpn: u32,
        local: &mut LocalBuffers,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Fault> {
        let end = offset as usize + data.len();
        let fits = local.cqe_scatter.as_ref().is_some_and(|cqe_scatter| {
            end <= usize::from(cqe_scatter.limit)
                && offset as usize <= usize::from(cqe_scatter.length)
                && self.has_addresses(local)
        });
        if fits {
            // The data must fit into accessible memory, although the poller copies it
            // there.
            let accessor = Self::local_accessor(qpn, local);
            Self::each_segment(local, offset, data.len(), |key, va, range| {
                let length = range.len() as u64;
                self.translate(
                    accessor,
                    key,
                    va,
                    length,
                    Rights::LOCAL_WRITE,
                    &mut |_, _, _| Ok(()),
                )
            })?;
            if let Some(cqe_scatter) = &mut local.cqe_scatter {
                cqe_scatter.bytes[offset as usize..end].copy_from_slice(data);
                cqe_scatter.length = end as u8;
            }
            return Ok(());
        }
        if local.cqe_scatter.is_some() {
            // Too long for the CQE after all.
            let scattered = local.cqe_scatter.take();
            let data = scattered
                .as_ref()
                .map(|scattered| &scattered.bytes[..usize::from(scattered.length)]);
            self.store(qpn, local, 0, data.unwrap_or_default())?;
        }
        self.store(qpn, local, offset, data)
    }

    pub(crate) fn count_in(
        &mut self,
        counter_set: u32,
        change: impl FnOnce(&mut super::counters::QCounters),
    ) {
        if let Some(set) = self.q_counters.get_mut(counter_set) {
            change(set);
        }
    }

    /// Counts a peer's access with a key.
    fn count_access(&mut self, (qpn, key): (u32, u32), access: Access, result: &Result<(), Fault>) {
        if result.is_ok() {
            self.platform.peer_accesses(qpn, key, access);
        }
        let set = self.counter_set(qpn);
        self.count_in(set, |set| match (access, result) {
            (_, Err(Fault::Absent)) => {}
            (_, Err(_)) => set.resp_remote_access_errors += 1,
            (Access::Read, _) => set.rx_read_requests += 1,
            (Access::Write, _) => set.rx_write_requests += 1,
            (Access::Atomic, _) => set.rx_atomic_requests += 1,
        });
    }

    fn counter_set(&self, qpn: u32) -> u32 {
        self.qp(qpn).map_or(u32::MAX, |qp| qp.counter_set)
    }

    /// Sets the fields of a CQE that describe the source of a message to a queue pair.
    fn set_source_fields(completion: &mut Completion<'_>, source: &Source, config: &QpConfig) {
        let l3 = match source.l3 {
            L3::None => 0,
            L3::Grh => 1,
            L3::Ipv6 => 1,
            L3::Ipv4 => 2,
        };
        completion.flags_rqpn = source.qpn & 0xff_ffff;
        // The path of a connection is known.
        let connected = !matches!(config.service, Service::Ud | Service::DcTarget);
        if source.l3 != L3::None && !connected {
            completion.flags_rqpn |= 1 << 28;
        }
        match source.link {
            Link::Ib { slid, dlid, sl } => {
                completion.slid = slid;
                completion.flags_rqpn |= u32::from(sl & 0xf) << 24;
                completion.ml_path = (dlid & 0x7f) as u8;
                if source.multicast {
                    completion.ml_path |= 0x80;
                }
            }
            Link::Ether { .. } | Link::Ip => {
                // Network header: RoCE v1, RoCE v2 over IPv6, RoCE v2 over IPv4.
                let l3 = if source.l3 == L3::Grh { 0 } else { l3 };
                completion.flags_rqpn |= l3 << 24;
                if let Link::Ether {
                    vlan: Some(vlan), ..
                } = source.link
                {
                    completion.l3_l4 |= 1;
                    completion.vlan = vlan;
                }
            }
        }
        if config.any_pkey {
            completion.immediate = u32::from(source.pkey);
        }
    }
}

impl<P: Platform> Host for Core<P> {
    type LocalBuffers = LocalBuffers;

    fn next_send(&mut self, qpn: u32) -> Option<SendWork<LocalBuffers>> {
        self.next_send_work(qpn)
    }

    fn is_peer_stopped(&self, path: &Path, qpn: u32) -> bool {
        self.platform.is_stopped(path, qpn)
    }

    fn max_silence(&self, path: &Path, qpn: u32) -> u64 {
        self.platform.max_silence(path, qpn)
    }

    fn gather(
        &mut self,
        qpn: u32,
        local: &mut LocalBuffers,
        offset: u32,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        let length = out.len();
        if let Some(follower) = &mut self.follower {
            follower.reads(qpn, local.number);
        }
        let inline = local.inline.get(offset as usize..).unwrap_or_default();
        let (data, out) = out.split_at_mut(inline.len().min(out.len()));
        data.copy_from_slice(&inline[..data.len()]);
        let offset = offset.saturating_sub(local.inline.len() as u32);
        let accessor = Self::local_accessor(qpn, local);
        let accessing_qp = AccessingQp {
            qpn,
            is_requester: true,
        };
        let result = Self::each_segment(local, offset, out.len(), |key, va, range| {
            let out = &mut out[range];
            self.read_in_wire_format(accessing_qp, accessor, key, va, out, Rights::LOCAL_READ)
        });
        if result.is_ok() {
            self.stats.bytes_gathered += length as u64;
        }
        self.observe_list(result, local, qpn, (offset, out.len()), Rights::LOCAL_READ);
        self.request_absent_page(result)
    }

    fn locate(
        &mut self,
        qpn: u32,
        local: &LocalBuffers,
        offset: u32,
        length: usize,
    ) -> Option<u64> {
        if !local.inline.is_empty() {
            return None;
        }
        let accessor = Self::local_accessor(qpn, local);
        let mut location = None;
        let result = Self::each_segment(local, offset, length, |key, va, range| {
            if range.len() == length {
                location = self.contiguous_address(accessor, key, va, length, Rights::LOCAL_READ);
            }
            Ok(())
        });
        let location =
            location.filter(|at| result.is_ok() && self.platform.copies_from(*at, length))?;
        if let Some(follower) = &mut self.follower {
            follower.reads(qpn, local.number);
        }
        self.platform.before_gather(qpn, location, length);
        Some(location)
    }

    fn scatter(
        &mut self,
        qpn: u32,
        local: &mut LocalBuffers,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Fault> {
        let (offset, data) = match &local.tagging {
            Some(tagging) => tagging.stored(offset, data),
            None => (offset, data),
        };
        let result = self.scatter_or_store(qpn, local, offset, data);
        if result.is_ok() {
            self.stats.bytes_scattered += data.len() as u64;
        }
        self.observe_list(
            result,
            local,
            qpn,
            (offset, data.len()),
            Rights::LOCAL_WRITE,
        );
        self.request_absent_page(result)
    }

    fn store_atomic(
        &mut self,
        qpn: u32,
        local: &mut LocalBuffers,
        value: u64,
    ) -> Result<(), Fault> {
        let bytes = if self.has_little_endian_atomics() {
            value.to_le_bytes()
        } else {
            value.to_be_bytes()
        };
        let result = self.scatter_or_store(qpn, local, 0, &bytes);
        if result.is_ok() {
            self.stats.bytes_scattered += bytes.len() as u64;
        }
        self.observe_list(result, local, qpn, (0, bytes.len()), Rights::LOCAL_WRITE);
        self.request_absent_page(result)
    }

    fn run_local(
        &mut self,
        qpn: u32,
        work: &mut SendWork<LocalBuffers>,
    ) -> Result<(), EngineError> {
        let id = SendId::unpack(work.id);
        let accessor = Self::local_accessor(qpn, &work.local);
        // For local operations, `inline` holds the WQE.
        let entry = std::mem::take(&mut work.local.inline);
        let result = match id.opcode {
            opcode::NOP => return Ok(()),
            opcode::LOCAL_INVALIDATE => {
                let result = self.invalidate_key(accessor, work.imm, true);
                self.observe_invalidation(result, qpn, work.imm);
                // The observer has been told which rule of keys it breaks.
                return result.map_err(|_| EngineError {
                    status: Status::MemoryBind,
                    violation: Violation::new("memory key", work.imm, Rule::Permitted),
                });
            }
            opcode::UMR => {
                let changed = self.change_key(accessor, work.imm, &entry);
                changed.map_err(|violation| (Status::MemoryBind, violation))
            }
            opcode::SET_PSV => {
                let set = self.set_psv(accessor, &entry);
                set.map_err(|violation| (Status::LocalQpOperation, violation))
            }
            opcode::MMO => self.copy_memory(accessor, &entry),
            opcode::TAG_MATCHING => {
                let executed = self.execute_tag_operation(qpn, id.index, &entry);
                executed.map_err(|violation| (Status::LocalQpOperation, violation))
            }
            opcode => {
                let violation = Violation::new("opcode", opcode, Rule::Known);
                Err((Status::LocalQpOperation, violation))
            }
        };
        result.map_err(|(status, violation)| {
            // The observer has been told about memory that cannot be accessed.
            if status != Status::LocalProtection {
                self.report_work_request(qpn, id.index, violation);
            }
            EngineError { status, violation }
        })
    }

    fn send_done(&mut self, qpn: u32, work: SendWork<LocalBuffers>, done: SendDone) {
        if tag_matching::is_device_request(work.id) {
            self.transfer_done(qpn, work.id, done);
            return;
        }
        let id = SendId::unpack(work.id);
        let Some(qp) = self.qp(qpn) else { return };
        let (cqn, uidx, counter_set) = (qp.send_cq, qp.uidx, qp.counter_set);
        if self.follower.is_some() {
            self.follow_send_done(qpn, &work, &done);
        }
        if done.status() == Status::Success {
            // Those of reads and atomics are counted when they are scattered.
            if !work.operation.is_read_or_atomic() && work.operation != Operation::Local {
                self.stats.bytes_delivered += u64::from(done.length);
            }
            if !id.signaled {
                return;
            }
            self.complete(
                cqn,
                &Completion {
                    opcode: cq::opcode::REQUESTER,
                    qpn,
                    request: id.opcode,
                    uidx,
                    wqe_counter: id.index,
                    byte_count: if work.operation.is_read_or_atomic() {
                        done.length
                    } else {
                        0
                    },
                    data: work.local.cqe_data(),
                    ..Completion::default()
                },
            );
            return;
        }
        self.count_in(counter_set, |set| {
            set.req_cqe_error += 1;
            match done.status() {
                Status::Flushed => set.req_cqe_flush_error += 1,
                Status::LocalLength => set.req_local_length_error += 1,
                Status::RemoteInvalidRequest => set.req_remote_invalid_request += 1,
                Status::RemoteAccess => set.req_remote_access_errors += 1,
                Status::RetryExceeded => set.transport_retries_exceeded += 1,
                _ => {}
            }
        });
        if done.status() != Status::Flushed {
            self.observe(|core| core.described_send(qpn, &work).map(Cause::WorkRequest));
        }
        self.complete(
            cqn,
            &Completion {
                opcode: cq::opcode::REQUESTER_ERROR,
                qpn,
                request: id.opcode,
                uidx,
                wqe_counter: id.index,
                error: Some(send_error(done.status(), id.opcode)),
                ..Completion::default()
            },
        );
    }

    fn may_name(&self, qpn: u32, xrc_srqn: u32) -> bool {
        self.qp(qpn)
            .is_some_and(|qp| self.xrc_srq(qp, xrc_srqn).is_some())
    }

    fn next_recv(
        &mut self,
        qpn: u32,
        xrc_srqn: Option<u32>,
        start: Option<&MessageStart<'_>>,
    ) -> Option<RecvWork<LocalBuffers>> {
        let (srqn, limit) = {
            let qp = self.qp(qpn)?;
            (xrc_srqn.or(qp.srqn), qp.recv_scatter_limit)
        };
        if self.chaos.is_some() && self.is_not_ready(qpn) {
            return None;
        }
        let mut tagging = None;
        if let Some((srqn, start)) = srqn.zip(start) {
            match self.match_tag(qpn, srqn, start) {
                Some(MatchResult::Buffer(mut work)) => {
                    // A CQE of 64 bytes has no room beside the header.
                    let limit = if start.single_packet && limit > 32 {
                        limit
                    } else {
                        0
                    };
                    work.local.cqe_scatter = CqeScatter::up_to(limit);
                    return Some(work);
                }
                Some(MatchResult::Wqe(of_wqe)) => tagging = Some(of_wqe),
                Some(MatchResult::NotReady) => return None,
                None => {}
            }
        }
        let work = match srqn {
            Some(srqn) => self.next_srq_receive(srqn),
            None => self.next_qp_receive(qpn),
        };
        match work {
            Some(work)
                if srqn.is_some()
                    && self.peer_retransmits(qpn)
                    && self.faults.return_receive(|| self.platform.now()) =>
            {
                self.stats.receives_returned += 1;
                let error = EngineError {
                    status: Status::Returned,
                    violation: Violation::new("receive", work.id, Rule::NoFault),
                };
                self.recv_done(qpn, work, RecvDone::failed(Failure::Engine(error)));
                None
            }
            Some(mut work) => {
                if xrc_srqn.is_none() {
                    work.local.cqe_scatter = CqeScatter::up_to(limit);
                }
                if let Some((srqn, tagging)) = srqn.zip(tagging) {
                    self.count_if_unexpected(srqn, &tagging);
                    work.local.tagging = Some(tagging);
                }
                work.length = self.convert_list(&mut work.local, work.length);
                Some(work)
            }
            None => {
                let in_error = self.qp(qpn).is_some_and(Qp::is_in_error);
                if !in_error {
                    let set = self.counter_set(qpn);
                    self.count_in(set, |set| set.out_of_buffer += 1);
                }
                None
            }
        }
    }

    fn recv_failed(&mut self, qpn: u32, work: &RecvWork<LocalBuffers>) {
        self.observe(|core| core.described_receive(qpn, work).map(Cause::WorkRequest));
    }

    fn recv_done(&mut self, qpn: u32, work: RecvWork<LocalBuffers>, done: RecvDone) -> bool {
        if self.follower.is_some() {
            self.follow_receive_done(qpn, &work, &done);
        }
        let Some(qp) = self.qp(qpn) else { return false };
        let counter_set = qp.counter_set;
        // The SRQ that the receive was taken from; the last packet of the message may
        // name another.
        let (cqn, uidx) = match self.srqs.get((work.id >> SRQN_SHIFT) as u32) {
            Some(srq) if qp.xrcd.is_some() || srq.tags.is_some() => (srq.cqn, srq.uidx),
            None if qp.xrcd.is_some() => return false,
            _ => (qp.recv_cq, qp.uidx),
        };
        let mut completion = Completion {
            qpn,
            uidx,
            // Index of the WQE in the SRQ, or running index in a receive queue.
            wqe_counter: work.id as u16,
            byte_count: done.length,
            solicited: done.solicited,
            ..Completion::default()
        };
        if done.status() == Status::Success {
            completion.opcode = match done.kind {
                RecvKind::Send => cq::opcode::SEND,
                RecvKind::SendImm => cq::opcode::SEND_IMM,
                RecvKind::SendInvalidate => cq::opcode::SEND_INVALIDATE,
                RecvKind::WriteImm => cq::opcode::WRITE_IMM,
            };
            if done.kind != RecvKind::Send {
                completion.immediate = done.imm;
            }
            if let Some(source) = &done.source {
                Self::set_source_fields(&mut completion, source, &qp.config);
            }
            if let Some(tagging) = &work.local.tagging {
                completion.tag = tagging.fields();
            }
            completion.data = work.local.cqe_data();
        } else {
            completion.opcode = cq::opcode::RESPONDER_ERROR;
            completion.byte_count = 0;
            completion.error = Some(receive_error(done.status()));
            self.count_in(counter_set, |set| {
                set.resp_cqe_error += 1;
                match done.status() {
                    Status::Flushed => set.resp_cqe_flush_error += 1,
                    Status::LocalLength => set.resp_local_length_error += 1,
                    _ => {}
                }
            });
        }
        if let Some(TaggedReceive::Buffer(tagged)) = &work.local.tagging {
            return self.complete_tagged(cqn, (&work, tagged), &done, completion);
        }
        self.complete(cqn, &completion);
        false
    }

    fn check_remote(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        length: u32,
        access: Access,
    ) -> Result<(), Fault> {
        let accessor = self.accessor(target)?;
        let rights = match access {
            Access::Read => Rights::REMOTE_READ,
            Access::Write => Rights::REMOTE_WRITE,
            Access::Atomic => Rights::ATOMIC,
        };
        let protected = self.check_protected(accessor, rkey, va, length, rights);
        let result = protected.unwrap_or_else(|| {
            self.translate(
                accessor,
                rkey,
                va,
                u64::from(length),
                rights,
                &mut |_, _, _| Ok(()),
            )
        });
        self.observe_access(&result, accessor, rkey, (va, length.into()), rights);
        let result = self.request_absent_page(result);
        self.count_access((target.qpn, rkey), access, &result);
        result
    }

    fn remote_write(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        data: Payload<'_>,
    ) -> Result<(), Fault> {
        let accessor = self.accessor(target)?;
        self.stats.remote_writes += 1;
        let accessing_qp = AccessingQp {
            qpn: target.qpn,
            is_requester: false,
        };
        let rights = Rights::REMOTE_WRITE;
        let result = match data {
            Payload::Bytes(data) => {
                self.write_in_wire_format(accessing_qp, accessor, rkey, va, data, rights)
            }
            Payload::Memory(from, length) => {
                self.stats.bytes_gathered += length as u64;
                match self.contiguous_address(accessor, rkey, va, length, rights) {
                    Some(to) => {
                        self.platform.before_scatter(target.qpn, to, length, true);
                        let copied = self.platform.copy(from, to, length);
                        copied.map_err(|_| Fault::Memory)
                    }
                    // The ranges may overlap: all is read before any of it is written.
                    None => {
                        let mut buffer = [0; LONGEST_COPY];
                        let data = &mut buffer[..length];
                        let read = self.platform.read(from, data).map_err(|_| Fault::Memory);
                        read.and_then(|()| {
                            self.write_in_wire_format(
                                accessing_qp,
                                accessor,
                                rkey,
                                va,
                                data,
                                rights,
                            )
                        })
                    }
                }
            }
        };
        if result.is_ok() {
            self.stats.bytes_scattered += data.len() as u64;
        }
        self.observe_access(&result, accessor, rkey, (va, data.len() as u64), rights);
        self.request_absent_page(result)
    }

    fn remote_read(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        let accessor = self.accessor(target)?;
        let accessing_qp = AccessingQp {
            qpn: target.qpn,
            is_requester: false,
        };
        let rights = Rights::REMOTE_READ;
        let result = self.read_in_wire_format(accessing_qp, accessor, rkey, va, out, rights);
        if result.is_ok() {
            self.stats.bytes_gathered += out.len() as u64;
            self.stats.bytes_delivered += out.len() as u64;
        }
        self.observe_access(&result, accessor, rkey, (va, out.len() as u64), rights);
        self.request_absent_page(result)
    }

    fn remote_atomic(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        operation: AtomicOp,
    ) -> Result<u64, Fault> {
        let accessor = self.accessor(target)?;
        let mut location = None;
        let found = self.translate(accessor, rkey, va, 8, Rights::ATOMIC, &mut |at, _, n| {
            location = (n == 8).then_some(at);
            Ok(())
        });
        self.observe_access(&found, accessor, rkey, (va, 8), Rights::ATOMIC);
        let found = self.request_absent_page(found);
        self.count_access((target.qpn, rkey), Access::Atomic, &found);
        found?;
        self.stats.remote_writes += 1;
        self.stats.bytes_gathered += 8;
        self.stats.bytes_scattered += 8;
        let location = location.ok_or(Fault::Protection)?;
        let little_endian = self.has_little_endian_atomics();
        let number = |bytes: [u8; 8]| {
            if little_endian {
                u64::from_le_bytes(bytes)
            } else {
                u64::from_be_bytes(bytes)
            }
        };
        let bytes = |number: u64| {
            if little_endian {
                number.to_le_bytes()
            } else {
                number.to_be_bytes()
            }
        };
        let mut change = |now| match operation {
            AtomicOp::FetchAdd { add } => Some(bytes(number(now).wrapping_add(add))),
            AtomicOp::CompareSwap { compare, swap } => {
                (number(now) == compare).then(|| bytes(swap))
            }
        };
        let before = match location {
            Location::Guest(at) => {
                self.platform.before_scatter(target.qpn, at, 8, true);
                let updated = self.platform.update(at, &mut change);
                updated.map_err(|_| Fault::Memory)?
            }
            Location::Device(at) => {
                let mut now = [0; 8];
                self.device_memory.read(at, &mut now)?;
                if let Some(new) = change(now) {
                    self.device_memory.write(at, &new)?;
                }
                now
            }
            // Only local access can resolve to the null key.
            Location::Null => return Err(Fault::Protection),
        };
        Ok(number(before))
    }

    fn invalidate(&mut self, target: Target, rkey: u32) -> Result<(), Fault> {
        let accessor = self.accessor(target)?;
        let result = self.invalidate_key(accessor, rkey, false);
        self.observe_invalidation(result, target.qpn, rkey);
        result
    }

    fn report(&mut self, qpn: Option<u32>, cause: roce::transport::Cause) {
        self.observe(|_| Some(Cause::Transport { qpn, cause }));
    }

    fn count(&mut self, qpn: u32, event: Counted) {
        let set = self.counter_set(qpn);
        self.count_in(set, |set| {
            let counter = match event {
                Counted::OutOfSequence => &mut set.out_of_sequence,
                Counted::Duplicate => &mut set.duplicate_request,
                Counted::SequenceNak => &mut set.packet_seq_err,
                Counted::ImpliedNak => &mut set.implied_nak_seq_err,
                Counted::RnrNak => &mut set.rnr_nak_retry_err,
                Counted::Timeout => &mut set.local_ack_timeout_err,
            };
            *counter = counter.wrapping_add(1);
        });
    }

    fn stops(&mut self, qpn: u32) -> bool {
        (self.qp_mut(qpn)).is_some_and(|qp| std::mem::take(&mut qp.drain_pending))
    }

    fn give_back(&mut self, qpn: u32, work: SendWork<LocalBuffers>) {
        if let Some(ring) = self.qp_mut(qpn).and_then(|qp| qp.send.as_mut()) {
            let id = SendId::unpack(work.id);
            (ring.head, ring.taken) = (id.index, id.number);
        }
    }

    fn event(&mut self, qpn: u32, qp_event: QpEvent) {
        tracing::debug!(qpn, ?qp_event, "queue pair");
        let kind = match qp_event {
            QpEvent::Established => event::COMM_EST,
            QpEvent::SqDrained => event::SQ_DRAINED,
            QpEvent::AccessError => event::WQ_ACCESS,
            QpEvent::RequestError => event::WQ_INVALID_REQUEST,
            QpEvent::LastWqe => event::SRQ_LAST_WQE,
            QpEvent::State(state) => {
                if let Some(qp) = self.qp_mut(qpn) {
                    qp.in_error = state == QpState::Error;
                }
                return;
            }
        };
        self.post_queue_pair_event(kind, qpn);
    }
}
