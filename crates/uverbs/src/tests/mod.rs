//! Tests of the whole crate against the fake kernel.

mod c_headers;
mod commands;
mod discovery;
mod doorbell;
mod events;
mod handles;
mod netlink_properties;

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};

use crate::kernel::fake::FakeKernel;
use crate::{Context, Pd, Udata};

/// Borrows a descriptor of that number, for the fake.
fn borrowed_fd(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: the fake only looks at the number.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Returns a fake kernel and a context on it.
fn context() -> (Arc<FakeKernel>, Arc<Context>) {
    let fake = FakeKernel::new();
    let context = Arc::new(fake.context());
    (fake, context)
}

/// As above, with a protection domain whose creation is not among the recorded
/// calls.
fn with_pd() -> (Arc<FakeKernel>, Arc<Context>, Pd<Arc<Context>>) {
    let (fake, context) = context();
    let pd = Pd::alloc(&context, Udata::none()).unwrap();
    fake.take_calls();
    (fake, context, pd)
}

/// Collects the `tracing` events of this thread while `body` runs.
fn traced(body: impl FnOnce()) -> Vec<(tracing::Level, String)> {
    use tracing::field::{Field, Visit};
    use tracing::{Event, Metadata, Subscriber, span};

    #[derive(Clone, Default)]
    struct Collector(Arc<Mutex<Vec<(tracing::Level, String)>>>);

    struct Text(String);

    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn core::fmt::Debug) {
            self.0 += &format!("{}={value:?} ", field.name());
        }
    }

    impl Subscriber for Collector {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0
                .lock()
                .unwrap()
                .push((*event.metadata().level(), text.0));
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    let collector = Collector::default();
    tracing::subscriber::with_default(collector.clone(), body);
    let events = collector.0.lock().unwrap();
    events.clone()
}
