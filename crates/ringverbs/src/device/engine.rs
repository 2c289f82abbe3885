//! The engine of an embedded device, which runs in threads of this process.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

use crate::Context;

/// The end of a wait.
pub(crate) enum Deadline {
    Real(Instant),
    #[cfg(feature = "embedded")]
    Simulated(embedded::Limit),
}

impl Deadline {
    pub fn is_over(&self) -> bool {
        match self {
            Self::Real(at) => *at <= Instant::now(),
            #[cfg(feature = "embedded")]
            Self::Simulated(limit) => limit.is_over(),
        }
    }
}

/// A device's engine. For devices outside the process, its methods do nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Engine {
    #[cfg(feature = "embedded")]
    embedded: Option<embedded::Embedded>,
}

impl Engine {
    pub fn of(context: &Context) -> Self {
        #[cfg(not(feature = "embedded"))]
        let _ = context;
        Self {
            #[cfg(feature = "embedded")]
            embedded: (context.device())
                .and_then(crate::Device::embedded_handle)
                .cloned(),
        }
    }

    /// Returns the engine for polls of the completion queue with this handle.
    pub fn of_queue(context: &Context, handle: u32) -> Self {
        #[cfg(not(feature = "embedded"))]
        let _ = (context, handle);
        Self {
            #[cfg(feature = "embedded")]
            embedded: (Self::of(context).embedded).map(|embedded| embedded.polling(handle)),
        }
    }

    /// Returns the end of a timeout, in simulated time if the device uses it; `None`,
    /// unlimited, if it is beyond the range of the clock.
    pub fn deadline(&self, timeout: Duration) -> Option<Deadline> {
        #[cfg(feature = "embedded")]
        if let Some(limit) = (self.embedded.as_ref()).and_then(|embedded| embedded.limit(timeout)) {
            return Some(Deadline::Simulated(limit));
        }
        Instant::now().checked_add(timeout).map(Deadline::Real)
    }

    /// Returns a random number. If time is simulated, the seed determines it.
    pub fn random(&self) -> u64 {
        #[cfg(feature = "embedded")]
        if let Some(number) = self.embedded.as_ref().and_then(embedded::Embedded::random) {
            return number;
        }
        RandomState::new().build_hasher().finish()
    }

    /// Returns whether the device is an embedded one.
    #[inline]
    pub fn is_embedded(&self) -> bool {
        #[cfg(feature = "embedded")]
        return self.embedded.is_some();
        #[cfg(not(feature = "embedded"))]
        false
    }

    /// Called after a doorbell was written; wakes the engine's thread.
    #[inline]
    pub fn doorbell_rung(&self) {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            doorbell_rung(embedded);
        }
    }

    /// Called before a request for notification that must not weaken an earlier one.
    pub fn arms(&self) {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            embedded.read_armings();
        }
    }

    /// Called after a request for notification; the engine's thread takes over.
    pub fn armed(&self) {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            embedded.notify_armed();
        }
    }

    /// Runs the engine without sleeping. Returns whether there may be more work.
    pub fn help(&self) -> bool {
        #[cfg(feature = "embedded")]
        return self
            .embedded
            .as_ref()
            .is_some_and(embedded::Embedded::try_drive);
        #[cfg(not(feature = "embedded"))]
        false
    }

    /// Called at the end of a poll with the number of CQEs found; at the end, the call saves
    /// no registers. Runs the engine if there were none.
    #[inline]
    pub fn polled(&self, count: usize) {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            ring::cold_path();
            match count {
                0 => embedded.idle(),
                _ => embedded.poll_succeeded(),
            }
        }
        #[cfg(not(feature = "embedded"))]
        let _ = count;
    }
}

/// Out of line, so that posting to other devices saves no registers for it.
#[cfg(feature = "embedded")]
#[cold]
#[inline(never)]
fn doorbell_rung(embedded: &embedded::Embedded) {
    embedded.notify_doorbell();
}
