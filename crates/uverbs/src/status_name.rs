//! Names of completion statuses.

/// Names of `enum ibv_wc_status`, in the order of its values.
const NAMES: [&str; 24] = [
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
    NAMES.get(status as usize).copied()
}
