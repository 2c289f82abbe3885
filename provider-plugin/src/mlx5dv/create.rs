//! Completion queues and queue pairs with device-specific options.

use mlx5::{CqOptions, DcType, DciStreams, MiniFormat, PacketOptions, Strides};

use super::abi::*;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::*;
use crate::cq::create_cq_with;
use crate::entry;
use crate::errno::Errno;
use crate::library::libibverbs;
use crate::mlx5::cq::Format;
use crate::mlx5::qp::{Options, ScatterToCqe};
use crate::mlx5::{Mlx5, entries, wq};
use crate::qp::create_qp_with;

exported! {
    /// `mlx5dv_create_cq`: CQEs of 64 or 128 bytes, compressed or padded. EOPNOTSUPP
    /// for what the device or the plugin does not have.
    fn mlx5dv_create_cq(
        context: *mut ibv_context,
        attr: *mut ibv_cq_init_attr_ex,
        mlx5_attr: *mut mlx5dv_cq_init_attr
    ) -> *mut ibv_cq_ex
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context of ours, and the caller's attributes.
        entry::pointer(|| unsafe {
            let options = Format(Some(cq_options(mlx5_attr.as_ref())?));
            let init_cq = libibverbs().and_then(|lib| lib.init_cq);
            let init_cq = init_cq.ok_or(Errno::OPNOTSUPP)?;
            let cq = create_cq_with::<Mlx5>(context, attr, &options)?;
            // As libibverbs does for a queue that a provider created.
            init_cq(cq.cast(), context, (*attr).channel, (*attr).cq_context);
            Ok(cq)
        })
    }

    /// `mlx5dv_create_wq`. The program itself writes into a queue with strides.
    fn mlx5dv_create_wq(
        context: *mut ibv_context,
        attr: *mut ibv_wq_init_attr,
        mlx5_attr: *mut mlx5dv_wq_init_attr
    ) -> *mut ibv_wq
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context of ours, and the caller's attributes.
        entry::pointer(|| unsafe {
            // Other members only if the mask says so: a header may lack them.
            let mask = match mlx5_attr.is_null() {
                true => 0,
                false => (*mlx5_attr).comp_mask,
            };
            if mask & !WQ_MASK_STRIDES != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let strides = (mask & WQ_MASK_STRIDES != 0).then(|| {
                let requested = (*mlx5_attr).striding_rq_attrs;
                Strides {
                    log_bytes: requested.single_stride_log_num_of_bytes,
                    log_count: requested.single_wqe_log_num_of_strides,
                    shift: requested.two_byte_shift_en != 0,
                }
            });
            wq::create(&mut *attr, strides)
        })
    }

    /// `mlx5dv_create_qp`: data in CQEs or not, credits by packets, DC, memory keys, raw
    /// WQEs, copies.
    fn mlx5dv_create_qp(
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
        mlx5_attr: *mut mlx5dv_qp_init_attr
    ) -> *mut ibv_qp
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context of ours, and the caller's attributes.
        entry::pointer(|| unsafe {
            create_qp_with::<Mlx5>(context, attr, &qp_options(mlx5_attr.as_ref())?)
        })
    }
}

pub(super) fn cq_options(mlx5_attr: Option<&mlx5dv_cq_init_attr>) -> Result<CqOptions, Errno> {
    use cq_mask::*;
    let Some(mlx5_attr) = mlx5_attr else {
        return entries::sized_cq_options();
    };
    if mlx5_attr.comp_mask & !(COMPRESSED_CQE | FLAGS | CQE_SIZE) != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let has = |member| mlx5_attr.comp_mask & member != 0;
    let mut options = match has(CQE_SIZE) {
        true => entries::cq_options(),
        false => entries::sized_cq_options()?,
    };
    if has(CQE_SIZE) {
        options.wide = match mlx5_attr.cqe_size {
            64 => false,
            128 => true,
            _ => return Err(Errno::INVAL),
        };
    }
    if has(COMPRESSED_CQE) {
        options.compression = match mlx5_attr.cqe_comp_res_format {
            comp_format::HASH => Some(MiniFormat::Hash),
            comp_format::CSUM => Some(MiniFormat::Checksum),
            _ => return Err(Errno::OPNOTSUPP),
        };
    }
    if has(FLAGS) {
        if mlx5_attr.flags & !CQ_FLAG_CQE_PAD != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        options.padded = mlx5_attr.flags & CQ_FLAG_CQE_PAD != 0;
        // CQEs of 64 bytes have no padding.
        if options.padded && !options.wide {
            return Err(Errno::INVAL);
        }
    }
    Ok(options)
}

pub(super) fn qp_options(mlx5_attr: Option<&mlx5dv_qp_init_attr>) -> Result<Options, Errno> {
    use qp_flag::*;
    let mut options = Options::default();
    let Some(mlx5_attr) = mlx5_attr else {
        return Ok(options);
    };
    let has = |member| mlx5_attr.comp_mask & member != 0;
    let known =
        qp_mask::QP_CREATE_FLAGS | qp_mask::DC | qp_mask::SEND_OPS_FLAGS | qp_mask::DCI_STREAMS;
    if mlx5_attr.comp_mask & !known != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if has(qp_mask::SEND_OPS_FLAGS) {
        if mlx5_attr.send_ops_flags & !send_ops::ALL != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        options.operations = mlx5_attr.send_ops_flags;
    }
    if has(qp_mask::DC) {
        let attr = &mlx5_attr.dc_init_attr;
        options.dc_type = Some(match (attr.dc_type, has(qp_mask::DCI_STREAMS)) {
            (dc_type::DCT, false) => DcType::Target {
                access_key: attr.dct_access_key,
            },
            (dc_type::DCI, with_streams) => {
                let [log_concurrent, log_errored, ..] = attr.dct_access_key.to_ne_bytes();
                let streams = DciStreams {
                    log_concurrent,
                    log_errored,
                };
                DcType::Initiator {
                    streams: with_streams.then_some(streams),
                }
            }
            _ => return Err(Errno::INVAL),
        });
    } else if has(qp_mask::DCI_STREAMS) {
        return Err(Errno::INVAL);
    }
    if has(qp_mask::QP_CREATE_FLAGS) {
        let flags = mlx5_attr.create_flags;
        let known = TUNNEL_OFFLOADS
            | TIR_ALLOW_SELF_LOOPBACK_UC
            | TIR_ALLOW_SELF_LOOPBACK_MC
            | DISABLE_SCATTER_TO_CQE
            | ALLOW_SCATTER_TO_CQE
            | PACKET_BASED_CREDIT_MODE
            | SIG_PIPELINING
            | OOO_DP;
        if flags & !known != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        options.scatter_to_cqe = match (
            flags & DISABLE_SCATTER_TO_CQE != 0,
            flags & ALLOW_SCATTER_TO_CQE != 0,
        ) {
            (true, true) => return Err(Errno::INVAL),
            (true, false) => ScatterToCqe::Disabled,
            (false, true) => ScatterToCqe::Allowed,
            (false, false) => ScatterToCqe::Default,
        };
        options.packets = PacketOptions {
            self_loopback_unicast: flags & TIR_ALLOW_SELF_LOOPBACK_UC != 0,
            self_loopback_multicast: flags & TIR_ALLOW_SELF_LOOPBACK_MC != 0,
            tunnels: flags & TUNNEL_OFFLOADS != 0,
        };
        options.out_of_order = flags & OOO_DP != 0;
        options.sig_pipelining = flags & SIG_PIPELINING != 0;
        options.packet_credits = flags & PACKET_BASED_CREDIT_MODE != 0;
    }
    Ok(options)
}
