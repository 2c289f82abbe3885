//! A software HCA, as programs use it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use roce::transport::{self, Counters};
use softhca::Connection;
use softhca::cause::WorkRequest;
use softhca::engine::counters::{OperationCounts, QCounters};
use softhca::fault::Action;
use softhca::work::WorkObserver;

use crate::cm::ManagementCounters;
use crate::driver::cause::Observer;
use crate::driver::files::uar_counts;
use crate::driver::gids;
use crate::driver::object::Qp;
use crate::driver::query;
use crate::driver::state::State;
use crate::runtime::device::Device;
use crate::runtime::reasons::{ReasonHandler, Reasons, are_opposite};
use crate::runtime::runner::Runner;
use crate::runtime::time::{self, Limit};
use crate::runtime::wait;
use crate::wires::reason_datagram::PeerFailure;

/// Counts of a device's operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Work requests of send queues, by operation.
    pub operations: OperationCounts,
    /// Number of work requests of send queues.
    pub sends: u64,
    /// Number of receives that were taken.
    pub receives: u64,
    /// Bytes read from memory, also for reads of peers, and again for packets that are sent again.
    pub bytes_sent: u64,
    /// Bytes written to memory, also by writes of peers.
    pub bytes_received: u64,
    /// Bytes of sends and writes that have succeeded, and of peers' reads.
    pub bytes_delivered: u64,
}

/// A software HCA in this process.
///
/// A handle: clones refer to the same device. Usable from any thread.
#[derive(Clone)]
pub struct Embedded {
    pub(crate) device: Arc<Device>,
    pub(crate) runner: Arc<Runner>,
    /// Counts the completions of the queue that the holder of this handle polls.
    pub(crate) completions: Option<Arc<AtomicU32>>,
}

impl Embedded {
    /// Length of the GID table of an Ethernet port. Entries without a GID are empty.
    pub const ETHERNET_GIDS: usize = gids::ETHERNET;
    /// As above, of an InfiniBand port: the shortest that a ConnectX has.
    pub const INFINIBAND_GIDS: usize = gids::INFINIBAND;

    /// Length of the table of partition keys of an InfiniBand port, of which the first is the
    /// default; an Ethernet port has that one alone.
    pub const INFINIBAND_PKEYS: usize = query::PKEYS as usize;
    /// LID of an InfiniBand port's subnet manager, which answers nothing.
    pub const SM_LID: u16 = roce::fabric::subnet::LID;

    /// Returns a handle for a thread that polls one completion queue:
    /// [`idle`](Self::idle) then waits for completions of that queue and for remote writes,
    /// not for any activity of the network.
    pub fn polling(&self, queue: u32) -> Self {
        Self {
            completions: self.device.lock().completion_counter(queue),
            ..self.clone()
        }
    }

    /// Performs a bounded amount of pending work of the whole network. Returns
    /// true if there was any, if more is left, or if another thread is driving;
    /// loops call it until it returns false. Any thread may call it, also in
    /// addition to the network's own thread.
    pub fn drive(&self) -> bool {
        self.runner.turn().unwrap_or(true)
    }

    /// Called after a doorbell was written: wakes the network's thread if it sleeps.
    /// Without this call the thread finds the doorbell when something else wakes it, or with
    /// [`Drive::Watch`](crate::Drive::Watch) after at most 10 ms.
    #[inline]
    pub fn notify_doorbell(&self) {
        if self.runner.is_asleep() {
            self.runner.wake_thread();
        }
    }

    /// Called after a request for notification: the network's thread drives the devices
    /// until threads poll again.
    pub fn notify_armed(&self) {
        if !wait::takes_event_wait() {
            self.runner.wake_thread();
        }
    }

    /// Called by a thread that waits for descriptors, some of them perhaps of the network's
    /// devices. Drives the network, and calls `sleep` with more descriptors and a limit
    /// whenever there is nothing to do. `sleep` waits until a descriptor of the caller or one
    /// of these is readable, or the time is up, and returns whether the whole wait is over.
    /// Without a thread ([`Drive::Caller`](crate::Drive::Caller)), `sleep` is called once,
    /// without a limit.
    pub fn wait_for(&self, sleep: &mut dyn FnMut(&[BorrowedFd<'_>], Option<Duration>) -> bool) {
        if self.runner.has_thread() {
            wait::prepare_event_wait();
            self.runner.wait_for(sleep);
        } else {
            while !sleep(&[], None) {}
        }
    }

    /// Returns whether the queue of [`polling`](Self::polling) still exists.
    pub fn polled_queue_exists(&self) -> bool {
        // The device has the other reference.
        (self.completions.as_ref()).is_some_and(|counter| Arc::strong_count(counter) > 1)
    }

    /// Called before a request for notification that may overwrite the record of an earlier
    /// one: the devices of the network read the records.
    pub fn read_armings(&self) {
        self.runner.read_armings();
    }

    /// Called by a thread whose poll has found nothing: performs pending work of the
    /// network. If there is none and other programs want the processor, sleeps until there is
    /// some, for at most 5 ms; a thread that works between its polls sleeps no longer than it
    /// has worked since the last completion. Does nothing on a network that its caller drives
    /// ([`Drive::Caller`](crate::Drive::Caller)). If time is simulated, it does not sleep:
    /// the clock moves instead.
    pub fn idle(&self) {
        if let Some(time) = self.runner.time() {
            time::idle(&self.runner, time);
        } else if self.runner.has_thread() {
            wait::idle(&self.runner, self.completions.as_ref());
        }
    }

    /// As [`idle`](Self::idle), for a task of an executor, which must not sleep:
    /// performs a bounded amount of pending work, unless another thread is driving. Returns
    /// whether there was any.
    pub fn try_drive(&self) -> bool {
        if let Some(time) = self.runner.time() {
            return time::poll(&self.runner, time, None);
        }
        self.runner.has_thread() && self.runner.turn() == Some(true)
    }

    /// Called by a thread whose poll has found a completion: the next
    /// [`idle`](Self::idle) begins a new wait.
    pub fn poll_succeeded(&self) {
        wait::reset_backoff();
    }

    /// Connects or disconnects the cable.
    pub fn set_cable(&self, plugged: bool) {
        self.command(|state| state.hca.set_cable(plugged));
    }

    /// Returns whether the port is active. A device with addresses of the host follows their
    /// interface; the link of one in a directory is set by
    /// [`Network::set_link`](crate::Network::set_link), that of any by
    /// [`set_cable`](Self::set_cable).
    pub fn is_active(&self) -> bool {
        // The query of a failed device fails.
        self.device.lock().is_up().unwrap_or(false)
    }

    /// Returns the index of the network interface of an Ethernet port; 0 if it has none.
    pub fn interface(&self) -> u32 {
        self.device.lock().interface
    }

    /// Makes the device fail permanently, as a removed one: it reports DEVICE_FATAL, and
    /// every command is refused with EIO. Its memory is released.
    pub fn fail(&self) {
        self.command(State::fail);
    }

    /// Answers the next `count` messages of reliable connections that need a receive with an
    /// RNR NAK, as if no receive were posted.
    pub fn hold_receives(&self, count: u32) {
        self.command(|state| state.hca.inject_next(Action::Rnr, count.into()));
    }

    /// Returns a limit in simulated time, `after` from now; `None` if time is not simulated.
    pub fn limit(&self, after: Duration) -> Option<Limit> {
        Limit::new(&self.runner, after)
    }

    /// Returns a random number from the seed, if time is simulated.
    pub fn random(&self) -> Option<u64> {
        self.runner.time().map(|time| time.random())
    }

    /// Calls `each` for every object of every context except UARs, with its type, its number
    /// in the device, the bytes of a memory region, and the outstanding sends of a queue pair.
    pub fn each_object(&self, mut each: impl FnMut(&'static str, u32, u64, usize)) {
        let state = self.device.lock();
        let mut objects: Vec<_> = (state.objects.all())
            .filter(|object| object.data.kind() != mlx5_abi::ids::OBJECT_UAR)
            .map(|object| {
                let sends = match object.of::<Qp>() {
                    Some(qp) => state.hca.outstanding_sends(qp.number),
                    None => 0,
                };
                (object.data.summary(), sends)
            })
            .collect();
        objects.sort_unstable();
        for (it, sends) in objects {
            each(it.name, it.number, it.length, sends);
        }
    }

    /// Returns the queue pairs that were destroyed with sends outstanding, and how many.
    pub fn abandoned_sends(&self) -> Vec<(u32, usize)> {
        self.device.lock().abandoned.clone()
    }

    /// Makes a queue pair fail as by a device error, to test error paths that cannot be
    /// reached otherwise.
    pub fn fail_queue_pair(&self, qpn: u32) -> bool {
        self.command(|state| state.hca.fail_queue_pair(qpn))
    }

    /// Sets who is told why commands, work requests, accesses to memory and packets fail, and of
    /// asynchronous events; `None` for nobody.
    pub fn observe(&self, observer: Option<Observer>) {
        if observer.is_some() {
            self.runner.manager().drops().observe();
        }
        self.device.lock().observe(observer);
    }

    /// Sets who is told of the work requests of queue pairs, by the thread that drives the device;
    /// `None` for nobody.
    pub fn observe_work(&self, observer: Option<WorkObserver>) {
        self.device.lock().hca.observe_work(observer);
    }

    /// From now on answers the peers of the device's queue pairs that ask why it has failed their
    /// requests, and may [ask them](Self::ask_peer), on networks of several processes or hosts.
    pub fn exchange_reasons(&self, handler: Arc<dyn ReasonHandler>) {
        if let Some(reasons) = self.runner.reasons() {
            reasons.set_handler(self.number(), handler);
        }
    }

    /// Asks the peer of a queue pair why it has failed a work request. The handler of
    /// [`exchange_reasons`](Self::exchange_reasons) is told the answer, or after 240 ms that
    /// there is none. Returns false if the peer cannot be asked. May be called by an observer.
    pub fn ask_peer(&self, work: &WorkRequest, failure: PeerFailure) -> bool {
        let reasons = self.runner.reasons();
        reasons.is_some_and(|it| it.ask(self.number(), work, failure))
    }

    /// Returns whether a peer was asked that has not answered yet.
    pub fn awaits_reasons(&self) -> bool {
        // Whoever has written the completion that the caller has read may be about to ask.
        drop(self.device.lock());
        self.runner.reasons().is_some_and(Reasons::is_waiting)
    }

    /// Returns why the last work request of a queue pair, or the last request of its peer, has
    /// failed; flushed ones tell nothing. The last 64 queue pairs are remembered. If a peer on a
    /// device of this network in this process has failed it, its reason follows ("the other
    /// end").
    pub fn explanation(&self, qpn: u32) -> Option<String> {
        let ((cause, reason), connection) = {
            let state = self.device.lock();
            let found = state.explanations().of_queue_pair(qpn)?;
            (found, state.hca.connection(qpn))
        };
        let other_end = match cause {
            transport::Cause::Failed(failure) => PeerFailure::of_requester(&failure)
                .zip(connection)
                .and_then(|(failure, connection)| self.other_end(qpn, &connection, failure)),
            _ => None,
        };
        Some(match other_end {
            Some(other_end) => format!("{reason}; the other end: {other_end}"),
            None => reason,
        })
    }

    /// Returns why the peer of a queue pair has failed a request, if it is on a device of this
    /// network.
    fn other_end(&self, qpn: u32, connection: &Connection, failure: PeerFailure) -> Option<String> {
        let path = connection.path?;
        let peer = connection.peer;
        self.runner.devices().iter().find_map(|device| {
            let state = device.lock();
            let other = state.hca.connection(peer)?;
            let is_peer = other
                .path
                .is_none_or(|other_path| other.peer == qpn && are_opposite(&path, &other_path));
            if !is_peer {
                return None;
            }
            let reason = match failure {
                PeerFailure::Refused => {
                    let (cause, reason) = state.explanations().of_queue_pair(peer)?;
                    matches!(cause, transport::Cause::Refused(_)).then_some(reason)?
                }
                PeerFailure::NotReady => state.explanations().not_ready(peer)?,
                PeerFailure::Silent if other.state.receives() => return None,
                PeerFailure::Silent => format!("it is in {}", other.state),
            };
            Some(format!("queue pair {peer:#x}: {reason}"))
        })
    }

    /// Returns what the device has done since it exists; operations are counted while it has an
    /// observer.
    pub fn activity(&self) -> Activity {
        let state = self.device.lock();
        let stats = state.hca.stats();
        Activity {
            operations: state.hca.operations().clone(),
            sends: stats.send_requests,
            receives: stats.receive_requests,
            bytes_sent: stats.bytes_gathered,
            bytes_received: stats.bytes_scattered,
            bytes_delivered: stats.bytes_delivered,
        }
    }

    /// Returns the number of completions of a queue, given by its number in the device, that the
    /// program has not read.
    pub fn unread_completions(&self, number: u32) -> Option<u32> {
        self.device.lock().hca.unread_completions(number)
    }

    /// Returns the first complaints of the device about invalid input.
    pub fn complaints(&self) -> Vec<String> {
        let device = self.device.lock();
        (device.hca.complaints().iter())
            .map(ToString::to_string)
            .collect()
    }

    /// Returns the number of objects in its contexts.
    pub fn objects(&self) -> usize {
        self.device.lock().objects.len()
    }

    /// Returns the number of memory ranges that the device may access.
    pub fn ranges(&self) -> usize {
        self.device.lock().hca.platform().ranges()
    }

    /// Returns the node GUID, in host byte order. The first device of each process has the
    /// same one, and so on: after a fork, libraries of the child find its devices by the GUIDs
    /// that they have read before. Ports have GUIDs of their own.
    pub fn node_guid(&self) -> u64 {
        self.device.lock().node_guid
    }

    /// Returns the counters of its packets.
    pub fn counters(&self) -> Counters {
        self.device.lock().hca.transport_counters()
    }

    /// Returns the messages of the connection manager. Those that belong to no id, as a request
    /// without a listener and its rejection, are those of the network's first device.
    pub fn management_counters(&self) -> ManagementCounters {
        let manager = self.runner.manager();
        manager.counters(self.node_guid(), self.number() == 0)
    }

    /// Returns how often its port's link went down.
    pub fn link_downed(&self) -> u64 {
        self.device.lock().hca.stats().link_downed
    }

    /// Returns the counters of its queue pairs' events.
    pub fn queue_counters(&self) -> QCounters {
        let state = self.device.lock();
        state.hca.q_counters(state.counter_set).unwrap_or_default()
    }

    /// Returns its number in the network.
    pub fn number(&self) -> usize {
        self.device.number()
    }

    /// Runs `command` on the device, and wakes the engine if there is more to do: with many
    /// queue pairs each wake-up costs a look at all of them.
    pub(crate) fn command<T>(&self, command: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.device.lock();
        if !state.has_thread {
            let result = command(&mut state);
            drop(state);
            self.runner.wake();
            return result;
        }
        let before = (state.activity(), uar_counts().changes);
        let deadline = state.hca.deadline();
        let result = command(&mut state);
        let busy = state.settle();
        let sooner = |at| deadline.is_none_or(|before| at < before);
        let sooner = state.hca.deadline().is_some_and(sooner);
        // The thread's guard does not know the page of a new UAR.
        let after = (state.activity(), uar_counts().changes);
        let wakes = busy || sooner || after != before;
        drop(state);
        if wakes {
            self.runner.wake();
        }
        result
    }
}

impl PartialEq for Embedded {
    /// Whether both refer to the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.device, &other.device)
    }
}

impl Eq for Embedded {}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Embedded")
            .field(&self.device.number())
            .finish()
    }
}
