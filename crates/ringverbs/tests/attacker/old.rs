//! Steps by calls that an application should not have: they find the defects
//! that these calls bring, and go with them.

use ringverbs::AccessFlags;
use ringverbs::kernel::{QpHandle, Udata, qp};
use ringverbs::qp::{QpAttrMask, State};
use ringverbs::raw::Flags;

use crate::steps::{Kind, Numbers, to_state};
use crate::world::{Body, Done, World, pick};

pub const STEPS: &[Kind] = &[
    ("swap sending halves", 2, swap_send_halves),
    ("swap receiving halves", 2, swap_receive_halves),
    (
        "a raw bind, done without having been published",
        3,
        raw_bind_done,
    ),
    (
        "modify a queue pair by the kernel's module",
        1,
        kernel_modify,
    ),
];

/// Two whole queue pairs that numbers choose.
fn two(world: &World, a: u32, b: u32) -> Option<(usize, usize)> {
    let whole: Vec<_> = (0..world.pairs.len())
        .filter(|at| matches!(world.pairs[*at].body, Body::Whole(_)))
        .collect();
    let (one, other) = (pick(a, whole.len())?, pick(b, whole.len())?);
    (one != other).then(|| (whole[one.min(other)], whole[one.max(other)]))
}

fn swap_send_halves(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some((one, other)) = two(world, a, b) else {
        return Ok(false);
    };
    let (front, back) = world.pairs.split_at_mut(other);
    let (one, other) = (&mut front[one], &mut back[0]);
    if let (Body::Whole(first), Body::Whole(second)) = (&mut one.body, &mut other.body) {
        std::mem::swap(first.send_half(), second.send_half());
        std::mem::swap(&mut one.send, &mut other.send);
    }
    Ok(true)
}

fn swap_receive_halves(world: &mut World, [a, b, ..]: Numbers) -> Done {
    let Some((one, other)) = two(world, a, b) else {
        return Ok(false);
    };
    let (front, back) = world.pairs.split_at_mut(other);
    let (one, other) = (&mut front[one], &mut back[0]);
    if let (Body::Whole(first), Body::Whole(second)) = (&mut one.body, &mut other.body) {
        std::mem::swap(first.recv_half(), second.recv_half());
        std::mem::swap(&mut one.receive, &mut other.receive);
        std::mem::swap(&mut one.shared, &mut other.shared);
    }
    Ok(true)
}

fn raw_bind_done(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let (Some(at), Some(of), Some(to)) = (
        pick(a, world.pairs.len()),
        pick(b, world.windows.len()),
        pick(c, world.remotes.len()),
    ) else {
        return Ok(false);
    };
    let window = world.windows[of].window.clone();
    let Ok(slice) = world.remotes[to].region.slice(..) else {
        return Ok(false);
    };
    let half = match &mut world.pairs[at].body {
        Body::Whole(pair) => pair.send_half(),
        Body::Halves(Some(half), _) => half,
        Body::Halves(None, _) => return Ok(false),
    };
    let mut queue = half.raw();
    let Ok(entry) = queue.open::<ringverbs::raw::BindWindow>(1, Flags::SIGNALED) else {
        return Ok(false);
    };
    let Ok(rebound) = entry.bind(&window, &slice, AccessFlags::REMOTE_WRITE) else {
        return Ok(false);
    };
    rebound.done();
    Ok(true)
}

/// Behind the library's back, by a handle that is guessed.
fn kernel_modify(world: &mut World, [a, b, c, _]: Numbers) -> Done {
    let Some(context) = pick(a, world.contexts.len()) else {
        return Ok(false);
    };
    let state = [State::RESET, State::ERR, State::INIT][c as usize % 3];
    let attr = to_state(state);
    let context = world.contexts[context].0.as_uverbs();
    let handle = QpHandle(b % 64);
    let done = qp::modify(context, handle, &attr, QpAttrMask::STATE, Udata::none());
    Ok(done.is_ok())
}
