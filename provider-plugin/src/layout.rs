//! Offsets and sizes in libibverbs that differ between releases.
//!
//! libibverbs and its providers share structures that carry no size and no
//! version of their own. Between rdma-core 34 and 65 some of them moved, and
//! all but one of those by growing at one end only:
//! - `verbs_context_ops` is alphabetical; a new operation shifts all after it;
//! - `verbs_context` grows at its front, its last member is `ibv_context`;
//! - `ibv_qp_ex` grows at its end, which moves what follows it in `verbs_qp`;
//! - `ibv_port_attr`, which libibverbs allocates and we fill, grew at its end;
//! - `verbs_sysfs_dev` got a member in its middle.
//!
//! So a [`Layout`] is a range of releases, and everything else follows from
//! the release in which a member was added. The tests compare the outcome with
//! the sizes and offsets that pahole reads from every sampled release, and
//! with the C headers where those are installed.

use core::mem::size_of;

use crate::abi::{ibv_context, ibv_xrcd, verbs_qp, wr_atomic_write_fn, wr_flush_fn};
use crate::library::libibverbs;

/// An operation of `verbs_context_ops` and the rdma-core release it came with.
struct OpEntry {
    name: &'static str,
    since: u32,
}

/// Lists operations; those without a release exist since 34.
macro_rules! ops {
    ($($name:ident $($since:literal)?,)+) => {
        &[$(OpEntry { name: stringify!($name), since: ops!(@since $($since)?) }),+]
    };
    (@since) => { 34 };
    (@since $since:literal) => { $since };
}

/// Every operation up to rdma-core 65, in the order of the C structure.
const OPS: &[OpEntry] = ops! {
    advise_mr,
    alloc_buf 64,
    alloc_dm,
    alloc_dmah 59,
    alloc_mw,
    alloc_null_mr,
    alloc_parent_domain,
    alloc_pd,
    alloc_td,
    async_event,
    attach_counters_point_flow,
    attach_mcast,
    bind_mw,
    close_xrcd,
    cq_event,
    create_ah,
    create_comp_cntr 65,
    create_counters,
    create_cq,
    create_cq_ex,
    create_flow,
    create_flow_action_esp,
    create_qp,
    create_qp_ex,
    create_rwq_ind_table,
    create_srq,
    create_srq_ex,
    create_wq,
    dealloc_dmah 59,
    dealloc_mw,
    dealloc_pd,
    dealloc_td,
    dereg_mr,
    destroy_ah,
    destroy_comp_cntr 65,
    destroy_counters,
    destroy_cq,
    destroy_flow,
    destroy_flow_action,
    destroy_qp,
    destroy_rwq_ind_table,
    destroy_srq,
    destroy_wq,
    detach_mcast,
    dm_export_dmabuf_fd 62,
    free_buf 64,
    free_context,
    free_dm,
    get_srq_num,
    import_dm 35,
    import_mr,
    import_pd,
    inc_comp_cntr 65,
    inc_err_comp_cntr 65,
    modify_cq,
    modify_flow_action_esp,
    modify_qp,
    modify_qp_rate_limit,
    modify_srq,
    modify_wq,
    open_qp,
    open_xrcd,
    poll_cq,
    post_recv,
    post_send,
    post_srq_ops,
    post_srq_recv,
    qp_attach_comp_cntr 65,
    query_comp_cntr_caps 65,
    query_device_ex,
    query_ece,
    query_port,
    query_port_speed 62,
    query_qp,
    query_qp_data_in_order 36,
    query_rt_values,
    query_srq,
    read_comp_cntr 65,
    read_counters,
    read_err_comp_cntr 65,
    reg_dm_mr,
    reg_dmabuf_mr,
    reg_mr,
    reg_mr_ex 59,
    req_notify_cq,
    rereg_mr,
    resize_cq,
    set_comp_cntr 65,
    set_ece,
    set_err_comp_cntr 65,
    unimport_dm 35,
    unimport_mr,
    unimport_pd,
};

/// Pointers at the front of `verbs_context` in release 34, `priv` and `sz`
/// included; on every architecture they are all one word.
const CONTEXT_WORDS: usize = 40;

/// Words that later releases inserted before these.
const CONTEXT_ADDED: &[(u32, usize)] = &[
    (59, 3), // alloc_dmah, dealloc_dmah, reg_mr_ex
    (62, 1), // dm_export_dmabuf_fd
    (64, 2), // alloc_buf, free_buf
];

/// rdma-core release that appended `wr_atomic_write` to `ibv_qp_ex`.
const ATOMIC_WRITE_SINCE: u32 = 44;
/// rdma-core release that appended `wr_flush` to `ibv_qp_ex`.
const FLUSH_SINCE: u32 = 45;
/// rdma-core release that inserted `num_ports` into `verbs_sysfs_dev`.
const NUM_PORTS_SINCE: u32 = 35;
/// rdma-core release that appended `active_speed_ex` to `ibv_port_attr`.
const ACTIVE_SPEED_EX_SINCE: u32 = 49;

/// A range of rdma-core releases that share one set of structures.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// The private ABI number: the `N` of `IBVERBS_PRIVATE_N`.
    pub pabi: u32,
    /// First rdma-core release of the range.
    pub first: u32,
    /// Last rdma-core release of the range.
    pub last: u32,
}

/// Every supported layout, oldest first.
pub const LAYOUTS: &[Layout] = &[
    Layout {
        pabi: 34,
        first: 34,
        last: 34,
    },
    Layout {
        pabi: 34,
        first: 35,
        last: 35,
    },
    Layout {
        pabi: 34,
        first: 36,
        last: 43,
    },
    Layout {
        pabi: 34,
        first: 44,
        last: 44,
    },
    Layout {
        pabi: 34,
        first: 45,
        last: 48,
    },
    Layout {
        pabi: 34,
        first: 49,
        last: 56,
    },
    Layout {
        pabi: 57,
        first: 57,
        last: 58,
    },
    Layout {
        pabi: 59,
        first: 59,
        last: 61,
    },
    Layout {
        pabi: 59,
        first: 62,
        last: 63,
    },
    Layout {
        pabi: 64,
        first: 64,
        last: 64,
    },
    Layout {
        pabi: 65,
        first: 65,
        last: 65,
    },
];

impl Layout {
    /// The layout of an rdma-core release.
    // Inline, so that it is among the code of registration.
    #[inline]
    pub fn of_release(release: u32) -> Option<&'static Layout> {
        LAYOUTS
            .iter()
            .find(|l| (l.first..=l.last).contains(&release))
    }

    /// Index of an operation in `verbs_context_ops`, if this layout has it.
    pub fn op_index(&self, name: &str) -> Option<usize> {
        self.ops().position(|op| op == name)
    }

    /// The operations of `verbs_context_ops`, in order.
    pub fn ops(&self) -> impl Iterator<Item = &'static str> + '_ {
        OPS.iter()
            .filter(|op| op.since <= self.first)
            .map(|op| op.name)
    }

    /// Number of operations in `verbs_context_ops`.
    #[cfg(test)]
    pub fn op_count(&self) -> usize {
        self.ops().count()
    }

    /// Offset of the public `ibv_context` in `verbs_context`, in bytes.
    pub fn context_offset(&self) -> usize {
        let added: usize = CONTEXT_ADDED
            .iter()
            .filter(|(since, _)| *since <= self.first)
            .map(|(_, n)| n)
            .sum();
        (CONTEXT_WORDS + added) * size_of::<usize>()
    }

    /// Size of `verbs_context`, in bytes.
    pub fn context_size(&self) -> usize {
        self.context_offset() + size_of::<ibv_context>()
    }

    /// Whether `ibv_qp_ex` has `wr_atomic_write`.
    pub fn has_wr_atomic_write(&self) -> bool {
        self.first >= ATOMIC_WRITE_SINCE
    }

    /// Whether `ibv_qp_ex` has `wr_flush`.
    pub fn has_wr_flush(&self) -> bool {
        self.first >= FLUSH_SINCE
    }

    /// Words of [`verbs_qp::tail`] that belong to `ibv_qp_ex`.
    pub const fn extra_qp_words(&self) -> usize {
        (self.first >= ATOMIC_WRITE_SINCE) as usize + (self.first >= FLUSH_SINCE) as usize
    }

    /// Offset of `verbs_qp.comp_mask`, in bytes.
    #[cfg(test)]
    pub fn qp_comp_mask_offset(&self) -> usize {
        size_of::<crate::abi::ibv_qp_ex>() + self.extra_qp_words() * size_of::<usize>()
    }

    /// Size of `verbs_qp`, in bytes. [`verbs_qp`] is never smaller.
    #[cfg(test)]
    pub fn qp_size(&self) -> usize {
        self.qp_comp_mask_offset() + 2 * size_of::<usize>()
    }

    /// Offset of `num_ports` in `verbs_sysfs_dev`, in bytes.
    pub fn sysfs_num_ports_offset(&self) -> Option<usize> {
        let after_idx = core::mem::offset_of!(crate::abi::verbs_sysfs_dev, ibdev_idx) + 4;
        (self.first >= NUM_PORTS_SINCE).then_some(after_idx)
    }

    /// Whether `ibv_port_attr` has `active_speed_ex` behind `port_cap_flags2`.
    pub fn port_attr_has_active_speed_ex(&self) -> bool {
        self.first >= ACTIVE_SPEED_EX_SINCE
    }

    /// Sets `verbs_qp.comp_mask` (`VERBS_QP_XRCD`, `VERBS_QP_EX`).
    pub fn set_qp_comp_mask(&self, qp: &mut verbs_qp, comp_mask: u32) {
        // The C member is 32 bits wide and followed by padding. The lower half
        // of the word comes first on the little-endian machines supported.
        qp.tail[self.extra_qp_words()] = comp_mask as usize;
    }

    /// Sets `verbs_qp.xrcd`.
    pub fn set_qp_xrcd(&self, qp: &mut verbs_qp, xrcd: *mut ibv_xrcd) {
        qp.tail[self.extra_qp_words() + 1] = xrcd.expose_provenance();
    }

    /// Reads `verbs_qp.comp_mask`.
    #[cfg(test)]
    pub fn qp_comp_mask(&self, qp: &verbs_qp) -> u32 {
        qp.tail[self.extra_qp_words()] as u32
    }

    /// Sets `ibv_qp_ex.wr_atomic_write`. Returns false and does nothing if the release does
    /// not have it.
    pub fn set_wr_atomic_write(&self, qp: &mut verbs_qp, f: Option<wr_atomic_write_fn>) -> bool {
        if self.has_wr_atomic_write() {
            qp.tail[0] = f.map_or(0, |f| f as usize);
        }
        self.has_wr_atomic_write()
    }

    /// Sets `ibv_qp_ex.wr_flush`. Returns false and does nothing if the release does not
    /// have it.
    pub fn set_wr_flush(&self, qp: &mut verbs_qp, f: Option<wr_flush_fn>) -> bool {
        if self.has_wr_flush() {
            qp.tail[1] = f.map_or(0, |f| f as usize);
        }
        self.has_wr_flush()
    }
}

impl core::fmt::Display for Layout {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.first == self.last {
            write!(f, "rdma-core {}", self.first)
        } else {
            write!(f, "rdma-core {} to {}", self.first, self.last)
        }
    }
}

#[cfg(not(all(target_endian = "little", target_pointer_width = "64")))]
compile_error!("the layouts of libibverbs are known for 64-bit little-endian machines");

/// The layout of the libibverbs that loaded the plugin.
///
/// Registration sets it before any entry point runs. Before that it is the newest layout,
/// whose `verbs_qp` is the largest.
pub fn current() -> &'static Layout {
    libibverbs().map_or(&LAYOUTS[LAYOUTS.len() - 1], |lib| lib.layout)
}

#[cfg(test)]
mod tests;
