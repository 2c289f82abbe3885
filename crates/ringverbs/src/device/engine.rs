//! The engine of an embedded device, which threads of this process run.

use crate::Context;

/// A device's engine; for a device outside the process there is nothing to do.
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

    /// Returns whether the device is an embedded one.
    #[inline]
    pub fn is_embedded(&self) -> bool {
        #[cfg(feature = "embedded")]
        return self.embedded.is_some();
        #[cfg(not(feature = "embedded"))]
        false
    }

    /// Called after a doorbell was written: wakes the engine's thread.
    #[inline]
    pub fn rung(&self) {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            std::hint::cold_path();
            embedded.rung();
        }
    }

    /// Runs the engine without waiting for it. Returns whether there may be more to
    /// do.
    pub fn help(&self) -> bool {
        #[cfg(feature = "embedded")]
        return self.embedded.as_ref().is_some_and(embedded::Embedded::help);
        #[cfg(not(feature = "embedded"))]
        false
    }

    /// Called at the end of a poll that has found so many CQEs, where registers
    /// need no saving for the call. Runs the engine if there were none.
    #[inline]
    pub fn polled(&self, count: usize) {
        #[cfg(feature = "embedded")]
        if let Some(embedded) = &self.embedded {
            std::hint::cold_path();
            match count {
                0 => embedded.idle(),
                _ => embedded.found(),
            }
        }
        #[cfg(not(feature = "embedded"))]
        let _ = count;
    }
}
