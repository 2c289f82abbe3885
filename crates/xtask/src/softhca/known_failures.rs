//! Known failures with rdma-core's provider that are not the device's fault. They count
//! as skipped, with the reason.

use rxe_tests::record::{Case, Outcome};

/// A known failure.
struct KnownFailure {
    group: &'static str,
    /// The profiles with the failure; empty means all.
    profiles: &'static [&'static str],
    /// Parts of the case's name; it contains all of them.
    name: &'static [&'static str],
    /// Part of the case's output.
    output: &'static str,
    reason: &'static str,
}

const ETHERNET: &[&str] = &["roce", "roce-umr", "roce-wrapped"];
const EMBEDDED: &[&str] = &["embedded-roce", "embedded-ib"];
/// All Ethernet ports.
const ROCE: &[&str] = &["roce", "roce-umr", "roce-wrapped", "embedded-roce"];
const WITHOUT_DEVX: &[&str] = &["roce", "ib"];

const KNOWN_FAILURES: &[KnownFailure] = &[
    KnownFailure {
        group: "pingpong",
        profiles: &[],
        name: &["-o"],
        output: "isn't ODP capable",
        reason: "on-demand paging is not offered by this profile and kernel",
    },
    // The client connects a second time, and is killed by a signal if the server does not
    // listen again by then.
    KnownFailure {
        group: "perftest",
        profiles: EMBEDDED,
        name: &["-R"],
        output: "Failed to handle RDMA CM event",
        reason: "perftest's client does not wait until its server listens again",
    },
    KnownFailure {
        group: "rdma_cm",
        profiles: EMBEDDED,
        name: &["udpong"],
        output: "rconnect: ",
        reason: "datagram sockets of librdmacm make an address handle without a \
              global route, which libmlx5 refuses on Ethernet",
    },
    KnownFailure {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["test_obj_on_huge"],
        output: "test_obj_on_huge",
        reason: "it expects an error without huge pages, and ours uses other pages",
    },
    KnownFailure {
        group: "pyverbs",
        profiles: &["roce-wrapped"],
        name: &["test_mlx5_crypto_signature_mkey"],
        output: "Memory window bind error",
        reason: "softhca has only encryption units that are parts of a signed block",
    },
    KnownFailure {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["test_multi_process_alloc_dm"],
        output: "failed with errno: 5",
        reason: "a child of fork has none of its parent's embedded devices",
    },
    KnownFailure {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["test_devx_rc_qp_send_imm"],
        output: "with requester error",
        reason: "the test reads the network interface's MAC address, which is not the device's",
    },
    // librdmacm's rsocket creates an address handle with only a LID for the local address;
    // libmlx5's mlx5_create_ah requires a global route on Ethernet.
    KnownFailure {
        group: "rdma_cm",
        profiles: ETHERNET,
        name: &["udpong"],
        output: "rconnect: No such file or directory",
        reason: "datagram sockets of librdmacm make an address handle without a \
              global route, which libmlx5 refuses on Ethernet",
    },
    KnownFailure {
        group: "pyverbs",
        profiles: ROCE,
        name: &["TMTest"],
        output: "Failed to create SRQ",
        reason: "libmlx5 connects its queue pair for list operations by a LID, without a \
              global route, which Linux refuses on Ethernet",
    },
    // The stock provider queries the limits of dynamic connections, and resets their
    // streams, by DevX. Without it the limit of outstanding atomics is 0: the first test
    // posts none, waits for no completion, and then reads the first one.
    KnownFailure {
        group: "pyverbs",
        profiles: WITHOUT_DEVX,
        name: &["DCTest.test_dc_atomic"],
        output: "IndexError: list index out of range",
        reason: "the limit of outstanding atomics is queried by DevX, which this profile \
              does not offer",
    },
    KnownFailure {
        group: "pyverbs",
        profiles: WITHOUT_DEVX,
        // test_dc_send_stream_bad_flow, and since rdma-core 65
        // test_dc_stream_ids_recovery.
        name: &["DCTest.test_dc_"],
        output: "Failed to reset stream_id",
        reason: "a stream is reset by DevX, which this profile does not offer",
    },
];

/// Changes a known failure to a skipped case with the reason.
pub fn mark_known_failure(case: &mut Case, profile: &str) {
    if case.outcome != Outcome::Fail {
        return;
    }
    let known = KNOWN_FAILURES.iter().find(|known| {
        case.group == known.group
            && (known.profiles.is_empty() || known.profiles.contains(&profile))
            && known.name.iter().all(|part| case.name.contains(part))
            && case.detail.contains(known.output)
    });
    if let Some(known) = known {
        case.outcome = Outcome::Skip;
        known.reason.clone_into(&mut case.detail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::softhca::check;
    use rxe_tests::record::Record;

    fn case(group: &str, line: &str, outcome: Outcome) -> Case {
        match check::case(group, line, outcome, false) {
            Record::Case(case) => case,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_known_failure_of_a_case_is_skipped() {
        let connect = "udpong: rconnect: No such file or directory";
        let atomic =
            "tests.test_mlx5_dc.DCTest.test_dc_atomic: IndexError: list index out of range";
        let streams = "tests.test_mlx5_dc.DCTest.test_dc_send_stream_bad_flow: Failed to reset \
                       stream_id #3 for DCI QP#130. Errno: 95, Operation not supported";
        let tags = "tests.test_tag_matching.TMTest.test_tm_rndv: Failed to create SRQ (errno is 0)";
        for (group, profile, line, end) in [
            ("pyverbs", "ib", streams, Outcome::Skip),
            ("pyverbs", "ib-umr", streams, Outcome::Fail),
            ("rdma_cm", "roce", connect, Outcome::Skip),
            ("rdma_cm", "ib", connect, Outcome::Fail),
            (
                "rdma_cm",
                "roce",
                "udpong: rconnect: Connection refused",
                Outcome::Fail,
            ),
            (
                "rdma_cm",
                "roce",
                "rping: rconnect: No such file or directory",
                Outcome::Fail,
            ),
            ("pyverbs", "roce-umr", tags, Outcome::Skip),
            ("pyverbs", "embedded-roce", tags, Outcome::Skip),
            ("pyverbs", "embedded-ib", tags, Outcome::Fail),
            ("pyverbs", "ib", atomic, Outcome::Skip),
            ("pyverbs", "ib-umr", atomic, Outcome::Fail),
            (
                "pyverbs",
                "ib",
                "tests.test_mlx5_dc.DCTest.test_dc_atomic: Remote access error",
                Outcome::Fail,
            ),
        ] {
            let mut case = case(group, line, Outcome::Fail);
            mark_known_failure(&mut case, profile);
            assert_eq!(case.outcome, end, "{profile}: {line}");
        }
        let mut passed = case("rdma_cm", "udpong", Outcome::Pass);
        mark_known_failure(&mut passed, "roce");
        assert_eq!(passed.outcome, Outcome::Pass);
    }
}
