//! Stand-ins for the data path until its files are here: each says EOPNOTSUPP.
#![allow(clippy::missing_safety_doc)]

use core::ffi::c_int;

use crate::abi::*;
use crate::errno::Errno;

macro_rules! pending {
    ($($module:ident { $($name:ident($($arg:ty),*) -> $ret:ty;)+ })+) => {$(
        pub mod $module {
            use super::*;
            $(pub unsafe extern "C" fn $name($(_: $arg),*) -> $ret {
                super::Missing::missing()
            })+
        }
    )+};
}

trait Missing {
    fn missing() -> Self;
}
impl Missing for c_int {
    fn missing() -> c_int {
        libc::EOPNOTSUPP
    }
}
impl<T> Missing for *mut T {
    fn missing() -> *mut T {
        Errno::OPNOTSUPP.set();
        core::ptr::null_mut()
    }
}

pending! {
    cq {
        create_cq(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        create_cq_ex(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
        destroy_cq(*mut ibv_cq) -> c_int;
        modify_cq(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int;
        poll_cq(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
        req_notify_cq(*mut ibv_cq, c_int) -> c_int;
        resize_cq(*mut ibv_cq, c_int) -> c_int;
    }
    qp {
        bind_mw(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int;
        create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        create_qp_ex(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
        destroy_qp(*mut ibv_qp) -> c_int;
        modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        query_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    }
    srq {
        create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        create_srq_ex(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
        destroy_srq(*mut ibv_srq) -> c_int;
        get_srq_num(*mut ibv_srq, *mut u32) -> c_int;
        modify_srq(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
        query_srq(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    }
    post {
        post_recv(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
        post_send(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
        post_srq_recv(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    }
}
