//! The operations, in the order in which a release of libibverbs wants them.

use core::ffi::{c_int, c_void};

use crate::abi::*;
use crate::layout::Layout;
use crate::library::OpsTable;
use crate::mlx5_face::{self, Mlx5};
use crate::rxe_face::{self, Rxe};
use crate::{ah, cq, device, mcast, mr, mw, open, pd, post, qp, srq};

/// Checks each function against its C type, and names it.
macro_rules! operations {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)? = $function:path;)+) => {
        [$((
            stringify!($name),
            $function as unsafe extern "C" fn($($arg),*) $(-> $ret)? as usize,
        )),+]
    };
}

/// Every operation that this provider has.
fn operations() -> impl IntoIterator<Item = (&'static str, usize)> {
    operations! {
        advise_mr: fn(*mut ibv_pd, u32, u32, *mut ibv_sge, u32) -> c_int = mr::advise_mr;
        alloc_mw: fn(*mut ibv_pd, u32) -> *mut ibv_mw = mw::alloc_mw;
        alloc_parent_domain: fn(*mut ibv_context, *mut ibv_parent_domain_init_attr)
            -> *mut ibv_pd = pd::alloc_parent_domain;
        alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd = pd::alloc_pd;
        alloc_td: fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td = pd::alloc_td;
        attach_mcast: fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int = mcast::attach_mcast;
        bind_mw: fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int = rxe_face::post::bind_mw;
        create_ah: fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah = ah::create_ah;
        create_cq: fn(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int)
            -> *mut ibv_cq = cq::create_cq::<Rxe>;
        create_cq_ex: fn(*mut ibv_context, *mut ibv_cq_init_attr_ex)
            -> *mut ibv_cq_ex = cq::create_cq_ex::<Rxe>;
        create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp = qp::create_qp::<Rxe>;
        create_qp_ex: fn(*mut ibv_context, *mut ibv_qp_init_attr_ex)
            -> *mut ibv_qp = qp::create_qp_ex::<Rxe>;
        create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq = srq::create_srq::<Rxe>;
        create_srq_ex: fn(*mut ibv_context, *mut ibv_srq_init_attr_ex)
            -> *mut ibv_srq = srq::create_srq_ex::<Rxe>;
        dealloc_mw: fn(*mut ibv_mw) -> c_int = mw::dealloc_mw;
        dealloc_pd: fn(*mut ibv_pd) -> c_int = pd::dealloc_pd;
        dealloc_td: fn(*mut ibv_td) -> c_int = pd::dealloc_td;
        dereg_mr: fn(*mut verbs_mr) -> c_int = mr::dereg_mr;
        destroy_ah: fn(*mut ibv_ah) -> c_int = ah::destroy_ah;
        destroy_cq: fn(*mut ibv_cq) -> c_int = cq::destroy_cq::<Rxe>;
        destroy_qp: fn(*mut ibv_qp) -> c_int = qp::destroy_qp::<Rxe>;
        destroy_srq: fn(*mut ibv_srq) -> c_int = srq::destroy_srq::<Rxe>;
        detach_mcast: fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int = mcast::detach_mcast;
        free_context: fn(*mut ibv_context) = open::free_context;
        get_srq_num: fn(*mut ibv_srq, *mut u32) -> c_int = srq::get_srq_num::<Rxe>;
        import_mr: fn(*mut ibv_pd, u32) -> *mut ibv_mr = mr::import_mr;
        import_pd: fn(*mut ibv_context, u32) -> *mut ibv_pd = pd::import_pd;
        modify_cq: fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int = cq::modify_cq::<Rxe>;
        modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int = qp::modify_qp::<Rxe>;
        modify_srq: fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int = srq::modify_srq::<Rxe>;
        poll_cq: fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int = rxe_face::cq::poll_cq;
        post_recv: fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr)
            -> c_int = post::post_recv::<Rxe>;
        post_send: fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr)
            -> c_int = rxe_face::post::post_send;
        post_srq_recv: fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr)
            -> c_int = post::post_srq_recv::<Rxe>;
        query_device_ex: fn(*mut ibv_context, *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex, usize) -> c_int = device::query_device_ex;
        query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int = device::query_port;
        query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr)
            -> c_int = qp::query_qp::<Rxe>;
        query_srq: fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int = srq::query_srq::<Rxe>;
        reg_dmabuf_mr: fn(*mut ibv_pd, u64, usize, u64, c_int, c_int)
            -> *mut ibv_mr = mr::reg_dmabuf_mr;
        reg_mr: fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr = mr::reg_mr;
        reg_mr_ex: fn(*mut ibv_pd, *mut ibv_mr_init_attr) -> *mut ibv_mr = mr::reg_mr_ex;
        req_notify_cq: fn(*mut ibv_cq, c_int) -> c_int = cq::req_notify_cq::<Rxe>;
        rereg_mr: fn(*mut verbs_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int)
            -> c_int = mr::rereg_mr;
        resize_cq: fn(*mut ibv_cq, c_int) -> c_int = rxe_face::cq::resize_cq;
        unimport_mr: fn(*mut ibv_mr) = mr::unimport_mr;
        unimport_pd: fn(*mut ibv_pd) = pd::unimport_pd;
    }
}

/// What mlx5 has of its own: in place of the operations of the same names, or
/// besides.
fn mlx5_operations() -> impl IntoIterator<Item = (&'static str, usize)> {
    use crate::mlx5_face::{ah, pd, refused};
    operations! {
        alloc_mw: fn(*mut ibv_pd, u32) -> *mut ibv_mw = refused::alloc_mw;
        alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd = pd::alloc_pd;
        bind_mw: fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int = refused::bind_mw;
        cq_event: fn(*mut ibv_cq) = mlx5_face::cq::cq_event;
        create_ah: fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah = ah::create_ah;
        create_cq: fn(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int)
            -> *mut ibv_cq = cq::create_cq::<Mlx5>;
        create_cq_ex: fn(*mut ibv_context, *mut ibv_cq_init_attr_ex)
            -> *mut ibv_cq_ex = cq::create_cq_ex::<Mlx5>;
        create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp = qp::create_qp::<Mlx5>;
        create_qp_ex: fn(*mut ibv_context, *mut ibv_qp_init_attr_ex)
            -> *mut ibv_qp = qp::create_qp_ex::<Mlx5>;
        create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq = srq::create_srq::<Mlx5>;
        create_srq_ex: fn(*mut ibv_context, *mut ibv_srq_init_attr_ex)
            -> *mut ibv_srq = srq::create_srq_ex::<Mlx5>;
        destroy_ah: fn(*mut ibv_ah) -> c_int = ah::destroy_ah;
        destroy_cq: fn(*mut ibv_cq) -> c_int = cq::destroy_cq::<Mlx5>;
        destroy_qp: fn(*mut ibv_qp) -> c_int = qp::destroy_qp::<Mlx5>;
        destroy_srq: fn(*mut ibv_srq) -> c_int = srq::destroy_srq::<Mlx5>;
        get_srq_num: fn(*mut ibv_srq, *mut u32) -> c_int = srq::get_srq_num::<Mlx5>;
        modify_cq: fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int = cq::modify_cq::<Mlx5>;
        modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int = qp::modify_qp::<Mlx5>;
        modify_srq: fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int = srq::modify_srq::<Mlx5>;
        poll_cq: fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int = mlx5_face::cq::poll_cq;
        post_recv: fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr)
            -> c_int = post::post_recv::<Mlx5>;
        post_send: fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr)
            -> c_int = mlx5_face::post::post_send;
        post_srq_recv: fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr)
            -> c_int = post::post_srq_recv::<Mlx5>;
        query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr)
            -> c_int = qp::query_qp::<Mlx5>;
        query_srq: fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int = srq::query_srq::<Mlx5>;
        req_notify_cq: fn(*mut ibv_cq, c_int) -> c_int = cq::req_notify_cq::<Mlx5>;
        resize_cq: fn(*mut ibv_cq, c_int) -> c_int = refused::resize_cq;
    }
}

/// Operations of rxe that know nothing of rxe.
fn shared_operations() -> impl Iterator<Item = (&'static str, usize)> {
    const SHARED: &[&str] = &[
        "advise_mr",
        "alloc_parent_domain",
        "alloc_td",
        "attach_mcast",
        "dealloc_mw",
        "dealloc_pd",
        "dealloc_td",
        "dereg_mr",
        "detach_mcast",
        "free_context",
        "import_mr",
        "import_pd",
        "query_device_ex",
        "query_port",
        "reg_dmabuf_mr",
        "reg_mr",
        "reg_mr_ex",
        "rereg_mr",
        "unimport_mr",
        "unimport_pd",
    ];
    operations()
        .into_iter()
        .filter(|(name, _)| SHARED.contains(name))
}

/// Our operations for rxe in the order of a layout; those it lacks are left
/// out.
pub fn table(layout: &Layout) -> OpsTable {
    OpsTable::new(layout, operations())
}

/// Our operations for mlx5, likewise.
pub fn mlx5_table(layout: &Layout) -> OpsTable {
    OpsTable::new(layout, shared_operations().chain(mlx5_operations()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::LAYOUTS;

    #[test]
    fn every_operation_is_in_its_place() {
        for layout in LAYOUTS {
            let table = table(layout);
            let mut set = 0;
            for (name, function) in operations() {
                match layout.op_index(name) {
                    Some(index) => {
                        assert_eq!(table.word(index), function, "{layout}: {name}");
                        set += 1;
                    }
                    None => assert_eq!((name, layout.first < 59), ("reg_mr_ex", true)),
                }
            }
            // None was dropped for want of room.
            assert_eq!(table.set(), set);
        }
    }

    /// What takes a queue of ours must be of the device whose queue it is.
    #[test]
    fn mlx5_has_every_operation_once_and_none_of_rxe() {
        let shared: Vec<_> = shared_operations().map(|(name, _)| name).collect();
        let own: Vec<_> = mlx5_operations()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert!(shared.iter().all(|name| !own.contains(name)));
        for (name, _) in operations() {
            assert!(shared.contains(&name) || own.contains(&name), "{name}");
        }
        for layout in LAYOUTS {
            let table = mlx5_table(layout);
            for (name, function) in mlx5_operations() {
                let index = layout.op_index(name).unwrap();
                assert_eq!(table.word(index), function, "{layout}: {name}");
            }
        }
    }
}
