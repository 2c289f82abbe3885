//! Devices and contexts: which are supported, features, the clock.

use core::ffi::{c_int, c_void};

use mlx5::commands::{Capabilities, dc_paging};

use super::abi::*;
use super::{exported, is_ours, protection, serves};
use crate::abi::{ibv_context, ibv_device, ibv_dm};
use crate::context::CtxRef;
use crate::entry;
use crate::errno::Errno;
use crate::library::libibverbs;
use crate::mlx5::dm;
use crate::mlx5::memory::ContextAllocators;

exported! {
    /// Returns whether the other functions may be used on the device.
    fn mlx5dv_is_supported(device: *mut ibv_device) -> bool
    where serves(device), else false => {
        true
    }

    /// `mlx5dv_open_device`, with DevX; fails if kernel or device do not support it.
    fn mlx5dv_open_device(device: *mut ibv_device, attr: *mut mlx5dv_context_attr)
        -> *mut ibv_context
    where serves(device), else super::refused::ringverbs_refused_object().cast() => {
        // SAFETY: the caller's attributes, and a live device.
        entry::pointer(|| unsafe {
            let open = libibverbs().and_then(|lib| lib.open_device);
            let attr = attr.as_ref().ok_or(Errno::INVAL)?;
            if attr.comp_mask != 0 || attr.flags & !CONTEXT_DEVX != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let attr = core::ptr::from_ref(attr).cast_mut().cast();
            let context = open.ok_or(Errno::OPNOTSUPP)?(device, attr);
            if context.is_null() {
                return Err(Errno::last());
            }
            Ok(context)
        })
    }

    /// `mlx5dv_set_context_attr`: allocators for the queues and doorbell records of later
    /// objects; null functions for none.
    fn mlx5dv_set_context_attr(context: *mut ibv_context, kind: u32, attr: *mut c_void) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context of ours, and the caller's structure of that kind.
        entry::int(|| unsafe {
            if kind != CTX_ATTR_BUF_ALLOCATORS {
                return Err(Errno::OPNOTSUPP);
            }
            let functions = attr.cast::<mlx5dv_ctx_allocators>().as_ref();
            let allocators = ContextAllocators::new(functions.ok_or(Errno::INVAL)?);
            CtxRef::of(context).allocators().set(allocators);
            Ok(())
        })
    }

    /// `mlx5dv_query_device`. Features that the plugin refuses are reported as absent.
    fn mlx5dv_query_device(context: *mut ibv_context, answer: *mut mlx5dv_context) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: a context of ours, and the caller's structure, of which only the
        // requested members are written.
        entry::int(|| unsafe { query(&CtxRef::of(context), answer) })
    }

    /// `mlx5dv_query_port`: the driver's attributes of a port.
    fn _mlx5dv_query_port(
        context: *mut ibv_context,
        port: u32,
        answer: *mut c_void,
        length: usize
    ) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: a context of ours, and room for the answer.
        entry::int(|| unsafe {
            let answer = core::slice::from_raw_parts_mut(answer.cast(), length);
            Ok(mlx5::ioctl::query_port(&CtxRef::of(context), port, answer)?)
        })
    }

    /// `mlx5dv_dm_map_op_addr`: maps device memory for an operation that stores to it perform,
    /// until the memory is freed.
    fn mlx5dv_dm_map_op_addr(dm: *mut ibv_dm, operation: u8) -> *mut c_void
    where is_ours((*dm).context), else super::refused::ringverbs_refused_object() => {
        // SAFETY: live device memory of ours.
        entry::pointer(|| unsafe { Ok(dm::map_operation(dm, operation)?.as_ptr().cast()) })
    }

    /// `mlx5dv_get_clock_info`: the driver's clock record. EOPNOTSUPP without one.
    fn mlx5dv_get_clock_info(context: *mut ibv_context, info: *mut mlx5dv_clock_info) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: a context of ours, and room for the answer.
        entry::int(|| unsafe {
            let clock = CtxRef::of(context).mlx5()?.clock();
            let record = clock.record().ok_or(Errno::OPNOTSUPP)?;
            info.write(mlx5dv_clock_info {
                nsec: record.nsec,
                last_cycles: record.cycles,
                frac: record.frac,
                mult: record.mult,
                shift: record.shift,
                mask: record.mask,
            });
            Ok(())
        })
    }
}

/// # Safety
/// `answer` is a `mlx5dv_context` with the members that its `comp_mask` names.
unsafe fn query(ctx: &CtxRef, answer: *mut mlx5dv_context) -> Result<(), Errno> {
    use context_mask::*;
    let device = ctx.mlx5()?;
    let features = device.features(ctx)?;
    // Without DevX the capabilities are unknown.
    let caps = Capabilities::query(ctx).unwrap_or_default();
    let (signatures, encryption) = protection::caps(ctx, &caps);
    let out_of_order = {
        // Rings have twice the entries; lists of shared queues do not.
        let (list, ring) = (device.max_recv_wr(), (device.max_recv_wr() / 2).max(1));
        let most = |has, most| if has { most } else { 0 };
        let has = caps.out_of_order;
        mlx5dv_ooo_recv_wrs_caps {
            max_rc: most(has.rc, ring),
            max_xrc: most(has.xrc, list),
            max_dct: most(has.dc, list),
            max_ud: most(has.ud, ring),
            max_uc: most(has.uc, ring),
        }
    };
    let mut flags = context_flag::CQE_V1;
    for (has, flag) in [
        (features.multi_packet, context_flag::MPW_ALLOWED),
        (features.enhanced_multi_packet, context_flag::ENHANCED_MPW),
        (features.wide_compression, context_flag::CQE_128B_COMP),
        (features.wide_padding, context_flag::CQE_128B_PAD),
        (
            features.packet_credits,
            context_flag::PACKET_BASED_CREDIT_MODE,
        ),
        (features.blue_flame, context_flag::BLUEFLAME),
    ] {
        if has {
            flags |= flag;
        }
    }
    // SAFETY: as the caller says. `to` is not a reference, since a header may lack
    // the structure's end.
    unsafe {
        let requested = (*answer).comp_mask;
        let mut valid = 0;
        macro_rules! member {
            ($($mask:ident: $($member:ident = $value:expr),+;)+) => {$(
                if requested & $mask != 0 {
                    $((*answer).$member = $value;)+
                    valid |= $mask;
                }
            )+};
        }
        member! {
            CQE_COMPRESION: cqe_comp_caps = mlx5dv_cqe_comp_caps {
                max_num: features.compressed_entries,
                supported_format: features.compressed_formats,
            };
            SWP: sw_parsing_caps = features.software_parsing;
            STRIDING_RQ: striding_rq_caps = features.strides;
            TUNNEL_OFFLOADS: tunnel_offloads_caps = features.tunnels;
            DYN_BFREGS: max_dynamic_bfregs = 0;
            FLOW_ACTION_FLAGS: flow_action_flags = 0;
            DC_ODP_CAPS: dc_odp_caps = dc_paging(ctx).unwrap_or_default();
            SIGNATURE_OFFLOAD: sig_caps = signatures;
            DCI_STREAMS: dci_streams_caps = [
                features.streams.log_concurrent,
                features.streams.log_errored,
            ];
            WR_MEMCPY_LENGTH: max_wr_memcpy_length = caps.longest_memcpy as usize;
            CRYPTO_OFFLOAD: crypto_caps = encryption;
            MAX_DC_RD_ATOM:
                max_dc_rd_atom = caps.dc_reads[0], max_dc_init_rd_atom = caps.dc_reads[1];
        }
        if requested & OOO_RECV_WRS != 0 && features.out_of_order {
            (*answer).ooo_recv_wrs_caps = out_of_order;
            valid |= OOO_RECV_WRS;
        }
        if requested & NUM_LAG_PORTS != 0 && caps.lag_ports != 0 {
            (*answer).num_lag_ports = caps.lag_ports;
            valid |= NUM_LAG_PORTS;
        }
        if let (true, Some(record)) = (requested & CLOCK_INFO_UPDATE != 0, device.clock().record())
        {
            (*answer).max_clock_info_update_nsec = record.overflow_period;
            valid |= CLOCK_INFO_UPDATE;
        }
        let counter = device.clock().counter_address();
        if let (true, Some(counter)) = (requested & HCA_CORE_CLOCK != 0, counter) {
            (*answer).hca_core_clock = counter.as_ptr().cast();
            valid |= HCA_CORE_CLOCK;
        }
        (*answer).version = 0;
        (*answer).flags = flags;
        (*answer).comp_mask = valid;
    }
    Ok(())
}
