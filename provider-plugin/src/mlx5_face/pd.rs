//! Protection domains: the driver answers, and so has to be let.

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::CtxRef;
use crate::entry;
use crate::pd::new_pd;

/// `ibv_alloc_pd`.
pub unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    entry::pointer(|| {
        // SAFETY: libibverbs passes an open context of ours.
        let ctx = unsafe { CtxRef::of(context) };
        let mut pd = try_box(new_pd(context, None)).map_err(|(_, e)| e)?;
        pd.public.handle = mlx5::alloc_pd(&ctx)?.0;
        Ok(Box::into_raw(pd).cast())
    })
}
