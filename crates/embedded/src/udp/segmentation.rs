//! UDP segmentation offload: consecutive datagrams that the system takes as one message
//! and divides again.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::AsFd;

use softhca::packet::Departure;

use super::socket::{self, BATCH, LONGEST, Message, SEGMENTS, Scoped};
use super::{UdpWire, has_address, member_of, sender};

/// Consecutive datagrams that leave as one message.
#[derive(Clone, Debug)]
struct Run {
    /// How the first datagram leaves, and so do all others.
    first: Departure,
    /// The process that receives them.
    member: Option<u8>,
    bytes: usize,
    count: usize,
    /// The last one is shorter than the others.
    ended: bool,
}

impl Run {
    /// Begins with a datagram to the process of a queue pair.
    fn new(first: Departure, member: Option<u8>) -> Self {
        Self {
            bytes: first.payload.len(),
            first,
            member,
            count: 1,
            ended: false,
        }
    }

    /// Adds the next datagram. Returns whether it can be one of the message.
    fn add(&mut self, next: &Departure, member: Option<u8>) -> bool {
        let key = |it: &Departure| (it.destination, it.traffic_class, it.hop_limit);
        let (segment, length) = (self.first.payload.len(), next.payload.len());
        if self.ended
            || self.count == SEGMENTS
            || length > segment
            || self.bytes + length > LONGEST
            // Of several processes that receive at one address the system asks one.
            || self.member != member
            || key(&self.first) != key(next)
        {
            return false;
        }
        self.ended = length < segment;
        self.bytes += length;
        self.count += 1;
        true
    }
}

impl UdpWire {
    /// Sends the first frames that leave by the same socket; discards the first frame
    /// if it leaves by none. Returns their number.
    pub(super) fn send_batch(&mut self) -> io::Result<usize> {
        let mut payloads = [const { 0..0 }; BATCH];
        let mut runs: [Option<Run>; BATCH] = [const { None }; BATCH];
        let (mut socket, mut count, mut last) = (None, 0, 0);
        for packet in self.outgoing.iter_mut().take(BATCH) {
            let Some(mut departure) = Departure::of(packet.frame()) else {
                break;
            };
            let Some(by) = sender(&self.endpoints, &departure) else {
                break;
            };
            let own = has_address(&self.endpoints, departure.destination);
            if own || *socket.get_or_insert(by) != by {
                break;
            }
            let (endpoint, port) = by;
            let port = self.endpoints[endpoint].senders[port].0;
            if port != departure.port {
                departure.set_port(packet.frame_mut(), port);
            }
            payloads[count] = departure.payload.clone();
            count += 1;
            let member = member_of(packet.frame());
            if let Some(run) = runs[last].as_mut().filter(|_| self.segmentation) {
                let place = run.count as u16;
                if run.add(&departure, member) {
                    // As the system numbers the segments of a message.
                    departure.set_identification(packet.frame_mut(), place);
                    continue;
                }
            }
            last += usize::from(runs[last].is_some());
            runs[last] = Some(Run::new(departure, member));
        }
        let Some((endpoint, port)) = socket else {
            return Ok(1);
        };
        let result = self.send_runs((endpoint, port), &runs[..=last], &payloads);
        let sent = *result.as_ref().unwrap_or(&0);
        for packet in self.outgoing.iter_mut().take(count).skip(sent) {
            if let Some(departure) = Departure::of(packet.frame()) {
                departure.set_identification(packet.frame_mut(), 0);
            }
        }
        match result {
            Err(error) if runs[0].as_ref().is_some_and(|run| run.count > 1) => {
                if !is_refused(&error) {
                    return Err(error);
                }
                tracing::info!(%error, "UDP segmentation is not used from now on");
                self.segmentation = false;
                Ok(0)
            }
            result => result,
        }
    }

    /// Sends the first frames, in runs, by a socket. Returns how many it has accepted.
    fn send_runs(
        &self,
        (endpoint, port): (usize, usize),
        runs: &[Option<Run>],
        payloads: &[Range<usize>; BATCH],
    ) -> io::Result<usize> {
        let endpoint = &self.endpoints[endpoint];
        let mut datagrams = [IoSlice::new(&[]); BATCH];
        let frames = self.outgoing.iter().zip(payloads);
        for ((packet, payload), datagram) in frames.zip(&mut datagrams) {
            *datagram = IoSlice::new(&packet.frame()[payload.clone()]);
        }
        let nothing = Message {
            datagrams: &[],
            to: endpoint.at,
            traffic_class: 0,
            hop_limit: 0,
        };
        let mut messages = [nothing; BATCH];
        let mut rest = &datagrams[..];
        for (run, message) in runs.iter().flatten().zip(&mut messages) {
            let (datagrams, others) = rest.split_at(run.count.min(rest.len()));
            rest = others;
            *message = Message {
                datagrams,
                to: Scoped {
                    address: run.first.destination,
                    scope: endpoint.at.scope,
                },
                traffic_class: run.first.traffic_class,
                hop_limit: run.first.hop_limit,
            };
        }
        let socket = endpoint.senders[port].1.as_fd();
        let sent = socket::send(socket, &messages[..runs.len()])?;
        Ok(runs[..sent].iter().flatten().map(|run| run.count).sum())
    }
}

/// Returns whether the system may have refused a message because of its segmentation.
fn is_refused(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP | libc::ENOPROTOOPT)
    )
}

#[cfg(test)]
mod tests {
    use softhca::packet::{Bth, PacketBuilder, Path, Pool, Psn, Template, gid_of_ipv4};

    use super::*;

    fn departure(to: u8, length: usize) -> Departure {
        let gid = |n| gid_of_ipv4([192, 0, 2, n]);
        let path = Path::roce_v2([2; 6], [4; 6], gid(1), gid(to));
        let bth = Bth {
            opcode: 4,
            solicited: false,
            migrated: true,
            pad: 0,
            version: 0,
            pkey: 0xffff,
            dest_qpn: 7,
            ack_request: false,
            psn: Psn::new(1),
        };
        let template = Template::new(&path);
        let mut builder = PacketBuilder::new(&Pool::new(), &template, bth, length);
        builder.space(length);
        Departure::of(builder.finish().frame()).unwrap()
    }

    #[test]
    fn a_run_has_datagrams_of_one_length_to_one_process() {
        let run = || Run::new(departure(2, 1000), Some(1));
        let next = |run: &mut Run, length| run.add(&departure(2, length), Some(1));
        // A shorter one is the last.
        let mut one = run();
        assert!(next(&mut one, 1000) && next(&mut one, 200) && !next(&mut one, 200));
        assert_eq!(one.count, 3);
        assert!(!next(&mut run(), 1004));
        assert!(!run().add(&departure(3, 1000), Some(1)));
        assert!(!run().add(&departure(2, 1000), Some(2)));
    }

    #[test]
    fn a_run_is_no_longer_than_a_message() {
        for (length, most) in [(64, SEGMENTS), (1024, 62), (4096, 15)] {
            let mut run = Run::new(departure(2, length), None);
            while run.add(&departure(2, length), None) {}
            assert_eq!(run.count, most.min(LONGEST / (length + 16)), "{length}");
            assert_eq!(run.bytes, run.count * (length + 16));
        }
    }
}
