//! Protection domains: kernel objects only.

use uverbs::{PdHandle, Udata};

use super::Rxe;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::pd::PdOps;

impl PdOps for Rxe {
    type ThreadDomain = ();

    fn make_thread_domain(_ctx: &CtxRef) -> Result<(), Errno> {
        Ok(())
    }

    fn make_pd(ctx: &CtxRef) -> Result<(PdHandle, u32), Errno> {
        Ok((uverbs::pd::alloc(ctx, Udata::none())?, 0))
    }
}
