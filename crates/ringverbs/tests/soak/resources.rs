//! The resources of a thread, which are closed at the end.

use ringverbs::{CompletionQueue, Context, LocalAddress, ProtectionDomain};

use super::Counts;
use super::pool::Pool;
use testing::Rng;

pub struct ThreadResources {
    pub pool: Pool,
    pub cq: CompletionQueue,
    pub local: LocalAddress,
    pub domain: ProtectionDomain,
    context: Context,
    pub numbers: Rng,
    pub counts: Counts,
}

impl ThreadResources {
    pub fn new(context: Context, seed: u64) -> Self {
        let domain = context.alloc_pd().unwrap();
        Self {
            pool: Pool::new(&domain),
            cq: context.completion_queue().entries(1024).build().unwrap(),
            local: context.local_address(1).unwrap(),
            domain,
            context,
            numbers: Rng(seed),
            counts: Counts::default(),
        }
    }

    /// Closes all resources and counts the buffers; all queue pairs must be closed.
    pub fn close(mut self) -> Counts {
        self.cq.close().unwrap();
        self.counts.count(self.pool.close());
        self.domain.close().unwrap();
        drop(self.context);
        self.counts
    }
}
