//! Waiting for completions, by polling or sleeping.

use std::time::{Duration, Instant};

use ringverbs::{Completion, CompletionChannel, CompletionQueue, Context, Device};

/// A completion queue with its way of waiting.
pub struct Poller {
    pub cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    /// Empty polls after which the clock is read: each, if it may sleep.
    polls_to_clock: u32,
    /// Number of times that it slept.
    pub events: u64,
}

impl Poller {
    /// Creates a queue for `entries` completions; with `events` it sleeps.
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
            polls_to_clock: match context.device().is_some_and(Device::is_embedded) {
                true => 1,
                false => 1024,
            },
            events: 0,
        })
    }

    /// Reads completions, waiting up to `patience` for the first. Returns 0 only
    /// after that time.
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
                    std::hint::spin_loop();
                    spins = spins.wrapping_add(1);
                    if spins % self.polls_to_clock == 0 && start.elapsed() > patience {
                        return Ok(0);
                    }
                }
                Some(channel) => {
                    let left = patience.saturating_sub(start.elapsed());
                    if left.is_zero() {
                        return Ok(0);
                    }
                    // Completions that arrived before the queue was armed raise
                    // no event.
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
