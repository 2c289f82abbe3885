//! The bytes of each command, as far as this crate determines them.

use uverbs::{AsyncEventType, Errno, QpAttrMask, QpState, QpType};
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::abi::cmd;

const EINVAL: Errno = Errno::new(libc::EINVAL);

#[test]
fn create_id_has_port_space_and_type() {
    let (fake, channel) = channel();
    for (space, ps, qp_type) in [
        (PortSpace::TCP, 0x106, 2),
        (PortSpace::UDP, 0x111, 4),
        (PortSpace::IPOIB, 2, 4),
        (PortSpace::IB, 0x13f, 2),
    ] {
        let id = channel.create_id(space).unwrap();
        // Follows the destruction of the previous id.
        let asked = fake.take_commands().pop().unwrap();
        let body: abi::CreateId = asked.body();
        assert_eq!(
            (asked.fd, asked.command, body.ps, body.qp_type),
            (fd(&channel), cmd::CMD_CREATE_ID, ps, qp_type)
        );
        assert_eq!(body.uid, id.key().0);
        assert_ne!(body.uid, 0);
        assert_eq!(id.is_datagram(), qp_type == 4);
    }
    let id = channel.create_id_of(PortSpace::IB, QpType::UC).unwrap();
    let body: abi::CreateId = fake.take_commands().pop().unwrap().body();
    assert_eq!((body.qp_type, id.is_datagram()), (3, false));
    let error = channel
        .create_id_of(PortSpace::IB, QpType(256))
        .unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
}

#[test]
fn addresses_are_socket_addresses() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    id.bind(v4()).unwrap();
    let body: abi::Bind = fake.take_commands()[0].body();
    assert_eq!(
        (body.id, body.addr_size, body.reserved),
        (id.number(), 16, 0)
    );
    assert_eq!(body.addr[..8], [2, 0, 0x12, 0xb7, 192, 0, 2, 7]);
    assert!(body.addr[8..].iter().all(|byte| *byte == 0));

    let (fake, _channel, id) = with_id(PortSpace::TCP);
    id.resolve_address(Some(v4().into()), v6(), Duration::from_micros(1500))
        .unwrap();
    let body: abi::ResolveAddr = fake.take_commands()[0].body();
    assert_eq!((body.src_size, body.dst_size, body.timeout_ms), (16, 28, 2));
    assert_eq!(body.src_addr[..8], [2, 0, 0x12, 0xb7, 192, 0, 2, 7]);
    assert_eq!(body.dst_addr[..8], [10, 0, 1, 2, 0, 0, 0, 0]);
    assert_eq!(body.dst_addr[8..12], [0x20, 0x01, 0x0d, 0xb8]);
    assert_eq!(body.dst_addr[23..28], [0x17, 3, 0, 0, 0]);

    let ib = IbAddress {
        pkey: 0xffff,
        flow_info: 1,
        gid: [9; 16],
        service_id: 0x0106_1234,
        service_mask: u64::MAX,
        scope_id: 5,
    };
    let bytes = address::Sockaddr::from(&ib.into());
    assert_eq!(bytes.len, 48);
    assert_eq!(bytes.bytes[..8], [27, 0, 0xff, 0xff, 0, 0, 0, 1]);
    assert_eq!(bytes.bytes[24..32], [0, 0, 0, 0, 1, 6, 0x12, 0x34]);
    for address in [v4().into(), v6().into(), Address::Ib(ib)] {
        let bytes = address::Sockaddr::from(&address);
        assert_eq!(address::parse(&bytes.bytes), Ok(Some(address)));
    }
    assert_eq!(address::parse(&[]), Ok(None));
    assert_eq!(address::parse(&[9, 0]), Err(address::UnknownFamily(9)));
    // Truncated input reads as zeros and does not panic.
    assert!(address::parse(&bytes.bytes[..11]).unwrap().is_some());
}

#[test]
fn long_timeouts_are_clamped() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    id.resolve_route(Duration::MAX).unwrap();
    let body: abi::ResolveRoute = fake.take_commands()[0].body();
    assert_eq!((body.id, body.timeout_ms), (id.number(), u32::MAX));
}

#[test]
fn connection_parameters() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    let param = ConnParam {
        qp_num: 0x123456,
        qkey: 7,
        private_data: b"abc",
        responder_resources: 1,
        initiator_depth: 2,
        flow_control: true,
        retry_count: 3,
        rnr_retry_count: 4,
        srq: true,
    };
    id.connect(&param).unwrap();
    let body: abi::Connect = fake.take_commands()[0].body();
    let sent = body.conn_param;
    assert_eq!(
        (body.id, sent.valid, sent.qp_num, sent.qkey),
        (id.number(), 1, 0x123456, 7)
    );
    assert_eq!(
        (sent.private_data_len, &sent.private_data[..4]),
        (3, &b"abc\0"[..])
    );
    assert_eq!((sent.responder_resources, sent.initiator_depth), (1, 2));
    assert_eq!((sent.flow_control, sent.retry_count), (1, 3));
    assert_eq!((sent.rnr_retry_count, sent.srq), (4, 1));

    id.accept(&param).unwrap();
    let body: abi::Accept = fake.take_commands()[0].body();
    assert_eq!(
        (body.uid, body.conn_param, body.id),
        (id.key().0, sent, id.number())
    );
    id.establish().unwrap();
    let asked = &fake.take_commands()[0];
    let body: abi::Accept = asked.body();
    assert_eq!(
        (asked.command, body.conn_param.valid, body.uid),
        (cmd::CMD_ACCEPT, 0, 0)
    );

    id.reject(b"xy").unwrap();
    let body: abi::Reject = fake.take_commands()[0].body();
    assert_eq!(
        (body.reason, body.private_data_len, body.private_data[1]),
        (28, 2, b'y')
    );
}

#[test]
fn parameters_that_would_be_truncated_are_rejected() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    let long = [1; 256];
    let wrong = [
        ConnParam {
            qp_num: 1 << 24,
            ..ConnParam::default()
        },
        ConnParam {
            retry_count: 8,
            ..ConnParam::default()
        },
        ConnParam {
            rnr_retry_count: 8,
            ..ConnParam::default()
        },
        ConnParam {
            private_data: &long,
            ..ConnParam::default()
        },
    ];
    for param in &wrong {
        assert_eq!(id.connect(param).unwrap_err().errno(), EINVAL);
        assert_eq!(id.accept(param).unwrap_err().errno(), EINVAL);
    }
    assert_eq!(
        id.reject(&long),
        Err(Error::PrivateDataTooLong {
            command: Command::Reject,
            len: 256,
            max: 255
        })
    );
    let error = id.reject_for(RejectReason(256), b"").unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
    assert!(matches!(id.set_ack_timeout(32), Err(Error::Invalid { .. })));
    assert_eq!(numbers(&fake), [], "the kernel was not asked");
    assert_eq!(id.state(), State::Idle);
}

#[test]
fn kernel_errors_are_explained() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    let long = [1; 57];
    let param = ConnParam {
        private_data: &long,
        ..ConnParam::default()
    };
    // First in a wrong state.
    fake.reply(cmd::CMD_CONNECT, Err(EINVAL));
    let error = id.connect(&param).unwrap_err();
    let wrong_state = Error::WrongState {
        command: Command::Connect,
        id: id.number(),
        state: State::Idle,
    };
    assert_eq!((error, id.state()), (wrong_state, State::Idle));
    assert_eq!(
        error.to_string(),
        format!(
            "CONNECT on id {}: its state is Idle; connecting comes after ROUTE_RESOLVED",
            id.number()
        )
    );
    // In the right state the length is the reason.
    happen(&fake, &id, EventKind::ROUTE_RESOLVED, 0, &[]);
    id.channel().try_event().unwrap().unwrap();
    fake.reply(cmd::CMD_CONNECT, Err(EINVAL));
    let error = id.connect(&param).unwrap_err();
    let too_long = Error::PrivateDataTooLong {
        command: Command::Connect,
        len: 57,
        max: 56,
    };
    assert_eq!((error, id.state()), (too_long, State::RouteResolved));
    // Other errors are passed on.
    fake.reply(cmd::CMD_CONNECT, Err(Errno::new(libc::ENOMEM)));
    let error = id.connect(&param).unwrap_err();
    assert!(matches!(
        error,
        Error::Refused {
            command: Command::Connect,
            ..
        }
    ));
    assert_eq!(error.errno().raw(), libc::ENOMEM);
}

#[test]
fn options_have_the_required_lengths() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    id.set_type_of_service(9).unwrap();
    id.set_reuse_address(true).unwrap();
    id.set_ipv6_only(false).unwrap();
    id.set_ack_timeout(31).unwrap();
    id.set_ib_path(&[abi::PathRecData::new_zeroed(); 2])
        .unwrap();
    let asked: Vec<_> = fake
        .take_commands()
        .iter()
        .map(|asked| asked.body::<abi::SetOption>())
        .map(|body| (body.level, body.optname, body.optlen, body.optval != 0))
        .collect();
    assert_eq!(
        asked,
        [
            (0, 0, 1, true),
            (0, 1, 4, true),
            (0, 2, 4, true),
            (0, 3, 1, true),
            (1, 1, 144, true)
        ]
    );
    fake.reply(cmd::CMD_SET_OPTION, Err(EINVAL));
    let before = id.state();
    assert!(id.set_ib_path(&[]).is_err());
    assert_eq!(id.state(), before);
}

#[test]
fn queue_pair_attributes() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    let mut answer = abi::QpAttr {
        // With internal bits of the kernel.
        qp_attr_mask: 1 | 1 << 20 | 0b1111 << 21,
        qp_state: 2,
        path_mtu: 5,
        dest_qp_num: 0xff00_0011,
        qp_access_flags: 7,
        port_num: 1,
        timeout: 14,
        ..abi::QpAttr::default()
    };
    answer.ah_attr.grh.dgid = [8; 16];
    answer.ah_attr.is_global = 1;
    fake.reply(cmd::CMD_INIT_QP_ATTR, Ok(answer.as_bytes().to_vec()));
    let (attr, mask) = id.qp_attr(QpState::RTR).unwrap();
    assert_eq!(mask, QpAttrMask::STATE | QpAttrMask::DEST_QPN);
    assert_eq!(
        (attr.qp_state, attr.path_mtu, attr.dest_qp_num),
        (QpState::RTR, 5, 0x11)
    );
    assert_eq!(
        (attr.ah_attr.grh.dgid, attr.ah_attr.is_global),
        ([8; 16], true)
    );
    assert_eq!((attr.port_num, attr.timeout), (1, 14));
    let body: abi::InitQpAttr = fake.take_commands()[0].body();
    assert_eq!((body.id, body.qp_state), (id.number(), 2));

    for field in 0..4 {
        let mut wrong = answer;
        match field {
            0 => wrong.qp_state = 256,
            1 => wrong.cur_qp_state = 256,
            2 => wrong.path_mtu = 256,
            _ => wrong.path_mig_state = u32::MAX,
        }
        fake.reply(cmd::CMD_INIT_QP_ATTR, Ok(wrong.as_bytes().to_vec()));
        let error = id.qp_attr(QpState::RTR).unwrap_err();
        assert!(matches!(error, Error::BadAnswer { .. }));
    }
}

#[test]
fn addresses_and_routes() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    let local = address::Sockaddr::from(&v4().into());
    let peer = address::Sockaddr::from(&v6().into());
    let answer = abi::QueryAddrResp {
        node_guid: 0x1122_u64.to_be(),
        port_num: 1,
        pkey: 0xffff,
        src_size: 16,
        dst_size: 28,
        src_addr: local.bytes,
        dst_addr: peer.bytes,
        ibdev_index: 4,
        ..abi::QueryAddrResp::default()
    };
    fake.reply(cmd::CMD_QUERY, Ok(answer.as_bytes().to_vec()));
    let addresses = id.addresses().unwrap();
    assert_eq!(addresses.local, Some(v4().into()));
    assert_eq!(addresses.peer, Some(v6().into()));
    let device = addresses.device.unwrap();
    assert_eq!(
        (device.index, device.node_guid, device.port),
        (4, 0x1122, 1)
    );
    fake.reply(cmd::CMD_QUERY, Ok(answer.as_bytes().to_vec()));
    assert_eq!(id.peer_addr().unwrap(), Some(v6()));

    // Without a device, and without addresses.
    assert_eq!(
        id.addresses().unwrap(),
        Addresses {
            local: None,
            peer: None,
            device: None
        }
    );
    let mut odd = answer;
    odd.src_addr[0] = 77;
    fake.reply(cmd::CMD_QUERY, Ok(odd.as_bytes().to_vec()));
    assert!(matches!(id.addresses(), Err(Error::BadAnswer { .. })));

    let mut route = abi::QueryRouteResp {
        num_paths: 1,
        port_num: 2,
        ..abi::QueryRouteResp::default()
    };
    route.src_addr.copy_from_slice(&peer.bytes[..28]);
    fake.reply(cmd::CMD_QUERY_ROUTE, Ok(route.as_bytes().to_vec()));
    let known = id.route().unwrap();
    assert_eq!(
        (known.paths().len(), known.addresses.local),
        (1, Some(v6().into()))
    );
    route.num_paths = 3;
    fake.reply(cmd::CMD_QUERY_ROUTE, Ok(route.as_bytes().to_vec()));
    assert!(matches!(id.route(), Err(Error::BadAnswer { .. })));
}

#[test]
fn paths_are_bounded() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    let answer = |count: u32| {
        let mut bytes = count.to_ne_bytes().to_vec();
        bytes.resize(8, 0);
        bytes.resize(8 + 72 * 6, 0x5a);
        bytes
    };
    fake.reply(cmd::CMD_QUERY, Ok(answer(6)));
    let paths = id.ib_paths().unwrap();
    assert_eq!((paths.len(), paths[5].path_rec[15]), (6, 0x5a5a_5a5a));
    for count in [7, u32::MAX] {
        fake.reply(cmd::CMD_QUERY, Ok(answer(count)));
        assert!(matches!(id.ib_paths(), Err(Error::BadAnswer { .. })));
    }
}

#[test]
fn older_forms_of_the_commands() {
    let (fake, channel, id) = with_id(PortSpace::UDP);
    let ucm = channel.inner.ucm();
    let address = [3; 28];
    ucm.bind_ip(id.number(), address).unwrap();
    ucm.resolve_ip(id.number(), [0; 28], address, 5).unwrap();
    let number = ucm.join_ip_mcast(id.number(), 1 << 40, address).unwrap();
    ucm.leave_mcast(number).unwrap();
    let asked = fake.take_commands();
    let bind: abi::BindIp = asked[0].body();
    assert_eq!((bind.id, bind.addr), (id.number(), address));
    let resolve: abi::ResolveIp = asked[1].body();
    assert_eq!((resolve.dst_addr, resolve.timeout_ms), (address, 5));
    let join: abi::JoinIpMcast = asked[2].body();
    assert_eq!((join.uid, join.addr), (1 << 40, address));
    let leave: abi::DestroyId = asked[3].body();
    assert_eq!((asked[3].command, leave.id), (cmd::CMD_LEAVE_MCAST, number));
}

#[test]
fn small_commands() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    id.listen(3).unwrap();
    id.disconnect().unwrap();
    id.notify(AsyncEventType::COMM_EST).unwrap();
    id.write_event(0x1234).unwrap();
    let asked = fake.take_commands();
    let listen: abi::Listen = asked[0].body();
    assert_eq!((listen.id, listen.backlog), (id.number(), 3));
    let disconnect: abi::Disconnect = asked[1].body();
    assert_eq!(disconnect.id, id.number());
    let notify: abi::Notify = asked[2].body();
    assert_eq!(notify.event, 4);
    assert_eq!(asked[3].command, 24);
    assert_eq!(
        asked[3].body[8..24],
        [18, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 0, 0]
    );
}
