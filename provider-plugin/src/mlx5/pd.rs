//! Protection domains, whose command has a driver answer; thread domains with a
//! UAR each.

use mlx5::ThreadUar;
use uverbs::PdHandle;

use super::Mlx5;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::pd::PdOps;

/// The UAR of a thread domain; none if the device has no more.
pub type Thread = Option<ThreadUar<CtxRef>>;

impl PdOps for Mlx5 {
    type Thread = Thread;

    /// Without a UAR of its own, a thread domain's queue pairs use the context's:
    /// not an error.
    fn make_thread(ctx: &CtxRef) -> Result<Thread, Errno> {
        match ThreadUar::allocate(ctx, ctx.mlx5()?) {
            Ok(register) => Ok(Some(register)),
            Err(error) => {
                tracing::info!(%error, "a thread domain has no UAR of its own");
                Ok(None)
            }
        }
    }

    fn end_thread(own: &mut Thread) -> Result<(), Errno> {
        if let Some(register) = own {
            register.destroy()?;
        }
        *own = None;
        Ok(())
    }

    fn make_pd(ctx: &CtxRef) -> Result<(PdHandle, u32), Errno> {
        Ok(mlx5::alloc_pd(ctx)?)
    }

    fn find_pd(ctx: &CtxRef, pd: PdHandle) -> Result<u32, Errno> {
        Ok(mlx5::find_pd(ctx, pd)?)
    }
}
