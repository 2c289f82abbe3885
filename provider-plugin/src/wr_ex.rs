//! Posting by function calls (`ibv_wr_*`).
//!
//! `wr_start` enters the queue's critical section. A builder (`wr_send` and so on)
//! opens a work request. The setter that completes it pushes it; if there is none,
//! the next builder or `wr_complete` does. `wr_complete` publishes the batch. After
//! the first error nothing is pushed; `wr_complete` discards the batch and returns
//! that error. `wr_abort` discards the batch as well.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::slice;

use uverbs::{Bind, Data, Destination, MwType, Opcode, Operands, RemoteMemory, SendFlags};
use uverbs::{SendWr, Sge};

use crate::abi::*;
use crate::access::Section;
use crate::ah::ah_of;
use crate::errno::Errno;
use crate::post::{scatter_list, window_bind};
use crate::qp::{Addressing, Qp, QpOps, qp_of};
use crate::writers::SendQueueOps;

/// State of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchState {
    /// The batch has failed, or there is none.
    Failed,
    /// No work request is open.
    Idle,
    /// A work request of a connected queue pair, without operands, is open; a data setter
    /// completes it.
    OpenSimple,
    /// Any other work request is open; its destination, if it needs one, is set.
    OpenAddressed,
    /// A work request is open; neither its destination nor its data is set yet.
    OpenUnaddressed,
    /// A work request is open; its data is copied until its destination is set.
    OpenData,
    /// A work request is open; its destination is written to the WQE already.
    OpenInWqe,
}

/// The batch of `ibv_wr_*`, and its open work request.
pub struct Batch<Q: SendQueueOps> {
    state: BatchState,
    /// The state after a work request was opened.
    initial: BatchState,
    /// The first error; EINVAL outside wr_start and wr_complete.
    errno: c_int,
    /// The open work request. It has no operands and no destination before
    /// [`open_with`] and [`set_destination`] set them, and no data unless that was set
    /// before the destination. References are to the members below, or to objects that the
    /// application keeps until the work request has been pushed.
    wr: SendWr<'static, Q::Address>,
    /// The format and control segment of the open work request.
    open_wqe: Q::OpenWqe,
    bind: Bind,
    /// Elements and inline data that were set before the destination.
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// The headers of a TSO packet.
    headers: Vec<u8>,
}

impl<Q: SendQueueOps> Default for Batch<Q> {
    fn default() -> Self {
        Self {
            state: BatchState::Failed,
            initial: BatchState::OpenSimple,
            errno: libc::EINVAL,
            wr: SendWr::new(0, Opcode::SEND, SendFlags::empty()),
            open_wqe: Q::OpenWqe::default(),
            bind: Bind {
                window_rkey: 0,
                rkey: 0,
                window_type: MwType::TYPE_1,
                lkey: 0,
                addr: 0,
                length: 0,
                access: 0,
            },
            sges: Vec::new(),
            inline: Vec::new(),
            headers: Vec::new(),
        }
    }
}

impl<Q: SendQueueOps> Batch<Q> {
    /// Reserves memory for TSO headers and, depending on `addressing`, for data that is set
    /// before the destination.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn reserve(
        &mut self,
        addressing: Addressing,
        cap: &ibv_qp_cap,
        max_tso_header: u16,
    ) -> Result<(), Errno> {
        let reserved = self.headers.try_reserve_exact(max_tso_header.into());
        reserved.map_err(|_| Errno::NOMEM)?;
        if addressing == Addressing::Connected {
            return Ok(());
        }
        self.initial = BatchState::OpenUnaddressed;
        let sges = cap.max_send_sge.max(1) as usize;
        (self.sges.try_reserve_exact(sges))
            .and_then(|()| self.inline.try_reserve_exact(cap.max_inline_data as usize))
            .map_err(|_| Errno::NOMEM)
    }

    /// Copies data that is set before the destination.
    ///
    /// # Errors
    /// EINVAL: more than was reserved.
    ///
    /// # Safety
    /// Inline data is readable.
    #[cold]
    unsafe fn copy_data(&mut self, data: Data<'_>) -> Result<(), c_int> {
        self.state = BatchState::OpenData;
        self.sges.clear();
        self.inline.clear();
        let fits = |room: usize, more: usize| match more <= room {
            true => Ok(()),
            false => Err(libc::EINVAL),
        };
        match data {
            Data::Sges(list) => {
                fits(self.sges.capacity(), list.len())?;
                self.sges.extend_from_slice(list);
            }
            Data::Inline(pieces) => {
                for piece in pieces {
                    let length = piece.length as usize;
                    fits(self.inline.capacity() - self.inline.len(), length)?;
                    // An empty piece may have any address.
                    if length != 0 {
                        let from = core::ptr::with_exposed_provenance(piece.addr as usize);
                        // SAFETY: readable, as the caller says.
                        let bytes = unsafe { slice::from_raw_parts(from, length) };
                        self.inline.extend_from_slice(bytes);
                    }
                }
                self.sges.push(Sge {
                    addr: self.inline.as_ptr().expose_provenance() as u64,
                    length: self.inline.len() as u32,
                    lkey: 0,
                });
            }
        }
        // SAFETY: `sges` and `inline` do not change before the work request is pushed.
        let list = unsafe { slice::from_raw_parts(self.sges.as_ptr(), self.sges.len()) };
        self.wr.data = match data {
            Data::Sges(_) => Data::Sges(list),
            Data::Inline(_) => Data::Inline(list),
        };
        Ok(())
    }

    /// Copies TSO headers: programs may free theirs before the work request is pushed.
    ///
    /// # Errors
    /// EINVAL: more than was reserved.
    ///
    /// # Safety
    /// The headers are readable.
    unsafe fn copy_headers(
        &mut self,
        headers: *const u8,
        length: u16,
        mss: u16,
    ) -> Result<Operands<'static>, c_int> {
        self.headers.clear();
        if usize::from(length) > self.headers.capacity() {
            return Err(libc::EINVAL);
        }
        if length != 0 {
            // SAFETY: readable, as the caller says.
            let bytes = unsafe { slice::from_raw_parts(headers, length.into()) };
            self.headers.extend_from_slice(bytes);
        }
        Ok(Operands::Tso {
            headers: self.headers.as_ptr().expose_provenance() as u64,
            length,
            mss,
        })
    }

    /// Clears operands, destination and data of the open work request.
    #[cold]
    fn clear(&mut self) {
        self.wr.operands = Operands::None;
        self.wr.destination = Destination::Connected;
        self.wr.data = Data::Sges(&[]);
    }

    /// Fails the batch. Later errors are ignored.
    #[cold]
    pub fn fail(&mut self, errno: c_int) {
        if self.state != BatchState::Failed {
            (self.state, self.errno) = (BatchState::Failed, errno);
        }
    }
}

const DATAGRAM: u64 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
const UNRELIABLE: u64 = DATAGRAM
    | IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND_WITH_INV;
const RELIABLE: u64 = UNRELIABLE
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

/// The operations (`IBV_QP_EX_WITH_*`) of a type of queue pair.
pub fn operations<D: QpOps>(qp_type: u32) -> u64 {
    let all_devices = match qp_type {
        IBV_QPT_UD => DATAGRAM,
        IBV_QPT_UC => UNRELIABLE,
        IBV_QPT_RC => RELIABLE,
        IBV_QPT_XRC_SEND if D::XRC => RELIABLE,
        IBV_QPT_DRIVER if D::DC => RELIABLE,
        IBV_QPT_RAW_PACKET if D::PACKETS => IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_TSO,
        _ => 0,
    };
    all_devices | D::device_operations(qp_type)
}

/// Sets the functions of the operations.
pub fn set_functions<D: QpOps>(qp: &mut verbs_qp, addressing: Addressing, operations: u64) {
    let qp = &mut qp.qp_ex;
    macro_rules! builders {
        ($($operation:ident => $function:ident;)+) => {
            $(if operations & $operation != 0 { qp.$function = Some($function::<D>); })+
        };
    }
    builders! {
        IBV_QP_EX_WITH_SEND => wr_send;
        IBV_QP_EX_WITH_SEND_WITH_IMM => wr_send_imm;
        IBV_QP_EX_WITH_SEND_WITH_INV => wr_send_inv;
        IBV_QP_EX_WITH_RDMA_WRITE => wr_rdma_write;
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM => wr_rdma_write_imm;
        IBV_QP_EX_WITH_RDMA_READ => wr_rdma_read;
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP => wr_atomic_cmp_swp;
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD => wr_atomic_fetch_add;
        IBV_QP_EX_WITH_LOCAL_INV => wr_local_inv;
        IBV_QP_EX_WITH_BIND_MW => wr_bind_mw;
        IBV_QP_EX_WITH_TSO => wr_send_tso;
    }
    qp.wr_set_ud_addr = Some(wr_set_ud_addr::<D>);
    if D::XRC && qp.qp_base.qp_type == IBV_QPT_XRC_SEND {
        qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn::<D>);
    }
    qp.wr_set_inline_data = Some(wr_set_inline_data::<D>);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list::<D>);
    qp.wr_set_sge = Some(match addressing {
        Addressing::Datagram | Addressing::Dc => wr_set_sge_addressed::<D>,
        Addressing::Connected | Addressing::Xrc => wr_set_sge::<D>,
    });
    qp.wr_set_sge_list = Some(wr_set_sge_list::<D>);
    qp.wr_start = Some(wr_start::<D>);
    qp.wr_complete = Some(wr_complete::<D>);
    qp.wr_abort = Some(wr_abort::<D>);
}

/// Returns the queue pair and its batch.
///
/// # Safety
/// A live queue pair of ours; the application is between wr_start and
/// wr_complete.
#[inline]
unsafe fn batch_of<'a, D: QpOps, T>(ibqp: *mut T) -> (&'a Qp<D>, &'a mut Batch<D::SendQueue>) {
    // SAFETY: as the caller says.
    unsafe {
        let qp: &Qp<D> = qp_of(ibqp);
        (qp, &mut *qp.batch.get())
    }
}

/// `ibv_wr_start`.
///
/// # Safety
/// A live queue pair of ours.
pub unsafe extern "C" fn wr_start<D: QpOps>(ibqp: *mut ibv_qp_ex) {
    // SAFETY: the application passes a live queue pair of ours; the send queue
    // is this caller's until wr_complete or wr_abort.
    unsafe {
        let qp: &Qp<D> = qp_of(ibqp);
        Section::enter(qp.single, &qp.send_lock).keep_locked();
        let (_, batch) = batch_of::<D, _>(ibqp);
        batch.state = BatchState::Idle;
        if !qp.may_send() {
            batch.fail(libc::EINVAL);
        }
    }
}

/// `ibv_wr_complete`.
///
/// # Safety
/// The application is after wr_start.
pub unsafe extern "C" fn wr_complete<D: QpOps>(ibqp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the application is after wr_start.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        if batch.state != BatchState::Idle {
            push_open(qp, batch);
        }
        if batch.state == BatchState::Failed {
            return discard(qp, batch);
        }
        (batch.state, batch.errno) = (BatchState::Failed, libc::EINVAL);
        // SAFETY: the application keeps the memory of its work requests valid.
        let queue = &mut *qp.send.get();
        let any = queue.publish();
        Section::entered(qp.single, &qp.send_lock).leave();
        if any { D::ring(qp) } else { 0 }
    }
}

unsafe extern "C" fn wr_abort<D: QpOps>(ibqp: *mut ibv_qp_ex) {
    // SAFETY: the application is after wr_start.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        discard(qp, batch);
    }
}

/// Discards the batch; returns its errno.
///
/// # Safety
/// The application is after wr_start.
#[cold]
unsafe fn discard<D: QpOps>(qp: &Qp<D>, batch: &mut Batch<D::SendQueue>) -> c_int {
    let errno = batch.errno;
    (batch.state, batch.errno) = (BatchState::Failed, libc::EINVAL);
    batch.clear();
    // SAFETY: the send queue is this caller's; wr_start entered the section.
    unsafe {
        (*qp.send.get()).abort();
        Section::entered(qp.single, &qp.send_lock).leave();
    }
    errno
}

/// Pushes the open work request, if there is one.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline(never)]
unsafe fn push_open<D: QpOps>(qp: &Qp<D>, batch: &mut Batch<D::SendQueue>) {
    match batch.state {
        BatchState::Failed | BatchState::Idle => return,
        BatchState::OpenSimple | BatchState::OpenAddressed => {}
        BatchState::OpenInWqe => batch.wr.destination = Destination::InWqe,
        BatchState::OpenUnaddressed | BatchState::OpenData => return batch.fail(libc::EINVAL),
    }
    batch.state = BatchState::Idle;
    // SAFETY: the send queue is this caller's; copied data is readable.
    let pushed = unsafe { (*qp.send.get()).push(&batch.wr) };
    batch.clear();
    if let Err(errno) = pushed {
        batch.fail(errno);
    }
}

/// Opens a work request. Returns false if the batch has failed.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline]
unsafe fn open<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    opcode: Opcode,
    imm_or_key: Option<u32>,
    remote: Option<RemoteMemory>,
) -> bool {
    // SAFETY: as the caller says, so the public members are the caller's.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        if batch.state != BatchState::Idle {
            let remote = remote.unwrap_or(NO_REMOTE);
            return open_next::<D>(
                ibqp,
                opcode,
                imm_or_key.unwrap_or(0),
                remote.addr,
                remote.rkey,
            );
        }
        batch.wr.wr_id = (*ibqp).wr_id;
        batch.wr.opcode = opcode;
        let flags = SendFlags::from_bits_retain((*ibqp).wr_flags);
        batch.wr.flags = flags;
        batch.open_wqe = (*qp.send.get()).open(opcode, flags, imm_or_key.unwrap_or(0));
        // Fields that the operation does not use keep stale values.
        if let Some(imm_or_key) = imm_or_key {
            batch.wr.imm_or_key = imm_or_key;
        }
        if let Some(remote) = remote {
            batch.wr.remote = remote;
        }
        batch.state = batch.initial;
        true
    }
}

/// Pushes the open work request, then opens another one by [`open`].
///
/// # Safety
/// As for [`open`].
// A tail call with all arguments in registers, so that `open` saves none.
#[cold]
#[inline(never)]
unsafe fn open_next<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    opcode: Opcode,
    imm_or_key: u32,
    addr: u64,
    rkey: u32,
) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        push_open(qp, batch);
        batch.state == BatchState::Idle
            && open::<D>(
                ibqp,
                opcode,
                Some(imm_or_key),
                Some(RemoteMemory { addr, rkey }),
            )
    }
}

/// Pushes a work request by `push`, which gets the send queue and the `wr_id`.
///
/// # Safety
/// The application is between wr_start and wr_complete.
// Without `always` the captures of `push` are passed in memory.
#[inline(always)]
pub unsafe fn push_by<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    push: impl FnOnce(&mut D::SendQueue, u64) -> Result<(), c_int>,
) {
    // SAFETY: as the caller says, so the send queue is the caller's.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        if batch.state != BatchState::Idle {
            push_open(qp, batch);
        }
        if batch.state == BatchState::Idle {
            if let Err(errno) = push(&mut *qp.send.get(), (*ibqp).wr_id) {
                batch.fail(errno);
            }
        }
    }
}

/// Returns the send queue, if the batch has not failed and no work request is open.
///
/// # Safety
/// As for [`push_by`]; no other reference to the queue exists.
#[inline]
pub unsafe fn idle_queue<'a, D: QpOps>(ibqp: *mut ibv_qp_ex) -> Option<&'a mut D::SendQueue> {
    // SAFETY: as the caller says.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        (batch.state == BatchState::Idle).then(|| &mut *qp.send.get())
    }
}

/// Fails the batch.
///
/// # Safety
/// As for [`push_by`].
pub unsafe fn fail<D: QpOps>(qp: *mut ibv_qp_ex, errno: c_int) {
    // SAFETY: as the caller says.
    unsafe { batch_of::<D, _>(qp).1.fail(errno) };
}

/// Opens a work request with operands.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline]
pub unsafe fn open_with<D: QpOps>(
    qp: *mut ibv_qp_ex,
    opcode: Opcode,
    remote: RemoteMemory,
    operands: Result<Operands<'static>, c_int>,
) {
    // SAFETY: as the caller says.
    unsafe {
        if !open::<D>(qp, opcode, None, Some(remote)) {
            return;
        }
        let (_, batch) = batch_of::<D, _>(qp);
        if batch.state == BatchState::OpenSimple || opcode == Opcode::BIND_MW {
            batch.state = BatchState::OpenAddressed;
        }
        match operands {
            Ok(operands) => batch.wr.operands = operands,
            Err(errno) => batch.fail(errno),
        }
    }
}

/// [`set_data`] of one piece.
///
/// # Safety
/// As for [`set_data`].
// Without `always` the piece is passed in memory.
#[inline(always)]
unsafe fn set_piece<D: QpOps>(ibqp: *mut ibv_qp_ex, piece: Sge, inline: bool) {
    // SAFETY: as the caller says.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        // Fast path. A call that is not a tail call would make it save registers.
        if batch.state == BatchState::OpenSimple
            && (*qp.send.get()).push_open_wqe(
                batch.open_wqe,
                &batch.wr,
                data_of(slice::from_ref(&piece), inline),
            )
        {
            batch.state = BatchState::Idle;
            return;
        }
        set_piece_slow::<D>(ibqp, piece.lkey, piece.addr, piece.length, inline);
    }
}

/// Slow path of [`set_piece`]. The piece is passed in the argument registers of
/// `wr_set_sge`.
///
/// # Safety
/// As for [`set_data`].
#[inline(never)]
unsafe fn set_piece_slow<D: QpOps>(
    qp: *mut ibv_qp_ex,
    lkey: u32,
    addr: u64,
    length: u32,
    inline: bool,
) {
    // SAFETY: as the caller says.
    unsafe {
        match (inline, length) {
            // An element of length 0 is omitted.
            (false, 0) => set_data::<D>(qp, Data::Sges(&[])),
            _ => set_data::<D>(qp, data_of(&[Sge { addr, length, lkey }], inline)),
        }
    }
}

fn data_of(list: &[Sge], inline: bool) -> Data<'_> {
    match inline {
        true => Data::Inline(list),
        false => Data::Sges(list),
    }
}

/// Sets the data of the open work request, and pushes it unless its destination is
/// not set yet. Without an open work request the batch fails with EINVAL.
///
/// # Safety
/// The application is between wr_start and wr_complete. Inline data is readable.
#[inline(never)]
unsafe fn set_data<D: QpOps>(ibqp: *mut ibv_qp_ex, data: Data<'_>) {
    // SAFETY: as the caller says.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        let set = match batch.state {
            BatchState::Failed => return,
            BatchState::Idle => Err(libc::EINVAL),
            BatchState::OpenUnaddressed | BatchState::OpenData => batch.copy_data(data),
            BatchState::OpenSimple | BatchState::OpenAddressed | BatchState::OpenInWqe => {
                if batch.state == BatchState::OpenInWqe {
                    batch.wr.destination = Destination::InWqe;
                }
                batch.state = BatchState::Idle;
                let wr = SendWr { data, ..batch.wr };
                batch.clear();
                (*qp.send.get()).push(&wr)
            }
        };
        if let Err(errno) = set {
            batch.fail(errno);
        }
    }
}

/// Sets the destination of the open work request, and pushes it if its data is set.
/// Without an open work request the batch fails with EINVAL.
///
/// # Safety
/// The application is between wr_start and wr_complete; the destination does not change
/// until the work request has been pushed.
pub unsafe fn set_destination<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    destination: Option<Destination<'static, D::Address>>,
) {
    // SAFETY: as the caller says.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        let Some(destination) = destination else {
            return batch.fail(libc::EINVAL);
        };
        if matches!(
            batch.state,
            BatchState::Failed | BatchState::Idle | BatchState::OpenSimple
        ) {
            return batch.fail(libc::EINVAL);
        }
        batch.wr.destination = destination;
        let has_data = batch.state == BatchState::OpenData;
        batch.state = BatchState::OpenAddressed;
        if has_data {
            push_open(qp, batch);
        }
    }
}

/// Fast path of [`set_destination`]: writes the destination to the WQE. Returns false and
/// does nothing if it does not apply.
///
/// # Safety
/// As for [`set_destination`].
#[inline]
pub unsafe fn write_destination<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    destination: Destination<'_, D::Address>,
) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        let written = batch.state == BatchState::OpenUnaddressed
            && (*qp.send.get()).write_address(destination);
        if written {
            batch.state = BatchState::OpenInWqe;
        }
        written
    }
}

const NO_REMOTE: RemoteMemory = RemoteMemory { addr: 0, rkey: 0 };

/// Builders: each is called between wr_start and wr_complete.
macro_rules! builders {
    ($($name:ident($($arg:ident: $type:ty),*) |$qp:ident| $open:expr;)+) => {$(
        unsafe extern "C" fn $name<D: QpOps>($qp: *mut ibv_qp_ex $(, $arg: $type)*) {
            // SAFETY: the application is between wr_start and wr_complete.
            unsafe { $open };
        }
    )+};
}

builders! {
    wr_send() |qp| open::<D>(qp, Opcode::SEND, None, None);
    wr_send_imm(imm_data: u32) |qp| open::<D>(qp, Opcode::SEND_WITH_IMM, Some(imm_data), None);
    wr_send_inv(rkey: u32) |qp| open::<D>(qp, Opcode::SEND_WITH_INV, Some(rkey), None);
    wr_rdma_write(rkey: u32, addr: u64)
        |qp| open::<D>(qp, Opcode::RDMA_WRITE, None, Some(RemoteMemory { addr, rkey }));
    wr_rdma_write_imm(rkey: u32, addr: u64, imm_data: u32)
        |qp| open::<D>(qp, Opcode::RDMA_WRITE_WITH_IMM, Some(imm_data), Some(RemoteMemory { addr, rkey }));
    wr_rdma_read(rkey: u32, addr: u64)
        |qp| open::<D>(qp, Opcode::RDMA_READ, None, Some(RemoteMemory { addr, rkey }));
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare_add: u64, swap: u64) |qp| open_with::<D>(
        qp,
        Opcode::ATOMIC_CMP_AND_SWP,
        RemoteMemory { addr, rkey },
        Ok(Operands::Atomic { compare_add, swap }),
    );
    wr_atomic_fetch_add(rkey: u32, addr: u64, compare_add: u64) |qp| open_with::<D>(
        qp,
        Opcode::ATOMIC_FETCH_AND_ADD,
        RemoteMemory { addr, rkey },
        Ok(Operands::Atomic { compare_add, swap: 0 }),
    );
}

unsafe extern "C" fn wr_local_inv<D: QpOps>(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe {
        if open::<D>(qp, Opcode::LOCAL_INV, Some(rkey), None) {
            batch_of::<D, _>(qp).1.state = BatchState::OpenAddressed;
        }
    }
}

unsafe extern "C" fn wr_bind_mw<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the application is between wr_start and wr_complete, and passes
    // live objects. The bind is not changed before the work request has been
    // pushed.
    unsafe {
        // Push the open work request first: it may refer to `batch.bind`.
        let (qp, batch) = batch_of::<D, _>(ibqp);
        push_open(qp, batch);
        let operands = window_bind::<D>(mw, rkey, &*info).map(|bind| {
            let to = &raw mut batch.bind;
            to.write(bind);
            Operands::Bind(&*to)
        });
        open_with::<D>(ibqp, Opcode::BIND_MW, NO_REMOTE, operands);
    }
}

unsafe extern "C" fn wr_send_tso<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    headers: *mut c_void,
    length: u16,
    mss: u16,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says that the
    // headers are readable.
    unsafe {
        // Push the open work request first: it may refer to `batch.headers`.
        let (qp, batch) = batch_of::<D, _>(ibqp);
        push_open(qp, batch);
        let operands = batch.copy_headers(headers.cast(), length, mss);
        open_with::<D>(ibqp, Opcode::TSO, NO_REMOTE, operands);
    }
}

unsafe extern "C" fn wr_set_ud_addr<D: QpOps>(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: the application is between wr_start and wr_complete, and passes
    // an address handle that lives until the work request is posted.
    unsafe {
        let written =
            !ah.is_null() && write_destination::<D>(qp, datagram::<D>(ah, remote_qpn, remote_qkey));
        if !written {
            set_ud_addr_slow::<D>(qp, ah, remote_qpn, remote_qkey);
        }
    }
}

/// Slow path of [`wr_set_ud_addr`].
///
/// # Safety
/// As for [`wr_set_ud_addr`].
#[cold]
#[inline(never)]
unsafe extern "C" fn set_ud_addr_slow<D: QpOps>(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: as the caller says.
    unsafe {
        let to = (!ah.is_null()).then(|| datagram::<D>(ah, remote_qpn, remote_qkey));
        set_destination::<D>(qp, to);
    }
}

/// The destination of a datagram.
///
/// # Safety
/// `ah` is an address handle of ours that lives until the work request is posted.
unsafe fn datagram<D: QpOps>(
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) -> Destination<'static, D::Address> {
    Destination::Datagram {
        // SAFETY: as the caller says.
        address: unsafe { &ah_of::<D>(ah).address },
        remote_qpn,
        remote_qkey,
    }
}

unsafe extern "C" fn wr_set_xrc_srqn<D: QpOps>(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe { set_destination::<D>(qp, Some(Destination::Xrc { remote_srqn })) }
}

unsafe extern "C" fn wr_set_inline_data<D: QpOps>(
    qp: *mut ibv_qp_ex,
    addr: *mut c_void,
    length: usize,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the data is readable.
    unsafe {
        match u32::try_from(length) {
            Ok(length) => {
                let addr = addr.expose_provenance() as u64;
                let lkey = 0;
                set_piece::<D>(qp, Sge { addr, length, lkey }, true);
            }
            Err(_) => batch_of::<D, _>(qp).1.fail(libc::EINVAL),
        }
    }
}

unsafe extern "C" fn wr_set_inline_data_list<D: QpOps>(
    qp: *mut ibv_qp_ex,
    num_buf: usize,
    list: *const ibv_data_buf,
) {
    const {
        assert!(size_of::<ibv_data_buf>() == size_of::<Sge>() && cfg!(target_endian = "little"));
        assert!(offset_of!(ibv_data_buf, length) == offset_of!(Sge, length));
    }
    let list = match num_buf {
        0 => &[],
        // SAFETY: the application says that the list is readable. Any bytes are a valid
        // element. Address and length have the same offsets; `lkey` is the upper half
        // of the 64-bit length.
        _ => unsafe { slice::from_raw_parts(list.cast::<Sge>(), num_buf) },
    };
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the data is readable.
    unsafe {
        if list.iter().all(|piece| piece.lkey == 0) {
            set_data::<D>(qp, Data::Inline(list));
        } else {
            batch_of::<D, _>(qp).1.fail(libc::EINVAL);
        }
    }
}

unsafe extern "C" fn wr_set_sge<D: QpOps>(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe { set_piece::<D>(qp, Sge { addr, length, lkey }, false) }
}

/// [`wr_set_sge`] for queue pairs whose work requests have an address.
unsafe extern "C" fn wr_set_sge_addressed<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    lkey: u32,
    addr: u64,
    length: u32,
) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        // Fast path, as in `set_piece`.
        if batch.state == BatchState::OpenInWqe
            && (*qp.send.get()).push_addressed(
                batch.open_wqe,
                &batch.wr,
                &Sge { addr, length, lkey },
            )
        {
            batch.state = BatchState::Idle;
            return;
        }
        set_piece_slow::<D>(ibqp, lkey, addr, length, false);
    }
}

unsafe extern "C" fn wr_set_sge_list<D: QpOps>(
    ibqp: *mut ibv_qp_ex,
    num_sge: usize,
    list: *const ibv_sge,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the list is readable; a list longer than `max_sge` is not read.
    unsafe {
        let (qp, batch) = batch_of::<D, _>(ibqp);
        match scatter_list(list, num_sge, (*qp.send.get()).max_sge()) {
            Ok(list) => set_data::<D>(ibqp, Data::Sges(list)),
            Err(errno) => batch.fail(errno),
        }
    }
}
