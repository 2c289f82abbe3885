//! A network of devices, and its time.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use embedded::roce::fabric::Random;
use embedded::softhca::chaos::Chaos;
use embedded::softhca::fault::{Fault, Faults, ParseError};
use embedded::{Network, ProgramError};
use ringverbs::{Error, Result};

use crate::capture::Capture;
use crate::faults::Frames;
use crate::leaks::Leak;
use crate::node::Node;
use crate::record::{FaultRecord, RepeatedFault};
use crate::tap::{SharedWire, WireTap, lock};

/// The link layer of a fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// RoCE version 2 over Ethernet.
    #[default]
    Roce,
    /// InfiniBand, with a subnet manager.
    InfiniBand,
}

/// Builder of a [`Fabric`], from [`Fabric::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    link: Link,
    seed: u64,
    delay: Duration,
    strict: bool,
    threads: bool,
    background: bool,
    captures: bool,
    deny_leaks: bool,
    checks: bool,
    records_faults: bool,
    chaos: Option<u64>,
}

impl Builder {
    /// Sets the link layer; RoCE by default.
    pub fn link(mut self, link: Link) -> Self {
        self.link = link;
        self
    }

    /// Sets the seed of all random numbers: faults by [`Frames::chance`], and initial
    /// packet sequence numbers. 3 by default.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Lets the devices do what the specification allows and programs may not expect, as it
    /// follows from this seed: completions of several queues in any order, work requests that are
    /// read late, RNR NAKs. `docs/chaos.md` in the repository lists it.
    pub fn chaos(mut self, seed: u64) -> Self {
        self.chaos = Some(seed);
        self
    }

    /// Sets the transit time of every frame; a microsecond by default.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Makes strict devices: misuse that hardware may accept is an error.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Allows several threads to use the fabric. The clock moves after a millisecond of real
    /// time without activity (100 milliseconds before a timeout of the program), since a
    /// thread may be about to post; results depend on scheduling. Without this call, that
    /// mode begins when a second thread uses the fabric, possibly after a timeout of the
    /// first thread.
    pub fn threads(mut self) -> Self {
        self.threads = true;
        self
    }

    /// Starts a thread that runs the fabric, for code that waits for descriptors. Otherwise
    /// as [`threads`](Self::threads).
    pub fn background(mut self) -> Self {
        self.background = true;
        self
    }

    /// Disables [`Fabric::capture`], for long tests.
    pub fn without_capture(mut self) -> Self {
        self.captures = false;
        self
    }

    /// Dropping the fabric panics if something leaked, as
    /// [`Fabric::assert_no_leaks`]; so it must be dropped after all objects (declared
    /// before them).
    pub fn deny_leaks(mut self) -> Self {
        self.deny_leaks = true;
        self
    }

    /// Looks for errors of the program that no device reports, as far as devices see them: RDMA
    /// writes of two queue pairs to the same bytes that nothing orders, completion queues that are
    /// too small. `docs/check.md` in the repository explains them. Dropping the fabric panics if
    /// there are any but those that [`Fabric::take_errors`] has returned.
    ///
    /// ```
    /// # use ringverbs_testkit::Fabric;
    /// # fn main() -> ringverbs::Result<()> {
    /// let fabric = Fabric::builder().check().build(2)?;
    /// // A test; it fails if it has such an error.
    /// # Ok(()) }
    /// ```
    pub fn check(mut self) -> Self {
        self.checks = true;
        self
    }

    /// Records the faults that happen to frames and by texts ([`Frames`], [`Node::inject`]):
    /// [`Fabric::recorded_faults`] returns them.
    pub fn record_faults(mut self) -> Self {
        self.records_faults = true;
        self
    }

    /// Creates the fabric, with this number of nodes.
    ///
    /// # Errors
    /// ENOMEM, EMFILE; EAGAIN if the thread cannot be created.
    pub fn build(self, nodes: usize) -> Result<Fabric> {
        let network = Network::simulated(self.seed)?;
        if let Some(seed) = self.chaos {
            network.set_chaos(Chaos::new(seed));
        }
        let wire = SharedWire::default();
        {
            let mut wire = lock(&wire);
            wire.delay = u64::try_from(self.delay.as_nanos()).unwrap_or(u64::MAX);
            // Differs from the sequence that the network draws from the same seed.
            wire.random = Random::new(!self.seed);
            wire.seed = self.seed;
            wire.captures = self.captures;
        }
        let record = self.records_faults.then(FaultRecord::default);
        lock(&wire).record.clone_from(&record);
        let tap = WireTap(Arc::clone(&wire));
        network.fabric().set_tap(Some(Box::new(tap)));
        let profile = match self.link {
            Link::Roce => "roce",
            Link::InfiniBand => "ib",
        };
        let nodes = (0..nodes).map(|index| {
            let device = match self.strict {
                true => network.strict_device(profile)?,
                false => network.device(profile)?,
            };
            if let Some(record) = &record {
                device.record_faults(record.of_device(index));
            }
            Ok(Node::new(device, index, Arc::clone(&wire)))
        });
        let nodes = nodes.collect::<Result<_>>()?;
        let errors = self.checks.then(Errors::default);
        if let Some(errors) = errors.clone() {
            network.check(move |error| errors.all().push(error.clone()));
        }
        if self.threads || self.background {
            network.share_time();
        }
        let thread = match self.background {
            true => Some(Background::start(&network)?),
            false => None,
        };
        Ok(Fabric {
            nodes,
            network,
            wire,
            thread,
            deny_leaks: self.deny_leaks,
            errors,
        })
    }
}

/// A network of software HCAs in this process, in simulated time.
///
/// Objects of its devices may outlive it. Faults and captures end with it.
pub struct Fabric {
    nodes: Vec<Node>,
    network: Network,
    wire: SharedWire,
    thread: Option<Background>,
    deny_leaks: bool,
    /// Those that the devices have seen, if they look for them.
    errors: Option<Errors>,
}

/// Errors of the program.
#[derive(Clone, Default)]
struct Errors(Arc<Mutex<Vec<ProgramError>>>);

impl Errors {
    fn all(&self) -> MutexGuard<'_, Vec<ProgramError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fabric {
    /// Creates a fabric of RoCE devices.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn roce(nodes: usize) -> Result<Self> {
        Self::builder().build(nodes)
    }

    /// Creates a fabric of InfiniBand devices.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn infiniband(nodes: usize) -> Result<Self> {
        Self::builder().link(Link::InfiniBand).build(nodes)
    }

    /// Returns a builder.
    pub fn builder() -> Builder {
        Builder {
            link: Link::Roce,
            seed: 3,
            delay: Duration::from_micros(1),
            strict: false,
            threads: false,
            background: false,
            captures: true,
            deny_leaks: false,
            checks: false,
            records_faults: false,
            chaos: None,
        }
    }

    /// Returns a node.
    ///
    /// # Panics
    /// There is no such node.
    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Selects the frames for a fault: all, until narrowed.
    pub fn frames(&self) -> Frames {
        Frames::new(&self.wire)
    }

    /// Ends all faults of frames, also recorded ones that happen again. Those of nodes stay.
    pub fn heal(&self) {
        let mut wire = lock(&self.wire);
        wire.rules.clear();
        wire.repeated.clear();
    }

    /// Adds faults of the devices, one on each line, in the language of those of unmodified
    /// programs (`docs/faults.md`): `device=1` selects node 1. Matchers of programs are ignored.
    ///
    /// # Errors
    /// As [`Node::inject`].
    pub fn inject(&self, faults: &str) -> std::result::Result<(), ParseError> {
        let faults = Faults::parse(faults)?;
        for node in &self.nodes {
            let of_node = faults.of_device(node.index());
            let repeated = |fault: &Fault| RepeatedFault::of(fault, node.index());
            let of_frames = of_node.list().iter().filter_map(repeated);
            lock(&self.wire).repeated.extend(of_frames);
            node.add_faults(&of_node.retained(|fault| repeated(fault).is_none()));
        }
        Ok(())
    }

    /// Returns the faults of texts, also those of [`Node::inject`], and how often each has
    /// happened.
    pub fn injected(&self) -> Vec<(String, u64)> {
        let mut counts = Vec::from_iter(lock(&self.wire).repeated.iter().map(RepeatedFault::count));
        counts.extend(self.nodes.iter().flat_map(Node::injected));
        counts
    }

    /// Returns the faults that have happened so far on a fabric with
    /// [`record_faults`](Builder::record_faults), as a text for [`inject`](Self::inject): on a
    /// fabric of the same kind, seed and number of nodes, from the beginning, the same happens
    /// again if one thread makes the same calls, but for those that have set the faults. Messages of the connection manager, and
    /// what methods of [`Node`] do other than `inject` and `hold_receives`, are left out. At most
    /// 128 different faults are recorded: the text says where it ends. Empty without a record.
    ///
    /// ```
    /// # use ringverbs_testkit::Fabric;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let fabric = Fabric::builder().record_faults().build(2)?;
    /// fabric.frames().chance(0.01).lose();
    /// // A test, which finds something.
    /// let faults = fabric.recorded_faults();
    /// let again = Fabric::roce(2)?;
    /// again.inject(&faults)?;
    /// // The same test, without chance.
    /// # Ok(()) }
    /// ```
    pub fn recorded_faults(&self) -> String {
        let wire = lock(&self.wire);
        wire.record
            .as_ref()
            .map_or_else(String::new, FaultRecord::text)
    }

    /// Returns the simulated time since the fabric was created.
    pub fn now(&self) -> Duration {
        self.network.now().unwrap_or_default()
    }

    /// Performs pending work or, if there is none, moves the clock to what is due next.
    /// Returns false if nothing can happen before the program posts something.
    pub fn step(&self) -> bool {
        self.network.step()
    }

    /// Performs all pending work, without letting time pass.
    pub fn settle(&self) {
        while self.network.turn() {}
    }

    /// Moves the clock by a duration, and runs what becomes due on the way.
    pub fn advance(&self, by: Duration) {
        self.network.advance(by);
    }

    /// Runs a future, and drives the fabric while this and other tasks wait. Works on any
    /// executor. The clock moves when no task has posted anything for a number of turns,
    /// which is deterministic on an executor with one thread.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> ringverbs::Result<()> {
    /// # let fabric = ringverbs_testkit::Fabric::roce(1)?;
    /// let answer = fabric.run_until(async { 6 * 7 }).await;
    /// # assert_eq!(answer, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run_until<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|task| {
            let polled = future.as_mut().poll(task);
            if polled.is_pending() && self.network.poll_step(task.waker()) {
                task.waker().wake_by_ref();
            }
            polled
        })
        .await
    }

    /// Returns the frames sent so far, at most 2^20.
    pub fn capture(&self) -> Capture {
        Capture {
            frames: lock(&self.wire).frames.clone(),
        }
    }

    /// Discards the frames captured so far.
    pub fn clear_capture(&self) {
        lock(&self.wire).frames.clear();
    }

    /// Returns the objects that exist on the devices, and sends that never completed.
    pub fn leaks(&self) -> Vec<Leak> {
        let mut leaks = Vec::new();
        self.nodes.iter().for_each(|node| node.leaks(&mut leaks));
        leaks
    }

    /// Checks that all objects were destroyed, all memory was released, and all sends
    /// had completed when their queue pair was destroyed.
    ///
    /// # Panics
    /// Something leaked; the message names it.
    #[track_caller]
    pub fn assert_no_leaks(&self) {
        let leaks = self.leaks();
        if !leaks.is_empty() {
            let lines: Vec<_> = leaks.iter().map(|leak| format!("\n  {leak}")).collect();
            panic!("the test leaked:{}", lines.concat());
        }
    }

    /// Returns the errors of the program that the devices of a fabric with
    /// [`check`](Builder::check) have seen since the last call.
    pub fn take_errors(&self) -> Vec<ProgramError> {
        let errors = self.errors.as_ref();
        errors.map_or_else(Vec::new, |errors| std::mem::take(&mut *errors.all()))
    }

    /// Checks that the devices of a fabric with [`check`](Builder::check) have seen no error of
    /// the program since the last call of [`take_errors`](Self::take_errors).
    ///
    /// # Panics
    /// There is one; the message has all.
    #[track_caller]
    pub fn assert_no_errors(&self) {
        let errors = self.take_errors();
        if !errors.is_empty() {
            let line = |error: &ProgramError| format!("\n  node {}: {error}", error.device);
            let lines: Vec<_> = errors.iter().map(line).collect();
            panic!("the test has errors:{}", lines.concat());
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.thread = None;
        if !thread::panicking() {
            self.assert_no_errors();
        }
        if self.deny_leaks && !thread::panicking() {
            self.assert_no_leaks();
        }
        self.network.fabric().set_tap(None);
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric")
            .field("nodes", &self.nodes.len())
            .field("now", &self.now())
            .finish_non_exhaustive()
    }
}

/// The thread of [`Builder::background`], until dropped.
struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    fn start(network: &Network) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("testkit".into()).spawn({
            let (stop, network) = (Arc::clone(&stop), network.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if !network.turn() {
                        network.step();
                        thread::sleep(Duration::from_micros(50));
                    }
                }
            }
        });
        let thread = thread.map_err(|error| Error::System {
            what: "the thread of a fabric",
            errno: error.raw_os_error().unwrap_or_default(),
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked.
            let _ = thread.join();
        }
    }
}
