//! Protection domains: the driver answers, and so has to be let. Thread domains
//! have a register of their own.

use mlx5::OwnRegister;
use uverbs::PdHandle;

use super::Mlx5;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::pd::PdOps;

/// The register of a thread domain's own; none where there are no more.
pub type Thread = Option<OwnRegister<CtxRef>>;

impl PdOps for Mlx5 {
    type Thread = Thread;

    /// Without a register of its own, a thread domain's queue pairs have those of
    /// all others: never an error.
    fn make_thread(ctx: &CtxRef) -> Result<Thread, Errno> {
        match OwnRegister::allocate(ctx, ctx.mlx5()?) {
            Ok(register) => Ok(Some(register)),
            Err(error) => {
                tracing::info!(%error, "a thread domain has no register of its own");
                Ok(None)
            }
        }
    }

    fn end_thread(own: &mut Thread) -> Result<(), Errno> {
        let Some(register) = own.take() else {
            return Ok(());
        };
        register.destroy().map_err(|(register, error)| {
            *own = Some(register);
            error.into()
        })
    }

    fn make_pd(ctx: &CtxRef) -> Result<PdHandle, Errno> {
        Ok(mlx5::alloc_pd(ctx)?)
    }

    fn find_pd(ctx: &CtxRef, pd: PdHandle) -> Result<(), Errno> {
        Ok(mlx5::find_pd(ctx, pd)?)
    }
}
