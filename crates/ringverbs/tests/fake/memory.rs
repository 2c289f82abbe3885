//! Memory: what is registered, with which pages, and what becomes of it.

use ringverbs::{AccessFlags, Error, Region, RemoteRegion};

use testing::huge;

use crate::World;

/// Bytes mapped in huge pages by this process, as the kernel says.
fn mapped() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("HugetlbPages:"));
    let word = line.and_then(|line| line.split_ascii_whitespace().next());
    word.map_or(0, |word| word.parse().unwrap())
}

/// Any size is rounded up to whole huge pages, and all of them come back.
#[test]
fn huge_pages_are_returned_for_any_size() {
    let world = World::new();
    if huge::free() < 2 {
        // The machine's owner sets some aside, not a test.
        let error = Region::alloc_huge(&world.domain, 5 * huge::size()).unwrap_err();
        assert_eq!(error.errno(), libc::ENOMEM, "{error}");
        testing::skip!("no huge pages were set aside here: only the refusal was tested");
        return;
    }
    let page = huge::size();
    for (len, pages) in [(1, 1), (4096, 1), (page, 1), (page + 1, 2)] {
        let (before, free) = (mapped(), huge::free());
        let mut buffer = Region::alloc_huge(&world.domain, len)
            .unwrap()
            .into_buffer();
        assert_eq!(buffer.capacity(), pages * page);
        buffer.copy_from(b"here").unwrap();
        drop(buffer);
        assert_eq!((mapped(), huge::free()), (before, free), "{len}");
        let access = AccessFlags::REMOTE_WRITE;
        let region = RemoteRegion::alloc_huge(&world.domain, len, access).unwrap();
        assert_eq!(region.len(), pages * page);
        region.write_at(len - 1, b"x").unwrap();
        region.close().unwrap();
        assert_eq!((mapped(), huge::free()), (before, free), "{len}");
    }
}

#[test]
fn overflowing_length_is_refused() {
    let world = World::new();
    let none = Region::alloc_huge(&world.domain, usize::MAX);
    assert!(matches!(none, Err(Error::NoMemory)), "{none:?}");
    let none = Region::alloc(&world.domain, usize::MAX);
    assert!(matches!(none, Err(Error::NoMemory)), "{none:?}");
}
