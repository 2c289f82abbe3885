//! Memory of every kind that there is, under operations.

use ringverbs::{AccessFlags, Region, RemoteRegion, Transport};

use crate::{Pair, huge};

/// Of a size that is no multiple of a huge page, they are registered, used, and
/// all there again afterwards.
#[test]
#[ignore = "needs rdma_rxe"]
fn huge_pages_are_registered_and_come_back() {
    let mut pair = Pair::new(Transport::Reliable);
    if huge::free() < 2 {
        // Only root may set some aside; whether it has shows below.
        let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "4");
    }
    let free = huge::free();
    if free < 2 {
        println!("skipped: no huge pages can be had here");
        return;
    }
    let access = AccessFlags::REMOTE_WRITE;
    let there = RemoteRegion::alloc_huge(&pair.domain, 5000, access).unwrap();
    assert_eq!(there.len(), huge::size());
    let region = Region::alloc_huge(&pair.domain, 1).unwrap();
    assert_eq!(huge::free(), free - 2);
    let mut outgoing = region.into_buffer();
    outgoing.copy_from(&[7; 9000]).unwrap();
    let to = there.slice(4000..13_000).unwrap().key();
    pair.a.write(outgoing, to, 1).unwrap();
    pair.wait_for(1).result.unwrap();
    let mut bytes = vec![0; 9002];
    there.read_at(3999, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[9001]), (0, 0));
    assert!(bytes[1..9001].iter().all(|&byte| byte == 7));
    there.close().unwrap();
    assert_eq!(huge::free(), free);
}
