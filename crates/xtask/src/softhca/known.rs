//! What fails with rdma-core's provider on such a device for a reason that is
//! not the device's: skipped, and told with the reason.

use rxe_tests::record::{Case, Outcome};

/// A failure that is known.
struct Known {
    group: &'static str,
    /// What is in the case's name, all of it.
    name: &'static [&'static str],
    /// What is in what it said.
    said: &'static str,
    /// What is not in it, if anything: that more has failed.
    unsaid: Option<&'static str>,
    why: &'static str,
}

const KNOWN: &[Known] = &[
    Known {
        group: "pingpong",
        name: &["-o"],
        said: "isn't ODP capable",
        unsaid: None,
        why: "on-demand paging is not offered by this profile and kernel",
    },
    // librdmacm's rsocket makes an address handle of a LID alone for what goes
    // to itself; libmlx5's mlx5_create_ah asks for a global route on Ethernet.
    Known {
        group: "rdma_cm",
        name: &["udpong"],
        said: "rconnect: No such file or directory",
        unsaid: None,
        why: "datagram sockets of librdmacm make an address handle without a \
              global route, which libmlx5 refuses on Ethernet",
    },
    // Where it does connect (InfiniBand), the client ends well; the server waits
    // for the next one without end.
    Known {
        group: "rdma_cm",
        name: &["udpong"],
        said: "server not ended in time",
        unsaid: Some("client"),
        why: "udpong's server never ends; its client has ended well",
    },
    // perftest asks for the next event before it polls, is told at once of the
    // completion that it polls next, and takes that event for the one after it:
    // each time it finds nothing there is one more request outstanding, until
    // the queue is full. The slower the device, the sooner.
    Known {
        group: "perftest",
        name: &["_lat", "-e"],
        said: "Couldn't post send",
        unsaid: None,
        why: "perftest's latency on events takes an event for a completion, and \
              fills its send queue where the device is slow",
    },
];

/// Makes a known failure a skipped case.
pub fn excuse(case: &mut Case) {
    if case.outcome != Outcome::Fail {
        return;
    }
    let known = KNOWN.iter().find(|known| {
        case.group == known.group
            && known.name.iter().all(|part| case.name.contains(part))
            && case.detail.contains(known.said)
            && known.unsaid.is_none_or(|said| !case.detail.contains(said))
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

    fn case(line: &str, outcome: Outcome) -> Case {
        match check::case("rdma_cm", line, outcome, false) {
            Record::Case(case) => case,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_known_failure_of_a_case_is_excused() {
        for (line, end) in [
            ("udpong: rconnect: No such file or directory", Outcome::Skip),
            ("udpong: rconnect: Connection refused", Outcome::Fail),
            ("rping: rconnect: No such file or directory", Outcome::Fail),
            ("udpong: server not ended in time:", Outcome::Skip),
            (
                "udpong: client exit status: 1: / server not ended in time:",
                Outcome::Fail,
            ),
        ] {
            let mut case = case(line, Outcome::Fail);
            excuse(&mut case);
            assert_eq!(case.outcome, end, "{line}");
        }
        let mut passed = case("udpong", Outcome::Pass);
        excuse(&mut passed);
        assert_eq!(passed.outcome, Outcome::Pass);
    }
}
