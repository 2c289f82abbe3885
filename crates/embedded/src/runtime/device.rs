//! A device, shared by threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use softhca::observed_frame::FrameObserver;

use crate::capture::{DeviceFrames, Recorder};
use crate::driver::state::State;

/// A device, shared by the threads that give it commands and the one that
/// drives it.
pub(crate) struct Device {
    state: Mutex<State>,
    /// Number of threads that wait for the lock to run a command.
    waiting: AtomicUsize,
    number: usize,
}

impl Device {
    pub(crate) fn new(state: State, number: usize) -> Self {
        Self {
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            number,
        }
    }

    /// Returns its number in the network.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Sets what records its frames, with its number in this process.
    pub(crate) fn record_frames(&self, recorder: Option<&Arc<Recorder>>, index: usize) {
        let frames = recorder.map(|recorder| DeviceFrames {
            recorder: Arc::clone(recorder),
            device: index,
        });
        let observer = frames.map(|frames| Box::new(frames) as Box<dyn FrameObserver>);
        self.lock().hca.observe_frames(observer);
    }

    /// Locks the device for a command.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = self.lock_state();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// As [`lock`](Self::lock); `None` if another thread holds the lock until then.
    pub(crate) fn lock_until(&self, until: Instant) -> Option<MutexGuard<'_, State>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = loop {
            match self.state.try_lock() {
                Ok(state) => break Some(state),
                Err(TryLockError::Poisoned(_)) => break None,
                Err(TryLockError::WouldBlock) if Instant::now() >= until => break None,
                Err(TryLockError::WouldBlock) => std::thread::yield_now(),
            }
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// Returns whether frames have not left the device's link; true if a thread holds its lock,
    /// possibly for a turn.
    pub(crate) fn is_sending(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => state.hca.has_unsent(),
            Err(TryLockError::Poisoned(_)) => false,
            Err(TryLockError::WouldBlock) => true,
        }
    }

    /// Locks the device for a turn, after the threads that wait for it.
    pub(crate) fn lock_for_turn(&self) -> MutexGuard<'_, State> {
        // The mutex is not fair: consecutive turns would starve the waiting threads.
        while self.waiting.load(Ordering::Relaxed) != 0 {
            std::thread::yield_now();
        }
        self.lock_state()
    }

    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.fail_after_panic();
            self.state.clear_poison();
            state
        })
    }
}
