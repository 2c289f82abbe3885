//! Soft-RoCE (rdma_rxe): queues and their hot path.
