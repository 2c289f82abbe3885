//! Hooks in the functions by which programs post work requests, below those of [`crate::posts`].
//!
//! A post has the time before it, and is written once the provider has returned: lines of
//! different threads are not in order of time.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;

use super::{Recorder, current, device, names, now};
use crate::check::Sge;
use crate::explain::json::Object;
use crate::explain::{lock, thread};
use crate::hooks::{self, Context, Hooked, SharedQueue, hooked};
use crate::internal;
use crate::posts::{
    BIND, BUILDERS, CompleteFunction, INLINE, INVALIDATE, IbvQp, LONGEST_QUEUE, POST_RECV,
    POST_SEND, PostFunction, RecvWr, SendWr, VARIANTS, WR_ABORT, WR_COMPLETE, WR_SET_SGE,
    WR_SET_SGE_LIST, WR_START, extension,
};

/// Index in `struct ibv_context_ops`.
const POST_SRQ_RECV: usize = 20;
const BIND_MW: usize = 8;
/// Indices among the functions of a builder.
const WR_SET_UD_ADDR: usize = 11;
const WR_SET_INLINE_DATA: usize = 13;
const WR_SET_INLINE_DATA_LIST: usize = 14;
/// Operations, `enum ibv_wr_opcode`.
const SEND_WITH_INV: u32 = 9;
const SIGNALED: u32 = 1 << 1;
/// Elements of a work request that are recorded.
const MAX_ELEMENTS: usize = 32;

static SENDS: Hooked<VARIANTS> = hooked!(post_send: 0 1 2 3 4 5 6 7);
static RECEIVES: Hooked<VARIANTS> = hooked!(post_receive: 0 1 2 3 4 5 6 7);
static SHARED_RECEIVES: Hooked<VARIANTS> = hooked!(post_shared_receive: 0 1 2 3 4 5 6 7);
static BINDINGS: Hooked<VARIANTS> = hooked!(bind_window: 0 1 2 3 4 5 6 7);
static ELEMENTS: Hooked<VARIANTS> = hooked!(set_sge: 0 1 2 3 4 5 6 7);
static LISTS: Hooked<VARIANTS> = hooked!(set_sge_list: 0 1 2 3 4 5 6 7);
static ADDRESSES: Hooked<VARIANTS> = hooked!(set_ud_addr: 0 1 2 3 4 5 6 7);
static INLINE_DATA: Hooked<VARIANTS> = hooked!(set_inline_data: 0 1 2 3 4 5 6 7);
static INLINE_LISTS: Hooked<VARIANTS> = hooked!(set_inline_data_list: 0 1 2 3 4 5 6 7);
static STARTS: Hooked<VARIANTS> = hooked!(start: 0 1 2 3 4 5 6 7);
static COMPLETES: Hooked<VARIANTS> = hooked!(complete: 0 1 2 3 4 5 6 7);
static ABORTS: Hooked<VARIANTS> = hooked!(abort: 0 1 2 3 4 5 6 7);

macro_rules! build_hooks {
    ($list:ident: $($builder:literal)*) => {
        static $list: [Hooked<VARIANTS>; BUILDERS.len()] = [$(Hooked::new([
            build::<$builder, 0> as *const (), build::<$builder, 1> as *const (),
            build::<$builder, 2> as *const (), build::<$builder, 3> as *const (),
            build::<$builder, 4> as *const (), build::<$builder, 5> as *const (),
            build::<$builder, 6> as *const (), build::<$builder, 7> as *const (),
        ])),*];
    };
}
build_hooks!(BUILDS: 0 1 2 3 4 5 6 7 8 9 10);

/// The hooks of a context's table, by index.
static CONTEXT_HOOKS: [(usize, &Hooked<VARIANTS>); 4] = [
    (POST_SEND, &SENDS),
    (POST_RECV, &RECEIVES),
    (POST_SRQ_RECV, &SHARED_RECEIVES),
    (BIND_MW, &BINDINGS),
];

/// Those of a queue pair with builders, without the builders themselves.
static BUILDER_HOOKS: [(usize, &Hooked<VARIANTS>); 8] = [
    (WR_SET_UD_ADDR, &ADDRESSES),
    (WR_SET_INLINE_DATA, &INLINE_DATA),
    (WR_SET_INLINE_DATA_LIST, &INLINE_LISTS),
    (WR_SET_SGE, &ELEMENTS),
    (WR_SET_SGE_LIST, &LISTS),
    (WR_START, &STARTS),
    (WR_COMPLETE, &COMPLETES),
    (WR_ABORT, &ABORTS),
];

/// Hooks the functions of a context that post, unless they are hooked already.
///
/// # Safety
/// The context's table must be readable and writable, and only changed by atomic accesses.
pub(crate) unsafe fn hook_posts(context: *mut Context) {
    for (index, hooked) in CONTEXT_HOOKS {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let entry = &raw mut (*context).operations[index];
            let function = hooks::load(entry);
            if crate::posts::provider_of_context(index, function) == function {
                hooked.exchange(entry, function);
            }
        }
    }
}

/// Hooks the functions of a queue pair with builders, unless they are hooked already.
///
/// # Safety
/// The queue pair must have builders, and not be posted to.
pub(crate) unsafe fn hook_builders(queue_pair: *mut IbvQp) {
    let others = BUILDER_HOOKS.iter().copied();
    for (index, hooked) in BUILDS.iter().enumerate().chain(others) {
        // SAFETY: guaranteed by the caller.
        unsafe { hook_builder(queue_pair, index, hooked) };
    }
}

/// # Safety
/// As of [`hook_builders`].
unsafe fn hook_builder(queue_pair: *mut IbvQp, index: usize, hooked: &Hooked<VARIANTS>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let entry = &raw mut (*extension(queue_pair)).functions[index];
        let function = hooks::load(entry);
        if crate::posts::provider_of_builder(index, function) == function {
            hooked.exchange(entry, function);
        }
    }
}

/// Hooks `wr_complete`, which libmlx5 sets when the queue pair is in RTS.
///
/// # Safety
/// As of [`hook_builders`].
pub(crate) unsafe fn hook_complete(queue_pair: *mut IbvQp) {
    // SAFETY: guaranteed by the caller.
    unsafe { hook_builder(queue_pair, WR_COMPLETE, &COMPLETES) };
}

/// Returns the provider's function of a context's table, given what is called instead.
pub(crate) fn provider_of_post(index: usize, function: *mut c_void) -> *mut c_void {
    let found = CONTEXT_HOOKS.iter().find(|(of, _)| *of == index);
    found.map_or(function, |(_, hooked)| hooked.provider_of(function))
}

/// As above, of a builder.
pub(crate) fn provider_of_builder(index: usize, function: *mut c_void) -> *mut c_void {
    let of_others = || BUILDER_HOOKS.iter().find(|(of, _)| *of == index);
    match BUILDS.get(index).or_else(|| of_others().map(|it| it.1)) {
        Some(hooked) => hooked.provider_of(function),
        None => function,
    }
}

/// A work request that is posted.
#[derive(Debug, Default)]
struct Post {
    time: u64,
    wr_id: u64,
    /// `None` for a receive.
    opcode: Option<u32>,
    flags: u32,
    bytes: u64,
    elements: Vec<Sge>,
    is_inline: bool,
    remote: Option<(u64, u32)>,
    datagram: Option<(u32, u32)>,
    /// The key that it invalidates.
    key: Option<u32>,
}

impl Post {
    fn add(&mut self, elements: &[Sge]) {
        self.bytes += elements.iter().map(|it| u64::from(it.length)).sum::<u64>();
        let room = MAX_ELEMENTS - self.elements.len().min(MAX_ELEMENTS);
        self.elements.extend(elements.iter().take(room));
    }

    /// Returns the line of a post to a queue, given its name, number and context.
    fn line(
        &self,
        (kind, number, fd): (&str, u32, RawFd),
        signals_all: bool,
        errno: i32,
    ) -> String {
        let line = Object::new()
            .text("type", "post")
            .raw("time", self.time)
            .raw("thread", thread())
            .raw("context", fd)
            .raw(kind, number)
            .raw("send", self.opcode.is_some())
            .raw("wr_id", self.wr_id);
        let line = match self.opcode {
            Some(opcode) => line
                .raw("opcode", names::operation(opcode))
                .raw("bytes", self.bytes)
                .raw("signaled", signals_all || self.flags & SIGNALED != 0)
                .raw("inline", self.is_inline)
                .raw("flags", self.flags),
            None => line.raw("bytes", self.bytes),
        };
        let elements = self.elements.iter().map(|it| {
            let element = Object::new().raw("address", it.address);
            element.raw("length", it.length).raw("lkey", it.lkey).end()
        });
        let mut line = line.list("sges", elements);
        if let Some((address, rkey)) = self.remote {
            let remote = Object::new().raw("address", address).raw("rkey", rkey);
            line = line.raw("remote", remote.end());
        }
        if let Some((number, key)) = self.datagram {
            let to = Object::new().raw("qp", number).raw("qkey", key);
            line = line.raw("datagram", to.end());
        }
        if let Some(key) = self.key {
            line = line.raw("key", key);
        }
        line.raw("errno", errno).end()
    }
}

/// Reads a list of sends, but not more than any queue takes: a list may lead back to its
/// beginning.
///
/// # Safety
/// A list of sends to a queue pair; of datagrams if `is_datagram`.
unsafe fn read_sends(list: *mut c_void, is_datagram: bool) -> Vec<Post> {
    let mut posts = Vec::new();
    let (mut next, time) = (list.cast::<SendWr>(), now());
    while !next.is_null() && posts.len() <= LONGEST_QUEUE {
        // SAFETY: an element of the list. What only some operations have is within the
        // structure.
        let wr = unsafe { next.read() };
        next = wr.next;
        let mut post = Post {
            time,
            wr_id: wr.wr_id,
            opcode: Some(wr.opcode),
            flags: wr.send_flags,
            is_inline: wr.send_flags & INLINE != 0,
            remote: match wr.opcode {
                0 | 1 | 4 => Some((wr.remote_address, wr.remote_key)),
                // Behind the operands.
                5 | 6 => Some((wr.remote_address, wr.rest_of_remote[3])),
                _ => None,
            },
            datagram: is_datagram.then_some((wr.remote_key, wr.rest_of_remote[0])),
            key: matches!(wr.opcode, INVALIDATE | SEND_WITH_INV).then_some(wr.immediate),
            ..Post::default()
        };
        // SAFETY: guaranteed by the caller.
        post.add(unsafe { elements(wr.sg_list, wr.num_sge) });
        posts.push(post);
    }
    posts
}

/// As above, of receives.
///
/// # Safety
/// A list of receives.
unsafe fn read_receives(list: *mut c_void) -> Vec<Post> {
    let mut posts = Vec::new();
    let (mut next, time) = (list.cast::<RecvWr>(), now());
    while !next.is_null() && posts.len() <= LONGEST_QUEUE {
        // SAFETY: an element of the list.
        let wr = unsafe { &*next };
        next = wr.next;
        let mut post = Post {
            time,
            wr_id: wr.wr_id,
            ..Post::default()
        };
        // SAFETY: guaranteed by the caller.
        post.add(unsafe { elements(wr.sg_list, wr.num_sge) });
        posts.push(post);
    }
    posts
}

/// Returns the elements of a work request.
///
/// # Safety
/// The list must have `count` elements.
unsafe fn elements<'a>(list: *const Sge, count: c_int) -> &'a [Sge] {
    match usize::try_from(count) {
        // SAFETY: guaranteed by the caller.
        Ok(count) if !list.is_null() => unsafe { std::slice::from_raw_parts(list, count) },
        _ => &[],
    }
}

/// Records posts that a provider has taken, or refused with this error number from `refused` on.
fn posted(
    recorder: &Recorder,
    queue: (&str, u32, RawFd),
    posts: &[Post],
    (errno, accepted): (c_int, usize),
) {
    let _scope = internal::enter();
    let signals_all = lock(&recorder.objects).signals_all(queue.2, queue.1);
    let lines: Vec<String> = (posts.iter().take(accepted))
        .map(|post| post.line(queue, signals_all, 0))
        .chain(
            (posts.get(accepted).filter(|_| errno != 0))
                .map(|post| post.line(queue, signals_all, errno.abs())),
        )
        .collect();
    recorder.append(&lines, errno != 0);
}

/// Returns the number of work requests of a list before one of them.
///
/// # Safety
/// A list whose elements begin with their `wr_id` and the address of the next one.
unsafe fn position(list: *mut c_void, end: *mut c_void, most: usize) -> usize {
    let mut next = list;
    for number in 0..most {
        if next == end || next.is_null() {
            return number;
        }
        // SAFETY: an element of the list.
        next = unsafe { (*next.cast::<RecvWr>()).next.cast() };
    }
    most
}

/// Posts a list, and records it. Returns what the provider has returned.
///
/// # Safety
/// As for `ibv_post_send`, and the other functions that post, of a provider.
unsafe fn post(
    provider: *mut c_void,
    queue: *mut c_void,
    list: *mut c_void,
    bad: *mut c_void,
    read: impl FnOnce() -> ((&'static str, u32, RawFd), Vec<Post>),
) -> c_int {
    // SAFETY: the address of a provider's function of this type, stored before its hook was put
    // into a table.
    let provider: PostFunction = unsafe { std::mem::transmute(provider) };
    let recorded = current().map(|recorder| {
        // A signal handler that interrupts this does not wait for its locks.
        let _scope = internal::enter();
        (recorder, read())
    });
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue.cast(), list, bad) };
    if let Some((recorder, (queue, posts))) = recorded {
        let accepted = match result {
            0 => posts.len(),
            // SAFETY: the provider has set it to the first work request that it refused.
            _ => unsafe { position(list, *bad.cast(), posts.len()) },
        };
        posted(recorder, queue, &posts, (result, accepted));
    }
    result
}

/// Returns how a queue pair is named that is posted to.
///
/// # Safety
/// The queue pair must exist, and its context must be open.
unsafe fn name_of(queue_pair: *mut IbvQp) -> (&'static str, u32, RawFd) {
    // SAFETY: guaranteed by the caller.
    let queue_pair = unsafe { &*queue_pair };
    // SAFETY: as above.
    let fd = unsafe { (*queue_pair.context).command_fd };
    if let Some(recorder) = current() {
        let _scope = internal::enter();
        device::note_hooked(recorder, fd, queue_pair.number);
    }
    ("qp", queue_pair.number, fd)
}

unsafe extern "C" fn post_send<const N: usize>(
    queue_pair: *mut IbvQp,
    list: *mut c_void,
    bad: *mut c_void,
) -> c_int {
    const UD: c_int = 4;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let read = || {
            let sends = read_sends(list, (*queue_pair).kind == UD);
            (name_of(queue_pair), sends)
        };
        post(SENDS.function(N), queue_pair.cast(), list, bad, read)
    }
}

unsafe extern "C" fn post_receive<const N: usize>(
    queue_pair: *mut IbvQp,
    list: *mut c_void,
    bad: *mut c_void,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let read = || (name_of(queue_pair), read_receives(list));
        post(RECEIVES.function(N), queue_pair.cast(), list, bad, read)
    }
}

unsafe extern "C" fn post_shared_receive<const N: usize>(
    queue: *mut c_void,
    list: *mut c_void,
    bad: *mut c_void,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let read = || {
            let (handle, fd) = hooks::shared_queue(queue.cast::<SharedQueue>());
            (("srq", handle, fd), read_receives(list))
        };
        post(SHARED_RECEIVES.function(N), queue, list, bad, read)
    }
}

/// `ibv_bind_mw`, whose provider posts a work request itself.
unsafe extern "C" fn bind_window<const N: usize>(
    queue_pair: *mut IbvQp,
    window: *mut c_void,
    binding: *mut c_void,
) -> c_int {
    // SAFETY: as in `post`.
    let provider: PostFunction = unsafe { std::mem::transmute(BINDINGS.function(N)) };
    // SAFETY: guaranteed by the caller. The structure begins with the `wr_id` and the flags.
    let (wr_id, flags) = unsafe { (*binding.cast::<u64>(), *binding.cast::<u32>().add(2)) };
    let bind = Post {
        time: now(),
        wr_id,
        opcode: Some(BIND),
        flags,
        ..Post::default()
    };
    // SAFETY: guaranteed by the caller.
    let queue = unsafe { name_of(queue_pair) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue_pair, window, binding) };
    if let Some(recorder) = current() {
        let accepted = usize::from(result == 0);
        posted(recorder, queue, &[bind], (result, accepted));
    }
    result
}

thread_local! {
    /// Work requests that this thread builds, by queue pair.
    static BUILT: RefCell<Vec<(usize, Vec<Post>)>> = const { RefCell::new(Vec::new()) };
}

/// Changes what this thread builds on a queue pair. Not in signal handlers, nor in a thread that
/// is ending.
fn with_built(queue_pair: *mut IbvQp, change: impl FnOnce(&mut Vec<Post>)) {
    if current().is_none() {
        return;
    }
    let _scope = internal::enter();
    let _ = BUILT.try_with(|built| {
        let Ok(mut built) = built.try_borrow_mut() else {
            return;
        };
        let address = queue_pair.addr();
        let at = built.iter().position(|(of, _)| *of == address);
        let at = at.unwrap_or_else(|| {
            built.push((address, Vec::new()));
            built.len() - 1
        });
        change(&mut built[at].1);
    });
}

/// Ends what this thread builds on a queue pair.
fn take_built(queue_pair: *mut IbvQp) -> Vec<Post> {
    let mut posts = Vec::new();
    let _ = BUILT.try_with(|built| {
        if let Ok(mut built) = built.try_borrow_mut() {
            let address = queue_pair.addr();
            if let Some(at) = built.iter().position(|(of, _)| *of == address) {
                posts = built.swap_remove(at).1;
            }
        }
    });
    posts
}

unsafe extern "C" fn build<const BUILDER: usize, const N: usize>(
    queue_pair: *mut IbvQp,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
) {
    type Build = unsafe extern "C" fn(*mut IbvQp, usize, usize, usize, usize);
    // The functions have fewer arguments: the others are what registers contain.
    // SAFETY: as in `post`. More arguments in registers are ignored.
    let provider: Build = unsafe { std::mem::transmute(BUILDS[BUILDER].function(N)) };
    let opcode = BUILDERS[BUILDER];
    with_built(queue_pair, |built| {
        // SAFETY: the program passes a queue pair, which has an extension.
        let (wr_id, flags) = unsafe {
            let extension = extension(queue_pair);
            ((*extension).wr_id, (*extension).wr_flags)
        };
        let has_remote = matches!(opcode, 0 | 1 | 4 | 5 | 6);
        let has_key = matches!(opcode, INVALIDATE | SEND_WITH_INV);
        built.push(Post {
            time: now(),
            wr_id,
            opcode: Some(opcode),
            flags,
            remote: has_remote.then_some((b as u64, a as u32)),
            key: has_key.then_some(a as u32),
            ..Post::default()
        });
    });
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue_pair, a, b, c, d) }
}

/// Declares hooks of functions that add something to the last work request.
macro_rules! setters {
    ($($list:ident, $name:ident($($argument:ident: $type:ty),*) $set:expr;)*) => {$(
        unsafe extern "C" fn $name<const N: usize>(queue_pair: *mut IbvQp, $($argument: $type),*) {
            type Set = unsafe extern "C" fn(*mut IbvQp, $($type),*);
            // SAFETY: as in `post`.
            let provider: Set = unsafe { std::mem::transmute($list.function(N)) };
            with_built(queue_pair, |built| {
                let set: fn(&mut Post, $($type),*) = $set;
                built.last_mut().into_iter().for_each(|post| set(post, $($argument),*));
            });
            // SAFETY: guaranteed by the caller.
            unsafe { provider(queue_pair, $($argument),*) }
        }
    )*};
}

/// `struct ibv_data_buf`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DataBuffer {
    address: u64,
    length: usize,
}

impl Post {
    fn add_inline(&mut self, address: u64, length: usize) {
        self.is_inline = true;
        self.add(&[Sge {
            address,
            length: length as u32,
            lkey: 0,
        }]);
    }
}

setters! {
    ELEMENTS, set_sge(lkey: u32, address: u64, length: u32) |post, lkey, address, length| {
        post.add(&[Sge { address, length, lkey }]);
    };
    LISTS, set_sge_list(count: usize, list: *const Sge) |post, count, list| {
        // SAFETY: guaranteed by the caller.
        post.add(unsafe { elements(list, count as c_int) });
    };
    ADDRESSES, set_ud_addr(address: *mut c_void, number: u32, key: u32) |post, _, number, key| {
        post.datagram = Some((number, key));
    };
    INLINE_DATA, set_inline_data(address: *mut c_void, length: usize) |post, address, length| {
        post.add_inline(address.addr() as u64, length);
    };
    INLINE_LISTS, set_inline_data_list(count: usize, list: *const DataBuffer) |post, count, list| {
        if list.is_null() {
            return;
        }
        // SAFETY: the program passes so many.
        let list = unsafe { std::slice::from_raw_parts(list, count) };
        list.iter().for_each(|it| post.add_inline(it.address, it.length));
    };
}

unsafe extern "C" fn start<const N: usize>(queue_pair: *mut IbvQp) {
    // SAFETY: as in `post`.
    let provider: unsafe extern "C" fn(*mut IbvQp) =
        unsafe { std::mem::transmute(STARTS.function(N)) };
    // SAFETY: guaranteed by the caller. The provider's lock is held when it returns.
    unsafe { provider(queue_pair) };
    // SAFETY: the queue pair has an extension, whose functions are only read meanwhile.
    unsafe { hook_complete(queue_pair) };
    // SAFETY: guaranteed by the caller. Before the device has what is built.
    unsafe { name_of(queue_pair) };
    with_built(queue_pair, Vec::clear);
}

unsafe extern "C" fn complete<const N: usize>(queue_pair: *mut IbvQp) -> c_int {
    // SAFETY: as in `post`.
    let provider: CompleteFunction = unsafe { std::mem::transmute(COMPLETES.function(N)) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue_pair) };
    if let Some(recorder) = current() {
        let posts = take_built(queue_pair);
        // All are refused, or none.
        let accepted = if result == 0 { posts.len() } else { 0 };
        // SAFETY: guaranteed by the caller.
        let queue = unsafe { name_of(queue_pair) };
        posted(recorder, queue, &posts, (result, accepted));
    }
    result
}

unsafe extern "C" fn abort<const N: usize>(queue_pair: *mut IbvQp) {
    // SAFETY: as in `post`.
    let provider: unsafe extern "C" fn(*mut IbvQp) =
        unsafe { std::mem::transmute(ABORTS.function(N)) };
    take_built(queue_pair);
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue_pair) }
}
