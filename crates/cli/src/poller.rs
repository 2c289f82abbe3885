//! Waiting for completions: spinning, or asleep.

use std::time::{Duration, Instant};

use ringverbs::{Completion, CompletionChannel, CompletionQueue, Context, Device};

/// A completion queue and the way to wait for it.
pub struct Poller {
    pub cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    /// A device that this thread can drive while it spins.
    device: Option<Device>,
    /// How often it slept.
    pub events: u64,
}

impl Poller {
    /// A queue for so many completions; with `events` it sleeps.
    pub fn new(context: &Context, entries: u32, events: bool) -> Result<Self, ringverbs::Error> {
        let builder = context.completion_queue().entries(entries);
        let (builder, channel) = if events {
            let channel = context.completion_channel()?;
            (builder.channel(&channel), Some(channel))
        } else {
            (builder, None)
        };
        Ok(Self {
            cq: builder.build()?,
            channel,
            device: context.device().filter(|it| it.is_embedded()).cloned(),
            events: 0,
        })
    }

    /// Reads completions; waits for the first at most as long as `patience`.
    /// None only when that is over.
    pub fn poll(
        &mut self,
        out: &mut [Completion],
        patience: Duration,
    ) -> Result<usize, ringverbs::Error> {
        let count = self.cq.poll(out)?;
        if count > 0 {
            return Ok(count);
        }
        let start = Instant::now();
        let mut spins = 0u32;
        loop {
            match &self.channel {
                None => {
                    match &self.device {
                        Some(device) => drop(device.drive()),
                        None => std::hint::spin_loop(),
                    }
                    // The clock is looked at now and then.
                    spins = spins.wrapping_add(1);
                    if spins.is_multiple_of(1024) && start.elapsed() > patience {
                        return Ok(0);
                    }
                }
                Some(channel) => {
                    let left = patience.saturating_sub(start.elapsed());
                    if left.is_zero() {
                        return Ok(0);
                    }
                    // What came before the queue was armed raises no event.
                    if !self.cq.arm(false)? {
                        channel.wait(Some(left))?;
                        self.events += 1;
                    }
                }
            }
            let count = self.cq.poll(out)?;
            if count > 0 {
                return Ok(count);
            }
        }
    }
}
