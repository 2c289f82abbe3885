//! Injected faults of the device.

use crate::fault::{Call, Injector};
use crate::status::{CommandError, Rule, Status, refuse};

/// Injected faults, and the failure that the device shows.
#[derive(Debug, Default)]
pub(crate) struct DeviceFaults {
    /// Decides what fails.
    pub(crate) injector: Option<Box<Injector>>,
    /// Health syndrome that the device shows; 0 means healthy.
    pub(crate) health: u8,
    /// The device has failed permanently, and requests a reset.
    pub(crate) fatal: bool,
}

impl DeviceFaults {
    pub(crate) fn command(
        &mut self,
        opcode: u16,
        now: impl FnOnce() -> u64,
    ) -> Option<CommandError> {
        let fails = self.injects(now, Call::Command(opcode));
        fails.then(|| refuse(Status::Internal, "opcode", opcode, Rule::NoFault))
    }

    pub(crate) fn lose_event(&mut self, kind: u8, now: impl FnOnce() -> u64) -> bool {
        self.injects(now, Call::Event(kind))
    }

    pub(crate) fn lose_completion(&mut self, now: impl FnOnce() -> u64) -> bool {
        self.injects(now, Call::Completion)
    }

    pub(crate) fn return_receive(&mut self, now: impl FnOnce() -> u64) -> bool {
        self.injects(now, Call::Receive)
    }

    /// Returns whether a fault happens.
    fn injects(&mut self, now: impl FnOnce() -> u64, call: Call) -> bool {
        match &mut self.injector {
            None => false,
            Some(injector) => injector.call(now(), call).is_some(),
        }
    }
}
