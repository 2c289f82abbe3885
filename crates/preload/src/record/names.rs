//! Names of libibverbs for numbers in commands, work requests and completions.

use crate::explain::json::quoted;

/// Returns the name of a number in a list, or the number, as JSON.
fn name(names: &[&str], number: u32) -> String {
    let found = names.get(number as usize).filter(|name| !name.is_empty());
    found.map_or_else(|| number.to_string(), |name| quoted(name))
}

/// Returns the name of an `ibv_wr_opcode`.
pub(super) fn operation(opcode: u32) -> String {
    name(
        &[
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
        ],
        opcode,
    )
}

/// Returns the name of an `ibv_wc_opcode`.
pub(super) fn completed_operation(opcode: u32) -> String {
    match opcode {
        128 => quoted("RECV"),
        129 => quoted("RECV_RDMA_WITH_IMM"),
        _ => name(
            &[
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
            ],
            opcode,
        ),
    }
}

/// Returns the name of an `ibv_wc_status`.
pub(super) fn status(status: u32) -> String {
    let name = uverbs::status_name(status);
    name.map_or_else(|| status.to_string(), quoted)
}

/// Returns the name of an `ibv_qp_type`.
pub(super) fn queue_pair_type(kind: u32) -> String {
    match kind {
        8 => quoted("RAW_PACKET"),
        9 => quoted("XRC_SEND"),
        10 => quoted("XRC_RECV"),
        0xff => quoted("DRIVER"),
        _ => name(&["", "", "RC", "UC", "UD"], kind),
    }
}

/// Returns the name of an `ibv_qp_state`.
pub(super) fn state(state: u8) -> String {
    name(
        &["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"],
        state.into(),
    )
}

/// Returns the list of names of `ibv_access_flags`.
pub(super) fn access(flags: u32) -> String {
    const NAMES: [&str; 10] = [
        "LOCAL_WRITE",
        "REMOTE_WRITE",
        "REMOTE_READ",
        "REMOTE_ATOMIC",
        "MW_BIND",
        "ZERO_BASED",
        "ON_DEMAND",
        "HUGETLB",
        "FLUSH_GLOBAL",
        "FLUSH_PERSISTENT",
    ];
    const RELAXED_ORDERING: u32 = 1 << 20;
    let mut list: Vec<String> = Vec::new();
    for bit in (0..u32::BITS).map(|bit| 1_u32 << bit) {
        if flags & bit == 0 {
            continue;
        }
        list.push(match NAMES.get(bit.trailing_zeros() as usize) {
            Some(name) => quoted(name),
            None if bit == RELAXED_ORDERING => quoted("RELAXED_ORDERING"),
            None => bit.to_string(),
        });
    }
    format!("[{}]", list.join(","))
}
