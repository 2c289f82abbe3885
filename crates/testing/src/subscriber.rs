//! A tracing subscriber that panics, as a program's may.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Panics at the first event of a module whose path contains a text.
pub struct PanickingSubscriber {
    module: &'static str,
    has_panicked: AtomicBool,
}

impl PanickingSubscriber {
    /// Creates a subscriber for modules whose path contains `module`; an empty text is for all.
    pub fn new(module: &'static str) -> Self {
        Self {
            module,
            has_panicked: AtomicBool::new(false),
        }
    }
}

impl Subscriber for PanickingSubscriber {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let matches = event.metadata().target().contains(self.module);
        if matches && !self.has_panicked.swap(true, Ordering::Relaxed) {
            resume_unwind(Box::new("in the subscriber"));
        }
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
