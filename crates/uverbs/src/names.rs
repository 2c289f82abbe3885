//! Names of libibverbs for states, operations and completion statuses.

use crate::QpState;

/// Names of `enum ibv_wc_status`, in the order of its values.
const STATUSES: [&str; 24] = [
    "success",
    "local length error",
    "local QP operation error",
    "local EE context operation error",
    "local protection error",
    "Work Request Flushed Error",
    "memory management operation error",
    "bad response error",
    "local access error",
    "remote invalid request error",
    "remote access error",
    "remote operation error",
    "transport retry counter exceeded",
    "RNR retry counter exceeded",
    "local RDD violation error",
    "remote invalid RD request",
    "aborted error",
    "invalid EE context number",
    "invalid EE context state",
    "fatal error",
    "response timeout error",
    "general error",
    "TM error",
    "TM software rendezvous",
];

/// Returns the text of `ibv_wc_status_str` for a completion's status; `None` if it is unknown.
pub fn status_name(status: u32) -> Option<&'static str> {
    STATUSES.get(status as usize).copied()
}

/// Names of `enum ibv_qp_state`, in the order of its values.
const STATES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];

/// Returns the name of a queue pair's state; `None` if it is unknown.
pub fn state_name(state: QpState) -> Option<&'static str> {
    STATES.get(usize::from(state.0)).copied()
}

/// Names of `enum ibv_wr_opcode`, in the order of its values.
const OPCODES: [&str; 16] = [
    "RDMA_WRITE",
    "RDMA_WRITE_WITH_IMM",
    "SEND",
    "SEND_WITH_IMM",
    "RDMA_READ",
    "ATOMIC_CMP_AND_SWP",
    "ATOMIC_FETCH_AND_ADD",
    "LOCAL_INV",
    "BIND_MW",
    "SEND_WITH_INV",
    "TSO",
    "DRIVER1",
    "",
    "",
    "FLUSH",
    "ATOMIC_WRITE",
];

/// Returns the name of a send operation; `None` if it is unknown.
pub fn opcode_name(opcode: u32) -> Option<&'static str> {
    let name = OPCODES.get(opcode as usize).copied();
    name.filter(|name| !name.is_empty())
}

/// Names of `enum ibv_wc_opcode`, in the order of its values.
const COMPLETED: [&str; 10] = [
    "SEND",
    "RDMA_WRITE",
    "RDMA_READ",
    "COMP_SWAP",
    "FETCH_ADD",
    "BIND_MW",
    "LOCAL_INV",
    "TSO",
    "FLUSH",
    "ATOMIC_WRITE",
];

/// Returns the name of a completed operation; `None` if it is unknown.
pub fn completed_opcode_name(opcode: u32) -> Option<&'static str> {
    match opcode {
        128 => Some("RECV"),
        129 => Some("RECV_RDMA_WITH_IMM"),
        _ => COMPLETED.get(opcode as usize).copied(),
    }
}

const _: () = {
    use crate::Opcode;
    assert!(Opcode::BIND_MW.0 == 8 && Opcode::ATOMIC_WRITE.0 == 15);
    assert!(QpState::RTS.0 == 3 && QpState::ERR.0 == 6);
};
