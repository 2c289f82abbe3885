//! Uses the kernel's connection manager in every way over an RDMA device, and
//! says what it saw. Ends with status 1 at the first surprise.
//!
//! ```text
//! cm-smoke self ADDRESS                 both sides in this process
//! cm-smoke connect ADDRESS PORT         to a C peer such as ucmatose -C 0
//! cm-smoke listen PORT                  for a C peer
//! cm-smoke connect-ud ADDRESS PORT      to udaddy -C 0
//! cm-smoke listen-ud PORT
//! ```
//!
//! Queue pairs are real ones, taken through their states; no data is sent.
#![allow(missing_docs, reason = "a program")]

use std::error::Error as StdError;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ringverbs_rdmacm::{
    Address, Command, ConnParam, Error, Event, EventChannel, EventKind, Id, JoinFlags, PortSpace,
    Reason, RejectReason, SidrStatus, State, param,
};
use uverbs::kernel::RealKernel;
use uverbs::{
    AsyncEventType, Context, Cq, CqInit, Pd, Qp, QpAttr, QpAttrMask, QpCap, QpInit, QpState,
    QpType, Udata, discovery,
};

type Result<T> = std::result::Result<T, Box<dyn StdError>>;

const TIMEOUT: Duration = Duration::from_secs(10);
const RESOLVE: Duration = Duration::from_secs(2);

const EINVAL: i32 = 22;
const EADDRINUSE: i32 = 98;
const EADDRNOTAVAIL: i32 = 99;
const EISCONN: i32 = 106;

fn check(what: &str, holds: bool) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(format!("not so: {what}").into())
    }
}

/// A channel, and events that came while another one was waited for.
struct Events {
    channel: EventChannel,
    waiting: Vec<Event>,
}

impl Events {
    fn open() -> Result<Self> {
        let channel = EventChannel::open()?;
        let waiting = Vec::new();
        Ok(Self { channel, waiting })
    }

    /// The next event of an id, which must be of that kind.
    fn next(&mut self, id: &Id, kind: EventKind) -> Result<Event> {
        let event = match self.waiting.iter().position(|event| event.is_of(id)) {
            Some(index) => self.waiting.remove(index),
            None => loop {
                let event = self.channel.wait(Some(TIMEOUT))?;
                let event = event.ok_or_else(|| format!("no {kind:?} within {TIMEOUT:?}"))?;
                if event.is_of(id) {
                    break event;
                }
                self.waiting.push(event);
            },
        };
        if event.kind() == kind {
            return Ok(event);
        }
        let outcome = event.message().result();
        Err(format!("{kind:?} awaited, {:?} came: {outcome:?}", event.kind()).into())
    }
}

type Handle = Arc<Context>;

/// A queue pair of its own context on the device that an id is bound to.
struct Endpoint {
    qp: Qp<Handle>,
    // Destroyed after the queue pair, in this order.
    _cq: Cq<Handle>,
    _pd: Pd<Handle>,
}

impl Endpoint {
    fn new(id: &Id, qp_type: QpType) -> Result<Self> {
        let bound = id.addresses()?.device.ok_or("the id has no device")?;
        let devices = discovery::devices(&RealKernel)?;
        let device = devices
            .iter()
            .find(|device| device.index == Some(bound.index))
            .ok_or("the id's device is not among the devices")?;
        check(
            "its GUID is the id's",
            device.node_guid == Some(bound.node_guid),
        )?;
        let context = Arc::new(Context::open(Box::new(RealKernel), device)?);
        context.get_context(Udata::none())?;
        let pd = Pd::alloc(&context, Udata::none())?;
        // rxe says where its queues can be mapped; they are not used here.
        let mut mapping = [0; 32];
        let init = CqInit {
            cqe: 4,
            ..CqInit::default()
        };
        let cq = Cq::create(&context, &init, Udata::output(&mut mapping[..16]))?;
        let init = QpInit {
            qp_type,
            pd: Some(pd.handle()),
            send_cq: Some(cq.handle()),
            recv_cq: Some(cq.handle()),
            cap: QpCap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            ..QpInit::default()
        };
        let qp = Qp::create(&context, &init, Udata::output(&mut mapping))?;
        let endpoint = Self {
            qp,
            _cq: cq,
            _pd: pd,
        };
        endpoint.to(id, QpState::INIT)?;
        if qp_type == QpType::UD {
            for (state, mask) in [
                (QpState::RTR, QpAttrMask::STATE),
                (QpState::RTS, QpAttrMask::STATE | QpAttrMask::SQ_PSN),
            ] {
                let attr = QpAttr {
                    qp_state: state,
                    ..QpAttr::default()
                };
                endpoint.qp.modify(&attr, mask, Udata::none())?;
            }
        }
        Ok(endpoint)
    }

    /// Goes to a state as the id says.
    fn to(&self, id: &Id, state: QpState) -> Result<()> {
        let (attr, mask) = id.qp_attr(state)?;
        self.qp.modify(&attr, mask, Udata::none())?;
        Ok(())
    }

    fn ready(&self, id: &Id) -> Result<()> {
        self.to(id, QpState::RTR)?;
        self.to(id, QpState::RTS)
    }

    fn is_ready_for(&self, peer: u32) -> Result<()> {
        let mask = QpAttrMask::STATE | QpAttrMask::DEST_QPN | QpAttrMask::AV;
        let (attr, _) = self.qp.query(mask)?;
        check("the queue pair can send", attr.qp_state == QpState::RTS)?;
        check("its peer is the other one", attr.dest_qp_num == peer)
    }

    fn param<'a>(&self, private_data: &'a [u8]) -> ConnParam<'a> {
        ConnParam {
            qp_num: self.qp.qp_num(),
            private_data,
            ..ConnParam::default()
        }
    }
}

/// An id that listens on a port that the kernel chose.
fn listener(events: &Events, space: PortSpace, ip: IpAddr) -> Result<(Id, SocketAddr)> {
    let id = events.channel.create_id(space)?;
    id.bind((ip, 0))?;
    id.listen(4)?;
    let bound = id.local_addr()?.ok_or("the listener has no address")?;
    check(
        "the kernel chose a port",
        bound.port() != 0 && bound.ip() == ip,
    )?;
    Ok((id, bound))
}

/// An id with a route to a peer.
fn resolved(events: &mut Events, space: PortSpace, peer: SocketAddr) -> Result<Id> {
    let id = events.channel.create_id(space)?;
    id.resolve_address(None, peer, RESOLVE)?;
    events.next(&id, EventKind::ADDR_RESOLVED)?;
    id.resolve_route(RESOLVE)?;
    events.next(&id, EventKind::ROUTE_RESOLVED)?;
    check("it can connect", id.state() == State::RouteResolved)?;
    check("its peer is the one", id.peer_addr()? == Some(peer))?;
    Ok(id)
}

fn request(events: &mut Events, listener: &Id) -> Result<(Event, Id)> {
    let mut event = events.next(listener, EventKind::CONNECT_REQUEST)?;
    let id = event.take_request().ok_or("a request without an id")?;
    check("once", event.take_request().is_none())?;
    Ok((event, id))
}

/// Private data comes with zeros behind it.
fn begins_with(data: &[u8], wanted: &[u8]) -> bool {
    data.strip_prefix(wanted)
        .is_some_and(|rest| rest.iter().all(|byte| *byte == 0))
}

fn connection(events: &mut Events, ip: IpAddr) -> Result<()> {
    let (listening, address) = listener(events, PortSpace::TCP, ip)?;
    let active = resolved(events, PortSpace::TCP, address)?;
    let route = active.route()?;
    println!(
        "route: {:?}, {} path(s)",
        route.addresses,
        route.paths().len()
    );
    check("it has a path", route.paths().len() == 1)?;
    check(
        "query and route agree",
        route.addresses.local == active.addresses()?.local,
    )?;
    let gids = active.gids()?;
    println!("GIDs: {} to {}", display(gids.local), display(gids.peer));
    check(
        "paths in the other format too",
        active.ib_paths()?.len() == 1,
    )?;

    let ours = Endpoint::new(&active, QpType::RC)?;
    active.connect(&ours.param(b"what the client says"))?;
    let (event, passive) = request(events, &listening)?;
    let asked = event.message().connection().ok_or("no parameters")?;
    println!("request: {asked:?}");
    check(
        "the client's bytes",
        begins_with(asked.private_data, b"what the client says"),
    )?;
    check(
        "there is room for no more",
        asked.private_data.len() == param::MAX_CONNECT_DATA,
    )?;
    check("its queue pair", asked.qp_num == ours.qp.qp_num())?;
    check("a request", passive.state() == State::Requested)?;
    check(
        "on the same device",
        passive.addresses()?.device == active.addresses()?.device,
    )?;
    drop(event);

    let theirs = Endpoint::new(&passive, QpType::RC)?;
    theirs.ready(&passive)?;
    passive.accept(&theirs.param(b"what the server says"))?;
    let event = events.next(&active, EventKind::CONNECT_RESPONSE)?;
    let answer = event.message().connection().ok_or("no parameters")?;
    check(
        "the server's bytes",
        begins_with(answer.private_data, b"what the server says"),
    )?;
    check("its queue pair", answer.qp_num == theirs.qp.qp_num())?;
    drop(event);
    ours.ready(&active)?;
    active.establish()?;
    events.next(&passive, EventKind::ESTABLISHED)?;
    ours.is_ready_for(theirs.qp.qp_num())?;
    theirs.is_ready_for(ours.qp.qp_num())?;
    match active.notify(AsyncEventType::COMM_EST) {
        Err(error) if error.errno().raw() == EISCONN => {}
        other => return Err(format!("notifying of what is known: {other:?}").into()),
    }
    println!("established: {} and {}", active.number(), passive.number());

    active.disconnect()?;
    events.next(&passive, EventKind::DISCONNECTED)?;
    passive.disconnect()?;
    events.next(&active, EventKind::DISCONNECTED)?;
    check("it is over", active.state() == State::Disconnected)?;
    let events = active.destroy().map_err(|(_, error)| error)?;
    check(
        "four events were read of the client",
        events.events_reported() == 4,
    )?;
    check(
        "and dropped",
        events.wait(Some(TIMEOUT)) && events.unacknowledged() == 0,
    )?;
    let events = listening.destroy().map_err(|(_, error)| error)?;
    check("one of the listener", events.events_reported() == 1)
}

fn display(address: Option<Address>) -> String {
    address.map_or_else(|| "none".to_owned(), |address| address.to_string())
}

fn rejections(events: &mut Events, ip: IpAddr) -> Result<()> {
    let (listening, address) = listener(events, PortSpace::TCP, ip)?;
    for answered in [true, false] {
        let active = resolved(events, PortSpace::TCP, address)?;
        let ours = Endpoint::new(&active, QpType::RC)?;
        active.connect(&ours.param(b""))?;
        let (_, passive) = request(events, &listening)?;
        if answered {
            passive.reject(b"not today")?;
        }
        drop(passive);
        let event = events.next(&active, EventKind::REJECTED)?;
        let reason = event.message().result();
        println!("rejected: {reason:?}");
        let consumer = Reason::Rejected(RejectReason::CONSUMER_DEFINED);
        check("by the program", reason == Err(consumer))?;
        let said: &[u8] = if answered { b"not today" } else { b"" };
        check(
            "its bytes",
            begins_with(event.message().private_data(), said),
        )?;
    }
    drop(listening);

    let active = resolved(events, PortSpace::TCP, address)?;
    let ours = Endpoint::new(&active, QpType::RC)?;
    active.connect(&ours.param(b""))?;
    let event = events.next(&active, EventKind::REJECTED)?;
    let nobody = Reason::Rejected(RejectReason::INVALID_SERVICE_ID);
    println!("nobody there: {:?}", event.message().result());
    check("nobody listens", event.message().result() == Err(nobody))
}

fn datagrams(events: &mut Events, ip: IpAddr) -> Result<()> {
    let (listening, address) = listener(events, PortSpace::UDP, ip)?;
    for accepted in [true, false] {
        let active = resolved(events, PortSpace::UDP, address)?;
        let ours = Endpoint::new(&active, QpType::UD)?;
        active.connect(&ours.param(b"who are you"))?;
        let (event, passive) = request(events, &listening)?;
        let asked = event.message().private_data();
        check("the client's bytes", begins_with(asked, b"who are you"))?;
        let theirs = Endpoint::new(&passive, QpType::UD)?;
        if accepted {
            passive.accept(&theirs.param(b"me"))?;
            let event = events.next(&active, EventKind::ESTABLISHED)?;
            let service = event.message().datagram().ok_or("no parameters")?;
            println!(
                "service: queue pair {}, {:?}",
                service.qp_num, service.ah_attr
            );
            check("its queue pair", service.qp_num == theirs.qp.qp_num())?;
            check("its bytes", begins_with(service.private_data, b"me"))?;
            check(
                "a route",
                service.ah_attr.is_global && service.ah_attr.port_num == 1,
            )?;
        } else {
            passive.reject(b"no")?;
            let event = events.next(&active, EventKind::UNREACHABLE)?;
            let reason = event.message().result();
            println!("no service: {reason:?}");
            check("rejected", reason == Err(Reason::Sidr(SidrStatus::REJECT)))?;
        }
    }
    Ok(())
}

fn multicast(events: &mut Events, ip: IpAddr) -> Result<()> {
    let id = events.channel.create_id(PortSpace::UDP)?;
    id.bind((ip, 0))?;
    let member = Endpoint::new(&id, QpType::UD)?;
    let group = SocketAddr::from((Ipv4Addr::new(239, 1, 2, 3), 0));
    let membership = id.join_multicast(group, JoinFlags::FULL_MEMBER)?;
    let event = events.next(&id, EventKind::MULTICAST_JOIN)?;
    check(
        "of this group",
        event.membership() == Some(membership.key()),
    )?;
    event
        .message()
        .result()
        .map_err(|reason| reason.to_string())?;
    let to = event.message().datagram().ok_or("no parameters")?;
    println!("group: {:?}", to.ah_attr);
    let (gid, lid) = (to.ah_attr.grh.dgid, to.ah_attr.dlid);
    member.qp.attach_multicast(&gid, lid)?;
    member.qp.detach_multicast(&gid, lid)?;
    drop(event);
    let events = membership.leave().map_err(|(_, error)| error)?;
    check(
        "one event was read",
        events.events_reported() == 1 && events.unacknowledged() == 0,
    )?;
    // Gone with its id.
    let second = id.join_multicast(group, JoinFlags::FULL_MEMBER)?;
    drop(id);
    let events = second.leave().map_err(|(_, error)| error)?;
    check("nothing to leave", events.events_reported() == 0)
}

fn refusals(events: &mut Events, ip: IpAddr) -> Result<()> {
    let expect =
        |what: &str, result: std::result::Result<(), Error>, wanted: fn(&Error) -> bool| {
            match result {
                Err(error) if wanted(&error) => {
                    println!("{what}: refused, as it should be: {error}");
                    Ok(())
                }
                other => Err(format!("{what}: {other:?}")),
            }
        };
    let wrong_state: fn(&Error) -> bool = |error| matches!(error, Error::WrongState { .. });
    let id = events.channel.create_id(PortSpace::TCP)?;
    expect(
        "connecting a new id",
        id.connect(&ConnParam::default()),
        wrong_state,
    )?;
    expect(
        "accepting a new id",
        id.accept(&ConnParam::default()),
        wrong_state,
    )?;
    expect("disconnecting a new id", id.disconnect(), wrong_state)?;
    expect(
        "a route of a new id",
        id.resolve_route(RESOLVE),
        wrong_state,
    )?;
    expect(
        "attributes of a new id",
        id.qp_attr(QpState::INIT).map(drop),
        wrong_state,
    )?;
    check("it is new", id.state() == State::Idle)?;
    check(
        "it has no address",
        id.local_addr()?.is_none() && id.peer_addr()?.is_none(),
    )?;
    let elsewhere = SocketAddr::from((Ipv4Addr::new(203, 0, 113, 1), 1));
    expect("a foreign address", id.bind(elsewhere), |error| {
        error.command() == Command::Bind && !matches!(error, Error::WrongState { .. })
    })?;
    id.set_type_of_service(32)?;
    id.set_reuse_address(true)?;
    id.set_ipv6_only(true)?;
    id.set_ack_timeout(14)?;
    id.bind((ip, 0))?;
    expect("binding twice", id.bind((ip, 0)), wrong_state)?;
    id.listen(0)?;
    expect("listening twice", id.listen(0), wrong_state)?;
    let bound = id.local_addr()?.ok_or("no address")?;
    let other = events.channel.create_id(PortSpace::TCP)?;
    let in_use: fn(&Error) -> bool = |error| error.errno().raw() == EADDRINUSE;
    let not_available: fn(&Error) -> bool = |error| error.errno().raw() == EADDRNOTAVAIL;
    let of_one = match ip.is_loopback() || ip.is_unspecified() {
        true => not_available,
        false => in_use,
    };
    expect("a port that is taken", other.bind(bound), of_one)?;
    let all = SocketAddr::from((Ipv4Addr::UNSPECIFIED, bound.port()));
    expect("the port of all addresses", other.bind(all), not_available)?;
    let family = events.channel.create_id(PortSpace::TCP)?;
    family.set_ipv6_only(true)?;
    family.bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, bound.port())))?;
    drop(family);

    let active = resolved(events, PortSpace::TCP, bound)?;
    let ours = Endpoint::new(&active, QpType::RC)?;
    let long = [7; 256];
    for len in [57, 255, 256] {
        expect(
            "long private data",
            active.connect(&ours.param(&long[..len])),
            |error| matches!(error, Error::PrivateDataTooLong { .. }),
        )?;
        check(
            "nothing has happened",
            active.state() == State::RouteResolved,
        )?;
    }
    match active.write_event(0xfeed) {
        Ok(()) => {
            let event = events.next(&active, EventKind::USER)?;
            check(
                "our number",
                event.message().user_argument() == Some(0xfeed),
            )
        }
        Err(error) => {
            println!("{error}");
            check("not of this kernel", error.errno().raw() == EINVAL)
        }
    }
}

fn migration(events: &mut Events, ip: IpAddr) -> Result<()> {
    let (mut listening, address) = listener(events, PortSpace::TCP, ip)?;
    let mut others = Events::open()?;
    let active = resolved(events, PortSpace::TCP, address)?;
    let ours = Endpoint::new(&active, QpType::RC)?;
    check(
        "no event was read",
        listening.migrate(&others.channel)? == 0,
    )?;
    active.connect(&ours.param(b""))?;
    let (event, passive) = request(&mut others, &listening)?;
    check("on the other channel", event.is_of(&listening))?;
    drop(passive);
    events.next(&active, EventKind::REJECTED)?;
    let key = listening.key();
    drop((event, listening));
    // The channel closes, and nobody minds that others name it.
    drop(others);
    println!("migrated: {key:?}");
    Ok(())
}

fn unreachable(events: &mut Events) -> Result<()> {
    let id = events.channel.create_id(PortSpace::TCP)?;
    let nowhere = SocketAddr::from((Ipv4Addr::new(203, 0, 113, 1), 1));
    match id.resolve_address(None, nowhere, Duration::from_millis(200)) {
        Err(error) => println!("no way: {error}"),
        Ok(()) => {
            let event = events.next(&id, EventKind::ADDR_ERROR)?;
            println!("no way: {:?}", event.message().result());
            check(
                "a reason",
                matches!(event.message().result(), Err(Reason::Errno(_))),
            )?;
        }
    }
    check("no event is left", events.channel.try_event()?.is_none())
}

fn both_sides(ip: IpAddr) -> Result<()> {
    let mut events = Events::open()?;
    connection(&mut events, ip)?;
    rejections(&mut events, ip)?;
    datagrams(&mut events, ip)?;
    if ip.is_ipv4() {
        multicast(&mut events, ip)?;
    }
    refusals(&mut events, ip)?;
    migration(&mut events, ip)?;
    unreachable(&mut events)
}

/// Connects to a C peer, and disconnects when that does.
fn connect(space: PortSpace, peer: SocketAddr) -> Result<()> {
    let mut events = Events::open()?;
    let active = resolved(&mut events, space, peer)?;
    if active.is_datagram() {
        let ours = Endpoint::new(&active, QpType::UD)?;
        active.connect(&ours.param(b""))?;
        let event = events.next(&active, EventKind::ESTABLISHED)?;
        let service = event.message().datagram().ok_or("no parameters")?;
        println!(
            "service: queue pair {}, {:?}",
            service.qp_num, service.ah_attr
        );
        return Ok(());
    }
    let ours = Endpoint::new(&active, QpType::RC)?;
    active.connect(&ours.param(b""))?;
    let event = events.next(&active, EventKind::CONNECT_RESPONSE)?;
    let peer = event.message().connection().ok_or("no parameters")?;
    println!("response of queue pair {}", peer.qp_num);
    ours.ready(&active)?;
    active.establish()?;
    active.disconnect()?;
    events.next(&active, EventKind::DISCONNECTED)?;
    Ok(())
}

/// Accepts one C peer, and goes when that does.
fn listen(space: PortSpace, port: u16) -> Result<()> {
    let mut events = Events::open()?;
    let listening = events.channel.create_id(space)?;
    listening.bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), port))?;
    listening.listen(1)?;
    let (event, passive) = request(&mut events, &listening)?;
    if passive.is_datagram() {
        let theirs = Endpoint::new(&passive, QpType::UD)?;
        passive.accept(&theirs.param(b""))?;
        return Ok(());
    }
    let theirs = Endpoint::new(&passive, QpType::RC)?;
    theirs.ready(&passive)?;
    let asked = event.message().connection().ok_or("no parameters")?;
    passive.accept(&ConnParam {
        responder_resources: asked.responder_resources,
        initiator_depth: asked.initiator_depth,
        ..theirs.param(b"")
    })?;
    events.next(&passive, EventKind::ESTABLISHED)?;
    // ucmatose's client waits for its server to disconnect.
    passive.disconnect()?;
    events.next(&passive, EventKind::DISCONNECTED)?;
    Ok(())
}

fn run(arguments: &[&str]) -> Result<()> {
    match *arguments {
        ["self", ip] => both_sides(ip.parse()?),
        ["connect", ip, port] => connect(
            PortSpace::TCP,
            (ip.parse::<IpAddr>()?, port.parse()?).into(),
        ),
        ["connect-ud", ip, port] => connect(
            PortSpace::UDP,
            (ip.parse::<IpAddr>()?, port.parse()?).into(),
        ),
        ["listen", port] => listen(PortSpace::TCP, port.parse()?),
        ["listen-ud", port] => listen(PortSpace::UDP, port.parse()?),
        _ => Err("cm-smoke self ADDRESS | connect[-ud] ADDRESS PORT | listen[-ud] PORT".into()),
    }
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => {
            println!("cm-smoke: ok");
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            println!("cm-smoke: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
