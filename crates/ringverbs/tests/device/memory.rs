//! Memory of every kind that there is, under operations.

use std::ops::Range;
use std::ptr::NonNull;

use ringverbs::{
    AccessFlags, Advice, AdviseFlags, Error, ForeignRegion, Region, RemoteRegion, Status, Transport,
};

use testing::huge;

use crate::Pair;

/// Of a size that is no multiple of a huge page, they are registered, used, and
/// all there again afterwards.
#[test]
#[ignore = "sets huge pages aside for the whole machine"]
fn huge_pages_are_registered_and_returned() {
    let mut pair = Pair::new(Transport::Reliable);
    let aside = "/proc/sys/vm/nr_hugepages";
    if huge::free() < 2 && std::fs::write(aside, "4").is_err() {
        return testing::skip!("no huge pages are set aside here, and only root may do so");
    }
    let free = huge::free();
    assert!(free >= 2, "of 4 huge pages the kernel has set {free} aside");
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

/// Pages that come when the device does, from here and from the peer's side,
/// where the driver has them (not in 6.12). Elsewhere they are refused as that.
///
/// All begins with a page, and each packet does: rdma_rxe of Linux 7.2 forgets
/// where in an on-demand page an access begins, and writes what is for byte 3000
/// of one to its byte 0.
#[test]
#[ignore = "needs a kernel's driver"]
fn on_demand_paging_is_used_or_refused() {
    let mut pair = Pair::new(Transport::Reliable);
    let odp = pair.context.query_device_ex().unwrap().odp_caps;
    let (source, access) = (Region::alloc_on_demand(&pair.domain, 20_000), {
        AccessFlags::REMOTE_WRITE | AccessFlags::ON_DEMAND
    });
    let there = RemoteRegion::alloc(&pair.domain, 20_000, access);
    const SEND_RECEIVE_WRITE: u32 = 0b111;
    const PAGE: usize = 4096;
    if odp.general_caps & 1 == 0 {
        for error in [source.unwrap_err(), there.unwrap_err()] {
            // Linux 6.1 says the one or the other, as it comes to it.
            let old = kernel() < (6, 12) && error.errno() == libc::EINVAL;
            assert!(old || error.errno() == libc::EOPNOTSUPP, "{error}");
        }
        testing::skip!("this device has no on-demand paging: only the refusal was tested");
        return;
    }
    assert_eq!(odp.rc_odp_caps & SEND_RECEIVE_WRITE, SEND_RECEIVE_WRITE);
    let (source, there) = (source.unwrap(), there.unwrap());
    let ahead = pair
        .domain
        .advise(Advice::PREFETCH_WRITE, AdviseFlags::FLUSH, &[&source]);
    if let Err(error) = ahead {
        assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}");
        println!("this device takes no advice");
    }
    let mut outgoing = source.into_buffer();
    let text: Vec<u8> = (0..15_000_u32).map(|n| (n % 251) as u8).collect();
    outgoing.copy_from(&text).unwrap();
    pair.a
        .write(outgoing, there.slice(PAGE..).unwrap().key(), 1)
        .unwrap();
    let mut done = pair.wait_for(1);
    done.result.unwrap();
    let outgoing = done.take_buffer().unwrap();
    let mut bytes = vec![1; 20_000];
    there.read_at(0, &mut bytes).unwrap();
    assert!(bytes[..PAGE].iter().all(|&byte| byte == 0));
    assert_eq!(bytes[PAGE..PAGE + 15_000], text);
    assert!(bytes[PAGE + 15_000..].iter().all(|&byte| byte == 0));
    // Received into pages that nobody has touched.
    let fresh = Region::alloc_on_demand(&pair.domain, 20_000).unwrap();
    pair.b.receive(fresh.into_buffer(), 2).unwrap();
    pair.a.send(outgoing, 3).unwrap();
    let mut done = pair.wait(2);
    assert_eq!(done[0].take_buffer().unwrap()[..], text);
    there.close().unwrap();
}

/// Pages that this crate did not make.
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Self {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: new pages, anywhere.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start = NonNull::new(start.cast()).unwrap();
        Self { start, len }
    }

    fn part(&self, range: Range<usize>) -> NonNull<[u8]> {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the pages, as just checked.
        let start = unsafe { self.start.add(range.start) };
        NonNull::slice_from_raw_parts(start, range.len())
    }

    /// What is there now.
    fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        let part = self.part(range);
        let byte = |at| part.cast::<u8>().as_ptr().wrapping_add(at);
        // SAFETY: within the pages; the device may write there meanwhile.
        let read = |at| unsafe { byte(at).read_volatile() };
        (0..part.len()).map(read).collect()
    }

    fn make_read_only(&self) {
        // SAFETY: nobody has a reference to them, and nobody writes any more.
        let done = unsafe { libc::mprotect(self.start.as_ptr().cast(), self.len, libc::PROT_READ) };
        assert_eq!(done, 0);
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: these pages, which nobody uses any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// It is written by peers and by operations, and nobody's to reach once it is
/// deregistered; its owner has it then as before.
#[test]
fn foreign_memory_is_accessible_while_registered() {
    let mut pair = Pair::new(Transport::Reliable);
    let pages = Pages::new(8192);
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let part = pages.part(100..8100);
    // SAFETY: the pages outlive the region, and are read by `bytes` only.
    let region = unsafe { ForeignRegion::register(&pair.domain, part, access) }.unwrap();
    assert_eq!(region.len(), 8000);
    let key = region.key();
    assert_eq!(key.addr, part.cast::<u8>().addr().get() as u64);

    // Over the edge of a page.
    let outgoing = pair.filled(&[7; 1000]);
    pair.a.write(outgoing, key.offset(3500), 1).unwrap();
    pair.wait_for(1).result.unwrap();
    let there = pages.bytes(3599..4601);
    assert_eq!((there[0], there[1001]), (0, 0));
    assert!(there[1..1001].iter().all(|&byte| byte == 7));

    let incoming = region.slice(10..20).unwrap();
    let outgoing = pair.filled(b"received");
    pair.b.receive(incoming, 2).unwrap();
    pair.a.send(outgoing, 3).unwrap();
    for done in pair.wait(2) {
        done.result.unwrap();
    }
    assert_eq!(pages.bytes(109..119), b"\0received\0");
    let buffer = pair.filled(&[0; 8]);
    pair.a.read(buffer, key.offset(10), 4).unwrap();
    assert_eq!(&pair.wait_for(4).take_buffer().unwrap()[..], b"received");

    region.close().unwrap();
    let outgoing = pair.filled(b"too late");
    pair.a.write(outgoing, key.offset(10), 5).unwrap();
    assert_eq!(pair.wait_for(5).status(), Status::REM_ACCESS_ERR);
    assert_eq!(pages.bytes(110..118), b"received");
}

/// What it may be registered for is what it may be used for by its owner.
#[test]
fn read_only_foreign_memory_is_sent_from() {
    let mut pair = Pair::new(Transport::Reliable);
    let pages = Pages::new(4096);
    let text = b"never changes";
    for (at, &byte) in text.iter().enumerate() {
        // SAFETY: within the pages, which nobody else uses yet.
        unsafe { pages.start.add(at).write(byte) };
    }
    pages.make_read_only();
    let part = pages.part(0..4096);
    let refused = |part, access| {
        // SAFETY: nothing is registered.
        let error = unsafe { ForeignRegion::register(&pair.domain, part, access) }.unwrap_err();
        assert_eq!(error.errno(), libc::EFAULT, "{error}");
        assert!(error.to_string().contains("REG_MR"), "{error}");
    };
    refused(part, AccessFlags::LOCAL_WRITE);
    let gone = Pages::new(4096);
    let nowhere = gone.part(0..4096);
    drop(gone);
    refused(nowhere, AccessFlags::empty());

    // SAFETY: the pages outlive the region, and cannot be written.
    let region = unsafe { ForeignRegion::register(&pair.domain, part, AccessFlags::empty()) };
    let region = region.unwrap();
    let incoming = pair.buffer(64);
    pair.b.receive(incoming, 1).unwrap();
    let outgoing = region.slice(..text.len()).unwrap();
    pair.a.send(outgoing, 2).unwrap();
    let mut done = pair.wait(2);
    assert_eq!(&done[0].take_buffer().unwrap()[..], text);
    done[1].result.unwrap();
    drop(done);
    region.close().unwrap();
}

/// Major and minor number of the kernel's.
fn kernel() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let mut next = || numbers.next().unwrap().unwrap();
    (next(), next())
}

/// Where the driver can change a region, peers may do what was said last. An
/// older one (6.1) says that it cannot, and the region is what it was.
#[test]
fn set_access_changes_or_keeps_the_rights() {
    let mut pair = Pair::new(Transport::Reliable);
    let read = AccessFlags::REMOTE_READ;
    let mut region = pair.domain.alloc_remote(4096, read).unwrap();
    let (first, slice) = (region.key(), region.slice(..8).unwrap());
    let busy = region.set_access(read).unwrap_err();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop(slice);
    region.write_at(0, b"here").unwrap();
    match region.set_access(read | AccessFlags::REMOTE_WRITE) {
        Ok(()) => {
            let outgoing = pair.filled(b"changed");
            pair.a.write(outgoing, region.key(), 1).unwrap();
            pair.wait_for(1).result.unwrap();
            let mut bytes = [0; 8];
            region.read_at(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"changed\0");
            region.set_access(read).unwrap();
        }
        Err(error) => {
            assert!(kernel() < (6, 12), "{error}");
            assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}");
            assert!(error.to_string().contains("REREG_MR"), "{error}");
            assert_eq!(region.key(), first);
        }
    }
    // Either way it can be read now, and not written.
    let mut before = [0; 4];
    region.read_at(0, &mut before).unwrap();
    let buffer = pair.filled(&[0; 4]);
    pair.a.read(buffer, region.key(), 2).unwrap();
    assert_eq!(&pair.wait_for(2).take_buffer().unwrap()[..], before);
    let outgoing = pair.filled(b"no");
    pair.a.write(outgoing, region.key(), 3).unwrap();
    assert_eq!(pair.wait_for(3).status(), Status::REM_ACCESS_ERR);
    let mut after = [0; 4];
    region.read_at(0, &mut after).unwrap();
    assert_eq!(after, before);
    region.close().unwrap();
}
