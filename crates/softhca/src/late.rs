//! Work that a device with [`Chaos`](crate::chaos::Chaos) does late.

use roce::transport::Queue;

use crate::hca::Hca;
use crate::platform::Platform;

impl<P: Platform> Hca<P> {
    /// Does what is due.
    #[cold]
    pub(crate) fn release_late(&mut self, now: u64) {
        self.core.release_late(now);
        while let Some((qpn, ())) = self.core.chaos.as_mut().and_then(|it| it.sends.pop(now)) {
            self.transport.ring(qpn, Queue::Send);
        }
    }
}
