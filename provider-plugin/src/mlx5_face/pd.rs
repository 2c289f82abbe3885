//! Protection domains: the driver answers, and so has to be let.

use uverbs::PdHandle;

use super::Mlx5;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::pd::Device;

impl Device for Mlx5 {
    fn make_pd(ctx: &CtxRef) -> Result<PdHandle, Errno> {
        Ok(mlx5::alloc_pd(ctx)?)
    }
}
