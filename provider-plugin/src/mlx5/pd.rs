//! Protection domains, with the PD number of the driver's response; thread domains with a
//! UAR each.

use mlx5::ThreadUar;
use uverbs::PdHandle;

use super::Mlx5;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::pd::PdOps;

/// The UAR of a thread domain; `None` if the device has no free one.
pub type ThreadDomain = Option<ThreadUar<CtxRef>>;

impl PdOps for Mlx5 {
    type ThreadDomain = ThreadDomain;

    /// If no UAR can be allocated, the queue pairs of the thread domain use the context's.
    fn make_thread_domain(ctx: &CtxRef) -> Result<ThreadDomain, Errno> {
        match ThreadUar::allocate(ctx, ctx.mlx5()?) {
            Ok(uar) => Ok(Some(uar)),
            Err(error) => {
                tracing::info!(%error, "no UAR for a thread domain");
                Ok(None)
            }
        }
    }

    fn destroy_thread_domain(uar: &mut ThreadDomain) -> Result<(), Errno> {
        if let Some(uar) = uar {
            uar.destroy()?;
        }
        *uar = None;
        Ok(())
    }

    fn make_pd(ctx: &CtxRef) -> Result<(PdHandle, u32), Errno> {
        Ok(mlx5::alloc_pd(ctx)?)
    }

    fn find_pd(ctx: &CtxRef, pd: PdHandle) -> Result<u32, Errno> {
        Ok(mlx5::find_pd(ctx, pd)?)
    }
}
