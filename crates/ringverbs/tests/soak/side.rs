//! What each thread has of its own, and gives back at the end.

use ringverbs::{CompletionQueue, Context, LocalAddress, ProtectionDomain};

use super::Tally;
use super::pool::Pool;
use testing::Numbers;

pub struct Side {
    pub pool: Pool,
    pub cq: CompletionQueue,
    pub local: LocalAddress,
    pub domain: ProtectionDomain,
    context: Context,
    pub numbers: Numbers,
    pub tally: Tally,
}

impl Side {
    pub fn new(context: Context, seed: u64) -> Self {
        let domain = context.alloc_pd().unwrap();
        Self {
            pool: Pool::new(&domain),
            cq: context.completion_queue().entries(1024).build().unwrap(),
            local: context.local_address(1).unwrap(),
            domain,
            context,
            numbers: Numbers(seed),
            tally: Tally::default(),
        }
    }

    /// All queue pairs are gone: everything else can be closed, and the buffers
    /// are counted.
    pub fn close(mut self) -> Tally {
        self.cq.close().unwrap();
        self.tally.count(self.pool.close());
        self.domain.close().unwrap();
        drop(self.context);
        self.tally
    }
}
