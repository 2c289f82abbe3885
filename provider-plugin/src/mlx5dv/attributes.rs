//! Device-specific attributes of queue pairs and addresses.

use core::ffi::c_int;

use mlx5::commands::{
    self, Capabilities, LagQueue, Scheduling, lag_port, map_address, reset_stream, set_lag_port,
    set_udp_source_port,
};
use uverbs::QpHandle;

use super::scheduling::Element;
use super::{exported, is_ours};
use crate::abi::*;
use crate::ah::ah_of;
use crate::context::CtxRef;
use crate::entry;
use crate::errno::Errno;
use crate::mlx5::Mlx5;
use crate::qp::qp_of;

/// The LAG port of a queue pair, and its active port.
///
/// # Safety
/// A live queue pair of ours.
unsafe fn query_lag(
    ctx: &CtxRef,
    caps: &Capabilities,
    ibqp: *mut ibv_qp,
) -> Result<(LagQueue, [u8; 2]), Errno> {
    // SAFETY: as the caller says.
    let (qp, kind, handle, number) = unsafe {
        let qp = qp_of::<Mlx5, _>(ibqp);
        (
            qp,
            (*ibqp).qp_type,
            QpHandle((*ibqp).handle),
            (*ibqp).qp_num,
        )
    };
    let queue = match kind {
        _ if caps.lag_ports <= 1 => return Err(Errno::OPNOTSUPP),
        IBV_QPT_RAW_PACKET => LagQueue::Interface(qp.device_data.packets.tis),
        IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_XRC_SEND => LagQueue::QueuePair(number),
        IBV_QPT_DRIVER if qp.device_data.is_initiator() => LagQueue::QueuePair(number),
        _ => return Err(Errno::OPNOTSUPP),
    };
    Ok((queue, lag_port(ctx, caps, handle, queue)?))
}

exported! {
    /// `mlx5dv_query_qp_lag_port`: the LAG port of a queue pair, and its active port.
    /// EOPNOTSUPP without a LAG.
    fn mlx5dv_query_qp_lag_port(qp: *mut ibv_qp, port: *mut u8, active: *mut u8) -> c_int
    where is_ours((*qp).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live queue pair of ours, and room for the ports.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*qp).context);
            (*port, *active) = query_lag(&ctx, &Capabilities::query(&ctx)?, qp)?.1.into();
            Ok(())
        })
    }

    /// `mlx5dv_modify_qp_lag_port`: of a queue pair that is ready to send, or of raw
    /// packets. EOPNOTSUPP otherwise, and without a bond.
    fn mlx5dv_modify_qp_lag_port(qp: *mut ibv_qp, port: u8) -> c_int
    where is_ours((*qp).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live queue pair of ours.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*qp).context);
            let caps = Capabilities::query(&ctx)?;
            // Without a bond the device would ignore the change.
            let (queue, _) = query_lag(&ctx, &caps, qp)?;
            let ready = match queue {
                LagQueue::Interface(_) => true,
                LagQueue::QueuePair(_) => {
                    (*qp).state == IBV_QPS_RTS && (*qp).qp_type != IBV_QPT_XRC_SEND
                }
            };
            if !ready {
                return Err(Errno::OPNOTSUPP);
            }
            Ok(set_lag_port(&ctx, &caps, QpHandle((*qp).handle), queue, port)?)
        })
    }

    /// `mlx5dv_modify_qp_udp_sport`: the UDP source port of an RC or UC queue pair that
    /// is ready to send. EOPNOTSUPP otherwise, and if the device cannot.
    fn mlx5dv_modify_qp_udp_sport(qp: *mut ibv_qp, port: u16) -> c_int
    where is_ours((*qp).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live queue pair of ours.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*qp).context);
            let connected = matches!((*qp).qp_type, IBV_QPT_RC | IBV_QPT_UC);
            if !connected
                || (*qp).state != IBV_QPS_RTS
                || !Capabilities::query(&ctx)?.udp_source_port
            {
                return Err(Errno::OPNOTSUPP);
            }
            Ok(set_udp_source_port(&ctx, QpHandle((*qp).handle), (*qp).qp_num, port)?)
        })
    }

    /// `mlx5dv_dci_stream_id_reset`: a failed stream may send again. EINVAL for a queue pair
    /// that is not a DC initiator.
    fn mlx5dv_dci_stream_id_reset(qp: *mut ibv_qp, stream: u16) -> c_int
    where is_ours((*qp).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live queue pair of ours.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*qp).context);
            let has_streams = ctx.mlx5()?.features(&ctx)?.streams.log_errored != 0;
            if (*qp).state != IBV_QPS_RTS
                || !has_streams
                || !Capabilities::query(&ctx)?.extended_context
            {
                return Err(Errno::OPNOTSUPP);
            }
            if !qp_of::<Mlx5, _>(qp).device_data.is_initiator() {
                return Err(Errno::INVAL);
            }
            Ok(reset_stream(&ctx, QpHandle((*qp).handle), (*qp).qp_num, stream)?)
        })
    }

    /// `mlx5dv_map_ah_to_qp`: the address belongs to the queue pair of that number. Once
    /// for an address handle.
    fn mlx5dv_map_ah_to_qp(ibah: *mut ibv_ah, qp_num: u32) -> c_int
    where is_ours((*ibah).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live address handle of ours.
        entry::int(|| unsafe {
            let ah = ah_of::<Mlx5>(ibah);
            if ah.device_data.get().is_some() {
                return Ok(());
            }
            let mapping = map_address(&CtxRef::of((*ibah).context), &ah.address, qp_num)?;
            // If another thread was first, the mapping of this thread is destroyed.
            let _ = ah.device_data.set(mapping);
            Ok(())
        })
    }

    /// `mlx5dv_modify_qp_sched_elem`: the scheduling elements of a queue pair's requests
    /// and responses; null for none. EINVAL for responses of UC and UD, which have none.
    fn mlx5dv_modify_qp_sched_elem(
        qp: *mut ibv_qp,
        requester: *const Element,
        responder: *const Element
    ) -> c_int
    where is_ours((*qp).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live queue pair of ours, and live elements or null.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*qp).context);
            let is_init = match (*qp).state {
                IBV_QPS_INIT => true,
                IBV_QPS_RTS => false,
                _ => return Err(Errno::OPNOTSUPP),
            };
            match (*qp).qp_type {
                IBV_QPT_UC | IBV_QPT_UD if !responder.is_null() => return Err(Errno::INVAL),
                IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD => {}
                _ => return Err(Errno::OPNOTSUPP),
            }
            if !Scheduling::has_groups(&ctx)? {
                return Err(Errno::OPNOTSUPP);
            }
            let numbers = [requester, responder]
                .map(|element| element.as_ref().map_or(0, Element::number));
            let handle = QpHandle((*qp).handle);
            Ok(commands::set_groups(&ctx, handle, (*qp).qp_num, is_init, numbers)?)
        })
    }
}
