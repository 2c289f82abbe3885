//! Names of libibverbs for numbers in commands, work requests and completions.

use crate::explain::json::quoted;

/// Returns the name of a number, or the number, as JSON.
fn named(name: Option<&str>, number: impl ToString) -> String {
    name.map_or_else(|| number.to_string(), quoted)
}

/// Returns the name of an `ibv_wr_opcode`.
pub(super) fn operation(opcode: u32) -> String {
    named(uverbs::opcode_name(opcode), opcode)
}

/// Returns the name of an `ibv_wc_opcode`.
pub(super) fn completed_operation(opcode: u32) -> String {
    named(uverbs::completed_opcode_name(opcode), opcode)
}

/// Returns the name of an `ibv_wc_status`.
pub(super) fn status(status: u32) -> String {
    named(uverbs::status_name(status), status)
}

/// Returns the name of an `ibv_qp_type`.
pub(super) fn queue_pair_type(kind: u32) -> String {
    let name = match kind {
        2 => Some("RC"),
        3 => Some("UC"),
        4 => Some("UD"),
        8 => Some("RAW_PACKET"),
        9 => Some("XRC_SEND"),
        10 => Some("XRC_RECV"),
        0xff => Some("DRIVER"),
        _ => None,
    };
    named(name, kind)
}

/// Returns the name of an `ibv_qp_state`.
pub(super) fn state(state: u8) -> String {
    named(uverbs::state_name(uverbs::QpState(state)), state)
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
