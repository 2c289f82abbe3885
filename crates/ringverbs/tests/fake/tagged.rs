//! Tagged messages that nobody waits for, and waiting for them.

use std::time::Duration;

use ringverbs::completion::{TagMatch, TaggedEndpoint};
use ringverbs::{CompletionChannel, Error};

use crate::{Queues, World};
use device_testing::rxe::layout::{self, wc};

const DEPTH: u32 = 3;

/// An endpoint, and the device that its messages come by.
struct Side {
    // Destroyed before the device.
    end: TaggedEndpoint,
    queues: Queues,
    /// Receives that are posted: work request, and where the bytes go.
    posted: Vec<(u64, u64)>,
    world: World,
}

impl Side {
    fn new(channel: bool) -> Self {
        let mut world = World::new();
        let mut builder = world.context.completion_queue();
        let channel: Option<CompletionChannel> =
            channel.then(|| world.context.completion_channel().unwrap());
        if let Some(channel) = &channel {
            builder = builder.channel(channel);
        }
        let own = builder.build().unwrap();
        let not_ours = std::mem::replace(&mut world.cq, own);
        let (qp, queues) = world.queue_pair(17);
        let cq = std::mem::replace(&mut world.cq, not_ours);
        Self {
            end: TaggedEndpoint::new(qp, cq, DEPTH, 32).unwrap(),
            queues,
            posted: Vec::new(),
            world,
        }
    }

    /// The device takes what was posted. How many receives it has.
    fn receives(&mut self) -> usize {
        for entry in self.queues.recv.consume() {
            let addr = layout::read(&entry, (layout::recv::DATA, 8));
            let id = layout::read(&entry, layout::recv::WR_ID);
            self.posted.push((id, addr));
        }
        self.posted.len()
    }

    /// A message comes.
    fn message(&mut self, tag: u64, bytes: &[u8]) {
        self.receives();
        let (id, addr) = self.posted.remove(0);
        let mut whole = tag.to_le_bytes().to_vec();
        whole.extend((bytes.len() as u64).to_le_bytes());
        whole.extend(bytes);
        // SAFETY: the memory of a receive that is posted, and long enough: the
        // device may write there.
        unsafe { std::ptr::copy(whole.as_ptr(), addr as *mut u8, whole.len()) };
        self.world.raise(&[
            (wc::WR_ID, id),
            (wc::OPCODE, 128),
            (wc::BYTE_LEN, whole.len() as u64),
            (wc::QP_NUM, 17),
        ]);
    }

    /// Receives a message that is there.
    fn receive(&mut self, which: TagMatch) -> (u64, Vec<u8>) {
        let buffer = self.world.buffer(b"");
        self.end.receive(buffer, which, 9);
        let entry = self.end.next_entry().unwrap().unwrap().unwrap();
        let bytes = entry.payload.into_buffer().unwrap().to_vec();
        (entry.tag.unwrap(), bytes)
    }
}

#[test]
fn unmatched_messages_keep_their_buffers_unless_spilled() {
    let mut side = Side::new(false);
    for tag in 0..u64::from(DEPTH) {
        side.message(tag, b"early");
    }
    assert!(side.end.next_entry().unwrap().is_none());
    // No receive is left: the peer waits.
    assert_eq!(side.receives(), 0);
    assert_eq!(side.receive(TagMatch::exact(1)), (1, b"early".to_vec()));
    assert_eq!(side.receives(), 1);

    side.end.set_spill(2);
    for tag in 10..12 {
        side.message(tag, &[tag as u8; 32]);
        assert!(side.end.next_entry().unwrap().is_none());
        // Copied, and its buffer is posted again.
        assert_eq!(side.receives(), 1);
    }
    side.message(12, b"one too many");
    assert!(side.end.next_entry().unwrap().is_none());
    assert_eq!(side.receives(), 0);

    // In the order in which they came, wherever they are.
    assert_eq!(side.end.peek(TagMatch::exact(11)), Some((11, 32)));
    let claimed = side.end.claim(TagMatch::exact(11)).unwrap();
    assert_eq!((claimed.tag(), claimed.len()), (11, 32));
    side.end.discard(claimed).unwrap();
    for (tag, bytes) in [(0, &b"early"[..]), (2, b"early"), (10, &[10; 32])] {
        assert_eq!(side.receive(TagMatch::any()), (tag, bytes.to_vec()));
    }
    assert_eq!(
        side.receive(TagMatch::any()),
        (12, b"one too many".to_vec())
    );
    assert_eq!(side.receives(), DEPTH as usize);
    // There is room for two again.
    for tag in 20..22 {
        side.message(tag, b"");
        assert!(side.end.next_entry().unwrap().is_none());
    }
    assert_eq!(side.receives(), DEPTH as usize);
}

#[test]
fn tagged_endpoint_waits_on_its_channel() {
    let mut side = Side::new(false);
    let refused = side.end.wait(Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");

    let mut side = Side::new(true);
    assert!(side.end.channel().is_some());
    assert!(!side.end.arm().unwrap());
    side.message(5, b"x");
    // It is there: no event is needed.
    assert!(side.end.arm().unwrap());
    assert!(side.end.wait(None).unwrap());
    assert!(side.end.next_entry().unwrap().is_none());
    // An entry that was made without the device.
    let buffer = side.world.buffer(b"");
    side.end.receive(buffer, TagMatch::any(), 1);
    assert!(side.end.wait(None).unwrap());
    assert!(side.end.next_entry().unwrap().is_some());
}
