//! UDP segmentation offload (UDP_SEGMENT): consecutive datagrams are passed to the kernel as
//! one message.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::AsFd;

use roce::packet::{BTH_BYTES, OpcodeFlags, Packet, Transmit, op};

use super::socket::{
    self, MAX_MESSAGE_BYTES, MAX_SEGMENTS, MAX_SEND_DATAGRAMS, MAX_SEND_MESSAGES, Message,
    ScopedAddress,
};
use super::{UdpWire, has_address, is_management, opcode_of, payload_of, receiving_member, sender};

/// Maximum number of acknowledgements that are held back for the program's answer.
const MAX_HELD_ACKS: usize = 4;

/// Consecutive datagrams that leave as one message.
#[derive(Clone, Debug)]
struct Run {
    /// Addresses and class of the first datagram, and so of all.
    first: Transmit,
    /// The receiving process.
    member: Option<u8>,
    bytes: usize,
    count: usize,
    /// The last datagram is shorter than the others, so that none can follow.
    is_closed: bool,
}

impl Run {
    /// Starts a run with a datagram to the given process.
    fn new(first: Transmit, member: Option<u8>) -> Self {
        Self {
            bytes: first.payload.len(),
            first,
            member,
            count: 1,
            is_closed: false,
        }
    }

    /// Returns whether the run can be extended by the next datagram.
    fn accepts(&self, next: &Transmit, member: Option<u8>) -> bool {
        let key = |it: &Transmit| (it.destination, it.traffic_class, it.hop_limit);
        let length = next.payload.len();
        !self.is_closed
            && self.count != MAX_SEGMENTS
            && length <= self.first.payload.len()
            && self.bytes + length <= MAX_MESSAGE_BYTES
            // The receiving kernel steers the whole message by its first datagram.
            && self.member == member
            && key(&self.first) == key(next)
    }

    /// Adds a datagram. Returns its index in the message.
    fn add(&mut self, next: &Transmit) -> u16 {
        let (index, length) = (self.count, next.payload.len());
        self.is_closed = length < self.first.payload.len();
        self.bytes += length;
        self.count += 1;
        index as u16
    }
}

/// Returns whether frames may be held back for the program's answer: a few positive
/// acknowledgements and nothing else. What a NAK reports may end the program.
pub(super) fn may_hold(frames: &VecDeque<Packet>) -> bool {
    let mut all = frames.iter();
    frames.len() <= MAX_HELD_ACKS && all.all(|packet| is_positive(packet.frame()))
}

/// Moves an acknowledgement at the front behind a longer request, so that both fit in one
/// message if they are for the same host. Peers depend on the order among responses and among
/// requests only.
pub(super) fn join_acknowledgement(frames: &mut VecDeque<Packet>) {
    let (Some(first), Some(next)) = (frames.front(), frames.get(1)) else {
        return;
    };
    let (first, next) = (first.frame(), next.frame());
    if first.len() < next.len() && is_acknowledgement(first) && is_request(next) {
        frames.swap(0, 1);
    }
}

impl UdpWire {
    /// Sends the first frames that leave by the same socket, or discards the first frame if
    /// it has no socket. Returns the number of frames.
    pub(super) fn send_batch(&mut self) -> io::Result<usize> {
        let mut payloads = [const { 0..0 }; MAX_SEND_DATAGRAMS];
        let mut runs: [Option<Run>; MAX_SEND_MESSAGES] = [const { None }; MAX_SEND_MESSAGES];
        let (mut socket, mut count, mut last) = (None, 0, 0);
        for packet in self.outgoing.iter_mut().take(MAX_SEND_DATAGRAMS) {
            let Some(mut transmit) = Transmit::parse(packet) else {
                break;
            };
            let member = receiving_member(packet.frame());
            let is_management = is_management(packet.frame());
            let Some(route) = sender(&self.endpoints, &transmit, is_management) else {
                break;
            };
            let is_local = has_address(&self.endpoints, transmit.destination);
            if is_local || *socket.get_or_insert(route) != route {
                break;
            }
            let current = runs[last].as_mut().filter(|_| self.segmentation);
            // The kernel increments the IP identification for each segment of a message.
            let mut index = 0;
            if let Some(run) = current.filter(|run| run.accepts(&transmit, member)) {
                index = run.add(&transmit);
            } else {
                let next = last + usize::from(runs[last].is_some());
                let Some(run) = runs.get_mut(next) else {
                    break;
                };
                *run = Some(Run::new(transmit.clone(), member));
                last = next;
            }
            let (endpoint, port) = route;
            transmit.set_port(packet, self.endpoints[endpoint].senders[port].0);
            transmit.set_identification(packet, index);
            packet.add_icrc();
            payloads[count] = transmit.payload;
            count += 1;
        }
        let Some((endpoint, port)) = socket else {
            return Ok(1);
        };
        // The last run of a full batch may continue beyond it, and waits for the next call.
        let mut complete = last + 1;
        if count == MAX_SEND_DATAGRAMS && last != 0 {
            complete = last;
        }
        match self.send_runs((endpoint, port), &runs[..complete], &payloads) {
            Err(error) if runs[0].as_ref().is_some_and(|run| run.count > 1) => {
                if !is_refused(&error) {
                    return Err(error);
                }
                tracing::info!(%error, "UDP segmentation offload disabled");
                self.segmentation = false;
                Ok(0)
            }
            result => result,
        }
    }

    /// Sends the runs by a socket. Returns the number of frames that it has accepted.
    fn send_runs(
        &self,
        (endpoint, port): (usize, usize),
        runs: &[Option<Run>],
        payloads: &[Range<usize>; MAX_SEND_DATAGRAMS],
    ) -> io::Result<usize> {
        let endpoint = &self.endpoints[endpoint];
        let mut datagrams = [IoSlice::new(&[]); MAX_SEND_DATAGRAMS];
        let frames = self.outgoing.iter().zip(payloads);
        for ((packet, payload), datagram) in frames.zip(&mut datagrams) {
            *datagram = IoSlice::new(&packet.frame()[payload.clone()]);
        }
        let empty = Message {
            datagrams: &[],
            to: endpoint.local,
            traffic_class: 0,
            hop_limit: 0,
        };
        let mut messages = [empty; MAX_SEND_MESSAGES];
        let mut rest = &datagrams[..];
        for (run, message) in runs.iter().flatten().zip(&mut messages) {
            let (datagrams, others) = rest.split_at(run.count.min(rest.len()));
            rest = others;
            *message = Message {
                datagrams,
                to: ScopedAddress {
                    address: run.first.destination,
                    scope: endpoint.local.scope,
                },
                traffic_class: run.first.traffic_class,
                hop_limit: run.first.hop_limit,
            };
        }
        let socket = endpoint.senders[port].1.as_fd();
        let messages = &messages[..runs.len()];
        let sent = match socket::send(socket, messages) {
            // The refusal of an earlier datagram, which is reported to the gateway, too.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                socket::send(socket, messages)
            }
            sent => sent,
        }?;
        Ok(runs[..sent].iter().flatten().map(|run| run.count).sum())
    }
}

fn is_acknowledgement(frame: &[u8]) -> bool {
    opcode_of(frame).is_some_and(|it| it.operation == op::ACKNOWLEDGE)
}

/// Returns whether a frame is an acknowledgement, but no NAK.
fn is_positive(frame: &[u8]) -> bool {
    let syndrome = payload_of(frame).and_then(|payload| payload.get(BTH_BYTES));
    is_acknowledgement(frame) && syndrome.is_some_and(|it| it >> 5 & 3 == 0)
}

fn is_request(frame: &[u8]) -> bool {
    opcode_of(frame).is_some_and(|it| !it.flags().has(OpcodeFlags::RESPONSE))
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
    use roce::packet::{Bth, PacketBuilder, Path, Pool, Psn, Template, gid_of_ipv4, headroom};

    use super::*;

    fn transmit(to: u8, length: usize) -> Transmit {
        Transmit::parse(&packet(SEND, to, length)).unwrap()
    }

    /// Opcodes of RC.
    const SEND: u8 = 4;
    const READ_RESPONSE: u8 = 0x10;
    const ACKNOWLEDGE: u8 = 0x11;

    fn packet(opcode: u8, to: u8, length: usize) -> Packet {
        let gid = |n| gid_of_ipv4([192, 0, 2, n]);
        let path = Path::ip(gid(1), gid(to));
        let bth = Bth {
            opcode,
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
        builder.space(length).fill(0);
        builder.finish()
    }

    #[test]
    fn an_acknowledgement_is_held_and_sent_behind_a_longer_request() {
        let lengths = |frames: &VecDeque<Packet>| -> Vec<usize> {
            frames
                .iter()
                .map(|packet| packet.frame().len() - 44)
                .collect()
        };
        let (ack, send) = (
            || packet(ACKNOWLEDGE, 2, 4),
            |length| packet(SEND, 2, length),
        );
        let mut frames = VecDeque::from([ack(), send(64), send(32)]);
        assert!(!may_hold(&frames));
        join_acknowledgement(&mut frames);
        assert_eq!(lengths(&frames), [64, 4, 32]);
        // A second call changes nothing.
        join_acknowledgement(&mut frames);
        assert_eq!(lengths(&frames), [64, 4, 32]);
        let mut frames = VecDeque::from([ack(), send(0)]);
        join_acknowledgement(&mut frames);
        assert_eq!(lengths(&frames), [4, 0]);
        // Responses keep their order.
        let mut frames = VecDeque::from([ack(), packet(READ_RESPONSE, 2, 68)]);
        join_acknowledgement(&mut frames);
        assert_eq!(lengths(&frames), [4, 68]);
        let mut frames = VecDeque::new();
        for _ in 0..MAX_HELD_ACKS {
            assert!(may_hold(&frames));
            join_acknowledgement(&mut frames);
            frames.push_back(ack());
        }
        assert!(may_hold(&frames));
        frames.push_back(ack());
        assert!(!may_hold(&frames));
        let mut nak = ack();
        let syndrome = headroom(false) + BTH_BYTES;
        nak.buffer_mut()[syndrome] = 0x61;
        assert!(!may_hold(&VecDeque::from([nak])));
    }

    #[test]
    fn a_run_has_datagrams_of_one_length_to_one_process() {
        let run = || Run::new(transmit(2, 1000), Some(1));
        let next = |run: &mut Run, length| {
            let transmit = transmit(2, length);
            let accepts = run.accepts(&transmit, Some(1));
            if accepts {
                run.add(&transmit);
            }
            accepts
        };
        // A shorter datagram is the last.
        let mut one = run();
        assert!(next(&mut one, 1000) && next(&mut one, 200) && !next(&mut one, 200));
        assert_eq!(one.count, 3);
        assert!(!next(&mut run(), 1004));
        assert!(!run().accepts(&transmit(3, 1000), Some(1)));
        assert!(!run().accepts(&transmit(2, 1000), Some(2)));
    }

    #[test]
    fn the_length_of_a_run_is_limited() {
        for (length, max) in [(64, MAX_SEGMENTS), (1024, 62), (4096, 15)] {
            let mut run = Run::new(transmit(2, length), None);
            let next = transmit(2, length);
            while run.accepts(&next, None) {
                assert_eq!(usize::from(run.add(&next)) + 1, run.count);
            }
            assert_eq!(
                run.count,
                max.min(MAX_MESSAGE_BYTES / (length + 16)),
                "{length}"
            );
            assert_eq!(run.bytes, run.count * (length + 16));
        }
    }
}
