//! Hooks in the functions by which programs post work requests, with `--explain` only.
//!
//! Each post is noted ([`Post`]) before the provider has it, since the device may report it at
//! once. Of a refused one, or a list of which some are refused, the rest is taken back.
//! Functions that return to the program by a jump pass the address that they were called from,
//! which code of Rust cannot read.
//!
//! Posts in signal handlers are counted, but not noted: a handler may interrupt whoever holds a
//! lock, or allocates.
//!
//! Posts by other functions (of mlx5dv), or written to the queues directly, are not seen: the
//! numbers of the device and of this process differ then, and the work request is not known.

use std::arch::global_asm;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::check::{
    self, BindInfo, Binding, Checker, CompletionQueue, IbvMw, Posted, Received, Sent, Sge,
};
use crate::explain::{Explainer, Objects, Origin, Post, QueuePair, lock, thread};
use crate::hooks::{self, Context, Hooked, SharedQueue, hooked};
use crate::{internal, process, promises, record, table};

/// Indices in `struct ibv_context_ops`.
const BIND_MW: usize = 8;
pub(crate) const POST_SRQ_RECV: usize = 20;
pub(crate) const POST_SEND: usize = 25;
pub(crate) const POST_RECV: usize = 26;

/// The part of `struct ibv_qp` before its mutex.
#[repr(C)]
pub(crate) struct IbvQp {
    pub(crate) context: *mut Context,
    program: *mut c_void,
    domain: *mut c_void,
    queues: [*mut c_void; 3],
    handle: u32,
    pub(crate) number: u32,
    state: c_int,
    pub(crate) kind: c_int,
}

const _: () = assert!(offset_of!(IbvQp, number) == 52);
const _: () = assert!(size_of::<IbvQp>() == 64);

/// `struct ibv_qp_ex` after its `ibv_qp`, up to `wr_abort`.
#[repr(C)]
pub(crate) struct Extension {
    comp_mask: u64,
    pub(crate) wr_id: u64,
    pub(crate) wr_flags: u32,
    pub(crate) functions: [*mut c_void; FUNCTIONS],
}

/// Offset of the number of acknowledged events in `struct ibv_qp`.
pub(crate) const EVENTS_OF_QUEUE_PAIR: usize =
    size_of::<IbvQp>() + size_of::<libc::pthread_mutex_t>() + size_of::<libc::pthread_cond_t>();

/// Offset of [`Extension`] in `struct ibv_qp_ex`: the size of `struct ibv_qp`.
const EXTENSION: usize = (EVENTS_OF_QUEUE_PAIR + size_of::<u32>()).next_multiple_of(8);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(EXTENSION == 160);

/// Number of the functions of a builder, and indices among them.
const FUNCTIONS: usize = 20;
pub(crate) const WR_SET_SGE: usize = 15;
pub(crate) const WR_SET_SGE_LIST: usize = 16;
pub(crate) const WR_START: usize = 17;
pub(crate) const WR_COMPLETE: usize = 18;
pub(crate) const WR_ABORT: usize = 19;

/// `enum ibv_wr_opcode` of the first functions of a builder, in their order.
pub(crate) const BUILDERS: [u32; 11] = [5, 6, BIND, 7, 4, 0, 1, 2, 3, 9, 10];
pub(crate) const BIND: u32 = 8;
pub(crate) const INVALIDATE: u32 = 7;

/// The beginning of `struct ibv_send_wr`, up to the remote address.
#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: u32,
    pub(crate) send_flags: u32,
    /// Also a key to be invalidated.
    pub(crate) immediate: u32,
    pub(crate) remote_address: u64,
    /// Of an RDMA write or read, with other data after it.
    pub(crate) remote_key: u32,
    pub(crate) rest_of_remote: [u32; 7],
    window: *const IbvMw,
    window_key: u32,
    binding: BindInfo,
}

const _: () = assert!(size_of::<SendWr>() == 128);

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
}

pub(crate) const INLINE: u32 = 1 << 3;

/// At least `max_qp_wr` and `max_srq_wr` of the devices.
pub(crate) const LONGEST_QUEUE: usize = 32768;

pub(crate) type PostFunction = unsafe extern "C" fn(*mut IbvQp, *mut c_void, *mut c_void) -> c_int;
type SharedPostFunction = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> c_int;
type BuildFunction = unsafe extern "C" fn(*mut IbvQp, usize, usize, usize, usize);
pub(crate) type CompleteFunction = unsafe extern "C" fn(*mut IbvQp) -> c_int;

/// Declares functions that add the address of their caller to the arguments of a function, and
/// jump to it: as the last argument in the register `$x86` or `$arm`.
macro_rules! with_caller {
    ($name:expr, $function:expr, $x86:literal, $arm:literal) => {
        #[cfg(target_arch = "x86_64")]
        global_asm!(
            ".p2align 4",
            concat!(".globl ", $name, "\n.hidden ", $name),
            concat!(".type ", $name, ", @function\n", $name, ":"),
            concat!("mov ", $x86, ", [rsp]"),
            "jmp {function}",
            function = sym $function,
        );
        #[cfg(target_arch = "aarch64")]
        global_asm!(
            ".p2align 4",
            concat!(".globl ", $name, "\n.hidden ", $name),
            concat!(".type ", $name, ", %function\n", $name, ":"),
            concat!("mov ", $arm, ", x30"),
            "b {function}",
            function = sym $function,
        );
    };
}

/// The address of a function of [`with_caller`].
macro_rules! entry_of {
    ($name:expr) => {{
        unsafe extern "C" {
            #[link_name = $name]
            fn entry();
        }
        entry as *const ()
    }};
}

/// Hooks that know their caller, for functions of three arguments.
macro_rules! post_hooks {
    ($list:ident, $hook:ident, $name:literal) => {
        post_hooks!($list, $hook, $name: 0 1 2 3 4 5 6 7);
    };
    ($list:ident, $hook:ident, $name:literal: $($number:literal)*) => {
        $(with_caller!(
            concat!("ringverbs_", $name, "_", $number), $hook::<$number>, "rcx", "x3"
        );)*
        static $list: Hooked<VARIANTS> =
            Hooked::new([$(entry_of!(concat!("ringverbs_", $name, "_", $number))),*]);
    };
}

/// As above, for the functions of builders, which have up to five arguments.
macro_rules! build_hooks {
    ($list:ident: $($builder:literal)*) => {
        $(build_hooks!(@declare $builder: 0 1 2 3 4 5 6 7);)*
        static $list: [Hooked<VARIANTS>; BUILDERS.len()] =
            [$(build_hooks!(@list $builder: 0 1 2 3 4 5 6 7)),*];
    };
    (@declare $builder:literal: $($number:literal)*) => {
        $(with_caller!(
            concat!("ringverbs_build_", $builder, "_", $number),
            build::<$builder, $number>, "r9", "x5"
        );)*
    };
    (@list $builder:literal: $($number:literal)*) => {
        Hooked::new([$(entry_of!(concat!("ringverbs_build_", $builder, "_", $number))),*])
    };
}

/// Maximum number of functions of providers of one kind.
pub(crate) const VARIANTS: usize = 8;

post_hooks!(SENDS, post_send, "post_send");
post_hooks!(RECEIVES, post_receive, "post_receive");
post_hooks!(BINDINGS, bind_window, "bind_window");
post_hooks!(SHARED_RECEIVES, post_shared_receive, "post_shared_receive");
build_hooks!(BUILDS: 0 1 2 3 4 5 6 7 8 9 10);
static ELEMENTS: Hooked<VARIANTS> = hooked!(set_sge: 0 1 2 3 4 5 6 7);
static LISTS: Hooked<VARIANTS> = hooked!(set_sge_list: 0 1 2 3 4 5 6 7);
static STARTS: Hooked<VARIANTS> = hooked!(start: 0 1 2 3 4 5 6 7);
static COMPLETES: Hooked<VARIANTS> = hooked!(complete: 0 1 2 3 4 5 6 7);
static ABORTS: Hooked<VARIANTS> = hooked!(abort: 0 1 2 3 4 5 6 7);

/// Entries of a context's table that are hooked.
pub(crate) static CONTEXT_HOOKS: [(usize, &Hooked<VARIANTS>); 4] = [
    (POST_SEND, &SENDS),
    (POST_RECV, &RECEIVES),
    (BIND_MW, &BINDINGS),
    (POST_SRQ_RECV, &SHARED_RECEIVES),
];

/// Returns the provider's function of a context's table, given what is called instead.
pub(crate) fn provider_of_context(index: usize, function: *mut c_void) -> *mut c_void {
    let found = CONTEXT_HOOKS.iter().find(|(of, _)| *of == index);
    let function = found.map_or(function, |(_, hooked)| hooked.provider_of(function));
    record::provider_of_post(index, function)
}

/// The hooks of a queue pair with builders, without the builders themselves.
static BUILDER_HOOKS: [(usize, &Hooked<VARIANTS>); 5] = [
    (WR_SET_SGE, &ELEMENTS),
    (WR_SET_SGE_LIST, &LISTS),
    (WR_START, &STARTS),
    (WR_COMPLETE, &COMPLETES),
    (WR_ABORT, &ABORTS),
];

/// As [`provider_of_context`], of a builder.
pub(crate) fn provider_of_builder(index: usize, function: *mut c_void) -> *mut c_void {
    let of_others = || BUILDER_HOOKS.iter().find(|(of, _)| *of == index);
    let hooked = BUILDS.get(index).or_else(|| of_others().map(|it| it.1));
    let function = hooked.map_or(function, |hooked| hooked.provider_of(function));
    record::provider_of_builder(index, function)
}

/// Indices in the queues of an [`IbvQp`].
const SENDS_OF: usize = 0;
const RECEIVES_OF: usize = 1;
const SHARED_QUEUE: usize = 2;

/// A queue pair that the program posts to, by device and number.
struct Posting {
    explainer: &'static Explainer,
    key: (usize, u32),
    queue_pair: Arc<QueuePair>,
    /// The completion queues of sends and receives, with their entries, if the program is
    /// checked.
    completions: [Option<(Arc<CompletionQueue>, u32)>; 2],
    has_own_receives: bool,
    /// The program has promised to use it by one thread at a time.
    is_promised: bool,
}

impl Posting {
    fn checked(&self, queue: usize) -> check::Posting<'_> {
        let completions = self.completions.get(queue).and_then(Option::as_ref);
        check::Posting {
            device: self.key.0,
            number: self.key.1,
            queue_pair: &self.queue_pair,
            completions: completions.map(|(queue, entries)| (queue, *entries)),
        }
    }

    /// Describes sends to the checker, before the provider has them.
    fn check(&self, checker: &Checker, sends: Vec<Sent>) -> Posted {
        let _scope = internal::enter();
        checker.posting(self.explainer, self.checked(SENDS_OF), sends)
    }

    /// As above, for receives.
    fn check_receives(&self, checker: &Checker, receives: Vec<Received>) -> Posted {
        if !self.has_own_receives {
            return Posted::default();
        }
        let _scope = internal::enter();
        checker.posting_receives(self.explainer, self.checked(RECEIVES_OF), receives)
    }

    /// Tells the checker that the provider has taken work requests of a queue.
    fn accepted(&self, checker: &Checker, queue: usize, posted: Posted) {
        checker.accepted(self.explainer, self.checked(queue), posted);
    }

    /// Handles a work request that the provider has refused. `sends` is the number of those that
    /// the checker follows from it on.
    fn refused(
        &self,
        sends: Option<(&Checker, usize)>,
        (what, result): (&'static str, c_int),
        post: &Post,
    ) {
        let (explainer, queue_pair, errno) = (self.explainer, &self.queue_pair, result.abs());
        if let Some((checker, count)) = sends {
            let refused = (count, errno);
            checker.refused(explainer, self.key, queue_pair, refused, &post.origin);
        }
        explainer.post_refused(self.key, queue_pair, (what, errno), post);
    }

    /// Tells the checker of a memory window that a work request changes.
    fn change(&self, checker: &Checker, change: &WindowChange, origin: &Origin) {
        match change {
            WindowChange::Binds(binding) => checker.bound(self.key, binding, origin),
            WindowChange::Invalidates(key) => checker.invalidated(self.key.0, *key),
        }
    }

    /// Notes that the order of sends is unknown.
    fn lose_order(&self) {
        self.queue_pair.lose_order();
        if let Some(checker) = &self.explainer.checker {
            checker.lose_order(&self.queue_pair);
        }
    }
}

/// A call of a queue pair without a lock, until it ends.
struct PromisedCall<'a> {
    posting: &'a Posting,
    sends: bool,
}

impl Posting {
    /// Notes a call that posts from a place.
    fn begin_call(&self, sends: bool, site: usize) -> Option<PromisedCall<'_>> {
        let in_use = &self.queue_pair.in_use[usize::from(sends)];
        let call = || self.explainer.objects.call_from(site);
        let begins = self.is_promised && in_use.begin(thread(), call);
        // Its end is noted only of a call that has begun.
        begins.then(|| PromisedCall {
            posting: self,
            sends,
        })
    }
}

impl Drop for PromisedCall<'_> {
    fn drop(&mut self) {
        let Posting {
            explainer,
            key: (device, number),
            ref queue_pair,
            ..
        } = *self.posting;
        let other = queue_pair.in_use[usize::from(self.sends)].end();
        if let Some((checker, other)) = explainer.checker.as_ref().zip(other) {
            let what = format!("queue pair {number:#x} of a thread domain");
            let function = if self.sends {
                "ibv_post_send"
            } else {
                "ibv_post_recv"
            };
            let queue_pair = Some((number, Arc::clone(queue_pair)));
            checker.two_callers(explainer, device, (what, function), queue_pair, other);
        }
    }
}

/// A queue pair that is posted to was destroyed.
struct Destroyed;

/// Returns the queue pair that the program posts to from a place; `None` if it is not known, or
/// in a signal handler, which may hold any lock: such posts are counted only.
///
/// # Errors
/// It was destroyed, which is reported if there is a place.
///
/// # Safety
/// The queue pair must exist, or its memory, and its context must be open.
unsafe fn posting_from(
    queue_pair: *mut IbvQp,
    site: Option<usize>,
) -> Result<Option<Posting>, Destroyed> {
    let Some(explainer) = process::explainer() else {
        return Ok(None);
    };
    if internal::is_in_handler() {
        let user_handle = queue_pair.expose_provenance() as u64;
        explainer.objects.note_unseen(user_handle);
        return Ok(None);
    }
    // A signal handler that interrupts this does not wait for its locks.
    let _scope = internal::enter();
    // SAFETY: guaranteed by the caller.
    let (fd, number, queues, domain) = unsafe {
        let queue_pair = &*queue_pair;
        let fd = (*queue_pair.context).command_fd;
        (fd, queue_pair.number, queue_pair.queues, queue_pair.domain)
    };
    let Some(device) = table::device_of(fd) else {
        return Ok(None);
    };
    let Some(queue_pair) = explainer.objects.queue_pair(device, number) else {
        return match explainer.post_to_destroyed(device, number, site) {
            true => Err(Destroyed),
            false => Ok(None),
        };
    };
    let completions = [queues[SENDS_OF], queues[RECEIVES_OF]].map(|queue| {
        if explainer.checker.is_none() || queue.is_null() {
            return None;
        }
        let known = explainer
            .objects
            .completion_queue(device, queue.addr() as u64)?;
        // SAFETY: a queue pair's completion queues exist as long as it.
        Some((known, unsafe { hooks::entries_of(queue) }))
    });
    Ok(Some(Posting {
        explainer,
        key: (device, number),
        queue_pair,
        completions,
        has_own_receives: queues[SHARED_QUEUE].is_null(),
        is_promised: promises::is_unlocked(domain),
    }))
}

/// As [`posting_from`], in a call after that of `ibv_wr_start`.
///
/// # Safety
/// As of that.
unsafe fn posting(queue_pair: *mut IbvQp) -> Result<Option<Posting>, Destroyed> {
    // SAFETY: guaranteed by the caller.
    unsafe { posting_from(queue_pair, None) }
}

/// Returns the address of the first buffer of a list.
///
/// # Safety
/// The list must have `count` elements.
unsafe fn first_buffer(list: *const Sge, count: c_int) -> Option<u64> {
    // SAFETY: guaranteed by the caller.
    (count > 0 && !list.is_null()).then(|| unsafe { (*list).address })
}

/// Notes the work requests of a list, from first to last, but not more than any queue takes: a
/// list may lead back to its beginning.
///
/// # Safety
/// A list of work requests, of sends if `sends`.
unsafe fn note_list(objects: &Objects, list: *mut c_void, sends: bool, site: usize) -> Vec<Post> {
    let origin = objects.call_from(site);
    let mut posts = Vec::new();
    let mut next = list;
    while !next.is_null() && posts.len() <= LONGEST_QUEUE {
        // SAFETY: an element of the list.
        let post = unsafe {
            if sends {
                let wr = next.cast::<SendWr>();
                next = (*wr).next.cast();
                let is_inline = (*wr).send_flags & INLINE != 0;
                let has_remote = matches!((*wr).opcode, 0 | 1 | 4);
                Post {
                    wr_id: (*wr).wr_id,
                    opcode: Some((*wr).opcode),
                    buffer: first_buffer((*wr).sg_list, (*wr).num_sge).filter(|_| !is_inline),
                    remote: has_remote.then(|| (*wr).remote_address),
                    origin: origin.clone(),
                }
            } else {
                let wr = next.cast::<RecvWr>();
                next = (*wr).next.cast();
                Post {
                    wr_id: (*wr).wr_id,
                    opcode: None,
                    buffer: first_buffer((*wr).sg_list, (*wr).num_sge),
                    remote: None,
                    origin: origin.clone(),
                }
            }
        };
        posts.push(post);
    }
    posts
}

/// Returns the elements of a list.
///
/// # Safety
/// The list must have `count` elements.
unsafe fn elements(list: *const Sge, count: usize) -> Vec<Sge> {
    match list.is_null() {
        true => Vec::new(),
        // SAFETY: guaranteed by the caller.
        false => unsafe { std::slice::from_raw_parts(list, count).to_vec() },
    }
}

/// Describes the sends of a list to the checker, given their posts.
///
/// # Safety
/// A list of sends.
unsafe fn sends_of(list: *mut c_void, posts: &[Post]) -> Vec<Sent> {
    let mut next = list.cast::<SendWr>();
    let sends = posts.iter().map(|post| {
        // SAFETY: as many elements as posts.
        let (flags, elements, key) = unsafe {
            let wr = next;
            next = (*wr).next;
            let count = usize::try_from((*wr).num_sge).unwrap_or_default();
            let key = post.remote.map(|_| (*wr).remote_key);
            ((*wr).send_flags, elements((*wr).sg_list, count), key)
        };
        let what = (post.opcode.unwrap_or_default(), flags);
        let mut sent =
            Sent::new(post.wr_id, what, post.origin.clone()).with_target(post.remote.zip(key));
        sent.add(elements);
        sent
    });
    sends.collect()
}

/// A change of a memory window by a work request.
enum WindowChange {
    Binds(Binding),
    /// Invalidates its key.
    Invalidates(u32),
}

impl WindowChange {
    /// Returns those of a list of sends, given their posts.
    ///
    /// # Safety
    /// A list of sends.
    unsafe fn of_list(list: *mut c_void, posts: &[Post]) -> Vec<(Self, &Post)> {
        let mut next = list.cast::<SendWr>();
        let changes = posts.iter().filter_map(|post| {
            // SAFETY: as many elements as posts. The structure ends before what other work
            // requests do not have.
            let (opcode, wr) = unsafe {
                let wr = next;
                next = (*wr).next;
                ((*wr).opcode, wr)
            };
            // SAFETY: guaranteed by the caller; the opcode tells which members there are.
            let change = unsafe {
                match opcode {
                    BIND => {
                        let key = Some((*wr).window_key);
                        Self::Binds(Binding::new((*wr).window, key, &(*wr).binding))
                    }
                    INVALIDATE => Self::Invalidates((*wr).immediate),
                    _ => return None,
                }
            };
            Some((change, post))
        });
        changes.collect()
    }
}

/// As above, for receives.
///
/// # Safety
/// A list of receives.
unsafe fn receives_of(list: *mut c_void, posts: &[Post]) -> Vec<Received> {
    let mut next = list.cast::<RecvWr>();
    let receives = posts.iter().map(|post| {
        // SAFETY: as many elements as posts.
        let elements = unsafe {
            let wr = &*next;
            next = wr.next;
            let count = usize::try_from(wr.num_sge).unwrap_or_default();
            elements(wr.sg_list, count)
        };
        Received::new(post.wr_id, elements, post.origin.clone())
    });
    receives.collect()
}

/// Returns the number of work requests of a list before the first one that was refused.
///
/// # Safety
/// A list of work requests, of sends if `sends`.
unsafe fn accepted_of(list: *mut c_void, refused: *mut c_void, sends: bool) -> usize {
    let mut accepted = 0;
    let mut next = list;
    while !next.is_null() && next != refused {
        accepted += 1;
        // SAFETY: an element of the list.
        next = unsafe {
            match sends {
                true => (*next.cast::<SendWr>()).next.cast(),
                false => (*next.cast::<RecvWr>()).next.cast(),
            }
        };
    }
    accepted
}

/// Posts a list, and returns what the provider has returned.
///
/// # Safety
/// As for `ibv_post_send`, or `ibv_post_recv` unless `sends`.
unsafe fn post(
    provider: *mut c_void,
    queue_pair: *mut IbvQp,
    list: *mut c_void,
    bad: *mut c_void,
    (sends, site): (bool, usize),
) -> c_int {
    // SAFETY: the address of a provider's function of this type, stored before its hook was
    // put into a table.
    let provider: PostFunction = unsafe { std::mem::transmute(provider) };
    // SAFETY: the program passes a queue pair.
    let posting = match unsafe { posting_from(queue_pair, Some(site)) } {
        Ok(Some(posting)) => posting,
        // SAFETY: guaranteed by the caller.
        Ok(None) => return unsafe { provider(queue_pair, list, bad) },
        Err(Destroyed) => {
            // SAFETY: the program passes where to store the refused work request.
            unsafe { *bad.cast::<*mut c_void>() = list };
            return libc::EINVAL;
        }
    };
    let known = &posting.queue_pair;
    if sends && known.builder.load(Ordering::Relaxed) != 0 {
        posting.lose_order();
    }
    let _call = posting.begin_call(sends, site);
    let (posts, order) = match sends {
        true => (&known.sends, &known.send_order),
        false => (&known.receives, &known.receive_order),
    };
    let _order = lock(order);
    // SAFETY: guaranteed by the caller.
    let noted = unsafe { note_list(&posting.explainer.objects, list, sends, site) };
    noted.iter().for_each(|post| lock(posts).push(post.clone()));
    let checker = posting.explainer.checker.as_ref();
    let wrong = noted
        .first()
        .filter(|_| !sends && !posting.has_own_receives);
    if let Some((checker, post)) = checker.zip(wrong) {
        checker.wrong_receive_queue(posting.explainer, posting.key, known, &post.origin);
    }
    let checked = checker.map(|checker| {
        if !sends {
            // SAFETY: guaranteed by the caller.
            let list = unsafe { receives_of(list, &noted) };
            return (checker, posting.check_receives(checker, list));
        }
        // SAFETY: guaranteed by the caller.
        let list = unsafe { sends_of(list, &noted) };
        (checker, posting.check(checker, list))
    });
    let bindings = (checker.filter(|_| sends))
        // SAFETY: guaranteed by the caller. The provider may free the list.
        .map(|checker| (checker, unsafe { WindowChange::of_list(list, &noted) }));
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue_pair, list, bad) };
    if let Some((checker, bindings)) = bindings.filter(|_| result == 0) {
        (bindings.iter()).for_each(|(change, post)| posting.change(checker, change, &post.origin));
    }
    if result != 0 {
        // SAFETY: the provider has set it to the first work request that it refused.
        let accepted = unsafe { accepted_of(list, *bad.cast::<*mut c_void>(), sends) };
        lock(posts).take_back(noted.len().saturating_sub(accepted));
        if let Some(post) = noted.get(accepted) {
            let rest = |(checker, posted): (_, Posted)| {
                let count = posted.count.saturating_sub(accepted);
                (checker, count)
            };
            let followed = checked.map(rest);
            if sends {
                posting.refused(followed, ("send", result), post);
            } else {
                if let Some((_, count)) = followed {
                    lock(&known.receives_in_flight).take_back(count);
                }
                posting.refused(None, ("receive", result), post);
            }
        }
    } else if let Some((checker, posted)) = checked {
        let queue = if sends { SENDS_OF } else { RECEIVES_OF };
        posting.accepted(checker, queue, posted);
    }
    result
}

unsafe extern "C" fn post_send<const N: usize>(
    queue_pair: *mut IbvQp,
    list: *mut c_void,
    bad: *mut c_void,
    site: usize,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { post(SENDS.function(N), queue_pair, list, bad, (true, site)) }
}

unsafe extern "C" fn post_receive<const N: usize>(
    queue_pair: *mut IbvQp,
    list: *mut c_void,
    bad: *mut c_void,
    site: usize,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { post(RECEIVES.function(N), queue_pair, list, bad, (false, site)) }
}

/// Returns the turn of those that post to a shared receive queue, so that the order is the
/// provider's.
fn shared_order(queue: *const SharedQueue) -> &'static Mutex<()> {
    static ORDERS: [Mutex<()>; 16] = [const { Mutex::new(()) }; 16];
    &ORDERS[(queue.addr() >> 6) % ORDERS.len()]
}

unsafe extern "C" fn post_shared_receive<const N: usize>(
    queue: *mut c_void,
    list: *mut c_void,
    bad: *mut c_void,
    site: usize,
) -> c_int {
    // SAFETY: as in `post`.
    let provider: SharedPostFunction = unsafe { std::mem::transmute(SHARED_RECEIVES.function(N)) };
    let shared = queue.cast::<SharedQueue>();
    // SAFETY: the program passes a queue.
    let found = unsafe { shared_posting(shared) };
    let Some((explainer, key)) = found else {
        // SAFETY: guaranteed by the caller.
        return unsafe { provider(queue, list, bad) };
    };
    let _scope = internal::enter();
    let checker = explainer.checker.as_ref();
    if checker.is_some_and(|it| explainer.post_to_destroyed_shared(it, key, site)) {
        // SAFETY: guaranteed by the caller.
        unsafe { *bad.cast::<*mut c_void>() = list };
        return libc::EINVAL;
    }
    let _order = lock(shared_order(shared));
    // SAFETY: guaranteed by the caller.
    let noted = unsafe { note_list(&explainer.objects, list, false, site) };
    let count = checker.map(|checker| {
        // SAFETY: as above.
        let receives = unsafe { receives_of(list, &noted) };
        checker.posting_shared(explainer, key, receives)
    });
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue, list, bad) };
    if result != 0 {
        // SAFETY: the provider has set it to the first work request that it refused.
        let accepted = unsafe { accepted_of(list, *bad.cast::<*mut c_void>(), false) };
        if let Some(count) = count {
            Checker::refused_shared(key, count.saturating_sub(accepted));
        }
        if let Some(post) = noted.get(accepted) {
            explainer.shared_post_refused(key, result, post);
        }
    } else if let (Some(_), Some(post)) = (count, noted.last()) {
        Checker::accepted_shared(key, post.origin.clone());
    }
    result
}

/// Returns the shared receive queue that the program posts to, by device and handle; `None` if it
/// is neither explained nor checked, or in a signal handler.
///
/// # Safety
/// The queue must exist, or its memory, and its context must be open.
unsafe fn shared_posting(queue: *const SharedQueue) -> Option<(&'static Explainer, (usize, u32))> {
    let explainer = process::explainer()?;
    if internal::is_in_handler() {
        return None;
    }
    let _scope = internal::enter();
    // SAFETY: guaranteed by the caller.
    let (handle, fd) = unsafe { hooks::shared_queue(queue) };
    Some((explainer, (table::device_of(fd)?, handle)))
}

/// `ibv_bind_mw`, whose provider posts a work request itself. The last argument begins with the
/// `wr_id`.
unsafe extern "C" fn bind_window<const N: usize>(
    queue_pair: *mut IbvQp,
    window: *mut c_void,
    binding: *mut c_void,
    site: usize,
) -> c_int {
    // SAFETY: as in `post`.
    let provider: PostFunction = unsafe { std::mem::transmute(BINDINGS.function(N)) };
    // SAFETY: the program passes a queue pair.
    let posting = match unsafe { posting_from(queue_pair, Some(site)) } {
        Ok(Some(posting)) => posting,
        // SAFETY: guaranteed by the caller.
        Ok(None) => return unsafe { provider(queue_pair, window, binding) },
        Err(Destroyed) => return libc::EINVAL,
    };
    let known = &posting.queue_pair;
    let _order = lock(&known.send_order);
    let post = Post {
        // SAFETY: guaranteed by the caller.
        wr_id: unsafe { *binding.cast::<u64>() },
        opcode: Some(BIND),
        buffer: None,
        remote: None,
        origin: posting.explainer.objects.call_from(site),
    };
    lock(&known.sends).push(post.clone());
    let checker = posting.explainer.checker.as_ref();
    let checked = checker.map(|checker| {
        // SAFETY: guaranteed by the caller. The flags follow the `wr_id`.
        let flags = unsafe { *binding.cast::<u32>().add(2) };
        let sent = Sent::new(post.wr_id, (BIND, flags), post.origin.clone());
        (checker, posting.check(checker, vec![sent]))
    });
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue_pair, window, binding) };
    if result != 0 {
        lock(&known.sends).take_back(1);
        let followed = checked.map(|(checker, posted)| (checker, posted.count));
        posting.refused(followed, ("memory window binding", result), &post);
    } else if let Some((checker, posted)) = checked {
        posting.accepted(checker, SENDS_OF, posted);
        // SAFETY: guaranteed by the caller. The information follows the `wr_id` and the flags.
        let binding = unsafe { Binding::new(window.cast(), None, &*binding.byte_add(16).cast()) };
        posting.change(checker, &WindowChange::Binds(binding), &post.origin);
    }
    result
}

/// Returns what follows the `ibv_qp` of a queue pair with builders.
pub(crate) fn extension(queue_pair: *mut IbvQp) -> *mut Extension {
    queue_pair.wrapping_byte_add(EXTENSION).cast()
}

unsafe extern "C" fn build<const BUILDER: usize, const N: usize>(
    queue_pair: *mut IbvQp,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    site: usize,
) {
    // The functions have fewer arguments: the others are what registers contain.
    // SAFETY: as in `post`. More arguments in registers are ignored.
    let provider: BuildFunction = unsafe { std::mem::transmute(BUILDS[BUILDER].function(N)) };
    // SAFETY: the program passes a queue pair, which has an extension.
    let (posting, wr_id, flags) = unsafe {
        let extension = extension(queue_pair);
        (
            posting(queue_pair),
            (*extension).wr_id,
            (*extension).wr_flags,
        )
    };
    let Ok(posting) = posting else { return };
    if let Some(posting) = posting {
        let opcode = BUILDERS[BUILDER];
        let has_remote = matches!(opcode, 0 | 1 | 4);
        let post = Post {
            wr_id,
            opcode: Some(opcode),
            buffer: None,
            remote: has_remote.then_some(b as u64),
            origin: posting.explainer.objects.call_from(site),
        };
        if let Some(checker) = &posting.explainer.checker {
            let builder = posting.queue_pair.builder.load(Ordering::Relaxed);
            if builder != thread() {
                let called = (post.origin.clone(), builder);
                checker.no_start(posting.explainer, posting.key, &posting.queue_pair, called);
            }
            let target = has_remote.then_some((b as u64, a as u32));
            let sent = Sent::new(wr_id, (opcode, flags), post.origin.clone()).with_target(target);
            lock(&posting.queue_pair.in_flight).build(sent);
            let change = match opcode {
                // SAFETY: guaranteed by the caller: a window, its key, and the information.
                BIND => Some(WindowChange::Binds(unsafe {
                    let info = ptr::with_exposed_provenance::<BindInfo>(c);
                    Binding::new(ptr::with_exposed_provenance(a), Some(b as u32), &*info)
                })),
                INVALIDATE => Some(WindowChange::Invalidates(a as u32)),
                _ => None,
            };
            change
                .iter()
                .for_each(|change| posting.change(checker, change, &post.origin));
        }
        lock(&posting.queue_pair.sends).push(post);
        *lock(&posting.queue_pair.built) += 1;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue_pair, a, b, c, d) }
}

unsafe extern "C" fn set_sge<const N: usize>(
    queue_pair: *mut IbvQp,
    lkey: u32,
    address: u64,
    length: u32,
) {
    // SAFETY: as in `post`.
    let provider: unsafe extern "C" fn(*mut IbvQp, u32, u64, u32) =
        unsafe { std::mem::transmute(ELEMENTS.function(N)) };
    // SAFETY: the program passes a queue pair.
    let Ok(posting) = (unsafe { posting(queue_pair) }) else {
        return;
    };
    if let Some(posting) = posting {
        let element = Sge {
            address,
            length,
            lkey,
        };
        lock(&posting.queue_pair.in_flight).add([element]);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue_pair, lkey, address, length) }
}

unsafe extern "C" fn set_sge_list<const N: usize>(
    queue_pair: *mut IbvQp,
    count: usize,
    list: *const Sge,
) {
    // SAFETY: as in `post`.
    let provider: unsafe extern "C" fn(*mut IbvQp, usize, *const Sge) =
        unsafe { std::mem::transmute(LISTS.function(N)) };
    // SAFETY: the program passes a queue pair.
    let Ok(posting) = (unsafe { posting(queue_pair) }) else {
        return;
    };
    if let Some(posting) = posting {
        // SAFETY: guaranteed by the caller.
        let elements = unsafe { elements(list, count) };
        lock(&posting.queue_pair.in_flight).add(elements);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue_pair, count, list) }
}

unsafe extern "C" fn start<const N: usize>(queue_pair: *mut IbvQp) {
    // SAFETY: as in `post`.
    let provider: unsafe extern "C" fn(*mut IbvQp) =
        unsafe { std::mem::transmute(STARTS.function(N)) };
    // SAFETY: the program passes a queue pair.
    let Ok(posting) = (unsafe { posting_from(queue_pair, Some(0)) }) else {
        return;
    };
    // SAFETY: guaranteed by the caller. The provider's lock is held when it returns.
    unsafe { provider(queue_pair) };
    // libmlx5 sets the function after the command that moves the queue pair to RTS.
    // SAFETY: the queue pair has an extension, whose functions are only read meanwhile.
    unsafe {
        let entry = &raw mut (*extension(queue_pair)).functions[WR_COMPLETE];
        COMPLETES.exchange(entry, *entry);
    }
    if let Some(posting) = posting {
        let known = &posting.queue_pair;
        let own = thread();
        let other = known.builder.swap(own, Ordering::Relaxed);
        let checker = posting.explainer.checker.as_ref();
        if let Some(checker) = checker.filter(|_| other != 0 && other != own) {
            // A lock would have kept this thread waiting.
            let _scope = internal::enter();
            checker.two_builders(posting.explainer, posting.key, known, other);
        }
        *lock(&posting.queue_pair.built) = 0;
        lock(&posting.queue_pair.in_flight).start();
    }
}

unsafe extern "C" fn complete<const N: usize>(queue_pair: *mut IbvQp) -> c_int {
    // SAFETY: as in `post`.
    let provider: CompleteFunction = unsafe { std::mem::transmute(COMPLETES.function(N)) };
    // SAFETY: the program passes a queue pair.
    let Ok(posting) = (unsafe { posting(queue_pair) }) else {
        return libc::EINVAL;
    };
    let built = posting.as_ref().map(|posting| {
        // While the provider's lock is held.
        posting.queue_pair.builder.store(0, Ordering::Relaxed);
        std::mem::take(&mut *lock(&posting.queue_pair.built))
    });
    let checked = posting.as_ref().and_then(|posting| {
        let checker = posting.explainer.checker.as_ref()?;
        let sends = lock(&posting.queue_pair.in_flight).take_built();
        Some((checker, posting.check(checker, sends)))
    });
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue_pair) };
    if let Some((posting, built)) = posting.as_ref().zip(built).filter(|_| result != 0) {
        let refused = lock(&posting.queue_pair.sends).take_back(built);
        if let Some((checker, _)) = &checked {
            checker.forget_windows(posting.key);
        }
        if let Some(post) = refused {
            let followed = checked.map(|(checker, posted)| (checker, posted.count));
            posting.refused(followed, ("send", result), &post);
        }
    } else if let Some((posting, (checker, posted))) = posting.as_ref().zip(checked) {
        posting.accepted(checker, SENDS_OF, posted);
    }
    result
}

unsafe extern "C" fn abort<const N: usize>(queue_pair: *mut IbvQp) {
    // SAFETY: as in `post`.
    let provider: unsafe extern "C" fn(*mut IbvQp) =
        unsafe { std::mem::transmute(ABORTS.function(N)) };
    // SAFETY: the program passes a queue pair.
    let Ok(posting) = (unsafe { posting(queue_pair) }) else {
        return;
    };
    if let Some(posting) = posting {
        let known = &posting.queue_pair;
        known.builder.store(0, Ordering::Relaxed);
        let built = std::mem::take(&mut *lock(&known.built));
        lock(&known.sends).take_back(built);
        lock(&known.in_flight).start();
        if let Some(checker) = &posting.explainer.checker {
            checker.forget_windows(posting.key);
        }
    }
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue_pair) }
}

/// Hooks the builders of a queue pair that a command has modified, if it has any. `address` is
/// its user handle.
pub(crate) fn hook_builders(fd: c_int, address: u64, number: u32) {
    let address = address as usize;
    if address == 0 || address % align_of::<IbvQp>() != 0 {
        return;
    }
    // A program that makes the system calls itself may have any user handle.
    let Some(found) = crate::hooks::read::<IbvQp>(address) else {
        return;
    };
    // SAFETY: all members may have any value.
    let found = unsafe { found.assume_init() };
    if found.number != number || !found.context.is_aligned() {
        return;
    }
    let Some(context) = crate::hooks::read::<Context>(found.context.expose_provenance()) else {
        return;
    };
    // SAFETY: all members may have any value.
    let context = unsafe { context.assume_init() };
    let Some(found) = crate::hooks::read::<Extension>(address + EXTENSION) else {
        return;
    };
    // SAFETY: all members may have any value.
    let functions = unsafe { found.assume_init() }.functions;
    let provider = provider_of_context(POST_SEND, context.operations[POST_SEND]);
    let file = |function| crate::hooks::file_of(function).map(|it| it.dli_fbase);
    let base = file(provider);
    let start = provider_of_builder(WR_START, functions[WR_START]);
    // What follows the queue pair may be something else.
    if context.command_fd != fd || start.is_null() || base.is_none() || file(start) != base {
        return;
    }
    let queue_pair = ptr::with_exposed_provenance_mut::<IbvQp>(address);
    if record::is_on() {
        // SAFETY: the queue pair has an extension. The program waits for the command, so that the
        // queue pair exists, and does not post.
        unsafe { record::hook_builders(queue_pair) };
    }
    if process::explainer().is_none() {
        return;
    }
    let hooks = BUILDS.iter().enumerate().chain(BUILDER_HOOKS);
    for (index, hooked) in hooks {
        // SAFETY: as above, within the queue pair.
        unsafe {
            let entry = &raw mut (*extension(queue_pair)).functions[index];
            hooked.exchange(entry, hooks::load(entry));
        }
    }
}
