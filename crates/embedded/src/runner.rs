//! Running the devices of a network: a turn of all of them, and the thread
//! that does nothing else.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use softhca::fabric::Fabric;
use softhca::packet::Pool;
use uverbs::Errno;

use crate::network::{Device, Drive};
use crate::{Result, refuse};

/// How long after the last event the thread spins. Then it sleeps: on a busy
/// machine, who yields waits for everybody, and who sleeps is let in when the
/// time is up.
const SPIN: Duration = Duration::from_micros(30);
/// How long it sleeps at first, and at most.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The devices of a network. Dropped, it ends the thread.
pub(crate) struct Runner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    fabric: Fabric,
    pool: Pool,
    devices: Mutex<Vec<Arc<Device>>>,
    /// How many there are.
    count: AtomicUsize,
    stop: AtomicBool,
}

/// What a turn has found.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    busy: bool,
    in_use: bool,
    /// When something is due, from now.
    due: Option<Duration>,
}

impl Shared {
    fn devices(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn turn(devices: &[Arc<Device>]) -> Turn {
    let mut found = Turn::default();
    for device in devices {
        let mut state = device.lock_for_turn();
        found.busy |= state.turn();
        found.in_use |= state.is_in_use();
        if let Some(due) = state.due().map(Duration::from_nanos) {
            found.due = Some(found.due.map_or(due, |other| other.min(due)));
        }
    }
    found
}

impl Runner {
    pub(crate) fn new(fabric: Fabric, pool: Pool, drive: Drive) -> Result<Arc<Self>> {
        let shared = Arc::new(Shared {
            fabric,
            pool,
            devices: Mutex::default(),
            count: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let thread = match drive {
            Drive::Caller => None,
            Drive::Thread => {
                let shared = Arc::clone(&shared);
                let builder = thread::Builder::new().name("ringverbs-hca".into());
                match builder.spawn(move || run(&shared)) {
                    Ok(thread) => Some(thread),
                    Err(error) => return refuse(error.raw_os_error().unwrap_or(libc::EAGAIN)),
                }
            }
        };
        Ok(Arc::new(Self { shared, thread }))
    }

    /// Adds a device that `make` makes, given its number.
    pub(crate) fn add(
        &self,
        make: impl FnOnce(usize, &Fabric, Pool) -> std::result::Result<Arc<Device>, Errno>,
    ) -> Result<Arc<Device>> {
        let mut devices = self.shared.devices();
        let device = make(devices.len(), &self.shared.fabric, self.shared.pool.clone())?;
        devices.push(Arc::clone(&device));
        self.shared.count.store(devices.len(), Ordering::Release);
        Ok(device)
    }

    /// A turn of all devices; whether anything happened or is left to do.
    pub(crate) fn drive(&self) -> bool {
        let devices = self.shared.devices();
        turn(&devices).busy
    }

    /// Whether there is a thread that runs the devices.
    pub(crate) fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Has the thread look.
    pub(crate) fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // It has only ended if it panicked.
            let _ = thread.join();
        }
    }
}

/// The thread.
fn run(shared: &Shared) {
    // With one processor, spinning only keeps the others from their work.
    let alone = thread::available_parallelism().is_ok_and(|count| count.get() == 1);
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let mut last = Instant::now();
    let mut sleep = SHORTEST;
    while !shared.stop.load(Ordering::Relaxed) {
        if devices.len() != shared.count.load(Ordering::Acquire) {
            devices.clone_from(&shared.devices());
        }
        let found = turn(&devices);
        if found.busy {
            last = Instant::now();
            sleep = SHORTEST;
            continue;
        }
        if !found.in_use {
            // Whatever comes is a command, and wakes.
            thread::park();
            last = Instant::now();
            continue;
        }
        let idle = last.elapsed();
        if idle < SPIN && !alone {
            std::hint::spin_loop();
        } else {
            let until = found.due.map_or(sleep, |due| sleep.min(due));
            thread::park_timeout(until);
            sleep = (sleep * 2).min(LONGEST);
        }
    }
}
