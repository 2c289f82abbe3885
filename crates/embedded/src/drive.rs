//! The modes of driving a device.

/// The mode of driving: which thread runs the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drive {
    /// A dedicated thread. It spins for 60 microseconds after the last activity,
    /// then sleeps for a quarter of the time since then, and after 0.8 seconds until
    /// something is due. A command that leaves it something to do, a frame, waiting for an
    /// event through the context, and
    /// [`Embedded::notify_doorbell`](crate::Embedded::notify_doorbell) wake it.
    #[default]
    Thread,
    /// As [`Thread`](Self::Thread), for drivers that do not call
    /// [`notify_doorbell`](crate::Embedded::notify_doorbell): while there are queues, the
    /// thread polls for doorbells at least every 10 ms, unless there is a
    /// [`DoorbellGuard`](crate::DoorbellGuard).
    Watch,
    /// The caller, through [`Embedded::drive`](crate::Embedded::drive). The engine makes no progress
    /// otherwise, except while a thread waits for an event through the context.
    Caller,
}
