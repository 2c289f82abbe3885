//! Mapped rings over a memory file that plays the driver.
#![cfg(not(loom))]

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use ringverbs_ring::{Consumer, Header, IndexCheck, Mapping, Producer, Ring};

const PAGE: usize = 4096;

/// A memory file that begins with a ring header.
fn driver(size: usize, log2_stride: u32, mask: u32) -> File {
    // SAFETY: a fresh descriptor, owned by nobody else.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"ring".as_ptr(), 0)) };
    file.set_len(size as u64).unwrap();
    file.write_all_at(&log2_stride.to_ne_bytes(), 0).unwrap();
    file.write_all_at(&mask.to_ne_bytes(), 4).unwrap();
    file
}

fn map(file: &File, size: usize) -> Mapping {
    Mapping::new(file.as_fd(), 0, size).unwrap()
}

#[test]
fn geometry_that_fits_is_accepted() {
    let file = driver(PAGE, 7, 15);
    let ring = Ring::new(map(&file, PAGE), 48).unwrap();
    assert_eq!(ring.capacity(), 15);
    assert_eq!(ring.stride(), 128);
    let slots = ring.slots();
    let first = slots.slot(0).as_ptr() as usize;
    assert_eq!(slots.slot(3 * 128).as_ptr() as usize - first, 3 * 128);
    // Any number leads to the beginning of a slot of the ring.
    for absurd in [1, 127, 16 * 128, usize::MAX, usize::MAX - 127, 1 << 31] {
        let at = slots.slot(absurd).as_ptr() as usize - first;
        assert!(at <= 15 * 128 && at % 128 == 0);
    }
}

#[test]
fn geometry_that_does_not_fit_is_refused() {
    for (log2_stride, mask, entry_size, why) in [
        (7, 31, 48, "array longer than the mapping"),
        (7, 14, 48, "slots not a power of two"),
        (5, 15, 48, "entries smaller than what is read"),
        (32, 0, 48, "shift too far"),
        (u32::MAX, u32::MAX, 48, "everything absurd"),
        (31, 1, 48, "one entry longer than the mapping"),
        (12, u32::MAX, 48, "more slots than memory"),
    ] {
        let file = driver(PAGE, log2_stride, mask);
        let result = Ring::new(map(&file, PAGE), entry_size);
        assert!(result.is_err(), "{why}");
    }
}

#[test]
fn header_is_read_once() {
    let file = driver(PAGE, 7, 15);
    let ring = Ring::new(map(&file, PAGE), 48).unwrap();
    // The other side changes its mind: nobody listens.
    file.write_all_at(&u32::MAX.to_ne_bytes(), 4).unwrap();
    file.write_all_at(&20u32.to_ne_bytes(), 0).unwrap();
    assert_eq!((ring.capacity(), ring.stride()), (15, 128));
}

#[test]
fn indices_are_where_the_driver_has_them() {
    let file = driver(PAGE, 7, 15);
    let ring = Ring::new(map(&file, PAGE), 48).unwrap();
    let read = |offset| {
        let mut word = [0; 4];
        file.read_exact_at(&mut word, offset).unwrap();
        u32::from_ne_bytes(word)
    };
    Producer::new(ring.indices()).publish(5 * 128);
    Consumer::new(ring.indices()).release(3 * 128);
    assert_eq!((read(128), read(256)), (5, 3));
}

#[test]
fn failed_mapping_has_the_errno() {
    let file = driver(PAGE, 7, 15);
    let error = Mapping::new(file.as_fd(), 1, PAGE).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert!(Mapping::new(file.as_fd(), 0, 0).is_err());
}

#[test]
fn retired_ring_reads_as_empty() {
    let size = 4 * PAGE;
    let file = driver(size, 7, 15);
    let ring = Ring::new(map(&file, size), 48).unwrap();
    let header = ring.indices().header_ptr();
    // SAFETY: retired below, before the value is used again.
    let index_check = unsafe { IndexCheck::new(&ring.indices()) };
    // SAFETY: mapped.
    unsafe { header.as_ref() }.publish_producer(7);
    assert!(!index_check.is_empty());
    let start = header.as_ptr() as usize;
    // Another test's ring may come to lie where this one was unmapped: the inode
    // tells the mappings of this file from others.
    let inode = format!(" {} ", file.metadata().unwrap().ino());
    let mapped = |address: usize| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let parse = |hex| usize::from_str_radix(hex, 16).unwrap();
            (parse(from)..parse(to)).contains(&address) && line.contains(&inode)
        })
    };
    assert!(mapped(start) && mapped(start + 3 * PAGE));
    let retired = ring.into_mapping().retire();
    // SAFETY: the retired page keeps the address readable.
    let (producer, consumer) = unsafe { (header.as_ref().producer(), header.as_ref().consumer()) };
    assert_eq!((producer, consumer), (0, 0));
    // What lay behind the header's page is unmapped.
    assert!(!mapped(start) && !mapped(start + PAGE) && !mapped(start + 3 * PAGE));
    drop(retired);
}

#[test]
fn two_threads_stream_through_a_ring() {
    let file = driver(PAGE, 6, 7);
    let ours = Ring::new(map(&file, PAGE), 8).unwrap();
    let theirs = Ring::new(map(&file, PAGE), 8).unwrap();
    let total = 200_000u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The other side, from its own mapping of the same memory.
            let header = theirs.indices().header_ptr();
            // SAFETY: mapped for the life of `theirs`.
            let header: &Header = unsafe { header.as_ref() };
            let mut at = 0;
            for expected in 0..total {
                while header.producer() == at {
                    std::hint::spin_loop();
                }
                // SAFETY: published by the producer, so whole.
                let value = unsafe { theirs.slots().slot(at as usize * 64).cast::<u64>().read() };
                assert_eq!(value, expected);
                at = (at + 1) & 7;
                header.publish_consumer(at);
            }
        });
        let mut producer = Producer::new(ours.indices());
        for value in 0..total {
            let at = producer.tail();
            while !producer.has_room(at) {
                std::hint::spin_loop();
            }
            // SAFETY: the slot is ours until published.
            unsafe { ours.slots().slot(at).cast::<u64>().write(value) };
            producer.publish(ours.indices().next(at));
        }
    });
}
