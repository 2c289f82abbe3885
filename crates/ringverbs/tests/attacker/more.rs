//! Steps about memory that is shared, pooled or mapped on demand, dynamic connections,
//! multicast groups, and faults of the device.

use ringverbs::dynamic::DcAddress;
use ringverbs::{
    AccessFlags, BufferPool, Gid, Inline, Operation, PoolBuffer, PostError, Region, RemoteRegion,
    SharedBuffer, Source, Transport, WorkRequest,
};
use testing::pattern;

use crate::steps::{
    Kind, Numbers, a_domain, activate, asks, drop_pair, lane, messenger, new_pair, new_srq, post,
    receive_shared, receiver, sender, shorten, somewhere,
};
use crate::world::{
    Back, Body, Done, Flight, Initiator, Lane, Pooled, Shadowed, Target, World, pick,
};

pub const STEPS: &[Kind] = &[
    ("allocate a region on demand", 1, on_demand_region),
    ("allocate a remote region on demand", 1, on_demand_remote),
    ("freeze a buffer", 3, freeze),
    ("take a part of a frozen buffer", 2, part),
    ("drop a frozen buffer", 1, drop_frozen),
    ("thaw a frozen buffer", 2, thaw),
    ("send a frozen buffer", 4, send_frozen),
    ("write a frozen buffer", 4, write_frozen),
    ("make a pool", 1, new_pool),
    ("drop a pool", 1, drop_pool),
    ("take a buffer of a pool", 4, take_pooled),
    ("give a buffer back to its pool", 2, give_back),
    ("freeze a buffer of a pool", 1, freeze_pooled),
    ("send a buffer of a pool", 4, send_pooled),
    ("write a buffer of a pool", 2, write_pooled),
    ("receive into a buffer of a pool", 5, receive_pooled),
    (
        "receive into a shared queue's buffer of a pool",
        2,
        receive_shared_pooled,
    ),
    ("read into a buffer of a pool", 3, read_pooled),
    ("make a DC target of a shared queue", 2, new_target),
    ("drop a DC target of a shared queue", 1, drop_target),
    ("make a DC initiator", 2, new_initiator),
    ("drop a DC initiator", 1, drop_initiator),
    ("send by a DC initiator to a shared queue", 4, dc_send),
    ("write by a DC initiator", 3, dc_write),
    ("read by a DC initiator", 3, dc_read),
    ("make and activate a datagram queue pair", 1, new_datagram),
    ("join a group of datagrams", 1, join),
    ("leave a group of datagrams", 1, leave),
    ("send a datagram to a group", 2, send_to_group),
    ("a queue pair fails in the device", 1, fails),
    ("the device holds receives", 1, holds),
    ("the cable of a queue pair's device", 1, cable),
];

/// Depths and sizes of pools.
const CLASSES: &[(usize, usize)] = &[(64, 2), (512, 3), (4096, 2)];
const KEY: u64 = 0x77;
const QKEY: u32 = crate::steps::QKEY;
const ALL: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Of which nothing is checked but that it does not change.
impl Back for SharedBuffer {
    fn back(self) -> Vec<ringverbs::Buffer> {
        Vec::new()
    }
}

impl Back for Vec<SharedBuffer> {
    fn back(self) -> Vec<ringverbs::Buffer> {
        Vec::new()
    }
}

impl Back for PoolBuffer {
    fn back(self) -> Vec<ringverbs::Buffer> {
        Vec::new()
    }
}

// Memory.

fn on_demand_region(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    let domain = world.domains[at].id;
    if world.pieces.len() > 24 {
        return Ok(false);
    }
    let Ok(region) = Region::alloc_on_demand(&world.domains[at].domain, 1) else {
        return Ok(false);
    };
    for buffer in region.into_buffers(2048) {
        world.own(buffer, domain);
    }
    Ok(true)
}

fn on_demand_remote(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.remotes.len() >= 3 {
        return Ok(false);
    }
    let access = match b % 4 {
        0 => ALL,
        1 => AccessFlags::MW_BIND,
        2 => ALL | AccessFlags::MW_BIND,
        _ => AccessFlags::REMOTE_READ,
    };
    let domain = &world.domains[at];
    let access = access | AccessFlags::ON_DEMAND;
    let Ok(region) = RemoteRegion::alloc(&domain.domain, 1, access) else {
        return Ok(false);
    };
    let id = domain.id;
    world.own_remote(region, id, access);
    Ok(true)
}

fn freeze(world: &mut World, [a, b, ..]: Numbers) -> Done {
    if world.frozen.len() > 8 {
        return Ok(false);
    }
    let Some(at) = pick(a, world.pieces.len()) else {
        return Ok(false);
    };
    let mut piece = world.pieces.swap_remove(at);
    shorten(&mut piece.buffer, b);
    let memory = piece.buffer.freeze();
    world.frozen.push(Shadowed {
        shadow: memory.to_vec(),
        domain: piece.domain,
        memory,
    });
    Ok(true)
}

fn part(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    if world.frozen.len() > 12 {
        return Ok(false);
    }
    let Some(at) = pick(a, world.frozen.len()) else {
        return Ok(false);
    };
    let whole = &world.frozen[at];
    let len = whole.shadow.len();
    let begin = b as usize % (len + 1);
    let end = begin + c as usize % (len - begin + 1);
    let memory = whole.memory.slice(begin..end);
    let memory = memory.map_err(|error| error.to_string())?;
    let (shadow, domain) = (whole.shadow[begin..end].to_vec(), whole.domain);
    world.frozen.push(Shadowed {
        memory,
        shadow,
        domain,
    });
    Ok(true)
}

fn drop_frozen(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.frozen.len()) else {
        return Ok(false);
    };
    world.frozen.swap_remove(at);
    Ok(true)
}

/// Converts a shared buffer back to an exclusive one, unless others still refer to it.
fn thaw(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.frozen.len()) else {
        return Ok(false);
    };
    let Shadowed {
        memory,
        shadow,
        domain,
    } = world.frozen.swap_remove(at);
    let memory = match memory.try_into_buffer() {
        Ok(buffer) => {
            world.own(buffer, domain);
            return Ok(true);
        }
        Err(memory) => memory,
    };
    match memory.try_into_pool_buffer() {
        Ok(buffer) => {
            hold(world, buffer, domain);
            Ok(true)
        }
        Err(memory) => {
            world.frozen.push(Shadowed {
                memory,
                shadow,
                domain,
            });
            Ok(false)
        }
    }
}

/// One of a domain, or now and then of another.
fn some_frozen(world: &World, number: u32, domain: u64) -> Option<SharedBuffer> {
    let of: Vec<_> = (world.frozen.iter())
        .filter(|frozen| frozen.domain == domain || number % 61 == 0)
        .collect();
    Some(of[pick(number / 64, of.len())?].memory.clone())
}

fn send_frozen(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some(first) = some_frozen(world, b, domain) else {
        return Ok(false);
    };
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, Vec::new());
    match some_frozen(world, c, domain) {
        Some(second) if c % 2 == 0 => {
            let request = WorkRequest::send(vec![first, second]);
            post(world, at, d, token, request, flight)
        }
        _ => post(world, at, d, token, WorkRequest::send(first), flight),
    }
}

fn write_frozen(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some(memory) = some_frozen(world, b, domain) else {
        return Ok(false);
    };
    let Some((to, room)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let len = memory.len().min(room as usize);
    let memory = memory.slice(..len).map_err(|error| error.to_string())?;
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, Vec::new());
    flight.asked = asks(world, at, to, len, AccessFlags::REMOTE_WRITE);
    post(world, at, d, token, WorkRequest::write(memory, to), flight)
}

// Pools.

fn new_pool(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.pools.len() >= 2 {
        return Ok(false);
    }
    let Ok(pool) = BufferPool::new(&world.domains[at].domain, CLASSES) else {
        return Ok(false);
    };
    let domain = world.domains[at].id;
    world.pools.push((pool, domain));
    Ok(true)
}

fn drop_pool(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pools.len()) else {
        return Ok(false);
    };
    world.pools.swap_remove(at);
    Ok(true)
}

/// Keeps a buffer, with bytes of its own.
fn hold(world: &mut World, mut memory: PoolBuffer, domain: u64) {
    memory.fill_up();
    let stamp = world.fresh();
    pattern(stamp, &mut memory);
    world.pooled.push(Pooled {
        shadow: memory.to_vec(),
        memory,
        domain,
    });
}

/// Takes a buffer, of a new pool if there is none.
fn take_pooled(world: &mut World, [a, b, ..]: Numbers) -> Done {
    if world.pools.is_empty() {
        new_pool(world, [a, 0, 0, 0])?;
    }
    let Some(at) = pick(a, world.pools.len()) else {
        return Ok(false);
    };
    let (pool, domain) = &world.pools[at];
    let (taken, domain) = (pool.get(b as usize % 5000), *domain);
    let Some(memory) = taken else {
        return Ok(false);
    };
    hold(world, memory, domain);
    Ok(true)
}

fn give_back(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pooled.len()) else {
        return Ok(false);
    };
    world.pooled.swap_remove(at);
    Ok(true)
}

fn freeze_pooled(world: &mut World, [a, ..]: Numbers) -> Done {
    if world.pooled.is_empty() {
        take_pooled(world, [a; 4])?;
    }
    let Some(at) = pick(a, world.pooled.len()) else {
        return Ok(false);
    };
    let Pooled {
        memory,
        shadow,
        domain,
    } = world.pooled.swap_remove(at);
    let memory = memory.freeze();
    world.frozen.push(Shadowed {
        memory,
        shadow,
        domain,
    });
    Ok(true)
}

/// Takes one of a domain, or now and then of another.
fn some_pooled(world: &mut World, number: u32, domain: u64) -> Option<PoolBuffer> {
    if world.pooled.is_empty() {
        take_pooled(world, [0, number, 0, 0]).ok()?;
    }
    let of: Vec<_> = (0..world.pooled.len())
        .filter(|at| world.pooled[*at].domain == domain || number % 61 == 0)
        .collect();
    let at = of[pick(number / 64, of.len())?];
    Some(world.pooled.swap_remove(at).memory)
}

fn send_pooled(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some(mut memory) = some_pooled(world, b, domain) else {
        return Ok(false);
    };
    let _ = memory.set_len(c as usize % (memory.capacity() + 1));
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, Vec::new());
    post(world, at, d, token, WorkRequest::send(memory), flight)
}

fn write_pooled(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((to, room)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let Some(mut memory) = some_pooled(world, b, domain) else {
        return Ok(false);
    };
    let len = memory.capacity().min(room as usize);
    let _ = memory.set_len(len);
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, Vec::new());
    flight.asked = asks(world, at, to, len, AccessFlags::REMOTE_WRITE);
    post(world, at, d, token, WorkRequest::write(memory, to), flight)
}

fn read_pooled(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((from, room)) = somewhere(world, c, AccessFlags::REMOTE_READ) else {
        return Ok(false);
    };
    let Some(mut memory) = some_pooled(world, b, domain) else {
        return Ok(false);
    };
    let len = memory.capacity().min(room as usize);
    let _ = memory.set_len(len);
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Read, Vec::new());
    flight.asked = asks(world, at, from, len, AccessFlags::REMOTE_READ);
    post(world, at, d, token, WorkRequest::read(memory, from), flight)
}

fn receive_pooled(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = receiver(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some(memory) = some_pooled(world, b, domain) else {
        return Ok(false);
    };
    let (lane, token) = (Lane::Receive(world.pairs[at].receive), world.fresh());
    let flight = world.flight(lane, Operation::Receive, Vec::new());
    let result = match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.receive(memory, token),
        Body::Halves(_, Some(half)) => half.receive(memory, token),
        Body::Halves(_, None) => return Ok(false),
    };
    world.posted(token, result, flight)
}

fn receive_shared_pooled(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.shared.len()) else {
        return Ok(false);
    };
    let domain = world.shared[at].domain;
    let Some(memory) = some_pooled(world, b, domain) else {
        return Ok(false);
    };
    let (lane, token) = (Lane::Shared(world.shared[at].id), world.fresh());
    let flight = world.flight(lane, Operation::Receive, Vec::new());
    let result = world.shared[at].queue.receive(memory, token);
    world.posted(token, result, flight)
}

// Dynamic connections.

fn new_target(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    if world.shared.is_empty() {
        new_srq(world, [a, 0, 0, 0])?;
    }
    let (Some(at), Some(of), Some(cq)) = (
        a_domain(world, a),
        pick(b, world.shared.len()),
        pick(c, world.cqs.len()),
    ) else {
        return Ok(false);
    };
    if world.targets.len() >= 2 {
        return Ok(false);
    }
    let context = world.domains[at].context;
    let local = world.contexts[context].1;
    let handle = world.cqs[cq].poller.queue().handle();
    let queue = &world.shared[of].queue;
    let builder = world.domains[at].domain.dc_target(handle, queue, KEY);
    let Ok(target) = builder.access(ALL).build(&local) else {
        return Ok(false);
    };
    world.targets.push(Target { target, local });
    Ok(true)
}

fn drop_target(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.targets.len()) else {
        return Ok(false);
    };
    let target = world.targets.swap_remove(at).target;
    match b % 2 {
        0 => drop(target),
        _ => target.close().map_err(|refused| refused.to_string())?,
    }
    Ok(true)
}

fn new_initiator(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let (Some(at), Some(cq)) = (a_domain(world, a), pick(b, world.cqs.len())) else {
        return Ok(false);
    };
    if world.initiators.len() >= 2 {
        return Ok(false);
    }
    let context = world.domains[at].context;
    let local = world.contexts[context].1;
    let handle = world.cqs[cq].poller.queue().handle();
    let builder = world.domains[at].domain.dc_initiator(handle);
    let Ok(initiator) = builder.send_depth(8).inline(64).build(&local) else {
        return Ok(false);
    };
    let id = world.made();
    let domain = world.domains[at].id;
    world.initiators.push(Initiator {
        initiator,
        id,
        domain,
        local,
    });
    Ok(true)
}

fn drop_initiator(world: &mut World, [a, b, ..]: Numbers) -> Done {
    world.read_failures()?;
    let Some(at) = pick(a, world.initiators.len()) else {
        return Ok(false);
    };
    let Initiator { initiator, id, .. } = world.initiators.swap_remove(at);
    match b % 2 {
        0 => drop(initiator),
        _ => initiator.close().map_err(|refused| refused.to_string())?,
    }
    world.half_gone(id);
    world.half_gone(id);
    Ok(true)
}

/// The initiator and the address that numbers choose; they are made if there are none.
fn dc_path(world: &mut World, a: u32) -> Option<(usize, DcAddress)> {
    if world.initiators.is_empty() {
        new_initiator(world, [a, a / 8, 0, 0]).ok()?;
    }
    if world.targets.is_empty() {
        new_target(world, [a, 0, a / 8, 0]).ok()?;
    }
    let at = pick(a, world.initiators.len())?;
    let target = &world.targets[pick(a / 16, world.targets.len())?];
    let initiator = &world.initiators[at];
    let of = (world.domains.iter()).find(|domain| domain.id == initiator.domain)?;
    let path = (of.domain)
        .address_handle_to(&initiator.local, &target.local)
        .ok()?;
    let address = match a / 256 % 32 {
        0 => DcAddress::new(path, target.target.number(), KEY + 1),
        1 => DcAddress::new(path, a & 0xff, KEY),
        _ => target.target.address(path),
    };
    Some((at, address.ok()?))
}

fn dc_post<D: Source<Returned: Back>>(
    world: &mut World,
    (at, address): (usize, DcAddress),
    (token, request): (u64, WorkRequest<D>),
    flight: Flight,
    alone: bool,
) -> Done {
    let initiator = &mut world.initiators[at].initiator;
    let request = request.token(token);
    let result = match alone {
        true => initiator.post(request, &address),
        false => {
            let mut refused = Ok(());
            let batch = initiator.batch(|batch| {
                refused = batch.post(request, &address);
                Ok::<_, ()>(())
            });
            batch.map_err(|_| "a DC batch was not posted".to_owned())?;
            refused
        }
    };
    drop(address);
    world.posted(token, result, flight)
}

fn dc_send(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(path) = dc_path(world, a) else {
        return Ok(false);
    };
    let (domain, id) = {
        let initiator = &world.initiators[path.0];
        (initiator.domain, initiator.id)
    };
    let waits = |flight: &Flight| matches!(flight.lane, Lane::Shared(_));
    if !world.flights.values().any(waits) && !receive_shared(world, [0, a, b, 0])? {
        return Ok(false);
    }
    let token = world.fresh();
    if b % 3 == 0 {
        let flight = world.flight(Lane::Send(id), Operation::Send, Vec::new());
        let bytes = [c as u8; 64];
        let request = WorkRequest::send(Inline(&bytes[..c as usize % 65]));
        return dc_post(world, path, (token, request), flight, d % 2 == 0);
    }
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    shorten(&mut buffer, c);
    away.set_len(buffer.len());
    let flight = world.flight(Lane::Send(id), Operation::Send, vec![away]);
    let request = WorkRequest::send(buffer);
    dc_post(world, path, (token, request), flight, d % 2 == 0)
}

fn dc_write(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(path) = dc_path(world, a) else {
        return Ok(false);
    };
    let Some((to, room)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let (domain, id) = {
        let initiator = &world.initiators[path.0];
        (initiator.domain, initiator.id)
    };
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    let len = buffer.len().min(room as usize);
    let _ = buffer.set_len(len);
    away.set_len(len);
    let token = world.fresh();
    let flight = world.flight(Lane::Send(id), Operation::Write, vec![away]);
    let request = WorkRequest::write(buffer, to);
    dc_post(world, path, (token, request), flight, d % 2 == 0)
}

fn dc_read(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some((at, address)) = dc_path(world, a) else {
        return Ok(false);
    };
    let Some((from, room)) = somewhere(world, c, AccessFlags::REMOTE_READ) else {
        return Ok(false);
    };
    let (domain, id) = {
        let initiator = &world.initiators[at];
        (initiator.domain, initiator.id)
    };
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    let len = buffer.len().min(room as usize);
    let _ = buffer.set_len(len);
    away.set_len(len);
    let token = world.fresh();
    let flight = world.flight(Lane::Send(id), Operation::Read, vec![away]);
    let request = WorkRequest::read(buffer, from).token(token);
    let result: Result<(), PostError<_>> = world.initiators[at].initiator.post(request, &address);
    world.posted(token, result, flight)
}

// Groups.

fn group() -> Gid {
    "ff0e::7"
        .parse()
        .unwrap_or_else(|_| unreachable!("it is an address"))
}

/// One that works, in the place of another if there are many.
fn new_datagram(world: &mut World, [a, _, c, d]: Numbers) -> Done {
    if world.pairs.len() >= 5 {
        drop_pair(world, [a, 0, 0, 0])?;
    }
    Ok(new_pair(world, [a, 7, c, d | 1])? && activate(world, [a, 0, 0, 0])?)
}

fn join(world: &mut World, [a, ..]: Numbers) -> Done {
    let of: Vec<_> = (0..world.pairs.len())
        .filter(|at| world.pairs[*at].transport == Transport::Datagram)
        .collect();
    let Some(at) = pick(a, of.len()).map(|at| of[at]) else {
        return Ok(false);
    };
    let id = world.pairs[at].send;
    let Body::Whole(pair) = &mut world.pairs[at].body else {
        return Ok(false);
    };
    let Ok(membership) = pair.join(group(), 0) else {
        return Ok(false);
    };
    world.joined(id);
    world.memberships.push((membership, id));
    Ok(true)
}

fn leave(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.memberships.len()) else {
        return Ok(false);
    };
    let (membership, id) = world.memberships.swap_remove(at);
    match b % 2 {
        0 => drop(membership),
        // Of a group that was joined twice, it is left once.
        _ => drop(membership.leave()),
    }
    world.half_gone(id);
    Ok(true)
}

fn send_to_group(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let of: Vec<_> = (0..world.pairs.len())
        .filter(|at| world.pairs[*at].transport == Transport::Datagram)
        .collect();
    let Some(at) = pick(a, of.len()).map(|at| of[at]) else {
        return Ok(false);
    };
    let (domain, context) = (world.pairs[at].domain, world.pairs[at].context);
    let local = world.contexts[context].1;
    let Some(dom) = world.domains.iter().find(|dom| dom.id == domain) else {
        return Ok(false);
    };
    let Ok(path) = dom.domain.address_handle_to(&local, group()) else {
        return Ok(false);
    };
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    shorten(&mut buffer, c);
    away.set_len(buffer.len());
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, vec![away]);
    let request = WorkRequest::send(buffer).to(&path, 0xff_ffff, QKEY);
    drop(path);
    post(world, at, d, token, request, flight)
}

// The device.

fn fails(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pairs.len()) else {
        return Ok(false);
    };
    if b % 4 != 0 {
        return Ok(false);
    }
    let number = world.pairs[at].number;
    let failed = world.devices.iter().any(|it| it.fail_queue_pair(number));
    Ok(failed)
}

fn holds(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.devices.len()) else {
        return Ok(false);
    };
    world.devices[at].hold_receives(b % 3);
    Ok(true)
}

fn cable(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.devices.len()) else {
        return Ok(false);
    };
    world.devices[at].set_cable(false);
    world.drive(1 << (b % 5));
    world.devices[at].set_cable(true);
    Ok(true)
}
