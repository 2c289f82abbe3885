//! Memory through keys: device memory, on-demand paging, access by XRC peers, partial
//! changes of keys.

use crate::command::opcode as op;
use crate::engine::device_memory::START;
use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, remote, segment, status, word};

#[test]
fn device_memory_is_accessed_by_processor_and_peers() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    let pd = driver.pd;
    let from = START + 0x3000;
    let key = |driver: &mut Driver| {
        let create = Input::new(op::CREATE_MKEY, 0x110)
            // Access mode 5, in two fields.
            .or(0x10, 26, 1)
            .or(0x10, 8, 1)
            .or(0x10, 10, 0x1f)
            .or(0x14, 8, 0xff_ffff)
            .or(0x1c, 0, pd)
            .put64(0x20, from + 64)
            .put64(0x28, 128);
        driver.command(&create, 16)
    };
    assert_eq!(key(&mut driver).0, 3, "not allocated");
    let alloc = Input::new(op::ALLOC_MEMIC, 0x20)
        .put64(0x10, from)
        .or(0x18, 0, 4096)
        .or(0x1c, 0, 256);
    let output = driver.execute(&alloc, 16);
    assert_eq!(output[8..], from.to_be_bytes());
    assert_eq!(driver.command(&alloc, 16).0, 0xf, "already allocated");
    let (failed, output) = key(&mut driver);
    assert_eq!(failed, 0);
    let device = (word(&output, 8) & 0xff_ffff) << 8;
    // Access by the processor, in the register space.
    driver.hca.write(from + 64, b"by the processor");
    let (whole, entries) = (driver.key, driver.pages(1));
    let mut segments = remote(entries, whole);
    // The addresses of the key begin at 0.
    segments.extend(segment(16, device, 0));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(entries, 16), b"by the processor");
    // Access by a peer, 8 bytes further on, and an atomic.
    driver.write(entries, b"by peers");
    let mut segments = remote(8, device);
    segments.extend(segment(8, whole, entries));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    let mut read = [0; 16];
    driver.hca.read(from + 64, &mut read);
    assert_eq!(&read, b"by the pby peers");
    driver.hca.write(from + 64, &41_u64.to_be_bytes());
    let mut segments = remote(0, device);
    segments.extend(1_u64.to_be_bytes());
    segments.extend([0; 8]);
    segments.extend(segment(8, whole, entries));
    driver.post(&mut a, 0x12, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    let mut now = [0; 8];
    driver.hca.read(from + 64, &mut now);
    assert_eq!(
        (now, driver.read(entries, 8)),
        (42_u64.to_be_bytes(), 41_u64.to_be_bytes().to_vec())
    );
    // Not past the end of the key.
    let mut segments = remote(121, device);
    segments.extend(segment(8, whole, entries));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x13));
    let dealloc = Input::new(op::DEALLOC_MEMIC, 0x20).put64(0x10, from);
    driver.execute(&dealloc, 16);
    assert_eq!(driver.command(&dealloc, 16).0, 5);
}

#[test]
fn memic_operations_are_atomic() {
    let mut driver = Driver::new("ib");
    let from = START + 0x3000;
    let alloc = Input::new(op::ALLOC_MEMIC, 0x20)
        .put64(0x10, from)
        .or(0x1c, 0, 256);
    let modify = |dealloc: u32, operation: u32, at: u64| {
        Input::new(op::MODIFY_MEMIC, 0x40)
            .or(4, 0, dealloc)
            .or(0xc, 0, operation)
            .put64(0x10, at)
    };
    assert_ne!(driver.command(&modify(0, 0, from), 0x40).0, 0, "not yet");
    driver.execute(&alloc, 16);
    for (operation, at) in [(2, from), (0, from + 64)] {
        assert_ne!(driver.command(&modify(0, operation, at), 0x40).0, 0);
    }
    let address = |driver: &mut Driver, operation| {
        let output = driver.execute(&modify(0, operation, from), 0x40);
        u64::from_be_bytes(output[0x10..0x18].try_into().unwrap())
    };
    let add = address(&mut driver, 0);
    let byte = |driver: &mut Driver, at: u64| {
        let mut byte = [0xee];
        driver.hca.read(at, &mut byte);
        byte[0]
    };
    // The other operation is not permitted yet.
    let guess = add + 0x2_0000;
    driver.hca.write(from + 5, &[254]);
    assert_eq!(
        (byte(&mut driver, guess + 5), byte(&mut driver, from + 5)),
        (0, 254)
    );
    let test = address(&mut driver, 1);
    assert_eq!(test, guess);
    assert_ne!(driver.command(&modify(0, 1, from), 0x40).0, 0, "once");
    for expected in [255, 0, 2] {
        let by = if expected == 2 { 2 } else { 1 };
        driver.hca.write(add + 5, &[by]);
        assert_eq!(byte(&mut driver, from + 5), expected);
    }
    assert_eq!(byte(&mut driver, test + 5), 2);
    assert_eq!(byte(&mut driver, from + 5), 1);
    assert_eq!(
        (byte(&mut driver, from + 4), byte(&mut driver, from + 6)),
        (0, 0)
    );
    // The opposite access, other lengths, and bytes past the end have no effect.
    driver.hca.write(test + 5, &[9]);
    driver.hca.write(add + 4, &[9, 9]);
    driver.hca.write(add + 256, &[9]);
    assert_eq!(byte(&mut driver, add + 5), 0);
    let mut read = [7; 3];
    driver.hca.read(from + 4, &mut read);
    assert_eq!((read, byte(&mut driver, from + 256)), ([0, 1, 0], 0));
    driver.execute(&modify(1, 0, from), 0x40);
    assert_ne!(
        driver.command(&modify(1, 0, from), 0x40).0,
        0,
        "it has gone"
    );
    driver.hca.write(add + 5, &[1]);
    assert_eq!(byte(&mut driver, from + 5), 1);
    // Freeing the memory also removes its operations.
    driver.execute(&Input::new(op::DEALLOC_MEMIC, 0x20).put64(0x10, from), 16);
    driver.execute(&alloc, 16);
    driver.hca.write(from + 5, &[3]);
    assert_eq!(
        (byte(&mut driver, test + 5), byte(&mut driver, from + 5)),
        (0, 3)
    );
}

/// Creates a key of two pages that work requests can change, with the given entries.
fn create_modifiable_key(driver: &mut Driver, start: u64, entries: [u64; 2]) -> u32 {
    let pd = driver.pd;
    let create = Input::new(op::CREATE_MKEY, 0x120)
        // The present bits are taken from the entries.
        .or(0xc, 31, 1)
        .or(0x10, 8, 1)
        .or(0x10, 15, 1)
        .or(0x10, 10, 0x1f)
        .or(0x14, 8, 0xff_ffff)
        .or(0x1c, 0, pd)
        .put64(0x20, start)
        .put64(0x28, 8192)
        // Two entries; lists that replace them are padded to eight.
        .or(0x44, 0, 1)
        .or(0x48, 0, 12)
        .or(0x60, 0, 1)
        .put64(0x110, entries[0])
        .put64(0x118, entries[1]);
    driver.create(create) << 8
}

/// A key does not wrap around the end of the address space.
#[test]
pub(super) fn a_key_that_refers_to_itself_is_refused() {
    let mut driver = Driver::new("ib");
    let page = driver.pages(1);
    let key = driver.create_paged_key(0xfff, u64::MAX, &[page]);
    let (mut cq, mut a, _b) = driver.pair();
    // The last byte of the range, which wraps to below its start.
    driver.post(&mut a, 0x0a, SIGNALED, &segment(1, key, 0xffd));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x04));
}

/// Creates a privileged queue pair of the kernel: it may use the reserved lkey and set
/// pages of keys.
fn kernel_qp(driver: &mut Driver, cq: &Cq) -> Qp {
    driver.create_qp_with(0, cq, None, |input| input.or(0x20, 4, 1))
}

/// Posts a privileged work request that replaces entries of a key's list.
fn replace_entries(driver: &mut Driver, queue: &mut Qp, key: u32, offset: u16, entries: &[u64; 8]) {
    let list = driver.pages(1);
    for (n, entry) in entries.iter().enumerate() {
        driver.write(list + n as u64 * 8, &entry.to_be_bytes());
    }
    let mut bytes = vec![0; 48 + 64];
    // The key must be in use, and the offset is valid.
    bytes[0] = 1 << 6 | 1 << 4;
    bytes[4..6].copy_from_slice(&4_u16.to_be_bytes());
    bytes[6..8].copy_from_slice(&offset.to_be_bytes());
    bytes.extend(segment(64, driver.key, list));
    driver.post_umr(queue, key, &bytes);
}

/// Returns the page fault events so far: token, first page, number of pages.
fn page_faults(driver: &Driver) -> Vec<(u64, u64, u32)> {
    let count = driver.hca.stats().eqes;
    (0..count)
        .map(|n| driver.read(driver.eq + n * 64, 64))
        .filter(|event| event[1] == 0x0c)
        .map(|event| {
            assert_eq!((event[3], event[32]), (2, 0x80));
            let token = u64::from(word(&event, 36) & 0xffff) << 32 | u64::from(word(&event, 40));
            let va = u64::from_be_bytes(event[52..60].try_into().unwrap());
            (token, va, word(&event, 44) >> 12)
        })
        .collect()
}

fn resume(driver: &mut Driver, token: u64, error: u32) -> u8 {
    let resume = Input::new(op::PAGE_FAULT_RESUME, 16)
        .or(8, 31, error)
        .or(8, 0, (token >> 32) as u32)
        .or(12, 0, token as u32);
    driver.command(&resume, 16).0
}

/// Lets time pass until nothing is left to do.
fn advance(driver: &mut Driver, nanoseconds: u64) {
    let now = &driver.hca.platform().now;
    now.set(now.get() + nanoseconds);
    driver.run();
}

#[test]
pub(super) fn an_absent_page_is_requested_once() {
    let mut driver = Driver::new("ib-umr");
    let (mut cq, mut a, mut b) = driver.pair();
    let mut kernel = kernel_qp(&mut driver, &cq);
    driver.connect(kernel.number, 1, 1);
    let (key, page, other, to) = (
        driver.key,
        driver.pages(1),
        driver.pages(1),
        driver.pages(1),
    );
    let start = 0x7f00_0000_0000;
    let paged = create_modifiable_key(&mut driver, start, [page | 3, 0]);
    driver.write(page + 4088, b"here and");
    driver.write(other, b" there");
    driver.post_recv(&mut b, &segment(64, key, to));
    driver.post(&mut a, 0x0a, SIGNALED, &segment(14, paged, start + 4088));
    advance(&mut driver, 1_000_000);
    assert!(driver.poll(&mut cq).is_none(), "it waits");
    let requests = page_faults(&driver);
    assert_eq!(requests.len(), 1, "asked for once: {requests:x?}");
    let (token, va, pages) = requests[0];
    assert_eq!((va, pages), (start + 4096, 1));
    replace_entries(
        &mut driver,
        &mut kernel,
        paged,
        0,
        &[page | 3, other | 3, 0, 0, 0, 0, 0, 0],
    );
    assert_eq!(
        status(&driver.poll(&mut cq).unwrap()),
        (0, 0),
        "the list changed"
    );
    assert_eq!(resume(&mut driver, token, 0), 0);
    assert_eq!(resume(&mut driver, token, 0), 3, "only once");
    advance(&mut driver, 1_000_000);
    assert!(driver.poll(&mut cq).is_some() && driver.poll(&mut cq).is_some());
    assert_eq!(driver.read(to, 14), b"here and there");
}

#[test]
fn a_peer_waits_for_absent_pages() {
    let mut driver = Driver::new("ib-umr");
    let (mut cq, mut a, mut b) = driver.pair();
    let mut kernel = kernel_qp(&mut driver, &cq);
    driver.connect(kernel.number, 1, 1);
    let (key, page, from) = (driver.key, driver.pages(2), driver.pages(1));
    driver.write(from, b"late");
    let start = 0x7f00_0000_0000;
    let entries = [page | 3, (page + 4096) | 3, 0, 0, 0, 0, 0, 0];
    // A write, a receive, a read and an atomic find the page absent.
    for case in 0..4 {
        let paged = create_modifiable_key(&mut driver, start, [0, 0]);
        driver.write(page, &[0; 8]);
        match case {
            0 => {
                let mut segments = remote(start, paged);
                segments.extend(segment(4, key, from));
                driver.post(&mut a, 0x08, SIGNALED, &segments);
            }
            1 => {
                driver.post_recv(&mut b, &segment(64, paged, start));
                driver.post(&mut a, 0x0a, 0, &segment(4, key, from));
            }
            2 => {
                driver.write(page, b"read");
                let mut segments = remote(start, paged);
                segments.extend(segment(4, key, from));
                driver.post(&mut a, 0x10, SIGNALED, &segments);
            }
            _ => {
                let mut segments = remote(start, paged);
                segments.extend(9_u64.to_be_bytes());
                segments.extend([0; 8]);
                segments.extend(segment(8, key, from));
                driver.post(&mut a, 0x12, SIGNALED, &segments);
            }
        }
        advance(&mut driver, 1_000_000);
        assert!(driver.poll(&mut cq).is_none(), "{case}");
        let (token, va, _) = *page_faults(&driver).last().unwrap();
        assert_eq!(va, start);
        replace_entries(&mut driver, &mut kernel, paged, 0, &entries);
        assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0), "{case}");
        assert_eq!(resume(&mut driver, token, 0), 0);
        advance(&mut driver, 10_000_000);
        assert!(status(&driver.poll(&mut cq).unwrap()).0 < 13, "{case}");
        match case {
            0 | 1 => assert_eq!(driver.read(page, 4), b"late"),
            2 => assert_eq!(driver.read(from, 4), b"read"),
            _ => assert_eq!(driver.read(page, 8), 9_u64.to_be_bytes()),
        }
    }
}

#[test]
fn a_page_that_cannot_be_provided_is_a_protection_error() {
    let mut driver = Driver::new("ib-umr");
    let (mut cq, mut a, _b) = driver.pair();
    let start = 0x7f00_0000_0000;
    let paged = create_modifiable_key(&mut driver, start, [0, 0]);
    driver.post(&mut a, 0x0a, SIGNALED, &segment(4, paged, start));
    // The page is requested several times, because the driver may be about to provide
    // it through another key. The pauses grow.
    let mut pause = 1_000_000;
    for requests in 1..=8 {
        assert!(driver.poll(&mut cq).is_none());
        let faults = page_faults(&driver);
        assert_eq!(faults.len(), requests);
        assert_eq!(resume(&mut driver, faults[requests - 1].0, 1), 0);
        advance(&mut driver, pause - 50_000);
        assert!(driver.poll(&mut cq).is_none());
        advance(&mut driver, 200_000);
        pause *= 2;
    }
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x04));
    assert_eq!(page_faults(&driver).len(), 8);
}

#[test]
fn a_read_only_page_is_requested_for_writing() {
    let mut driver = Driver::new("ib-umr");
    let (_cq, mut a, mut b) = driver.pair();
    let (key, page, start) = (driver.key, driver.pages(1), 0x7f00_0000_0000);
    let paged = create_modifiable_key(&mut driver, start, [page | 1, 0]);
    driver.post_recv(&mut b, &segment(64, key, page));
    driver.post(&mut a, 0x0a, 0, &segment(4, paged, start));
    assert!(
        page_faults(&driver).is_empty(),
        "the page is present for reads"
    );
    let mut segments = remote(start, paged);
    segments.extend(segment(4, key, page));
    driver.post(&mut a, 0x08, 0, &segments);
    assert_eq!(page_faults(&driver).len(), 1);
}

#[test]
fn entries_outside_of_the_replaced_range_are_kept() {
    let mut driver = Driver::new("ib-umr");
    let (mut cq, mut a, mut b) = driver.pair();
    let mut kernel = kernel_qp(&mut driver, &cq);
    driver.connect(kernel.number, 1, 1);
    let (pd, whole, to) = (driver.pd, driver.key, driver.pages(1));
    // Six parts of 4096 bytes of other keys.
    let pages = driver.pages(7);
    for n in 0..7 {
        driver.write(pages + n * 4096, &[b'a' + n as u8; 4]);
    }
    let mut create = Input::new(op::CREATE_MKEY, 0x110 + 6 * 16)
        .or(0x10, 8, 3)
        .or(0x10, 15, 1)
        .or(0x10, 10, 0x1f)
        .or(0x14, 8, 0xff_ffff)
        .or(0x1c, 0, pd)
        .put64(0x28, 6 * 4096)
        .or(0x44, 0, 16)
        .or(0x48, 0, 12)
        .or(0x60, 0, 6);
    for n in 0..6 {
        create = create
            .or(0x114 + n * 16, 0, whole)
            .put64(0x118 + n * 16, pages + n as u64 * 4096);
    }
    let parts = driver.create(create) << 8;
    // The fifth part becomes the seventh page. Lists are changed in units of four
    // entries.
    let klm = u64::from(whole);
    let list = [klm, pages + 6 * 4096, klm, pages + 5 * 4096, 0, 0, 0, 0];
    replace_entries(&mut driver, &mut kernel, parts, 4, &list);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    for (n, expected) in [(0, b"aaaa"), (3, b"dddd"), (4, b"gggg"), (5, b"ffff")] {
        driver.post_recv(&mut b, &segment(64, whole, to));
        driver.post(&mut a, 0x0a, 0, &segment(4, parts, n * 4096));
        assert!(driver.poll(&mut cq).is_some());
        assert_eq!(driver.read(to, 4), expected, "part {n}");
    }
}

#[test]
fn xrc_access_uses_the_protection_domain_of_the_srq() {
    let mut driver = Driver::new("ib");
    let mut cq = driver.create_cq(4);
    let (buffer, doorbell, entries, local) = (
        driver.pages(1),
        driver.pages(1),
        driver.pages(1),
        driver.pages(1),
    );
    let (pd, key, uar) = (driver.pd, driver.key, driver.uar);
    let domain = driver.create(Input::new(op::ALLOC_XRCD, 16));
    let srqn = driver.create(
        Input::new(op::CREATE_XRC_SRQ, 0x118)
            .or(0x10, 24, 2)
            .or(0x14, 24, 1)
            .or(0x14, 0, domain)
            .or(0x18, 0, cq.number)
            .or(0x28, 0, pd)
            .put64(0x38, doorbell)
            .put64(0x110, buffer),
    );
    // The target has another protection domain than the memory.
    let other = driver.create(Input::new(op::ALLOC_PD, 16));
    let target = driver.create(
        Input::new(op::CREATE_QP, 0x118)
            .or(0x18, 16, 3)
            .or(0x1c, 0, other)
            .or(0x20, 15, 1)
            .or(0x24, 0, uar)
            .or(0xb0, 0, domain)
            .or(0xc4, 24, 3),
    );
    // It has no SRQ of its own: receive type 3, of which
    // `create_qp_with` sets the low bit.
    let mut initiator = driver.create_qp_with(3, &cq, Some(0), |input| input.or(0xc4, 24, 2));
    driver.connect(initiator.number, target, 1);
    driver.connect(target, initiator.number, 1);
    driver.write(local, b"over XRC");
    let mut segments = srqn.to_be_bytes().to_vec();
    segments.resize(16, 0);
    segments.extend(remote(entries, key));
    segments.extend(segment(8, key, local));
    driver.post(&mut initiator, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(entries, 8), b"over XRC");
}
