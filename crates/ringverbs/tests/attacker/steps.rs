//! The steps: each makes some calls, by numbers that choose of what is there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ringverbs::completion::{CompletionLevel, DataFormat, ReadError, WaitObject};
use ringverbs::qp::{Init, QpAttr, QpAttrMask, ReadyToReceive, ReadyToSend, State, Transition};
use ringverbs::raw::{Flags, SendQueue, SendRequest, WindowBind};
use ringverbs::{
    AccessFlags, Buffer, Completion, ConnectOptions, Context, Inline, MemorySlice, Operation,
    PostError, ProtectionDomain, QueuePair, RemoteAddr, RemoteRegion, Source, Transport,
    WindowType, WorkRequest,
};

use crate::world::{
    Back, Body, Cq, Dom, Done, Ended, Flight, Granted, Lane, Pair, Poller, RecordedCommand, Right,
    Shared, Window, World, pick,
};

pub type Numbers = [u32; 4];
type Run = fn(&mut World, Numbers) -> Done;

/// A kind of step: its name, how often it comes, what it does.
pub type Kind = (&'static str, u32, Run);

pub const STEPS: &[Kind] = &[
    ("open a context", 1, open),
    ("close a context", 1, close_context),
    ("swap two contexts", 1, swap_contexts),
    ("allocate a domain", 1, new_domain),
    ("close a domain", 1, close_domain),
    ("allocate a region", 6, new_region),
    ("split a buffer", 4, split),
    ("join two buffers", 3, unsplit),
    ("close a region", 2, close_region),
    ("drop a buffer", 2, drop_buffer),
    ("forget a buffer", 1, forget_buffer),
    ("allocate a remote region", 4, new_remote),
    ("close a remote region", 5, close_remote),
    ("change a region's access", 1, set_access),
    ("write to a region", 2, store),
    ("take a slice", 2, slice),
    ("drop a slice", 2, drop_slice),
    ("allocate a window", 3, new_window),
    ("close a window", 2, close_window),
    ("drop a window", 1, drop_window),
    ("make a completion queue", 2, new_cq),
    ("make a reader", 3, new_reader),
    ("resize a completion queue", 1, resize_cq),
    ("swap two completion queues", 1, swap_cqs),
    ("drop a completion queue", 1, drop_cq),
    ("close a completion queue", 1, close_cq),
    ("make a shared receive queue", 1, new_srq),
    ("resize a shared receive queue", 1, resize_srq),
    ("swap two shared receive queues", 2, swap_srqs),
    ("close a shared receive queue", 1, close_srq),
    ("drop a shared receive queue", 1, drop_srq),
    ("make a queue pair", 4, new_pair),
    ("connect two queue pairs", 6, connect),
    ("connect a queue pair to itself", 1, connect_itself),
    ("activate a datagram queue pair", 1, activate),
    ("reset a queue pair", 2, reset),
    ("connect two queue pairs anew", 4, reconnect),
    ("set a queue pair to error", 2, set_error),
    ("modify a queue pair", 1, modify),
    ("bring a queue pair to a state", 1, transition),
    ("split a queue pair", 1, split_pair),
    ("reunite halves", 2, reunite),
    ("reunite others' halves", 1, reunite_others),
    ("swap two queue pairs", 1, swap_pairs),
    ("close a queue pair", 1, close_pair),
    ("drop a queue pair", 1, drop_pair),
    ("drop a half", 1, drop_half),
    ("close and drain a queue pair", 2, close_and_drain),
    ("drain a queue pair", 1, drain),
    ("forget a queue pair", 1, forget_pair),
    ("send", 10, send),
    ("send inline", 3, send_inline),
    ("send a list", 3, send_list),
    ("send of a slice", 2, send_slice),
    ("send and invalidate", 2, send_invalidate),
    ("send a datagram", 3, send_datagram),
    ("write", 10, write),
    ("write inline", 4, write_inline),
    ("write to what has come again", 3, probe),
    ("read", 5, read),
    ("read into a slice", 2, read_slice),
    ("fetch and add", 3, fetch_add),
    ("compare and swap", 2, compare_swap),
    ("write at a level", 1, write_at_level),
    ("flush", 1, flush),
    ("write eight bytes", 1, atomic_write),
    ("receive", 14, receive),
    ("receive into a list", 3, receive_list),
    ("receive into a slice", 1, receive_slice),
    ("receive in a batch", 3, receive_batch),
    ("receive into a shared queue", 4, receive_shared),
    ("a batch of several", 3, batch),
    ("bind a window", 8, bind),
    ("unbind a window", 3, unbind),
    ("invalidate a key", 3, local_invalidate),
    ("raw sends, not published", 2, raw_sends),
    ("raw receives, not published", 2, raw_receives),
    ("a raw bind, dropped", 2, raw_bind),
    ("drive", 20, drive),
    ("poll for one", 10, poll_one),
    ("poll for all", 12, poll_all),
    ("poll for several", 4, poll_several),
    ("look by a cursor", 4, cursor),
    ("look by a cursor, forgotten", 1, cursor_forgotten),
    ("read by a reader", 10, read_entries),
    ("take completions by the raw layer", 1, poll_raw),
    ("allocate until memory comes again", 2, churn),
    ("rest", 1, rest),
];

const PAGE: usize = 4096;

fn ok<T, E>(result: Result<T, E>) -> Done {
    Ok(result.is_ok())
}

// Contexts and domains.

/// A domain, nearly always the first, so that what is made works together.
pub fn a_domain(world: &World, number: u32) -> Option<usize> {
    match number % 8 {
        7 => pick(number / 8, world.domains.len()),
        _ => pick(0, world.domains.len()),
    }
}

fn open(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(device) = pick(a, world.devices.len()) else {
        return Ok(false);
    };
    if world.contexts.len() >= 3 {
        return Ok(false);
    }
    ok(world.open(device))
}

fn close_context(world: &mut World, [a, ..]: Numbers) -> Done {
    // The indices of others stay what they are: only the last goes.
    let _ = a;
    let last = world.contexts.len();
    if last < 2 || world.domains.iter().any(|of| of.context + 1 == last) {
        return Ok(false);
    }
    let (context, local, device) = world.contexts.remove(last - 1);
    match context.close() {
        Ok(()) => Ok(true),
        Err(refused) => {
            world.contexts.push((refused.into_object(), local, device));
            Ok(false)
        }
    }
}

fn swap_contexts(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let (Some(one), Some(other)) = (pick(a, world.contexts.len()), pick(b, world.contexts.len()))
    else {
        return Ok(false);
    };
    let mut here: Context = world.contexts[one].0.clone();
    let mut there = world.contexts[other].0.clone();
    std::mem::swap(&mut here, &mut there);
    Ok(here.is_same(&world.contexts[other].0) && there.is_same(&world.contexts[one].0))
}

fn new_domain(world: &mut World, [a, ..]: Numbers) -> Done {
    if world.domains.len() >= 3 {
        return Ok(false);
    }
    let Some(context) = pick(a, world.contexts.len()) else {
        return Ok(false);
    };
    let Ok(domain) = world.contexts[context].0.alloc_pd() else {
        return Ok(false);
    };
    let id = world.fresh();
    world.domains.push(Dom {
        id,
        context,
        domain,
    });
    Ok(true)
}

fn close_domain(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.domains.len()) else {
        return Ok(false);
    };
    let Dom {
        id,
        context,
        domain,
    } = world.domains.remove(at);
    match domain.close() {
        Ok(()) => Ok(true),
        Err(refused) => {
            let domain = refused.into_object();
            world.domains.insert(
                at,
                Dom {
                    id,
                    context,
                    domain,
                },
            );
            Ok(false)
        }
    }
}

// Memory.

fn new_region(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.pieces.len() > 24 {
        return Ok(false);
    }
    let domain = world.domains[at].id;
    let Ok(region) = world.domains[at].domain.alloc(1) else {
        return Ok(false);
    };
    let size = [PAGE, 1024, 1024, 512][b as usize % 4];
    for buffer in region.into_buffers(size) {
        world.own(buffer, domain);
    }
    Ok(true)
}

fn split(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = pick(a, world.pieces.len()) else {
        return Ok(false);
    };
    if world.pieces.len() > 40 {
        return Ok(false);
    }
    let mut piece = world.pieces.swap_remove(at);
    let capacity = piece.buffer.capacity();
    let place = match b % 6 {
        0 => 0,
        1 => capacity,
        2 => capacity / 2,
        3 => 64.min(capacity),
        _ => b as usize / 6 % (capacity + 1),
    };
    let other = if c % 2 == 0 {
        piece.buffer.split_to(place)
    } else {
        piece.buffer.split_off(place)
    };
    if let Ok(too_far) = piece.buffer.set_len(capacity + 1) {
        return Err(format!("a buffer is longer than it is: {too_far:?}"));
    }
    world.own(other, piece.domain);
    world.own(piece.buffer, piece.domain);
    Ok(true)
}

fn unsplit(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pieces.len()) else {
        return Ok(false);
    };
    let mut piece = world.pieces.swap_remove(at);
    let end = piece.addr + piece.buffer.capacity() as u64;
    let fits = world.pieces.iter().position(|other| other.addr == end);
    let with = match fits {
        Some(at) if b % 8 != 0 => Some(at),
        _ => pick(b, world.pieces.len()),
    };
    let mut done = false;
    if let Some(with) = with {
        let other = world.pieces.swap_remove(with);
        match piece.buffer.unsplit(other.buffer) {
            Ok(()) if other.addr == end => done = true,
            Ok(()) => return Err("buffers were joined that are not neighbours".to_owned()),
            Err(back) => world.own(back, other.domain),
        }
    }
    world.own(piece.buffer, piece.domain);
    Ok(done)
}

fn close_region(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pieces.len()) else {
        return Ok(false);
    };
    let piece = world.pieces.swap_remove(at);
    let (addr, key) = (piece.addr, piece.buffer.raw_sge().lkey);
    match piece.buffer.try_into_region() {
        Ok(region) => match region.close() {
            Ok(()) => {
                world.gone.push((addr, key));
                Ok(true)
            }
            Err(refused) => {
                let buffer = refused.into_object().into_buffer();
                world.own(buffer, piece.domain);
                Ok(false)
            }
        },
        Err(buffer) => {
            world.own(buffer, piece.domain);
            Ok(false)
        }
    }
}

fn drop_buffer(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pieces.len()) else {
        return Ok(false);
    };
    drop(world.pieces.swap_remove(at));
    Ok(true)
}

fn forget_buffer(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pieces.len()) else {
        return Ok(false);
    };
    std::mem::forget(world.pieces.swap_remove(at).buffer);
    world.leaks = true;
    Ok(true)
}

fn new_remote(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.remotes.len() >= 3 {
        return Ok(false);
    }
    let all = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
    let access = match b % 8 {
        0..=3 => AccessFlags::MW_BIND,
        4 => AccessFlags::MW_BIND | all,
        5 => all,
        6 => AccessFlags::REMOTE_READ,
        _ => AccessFlags::empty(),
    };
    let Ok(region) = world.domains[at].domain.alloc_remote(1, access) else {
        return Ok(false);
    };
    let domain = world.domains[at].id;
    world.own_remote(region, domain, access);
    Ok(true)
}

fn close_remote(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.remotes.len()) else {
        return Ok(false);
    };
    let remote = world.remotes.remove(at);
    let id = remote.id;
    match remote.close() {
        Ok(()) => {
            world.region_closed(id);
            Ok(true)
        }
        Err(remote) => {
            world.remotes.insert(at, remote);
            Ok(false)
        }
    }
}

fn set_access(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.remotes.len()) else {
        return Ok(false);
    };
    let access = match b % 3 {
        0 => AccessFlags::empty(),
        1 => AccessFlags::MW_BIND | AccessFlags::REMOTE_READ,
        _ => AccessFlags::MW_BIND | AccessFlags::REMOTE_WRITE,
    };
    if world.remotes[at].region.set_access(access).is_err() {
        return Ok(false);
    }
    let (id, key) = (world.remotes[at].id, world.remotes[at].region.key());
    let len = world.remotes[at].region.len() as u64;
    world.region_closed(id);
    world.remotes[at].access = access;
    world.granted(Granted {
        rkey: key.rkey,
        addr: key.addr,
        len,
        access,
        region: id,
        window: None,
        bind: None,
    });
    Ok(true)
}

fn store(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = pick(a, world.remotes.len()) else {
        return Ok(false);
    };
    world.store(at, b as usize % PAGE, &c.to_ne_bytes())
}

fn slice(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = pick(a, world.remotes.len()) else {
        return Ok(false);
    };
    if world.slices.len() >= 4 {
        return Ok(false);
    }
    let remote = &world.remotes[at];
    let begin = b as usize % PAGE;
    let end = begin + c as usize % 512;
    let Ok(slice) = remote.region.slice(begin..end) else {
        return Ok(false);
    };
    world.slices.push((remote.id, remote.domain, slice));
    Ok(true)
}

fn drop_slice(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.slices.len()) else {
        return Ok(false);
    };
    world.slices.remove(at);
    Ok(true)
}

fn new_window(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.windows.len() >= 2 {
        return Ok(false);
    }
    let kind = match b % 2 {
        0 => WindowType::One,
        _ => WindowType::Two,
    };
    let Ok(window) = world.domains[at].domain.memory_window(kind) else {
        return Ok(false);
    };
    let (id, domain) = (world.fresh(), world.domains[at].id);
    world.windows.push(Window {
        id,
        domain,
        window,
        kind,
    });
    Ok(true)
}

fn close_window(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.windows.len()) else {
        return Ok(false);
    };
    let Window {
        id,
        domain,
        window,
        kind,
    } = world.windows.remove(at);
    match window.close() {
        Ok(()) => {
            world.window_closed(id);
            Ok(true)
        }
        Err(refused) => {
            let window = refused.into_object();
            world.windows.insert(
                at,
                Window {
                    id,
                    domain,
                    window,
                    kind,
                },
            );
            Ok(false)
        }
    }
}

fn drop_window(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.windows.len()) else {
        return Ok(false);
    };
    // If binds are in flight it is there for some time yet.
    drop(world.windows.remove(at));
    Ok(true)
}

/// Allocates regions and drops them until one has address and key of what is
/// gone, and keeps that.
fn churn(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    // Mostly an address that a window may still give access to, else the last one
    // freed.
    let is_left = |at: &usize| {
        let (addr, _) = world.gone[*at];
        let page = addr..addr + PAGE as u64;
        let mut left = world.rights.iter().filter(|right| right.is_left);
        left.any(|right| right.window.is_some() && page.contains(&right.addr))
    };
    let all = world.gone.len();
    let of = match b % 4 {
        0 => pick(b / 4, all),
        _ => (0..all).rfind(is_left).or(all.checked_sub(1)),
    };
    let (Some(at), Some(of)) = (a_domain(world, a), of) else {
        return Ok(false);
    };
    let (addr, key) = world.gone[of];
    let Dom { id, domain, .. } = &world.domains[at];
    let domain_id = *id;
    // As a buffer, or as a region that windows may be bound to, and peers may not
    // write to: devices tell these apart.
    if c % 2 == 0 {
        let Some(buffer) = again(domain, addr, key) else {
            return Ok(false);
        };
        world.own(buffer, domain_id);
    } else {
        let access = AccessFlags::MW_BIND;
        let alloc = || domain.alloc_remote(1, access).ok();
        let place = |region: &RemoteRegion| (region.key().addr, region.key().rkey);
        let Some(region) = until(alloc, place, (addr, key)) else {
            return Ok(false);
        };
        world.own_remote(region, domain_id, access);
    }
    world.gone.remove(of);
    Ok(true)
}

/// A buffer that has the address and the key of a region that is gone, if these
/// come again.
pub fn again(domain: &ProtectionDomain, addr: u64, key: u32) -> Option<Buffer> {
    let place = |buffer: &Buffer| (buffer.raw_sge().addr, buffer.raw_sge().lkey);
    until(
        || Some(domain.alloc(1).ok()?.into_buffer()),
        place,
        (addr, key),
    )
}

/// Allocates and drops until address and key are these.
fn until<M>(
    alloc: impl Fn() -> Option<M>,
    place: impl Fn(&M) -> (u64, u32),
    (addr, key): (u64, u32),
) -> Option<M> {
    // What is allocated first lies where the last was dropped.
    let mut fillers = Vec::new();
    let mut last = alloc()?;
    while place(&last).0 != addr {
        if fillers.len() == 32 {
            return None;
        }
        fillers.push(last);
        last = alloc()?;
    }
    // The device numbers keys in a circle, and counts regions in the last byte:
    // the length of a round says by how much that changes.
    for _ in 0..4 {
        for _ in 0..600 {
            if place(&last).1 >> 8 == key >> 8 {
                break;
            }
            drop(last);
            last = alloc()?;
        }
        let now = place(&last);
        if now == (addr, key) {
            return Some(last);
        }
        let behind = (key & 0xff).wrapping_sub(now.1 & 0xff).wrapping_sub(64) & 0xff;
        drop(last);
        let held: Vec<_> = (0..behind).filter_map(|_| alloc()).collect();
        drop(held);
        last = alloc()?;
    }
    None
}

// Completion queues.

fn new_cq(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(context) = pick(a, world.contexts.len()) else {
        return Ok(false);
    };
    if world.cqs.len() >= 4 {
        return Ok(false);
    }
    let entries = [16, 64, 128, 256][b as usize % 4].max(128);
    let builder = world.contexts[context].0.completion_queue();
    let Ok(queue) = builder.entries(entries).build() else {
        return Ok(false);
    };
    let poller = Poller::Plain(Box::new(queue));
    world.cqs.push(Cq { context, poller });
    Ok(true)
}

fn new_reader(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(context) = pick(a, world.contexts.len()) else {
        return Ok(false);
    };
    if world.cqs.len() >= 4 {
        return Ok(false);
    }
    let builder = world.contexts[context].0.completion_queue().entries(128);
    let reader = builder.reader::<DataFormat>();
    let Ok(reader) = reader.wait_object(WaitObject::None).build() else {
        return Ok(false);
    };
    let poller = Poller::Reader(Box::new(reader));
    world.cqs.push(Cq { context, poller });
    Ok(true)
}

fn resize_cq(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    let entries = [128, 256, 512, 1 << 30][b as usize % 4];
    ok(world.cqs[at].poller.queue().resize(entries))
}

fn swap_cqs(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let (Some(one), Some(other)) = (pick(a, world.cqs.len()), pick(b, world.cqs.len())) else {
        return Ok(false);
    };
    let (one, other) = (one.min(other), one.max(other));
    if one == other {
        return Ok(false);
    }
    world.read_failures()?;
    let (front, back) = world.cqs.split_at_mut(other);
    let (one, other) = (&mut front[one], &mut back[0]);
    // Also of readers, whose queue is then another's.
    std::mem::swap(one.poller.queue(), other.poller.queue());
    std::mem::swap(&mut one.context, &mut other.context);
    Ok(true)
}

fn drop_cq(world: &mut World, [a, ..]: Numbers) -> Done {
    if world.cqs.len() < 2 {
        return Ok(false);
    }
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    drop(world.cqs.remove(at));
    Ok(true)
}

fn close_cq(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    let Cq { context, poller } = world.cqs.remove(at);
    let refused = match poller {
        Poller::Plain(queue) => queue
            .close()
            .err()
            .map(|it| Poller::Plain(Box::new(it.into_object()))),
        Poller::Reader(reader) => reader
            .close()
            .err()
            .map(|it| Poller::Reader(Box::new(it.into_object()))),
    };
    match refused {
        None => Ok(true),
        Some(poller) => {
            world.cqs.insert(at, Cq { context, poller });
            Ok(false)
        }
    }
}

// Shared receive queues.

pub fn new_srq(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.shared.len() >= 2 {
        return Ok(false);
    }
    let builder = world.domains[at].domain.shared_receive_queue();
    let Ok(queue) = builder.depth(7).pieces(2).build() else {
        return Ok(false);
    };
    let (id, domain) = (world.fresh(), world.domains[at].id);
    world.shared.push(Shared { id, domain, queue });
    Ok(true)
}

fn resize_srq(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.shared.len()) else {
        return Ok(false);
    };
    let queue = &mut world.shared[at].queue;
    match b % 4 {
        0 => ok(queue.arm_limit(b / 4 % 16)),
        _ => ok(queue.resize([15, 31, 1 << 30, 7][b as usize % 4])),
    }
}

fn swap_srqs(world: &mut World, _: Numbers) -> Done {
    let [one, other] = &mut world.shared[..] else {
        return Ok(false);
    };
    std::mem::swap(&mut one.queue, &mut other.queue);
    std::mem::swap(&mut one.id, &mut other.id);
    std::mem::swap(&mut one.domain, &mut other.domain);
    Ok(true)
}

fn close_srq(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.shared.len()) else {
        return Ok(false);
    };
    let Shared { id, domain, queue } = world.shared.remove(at);
    match queue.close() {
        Ok(released) => {
            let released = released.into_iter().map(Ended::from).collect();
            world.unshared(id, released)?;
            Ok(true)
        }
        Err(refused) => {
            let queue = refused.into_object();
            world.shared.insert(at, Shared { id, domain, queue });
            Ok(false)
        }
    }
}

fn drop_srq(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.shared.len()) else {
        return Ok(false);
    };
    // Queue pairs may go on with what is there.
    drop(world.shared.remove(at));
    Ok(true)
}

// Queue pairs.

pub fn new_pair(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = a_domain(world, a) else {
        return Ok(false);
    };
    if world.pairs.len() >= 5 {
        return Ok(false);
    }
    let transport = match b % 8 {
        6 => Transport::Unreliable,
        7 => Transport::Datagram,
        _ => Transport::Reliable,
    };
    let (Some(send), Some(receive)) = (pick(c, world.cqs.len()), pick(c / 16, world.cqs.len()))
    else {
        return Ok(false);
    };
    let handles = [send, receive].map(|at| world.cqs[at].poller.queue().handle());
    let [send, receive] = handles;
    let mut builder = world.domains[at].domain.queue_pair(transport, send);
    builder = builder.recv_cq(receive).inline(64);
    builder = builder
        .send_depth(8)
        .recv_depth(8)
        .send_pieces(2)
        .recv_pieces(2);
    if transport != Transport::Datagram {
        builder = builder.memory_windows();
    }
    if d % 16 == 15 {
        builder = builder.signal_all();
    }
    let mut shared = None;
    if d % 4 == 0 {
        if let Some(at) = pick(d / 4, world.shared.len()) {
            builder = builder.srq(&world.shared[at].queue);
            shared = Some(world.shared[at].id);
        }
    }
    let Ok(pair) = builder.build() else {
        return Ok(false);
    };
    let id = world.made();
    world.pairs.push(Pair {
        number: pair.qp_num(),
        body: Body::Whole(pair),
        send: id,
        receive: id,
        domain: world.domains[at].id,
        context: world.domains[at].context,
        transport,
        shared: shared.is_some(),
        peer: 0,
        in_step: false,
    });
    Ok(true)
}

/// The whole queue pair that a number chooses.
fn whole(world: &mut World, number: u32) -> Option<usize> {
    let whole: Vec<_> = (0..world.pairs.len())
        .filter(|at| matches!(world.pairs[*at].body, Body::Whole(_)))
        .collect();
    Some(whole[pick(number, whole.len())?])
}

pub fn queue_pair(world: &mut World, at: usize) -> Option<&mut QueuePair> {
    match &mut world.pairs[at].body {
        Body::Whole(pair) => Some(pair),
        Body::Halves(..) => None,
    }
}

/// Those of a connection that gives up soon, or waits for receives for ever.
fn options(number: u32) -> ConnectOptions {
    ConnectOptions::new()
        .ack_timeout(Duration::from_millis(4))
        .retries(1)
        .rnr_retries(if number % 4 == 0 { 1 } else { 7 })
        .rnr_timer(Duration::from_micros(10))
}

fn join(world: &mut World, one: usize, other: usize, number: u32) -> Done {
    let (id, peer) = (world.pairs[one].send, world.pairs[other].send);
    (world.pairs[one].peer, world.pairs[other].peer) = (peer, id);
    let options = options(number);
    let (here, there) = (world.pairs[one].context, world.pairs[other].context);
    let (here, there) = (world.contexts[here].1, world.contexts[there].1);
    let Some(a) = queue_pair(world, one).map(|pair| pair.endpoint(&here)) else {
        return Ok(false);
    };
    let Some(b) = queue_pair(world, other).map(|pair| pair.endpoint(&there)) else {
        return Ok(false);
    };
    let Some(pair) = queue_pair(world, one) else {
        return Ok(false);
    };
    let first = pair.connect_with(&here, &b, &options).is_ok();
    if one == other {
        world.pairs[one].in_step |= first;
        return Ok(first);
    }
    let Some(pair) = queue_pair(world, other) else {
        return Ok(false);
    };
    let second = pair.connect_with(&there, &a, &options).is_ok();
    let both = first && second;
    for (at, connected) in [(one, first), (other, second)] {
        if connected {
            world.pairs[at].in_step = both;
        }
    }
    Ok(both)
}

fn connect(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    // Those that are not connected yet, if there are two.
    let fresh: Vec<_> = (0..world.pairs.len())
        .filter(|at| match &world.pairs[*at].body {
            Body::Whole(pair) => pair.state() == State::RESET || pair.state() == State::INIT,
            Body::Halves(..) => false,
        })
        .filter(|at| world.pairs[*at].transport != Transport::Datagram)
        .collect();
    if let [one, other, ..] = fresh[..] {
        return join(world, one, other, c);
    }
    let (Some(one), Some(other)) = (whole(world, a), whole(world, b)) else {
        return Ok(false);
    };
    join(world, one, other, c)
}

fn connect_itself(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    join(world, at, at, b)
}

pub const QKEY: u32 = 0x1111_1111;

pub fn activate(world: &mut World, [a, ..]: Numbers) -> Done {
    let datagram: Vec<_> = (0..world.pairs.len())
        .filter(|at| world.pairs[*at].transport == Transport::Datagram)
        .collect();
    let Some(at) = pick(a, datagram.len()).map(|at| datagram[at]) else {
        return Ok(false);
    };
    let local = world.contexts[world.pairs[at].context].1;
    let Some(pair) = queue_pair(world, at) else {
        return Ok(false);
    };
    ok(pair.activate(&local, QKEY))
}

pub fn to_state(state: State) -> QpAttr {
    QpAttr {
        qp_state: state,
        ..QpAttr::default()
    }
}

fn reset(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(pair) = whole(world, a).and_then(|at| queue_pair(world, at)) else {
        return Ok(false);
    };
    ok(pair.modify(&to_state(State::RESET), QpAttrMask::STATE))
}

/// Has all that two queue pairs have in flight flushed, resets and connects them.
fn reconnect(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    // Mostly a failed queue pair and its peer.
    let failed: Vec<_> = (0..world.pairs.len())
        .filter(|at| matches!(world.pairs[*at].body, Body::Whole(_)))
        .filter(|at| state(&world.pairs[*at]) == Some(State::ERR))
        .collect();
    let one = match pick(a, failed.len()) {
        Some(at) if a / 256 % 4 != 0 => Some(failed[at]),
        _ => whole(world, a),
    };
    let (Some(one), Some(other)) = (one, whole(world, b)) else {
        return Ok(false);
    };
    let (id, peer) = (world.pairs[one].send, world.pairs[one].peer);
    let before = world.pairs.iter().position(|pair| {
        pair.send == peer && pair.peer == id && matches!(pair.body, Body::Whole(_))
    });
    let other = match before {
        Some(before) if b % 8 != 7 => before,
        _ => other,
    };
    if world.pairs[one].transport != world.pairs[other].transport {
        return Ok(false);
    }
    if c % 4 != 0 {
        for at in [one, other] {
            if let Some(pair) = queue_pair(world, at) {
                let _ = pair.set_error();
            }
        }
        world.drive(64);
        for at in 0..world.cqs.len() {
            world.poll_all(at)?;
        }
    }
    for at in [one, other] {
        let Some(pair) = queue_pair(world, at) else {
            return Ok(false);
        };
        if pair
            .modify(&to_state(State::RESET), QpAttrMask::STATE)
            .is_err()
        {
            return Ok(false);
        }
    }
    join(world, one, other, c / 4)
}

fn set_error(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.pairs.len()) else {
        return Ok(false);
    };
    ok(match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.set_error(),
        Body::Halves(Some(half), _) => half.set_error(),
        Body::Halves(None, Some(half)) => half.set_error(),
        Body::Halves(None, None) => return Ok(false),
    })
}

/// Any attributes to any state.
fn modify(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let local = world.contexts[world.pairs[at].context].1;
    let Some(pair) = queue_pair(world, at) else {
        return Ok(false);
    };
    let Ok(now) = pair.query() else {
        return Ok(false);
    };
    let attr = QpAttr {
        qp_state: State((b % 9) as u8),
        cur_qp_state: State((b / 9 % 9) as u8),
        qp_access_flags: AccessFlags::from_bits_retain(b >> 8 & 0xf),
        ah_attr: local.path_to(local.gid, local.lid),
        dest_qp_num: if d % 2 == 0 {
            now.dest_qp_num
        } else {
            d & 0x3f
        },
        port_num: 1,
        path_mtu: (d % 6) as u8,
        timeout: 1,
        retry_cnt: 1,
        rnr_retry: 1,
        min_rnr_timer: 1,
        max_rd_atomic: (d % 20) as u8,
        max_dest_rd_atomic: (d % 20) as u8,
        sq_psn: now.sq_psn,
        rq_psn: now.rq_psn,
        ..QpAttr::default()
    };
    let mask = match c % 4 {
        0 => QpAttrMask::from_bits_retain(c >> 2),
        1 => QpAttrMask::STATE | QpAttrMask::from_bits_retain(1 << (c / 4 % 24)),
        2 => QpAttrMask::STATE | QpAttrMask::CUR_STATE,
        _ => QpAttrMask::STATE,
    };
    let modified = pair.modify(&attr, mask).is_ok();
    world.pairs[at].in_step &= !modified;
    Ok(modified)
}

fn transition(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let local = world.contexts[world.pairs[at].context].1;
    let path = local.path_to(local.gid, local.lid);
    let peer = match pick(d, world.pairs.len()) {
        Some(peer) => world.pairs[peer].number,
        None => d,
    };
    let Some(pair) = queue_pair(world, at) else {
        return Ok(false);
    };
    let all = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let to: Transition = match (pair.transport(), b % 3) {
        (Transport::Reliable, 0) => Init::reliable(1, all).into(),
        (Transport::Unreliable, 0) => Init::unreliable(1, all).into(),
        (_, 0) => Init::datagram(1, QKEY).into(),
        (Transport::Reliable, 1) => ReadyToReceive::reliable(path, peer, c, local.mtu).into(),
        (Transport::Unreliable, 1) => ReadyToReceive::unreliable(path, peer, c, local.mtu).into(),
        (_, 1) => ReadyToReceive::datagram().into(),
        (Transport::Reliable, _) => ReadyToSend::reliable(c)
            .retry_cnt(1)
            .rnr_retry(1)
            .timeout(Duration::from_millis(1))
            .into(),
        (Transport::Unreliable, _) => ReadyToSend::unreliable(c).into(),
        (_, _) => ReadyToSend::datagram(c).into(),
    };
    let done = pair.transition(to).is_ok();
    world.pairs[at].in_step &= !done;
    Ok(done)
}

fn split_pair(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let mut pair = world.pairs.remove(at);
    if let Body::Whole(whole) = pair.body {
        let (send, receive) = whole.split();
        pair.body = Body::Halves(Some(send), Some(receive));
    }
    world.pairs.push(pair);
    Ok(true)
}

fn reunite(world: &mut World, _: Numbers) -> Done {
    let is_split = |pair: &Pair| matches!(pair.body, Body::Halves(Some(_), Some(_)));
    let Some(at) = world.pairs.iter().position(is_split) else {
        return Ok(false);
    };
    let mut pair = world.pairs.remove(at);
    let mut done = false;
    pair.body = match pair.body {
        Body::Halves(Some(send), Some(receive)) => match QueuePair::reunite(send, receive) {
            Ok(whole) => {
                done = true;
                Body::Whole(whole)
            }
            Err((send, receive)) => Body::Halves(Some(send), Some(receive)),
        },
        other => other,
    };
    if done && pair.send != pair.receive {
        return Err("halves of two queue pairs were made one".to_owned());
    }
    world.pairs.push(pair);
    Ok(done)
}

/// Halves of two queue pairs, one of each.
fn reunite_others(world: &mut World, _: Numbers) -> Done {
    let split: Vec<_> = (0..world.pairs.len())
        .filter(|at| matches!(world.pairs[*at].body, Body::Halves(Some(_), Some(_))))
        .collect();
    let [one, other, ..] = split[..] else {
        return Ok(false);
    };
    let (send, receive) = (world.pairs[one].send, world.pairs[other].receive);
    let Body::Halves(first, _) = &mut world.pairs[one].body else {
        return Ok(false);
    };
    let first = first.take();
    let Body::Halves(_, second) = &mut world.pairs[other].body else {
        return Ok(false);
    };
    let (Some(first), Some(second)) = (first, second.take()) else {
        return Ok(false);
    };
    match QueuePair::reunite(first, second) {
        Ok(_) if send != receive => Err("halves of two queue pairs were made one".to_owned()),
        Ok(_) => Ok(false),
        Err((first, second)) => {
            if let Body::Halves(place, _) = &mut world.pairs[one].body {
                *place = Some(first);
            }
            if let Body::Halves(_, place) = &mut world.pairs[other].body {
                *place = Some(second);
            }
            Ok(true)
        }
    }
}

fn swap_pairs(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let (Some(one), Some(other)) = (pick(a, world.pairs.len()), pick(b, world.pairs.len())) else {
        return Ok(false);
    };
    // With what the model knows of them.
    world.pairs.swap(one, other);
    Ok(one != other)
}

fn close_pair(world: &mut World, [a, ..]: Numbers) -> Done {
    world.read_failures()?;
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let mut pair = world.pairs.remove(at);
    let Body::Whole(whole) = pair.body else {
        return Ok(false);
    };
    match whole.close() {
        Ok(()) => {
            world.destroyed(pair.send);
            world.half_gone(pair.receive);
            Ok(true)
        }
        Err(refused) => {
            pair.body = Body::Whole(refused.into_object());
            world.pairs.push(pair);
            Ok(false)
        }
    }
}

pub fn drop_pair(world: &mut World, [a, ..]: Numbers) -> Done {
    world.read_failures()?;
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let pair = world.pairs.remove(at);
    drop(pair.body);
    world.half_gone(pair.send);
    world.half_gone(pair.receive);
    Ok(true)
}

fn drop_half(world: &mut World, [a, b, ..]: Numbers) -> Done {
    world.read_failures()?;
    let Some(at) = pick(a, world.pairs.len()) else {
        return Ok(false);
    };
    let Pair {
        body: Body::Halves(send, receive),
        send: one,
        receive: other,
        ..
    } = &mut world.pairs[at]
    else {
        return Ok(false);
    };
    let (gone, id) = if b % 2 == 0 {
        (send.take().is_some(), *one)
    } else {
        (receive.take().is_some(), *other)
    };
    let nothing = send.is_none() && receive.is_none();
    if gone {
        world.half_gone(id);
    }
    if nothing {
        world.pairs.remove(at);
    }
    Ok(gone)
}

fn close_and_drain(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let pair = world.pairs.remove(at);
    world.close_and_drain(pair)
}

/// By the queue of everybody else, too: what is not its own goes to `others`.
fn drain(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let pair = world.pairs.remove(at);
    let (send, receive) = (pair.send, pair.receive);
    let Body::Whole(mut whole) = pair.body else {
        return Ok(false);
    };
    if whole.set_error().is_err() {
        drop(whole);
        world.half_gone(send);
        world.half_gone(receive);
        return Ok(false);
    }
    world.drive(64);
    world.read_failures()?;
    for one in 0..world.cqs.len() {
        for other in 0..world.cqs.len() {
            let mut others: Vec<Completion> = Vec::new();
            let mut cqs: Vec<_> = world.cqs.iter_mut().map(Some).collect();
            let Some(first) = cqs[one].take() else {
                continue;
            };
            let second = cqs[other].take().map(|cq| cq.poller.queue());
            // Not at all: what is there by now is read.
            let time = Duration::ZERO;
            let drained = whole.drain(first.poller.queue(), second, time, |it| others.push(it));
            let mut ended: Vec<Ended> = others.into_iter().map(Ended::from).collect();
            match drained {
                Ok(drained) => {
                    ended.extend(drained.completions.into_iter().map(Ended::from));
                    // In the order of posting, as it is for each queue.
                    ended.sort_by_key(|ended| ended.token);
                    for one in ended {
                        world.ended(one)?;
                    }
                    let released = drained.released.into_iter().map(Ended::from).collect();
                    world.drained(send, released)?;
                    if receive != send {
                        world.half_gone(receive);
                    }
                    return Ok(true);
                }
                Err(refused) => {
                    ended.sort_by_key(|ended| ended.token);
                    for one in ended {
                        world.ended(one)?;
                    }
                    whole = refused.into_object();
                }
            }
        }
    }
    drop(whole);
    world.half_gone(send);
    world.half_gone(receive);
    Ok(false)
}

fn forget_pair(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let pair = world.pairs.remove(at);
    std::mem::forget(pair.body);
    world.half_forgotten(pair.send);
    world.half_forgotten(pair.receive);
    Ok(true)
}

// Posting.

/// The queue pair with a send queue that a number chooses.
pub fn sender(world: &World, number: u32) -> Option<usize> {
    let any = (number / 256) % 16 == 0;
    let senders: Vec<_> = (0..world.pairs.len())
        .filter(|at| !matches!(world.pairs[*at].body, Body::Halves(None, _)))
        .filter(|at| any || state(&world.pairs[*at]) == Some(State::RTS))
        .collect();
    Some(senders[pick(number, senders.len())?])
}

/// What the device says of it: most steps are for those that work.
fn state(pair: &Pair) -> Option<State> {
    let state = match &pair.body {
        Body::Whole(pair) => pair.query(),
        Body::Halves(Some(half), _) => half.query(),
        Body::Halves(None, Some(half)) => half.query(),
        Body::Halves(None, None) => return None,
    };
    Some(state.ok()?.qp_state)
}

pub fn receiver(world: &World, number: u32) -> Option<usize> {
    let any = (number / 256) % 16 == 0;
    let works = |at: &usize| state(&world.pairs[*at]).is_some_and(|now| now != State::ERR);
    let receivers: Vec<_> = (0..world.pairs.len())
        .filter(|at| !matches!(world.pairs[*at].body, Body::Halves(_, None)))
        .filter(|at| !world.pairs[*at].shared)
        .filter(|at| any || works(at))
        .collect();
    Some(receivers[pick(number, receivers.len())?])
}

/// The way of posting in a batch that panics. What it has left behind goes when
/// the next begins: until then a window's key may be that of a bind of it.
const PANICS: u32 = 6;

/// Posts it in one of the ways that there are.
pub fn post<D: Source<Returned: Back>>(
    world: &mut World,
    at: usize,
    how: u32,
    token: u64,
    request: WorkRequest<D>,
    mut flight: Flight,
) -> Done {
    let mut request = request.token(token);
    match how % 16 {
        0 | 1 => {
            request = request.unsignaled();
            flight.silent = true;
        }
        2 => request = request.fence(),
        3 => request = request.solicited(),
        _ => {}
    }
    if how % 16 == PANICS && flight.operation == Operation::BindWindow {
        world.left_behind = true;
    }
    macro_rules! both {
        ($half:ident => $do:expr) => {
            match &mut world.pairs[at].body {
                Body::Whole($half) => $do,
                Body::Halves(Some($half), _) => $do,
                Body::Halves(None, _) => return Ok(false),
            }
        };
    }
    let result = match how % 16 {
        4 => {
            let mut refused = None;
            let batch = both!(half => half.batch(|batch| {
                refused = batch.post(request).err();
                Ok::<_, ()>(())
            }));
            match (refused, batch) {
                (Some(refused), _) => Err(refused),
                (None, Ok(())) => Ok(()),
                (None, Err(_)) => Ok(()),
            }
        }
        // Nothing is posted, and its memory is released.
        5 => {
            let batch = both!(half => half.batch(|batch| {
                drop(batch.post(request));
                Err::<(), _>(())
            }));
            return Ok(batch.is_err());
        }
        PANICS => {
            let batch = AssertUnwindSafe(|| {
                both!(half => drop(half.batch(|batch| {
                    drop(batch.post(request));
                    if token > 0 {
                        std::panic::resume_unwind(Box::new("abandoned"));
                    }
                    Ok::<_, ()>(())
                })));
                Ok::<_, String>(false)
            });
            return Ok(catch_unwind(batch).is_err());
        }
        _ => both!(half => half.post(request)),
    };
    world.posted(token, result, flight)
}

/// A shorter message, sometimes.
pub fn shorten(buffer: &mut Buffer, number: u32) {
    let len = match number % 8 {
        0 => 0,
        1 => 1,
        2 => buffer.capacity(),
        _ => (number as usize / 8 % 300).min(buffer.capacity()),
    };
    let _ = buffer.set_len(len);
}

pub fn lane(world: &World, at: usize) -> Lane {
    Lane::Send(world.pairs[at].send)
}

/// A sender whose peer has receives, nearly always: others wait, and all behind
/// them.
pub fn messenger(world: &World, number: u32) -> Option<usize> {
    let at = sender(world, number)?;
    let peer = world.pairs[at].peer;
    let peer = world.pairs.iter().find(|pair| pair.send == peer)?;
    let lane = Lane::Receive(peer.receive);
    let waits = || world.flights.values().any(|flight| flight.lane == lane);
    ((number / 4096) % 16 == 0 || peer.shared || waits()).then_some(at)
}

fn send(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    shorten(&mut buffer, c);
    away.set_len(buffer.len());
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, vec![away]);
    let mut request = WorkRequest::send(buffer);
    if c % 5 == 0 {
        request = request.immediate(c);
    }
    post(world, at, d, token, request, flight)
}

fn send_inline(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let bytes = [c as u8; 80];
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, Vec::new());
    let request = WorkRequest::send(Inline(&bytes[..b as usize % 81]));
    post(world, at, d, token, request, flight)
}

fn send_list(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let (mut buffers, mut away) = world.take_several(b, domain, c as usize % 4);
    for (buffer, away) in buffers.iter_mut().zip(&mut away) {
        shorten(buffer, c / 4);
        away.set_len(buffer.len());
    }
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, away);
    post(world, at, d, token, WorkRequest::send(buffers), flight)
}

fn send_slice(world: &mut World, [a, b, _, d]: Numbers) -> Done {
    let (Some(at), Some(slice)) = (messenger(world, a), pick(b, world.slices.len())) else {
        return Ok(false);
    };
    let (_, _, slice) = world.slices[slice].clone();
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, Vec::new());
    post(world, at, d, token, WorkRequest::send(slice), flight)
}

fn send_invalidate(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let Some(rkey) = some_key(world, b) else {
        return Ok(false);
    };
    let bytes = c.to_ne_bytes();
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Send, Vec::new());
    let request = WorkRequest::send(Inline(&bytes)).invalidate(rkey);
    post(world, at, d, token, request, flight)
}

fn send_datagram(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let datagram: Vec<_> = (0..world.pairs.len())
        .filter(|at| world.pairs[*at].transport == Transport::Datagram)
        .collect();
    let (Some(from), Some(to)) = (pick(a, datagram.len()), pick(a / 16, datagram.len())) else {
        return Ok(false);
    };
    let (from, to) = (datagram[from], datagram[to]);
    let there = world.contexts[world.pairs[to].context].1;
    let here = world.contexts[world.pairs[from].context].1;
    // Sometimes of another domain.
    let Some(of) = pick(c, world.domains.len()) else {
        return Ok(false);
    };
    let Ok(path) = world.domains[of].domain.address_handle_to(&here, &there) else {
        return Ok(false);
    };
    let domain = world.pairs[from].domain;
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    shorten(&mut buffer, c / 4);
    away.set_len(buffer.len());
    let (lane, token) = (lane(world, from), world.fresh());
    let flight = world.flight(lane, Operation::Send, vec![away]);
    let request = WorkRequest::send(buffer).to(&path, world.pairs[to].number, QKEY);
    drop(path);
    post(world, from, d, token, request, flight)
}

/// A key that can be invalidated; now and then one that there was, or another's.
fn some_key(world: &World, number: u32) -> Option<u32> {
    let bound: Vec<_> = (world.windows.iter())
        .filter(|window| window.kind == WindowType::Two && is_bound(world, window))
        .map(|window| window.window.rkey())
        .collect();
    match number % 32 {
        29 => pick(number / 32, world.rights.len()).map(|at| world.rights[at].rkey),
        30 => {
            pick(number / 32, world.pieces.len()).map(|at| world.pieces[at].buffer.raw_sge().lkey)
        }
        31 => Some(number),
        _ => pick(number / 32, bound.len()).map(|at| bound[at]),
    }
}

/// Whether a window is bound to something, as far as was heard.
fn is_bound(world: &World, window: &Window) -> bool {
    (world.rights.iter())
        .any(|right| right.window == Some(window.id) && right.is_open() && right.len > 0)
}

/// Where in a peer's memory: where a key leads that there is; now and then one
/// that there was, or beyond, or to the program's own bytes.
pub fn somewhere(world: &World, number: u32, needs: AccessFlags) -> Option<(RemoteAddr, u64)> {
    let rights = &world.rights;
    let way = number % 32;
    let fitting: Vec<_> = match way {
        28 | 29 => rights.iter().filter(|right| !right.is_open()).collect(),
        30 => rights.iter().collect(),
        31 => return Some((RemoteAddr::new(u64::from(number) << 12, number), 64)),
        _ => (rights.iter())
            .filter(|right| right.is_open() && right.len > 0 && right.access.contains(needs))
            .collect(),
    };
    // What was last, most of all.
    let index = match number / 32 % 4 {
        0 | 1 => fitting.len().checked_sub(1),
        _ => pick(number / 128, fitting.len()),
    };
    let right = fitting[index?];
    let offset = match right.len {
        0 => 0,
        len => (u64::from(number / 512) % len) & !7,
    };
    let mut at = RemoteAddr::new(right.addr + offset, right.rkey);
    let mut room = right.len - offset;
    match number / 8192 % 64 {
        // To bytes that are no peer's affair.
        0 => {
            if let Some(piece) = pick(number / 64, world.pieces.len()) {
                at.addr = world.pieces[piece].addr;
                room = 64;
            }
        }
        // Beyond the end.
        1 => {
            at.addr += room.saturating_sub(8);
            room = 16;
        }
        2 => at.rkey = at.rkey.wrapping_add(number >> 30),
        _ => {}
    }
    Some((at, room))
}

/// A write's, read's or atomic's side that the model holds it to.
pub fn asks(
    world: &World,
    at: usize,
    to: RemoteAddr,
    len: usize,
    needs: AccessFlags,
) -> Option<RecordedCommand> {
    let pair = &world.pairs[at];
    (pair.transport == Transport::Reliable && pair.in_step).then_some(RecordedCommand {
        addr: to.addr,
        len: len as u64,
        rkey: to.rkey,
        needs,
    })
}

fn write(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let Some((to, room)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    shorten(&mut buffer, d / 16);
    let len = buffer.len().min(room as usize);
    let _ = buffer.set_len(len);
    away.set_len(len);
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, vec![away]);
    flight.asked = asks(world, at, to, len, AccessFlags::REMOTE_WRITE);
    let mut request = WorkRequest::write(buffer, to);
    if d / 128 % 8 == 0 && messenger(world, a) == Some(at) {
        request = request.immediate(d);
    }
    post(world, at, d, token, request, flight)
}

fn write_inline(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let Some((to, room)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let bytes = [b as u8; 64];
    let len = (b as usize % 65).min(room as usize);
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, Vec::new());
    flight.asked = asks(world, at, to, len, AccessFlags::REMOTE_WRITE);
    let request = WorkRequest::write(Inline(&bytes[..len]), to);
    post(world, at, d, token, request, flight)
}

/// By a key that led once to memory that is the program's own now.
fn probe(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let of_pieces = (world.pieces.iter()).map(|piece| (piece.addr, piece.shadow.len()));
    let of_regions = world.remotes.iter();
    let of_regions = of_regions.map(|remote| (remote.region.key().addr, remote.region.len()));
    let own: Vec<_> = of_pieces.chain(of_regions).collect();
    let is_own = |addr: u64| {
        own.iter()
            .any(|(begin, len)| (*begin..begin + *len as u64).contains(&addr))
    };
    let keys = |which: fn(&Right) -> bool| -> Vec<_> {
        (world.rights.iter())
            .filter(|right| is_own(right.addr) && right.access.contains(AccessFlags::REMOTE_WRITE))
            .filter(|right| which(right))
            .map(|right| RemoteAddr::new(right.addr, right.rkey))
            .collect()
    };
    // Of a window that may have been bound to it until then, if there is one.
    let left = keys(|right| right.window.is_some() && right.is_left);
    let keys = match b % 8 {
        7 => keys(|_| true),
        0..=5 if !left.is_empty() => left,
        _ => keys(|right| right.window.is_some()),
    };
    let Some(to) = pick(b / 8, keys.len()).map(|at| keys[at]) else {
        return Ok(false);
    };
    let bytes = [c as u8; 8];
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, Vec::new());
    flight.asked = asks(world, at, to, bytes.len(), AccessFlags::REMOTE_WRITE);
    post(
        world,
        at,
        d,
        token,
        WorkRequest::write(Inline(&bytes), to),
        flight,
    )
}

fn read(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let Some((from, room)) = somewhere(world, c, AccessFlags::REMOTE_READ) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    let len = buffer.capacity().min(room as usize);
    let _ = buffer.set_len(len);
    away.set_len(len);
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Read, vec![away]);
    flight.asked = asks(world, at, from, len, AccessFlags::REMOTE_READ);
    post(world, at, d, token, WorkRequest::read(buffer, from), flight)
}

fn read_slice(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let (Some(at), Some(slice)) = (sender(world, a), pick(b, world.slices.len())) else {
        return Ok(false);
    };
    let Some((from, _)) = somewhere(world, c, AccessFlags::REMOTE_READ) else {
        return Ok(false);
    };
    let (region, _, slice) = world.slices[slice].clone();
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Read, Vec::new());
    flight.asked = asks(world, at, from, slice.len(), AccessFlags::REMOTE_READ);
    flight.written.push(region);
    post(world, at, d, token, WorkRequest::read(slice, from), flight)
}

fn fetch_add(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    atomic(world, [a, b, c, d], false)
}

fn compare_swap(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    atomic(world, [a, b, c, d], true)
}

fn atomic(world: &mut World, [a, b, c, d]: Numbers, swap: bool) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let Some((to, _)) = somewhere(world, c, AccessFlags::REMOTE_ATOMIC) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    let _ = buffer.set_len(8);
    away.set_len(buffer.len());
    let (lane, token) = (lane(world, at), world.fresh());
    let operation = if swap {
        Operation::CompareSwap
    } else {
        Operation::FetchAdd
    };
    let mut flight = world.flight(lane, operation, vec![away]);
    flight.asked = asks(world, at, to, 8, AccessFlags::REMOTE_ATOMIC);
    let request = if swap {
        WorkRequest::compare_swap(buffer, to, u64::from(b), u64::from(d))
    } else {
        WorkRequest::fetch_add(buffer, to, u64::from(d))
    };
    post(world, at, d, token, request, flight)
}

fn write_at_level(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let Some((to, _)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((mut buffer, mut away)) = world.take(b, domain) else {
        return Ok(false);
    };
    shorten(&mut buffer, d);
    away.set_len(buffer.len());
    let level = [CompletionLevel::Transmit, CompletionLevel::Delivery][d as usize % 2];
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, vec![away]);
    let Some(pair) = queue_pair(world, at) else {
        return Ok(false);
    };
    let result = pair.write_at_level(buffer, to, level, token);
    // Of what is behind the write is the entry, and the write's memory is freed.
    if level == CompletionLevel::Delivery && !matches!(result, Err(PostError { data: Some(_), .. }))
    {
        flight.silent = true;
        flight.twin = true;
    }
    world.posted(token, result, flight)
}

fn flush(world: &mut World, [a, _, c, _]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let Some((to, _)) = somewhere(world, c, AccessFlags::REMOTE_READ) else {
        return Ok(false);
    };
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::Read, Vec::new());
    let Some(pair) = queue_pair(world, at) else {
        return Ok(false);
    };
    let range = ringverbs::FlushRange::Region;
    let result = pair.flush(to, range, ringverbs::FlushTo::GlobalVisibility, token);
    world.posted(token, result, flight)
}

fn atomic_write(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = whole(world, a) else {
        return Ok(false);
    };
    let Some((to, _)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::Write, Vec::new());
    flight.asked = asks(world, at, to, 8, AccessFlags::REMOTE_WRITE);
    let Some(pair) = queue_pair(world, at) else {
        return Ok(false);
    };
    let result = pair.atomic_write(to, u64::from(b).to_ne_bytes(), token);
    world.posted(token, result, flight)
}

fn receive(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = receiver(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let Some((buffer, away)) = world.take(b, domain) else {
        return Ok(false);
    };
    let token = world.fresh();
    let lane = Lane::Receive(world.pairs[at].receive);
    let flight = world.flight(lane, Operation::Receive, vec![away]);
    let result = match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.receive(buffer, token),
        Body::Halves(_, Some(half)) => half.receive(buffer, token),
        Body::Halves(_, None) => return Ok(false),
    };
    world.posted(token, result, flight)
}

fn receive_list(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = receiver(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let (buffers, away) = world.take_several(b, domain, c as usize % 4);
    let token = world.fresh();
    let lane = Lane::Receive(world.pairs[at].receive);
    let flight = world.flight(lane, Operation::Receive, away);
    let result = match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.receive(buffers, token),
        Body::Halves(_, Some(half)) => half.receive(buffers, token),
        Body::Halves(_, None) => return Ok(false),
    };
    world.posted(token, result, flight)
}

fn receive_slice(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let (Some(at), Some(slice)) = (receiver(world, a), pick(b, world.slices.len())) else {
        return Ok(false);
    };
    let (region, _, slice) = world.slices[slice].clone();
    let token = world.fresh();
    let lane = Lane::Receive(world.pairs[at].receive);
    let mut flight = world.flight(lane, Operation::Receive, Vec::new());
    flight.written.push(region);
    let result: Result<(), PostError<MemorySlice>> = match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.receive(slice, token),
        Body::Halves(_, Some(half)) => half.receive(slice, token),
        Body::Halves(_, None) => return Ok(false),
    };
    world.posted(token, result, flight)
}

/// Two receives, published or abandoned.
fn receive_batch(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = receiver(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let (buffers, away) = world.take_several(b, domain, 2);
    let tokens = [world.fresh(), world.fresh()];
    let lane = Lane::Receive(world.pairs[at].receive);
    let abandon = c % 2 == 0;
    let mut results = Vec::new();
    macro_rules! fill {
        () => {
            |batch| {
                for (buffer, token) in buffers.into_iter().zip(tokens) {
                    results.push(batch.receive(buffer, token));
                }
                if c % 8 == 0 {
                    std::panic::resume_unwind(Box::new("abandoned"));
                }
                if abandon { Err(()) } else { Ok(()) }
            }
        };
    }
    let whole = AssertUnwindSafe(|| match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.receive_batch(fill!()),
        Body::Halves(_, Some(half)) => half.batch(fill!()),
        Body::Halves(_, None) => Err(()),
    });
    let published = matches!(catch_unwind(whole), Ok(Ok(())));
    for ((result, away), token) in results.into_iter().zip(away).zip(tokens) {
        if !published {
            // Released, or here in the error.
            continue;
        }
        let flight = world.flight(lane, Operation::Receive, vec![away]);
        world.posted(token, result, flight)?;
    }
    Ok(published || abandon)
}

pub fn receive_shared(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(at) = pick(a, world.shared.len()) else {
        return Ok(false);
    };
    let domain = world.shared[at].domain;
    let (buffers, away) = world.take_several(b, domain, 1 + c as usize % 3);
    let token = world.fresh();
    let lane = Lane::Shared(world.shared[at].id);
    let flight = world.flight(lane, Operation::Receive, away);
    let result = world.shared[at].queue.receive(buffers, token);
    world.posted(token, result, flight)
}

/// Sends and writes together.
fn batch(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some(at) = messenger(world, a) else {
        return Ok(false);
    };
    let domain = world.pairs[at].domain;
    let (buffers, away) = world.take_several(b, domain, 1 + c as usize % 5);
    let lane = lane(world, at);
    let tokens: Vec<_> = buffers.iter().map(|_| world.fresh()).collect();
    let Some((to, _)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let mut results = Vec::new();
    let abandon = d % 4 == 0;
    let fill = |batch: &mut ringverbs::qp::Batch<'_>| {
        for (n, (mut buffer, token)) in buffers.into_iter().zip(&tokens).enumerate() {
            let _ = buffer.set_len(buffer.capacity().min(64));
            let request = if n % 2 == 0 {
                WorkRequest::send(buffer)
            } else {
                WorkRequest::write(buffer, to)
            };
            results.push(batch.post(request.token(*token)));
        }
        if abandon { Err(()) } else { Ok(()) }
    };
    let published = match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.batch(fill),
        Body::Halves(Some(half), _) => half.batch(fill),
        Body::Halves(None, _) => return Ok(false),
    };
    if abandon {
        return Ok(published.is_err());
    }
    let mut done = false;
    for ((result, away), token) in results.into_iter().zip(away).zip(tokens) {
        let flight = world.flight(lane, Operation::Send, vec![away]);
        done |= world.posted(token, result, flight)?;
    }
    Ok(done)
}

// Windows.

/// A region, nearly always one that windows may be bound to.
fn bindable(world: &World, number: u32) -> Option<usize> {
    let any = (number / 256) % 16 == 0;
    let regions: Vec<_> = (0..world.remotes.len())
        .filter(|at| any || world.remotes[*at].access.contains(AccessFlags::MW_BIND))
        .collect();
    Some(regions[pick(number, regions.len())?])
}

fn bind(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let (Some(at), Some(of), Some(to)) = (
        sender(world, a),
        pick(b, world.windows.len()),
        bindable(world, c),
    ) else {
        return Ok(false);
    };
    // One of type 2 is free first.
    let window = &world.windows[of];
    if window.kind == WindowType::Two && is_bound(world, window) && d & 0xf000 != 0 {
        return Ok(false);
    }
    let begin = if d & 0x100 == 0 { 0 } else { 1024 };
    let end = if d & 0x200 == 0 { PAGE } else { 2048 };
    let access = match d >> 10 & 7 {
        0 => AccessFlags::REMOTE_READ,
        1 => AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC,
        _ => AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
    };
    let Ok(slice) = world.remotes[to].region.slice(begin..end) else {
        return Ok(false);
    };
    let (region, addr) = (world.remotes[to].id, slice.key().addr);
    let window = world.windows[of].window.clone();
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::BindWindow, Vec::new());
    let before = window.rkey();
    let request = WorkRequest::bind(&window, slice, access);
    let posted = post(world, at, d, token, request, flight)?;
    let is_in_flight = world.flights.contains_key(&token);
    if is_in_flight {
        world.granted(Granted {
            rkey: window.rkey(),
            addr,
            len: (end - begin) as u64,
            access,
            region,
            window: Some(world.windows[of].id),
            bind: Some((lane, token)),
        });
    } else if window.rkey() != before && !world.left_behind {
        return Err("a bind that was not posted has changed the window's key".to_owned());
    }
    Ok(posted)
}

fn unbind(world: &mut World, [a, b, _, d]: Numbers) -> Done {
    let (Some(at), Some(of)) = (sender(world, a), pick(b, world.windows.len())) else {
        return Ok(false);
    };
    if world.windows[of].kind == WindowType::Two && d & 0xf000 != 0 {
        return Ok(false);
    }
    let window = world.windows[of].window.clone();
    let (lane, token) = (lane(world, at), world.fresh());
    let flight = world.flight(lane, Operation::BindWindow, Vec::new());
    let posted = post(world, at, d, token, WorkRequest::unbind(&window), flight)?;
    if world.flights.contains_key(&token) {
        world.granted(Granted {
            rkey: window.rkey(),
            addr: 0,
            len: 0,
            access: AccessFlags::empty(),
            region: 0,
            window: Some(world.windows[of].id),
            bind: Some((lane, token)),
        });
    }
    Ok(posted)
}

fn local_invalidate(world: &mut World, [a, b, _, d]: Numbers) -> Done {
    let Some(at) = sender(world, a) else {
        return Ok(false);
    };
    let Some(rkey) = some_key(world, b) else {
        return Ok(false);
    };
    let (lane, token) = (lane(world, at), world.fresh());
    let mut flight = world.flight(lane, Operation::LocalInvalidate, Vec::new());
    flight.invalidates = Some(rkey);
    let request = WorkRequest::local_invalidate(rkey);
    post(world, at, d, token, request, flight)
}

// The raw layer, as far as it is safe.

/// The raw send queue of the queue pair that a number chooses.
fn raw_send(world: &mut World, number: u32) -> Option<SendQueue<'_>> {
    let at = pick(number, world.pairs.len())?;
    match &mut world.pairs[at].body {
        Body::Whole(pair) => Some(pair.raw_send()),
        Body::Halves(half, _) => Some(half.as_mut()?.raw()),
    }
}

fn raw_sends(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let Some((to, _)) = somewhere(world, c, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let sge = pick(b, world.pieces.len()).map(|at| world.pieces[at].buffer.raw_sge());
    let Some(mut queue) = raw_send(world, a) else {
        return Ok(false);
    };
    let mut done = false;
    for n in 0..d % 12 {
        let send = SendRequest::send(u64::from(c) << 32 | u64::from(n));
        let write = SendRequest::write(1, to);
        let list = sge.as_slice();
        done |= queue.push(&send.flags(Flags::SIGNALED).sges(list)).is_ok();
        done |= queue.push(&write.sges(list)).is_ok();
    }
    if d % 3 == 0 {
        #[allow(
            clippy::forget_non_drop,
            reason = "whether it is one is not known here"
        )]
        std::mem::forget(queue);
    }
    Ok(done)
}

fn raw_receives(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let sge = pick(b, world.pieces.len()).map(|at| world.pieces[at].buffer.raw_sge());
    let queue = match pick(a, world.pairs.len()).map(|at| &mut world.pairs[at].body) {
        Some(Body::Whole(pair)) => pair.raw_receive(),
        Some(Body::Halves(_, Some(half))) => half.raw(),
        _ => return Ok(false),
    };
    let Ok(mut queue) = queue else {
        return Ok(false);
    };
    let mut done = false;
    for n in 0..d % 12 {
        done |= queue
            .push(u64::from(c) + u64::from(n), sge.as_slice())
            .is_ok();
    }
    Ok(done)
}

/// A bind by the raw layer that is never published.
fn raw_bind(world: &mut World, [a, b, c, d]: Numbers) -> Done {
    let (Some(of), Some(to)) = (pick(b, world.windows.len()), bindable(world, c)) else {
        return Ok(false);
    };
    let window = world.windows[of].window.clone();
    let Ok(slice) = world.remotes[to].region.slice(..) else {
        return Ok(false);
    };
    let before = window.rkey();
    let Ok(bind) = WindowBind::new(&window, &slice, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    let request = SendRequest::bind_window(1, &bind).flags(Flags::SIGNALED);
    let pushed = raw_send(world, a).map(|mut queue| queue.push(&request));
    if !matches!(pushed, Some(Ok(()))) {
        return Ok(false);
    }
    if d % 2 == 0 {
        drop(bind);
    } else {
        std::mem::forget(bind);
        world.leaks = true;
    }
    if window.rkey() != before && !world.left_behind {
        return Err("a bind that was not published has changed the window's key".to_owned());
    }
    Ok(true)
}

// Time, and completions.

fn drive(world: &mut World, [a, ..]: Numbers) -> Done {
    world.drive(1 << (a % 7));
    Ok(true)
}

/// Until something that was lost is asked for again.
fn rest(world: &mut World, _: Numbers) -> Done {
    std::thread::sleep(Duration::from_millis(1));
    world.drive(16);
    Ok(true)
}

fn queue_error(error: &impl std::fmt::Display, world: &World) -> Done {
    if world.taken_away {
        return Ok(false);
    }
    Err(format!("a completion queue says: {error}"))
}

fn poll_one(world: &mut World, [a, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    match world.queue(at)?.poll_one() {
        Ok(Some(completion)) => world.ended(completion.into()).map(|()| true),
        Ok(None) => Ok(false),
        Err(error) => queue_error(&error, world),
    }
}

fn poll_all(world: &mut World, [a, b, ..]: Numbers) -> Done {
    if b % 4 != 0 {
        world.drive(32);
    }
    let mut count = 0;
    for n in 0..world.cqs.len() {
        let at = (a as usize + n) % world.cqs.len();
        // Readers are read by themselves, too.
        if matches!(world.cqs[at].poller, Poller::Reader(_)) && b % 4 != 1 {
            continue;
        }
        count += world.poll_all(at)?;
    }
    Ok(count > 0)
}

fn poll_several(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    let mut out: [Completion; 4] = Default::default();
    let room = b as usize % 5;
    match world.queue(at)?.poll(&mut out[..room]) {
        Ok(count) => {
            for completion in out.into_iter().take(count) {
                world.ended(completion.into())?;
            }
            Ok(count > 0)
        }
        Err(error) => queue_error(&error, world),
    }
}

fn look(world: &mut World, a: u32, most: usize, forget: bool) -> Done {
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    let mut ended = Vec::new();
    let mut failed = None;
    let mut cursor = world.queue(at)?.cursor();
    while ended.len() < most {
        match cursor.next_entry() {
            Ok(Some(mut entry)) => {
                let mut one = Ended {
                    token: entry.token(),
                    status: Some(entry.status()),
                    received: 0,
                    invalidated: None,
                    payload: entry.take_payload(),
                };
                if let Ok(success) = entry.result() {
                    if entry.operation() == Operation::Receive && !success.is_remote_write() {
                        one.received = success.byte_len() as usize;
                    }
                    one.invalidated = success.invalidated();
                }
                ended.push(one);
            }
            Ok(None) => break,
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    if forget {
        std::mem::forget(cursor);
        world.leaks = true;
    } else {
        drop(cursor);
    }
    let done = !ended.is_empty();
    for one in ended {
        world.ended(one)?;
    }
    match failed {
        Some(error) => queue_error(&error, world),
        None => Ok(done),
    }
}

fn cursor(world: &mut World, [a, b, ..]: Numbers) -> Done {
    look(world, a, b as usize % 6, false)
}

fn cursor_forgotten(world: &mut World, [a, b, ..]: Numbers) -> Done {
    look(world, a, b as usize % 4, true)
}

fn read_entries(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let readers: Vec<_> = (0..world.cqs.len())
        .filter(|at| matches!(world.cqs[*at].poller, Poller::Reader(_)))
        .collect();
    let Some(at) = pick(a, readers.len()).map(|at| readers[at]) else {
        return Ok(false);
    };
    let Poller::Reader(reader) = &mut world.cqs[at].poller else {
        return Ok(false);
    };
    let mut out: [ringverbs::completion::DataEntry; 4] = Default::default();
    match reader.read(&mut out[..b as usize % 5]) {
        Ok(count) => {
            for entry in out.into_iter().take(count) {
                // A receive's length may be that of a write into other memory.
                let received = entry.payload_len();
                world.ended(Ended {
                    token: entry.token,
                    status: Some(ringverbs::Status::SUCCESS),
                    received,
                    invalidated: None,
                    payload: entry.payload,
                })?;
            }
            Ok(count > 0)
        }
        Err(ReadError::ErrorAvailable) => {
            let Some(failed) = reader.read_err() else {
                return Err("an error is said to be there, and is not".to_owned());
            };
            world.ended(failed.into())?;
            Ok(true)
        }
        Err(error) => queue_error(&error, world),
    }
}

trait PayloadLen {
    fn payload_len(&self) -> usize;
}

impl PayloadLen for ringverbs::completion::DataEntry {
    fn payload_len(&self) -> usize {
        match &self.payload {
            ringverbs::Payload::Buffer(buffer) => buffer.len(),
            ringverbs::Payload::Buffers(buffers) => buffers.iter().map(|it| it.len()).sum(),
            _ => 0,
        }
    }
}

/// Completions that are looked at by the raw layer are out of the queue, and
/// their operations still in flight.
fn poll_raw(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some(at) = pick(a, world.cqs.len()) else {
        return Ok(false);
    };
    let count = world.cqs[at]
        .poller
        .queue()
        .poll_raw(1 + b as usize % 3, |entry| {
            std::hint::black_box((entry.wr_id(), entry.status()));
        });
    world.taken_away |= count > 0;
    Ok(count > 0)
}
