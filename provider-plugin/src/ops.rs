//! The operations, in the order of a release of libibverbs.

use core::ffi::{c_int, c_void};

use crate::abi::*;
use crate::layout::Layout;
use crate::library::OpsTable;
use crate::mlx5::Mlx5;
use crate::rxe::Rxe;
use crate::{ah, cq, device, mcast, mr, mw, open, pd, post, qp, srq, xrc};

/// Checks each function against its C type, and names it.
macro_rules! operations {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)? = $function:path;)+) => {
        [$((
            stringify!($name),
            $function as unsafe extern "C" fn($($arg),*) $(-> $ret)? as usize,
        )),+]
    };
}

/// The operations that a device implements.
pub trait ContextOps: pd::PdOps + ah::AhOps + qp::QpOps + device::QueryOps {
    /// Device-specific operations.
    fn specific_operations() -> impl IntoIterator<Item = (&'static str, usize)>;
}

impl ContextOps for Rxe {
    fn specific_operations() -> impl IntoIterator<Item = (&'static str, usize)> {
        use crate::rxe::cq;
        operations! {
            poll_cq: fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int = cq::poll_cq;
            resize_cq: fn(*mut ibv_cq, c_int) -> c_int = cq::resize_cq;
        }
    }
}

impl ContextOps for Mlx5 {
    fn specific_operations() -> impl IntoIterator<Item = (&'static str, usize)> {
        use crate::dmah::{self, ibv_dmah, ibv_dmah_init_attr};
        use crate::flow::{self, ibv_flow, ibv_flow_attr};
        use crate::mlx5::counters::{self, ibv_counters};
        use crate::mlx5::counters::{ibv_counter_attach_attr, ibv_counters_init_attr};
        use crate::mlx5::flow_action::{self, ibv_flow_action};
        use crate::mlx5::qp::{self as mlx5_qp, ibv_ece, ibv_qp_rate_limit_attr};
        use crate::mlx5::{clock, cq, dm, srq as mlx5_srq, wq};
        operations! {
            alloc_dmah: fn(*mut ibv_context, *mut ibv_dmah_init_attr)
                -> *mut ibv_dmah = dmah::alloc_dmah;
            alloc_dm: fn(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm = dm::alloc_dm;
            alloc_null_mr: fn(*mut ibv_pd) -> *mut ibv_mr = dm::alloc_null_mr;
            attach_counters_point_flow: fn(*mut ibv_counters, *mut ibv_counter_attach_attr,
                *mut ibv_flow) -> c_int = counters::attach_counters_point_flow;
            close_xrcd: fn(*mut ibv_xrcd) -> c_int = xrc::close_xrcd;
            cq_event: fn(*mut ibv_cq) = cq::cq_event;
            create_counters: fn(*mut ibv_context, *mut ibv_counters_init_attr)
                -> *mut ibv_counters = counters::create_counters;
            create_flow: fn(*mut ibv_qp, *mut ibv_flow_attr) -> *mut ibv_flow = flow::create_flow;
            create_rwq_ind_table: fn(*mut ibv_context, *mut ibv_rwq_ind_table_init_attr)
                -> *mut ibv_rwq_ind_table = wq::create_rwq_ind_table;
            create_wq: fn(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq = wq::create_wq;
            dealloc_dmah: fn(*mut ibv_dmah) -> c_int = dmah::dealloc_dmah;
            destroy_counters: fn(*mut ibv_counters) -> c_int = counters::destroy_counters;
            destroy_flow: fn(*mut ibv_flow) -> c_int = flow::destroy_flow;
            destroy_flow_action: fn(*mut ibv_flow_action)
                -> c_int = flow_action::destroy_flow_action;
            destroy_rwq_ind_table: fn(*mut ibv_rwq_ind_table) -> c_int = wq::destroy_rwq_ind_table;
            destroy_wq: fn(*mut ibv_wq) -> c_int = wq::destroy_wq;
            dm_export_dmabuf_fd: fn(*mut ibv_dm) -> c_int = dm::dm_export_dmabuf_fd;
            free_dm: fn(*mut ibv_dm) -> c_int = dm::free_dm;
            import_dm: fn(*mut ibv_context, u32) -> *mut ibv_dm = dm::import_dm;
            modify_qp_rate_limit: fn(*mut ibv_qp, *mut ibv_qp_rate_limit_attr)
                -> c_int = mlx5_qp::modify_qp_rate_limit;
            modify_wq: fn(*mut ibv_wq, *mut ibv_wq_attr) -> c_int = wq::modify_wq;
            open_qp: fn(*mut ibv_context, *mut ibv_qp_open_attr)
                -> *mut ibv_qp = xrc::open_qp::<Self>;
            open_xrcd: fn(*mut ibv_context, *mut ibv_xrcd_init_attr)
                -> *mut ibv_xrcd = xrc::open_xrcd;
            poll_cq: fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int = cq::poll_cq;
            post_srq_ops: fn(*mut ibv_srq, *mut ibv_ops_wr, *mut *mut ibv_ops_wr)
                -> c_int = mlx5_srq::post_srq_ops;
            query_ece: fn(*mut ibv_qp, *mut ibv_ece) -> c_int = mlx5_qp::query_ece;
            query_qp_data_in_order: fn(*mut ibv_qp, u32, u32)
                -> c_int = mlx5_qp::query_qp_data_in_order;
            query_rt_values: fn(*mut ibv_context, *mut ibv_values_ex)
                -> c_int = clock::query_rt_values;
            read_counters: fn(*mut ibv_counters, *mut u64, u32, u32)
                -> c_int = counters::read_counters;
            reg_dm_mr: fn(*mut ibv_pd, *mut ibv_dm, u64, usize, u32) -> *mut ibv_mr = dm::reg_dm_mr;
            resize_cq: fn(*mut ibv_cq, c_int) -> c_int = cq::resize_cq;
            set_ece: fn(*mut ibv_qp, *mut ibv_ece) -> c_int = mlx5_qp::set_ece;
            unimport_dm: fn(*mut ibv_dm) = dm::unimport_dm;
        }
    }
}

/// All operations of a device.
fn operations<D: ContextOps>() -> impl Iterator<Item = (&'static str, usize)> {
    operations! {
        advise_mr: fn(*mut ibv_pd, u32, u32, *mut ibv_sge, u32) -> c_int = mr::advise_mr;
        alloc_mw: fn(*mut ibv_pd, u32) -> *mut ibv_mw = mw::alloc_mw;
        alloc_parent_domain: fn(*mut ibv_context, *mut ibv_parent_domain_init_attr)
            -> *mut ibv_pd = pd::alloc_parent_domain;
        alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd = pd::alloc_pd::<D>;
        alloc_td: fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td = pd::alloc_td::<D>;
        attach_mcast: fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int = mcast::attach_mcast;
        bind_mw: fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int = post::bind_mw::<D>;
        create_ah: fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah = ah::create_ah::<D>;
        create_cq: fn(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int)
            -> *mut ibv_cq = cq::create_cq::<D>;
        create_cq_ex: fn(*mut ibv_context, *mut ibv_cq_init_attr_ex)
            -> *mut ibv_cq_ex = cq::create_cq_ex::<D>;
        create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp = qp::create_qp::<D>;
        create_qp_ex: fn(*mut ibv_context, *mut ibv_qp_init_attr_ex)
            -> *mut ibv_qp = qp::create_qp_ex::<D>;
        create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq = srq::create_srq::<D>;
        create_srq_ex: fn(*mut ibv_context, *mut ibv_srq_init_attr_ex)
            -> *mut ibv_srq = srq::create_srq_ex::<D>;
        dealloc_mw: fn(*mut ibv_mw) -> c_int = mw::dealloc_mw;
        dealloc_pd: fn(*mut ibv_pd) -> c_int = pd::dealloc_pd;
        dealloc_td: fn(*mut ibv_td) -> c_int = pd::dealloc_td::<D>;
        dereg_mr: fn(*mut verbs_mr) -> c_int = mr::dereg_mr;
        destroy_ah: fn(*mut ibv_ah) -> c_int = ah::destroy_ah::<D>;
        destroy_cq: fn(*mut ibv_cq) -> c_int = cq::destroy_cq::<D>;
        destroy_qp: fn(*mut ibv_qp) -> c_int = qp::destroy_qp::<D>;
        destroy_srq: fn(*mut ibv_srq) -> c_int = srq::destroy_srq::<D>;
        detach_mcast: fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int = mcast::detach_mcast;
        free_context: fn(*mut ibv_context) = open::free_context;
        get_srq_num: fn(*mut ibv_srq, *mut u32) -> c_int = srq::get_srq_num::<D>;
        import_mr: fn(*mut ibv_pd, u32) -> *mut ibv_mr = mr::import_mr;
        import_pd: fn(*mut ibv_context, u32) -> *mut ibv_pd = pd::import_pd::<D>;
        modify_cq: fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int = cq::modify_cq::<D>;
        modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int = qp::modify_qp::<D>;
        modify_srq: fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int = srq::modify_srq::<D>;
        post_recv: fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr)
            -> c_int = post::post_recv::<D>;
        post_send: fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr)
            -> c_int = post::post_send::<D>;
        post_srq_recv: fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr)
            -> c_int = post::post_srq_recv::<D>;
        query_device_ex: fn(*mut ibv_context, *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex, usize) -> c_int = device::query_device_ex::<D>;
        query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int = device::query_port;
        query_port_speed: fn(*mut ibv_context, u32, *mut u64)
            -> c_int = device::query_port_speed;
        query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr)
            -> c_int = qp::query_qp::<D>;
        query_srq: fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int = srq::query_srq::<D>;
        reg_dmabuf_mr: fn(*mut ibv_pd, u64, usize, u64, c_int, c_int)
            -> *mut ibv_mr = mr::reg_dmabuf_mr;
        reg_mr: fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr = mr::reg_mr;
        reg_mr_ex: fn(*mut ibv_pd, *mut ibv_mr_init_attr) -> *mut ibv_mr = mr::reg_mr_ex;
        req_notify_cq: fn(*mut ibv_cq, c_int) -> c_int = cq::req_notify_cq::<D>;
        rereg_mr: fn(*mut verbs_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int)
            -> c_int = mr::rereg_mr;
        unimport_mr: fn(*mut ibv_mr) = mr::unimport_mr;
        unimport_pd: fn(*mut ibv_pd) = pd::unimport_pd;
    }
    .into_iter()
    .chain(D::specific_operations())
}

/// The operations of a device in the order of a layout, without those that the
/// layout lacks.
pub fn table<D: ContextOps>(layout: &Layout) -> OpsTable {
    OpsTable::new(layout, operations::<D>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::LAYOUTS;

    fn every_operation_has_its_offset<D: ContextOps>() {
        for layout in LAYOUTS {
            let table = table::<D>(layout);
            let mut set = 0;
            for (name, function) in operations::<D>() {
                match layout.op_index(name) {
                    // Once: a duplicate would replace it.
                    Some(index) => {
                        assert_eq!(table.word(index), function, "{layout}: {name}");
                        set += 1;
                    }
                    None => {
                        let since = match name {
                            "import_dm" | "unimport_dm" => 35,
                            "query_qp_data_in_order" => 36,
                            "alloc_dmah" | "dealloc_dmah" | "reg_mr_ex" => 59,
                            "dm_export_dmabuf_fd" | "query_port_speed" => 62,
                            _ => 0,
                        };
                        assert!(layout.first < since, "{layout}: {name}");
                    }
                }
            }
            // None was dropped.
            assert_eq!(table.set(), set);
        }
    }

    #[test]
    fn every_operation_is_at_its_index_once() {
        every_operation_has_its_offset::<Rxe>();
        every_operation_has_its_offset::<Mlx5>();
    }

    /// The documentation names the operations that are not set, with the reason.
    #[test]
    fn every_operation_is_set_or_documented() {
        let page = include_str!("../../docs/mlx5.md");
        let section = page.split("## Unsupported operations").nth(1).unwrap();
        let section = section.split("\n## ").next().unwrap();
        let refused: Vec<_> = section.split('`').skip(1).step_by(2).collect();
        let ours: Vec<_> = operations::<Mlx5>().map(|(name, _)| name).collect();
        for name in LAYOUTS.iter().flat_map(Layout::ops) {
            assert!(ours.contains(&name) != refused.contains(&name), "{name}");
        }
    }

    /// libibverbs keeps its own functions, which fail, for operations that are not set.
    #[test]
    fn mlx5_sets_every_operation_of_rxe() {
        let names: Vec<_> = operations::<Mlx5>().map(|(name, _)| name).collect();
        for (name, _) in operations::<Rxe>() {
            assert!(names.contains(&name), "{name}");
        }
    }
}
