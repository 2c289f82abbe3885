//! ringverbs as a libibverbs provider.
//!
//! ```text
//! libibverbs ──dlopen──► registration ──► layout (which release is it?)
//!            ──device──► device, open ──► ops ──► pd, mr, mw, ah, mcast, xrc   (control path)
//!                                          └────► cq, qp, srq, post, wr_ex (data path)
//! ```
//!
//! All of these are generic over the device; `rxe` and `mlx5` implement their
//! traits.
//!
//! Commands go through `ringverbs_uverbs`; `ringverbs_rxe` and `ringverbs_mlx5` read and write
//! queues. This crate has the C structures, entry points, errno conventions, and the locks
//! that C callers expect. The functions of libibverbs that it calls are found at run time, so
//! that one file serves every release.

pub(crate) mod abi;
pub(crate) mod access;
pub(crate) mod ah;
pub(crate) mod alloc;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod diag;
pub(crate) mod dmah;
pub(crate) mod entry;
pub(crate) mod errno;
pub(crate) mod events;
mod flow;
pub(crate) mod layout;
pub(crate) mod library;
pub(crate) mod mcast;
pub(crate) mod mlx5;
pub(crate) mod mlx5dv;
pub(crate) mod mr;
pub(crate) mod mw;
pub(crate) mod open;
pub(crate) mod ops;
pub(crate) mod pd;
pub(crate) mod post;
pub(crate) mod qp;
pub(crate) mod registration;
pub(crate) mod rxe;
pub(crate) mod srq;
pub(crate) mod wr_ex;
pub(crate) mod writers;
pub(crate) mod xrc;
