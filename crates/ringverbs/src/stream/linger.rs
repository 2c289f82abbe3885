//! Delivery of a dropped stream's data.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use super::engine::Engine;

/// Time that the drop itself waits; the peer's device normally answers within
/// microseconds.
const HERE: Duration = Duration::from_millis(100);
/// Time that a thread waits afterwards.
const BEHIND: Duration = Duration::from_secs(5);

/// An engine that, when dropped, waits until the written data and the end mark
/// have arrived.
pub(super) struct LingeringEngine {
    engine: ManuallyDrop<Box<Engine>>,
}

impl LingeringEngine {
    pub fn new(engine: Engine) -> Self {
        Self {
            engine: ManuallyDrop::new(Box::new(engine)),
        }
    }
}

impl Drop for LingeringEngine {
    fn drop(&mut self) {
        // SAFETY: taken only here, and not used afterwards.
        let mut engine = unsafe { ManuallyDrop::take(&mut self.engine) };
        match engine.flush_until(Instant::now().checked_add(HERE)) {
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut && !engine.is_broken() => {
                // If no thread can be created, the peer sees a reset.
                let _ = std::thread::Builder::new()
                    .name("ringverbs-linger".to_owned())
                    .spawn(move || engine.close(BEHIND));
            }
            _ => engine.disconnect(),
        }
    }
}

impl Deref for LingeringEngine {
    type Target = Engine;
    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for LingeringEngine {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}
