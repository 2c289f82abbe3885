//! ringverbs as a libibverbs provider.
pub(crate) mod abi;
