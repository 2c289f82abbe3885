//! Tests for RDMA programs, in CI or on a laptop: a network of software HCAs in the
//! process, without root, kernel module or hardware.
//!
//! A [`Fabric`] has any number of devices ([`Node`]), which open as ordinary
//! [`ringverbs::Device`]s. Its time is simulated: it passes only when nothing else can
//! happen, so a retransmission after half a second takes microseconds. The code
//! under test needs no changes; whatever waits for a completion runs the fabric.
//!
//! ```
//! use std::time::Duration;
//! use ringverbs::Transport;
//! use ringverbs_testkit::{Fabric, connect};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let fabric = Fabric::roce(2)?;
//! let (a, b) = (fabric.node(0).open()?, fabric.node(1).open()?);
//! let (domain_a, domain_b) = (a.alloc_pd()?, b.alloc_pd()?);
//! let mut cq_a = a.completion_queue().build()?;
//! let mut cq_b = b.completion_queue().build()?;
//! let mut qp_a = domain_a.queue_pair(Transport::Reliable, &cq_a).build()?;
//! let mut qp_b = domain_b.queue_pair(Transport::Reliable, &cq_b).build()?;
//! connect(&mut qp_a, &mut qp_b)?;
//!
//! // The first packet is lost, and sent again after a time-out.
//! let fault = fabric.frames().from(fabric.node(0)).nth(1).lose();
//! qp_b.receive(domain_b.alloc(64)?.into_buffer(), 1)?;
//! qp_a.send(domain_a.alloc(64)?.into_buffer(), 2)?;
//! assert!(cq_a.poll_until_one()?.result.is_ok());
//! assert!(cq_b.poll_until_one()?.result.is_ok());
//! assert_eq!(fault.hits(), 1);
//! assert!(fabric.now() > Duration::from_millis(60));
//!
//! drop((qp_a, qp_b, cq_a, cq_b, domain_a, domain_b));
//! fabric.assert_no_leaks();
//! # Ok(()) }
//! ```
//!
//! # Faults
//!
//! [`Fabric::frames`] selects frames by sender, receiver, kind and position, for loss, delay,
//! reordering, duplication or corruption.
//! [`Node`] has the faults of a device: the link goes down, a queue pair or the device
//! fails, the host disappears, the receiver is slow; and those of a text, [`Node::inject`].
//! [`Builder::record_faults`] records what happens by chance, as a text that repeats it.
//!
//! # Errors that no device reports
//!
//! A test on a fabric with [`Builder::check`] fails if the program makes some of those that
//! `ringverbs check` finds: RDMA writes that nothing orders, completion queues that are too small.
//!
//! # Determinism
//!
//! Fabrics are independent: tests run in parallel. If one thread uses a fabric, the
//! same calls have the same results with the same seed, up to the bytes of each
//! frame; except that RDMA requests carry virtual addresses, which differ from run to
//! run ([`Capture::without_addresses`]). Several threads may use a fabric of
//! [`Builder::threads`]; its clock moves after a millisecond of real time without
//! activity.
//!
//! # Waiting
//!
//! | the test waits by | what runs the fabric |
//! |---|---|
//! | [`poll`](ringverbs::CompletionQueue::poll), `poll_for`, `poll_until_one`, completion channels, asynchronous events, events of connections | these calls |
//! | `ringverbs::future`, any executor | [`Fabric::run_until`] |
//! | readers with a wait object, streams, `poll(2)` on a descriptor | a thread: [`Builder::background`] |
//! | nothing, or a loop of its own | [`Fabric::step`], [`Fabric::advance`] |
//!
//! Time-outs of `poll_for`, of completion channels and of connecting by address are in simulated
//! time; those of readers and of streams in real time.
//!
//! `docs/testkit.md` has recipes.

mod capture;
mod fabric;
mod faults;
mod leaks;
mod node;
mod record;
mod tap;

pub use embedded::softhca::fault::ParseError;
pub use embedded::{CheckRule, ProgramError};

pub use capture::{Capture, CmMessage, Delivery, Frame, Kind, Packet};
pub use fabric::{Builder, Fabric, Link};
pub use faults::{Fault, Frames};
pub use leaks::Leak;
pub use node::Node;

use ringverbs::{Completion, Context, QueuePair, Result};

/// Fails the test if a completion is that of a failed operation, with why it has failed: also
/// what the other end has found, if that is a device of the same fabric. `context` is that of the
/// queue pair.
///
/// ```
/// # use ringverbs::Transport;
/// # use ringverbs_testkit::{Fabric, assert_success, connect};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fabric = Fabric::roce(2)?;
/// # let (a, b) = (fabric.node(0).open()?, fabric.node(1).open()?);
/// # let (domain_a, domain_b) = (a.alloc_pd()?, b.alloc_pd()?);
/// # let mut queue = a.completion_queue().build()?;
/// # let other = b.completion_queue().build()?;
/// # let mut qp_a = domain_a.queue_pair(Transport::Reliable, &queue).build()?;
/// # let mut qp_b = domain_b.queue_pair(Transport::Reliable, &other).build()?;
/// # connect(&mut qp_a, &mut qp_b)?;
/// # qp_b.receive(domain_b.alloc(64)?.into_buffer(), 1)?;
/// # qp_a.send(domain_a.alloc(64)?.into_buffer(), 2)?;
/// assert_success(&a, &queue.poll_until_one()?);
/// # Ok(()) }
/// ```
///
/// # Panics
/// If the operation has failed.
#[track_caller]
pub fn assert_success(context: &Context, completion: &Completion) {
    let Err(failure) = completion.result else {
        return;
    };
    let operation = completion.operation;
    match completion.explanation(context) {
        Some(reason) => panic!("{operation:?}: {failure}: {reason}"),
        None => panic!("{operation:?}: {failure}"),
    }
}

/// Connects two queue pairs to each other, by port 1 of their devices.
///
/// # Errors
/// As [`QueuePair::connect`].
pub fn connect(a: &mut QueuePair, b: &mut QueuePair) -> Result<()> {
    let at_a = a.context().local_address(1)?;
    let at_b = b.context().local_address(1)?;
    let (to_a, to_b) = (a.endpoint(&at_a), b.endpoint(&at_b));
    a.connect(&at_a, &to_b)?;
    b.connect(&at_b, &to_a)
}

/// Compiles and runs the recipes as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/testkit.md")]
mod recipes {}
