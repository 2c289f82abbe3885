//! Advice: what works on this device, and fails or hangs elsewhere.

use embedded::QueuePairAttributes;
use uverbs::{AccessFlags, QpState, QpType};

use super::Rule;

/// Longest queues and data in a work request that are not advised against: an assumption about
/// common cards, of which some have no more.
const COMMON_ENTRIES: u32 = 16384;
const COMMON_INLINE: u32 = 256;

/// The value of `rnr_retry` that has no end.
const ENDLESS: u8 = 7;

/// Shortest time-out that is not advised against, 4.096 us times two to the power of it (8.4 ms):
/// an assumption about how long congested networks and busy peers take.
const SHORTEST_TIMEOUT: u8 = 11;

/// Returns what is advised of a queue pair that is created.
pub(super) fn of_created(entries: [u32; 2], max_inline: u32) -> Vec<(Rule, String)> {
    let mut advice = Vec::new();
    for (entries, queue) in entries.into_iter().zip(["send", "receive"]) {
        if entries > COMMON_ENTRIES {
            let message = format!("a {queue} queue with {entries} entries is asked for");
            advice.push((Rule::LongQueue, message));
        }
    }
    if max_inline > COMMON_INLINE {
        let message = format!("{max_inline} bytes of inline data are asked for");
        advice.push((Rule::LongInlineData, message));
    }
    advice
}

/// Returns what is advised of a queue pair, of an Ethernet port or another, that is moved to a
/// state.
pub(super) fn of_modified(
    (kind, is_ethernet): (QpType, bool),
    state: QpState,
    attributes: &QueuePairAttributes,
) -> Vec<(Rule, String)> {
    let QueuePairAttributes {
        is_global,
        source: (index, gid),
        hop_limit,
        timeout,
        retry_count,
        rnr_retry,
        max_dest_rd_atomic,
        access,
        ..
    } = *attributes;
    let mut advice = Vec::new();
    let is_connected = kind == QpType::RC || kind == QpType::UC;
    if state == QpState::RTR && is_connected {
        if !is_global {
            let message = "the path has no global route (is_global is 0)".to_owned();
            advice.push((Rule::NoGlobalRoute, message));
        } else {
            if hop_limit <= 1 {
                advice.push((Rule::HopLimit, format!("the hop limit is {hop_limit}")));
            }
            // On InfiniBand it reaches the whole subnet.
            if is_ethernet && gid[..2] == [0xfe, 0x80] {
                let message = format!("the source GID, of index {index}, is link-local");
                advice.push((Rule::LinkLocalGid, message));
            }
        }
        let reads = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        if kind == QpType::RC && max_dest_rd_atomic == 0 && access.intersects(reads) {
            let message = "the peer has the right to read, but max_dest_rd_atomic is 0".to_owned();
            advice.push((Rule::NoReadsAccepted, message));
        }
    }
    if state == QpState::RTS && kind == QpType::RC {
        if timeout == 0 {
            advice.push((Rule::NoTimeout, "the time-out is 0".to_owned()));
        } else if timeout < SHORTEST_TIMEOUT {
            let message = format!("the time-out is {timeout} (4.096 us times 2^{timeout})");
            advice.push((Rule::ShortTimeout, message));
        }
        if retry_count == 0 {
            advice.push((Rule::NoRetries, "retry_cnt is 0".to_owned()));
        }
        if rnr_retry == ENDLESS {
            advice.push((Rule::EndlessRetries, "rnr_retry is 7".to_owned()));
        }
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_depends_on_state_and_type() {
        let rules = |kind, state, attributes: &QueuePairAttributes| {
            let advice = of_modified((kind, true), state, attributes);
            advice
                .iter()
                .map(|(rule, _)| rule.name())
                .collect::<Vec<_>>()
        };
        let careless = QueuePairAttributes {
            is_global: true,
            source: (0, [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
            rnr_retry: 7,
            access: AccessFlags::REMOTE_READ,
            ..QueuePairAttributes::default()
        };
        let path = ["hop-limit", "link-local-gid", "no-reads-accepted"];
        assert_eq!(rules(QpType::RC, QpState::RTR, &careless), path);
        assert_eq!(rules(QpType::UC, QpState::RTR, &careless), path[..2]);
        let on_infiniband = of_modified((QpType::UC, false), QpState::RTR, &careless);
        assert_eq!(on_infiniband.len(), 1);
        let timers = ["no-timeout", "no-retries", "endless-retries"];
        assert_eq!(rules(QpType::RC, QpState::RTS, &careless), timers);
        let usual = |timeout| QueuePairAttributes {
            timeout,
            retry_count: 7,
            ..QueuePairAttributes::default()
        };
        let short = rules(QpType::RC, QpState::RTS, &usual(SHORTEST_TIMEOUT - 1));
        assert_eq!(short, ["short-timeout"]);
        assert!(rules(QpType::RC, QpState::RTS, &usual(SHORTEST_TIMEOUT)).is_empty());
        assert!(rules(QpType::UD, QpState::RTR, &careless).is_empty());
        assert!(rules(QpType::UC, QpState::RTS, &careless).is_empty());
        assert!(of_created([COMMON_ENTRIES; 2], COMMON_INLINE).is_empty());
        assert_eq!(of_created([COMMON_ENTRIES + 1; 2], 257).len(), 3);
    }
}
