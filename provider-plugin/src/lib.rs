//! ringverbs as a libibverbs provider.
