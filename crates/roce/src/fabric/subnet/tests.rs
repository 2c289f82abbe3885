use super::*;
use crate::bits::{Field, field, get_array, put_bytes};
use crate::fabric::{Fabric, Faults, Port, PortConfig};
use crate::packet::{DEFAULT_PKEY, Gid, LinkKind};

const BROADCAST: Gid = [
    0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
];

/// Offsets of the record and its fields, counted by hand.
const RECORD: usize = 56;
const TID: usize = 8;

/// A request as Linux builds it: class 3, version 2.
fn request(method: u8, attribute: u16, components: &[u32], record: &[u8]) -> [u8; 256] {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 3, 2, method]);
    put_bytes(&mut mad, TID, b"transact");
    put_bytes(&mut mad, 16, &attribute.to_be_bytes());
    let mask = components.iter().fold(0_u64, |mask, bit| mask | 1 << bit);
    put_bytes(&mut mad, 48, &mask.to_be_bytes());
    put_bytes(&mut mad, RECORD, record);
    mad
}

/// A datagram to QP 1 of the subnet manager.
pub(in crate::fabric) fn datagram(from: u16, global: bool, payload: &[u8]) -> Packet {
    let pool = Pool::new();
    let path = Path {
        grh: global.then(|| Grh {
            sgid: gid(guid(from)),
            dgid: gid(guid(LID)),
            ..Grh::default()
        }),
        ..Path::ib(from, LID)
    };
    let template = Template::new(&path);
    let bth = Bth {
        opcode: 0x64,
        pkey: DEFAULT_PKEY,
        dest_qpn: 1,
        ..Bth::default()
    };
    let deth = Deth {
        qkey: 0x8001_0000,
        source_qpn: 1,
    };
    let mut builder = PacketBuilder::new(&pool, &template, bth, payload.len());
    builder.put(&deth.bytes());
    builder.put(payload);
    builder.finish()
}

/// Sends a request and returns the responses, after checking that they belong to it.
fn send_request(port: &Port, request: &[u8; 256]) -> Vec<Vec<u8>> {
    let lid = port.config().lid;
    port.send(0, datagram(lid, false, request));
    let mut responses = Vec::new();
    while let Some(packet) = port.recv(0) {
        let view = View::read(LinkKind::Ib, packet.frame()).unwrap();
        let link = Link::Ib {
            slid: 0xbfff,
            dlid: lid,
            sl: 0,
        };
        assert_eq!(view.network.link, link);
        assert_eq!(view.bth.dest_qpn, 1);
        let deth = view.deth().unwrap();
        assert_eq!((deth.qkey, deth.source_qpn), (0x8001_0000, 1));
        // The response method, and the transaction and attribute of the request.
        let method = if request[3] == 2 { 1 } else { request[3] };
        assert_eq!(view.payload.bytes()[..4], [1, 3, 2, method | 0x80]);
        assert_eq!(view.payload.bytes()[TID..18], request[TID..18]);
        responses.push(view.payload.bytes().to_vec());
    }
    responses
}

/// Sends a request that has one response. Returns its status and record.
fn single_response(port: &Port, request: &[u8; 256]) -> (u16, Vec<u8>) {
    let mut responses = send_request(port, request);
    assert_eq!(responses.len(), 1);
    let mad = responses.remove(0);
    (u16::from_be_bytes([mad[4], mad[5]]), mad[RECORD..].to_vec())
}

fn fabric() -> (Fabric, Port, Port) {
    let fabric = Fabric::new(1);
    let (a, b) = (
        fabric.port(PortConfig::ib(1)),
        fabric.port(PortConfig::ib(2)),
    );
    (fabric, a, b)
}

/// A path record with both GIDs.
fn path(to: &Gid, from: &Gid) -> Vec<u8> {
    let mut record = vec![0; 64];
    put_bytes(&mut record, 8, to);
    put_bytes(&mut record, 24, from);
    // One path, reversible, of the default partition.
    put_bytes(&mut record, 48, &[0, 0x81, 0xff, 0xff]);
    record
}

/// The components that rdma_cm sets: GIDs, reversible, number of paths, partition.
const PATH_COMPONENTS: [u32; 5] = [2, 3, 11, 12, 13];

#[test]
fn a_path_record_has_both_gids() {
    let (_fabric, a, b) = fabric();
    let (from, to) = (gid(a.config().guid), gid(b.config().guid));
    let (status, record) =
        single_response(&a, &request(1, 0x35, &PATH_COMPONENTS, &path(&to, &from)));
    assert_eq!(status, 0);
    assert_eq!(get_array(&record, 8), to);
    assert_eq!(get_array(&record, 24), from);
    // LIDs of destination and source.
    assert_eq!(record[40..44], [0, 2, 0, 1]);
    // Raw traffic, flow label, hop limit.
    assert_eq!(record[44..48], [0; 4]);
    // Traffic class; reversible, one path; partition.
    assert_eq!(record[48..52], [0, 0x81, 0xff, 0xff]);
    // QoS class and service level; exactly 4096 bytes, exactly 100 Gb/s.
    assert_eq!(record[52..56], [0, 0, 2 << 6 | 5, 2 << 6 | 16]);
    assert_eq!(record[56], 2 << 6 | 16);
    // A path from the port to itself.
    let (status, record) =
        single_response(&a, &request(1, 0x35, &PATH_COMPONENTS, &path(&from, &from)));
    assert_eq!((status, &record[40..44]), (0, &[0, 1, 0, 1][..]));
}

#[test]
fn an_unknown_port_has_no_path() {
    let (_fabric, a, b) = fabric();
    let (from, to) = (gid(a.config().guid), gid(b.config().guid));
    let unknown = gid(guid(3));
    let good = path(&to, &from);
    let with = |components: &[u32], change: &dyn Fn(&mut Vec<u8>)| {
        let mut record = good.clone();
        change(&mut record);
        single_response(&a, &request(1, 0x35, components, &record)).0
    };
    assert_eq!(with(&[2, 3], &|r| put_bytes(r, 8, &unknown)), 0x0500);
    assert_eq!(with(&[2, 3], &|r| put_bytes(r, 24, &unknown)), 0x0500);
    // The prefix of another subnet.
    assert_eq!(with(&[2, 3], &|r| r[9] ^= 1), 0x0500);
    // Neither GID nor LID of the destination.
    assert_eq!(with(&[3], &|_| ()), 0x0600);
    // Another partition, another service level.
    assert_eq!(with(&[2, 3, 13], &|r| r[50] = 0x12), 0x0300);
    assert_eq!(with(&[2, 3, 15], &|r| r[53] = 1), 0x0300);
    // Greater than 2048, greater than 4096, less than 4096, exactly 4096 bytes.
    assert_eq!(with(&[2, 3, 16, 17], &|r| r[54] = 4), 0);
    assert_eq!(with(&[2, 3, 16, 17], &|r| r[54] = 5), 0x0300);
    assert_eq!(with(&[2, 3, 16, 17], &|r| r[54] = 1 << 6 | 5), 0x0300);
    assert_eq!(with(&[2, 3, 16, 17], &|r| r[54] = 2 << 6 | 5), 0);
    // A LID of another port than the GID; then the port's own.
    assert_eq!(with(&[2, 3, 4], &|r| r[41] = 1), 0x0300);
    assert_eq!(with(&[2, 3, 4], &|r| r[41] = 2), 0);
    // A group that does not exist.
    assert_eq!(with(&[2, 3], &|r| r[8] = 0xff), 0x0300);
}

#[test]
fn a_path_table_lists_every_port_in_several_datagrams() {
    let (fabric, a, _b) = fabric();
    let _more: Vec<Port> = (3..=5)
        .map(|lid| fabric.port(PortConfig::ib(lid)))
        .collect();
    let from = gid(a.config().guid);
    let responses = send_request(&a, &request(0x12, 0x35, &[3], &path(&[0; 16], &from)));
    // Five ports and the subnet manager, 64 bytes each.
    assert_eq!(responses.len(), 2);
    let mut data = Vec::new();
    for (number, mad) in responses.iter().enumerate() {
        // Version 1, data; active and first, active and last.
        let flags = [0xf8 | 3, 0xf8 | 5][number];
        assert_eq!(mad[24..28], [1, 1, flags, 0]);
        assert_eq!(mad[28..32], [0, 0, 0, number as u8 + 1]);
        data.extend_from_slice(&mad[RECORD..]);
    }
    // The length of everything with two headers, then of the rest with one.
    let length = |mad: &[u8]| u32::from_be_bytes(get_array(mad, 32));
    assert_eq!(length(&responses[0]), 6 * 64 + 2 * 20);
    assert_eq!(length(&responses[1]), 6 * 64 - 200 + 20);
    // Record size in units of eight bytes.
    assert_eq!(responses[0][44..46], [0, 8]);
    let lids: Vec<u8> = (0..6).map(|n| data[n * 64 + 41]).collect();
    assert_eq!(lids, [1, 2, 3, 4, 5, 0xff]);
}

/// A member record.
fn member(mgid: &Gid, port: &Port, state: u8) -> Vec<u8> {
    let mut record = vec![0; 52];
    put_bytes(&mut record, 0, mgid);
    put_bytes(&mut record, 16, &gid(port.config().guid));
    put_bytes(&mut record, 40, &[0xff, 0xff]);
    record[48] = state;
    record
}

const JOIN: [u32; 4] = [0, 1, 7, 16];
/// The components that create a group.
const CREATE: [u32; 8] = [0, 1, 2, 6, 7, 12, 13, 16];

#[test]
fn the_broadcast_group_exists_without_members() {
    let (_fabric, a, _b) = fabric();
    let requested = request(2, 0x38, &JOIN, &member(&BROADCAST, &a, 1));
    let (status, record) = single_response(&a, &requested);
    assert_eq!(status, 0);
    assert_eq!(get_array(&record, 0), BROADCAST);
    assert_eq!(get_array(&record, 16), gid(a.config().guid));
    assert_eq!(record[32..36], [0, 0, 0x0b, 0x1b]);
    // The LID; exactly 2048 bytes; the partition; exactly 10 Gb/s.
    assert_eq!(record[36..39], [0xc0, 0, 2 << 6 | 4]);
    assert_eq!(record[40..43], [0xff, 0xff, 2 << 6 | 3]);
    // Link-local scope, full member.
    assert_eq!(record[48], 0x21);
    // The group persists after the last member left.
    let requested = request(0x15, 0x38, &JOIN, &member(&BROADCAST, &a, 1));
    let (status, record) = single_response(&a, &requested);
    assert_eq!((status, record[48]), (0, 0x20));
    assert_eq!(single_response(&a, &requested).0, 0x0200);
    let requested = request(1, 0x38, &[0], &member(&BROADCAST, &a, 0));
    assert_eq!(single_response(&a, &requested).0, 0);
}

#[test]
fn a_group_is_created_joined_and_left() {
    let (_fabric, a, b) = fabric();
    let mut mgid = BROADCAST;
    mgid[15] = 5;
    let join = |port: &Port, components: &[u32], state, key: u8| {
        let mut record = member(&mgid, port, state);
        record[35] = key;
        single_response(port, &request(2, 0x38, components, &record))
    };
    // A join without a description does not create a group; nor does a non-member
    // join.
    assert_eq!(join(&a, &JOIN, 1, 7).0, 0x0600);
    assert_eq!(join(&a, &CREATE, 2, 7).0, 0x0200);
    for missing in [2, 6, 7, 12, 13] {
        let incomplete: Vec<u32> = CREATE.into_iter().filter(|c| *c != missing).collect();
        assert_eq!(join(&a, &incomplete, 1, 7).0, 0x0600, "{missing}");
    }
    let (status, group) = join(&a, &CREATE, 1, 7);
    assert_eq!((status, group[35]), (0, 7));
    let mlid = u16::from_be_bytes(get_array(&group, 36));
    assert!((0xc001..0xffff).contains(&mlid));
    // Another port must match the parameters of the group.
    assert_eq!(join(&b, &CREATE, 1, 8).0, 0x0200);
    assert_eq!(join(&b, &JOIN, 8, 0).1[36..38], group[36..38]);
    let find = || single_response(&b, &request(1, 0x38, &[0], &member(&mgid, &b, 0))).0;
    let leave = |port: &Port, state| {
        let record = member(&mgid, port, state);
        single_response(port, &request(0x15, 0x38, &JOIN, &record)).0
    };
    // A path leads to the group.
    let requested = request(1, 0x35, &[2, 3], &path(&mgid, &gid(a.config().guid)));
    let (status, record) = single_response(&a, &requested);
    assert_eq!((status, &record[40..42]), (0, &group[36..38]));
    assert_eq!(leave(&a, 1), 0);
    assert_eq!(find(), 0);
    // Leaving with a join state that the port does not have fails.
    assert_eq!(leave(&b, 1), 0x0200);
    assert_eq!(leave(&b, 8), 0);
    assert_eq!(find(), 0x0300);
}

#[test]
fn a_gid_is_generated_for_a_group_without_one() {
    let (_fabric, a, b) = fabric();
    let mut seen = Vec::new();
    for port in [&a, &a, &b] {
        let requested = request(2, 0x38, &CREATE[1..], &member(&[0; 16], port, 1));
        let (status, record) = single_response(port, &requested);
        assert_eq!((status, record[0]), (0, 0xff));
        let mgid: Gid = get_array(&record, 0);
        assert!(!seen.contains(&mgid));
        seen.push(mgid);
    }
}

#[test]
fn a_port_joins_only_for_itself_and_leaves_when_removed() {
    let (fabric, a, b) = fabric();
    let mut mgid = BROADCAST;
    mgid[15] = 6;
    let for_other_port = request(2, 0x38, &CREATE, &member(&mgid, &b, 1));
    assert_eq!(single_response(&a, &for_other_port).0, 0x0700);
    assert_eq!(single_response(&b, &for_other_port).0, 0);
    let find = request(1, 0x38, &[0], &member(&mgid, &b, 0));
    assert_eq!(single_response(&a, &find).0, 0);
    drop(b);
    assert_eq!(single_response(&a, &find).0, 0x0300);
    // The path disappears too, until another port has the LID.
    let requested = request(1, 0x35, &[2], &path(&gid(guid(2)), &[0; 16]));
    assert_eq!(single_response(&a, &requested).0, 0x0500);
    let _again = fabric.port(PortConfig::ib(2));
    assert_eq!(single_response(&a, &requested).0, 0);
}

#[test]
fn groups_are_bounded() {
    let (_fabric, a, _b) = fabric();
    let statuses: Vec<u16> = (0..1100_u16)
        .map(|number| {
            let mut mgid = BROADCAST;
            mgid[12..14].copy_from_slice(&number.to_be_bytes());
            single_response(&a, &request(2, 0x38, &CREATE, &member(&mgid, &a, 1))).0
        })
        .collect();
    assert_eq!(statuses.iter().filter(|s| **s == 0).count(), 1023);
    assert_eq!(statuses.last(), Some(&0x0100));
}

#[test]
fn unsupported_requests_have_an_error_status() {
    let (_fabric, a, _b) = fabric();
    for (method, attribute, status) in [
        (1, 0x0001, 0),      // class port info
        (1, 0x0031, 0x0300), // a service
        (2, 0x0031, 0x000c),
        (1, 0x0011, 0x000c), // a node
        (0x12, 0x0011, 0x000c),
        (2, 0x0003, 0x000c), // event subscription
        (0x13, 0x0035, 0x0008),
        (0x14, 0x003a, 0x0008),
    ] {
        let (actual, _) = single_response(&a, &request(method, attribute, &[], &[]));
        assert_eq!(actual, status, "{method:#x} {attribute:#x}");
    }
    let mut old = request(1, 0x35, &[], &[]);
    old[2] = 1;
    a.send(0, datagram(1, false, &old));
    let packet = a.recv(0).unwrap();
    let view = View::read(LinkKind::Ib, packet.frame()).unwrap();
    assert_eq!(view.payload.bytes()[4..6], [0, 4]);
    // Responses, reports and requests of other classes are not answered.
    for (class, method) in [(3, 0x81), (3, 0x92), (3, 6), (3, 3), (4, 1), (7, 3)] {
        let mut mad = request(method, 0x35, &[], &[]);
        mad[1] = class;
        assert!(send_request(&a, &mad).is_empty(), "{class} {method:#x}");
    }
}

#[test]
fn send_only_full_members_are_supported() {
    let (_fabric, a, _b) = fabric();
    let (status, info) = single_response(&a, &request(1, 1, &[], &[]));
    assert_eq!((status, &info[..2]), (0, &[1, 2][..]));
    const CAPABILITIES_2: Field = field(4, 31, 5);
    assert_eq!(CAPABILITIES_2.get(&info) >> 12, 1);
}

#[test]
fn a_request_with_a_grh_has_a_response_with_a_grh() {
    let (_fabric, a, _b) = fabric();
    let requested = request(1, 1, &[], &[]);
    a.send(0, datagram(1, true, &requested));
    let packet = a.recv(0).unwrap();
    let view = View::read(LinkKind::Ib, packet.frame()).unwrap();
    assert_eq!(view.network.dgid(view.frame), Some(gid(guid(1))));
    assert_eq!(view.network.sgid(view.frame), Some(gid(guid(LID))));
}

#[test]
fn only_datagrams_of_the_partition_with_the_queue_key_are_accepted() {
    let (_fabric, a, _b) = fabric();
    let pool = Pool::new();
    let requested = request(1, 1, &[], &[]);
    for (opcode, pkey, qpn, qkey, accepted) in [
        (0x64, 0xffff, 1, 0x8001_0000, true),
        (0x64, 0x7fff, 1, 0x8001_0000, true),
        (0x64, 0x8001, 1, 0x8001_0000, false),
        (0x64, 0xffff, 0, 0x8001_0000, false),
        (0x64, 0xffff, 1, 0x8001_0001, false),
        (0x24, 0xffff, 1, 0x8001_0000, false),
    ] {
        let template = Template::new(&Path::ib(1, LID));
        let bth = Bth {
            opcode,
            pkey,
            dest_qpn: qpn,
            ..Bth::default()
        };
        let deth = Deth {
            qkey,
            source_qpn: 1,
        };
        let mut builder = PacketBuilder::new(&pool, &template, bth, 256);
        builder.put(&deth.bytes());
        builder.put(&requested);
        a.send(0, builder.finish());
        assert_eq!(a.recv(0).is_some(), accepted, "{opcode:#x} {pkey:#x} {qpn}");
    }
    for length in [0, 255, 257] {
        a.send(0, datagram(1, false, &vec![1; length]));
        assert!(a.recv(0).is_none());
    }
}

#[test]
fn faults_apply_to_management_datagrams() {
    let (_fabric, a, _b) = fabric();
    let requested = request(1, 1, &[], &[]);
    a.set_faults(Faults {
        delay: 500,
        ..Faults::default()
    });
    a.send(0, datagram(1, false, &requested));
    assert!(a.recv(999).is_none());
    assert!(a.recv(1000).is_some());
    for faults in [
        Faults {
            loss: 1.0,
            ..Faults::default()
        },
        Faults {
            corrupt: 1.0,
            ..Faults::default()
        },
    ] {
        a.set_faults(faults);
        a.send(0, datagram(1, false, &requested));
        assert!(a.recv(u64::MAX).is_none());
    }
    a.set_faults(Faults::default());
    a.set_link(false);
    a.send(0, datagram(1, false, &requested));
    a.set_link(true);
    assert!(a.recv(0).is_none());
}

#[test]
fn fabrics_of_two_processes_have_equal_responses() {
    let fabrics = [Fabric::new(1), Fabric::new(2)];
    let ports: Vec<Port> = fabrics
        .iter()
        .zip([7, 9])
        .map(|(fabric, lid)| fabric.port(PortConfig::ib(lid)))
        .collect();
    // Without an uplink, unknown ports do not exist; with one, their LIDs follow
    // from the GUIDs.
    let requested = request(1, 0x35, &[2], &path(&gid(guid(9)), &[0; 16]));
    assert_eq!(single_response(&ports[0], &requested).0, 0x0500);
    let uplinks = fabrics.each_ref().map(Fabric::uplink);
    let (status, record) = single_response(&ports[0], &requested);
    assert_eq!((status, &record[40..44]), (0, &[0, 9, 0, 7][..]));
    let mut mgid = BROADCAST;
    mgid[15] = 5;
    assert_eq!(mlid(&ports[0], &mgid), mlid(&ports[1], &mgid));
    // No request crossed to the other fabric, and requests from there are not
    // answered.
    assert!(uplinks[0].recv(0).is_none());
    for source in [7, 9] {
        uplinks[0].send(0, datagram(source, false, &requested));
        assert!(ports[0].recv(0).is_none() && uplinks[0].recv(0).is_none());
    }
}

/// The LID that a new group gets.
fn mlid(port: &Port, mgid: &Gid) -> [u8; 2] {
    let requested = request(2, 0x38, &CREATE, &member(mgid, port, 1));
    let (status, record) = single_response(port, &requested);
    assert_eq!(status, 0);
    get_array(&record, 36)
}
