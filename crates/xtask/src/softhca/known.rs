//! What fails with rdma-core's provider on such a device for a reason that is
//! not the device's: skipped, and told with the reason.

use rxe_tests::record::{Case, Outcome};

/// A failure that is known.
struct Known {
    group: &'static str,
    /// Where it is known; none are all.
    profiles: &'static [&'static str],
    /// What is in the case's name, all of it.
    name: &'static [&'static str],
    /// What is in what it said.
    said: &'static str,
    why: &'static str,
}

const ETHERNET: &[&str] = &["roce", "roce-umr", "roce-wrapped"];
const EMBEDDED: &[&str] = &["embedded-roce", "embedded-ib"];
/// All Ethernet ports.
const ROCE: &[&str] = &["roce", "roce-umr", "roce-wrapped", "embedded-roce"];
const WITHOUT_DEVX: &[&str] = &["roce", "ib"];

const KNOWN: &[Known] = &[
    Known {
        group: "pingpong",
        profiles: &[],
        name: &["-o"],
        said: "isn't ODP capable",
        why: "on-demand paging is not offered by this profile and kernel",
    },
    Known {
        group: "pingpong",
        profiles: EMBEDDED,
        name: &["-j"],
        said: "doesn't support dm allocation",
        why: "embedded devices have no device memory",
    },
    // Its client connects a second time, and ends by a signal if the server does not
    // listen again by then.
    Known {
        group: "perftest",
        profiles: EMBEDDED,
        name: &["-R"],
        said: "Failed to handle RDMA CM event",
        why: "perftest's client does not wait until its server listens again",
    },
    Known {
        group: "rdma_cm",
        profiles: EMBEDDED,
        name: &["udpong"],
        said: "rconnect: ",
        why: "datagram sockets of librdmacm make an address handle without a \
              global route, which libmlx5 refuses on Ethernet",
    },
    Known {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["test_obj_on_huge"],
        said: "test_obj_on_huge",
        why: "it asks for a refusal where there are no huge pages, and ours takes others",
    },
    Known {
        group: "pyverbs",
        profiles: &["roce-wrapped"],
        name: &["test_mlx5_crypto_signature_mkey"],
        said: "Memory window bind error",
        why: "softhca has no encryption units that are no part of a signed block",
    },
    Known {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["test_odp_dc_traffic"],
        said: "Failed to register a MR",
        why: "embedded devices have no on-demand paging",
    },
    // With DevX the tests see the device's operations, and not that it has no memory.
    Known {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["Mlx5DmOpAddresses"],
        said: "doesn't support dm allocation",
        why: "embedded devices have no device memory",
    },
    Known {
        group: "pyverbs",
        profiles: EMBEDDED,
        name: &["test_devx_rc_qp_send_imm"],
        said: "with requester error",
        why: "the test asks the network interface for the MAC address; embedded devices have none",
    },
    // librdmacm's rsocket makes an address handle of a LID alone for what goes
    // to itself; libmlx5's mlx5_create_ah asks for a global route on Ethernet.
    Known {
        group: "rdma_cm",
        profiles: ETHERNET,
        name: &["udpong"],
        said: "rconnect: No such file or directory",
        why: "datagram sockets of librdmacm make an address handle without a \
              global route, which libmlx5 refuses on Ethernet",
    },
    Known {
        group: "pyverbs",
        profiles: ROCE,
        name: &["TMTest"],
        said: "Failed to create SRQ",
        why: "libmlx5 connects its queue pair for list operations by a LID, without a \
              global route, which Linux refuses on Ethernet",
    },
    // The stock provider queries the limits of dynamic connections, and releases their
    // streams, by DevX. Without it the limit of outstanding atomics is 0: the first
    // test waits for no completion, and reads the first.
    Known {
        group: "pyverbs",
        profiles: WITHOUT_DEVX,
        name: &["DCTest.test_dc_atomic"],
        said: "IndexError: list index out of range",
        why: "how many atomics an initiator may have under way is asked by DevX, \
              which this profile does not offer",
    },
    Known {
        group: "pyverbs",
        profiles: WITHOUT_DEVX,
        // test_dc_send_stream_bad_flow, and since rdma-core 65
        // test_dc_stream_ids_recovery.
        name: &["DCTest.test_dc_"],
        said: "Failed to reset stream_id",
        why: "a stream is given back by DevX, which this profile does not offer",
    },
];

/// Makes a known failure a skipped case.
pub fn excuse(case: &mut Case, profile: &str) {
    if case.outcome != Outcome::Fail {
        return;
    }
    let known = KNOWN.iter().find(|known| {
        case.group == known.group
            && (known.profiles.is_empty() || known.profiles.contains(&profile))
            && known.name.iter().all(|part| case.name.contains(part))
            && case.detail.contains(known.said)
    });
    if let Some(known) = known {
        case.outcome = Outcome::Skip;
        known.why.clone_into(&mut case.detail);
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
    fn only_the_known_failure_of_a_case_is_excused() {
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
            excuse(&mut case, profile);
            assert_eq!(case.outcome, end, "{profile}: {line}");
        }
        let mut passed = case("rdma_cm", "udpong", Outcome::Pass);
        excuse(&mut passed, "roce");
        assert_eq!(passed.outcome, Outcome::Pass);
    }
}
