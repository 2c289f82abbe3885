//! Waiting for completions, by polling or sleeping.

use std::time::{Duration, Instant};

use ringverbs::{Completion, CompletionChannel, CompletionQueue, Context, Device};

/// A completion queue that is waited for by polling or on its channel.
pub struct Poller {
    pub cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    /// Empty polls between two reads of the clock: 1 on an embedded device, whose polls
    /// may sleep.
    polls_per_clock_read: u32,
    /// Number of waits for an event.
    pub events: u64,
}

impl Poller {
    /// Creates a queue for `entries` completions, with a channel if `events`.
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
            polls_per_clock_read: match context.device().is_some_and(Device::is_embedded) {
                true => 1,
                false => 1024,
            },
            events: 0,
        })
    }

    /// Reads completions, waiting up to `timeout` for the first one. Returns 0 only
    /// after that time.
    pub fn poll(
        &mut self,
        out: &mut [Completion],
        timeout: Duration,
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
                    if spins % self.polls_per_clock_read == 0 && start.elapsed() > timeout {
                        return Ok(0);
                    }
                }
                Some(channel) => {
                    let left = timeout.saturating_sub(start.elapsed());
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
