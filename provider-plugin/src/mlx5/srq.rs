//! Shared receive queues, in the process's memory; tag matching.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr::null_mut;
use std::sync::Arc;

use mlx5::{
    QpQueues, QueueAllocator, Role, SharedQueue, SharedReceiveQueue, SrqEntries, TagChange,
    TagOperation,
};
use ring::BiasedLock;
use uverbs::{AhAttr, PostError, QpAttr, QpAttrMask, QpState, SrqInit, SrqModify, Udata};

use super::Mlx5;
use super::ah::ETHERNET;
use super::cq::Cq;
use super::memory::Allocators;
use super::qp::{Options, Qp};
use crate::abi::*;
use crate::access::Section;
use crate::context::CtxRef;
use crate::cq::cq_of;
use crate::errno::Errno;
use crate::post::{refuse, scatter_list};
use crate::qp::{create_qp_with, destroy_qp, qp_of, set_state};
use crate::srq::{NewSrq, Srq, SrqOps, srq_of};

/// Data of a shared receive queue besides the writer.
pub struct SrqData {
    /// The entries, with the lock.
    entries: Arc<SrqEntries>,
    /// With a completion queue of its own (XRC, tag matching), its entry in the QP table.
    queues_in_table: Option<Arc<QpQueues>>,
    /// With tag matching, the queue pair through which tags are changed, until
    /// `before_destroy`; otherwise null. Its send queue is used in the critical section of
    /// the lock.
    tag_qp: UnsafeCell<*mut ibv_qp>,
}

/// Connects the queue pair to itself and makes it ready to send. Nothing goes to the
/// network.
///
/// # Safety
/// The queue pair is live, and not used yet.
unsafe fn connect_loopback(ibqp: *mut ibv_qp) -> Result<(), Errno> {
    const PORT: u8 = 1;
    const MTU_256: u8 = 1;
    // SAFETY: as the caller says.
    let qp: &Qp = unsafe { qp_of(ibqp) };
    let ctx = qp.object.context();
    let port = ctx.query_port(PORT)?.legacy;
    let mut path = AhAttr {
        dlid: port.lid,
        port_num: PORT,
        ..AhAttr::default()
    };
    // libmlx5 leaves it out, which the kernel refuses.
    if port.link_layer == ETHERNET {
        path.is_global = true;
        path.grh.dgid = ctx.query_gid_entry(PORT.into(), 0)?.gid;
    }
    let attr = QpAttr {
        port_num: PORT,
        path_mtu: MTU_256,
        dest_qp_num: qp.object.qp_num(),
        ah_attr: path,
        ..QpAttr::default()
    };
    let steps = [
        (
            QpState::INIT,
            QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS,
        ),
        (
            QpState::RTR,
            QpAttrMask::AV
                | QpAttrMask::PATH_MTU
                | QpAttrMask::DEST_QPN
                | QpAttrMask::RQ_PSN
                | QpAttrMask::MAX_DEST_RD_ATOMIC
                | QpAttrMask::MIN_RNR_TIMER,
        ),
        (
            QpState::RTS,
            QpAttrMask::TIMEOUT
                | QpAttrMask::RETRY_CNT
                | QpAttrMask::RNR_RETRY
                | QpAttrMask::SQ_PSN
                | QpAttrMask::MAX_QP_RD_ATOMIC,
        ),
    ];
    for (qp_state, mask) in steps {
        let attr = QpAttr { qp_state, ..attr };
        qp.object
            .modify(&attr, mask | QpAttrMask::STATE, Udata::none())?;
    }
    // SAFETY: as the caller says.
    unsafe { set_state::<Mlx5>(ibqp, IBV_QPS_RTS) };
    Ok(())
}

impl SrqOps for Mlx5 {
    type SharedQueue = SharedQueue;
    type SrqData = SrqData;

    const XRC: bool = true;
    const TAGS: bool = true;
    const SHARES_LOCK: bool = true;

    #[inline]
    fn lock(srq: &Srq<Self>) -> &BiasedLock {
        srq.device_data.entries.lock()
    }

    unsafe fn make(
        ctx: &CtxRef,
        init: &SrqInit,
        cq: *mut ibv_cq,
        domain: *mut ibv_pd,
    ) -> Result<NewSrq<Self>, Errno> {
        // SAFETY: live, as the caller says.
        let allocator = unsafe { Allocators::of(ctx, domain) };
        let allocator = allocator
            .as_ref()
            .map(|allocator| allocator as &dyn QueueAllocator);
        let new_srq = SharedReceiveQueue::create_with(ctx, ctx.mlx5()?, init, allocator)?;
        if let Some(queues) = &new_srq.xrc {
            // SAFETY: live, as the caller says, since such an SRQ names it. It has no
            // completions yet.
            let cq: &Cq = unsafe { cq_of(cq) };
            cq.attach(queues, Role::RECEIVE)?;
        }
        Ok(NewSrq {
            max_wr: new_srq.recv.capacity(),
            max_sge: new_srq.recv.max_sge(),
            device_data: SrqData {
                entries: Arc::clone(new_srq.recv.entries()),
                queues_in_table: new_srq.xrc,
                tag_qp: UnsafeCell::new(null_mut()),
            },
            object: new_srq.object,
            recv: new_srq.recv,
            srq_num: new_srq.srq_num,
        })
    }

    /// A queue pair, as libmlx5 has one: programs may get events of it.
    unsafe fn make_tag_qp(ibsrq: *mut ibv_srq, max_ops: u32) -> Result<(), Errno> {
        // SAFETY: as the caller says. Zeros are valid attributes.
        unsafe {
            let srq: &Srq<Self> = srq_of(ibsrq);
            let cq = srq.public.cq;
            let mut attr = ibv_qp_init_attr_ex {
                send_cq: cq,
                recv_cq: cq,
                srq: ibsrq,
                cap: ibv_qp_cap {
                    max_send_wr: max_ops,
                    max_send_sge: 1,
                    ..ibv_qp_cap::default()
                },
                qp_type: IBV_QPT_RC,
                // Without operations a work request takes one block.
                comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                pd: (*ibsrq).pd,
                ..core::mem::zeroed()
            };
            let qp = create_qp_with::<Self>((*ibsrq).context, &mut attr, &Options::default())?;
            *srq.device_data.tag_qp.get() = qp;
            let send = &*qp_of::<Self, _>(qp).send.get();
            (*srq.recv.get()).reserve_tag_operations(send.capacity())?;
            connect_loopback(qp)
        }
    }

    /// Destroys the queue pair. If the SRQ then cannot be destroyed, because other queue
    /// pairs use it, its tags can no longer be changed, as with libmlx5.
    unsafe fn before_destroy(srq: &Srq<Self>) -> Result<(), Errno> {
        // SAFETY: nothing else uses it, as the caller says.
        unsafe {
            let qp = srq.device_data.tag_qp.get();
            if !(*qp).is_null() {
                match destroy_qp::<Self>(*qp) {
                    0 => *qp = null_mut(),
                    errno => return Err(Errno(errno)),
                }
            }
        }
        Ok(())
    }

    /// Discards unread completions.
    unsafe fn srq_destroyed(srq: &Srq<Self>) {
        if let Some(queues) = &srq.device_data.queues_in_table {
            // SAFETY: live, as the caller says.
            let cq: &Cq = unsafe { cq_of(srq.public.cq) };
            cq.detach(queues);
        }
    }

    /// The device cannot change the size: EOPNOTSUPP.
    fn modify(srq: &Srq<Self>, change: &SrqModify) -> Result<(), Errno> {
        if change.max_wr.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(srq.object.modify(change, Udata::none())?)
    }
}

/// Converts a change of tags.
///
/// # Safety
/// The list of a tag that is added is readable.
unsafe fn operation(wr: &ibv_ops_wr) -> Result<TagOperation, c_int> {
    let change = match wr.opcode {
        IBV_WR_TAG_ADD => {
            let add = &wr.tm.add;
            // SAFETY: as the caller says. A negative number becomes one that is too large.
            let list = unsafe { scatter_list(add.sg_list, add.num_sge as u32 as usize, 1)? };
            TagChange::Add {
                wr_id: add.recv_wr_id,
                tag: add.tag,
                mask: add.mask,
                memory: list.first().copied(),
            }
        }
        IBV_WR_TAG_DEL => TagChange::Remove(wr.tm.handle),
        IBV_WR_TAG_SYNC => TagChange::Sync,
        _ => return Err(libc::EINVAL),
    };
    Ok(TagOperation {
        wr_id: wr.wr_id,
        signalled: wr.flags & IBV_OPS_SIGNALED != 0,
        handled: (wr.flags & IBV_OPS_TM_SYNC != 0).then_some(wr.tm.unexpected_cnt),
        change,
    })
}

/// `ibv_post_srq_ops`. EINVAL for a bad operation, a tag that is not in the list, or a
/// queue without tag matching; ENOMEM for too many operations or tags. On an error
/// `*bad_wr` is the first that was not posted; those before it were.
pub unsafe extern "C" fn post_srq_ops(
    ibsrq: *mut ibv_srq,
    wr: *mut ibv_ops_wr,
    bad_wr: *mut *mut ibv_ops_wr,
) -> c_int {
    // SAFETY: the application passes a live queue of ours and a list of operations of its
    // own; the queue of tags is this call's in the critical section.
    unsafe {
        let srq: &Srq<Mlx5> = srq_of(ibsrq);
        let section = Section::enter(false, Mlx5::lock(srq));
        let ibqp = *srq.device_data.tag_qp.get();
        if ibqp.is_null() {
            drop(section);
            return refuse(wr, bad_wr, libc::EINVAL);
        }
        let qp: &Qp = qp_of(ibqp);
        let (send, recv) = (&mut *qp.send.get(), &mut *srq.recv.get());
        let (mut next, mut refused) = (wr, 0);
        while let Some(request) = next.as_mut() {
            let pushed = operation(request)
                .and_then(|change| recv.push_tag(send, &change).map_err(PostError::errno));
            match pushed {
                Ok(handle) if request.opcode == IBV_WR_TAG_ADD => request.tm.handle = handle,
                Ok(_) => {}
                Err(errno) => {
                    refused = errno;
                    break;
                }
            }
            next = request.next;
        }
        // SAFETY: the memory of tags is the application's to keep.
        send.publish();
        drop(section);
        match refused {
            0 => 0,
            errno => refuse(next, bad_wr, errno),
        }
    }
}
