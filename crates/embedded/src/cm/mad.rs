//! Messages of the connection manager on the network: management datagrams (IBA 12.6, and on
//! Ethernet IBA A17.6.1; Linux: the private data of a request begins with the IP addresses).
//!
//! A datagram is untrusted. [`Mad::parse`] checks the headers; other fields may have any
//! values within their widths.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use roce::packet::gid_of_ip;

use super::message::{Message, MessageKind};
use crate::wires::agent::{
    self, ATTRIBUTE, CONNECTION_MANAGEMENT, LOCAL_ID, MAD_SIZE, PortAddress, REMOTE_ID, TRANSACTION,
};

/// Base version, class, class version and method (Send).
const HEADER: [u8; 4] = [1, CONNECTION_MANAGEMENT, 2, 0x03];
const BODY: usize = LOCAL_ID;

/// Type of a message: the attribute of its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Attribute {
    Request = agent::REQUEST,
    /// Message receipt acknowledgement (MRA): the answer takes longer.
    Mra = 0x11,
    Reject = 0x12,
    Reply = 0x13,
    Ready = 0x14,
    Disconnect = 0x15,
    Disconnected = 0x16,
    ServiceRequest = agent::SERVICE_REQUEST,
    ServiceReply = agent::SERVICE_REPLY,
}

use Attribute as A;

impl Attribute {
    const ALL: [Self; 9] = [
        A::Request,
        A::Mra,
        A::Reject,
        A::Reply,
        A::Ready,
        A::Disconnect,
        A::Disconnected,
        A::ServiceRequest,
        A::ServiceReply,
    ];

    /// Returns its place in [`ManagementCounters`](super::ManagementCounters).
    pub(super) fn index(self) -> usize {
        usize::from(self as u16 - A::Request as u16)
    }

    pub(super) fn of(kind: MessageKind) -> Self {
        match kind {
            MessageKind::Request => A::Request,
            MessageKind::Reply => A::Reply,
            MessageKind::Ready => A::Ready,
            MessageKind::Reject => A::Reject,
            MessageKind::Disconnect => A::Disconnect,
            MessageKind::Disconnected => A::Disconnected,
            MessageKind::ServiceRequest => A::ServiceRequest,
            MessageKind::ServiceReply => A::ServiceReply,
        }
    }

    pub(super) fn kind(self) -> Option<MessageKind> {
        Some(match self {
            A::Mra => return None,
            A::Request => MessageKind::Request,
            A::Reply => MessageKind::Reply,
            A::Ready => MessageKind::Ready,
            A::Reject => MessageKind::Reject,
            A::Disconnect => MessageKind::Disconnect,
            A::Disconnected => MessageKind::Disconnected,
            A::ServiceRequest => MessageKind::ServiceRequest,
            A::ServiceReply => MessageKind::ServiceReply,
        })
    }

    /// Returns the offset of the private data, which extend to the end.
    fn private_data(self) -> usize {
        BODY + match self {
            A::Request => 140,
            A::Mra => 10,
            A::Reject => 84,
            A::Reply => 36,
            A::Ready | A::Disconnected => 8,
            A::Disconnect => 12,
            A::ServiceRequest => 16,
            A::ServiceReply => 96,
        }
    }
}

/// The message that a rejection (REJ) or a receipt acknowledgement (MRA) refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Request = 0,
    Reply = 1,
    Other = 2,
}

mod request {
    use super::BODY;
    pub(super) const SERVICE: usize = BODY + 8;
    pub(super) const GUID: usize = BODY + 16;
    pub(super) const QKEY: usize = BODY + 28;
    pub(super) const QPN: usize = BODY + 32;
    pub(super) const RESPONDER_RESOURCES: usize = BODY + 35;
    pub(super) const INITIATOR_DEPTH: usize = BODY + 39;
    /// Remote response timeout, service type, flow control.
    pub(super) const TIMEOUT: usize = BODY + 43;
    pub(super) const PSN: usize = BODY + 44;
    /// Local response timeout, retry count.
    pub(super) const RETRIES: usize = BODY + 47;
    pub(super) const PKEY: usize = BODY + 48;
    /// Path MTU, RNR retry count.
    pub(super) const MTU: usize = BODY + 50;
    /// Maximum retries of the connection manager, SRQ.
    pub(super) const CM_RETRIES: usize = BODY + 51;
    pub(super) const LIDS: usize = BODY + 52;
    pub(super) const LOCAL_GID: usize = BODY + 56;
    pub(super) const REMOTE_GID: usize = BODY + 72;
    pub(super) const RATE: usize = BODY + 91;
    pub(super) const TRAFFIC_CLASS: usize = BODY + 92;
    pub(super) const HOP_LIMIT: usize = BODY + 93;
    pub(super) const ACK_TIMEOUT: usize = BODY + 95;
}

mod reply {
    use super::BODY;
    pub(super) const QKEY: usize = BODY + 8;
    pub(super) const QPN: usize = BODY + 12;
    pub(super) const PSN: usize = BODY + 20;
    pub(super) const RESPONDER_RESOURCES: usize = BODY + 24;
    pub(super) const INITIATOR_DEPTH: usize = BODY + 25;
    /// Target ACK delay, failover accepted, flow control.
    pub(super) const FLAGS: usize = BODY + 26;
    /// RNR retry count, SRQ.
    pub(super) const RNR: usize = BODY + 27;
    pub(super) const GUID: usize = BODY + 28;
}

const REJECT_ABOUT: usize = BODY + 8;
const REJECT_REASON: usize = BODY + 10;
const MRA_ABOUT: usize = BODY + 8;
const MRA_TIMEOUT: usize = BODY + 9;
const DISCONNECT_QPN: usize = BODY + 8;
const SERVICE_PKEY: usize = BODY + 4;
const SERVICE_ID: usize = BODY + 8;
const SERVICE_STATUS: usize = BODY + 4;
const SERVICE_QPN: usize = BODY + 8;
const SERVICE_REPLY_ID: usize = BODY + 12;
const SERVICE_QKEY: usize = BODY + 20;

/// Length of the IP header of rdma_cm in a request's private data.
const IP_HEADER: usize = 36;

const PKEY: u16 = 0xffff;
/// A LID that means none.
const PERMISSIVE_LID: u16 = 0xffff;
/// Response timeout of rdma_cm: 4.3 s, and its retries.
const RESPONSE_TIMEOUT: u8 = 20;
const CM_RETRIES: u8 = 15;
/// 100 Gb/s.
const RATE: u8 = 16;
const ACK_DELAY: u8 = 16;

/// A management datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mad {
    pub(super) attribute: Attribute,
    bytes: Box<[u8; MAD_SIZE]>,
}

/// Header fields of a message: ids of both ends, and parameters of the sender.
#[derive(Clone, Copy, Debug)]
pub(super) struct MadHeader {
    pub(super) transaction: u64,
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) guid: u64,
    pub(super) ack_timeout: u8,
}

impl Mad {
    fn new(attribute: Attribute, header: &MadHeader) -> Self {
        let mut mad = Self {
            attribute,
            bytes: Box::new([0; MAD_SIZE]),
        };
        mad.put(0, &HEADER);
        mad.put(TRANSACTION, &header.transaction.to_be_bytes());
        mad.put(ATTRIBUTE, &(attribute as u16).to_be_bytes());
        mad.put(LOCAL_ID, &header.local_id.to_be_bytes());
        if !matches!(attribute, A::Request | A::ServiceRequest | A::ServiceReply) {
            mad.put(REMOTE_ID, &header.remote_id.to_be_bytes());
        }
        mad
    }

    pub(super) fn bytes(&self) -> &[u8; MAD_SIZE] {
        &self.bytes
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put24(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_be_bytes()[1..]);
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[at..at + N]);
        out
    }

    fn get24(&self, at: usize) -> u32 {
        let [a, b, c] = self.get(at);
        u32::from_be_bytes([0, a, b, c])
    }

    /// Parses a datagram; `None` if it is not a message of the connection manager.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MAD_SIZE] = bytes.try_into().ok()?;
        let number = u16::from_be_bytes([bytes[ATTRIBUTE], bytes[ATTRIBUTE + 1]]);
        let mut all = Attribute::ALL.into_iter();
        let attribute = all.find(|it| *it as u16 == number)?;
        (bytes[..4] == HEADER).then(|| Self {
            attribute,
            bytes: Box::new(*bytes),
        })
    }

    pub(super) fn transaction(&self) -> u64 {
        u64::from_be_bytes(self.get(TRANSACTION))
    }

    /// Returns the sender's communication id, or the id of a service request.
    pub(super) fn sender_id(&self) -> u32 {
        u32::from_be_bytes(self.get(LOCAL_ID))
    }

    /// Returns the receiver's communication id; in a service reply, the id of the request.
    pub(super) fn receiver_id(&self) -> u32 {
        let at = match self.attribute {
            A::ServiceReply => LOCAL_ID,
            _ => REMOTE_ID,
        };
        u32::from_be_bytes(self.get(at))
    }

    /// Returns the requested service: port space and port; `None` if the service id is not
    /// one of rdma_cm.
    pub(super) fn service(&self) -> Option<(u16, u16)> {
        let at = match self.attribute {
            A::Request => request::SERVICE,
            _ => SERVICE_ID,
        };
        let [0, 0, 0, 0, a, b, c, d] = self.get(at) else {
            return None;
        };
        Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
    }

    /// Returns whether a request is for a reliable or unreliable connection.
    pub(super) fn is_connection(&self) -> bool {
        self.bytes[request::TIMEOUT] >> 1 & 3 < 2
    }

    /// Returns the service timeout of a message receipt acknowledgement, as an exponent.
    pub(super) fn service_timeout(&self) -> u8 {
        self.bytes[MRA_TIMEOUT] >> 3
    }

    /// Returns the message that a receipt acknowledgement refers to, of those that this
    /// implementation sends.
    pub(super) fn mra_subject(&self) -> Option<Subject> {
        match self.bytes[MRA_ABOUT] >> 6 {
            0 => Some(Subject::Request),
            1 => Some(Subject::Reply),
            _ => None,
        }
    }

    /// Returns whether the message rejects a request.
    #[cfg(test)]
    pub(super) fn rejects_request(&self) -> bool {
        match self.attribute {
            A::Reject => self.bytes[REJECT_ABOUT] >> 6 == Subject::Request as u8,
            A::ServiceReply => self.bytes[SERVICE_STATUS] != 0,
            _ => false,
        }
    }

    /// Encodes a message.
    pub(super) fn encode(kind: MessageKind, message: &Message, header: &MadHeader) -> Self {
        let attribute = Attribute::of(kind);
        let mut mad = Self::new(attribute, header);
        let data = attribute.private_data();
        match attribute {
            A::Request => {
                mad.request(message, header);
                mad.put_ip_header(data, message);
                mad.put(data + IP_HEADER, message.private_data());
                return mad;
            }
            A::ServiceRequest => {
                mad.put(SERVICE_PKEY, &PKEY.to_be_bytes());
                mad.put(SERVICE_ID, &service_id(message));
                mad.put_ip_header(data, message);
                mad.put(data + IP_HEADER, message.private_data());
                return mad;
            }
            A::Reply => {
                mad.put(reply::QKEY, &message.qkey.to_be_bytes());
                mad.put24(reply::QPN, message.qp_num);
                mad.put24(reply::PSN, message.psn);
                mad.put(
                    reply::RESPONDER_RESOURCES,
                    &[message.responder_resources, message.initiator_depth],
                );
                // Failover is not supported.
                let flags = ACK_DELAY << 3 | 1 << 1 | message.flow_control & 1;
                let rnr = message.rnr_retry_count << 5 | (message.srq & 1) << 4;
                mad.put(reply::FLAGS, &[flags, rnr]);
                mad.put(reply::GUID, &header.guid.to_be_bytes());
            }
            A::Reject => {
                mad.put(REJECT_REASON, &u16::from(message.reason).to_be_bytes());
            }
            A::Disconnect => mad.put24(DISCONNECT_QPN, message.qp_num),
            A::ServiceReply => {
                mad.put(LOCAL_ID, &header.remote_id.to_be_bytes());
                mad.put(SERVICE_STATUS, &[message.reason]);
                mad.put24(SERVICE_QPN, message.qp_num);
                mad.put(SERVICE_REPLY_ID, &service_id(message));
                mad.put(SERVICE_QKEY, &message.qkey.to_be_bytes());
            }
            A::Mra | A::Ready | A::Disconnected => {}
        }
        mad.put(data, message.private_data());
        mad
    }

    fn request(&mut self, message: &Message, header: &MadHeader) {
        self.put(request::SERVICE, &service_id(message));
        self.put(request::GUID, &header.guid.to_be_bytes());
        self.put(request::QKEY, &message.qkey.to_be_bytes());
        self.put24(request::QPN, message.qp_num);
        self.put(request::RESPONDER_RESOURCES, &[message.responder_resources]);
        self.put(request::INITIATOR_DEPTH, &[message.initiator_depth]);
        let reliable = RESPONSE_TIMEOUT << 3 | message.flow_control & 1;
        self.put(request::TIMEOUT, &[reliable]);
        self.put24(request::PSN, message.psn);
        let retries = RESPONSE_TIMEOUT << 3 | message.retry_count;
        self.put(request::RETRIES, &[retries]);
        self.put(request::PKEY, &PKEY.to_be_bytes());
        self.put(request::MTU, &[message.mtu << 4 | message.rnr_retry_count]);
        let srq = CM_RETRIES << 4 | (message.srq & 1) << 3;
        self.put(request::CM_RETRIES, &[srq]);
        let lid = match message.port.ethernet {
            true => PERMISSIVE_LID,
            false => message.port.lid,
        };
        let lids = [lid.to_be_bytes(), PERMISSIVE_LID.to_be_bytes()];
        self.put(request::LIDS, &lids.concat());
        self.put(request::LOCAL_GID, &message.port.gid);
        self.put(request::REMOTE_GID, &gid_of_ip(message.to.ip()));
        self.put(request::RATE, &[RATE]);
        self.put(request::TRAFFIC_CLASS, &[message.traffic_class]);
        self.put(request::HOP_LIMIT, &[64]);
        self.put(request::ACK_TIMEOUT, &[header.ack_timeout << 3]);
    }

    fn put_ip_header(&mut self, at: usize, message: &Message) {
        let version = if message.from.is_ipv4() { 4 } else { 6 };
        self.put(at + 1, &[version << 4]);
        self.put(at + 2, &message.from.port().to_be_bytes());
        for (at, ip) in [(at + 4, message.from.ip()), (at + 20, message.to.ip())] {
            match ip {
                IpAddr::V4(ip) => self.put(at + 12, &ip.octets()),
                IpAddr::V6(ip) => self.put(at, &ip.octets()),
            }
        }
    }

    /// Returns source and destination of a request, with the source's port, from the
    /// header of rdma_cm.
    fn ip_header(&self, at: usize) -> Option<(IpAddr, u16, IpAddr)> {
        let [0, version, high, low] = self.get(at) else {
            return None;
        };
        let ip = |at: usize| -> Option<IpAddr> {
            match version >> 4 {
                4 => Some(Ipv4Addr::from(self.get::<4>(at + 12)).into()),
                6 => Some(Ipv6Addr::from(self.get::<16>(at)).into()),
                _ => None,
            }
        };
        Some((ip(at + 4)?, u16::from_be_bytes([high, low]), ip(at + 20)?))
    }

    /// Decodes a message from a port; `None` for a receipt acknowledgement, or if the datagram
    /// is malformed.
    pub(super) fn message(&self, source: PortAddress) -> Option<(MessageKind, Message)> {
        let kind = self.attribute.kind()?;
        let data = self.attribute.private_data();
        let is_request = matches!(kind, MessageKind::Request | MessageKind::ServiceRequest);
        let skip = if is_request { IP_HEADER } else { 0 };
        let private = &self.bytes[data + skip..];
        let mut message =
            Message::new(kind, &private[..kind.max_private_data().min(private.len())]);
        message = message.with_port(source);
        if is_request {
            let (from, port, to) = self.ip_header(data)?;
            let (space, service) = self.service()?;
            message = message.with_addresses((from, port).into(), (to, service).into());
            message.space = space;
        }
        match self.attribute {
            A::Request => {
                message.qkey = u32::from_be_bytes(self.get(request::QKEY));
                message.qp_num = self.get24(request::QPN);
                message.psn = self.get24(request::PSN);
                message.responder_resources = self.bytes[request::RESPONDER_RESOURCES];
                message.initiator_depth = self.bytes[request::INITIATOR_DEPTH];
                message.flow_control = self.bytes[request::TIMEOUT] & 1;
                message.retry_count = self.bytes[request::RETRIES] & 7;
                message.mtu = (self.bytes[request::MTU] >> 4).clamp(1, 5);
                message.rnr_retry_count = self.bytes[request::MTU] & 7;
                message.srq = self.bytes[request::CM_RETRIES] >> 3 & 1;
                message.traffic_class = self.bytes[request::TRAFFIC_CLASS];
            }
            A::Reply => {
                message.qkey = u32::from_be_bytes(self.get(reply::QKEY));
                message.qp_num = self.get24(reply::QPN);
                message.psn = self.get24(reply::PSN);
                message.responder_resources = self.bytes[reply::RESPONDER_RESOURCES];
                message.initiator_depth = self.bytes[reply::INITIATOR_DEPTH];
                message.flow_control = self.bytes[reply::FLAGS] & 1;
                message.rnr_retry_count = self.bytes[reply::RNR] >> 5;
                message.srq = self.bytes[reply::RNR] >> 4 & 1;
            }
            A::Reject => {
                let reason = u16::from_be_bytes(self.get(REJECT_REASON));
                message.reason = u8::try_from(reason).unwrap_or(u8::MAX);
            }
            A::ServiceReply => {
                message.reason = self.bytes[SERVICE_STATUS];
                message.qp_num = self.get24(SERVICE_QPN);
                message.qkey = u32::from_be_bytes(self.get(SERVICE_QKEY));
            }
            _ => {}
        }
        Some((kind, message))
    }

    /// Creates a rejection without private data.
    pub(super) fn reject(header: &MadHeader, subject: Subject, reason: u8) -> Self {
        let mut message = Message::new(MessageKind::Reject, &[]);
        message.reason = reason;
        Self::encode(MessageKind::Reject, &message, header).with_subject(subject)
    }

    /// Sets the message that a rejection refers to.
    pub(super) fn with_subject(mut self, subject: Subject) -> Self {
        self.put(REJECT_ABOUT, &[(subject as u8) << 6]);
        self
    }

    /// Creates a message receipt acknowledgement.
    pub(super) fn mra(header: &MadHeader, subject: Subject, timeout: u8) -> Self {
        let mut mad = Self::new(A::Mra, header);
        mad.put(MRA_ABOUT, &[(subject as u8) << 6]);
        mad.put(MRA_TIMEOUT, &[timeout << 3]);
        mad
    }
}

fn service_id(message: &Message) -> [u8; 8] {
    (u64::from(message.space) << 16 | u64::from(message.to.port())).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER_FIELDS: MadHeader = MadHeader {
        transaction: 0x0102_0304_0506_0708,
        local_id: 0x1111_2222,
        remote_id: 0x3333_4444,
        guid: 0x0200_0000_0000_0001,
        ack_timeout: 17,
    };

    /// Of `::ffff:192.0.2.1`.
    const PORT: PortAddress = PortAddress {
        ethernet: true,
        gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1],
        lid: 0,
    };

    fn message(kind: MessageKind, ipv6: bool) -> Message {
        let (from, to) = match ipv6 {
            true => ("[fd00::1]:5", "[fd00::2]:7471"),
            false => ("192.0.2.1:5", "192.0.2.2:7471"),
        };
        let mut message = Message::new(kind, &vec![7; kind.max_private_data()]).with_port(PORT);
        if matches!(kind, MessageKind::Request | MessageKind::ServiceRequest) {
            message = message.with_addresses(from.parse().unwrap(), to.parse().unwrap());
            message.space = 0x106;
        }
        message
    }

    /// The layout of Linux's `cm_msgs.h` and rdma_cm.
    #[test]
    fn a_request_has_the_specified_layout() {
        let mut asked = message(MessageKind::Request, false);
        (asked.qp_num, asked.psn, asked.mtu) = (0xabcdef, 0x123456, 3);
        (asked.responder_resources, asked.initiator_depth) = (4, 5);
        (asked.retry_count, asked.rnr_retry_count, asked.srq) = (6, 7, 1);
        let mad = Mad::encode(MessageKind::Request, &asked, &HEADER_FIELDS);
        let bytes = mad.bytes();
        assert_eq!(bytes[..8], [1, 7, 2, 3, 0, 0, 0, 0]);
        assert_eq!(bytes[16..18], [0, 0x10]);
        assert_eq!(bytes[24..28], [0x11, 0x11, 0x22, 0x22]);
        assert_eq!(bytes[32..40], [0, 0, 0, 0, 1, 6, 0x1d, 0x2f]);
        assert_eq!(bytes[56..60], [0xab, 0xcd, 0xef, 4]);
        assert_eq!(bytes[60..64], [0, 0, 0, 5]);
        assert_eq!(bytes[64..68], [0, 0, 0, 20 << 3]);
        assert_eq!(bytes[68..72], [0x12, 0x34, 0x56, 20 << 3 | 6]);
        assert_eq!(bytes[72..76], [0xff, 0xff, 3 << 4 | 7, 15 << 4 | 1 << 3]);
        assert_eq!(bytes[90..96], [0xff, 0xff, 192, 0, 2, 1]);
        // The header of rdma_cm, and the program's data.
        assert_eq!(bytes[164..168], [0, 0x40, 0, 5]);
        assert_eq!(bytes[180..184], [192, 0, 2, 1]);
        assert_eq!(bytes[196..200], [192, 0, 2, 2]);
        assert_eq!(bytes[200..256], [7; 56]);
    }

    #[test]
    fn messages_are_read_as_written() {
        let source = PORT;
        for ipv6 in [false, true] {
            for attribute in Attribute::ALL {
                let Some(kind) = attribute.kind() else {
                    continue;
                };
                let mut sent = message(kind, ipv6);
                if !matches!(
                    kind,
                    MessageKind::Ready | MessageKind::Disconnect | MessageKind::Disconnected
                ) {
                    (sent.qp_num, sent.qkey) = (0x123456, 0x8765_4321);
                    sent.reason = 28;
                }
                if matches!(kind, MessageKind::Request | MessageKind::Reply) {
                    (sent.psn, sent.responder_resources) = (0xff_fffe, 16);
                    (sent.initiator_depth, sent.rnr_retry_count) = (3, 7);
                    (sent.flow_control, sent.srq) = (1, 1);
                }
                let mad = Mad::encode(kind, &sent, &HEADER_FIELDS);
                let read = Mad::parse(mad.bytes()).unwrap();
                assert_eq!(read, mad);
                assert_eq!(read.transaction(), HEADER_FIELDS.transaction);
                let (got_kind, got) = read.message(source).unwrap();
                assert_eq!(got_kind, kind);
                assert_eq!(got.private_data(), sent.private_data());
                assert_eq!((got.from, got.to), (sent.from, sent.to));
                assert_eq!(got.port, source);
                if matches!(
                    kind,
                    MessageKind::Request | MessageKind::Reply | MessageKind::ServiceReply
                ) {
                    assert_eq!((got.qp_num, got.qkey), (sent.qp_num, sent.qkey));
                }
                if matches!(kind, MessageKind::Request | MessageKind::Reply) {
                    assert_eq!((got.psn, got.rnr_retry_count), (sent.psn, 7));
                    assert_eq!((got.responder_resources, got.initiator_depth), (16, 3));
                    assert_eq!((got.flow_control, got.srq), (1, 1));
                }
                if matches!(kind, MessageKind::Reject | MessageKind::ServiceReply) {
                    assert_eq!(got.reason, 28);
                }
            }
        }
        let mra = Mad::mra(&HEADER_FIELDS, Subject::Request, 24);
        let read = Mad::parse(mra.bytes()).unwrap();
        assert_eq!(
            (read.service_timeout(), read.receiver_id()),
            (24, HEADER_FIELDS.remote_id)
        );
        assert!(read.message(source).is_none());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_or_rejected(
            mut bytes in proptest::collection::vec(any::<u8>(), MAD_SIZE),
            attribute in 0x0fu8..0x1a,
            length in 0..MAD_SIZE + 3,
        ) {
            prop_assert!(length == MAD_SIZE || Mad::parse(&vec![0; length]).is_none());
            bytes[..4].copy_from_slice(&HEADER);
            (bytes[16], bytes[17]) = (0, attribute);
            // The header of rdma_cm, if it is a request.
            (bytes[164], bytes[165], bytes[40], bytes[41]) = (0, 0x40, 0, 0x60);
            let Some(mad) = Mad::parse(&bytes) else { return Ok(()) };
            let source = PORT;
            let _ = (mad.service(), mad.sender_id(), mad.receiver_id(), mad.is_connection());
            if let Some((kind, message)) = mad.message(source) {
                // Decoded messages are valid for ids.
                prop_assert!(message.qp_num < 1 << 24 && message.psn < 1 << 24);
                prop_assert!(message.retry_count < 8 && message.rnr_retry_count < 8);
                prop_assert!((1..=5).contains(&message.mtu));
                prop_assert!(message.private_data().len() <= kind.max_private_data());
            }
        }
    }
}
