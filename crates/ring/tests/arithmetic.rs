//! Properties of the index arithmetic over wrap-around, and of values that a
//! broken other side may leave in the shared words.
#![cfg(not(loom))]

use std::collections::VecDeque;
use std::ptr::NonNull;

use proptest::prelude::*;
use ringverbs_ring::{Consumer, Header, Indices, Producer};

fn indices(header: &Header, slot_mask: u32, log2_stride: u32) -> Indices {
    // SAFETY: every test keeps the header while it uses the indices.
    unsafe { Indices::new(NonNull::from(header), slot_mask, log2_stride) }
}

proptest! {
    /// Whatever the shared words hold, no index leaves the ring.
    #[test]
    fn invalid_indices_stay_inside(
        log2 in 0u32..16, stride in 0u32..16, producer: u32, consumer: u32, steps in 0u32..100_000
    ) {
        let slot_mask = (1u32 << log2) - 1;
        let header = Header::new(stride, slot_mask);
        header.publish_producer(producer);
        header.publish_consumer(consumer);
        let ring = indices(&header, slot_mask, stride);
        let last = (slot_mask as usize) << stride;
        let is_slot = |at: usize| at <= last && at % (1 << stride) == 0;
        prop_assert!(is_slot(ring.produced_by_device()) && is_slot(ring.consumed_by_device()));
        prop_assert!(is_slot(ring.own_producer()) && is_slot(ring.own_consumer()));
        prop_assert!(is_slot(ring.inside(producer as usize)) && is_slot(ring.inside(consumer as usize)));
        prop_assert!(ring.distance(producer as usize, consumer as usize) <= slot_mask as usize);
        let mut role = Producer::new(ring);
        let mut at = role.tail();
        for _ in 0..steps.min(200) {
            if !role.has_room(at) { break }
            at = ring.next(at);
            prop_assert!(is_slot(at));
        }
    }

    /// next and prev undo each other; distance counts steps.
    #[test]
    fn steps_and_distances_agree(log2 in 1u32..16, stride in 0u32..16, at: u32, steps: u32) {
        let slot_mask = (1u32 << log2) - 1;
        let header = Header::new(stride, slot_mask);
        let ring = indices(&header, slot_mask, stride);
        let at = ring.inside(at as usize);
        prop_assert_eq!(ring.prev(ring.next(at)), at);
        prop_assert_eq!(ring.next(ring.prev(at)), at);
        let steps = (steps & slot_mask) as usize;
        let there = ring.advance(at, steps);
        prop_assert_eq!(ring.distance(at, there), steps);
        let mut walked = at;
        for _ in 0..steps { walked = ring.next(walked) }
        prop_assert_eq!(walked, there);
    }

    /// Against a plain queue: batches of any size in and out, over many wraps,
    /// lose nothing, repeat nothing, and stop exactly when full.
    #[test]
    fn behaves_as_a_queue(log2 in 1u32..5, stride in 0u32..10, start: u32, batches in prop::collection::vec((0u32..40, 0u32..40), 1..60)) {
        let mask = (1u32 << log2) - 1;
        let header = Header::new(6, mask);
        header.publish_producer(start & mask);
        header.publish_consumer(start & mask);
        let ring = indices(&header, mask, stride);
        let mut slots = vec![0u32; mask as usize + 1];
        let mut producer = Producer::new(ring);
        let consumer = Consumer::new(ring);
        let mut model = VecDeque::new();
        let mut value = 0;
        for (put, take) in batches {
            let mut at = producer.tail();
            for _ in 0..put {
                let room = producer.has_room(at);
                prop_assert_eq!(room, model.len() < mask as usize);
                if !room { break }
                value += 1;
                slots[at >> stride] = value;
                model.push_back(value);
                at = ring.next(at);
            }
            producer.publish(at);
            let mut span = consumer.available();
            prop_assert_eq!(ring.distance(span.at, span.end), model.len());
            for _ in 0..take {
                if span.at == span.end { break }
                prop_assert_eq!(Some(slots[span.at >> stride]), model.pop_front());
                span.at = ring.next(span.at);
            }
            consumer.release(span.at);
        }
    }

    /// A sealed ring takes nothing and gives nothing, whatever its words hold.
    #[test]
    fn a_sealed_ring_is_full_and_empty(producer: u32, consumer: u32) {
        let header = Header::new(6, 7);
        let ring = indices(&header, 7, 6).sealed();
        header.publish_producer(producer);
        header.publish_consumer(consumer);
        let mut role = Producer::new(ring);
        let tail = role.tail();
        prop_assert!(!role.has_room(tail));
        let span = Consumer::new(ring).available();
        prop_assert_eq!(span.at, span.end);
    }
}
