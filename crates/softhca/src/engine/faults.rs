//! Injected faults of the device.

use std::collections::HashMap;

use crate::fault::{Action, Injector};
use crate::status::{CommandError, Rule, Status, refuse};

/// Injected faults. A count is the number of times that a fault still occurs.
#[derive(Debug, Default)]
pub struct DeviceFaults {
    commands: HashMap<u16, u32>,
    events: HashMap<u8, u32>,
    completions: u32,
    receives: u32,
    not_ready: u32,
    /// Faults of a text.
    pub(crate) injector: Option<Box<Injector>>,
    /// Health syndrome that the device shows; 0 means healthy.
    pub(crate) health: u8,
    /// The device has failed permanently, and requests a reset.
    pub(crate) fatal: bool,
}

impl DeviceFaults {
    /// Makes the next `count` commands of an opcode fail.
    pub fn fail_commands(&mut self, opcode: u16, count: u32) {
        self.commands.insert(opcode, count);
    }

    /// Loses the next `count` events of a type.
    pub fn lose_events(&mut self, kind: u8, count: u32) {
        self.events.insert(kind, count);
    }

    /// Loses the next `count` completions.
    pub fn lose_completions(&mut self, count: u32) {
        self.completions = count;
    }

    /// Returns the next `count` receives that a connection takes from a shared queue,
    /// as if their memory were absent (on-demand paging).
    pub fn return_receives(&mut self, count: u32) {
        self.receives = count;
    }

    /// Answers the next `count` messages that need a receive as if none were posted.
    pub fn hold_receives(&mut self, count: u32) {
        self.not_ready = count;
    }

    pub(crate) fn command(
        &mut self,
        opcode: u16,
        now: impl FnOnce() -> u64,
    ) -> Option<CommandError> {
        let counted = self.commands.get_mut(&opcode).is_some_and(take);
        let fails = counted || self.injects(now, |it| *it == Action::FailCommand(opcode));
        fails.then(|| refuse(Status::Internal, "opcode", opcode, Rule::NoFault))
    }

    pub(crate) fn lose_event(&mut self, kind: u8, now: impl FnOnce() -> u64) -> bool {
        let counted = !self.events.is_empty() && self.events.get_mut(&kind).is_some_and(take);
        counted || self.injects(now, |it| *it == Action::LoseEvent(kind))
    }

    pub(crate) fn lose_completion(&mut self, now: impl FnOnce() -> u64) -> bool {
        take(&mut self.completions) || self.injects(now, |it| *it == Action::LoseCompletion)
    }

    pub(crate) fn hold_receive(&mut self) -> bool {
        take(&mut self.not_ready)
    }

    pub(crate) fn return_receive(&mut self, now: impl FnOnce() -> u64) -> bool {
        take(&mut self.receives) || self.injects(now, |it| *it == Action::ReturnReceive)
    }

    /// Returns whether a fault of the text happens.
    fn injects(&mut self, now: impl FnOnce() -> u64, is_meant: impl Fn(&Action) -> bool) -> bool {
        match &mut self.injector {
            None => false,
            Some(injector) => injector.call(now(), is_meant).is_some(),
        }
    }
}

fn take(count: &mut u32) -> bool {
    let some = *count > 0;
    *count = count.saturating_sub(1);
    some
}
