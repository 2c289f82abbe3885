//! State of a queue pair: of its requester, its responder, and of dynamic connections.

use std::collections::VecDeque;

use super::cause::{Failure, Refusal};
use super::config::QpConfig;
use super::congestion::WINDOW;
use super::host::{Datagram, QpEvent, RecvDone, RecvWork, SendWork, Target};
use super::recovery::{Recovery, ReorderBuffer};
use crate::packet::{DcEth, Gid, Grh, L3, Link, Path, Psn, Roce, Syndrome, Template, View};

/// Maximum number of outstanding work requests.
pub(super) const MAX_WORKS: usize = 512;
/// Number of times a timeout restarts while the transport is patient.
const PATIENCE: u8 = 64;
/// Number of timeouts on lossy networks that are not counted as a retry: a timeout may take up
/// to four times the configured value (IBA 9.7.6.1.3), hardware takes longer, and a peer in
/// software may wait for a processor.
pub(super) const GRACE: u8 = 3;

/// Delay of a timeout after which this process was not running, and the responses may not have
/// been read; and how many such timeouts restart, which bounds their number on a busy host.
pub(super) const LATE: u64 = 50_000_000;
const LATE_RESTARTS: u8 = 4;
/// Shortest timeout while the peer is stopped.
pub(super) const STOPPED_WAIT: u64 = 10_000_000;
/// Longest time between two retransmissions to a peer whose silence does not count; before, it
/// is an eighth of the silence.
pub(super) const MAX_SILENT_WAIT: u64 = 1_000_000_000;

/// RNR timer codes sent for absent memory: 1.28 ms at first, then up to 82 ms.
const FIRST_PAGE_RNR_TIMER: u8 = 14;
const MAX_PAGE_RNR_TIMER: u8 = 26;

/// Maximum number of initiators that a target tracks. Beyond it, the one that was silent
/// longest is removed; its next request begins a new connection.
const MAX_PEERS: usize = 1024;

/// An outstanding work request.
pub(super) struct Pending<L> {
    pub work: SendWork<L>,
    /// First PSN.
    pub first: Psn,
    /// Number of PSNs; 0 if nothing is sent for it.
    pub packets: u32,
    /// Packets received of the response to a read or atomic.
    pub received: u32,
    /// Its result once it has ended; it completes when it is the oldest. The cause is apart,
    /// since work requests are moved often.
    pub done: Option<Result<(), Box<Failure>>>,
}

impl<L> Pending<L> {
    pub fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Ends it with a failure.
    pub fn fail(&mut self, cause: Failure) {
        self.done = Some(Err(Box::new(cause)));
    }

    /// Returns whether a response with data is still missing.
    pub fn awaits(&self) -> bool {
        self.done.is_none()
            && self.work.operation.is_read_or_atomic()
            && self.received < self.packets
    }
}

/// State of a requester.
pub(super) struct Requester<L> {
    pub works: VecDeque<Pending<L>>,
    pub next_psn: Psn,
    pub una: Psn,
    pub cursor: usize,
    pub send_psn: Psn,
    /// One past the highest PSN ever sent.
    pub high: Psn,
    /// Reads and atomics whose response is incomplete, and the number of missing PSNs.
    pub reads: u32,
    pub read_psns: u32,
    pub retries_left: u8,
    /// Remaining restarts of the timeout.
    pub patience: u8,
    /// Remaining timeouts that retransmit without counting a retry.
    pub grace: u8,
    /// Remaining timeouts that restart, since they are [`LATE`].
    pub late_restarts: u8,
    /// The peer was stopped at the last timeout.
    pub peer_stopped: bool,
    /// The peer has answered a request.
    pub answered: bool,
    /// When the peer last answered, or was first expected to, once a timeout has expired.
    pub silent_since: Option<u64>,
    /// How much of this silence did not count.
    pub excused: u64,
    pub rnr_left: u8,
    /// Time of the next retransmission.
    pub deadline: Option<u64>,
    /// Nothing is sent before this time.
    pub rnr_until: Option<u64>,
    /// A missing response was detected since `una` last moved.
    pub implied_nak: bool,
    /// Sending waits for a response (window, fence, read limit), or for its time.
    pub blocked: bool,
    /// Maximum number of request packets in flight, not counting read responses; a power
    /// of two.
    pub window: u32,
    /// Mask for the number of a packet in its message: a packet with none of these bits set
    /// requests an acknowledgement.
    pub ack_request_mask: u32,
    pub recovery: Recovery,
}

impl<L> Requester<L> {
    pub fn new() -> Self {
        Self {
            works: VecDeque::new(),
            next_psn: Psn::default(),
            una: Psn::default(),
            cursor: 0,
            send_psn: Psn::default(),
            high: Psn::default(),
            reads: 0,
            read_psns: 0,
            retries_left: 0,
            patience: PATIENCE,
            grace: GRACE,
            late_restarts: LATE_RESTARTS,
            peer_stopped: false,
            answered: false,
            silent_since: None,
            excused: 0,
            rnr_left: 0,
            deadline: None,
            rnr_until: None,
            implied_nak: false,
            blocked: false,
            window: WINDOW,
            ack_request_mask: WINDOW / 4 - 1,
            recovery: Recovery::default(),
        }
    }

    pub fn start(&mut self, psn: Psn) {
        self.next_psn = psn;
        self.una = psn;
        self.send_psn = psn;
        self.high = psn;
        self.recovery.start(psn);
    }

    /// Restarts at a PSN with nothing in flight.
    pub fn begin_at(&mut self, psn: Psn) {
        self.una = psn;
        self.send_psn = psn;
        self.high = psn;
        self.reads = 0;
        self.read_psns = 0;
        self.deadline = None;
        self.rnr_until = None;
        self.implied_nak = false;
    }

    /// Skips the rest of a read response, which ends at `end`.
    pub fn skip_rest(&mut self, end: Psn, missing: u32) {
        self.reads = self.reads.saturating_sub(1);
        self.read_psns = self.read_psns.saturating_sub(missing);
        if self.una.before(end) {
            self.una = end;
        }
    }

    /// The peer has answered.
    pub fn progress(&mut self, config: &QpConfig) {
        self.answered = true;
        self.refill(config);
    }

    /// Resets all retry counters.
    pub fn refill(&mut self, config: &QpConfig) {
        self.retries_left = config.retry_count;
        self.patience = PATIENCE;
        self.grace = GRACE;
        self.late_restarts = LATE_RESTARTS;
        self.peer_stopped = false;
        self.silent_since = None;
        self.excused = 0;
        self.rnr_left = config.rnr_retry;
    }

    /// Discards all outstanding work requests and returns them.
    pub fn clear(&mut self) -> impl Iterator<Item = SendWork<L>> + use<L> {
        let works = std::mem::take(&mut self.works);
        self.cursor = 0;
        self.reads = 0;
        self.read_psns = 0;
        self.deadline = None;
        self.rnr_until = None;
        self.blocked = false;
        self.start(self.next_psn);
        works.into_iter().map(|p| p.work)
    }

    /// Returns whether there may be something to send.
    pub fn can_continue(&self, rung: bool) -> bool {
        self.rnr_until.is_none()
            && !self.blocked
            && (self.cursor < self.works.len() || (rung && self.works.len() < MAX_WORKS))
    }

    /// Makes `psn` the next packet to be sent. All PSNs before it are acknowledged.
    pub fn seek(&mut self, psn: Psn) {
        self.cursor = self
            .works
            .iter()
            .position(|p| {
                if p.packets == 0 {
                    p.done != Some(Ok(()))
                } else {
                    psn.before(p.end())
                }
            })
            .unwrap_or(self.works.len());
        self.send_psn = psn;
        self.reads = 0;
        self.read_psns = 0;
        self.blocked = false;
        self.recovery.restart_at(psn);
    }

    /// Returns the number of request packets in flight.
    pub fn flight(&self) -> u32 {
        let distance = self.send_psn.distance(self.una).max(0) as u32;
        distance.saturating_sub(self.read_psns)
    }
}

/// A partially received message.
pub(super) enum Message<L> {
    None,
    Send {
        recv: RecvWork<L>,
        offset: u32,
    },
    Write {
        rkey: u32,
        va: u64,
        left: u32,
        total: u32,
    },
}

/// A read response that is being sent.
pub(super) struct ReadReply {
    /// PSN of the next packet.
    pub psn: Psn,
    /// One past the last PSN.
    pub end: Psn,
    pub msn: u32,
    pub va: u64,
    pub rkey: u32,
    pub rest: u32,
    pub target: Target,
    pub begun: bool,
    pub duplicate: bool,
}

/// A queued reply.
pub(super) enum Reply {
    Ack {
        psn: Psn,
        msn: u32,
    },
    Read(ReadReply),
    Atomic {
        psn: Psn,
        msn: u32,
        value: u64,
    },
    Nak {
        psn: Psn,
        msn: u32,
        syndrome: Syndrome,
    },
    /// A NAK, or nothing, after which the queue pair is in error.
    Fatal {
        psn: Psn,
        msn: u32,
        refusal: Refusal,
    },
}

impl Reply {
    pub fn psn(&self) -> Psn {
        match self {
            Self::Read(read) => read.psn,
            Self::Ack { psn, .. }
            | Self::Atomic { psn, .. }
            | Self::Nak { psn, .. }
            | Self::Fatal { psn, .. } => *psn,
        }
    }
}

/// Completion and event of a refused request.
pub(super) struct RefusedRequest<L> {
    /// The receive that it took.
    pub recv: Option<(RecvWork<L>, RecvDone)>,
    pub event: Option<QpEvent>,
}

/// State of a responder.
pub(super) struct Responder<L> {
    pub expected: Psn,
    pub msn: u32,
    pub message: Message<L>,
    /// A receive taken for a message that was not finished (UC), or whose memory was
    /// absent; used for the next message.
    pub spare: Option<RecvWork<L>>,
    /// The peer was sent a NAK for a missing packet, or an RNR NAK.
    pub nak_sent: bool,
    pub replies: VecDeque<Reply>,
    /// The oldest reply is a read response that the rate limit delays.
    pub held: bool,
    /// Queued read responses, not counting those of duplicate requests.
    pub reads: u32,
    /// Results of recent atomics, for duplicates.
    pub atomics: VecDeque<(Psn, u64)>,
    /// Consecutive RNR NAKs sent for absent memory.
    pub absent: u8,
    pub closing: bool,
    /// The receive of the request for which it is closing.
    pub failed: Option<(RecvWork<L>, RecvDone)>,
    pub established: bool,
    /// Packets beyond a missing one.
    pub kept: ReorderBuffer,
}

impl<L> Responder<L> {
    pub fn new() -> Self {
        Self {
            expected: Psn::default(),
            msn: 0,
            message: Message::None,
            spare: None,
            nak_sent: false,
            replies: VecDeque::new(),
            held: false,
            reads: 0,
            atomics: VecDeque::new(),
            absent: 0,
            closing: false,
            failed: None,
            established: false,
            kept: ReorderBuffer::new(),
        }
    }

    pub fn start(&mut self, expected: Psn, config: &QpConfig) {
        *self = Self::new();
        self.expected = expected;
        if config.service.is_reliable() {
            self.atomics
                .reserve_exact(usize::from(config.max_dest_rd_atomic) + 1);
        }
    }

    /// Suppresses the "communication established" event.
    pub fn establish(&mut self) {
        self.established = true;
    }

    /// Discards all replies. Returns the receive in use, or the one kept.
    pub fn clear(&mut self) -> Option<RecvWork<L>> {
        self.replies.clear();
        self.held = false;
        self.reads = 0;
        self.kept.clear();
        match std::mem::replace(&mut self.message, Message::None) {
            Message::Send { recv, .. } => Some(recv),
            _ => self.spare.take(),
        }
    }

    /// Keeps a receive for the next message.
    pub fn set_spare(&mut self, recv: RecvWork<L>) {
        self.spare = Some(recv);
    }

    /// Takes the receive that was kept.
    pub fn take_spare(&mut self) -> Option<RecvWork<L>> {
        self.spare.take()
    }

    /// Returns the RNR timer code for absent memory; the wait grows with each
    /// consecutive NAK.
    pub fn wait_code(&mut self) -> u8 {
        let code = (FIRST_PAGE_RNR_TIMER + 2 * self.absent).min(MAX_PAGE_RNR_TIMER);
        self.absent = self.absent.saturating_add(1).min(MAX_PAGE_RNR_TIMER);
        code
    }

    /// Returns whether there is a reply to send now.
    pub fn has_replies(&self) -> bool {
        !self.replies.is_empty() && !self.held
    }

    pub fn acknowledge(&mut self, psn: Psn) {
        let ack = Reply::Ack { psn, msn: self.msn };
        match self.replies.back_mut() {
            Some(last @ Reply::Ack { .. }) => *last = ack,
            _ => self.replies.push_back(ack),
        }
    }

    /// Queues the response to a duplicate request before those of later requests: the
    /// peer waits for it first.
    pub fn answer_again(&mut self, reply: Reply) {
        let psn = reply.psn();
        if let Reply::Read(again) = &reply {
            let same = self.replies.iter_mut().find_map(|queued| match queued {
                Reply::Read(read) if read.end == again.end && psn.before(read.psn) => Some(read),
                _ => None,
            });
            if let Some(read) = same {
                // The rest of this response would be sent twice.
                let duplicate = read.duplicate;
                *read = ReadReply {
                    duplicate,
                    ..*again
                };
                return;
            }
        }
        let later = |queued: &Reply| psn.before(queued.psn());
        let place = self.replies.iter().position(later);
        self.replies
            .insert(place.unwrap_or(self.replies.len()), reply);
    }

    pub fn nak(&mut self, syndrome: Syndrome) {
        self.nak_sent = true;
        self.replies.push_back(Reply::Nak {
            psn: self.expected,
            msn: self.msn,
            syndrome,
        });
    }
}

/// State of a DC initiator.
#[derive(Default)]
pub(super) struct Initiator {
    pub connection: Option<Connection>,
    /// Number of the last connection.
    pub last: u64,
    /// Streams in error; at most as many as the queue pair permits.
    pub errored: Vec<u16>,
}

pub(super) struct Connection {
    pub to: Datagram,
    pub number: u64,
}

impl Initiator {
    /// Resets the state together with the queue pair.
    pub fn reset(&mut self) {
        self.connection = None;
        self.errored.clear();
    }

    /// Returns the current destination of requests.
    pub fn connected_to(&self) -> Option<&Datagram> {
        self.connection.as_ref().map(|connection| &connection.to)
    }

    /// Returns whether a stream is in error, so that its work requests are flushed.
    pub fn is_errored(&self, stream: u16) -> bool {
        self.errored.contains(&stream)
    }

    /// Lets a stream continue after an error. Returns whether it was in error.
    pub fn restore(&mut self, stream: u16) -> bool {
        let before = self.errored.len();
        self.errored.retain(|errored| *errored != stream);
        self.errored.len() != before
    }

    /// Returns the DC header of a request.
    pub fn header(&self, source_qpn: u32, oldest: Psn) -> DcEth {
        self.connection
            .as_ref()
            .map_or(DcEth::default(), |connection| DcEth {
                key: connection.to.dc_key,
                connection: connection.number,
                source_qpn,
                oldest,
            })
    }
}

/// A target's responder for one initiator.
pub(super) struct Peer<L> {
    pub from: InitiatorId,
    pub connection: u64,
    pub template: Option<Template>,
    pub resp: Responder<L>,
}

/// Identity of an initiator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct InitiatorId {
    pub gid: Option<Gid>,
    pub lid: u16,
    pub qpn: u32,
}

/// State of a DC target.
pub(super) struct Peers<L> {
    /// Ordered by the last packet received, the most recent one last.
    pub list: Vec<Peer<L>>,
    /// Receives taken for messages that were not finished; used for later messages.
    pub spare: Vec<RecvWork<L>>,
}

impl<L> Peers<L> {
    pub fn new() -> Self {
        Self {
            list: Vec::new(),
            spare: Vec::new(),
        }
    }

    pub fn have_replies(&self) -> bool {
        self.list.iter().rev().any(|peer| peer.resp.has_replies())
    }

    pub fn set_spare(&mut self, recv: Option<RecvWork<L>>) {
        self.spare.extend(recv);
    }

    pub fn take_spare(&mut self) -> Option<RecvWork<L>> {
        self.spare.pop()
    }

    /// Returns the index of the responder for a packet, started anew if the connection
    /// is new; `None` if the connection is stale.
    pub fn of(&mut self, view: &View<'_>, header: &DcEth, config: &QpConfig) -> Option<usize> {
        let lid = match view.network.link {
            Link::Ib { slid, .. } => slid,
            Link::Ether { .. } | Link::Ip => 0,
        };
        let from = InitiatorId {
            gid: view.network.sgid(view.frame),
            lid,
            qpn: header.source_qpn,
        };
        let begin = || {
            let mut resp = Responder::new();
            resp.start(header.oldest, config);
            resp.establish();
            Peer {
                from,
                connection: header.connection,
                template: Some(Template::new(&back(view))),
                resp,
            }
        };
        let last = self.list.len().saturating_sub(1);
        match self.list.iter().rposition(|peer| peer.from == from) {
            Some(index) if header.connection < self.list[index].connection => None,
            Some(index) => {
                if header.connection > self.list[index].connection {
                    let mut old = std::mem::replace(&mut self.list[index], begin());
                    self.set_spare(old.resp.clear());
                }
                self.list[index..].rotate_left(1);
                Some(last)
            }
            None => {
                if self.list.len() >= MAX_PEERS {
                    let mut silent = self.list.remove(0);
                    self.set_spare(silent.resp.clear());
                }
                self.list.push(begin());
                Some(self.list.len() - 1)
            }
        }
    }
}

/// Returns the path back to the sender of a packet.
fn back(view: &View<'_>) -> Path {
    let network = &view.network;
    let link = match network.link {
        Link::Ib { slid, dlid, sl } => Link::Ib {
            slid: dlid,
            dlid: slid,
            sl,
        },
        Link::Ether { smac, dmac, vlan } => Link::Ether {
            smac: dmac,
            dmac: smac,
            vlan,
        },
        Link::Ip => Link::Ip,
    };
    let gids = network.sgid(view.frame).zip(network.dgid(view.frame));
    Path {
        link,
        grh: gids.map(|(sgid, dgid)| Grh {
            sgid: dgid,
            dgid: sgid,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 64,
        }),
        roce: match network.l3 {
            L3::Grh => Roce::V1,
            _ => Roce::V2,
        },
        udp_source: 0,
    }
}
