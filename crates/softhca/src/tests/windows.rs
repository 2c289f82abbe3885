//! Memory windows: permitted binds, and the access that they give.

use crate::command::opcode as op;
use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, remote, segment, status};

/// Returns a UMR that binds a window to a part of a key, or unbinds it.
pub(super) fn bind_umr(window: u32, qpn: u32, bound: Option<(u32, u64, u64)>) -> Vec<u8> {
    let mut bytes = vec![0; 48 + 64];
    let mut mask: u64 = 1 << 29 | 1 << 13 | 1 << 14;
    bytes[0] = 1 << 7;
    bytes[52..56].copy_from_slice(&(qpn << 8 | window & 0xff).to_be_bytes());
    match bound {
        Some((key, va, length)) => {
            mask |= 1 | 1 << 6 | 0xf << 18;
            bytes[0] |= 1 << 5;
            bytes[5] = 2;
            // Remote write, remote read, local write.
            bytes[50] = 0b11_1000;
            bytes[64..72].copy_from_slice(&va.to_be_bytes());
            bytes[72..80].copy_from_slice(&length.to_be_bytes());
            bytes.extend(segment(length as u32, key, va));
            bytes.extend([0; 48]);
        }
        None => bytes[48] = 1 << 6,
    }
    bytes[8..16].copy_from_slice(&mask.to_be_bytes());
    bytes
}

#[test]
pub(super) fn a_window_is_bound_and_unbound() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (key, memory, local) = (driver.key, driver.pages(1), driver.pages(1));
    let region = driver.create_key(memory, 4096, 0, 0b11);
    let pd = driver.pd;
    let create = Input::new(op::CREATE_MKEY, 0x110)
        .or(0x10, 30, 1)
        .or(0x10, 15, 1)
        .or(0x10, 8, 2)
        .or(0x14, 8, 0xff_ffff)
        .or(0x1c, 24, 1)
        .or(0x1c, 0, pd)
        .or(0x44, 0, 4);
    let window = driver.create(create) << 8;
    let bind = |driver: &mut Driver, b: &mut Qp, bound| {
        driver.post_umr(b, window, &bind_umr(window, b.number, bound));
    };
    bind(&mut driver, &mut b, Some((region, memory + 64, 128)));
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0), "bound");
    driver.write(local, b"through the window");
    let mut segments = remote(memory + 64, window);
    segments.extend(segment(18, key, local));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    assert_eq!(driver.read(memory + 64, 18), b"through the window");
    // A window has to be unbound before it can be bound again.
    bind(&mut driver, &mut b, None);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0), "unbound");
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x13));
}

/// A window of type 2 cannot be bound to a length of 0, and not be invalidated unless bound.
#[test]
fn a_window_of_type_2_is_not_bound_to_nothing() {
    for (bound, variant, expected) in [
        (false, 5, BIND_ERROR),
        (false, 0, BIND_ERROR),
        (true, 5, BIND_ERROR),
        (true, 0, 0),
    ] {
        let mut driver = Driver::new("ib");
        let (mut cq, _a, mut b) = driver.pair();
        let (pd, memory) = (driver.pd, driver.pages(1));
        let region = driver.create_key(memory, 4096, 0, READ | WRITE);
        let window = window(&mut driver, pd);
        if bound {
            let umr = bind_umr(window, b.number, Some((region, memory, 64)));
            let syndrome = post_bind(&mut driver, &mut cq, &mut b, window, &umr);
            assert_eq!(syndrome, 0);
        }
        let mut umr = bind_umr(window, ANY_QPN, None);
        // Check the queue pair.
        umr[0] |= 1 << 3;
        umr[55] = variant;
        let syndrome = post_bind(&mut driver, &mut cq, &mut b, window, &umr);
        assert_eq!(syndrome, expected, "{bound} {variant}");
    }
}

/// Creates a window in the driver's protection domain.
pub(super) fn window_of(driver: &mut Driver) -> u32 {
    let pd = driver.pd;
    window(driver, pd)
}

/// Creates a window in a protection domain.
fn window(driver: &mut Driver, pd: u32) -> u32 {
    let create = Input::new(op::CREATE_MKEY, 0x110)
        .or(0x10, 30, 1)
        .or(0x10, 15, 1)
        // Local read, as the kernel sets it.
        .or(0x10, 10, 1)
        .or(0x10, 8, 2)
        .or(0x14, 8, 0xff_ffff)
        .or(0x1c, 24, 1)
        .or(0x1c, 0, pd)
        .or(0x44, 0, 4);
    driver.create(create) << 8
}

/// Binds a window on the second queue pair. Returns the syndrome.
fn post_bind(driver: &mut Driver, cq: &mut Cq, b: &mut Qp, window: u32, umr: &[u8]) -> u8 {
    driver.post_umr(b, window, umr);
    status(&driver.poll(cq).unwrap()).1
}

/// Writes from the first queue pair through a window. Returns the syndrome.
fn write_through(driver: &mut Driver, cq: &mut Cq, a: &mut Qp, window: u32, va: u64) -> u8 {
    let (key, local) = (driver.key, driver.pages(1));
    let mut segments = remote(va, window);
    segments.extend(segment(8, key, local));
    driver.post(a, 0x08, SIGNALED, &segments);
    status(&driver.poll(cq).unwrap()).1
}

const ANY_QPN: u32 = 0xff_ffff;
const BIND_ERROR: u8 = 0x06;
const REMOTE_ACCESS: u8 = 0x13;
/// Rights of a key: local read, local write.
const READ: u32 = 1;
const WRITE: u32 = 1 << 1;

#[test]
fn a_bind_requires_the_rights_of_its_region() {
    for (rights, allowed) in [(READ | WRITE, true), (READ, false), (0, false)] {
        let mut driver = Driver::new("ib");
        let (mut cq, _a, mut b) = driver.pair();
        let (pd, memory) = (driver.pd, driver.pages(1));
        let region = driver.create_key(memory, 4096, 0, rights);
        let window = window(&mut driver, pd);
        let umr = bind_umr(window, ANY_QPN, Some((region, memory, 64)));
        let syndrome = post_bind(&mut driver, &mut cq, &mut b, window, &umr);
        assert_eq!(
            syndrome,
            if allowed { 0 } else { BIND_ERROR },
            "{rights:#x}"
        );
        let (mut a, _b) = driver.pair_on(&cq);
        let syndrome = write_through(&mut driver, &mut cq, &mut a, window, memory);
        assert_eq!(syndrome, if allowed { 0 } else { REMOTE_ACCESS });
    }
}

/// Binds by the kernel's own queue pairs are not checked, but each access through a
/// window is checked against the key behind it.
#[test]
pub(super) fn each_access_is_checked_against_the_region_of_a_window() {
    for (rights, forbids_binding, allowed) in [
        (READ | WRITE, false, true),
        (READ, false, false),
        (READ | WRITE, true, false),
    ] {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, b) = driver.pair();
        let (pd, memory) = (driver.pd, driver.pages(1));
        let region = driver.create_key(memory, 4096, 0, rights);
        if forbids_binding {
            assert!(driver.hca.forbid_binding(region >> 8));
        }
        let mut kernel = driver.create_qp_with(0, &cq, None, |input| input.or(0x20, 4, 1));
        driver.connect(kernel.number, 1, 1);
        let window = window(&mut driver, pd);
        let umr = bind_umr(window, b.number, Some((region, memory, 64)));
        assert_eq!(
            post_bind(&mut driver, &mut cq, &mut kernel, window, &umr),
            0
        );
        let syndrome = write_through(&mut driver, &mut cq, &mut a, window, memory);
        assert_eq!(
            syndrome,
            if allowed { 0 } else { REMOTE_ACCESS },
            "{rights:#x} {forbids_binding}"
        );
    }
}

/// Reason for which a bind is refused. A refused bind gives no access.
#[derive(Clone, Copy, Debug)]
enum BindFault {
    Nothing,
    RegionForbidsBinding,
    RegionOfAnotherDomain,
    WindowOfAnotherDomain,
    Variant,
    NoSuchRegion,
    BeforeTheRegion,
    PastTheRegion,
    LongerThanTheRegion,
    AlreadyBound,
    ToItself,
    ToPhysicalMemory,
}

#[test]
fn an_invalid_bind_fails_and_gives_no_access() {
    for fault in [
        BindFault::Nothing,
        BindFault::RegionForbidsBinding,
        BindFault::RegionOfAnotherDomain,
        BindFault::WindowOfAnotherDomain,
        BindFault::Variant,
        BindFault::NoSuchRegion,
        BindFault::BeforeTheRegion,
        BindFault::PastTheRegion,
        BindFault::LongerThanTheRegion,
        BindFault::AlreadyBound,
        BindFault::ToItself,
        BindFault::ToPhysicalMemory,
    ] {
        let mut driver = Driver::new("ib");
        let (mut cq, _a, mut b) = driver.pair();
        let (pd, memory) = (driver.pd, driver.pages(2));
        let other = driver.create(Input::new(op::ALLOC_PD, 16));
        let of = |fault| if fault { other } else { pd };
        driver.pd = of(matches!(fault, BindFault::RegionOfAnotherDomain));
        let mut region = driver.create_key(memory, 4096, 0, READ | WRITE);
        driver.pd = pd;
        let of = of(matches!(fault, BindFault::WindowOfAnotherDomain));
        let window = window(&mut driver, of);
        let (mut va, mut length) = (memory, 64);
        match fault {
            BindFault::RegionForbidsBinding => assert!(driver.hca.forbid_binding(region >> 8)),
            BindFault::Variant => region ^= 1,
            BindFault::NoSuchRegion => region += 0x1000,
            BindFault::BeforeTheRegion => va -= 8,
            BindFault::PastTheRegion => va += 4096 - 63,
            BindFault::LongerThanTheRegion => length = 4097,
            BindFault::AlreadyBound => {
                let before = bind_umr(window, ANY_QPN, Some((region, memory + 512, 64)));
                assert_eq!(post_bind(&mut driver, &mut cq, &mut b, window, &before), 0);
            }
            BindFault::ToItself => region = window,
            BindFault::ToPhysicalMemory => region = 0x300,
            _ => {}
        }
        let umr = bind_umr(window, ANY_QPN, Some((region, va, length)));
        let allowed = matches!(fault, BindFault::Nothing);
        let syndrome = post_bind(&mut driver, &mut cq, &mut b, window, &umr);
        assert_eq!(syndrome, if allowed { 0 } else { BIND_ERROR }, "{fault:?}");
        let (mut a, _b) = driver.pair_on(&cq);
        let syndrome = write_through(&mut driver, &mut cq, &mut a, window, va);
        assert_eq!(
            syndrome,
            if allowed { 0 } else { REMOTE_ACCESS },
            "{fault:?}"
        );
    }
}

#[test]
pub(super) fn a_type_2_window_belongs_to_its_queue_pair() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, mut b) = driver.pair();
    let (pd, memory) = (driver.pd, driver.pages(1));
    let region = driver.create_key(memory, 4096, 0, READ | WRITE);
    let window = window(&mut driver, pd);
    let bind = bind_umr(window, b.number, Some((region, memory, 64)));
    assert_eq!(post_bind(&mut driver, &mut cq, &mut b, window, &bind), 0);
    // Another queue pair cannot unbind it,
    let mut third = driver.create_qp(0, &cq, None);
    driver.connect(third.number, 1, 1);
    let mut unbind = bind_umr(window, ANY_QPN, None);
    unbind[0] |= 1 << 3;
    let syndrome = post_bind(&mut driver, &mut cq, &mut third, window, &unbind);
    assert_eq!(syndrome, BIND_ERROR);
    assert_eq!(
        write_through(&mut driver, &mut cq, &mut a, window, memory),
        0
    );
    // nor can the peer of another queue pair by a send with invalidate.
    let (key, there) = (driver.key, driver.pages(1));
    let mut fourth = driver.create_qp(0, &cq, None);
    let mut fifth = driver.create_qp(0, &cq, None);
    driver.connect(fourth.number, fifth.number, 1);
    driver.connect(fifth.number, fourth.number, 1);
    driver.post_recv(&mut fifth, &segment(64, key, there));
    driver.post_with(&mut fourth, 0x01, &segment(8, key, there), |control| {
        control[12..16].copy_from_slice(&window.to_be_bytes());
    });
    while let Some(entry) = driver.poll(&mut cq) {
        assert_ne!(status(&entry).1, 0);
    }
    assert_eq!(
        write_through(&mut driver, &mut cq, &mut a, window, memory),
        0
    );
    // Its own queue pair can.
    assert_eq!(post_bind(&mut driver, &mut cq, &mut b, window, &unbind), 0);
    let syndrome = write_through(&mut driver, &mut cq, &mut a, window, memory);
    assert_eq!(syndrome, REMOTE_ACCESS);
}

/// A key that is registered by a work request, as Linux's storage protocols do: whether the peer
/// may invalidate it is the request's choice.
#[test]
fn a_work_request_decides_whether_the_peer_invalidates_a_key() {
    for allowed in [false, true] {
        let mut driver = Driver::new("ib");
        let (mut cq, mut a, mut b) = driver.pair();
        let memory = driver.pages(1);
        let region = driver.create_key(memory, 4096, 0, READ | WRITE);
        let (key, pd) = (driver.key, driver.pd);
        let create = Input::new(op::CREATE_MKEY, 0x110)
            .or(0x10, 30, 1)
            .or(0x10, 15, 1)
            .or(0x10, 8, 2)
            .or(0x14, 8, 0xff_ffff)
            .or(0x1c, 0, pd)
            .or(0x44, 0, 4);
        let registered = driver.create(create) << 8;
        let mut umr = bind_umr(registered, b.number, Some((region, memory, 64)));
        // The mask's bit for EN_RINVAL, and that in the context.
        umr[14] |= 1;
        umr[60] = u8::from(allowed);
        let syndrome = post_bind(&mut driver, &mut cq, &mut b, registered, &umr);
        assert_eq!(syndrome, 0);
        driver.post_recv(&mut b, &segment(64, key, memory));
        driver.post_with(&mut a, 0x01, &segment(8, key, memory), |control| {
            control[12..16].copy_from_slice(&registered.to_be_bytes());
        });
        let received = driver.poll(&mut cq).unwrap();
        assert_eq!(status(&received).1 == 0, allowed);
    }
}

/// Only the kernel may set pages: a program whose work request sets addresses in a key
/// of its own could access all memory.
#[test]
fn a_program_cannot_change_the_pages_of_a_key() {
    let mut driver = Driver::new("ib-umr");
    let (mut cq, _a, mut b) = driver.pair();
    let (pd, page) = (driver.pd, driver.pages(1));
    let create = Input::new(op::CREATE_MKEY, 0x120)
        .or(0x10, 8, 1)
        .or(0x10, 15, 1)
        .or(0x10, 10, 0x1f)
        .or(0x14, 8, 0xff_ffff)
        .or(0x1c, 0, pd)
        .put64(0x28, 4096)
        .or(0x44, 0, 1)
        .or(0x48, 0, 12)
        .or(0x60, 0, 1)
        .put64(0x110, page);
    let paged = driver.create(create) << 8;
    let mut pages = vec![0; 48 + 64 + 64];
    // Inline, one unit.
    pages[0] = 1 << 7;
    pages[4..6].copy_from_slice(&4_u16.to_be_bytes());
    assert_eq!(
        post_bind(&mut driver, &mut cq, &mut b, paged, &pages),
        BIND_ERROR
    );
    // Nor can it change the length of the key.
    let mut longer = vec![0; 48 + 64];
    longer[8..16].copy_from_slice(&1_u64.to_be_bytes());
    longer[72..80].copy_from_slice(&(1_u64 << 40).to_be_bytes());
    let (mut cq, _a, mut b) = driver.pair();
    let syndrome = post_bind(&mut driver, &mut cq, &mut b, paged, &longer);
    assert_eq!(syndrome, BIND_ERROR);
}
