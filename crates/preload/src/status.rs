//! `/proc/PID/status` with a node: the NUMA nodes that a process may use are the node's, as in
//! control groups. libnuma, and programs that bind to NUMA nodes by it, read them there.

use std::fs;
use std::os::fd::RawFd;

use embedded::sysfs::mask;
use uverbs::Errno;

use crate::dynamic;
use crate::internal;
use crate::paths;

/// Returns whether the program reads the status of a process or thread at a path.
pub(crate) fn is_read(path: &[u8]) -> bool {
    is_status(path) && !internal::is_internal()
}

/// Returns whether a path is that of the status of a process or thread.
fn is_status(path: &[u8]) -> bool {
    let Some(path) = path.strip_prefix(b"/proc/") else {
        return false;
    };
    let mut parts = path.split(|byte| *byte == b'/');
    let process = parts.next().unwrap_or_default();
    let is_id = |id: &[u8]| !id.is_empty() && id.iter().all(u8::is_ascii_digit);
    let is_process = is_id(process) || [&b"self"[..], b"thread-self"].contains(&process);
    let rest: Vec<&[u8]> = parts.collect();
    is_process
        && match rest[..] {
            [b"status"] => true,
            [b"task", thread, b"status"] => is_id(thread),
            _ => false,
        }
}

/// Opens the status of a process for reading.
///
/// # Errors
/// Those of reading the host's file.
pub(crate) fn open(path: &str) -> Result<RawFd, Errno> {
    let host = {
        // Code of the devices sees the host's file.
        let _scope = internal::enter();
        fs::read_to_string(path)
    };
    let host = host.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
    let nodes = paths::online_nodes();
    let shown = nodes.map_or_else(|| host.clone(), |nodes| with_nodes(&host, nodes.trim_end()));
    dynamic::open_text(&shown)
}

/// Replaces the NUMA nodes in a status.
fn with_nodes(status: &str, nodes: &str) -> String {
    let mut shown = String::with_capacity(status.len());
    for line in status.lines() {
        match line.split_once(":\t") {
            Some(("Mems_allowed", host)) => {
                shown.push_str("Mems_allowed:\t");
                shown.push_str(&as_wide(&mask(nodes), host));
            }
            Some(("Mems_allowed_list", _)) => {
                shown.push_str("Mems_allowed_list:\t");
                shown.push_str(nodes);
            }
            _ => shown.push_str(line),
        }
        shown.push('\n');
    }
    shown
}

/// Extends a mask to the width of the host's, from which libnuma derives how many nodes the
/// kernel supports.
fn as_wide(mask: &str, host: &str) -> String {
    let words = |mask: &str| mask.split(',').count();
    let missing = words(host).saturating_sub(words(mask));
    let zeros = "00000000,".repeat(missing);
    format!("{zeros}{mask:0>width$}", width = 9 * words(mask) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_status() {
        for path in [
            "/proc/self/status",
            "/proc/thread-self/status",
            "/proc/12/status",
            "/proc/12/task/13/status",
        ] {
            assert!(is_status(path.as_bytes()), "{path}");
        }
        for path in [
            "/proc/status",
            "/proc//status",
            "/proc/self/stat",
            "/proc/self/task/x/status",
            "/proc/net/status",
            "/proc/self/status/x",
        ] {
            assert!(!is_status(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn the_nodes_of_a_status_are_replaced() {
        let host =
            "Name:\tx: y\nMems_allowed:\t00000000,00000001\nMems_allowed_list:\t0\nlast:\t1\n";
        let shown =
            "Name:\tx: y\nMems_allowed:\t00000000,00000003\nMems_allowed_list:\t0-1\nlast:\t1\n";
        assert_eq!(with_nodes(host, "0-1"), shown);
        assert_eq!(as_wide(&mask("0-39"), "1"), "000000ff,ffffffff");
    }
}
