//! Commands and their mailboxes.

use crate::command::opcode as op;
use crate::command::protection::{ENCRYPTION_KEY, LOGIN};
use crate::fault::Action;
use crate::platform::Memory;
use crate::testing::driver::{Driver, Input, word};

const QUEUE: u64 = 0x8000;
const MAILBOX: u64 = 0xa000;

fn install_command_queue(driver: &mut Driver) {
    driver.hca.write(0x10, &[0; 4]);
    driver.hca.write(0x14, &(QUEUE as u32).to_be_bytes());
}

/// Writes a command to a slot, with its input and output in mailboxes where they are
/// long.
fn write_command(driver: &Driver, slot: u64, input: &[u8], output: u32) -> u64 {
    let entry = QUEUE + slot * 64;
    let mut bytes = [0; 64];
    bytes[0] = 7;
    bytes[4..8].copy_from_slice(&(input.len() as u32).to_be_bytes());
    bytes[8..16].copy_from_slice(&MAILBOX.to_be_bytes());
    let inline = input.len().min(16);
    bytes[16..16 + inline].copy_from_slice(&input[..inline]);
    bytes[48..56].copy_from_slice(&(MAILBOX + 0x4000).to_be_bytes());
    bytes[56..60].copy_from_slice(&output.to_be_bytes());
    bytes[60] = 0x5a;
    bytes[63] = 1;
    for (base, length) in [(MAILBOX, input.len()), (MAILBOX + 0x4000, output as usize)] {
        let blocks = length.saturating_sub(16).div_ceil(512);
        for n in 0..blocks {
            let at = base + n as u64 * 1024;
            let mut block = [0; 576];
            if base == MAILBOX {
                let part = &input[16 + n * 512..];
                let part = &part[..part.len().min(512)];
                block[..part.len()].copy_from_slice(part);
            }
            block[560..568].copy_from_slice(&(at + 1024).to_be_bytes());
            block[568..572].copy_from_slice(&(n as u32).to_be_bytes());
            block[573] = 0x5a;
            driver.write(at, &block);
        }
    }
    driver.write(entry, &bytes);
    entry
}

#[test]
pub(super) fn a_command_goes_through_queue_and_mailboxes() {
    let mut driver = Driver::new("ib");
    install_command_queue(&mut driver);
    let query = Input::new(op::QUERY_HCA_CAP, 16).or(4, 0, 1);
    let entry = write_command(&driver, 3, &query.0, 16 + 4096);
    driver.hca.write(0x18, &(1_u32 << 3).to_be_bytes());
    assert_eq!(driver.read(entry + 63, 1), [0], "delivered without error");
    assert_eq!(driver.read(entry + 32, 1), [0]);
    // log_max_qp in the first block of the output, and the InfiniBand port type in the
    // word at 0x34.
    let capabilities = driver.read(MAILBOX + 0x4000, 512);
    assert_eq!(word(&capabilities, 0x10) & 0x1f, 17);
    assert_eq!(word(&capabilities, 0x34) >> 8 & 3, 0);
    // An event with the bit of the slot.
    let event = driver.read(driver.eq, 64);
    assert_eq!((event[1], word(&event, 32), event[63]), (0x0a, 1 << 3, 0));
}

#[test]
fn long_inputs_are_read_from_several_mailboxes() {
    let mut driver = Driver::new("ib");
    install_command_queue(&mut driver);
    // A key of 200 pages; its input takes four mailbox blocks.
    let mut create = Input::new(op::CREATE_MKEY, 0x110 + 200 * 8)
        .or(0x10, 8, 1)
        .or(0x10, 10, 0x1f)
        .or(0x14, 8, 0xff_ffff)
        .or(0x48, 0, 12)
        .or(0x44, 0, 100)
        .or(0x60, 0, 100)
        .put64(0x28, 200 * 4096);
    create = create.or(0x1c, 0, driver.pd);
    for n in 0..200 {
        create = create.put64(0x110 + n * 8, 0x20_0000 + (199 - n as u64) * 4096);
    }
    let entry = write_command(&driver, 0, &create.0, 16);
    driver.hca.write(0x18, &1_u32.to_be_bytes());
    assert_eq!(driver.read(entry + 63, 1), [0]);
    let output = driver.read(entry + 32, 16);
    assert_eq!(output[0], 0);
    assert_ne!(word(&output, 8) & 0xff_ffff, 0);
}

#[test]
pub(super) fn a_malformed_mailbox_is_a_delivery_error() {
    let mut driver = Driver::new("ib");
    install_command_queue(&mut driver);
    let input = Input::new(op::CREATE_CQ, 0x118);
    for (offset, byte, status) in [(573, 0, 2), (571, 9, 3)] {
        let entry = write_command(&driver, 0, &input.0, 16);
        driver.write(MAILBOX + offset, &[byte]);
        driver.hca.write(0x18, &1_u32.to_be_bytes());
        assert_eq!(driver.read(entry + 63, 1), [status << 1]);
    }
    let entry = write_command(&driver, 0, &input.0, 16);
    driver.write(entry + 8, &[0xff; 8]);
    driver.hca.write(0x18, &1_u32.to_be_bytes());
    assert_eq!(driver.read(entry + 63, 1), [5 << 1]);
}

#[test]
fn an_object_is_destroyed_once() {
    let mut driver = Driver::new("roce");
    let pd = driver.create(Input::new(op::ALLOC_PD, 16));
    assert_ne!(pd, driver.pd);
    let dealloc = Input::new(op::DEALLOC_PD, 16).or(8, 0, pd);
    driver.execute(&dealloc, 16);
    let (status, output) = driver.command(&dealloc, 16);
    assert_eq!(status, 5);
    assert_ne!(word(&output, 4), 0, "a syndrome");
}

#[test]
fn an_object_in_use_is_not_destroyed() {
    let mut driver = Driver::new("ib");
    let cq = driver.create_cq(4);
    let qp = driver.create_qp(0, &cq, None);
    let destroy_cq = Input::new(op::DESTROY_CQ, 16).or(8, 0, cq.number);
    assert_eq!(driver.command(&destroy_cq, 16).0, 6);
    let dealloc = Input::new(op::DEALLOC_PD, 16).or(8, 0, driver.pd);
    assert_eq!(driver.command(&dealloc, 16).0, 6);
    driver.execute(&Input::new(op::DESTROY_QP, 16).or(8, 0, qp.number), 16);
    driver.execute(&destroy_cq, 16);
}

#[test]
fn queue_pair_state_transitions_are_checked() {
    let mut driver = Driver::new("ib");
    let cq = driver.create_cq(4);
    let qp = driver.create_qp(0, &cq, None);
    let to_rtr = Input::new(op::INIT2RTR_QP, 0x110).or(8, 0, qp.number);
    assert_eq!(driver.command(&to_rtr, 16).0, 0x10);
    driver.connect(qp.number, qp.number, 1);
    let query = Input::new(op::QUERY_QP, 16).or(8, 0, qp.number);
    let output = driver.execute(&query, 0x110);
    assert_eq!(word(&output, 0x18) >> 28, 3, "ready to send");
    assert_eq!(word(&output, 0x2c) & 0xff_ffff, qp.number);
    assert_eq!(word(&output, 0x90) & 0xff_ffff, 100, "the next PSN");
    assert_eq!(word(&output, 0x28) & 0xff_ffff, 7, "the user index");
}

#[test]
fn an_unknown_command_fails() {
    let mut driver = Driver::new("ib");
    assert_eq!(driver.command(&Input::new(0xfff, 16), 16).0, 2);
    // Input and output may have any length.
    driver.hca.execute(&[], 0);
    driver.hca.execute(&[1], 3);
}

#[test]
fn an_injected_fault_occurs_as_often_as_requested() {
    let mut driver = Driver::new("ib");
    driver.hca.inject_next(Action::FailCommand(op::ALLOC_PD), 1);
    let alloc = Input::new(op::ALLOC_PD, 16);
    assert_eq!(driver.command(&alloc, 16).0, 1);
    assert_eq!(driver.command(&alloc, 16).0, 0);
}

#[test]
fn pages_are_returned_as_provided() {
    let mut driver = Driver::new("ib");
    let query = Input::new(op::QUERY_PAGES, 16).or(4, 0, 1);
    let requested = word(&driver.execute(&query, 16), 12);
    assert!(requested > 0);
    let mut give = Input::new(op::MANAGE_PAGES, 16 + requested as usize * 8)
        .or(4, 0, 1)
        .or(12, 0, requested);
    for n in 0..requested as usize {
        give = give.put64(16 + n * 8, 0x1000 * (n as u64 + 1));
    }
    driver.execute(&give, 16);
    assert_eq!(word(&driver.execute(&query, 16), 12), 0);
    let take = Input::new(op::MANAGE_PAGES, 16).or(4, 0, 2).or(12, 0, 1000);
    let output = driver.execute(&take, 16 + 8 * 1000);
    assert_eq!(word(&output, 8), requested);
    assert_eq!(word(&output, 20), 0x1000);
}

#[test]
fn registers_read_as_the_driver_expects() {
    let mut driver = Driver::new("ib");
    let mut read = |offset| {
        let mut bytes = [0; 4];
        driver.hca.read(offset, &mut bytes);
        u32::from_be_bytes(bytes)
    };
    assert_eq!(read(0x4) >> 16, 5);
    assert_eq!(read(0x14) & 0xff, 0x56);
    assert_eq!(read(0x1fc) >> 31, 0);
    assert_eq!(read(0x1010) >> 24, 0);
    driver.hca.platform().now.set(1 << 40);
    let mut timer = [0; 8];
    driver.hca.read(0x1000, &mut timer);
    assert_eq!(u64::from_be_bytes(timer) >> 40, 1);
    assert!(driver.hca.platform().read(u64::MAX, &mut [0; 4]).is_err());
}

#[test]
fn the_communication_manager_capability_is_modifiable() {
    let mut driver = Driver::new("ib");
    let query = Input::new(op::QUERY_HCA_VPORT_CONTEXT, 16);
    let capabilities = |driver: &mut Driver| {
        let output = driver.execute(&query, 0x10 + 512);
        (word(&output, 0x50), word(&output, 0x54))
    };
    let (before, modifiable) = capabilities(&mut driver);
    assert_eq!((before & 1 << 16, modifiable), (1 << 16, 1 << 16));
    // Clears that bit, and others that cannot be changed.
    let modify = Input::new(op::MODIFY_HCA_VPORT_CONTEXT, 0x10 + 512).or(0x54, 0, u32::MAX);
    driver.execute(&modify, 16);
    assert_eq!(capabilities(&mut driver).0, before & !(1 << 16));
}

#[test]
fn user_contexts_and_reserved_qpns_are_allocated_and_freed() {
    let mut driver = Driver::new("roce-umr");
    let create = Input::new(op::CREATE_UCTX, 64);
    let (one, two) = (driver.create(create.clone()), driver.create(create));
    assert!(one != 0 && one != two);
    let destroy = Input::new(op::DESTROY_UCTX, 16).or(8, 0, one);
    driver.execute(&destroy, 16);
    assert_ne!(driver.command(&destroy, 16).0, 0);
    // Ranges of 64 queue pair numbers that are reserved: no queue gets one.
    let create = |kind: u32, log: u32| {
        Input::new(op::CREATE_GENERAL_OBJECT, 32)
            .or(4, 0, kind)
            .or(0xc, 24, log)
    };
    let (a, b) = (
        driver.create(create(0x2c, 6)),
        driver.create(create(0x2c, 6)),
    );
    assert!(a > 1 << 17 && a.abs_diff(b) == 64);
    assert_ne!(driver.command(&create(0x2c, 7), 16).0, 0, "a longer range");
    assert_ne!(driver.command(&create(0x20, 0), 16).0, 0, "another type");
    for (object, exists) in [(a + 1, false), (a, true), (a, false), (0, false)] {
        let destroy = Input::new(op::DESTROY_GENERAL_OBJECT, 32)
            .or(4, 0, 0x2c)
            .or(8, 0, object);
        assert_eq!(driver.command(&destroy, 16).0 == 0, exists, "{object:#x}");
    }
}

#[test]
fn the_udp_port_of_a_connected_queue_pair_is_modifiable() {
    let mut driver = Driver::new("roce-umr");
    let (_cq, a, _b) = driver.pair();
    let port = |driver: &mut Driver| {
        let query = Input::new(op::QUERY_QP, 16).or(8, 0, a.number);
        word(&driver.execute(&query, 0x110), 0x50) & 0xffff
    };
    let before = port(&mut driver);
    let change = Input::new(op::RTS2RTS_QP, 0x110)
        .or(8, 0, a.number)
        .or(0x50, 0, 0xc123);
    driver.execute(&change, 16);
    assert_eq!(port(&mut driver), before, "the mask does not name it");
    driver.execute(&change.or(0x10c, 0, 1 << 2), 16);
    assert_eq!(port(&mut driver), 0xc123);
}

#[test]
fn scheduling_elements_are_a_tree() {
    let mut driver = Driver::new("roce-umr");
    let (_cq, a, _b) = driver.pair();
    // Element types: 0 is an inner element, 4 a group of queues.
    let create = |kind: u32, parent: u32| {
        Input::new(op::CREATE_GENERAL_OBJECT, 80)
            .or(4, 0, 0x26)
            .or(0x18, 24, 3)
            .or(0x30, 24, kind)
            .or(0x38, 0, parent)
            .or(0x44, 0, 2)
            .or(0x48, 0, 10)
    };
    let object =
        |opcode, length, number: u32| Input::new(opcode, length).or(4, 0, 0x26).or(8, 0, number);
    let root = driver.create(create(0, 0));
    let group = driver.create(create(4, root));
    for (kind, parent) in [(4, 0), (4, group), (0, 99), (1, root)] {
        let (status, _) = driver.command(&create(kind, parent), 16);
        assert_ne!(status, 0, "type {kind} below {parent}");
    }
    // Changes the share only.
    let modify = object(op::MODIFY_GENERAL_OBJECT, 80, group)
        .or(0x14, 0, 1)
        .or(0x44, 0, 7)
        .or(0x48, 0, 8);
    driver.execute(&modify, 16);
    let output = driver.execute(&object(op::QUERY_GENERAL_OBJECT, 16, group), 80);
    assert_eq!(word(&output, 0x30) >> 24, 4);
    assert_eq!(word(&output, 0x38), root);
    assert_eq!((word(&output, 0x44), word(&output, 0x48)), (7, 10));
    // A queue pair can be attached to a group only.
    for (number, is_group) in [(group, true), (0, true), (root, false), (77, false)] {
        let attach = Input::new(op::RTS2RTS_QP, 0x1d0)
            .or(8, 0, 1 << 31 | a.number)
            .or(0x10c, 0, 1 << 1)
            .or(0x114, 0, number);
        assert_eq!(driver.command(&attach, 16).0 == 0, is_group, "{number}");
    }
    let destroy = |number| object(op::DESTROY_GENERAL_OBJECT, 16, number);
    assert_ne!(driver.command(&destroy(root), 16).0, 0, "it has a group");
    for number in [group, root] {
        driver.execute(&destroy(number), 16);
        assert_ne!(
            driver.command(&destroy(number), 16).0,
            0,
            "already destroyed"
        );
    }
}

#[test]
fn an_address_is_mapped_only_to_an_existing_queue_pair() {
    let mut driver = Driver::new("roce-umr");
    let (_cq, a, _b) = driver.pair();
    let create = |qpn: u32| {
        Input::new(op::CREATE_GENERAL_OBJECT, 80)
            .or(4, 0, 0x3a)
            .or(0x1c, 0, qpn)
    };
    assert_ne!(driver.command(&create(0xff_fff0), 16).0, 0);
    let mapping = driver.create(create(a.number));
    let destroy = Input::new(op::DESTROY_GENERAL_OBJECT, 16)
        .or(4, 0, 0x3a)
        .or(8, 0, mapping);
    driver.execute(&destroy, 16);
    assert_ne!(driver.command(&destroy, 16).0, 0);
}

/// A user context with a protection domain, a UAR and two pages of memory.
fn program(driver: &mut Driver) -> (u32, u32, u32, u32) {
    let uid = driver.create(Input::new(op::CREATE_UCTX, 64));
    let of_program = |input: Input| input.or(0, 0, uid);
    let pd = driver.create(of_program(Input::new(op::ALLOC_PD, 16)));
    let uar = driver.create(of_program(Input::new(op::ALLOC_UAR, 16)));
    let pages = driver.pages(2);
    let umem = of_program(Input::new(op::CREATE_UMEM, 0x30 + 16))
        .put64(0x28, 2)
        .put64(0x30, pages | 3)
        .put64(0x38, (pages + 4096) | 3);
    (uid, pd, uar, driver.create(umem))
}

/// A completion queue of 64 entries at the beginning of the memory, with records in the
/// second page.
fn program_cq(driver: &Driver, uid: u32, uar: u32, umem: u32) -> Input {
    Input::new(op::CREATE_CQ, 0x110)
        .or(0, 0, uid)
        .or(0x10, 25, 1)
        .or(0x14, 0, umem)
        .or(0x1c, 24, 6)
        .or(0x1c, 0, uar)
        .or(0x24, 0, driver.eqn)
        .put64(0x48, 4096)
        .or(0x58, 0, umem)
        .or(0x5c, 31, 1)
}

#[test]
fn wrapped_encryption_keys_require_a_login() {
    // By `openssl enc -id-aes128-wrap`: the credential, and a key of the bytes 1 to 32.
    const CREDENTIAL: [u64; 6] = [
        0xef70_d3b2_dea4_6ecc,
        0x35f5_b8d6_7a6f_815c,
        0xc91a_763e_c82d_3219,
        0x83b9_9610_2ff4_4a08,
        0x9c3c_ee80_0465_7b62,
        0x9f20_1a75_a1a2_ed68,
    ];
    const KEY: [u64; 5] = [
        0x023a_241e_6345_ba7d,
        0x06b2_5b31_49f6_2d00,
        0xa5e3_d5c1_2e37_1765,
        0xda8e_5d01_e47e_2da0,
        0xf9c1_85d2_6a6b_45c9,
    ];
    let create = |uid, kind, secret: &[u64]| {
        let create = Input::new(op::CREATE_GENERAL_OBJECT, 0x110);
        let input = create.or(0, 0, uid).or(4, 0, kind);
        let words = (0x50..).step_by(8).zip(secret);
        words.fold(input, |input, (at, word)| input.put64(at, *word))
    };
    let login = |uid| create(uid, LOGIN, &CREDENTIAL);
    let key = |uid, pd, secret: &[u64]| {
        let input = create(uid, ENCRYPTION_KEY, secret);
        input.or(0x18, 0, 3).or(0x1c, 0, pd)
    };
    let mut driver = Driver::new("roce-wrapped");
    let (one, pd, ..) = program(&mut driver);
    let (two, other, ..) = program(&mut driver);
    assert_eq!(driver.command(&key(one, pd, &KEY), 16).0, 5);
    assert_eq!(driver.command(&create(one, LOGIN, &KEY), 16).0, 3);
    assert_eq!(driver.command(&login(one).or(0x20, 0, 1), 16).0, 5);
    assert_eq!(driver.command(&login(one).or(0x24, 0, 1), 16).0, 5);
    let object = driver.create(login(one));
    assert_eq!(driver.command(&login(one), 16).0, 9);
    let wrapped = driver.create(key(one, pd, &KEY));
    let query = {
        let input = Input::new(op::QUERY_GENERAL_OBJECT, 32).or(0, 0, one);
        input.or(4, 0, ENCRYPTION_KEY).or(8, 0, wrapped)
    };
    driver.execute(&query, 0x110);
    assert_eq!(driver.command(&key(one, pd, &CREDENTIAL), 16).0, 3);
    assert_eq!(driver.command(&key(two, other, &KEY), 16).0, 5);
    let of_login = |opcode| {
        let input = Input::new(opcode, 32).or(0, 0, one).or(4, 0, LOGIN);
        input.or(8, 0, object)
    };
    driver.execute(&of_login(op::QUERY_GENERAL_OBJECT), 0x110);
    driver.execute(&of_login(op::DESTROY_GENERAL_OBJECT), 16);
    assert_ne!(
        driver.command(&of_login(op::QUERY_GENERAL_OBJECT), 0x110).0,
        0
    );
    assert_eq!(driver.command(&key(one, pd, &KEY), 16).0, 5);
    assert_eq!(driver.command(&query, 0x110).0, 5);
    // Logins are refused where keys are not wrapped.
    let mut plain = Driver::new("roce-umr");
    let (uid, ..) = program(&mut plain);
    assert_eq!(plain.command(&login(uid), 16).0, 9);
}

#[test]
fn programs_can_only_name_their_own_objects() {
    let mut driver = Driver::new("ib-devx");
    let (one, pd, uar, umem) = program(&mut driver);
    let (two, ..) = program(&mut driver);
    let cq = program_cq(&driver, one, uar, umem);
    let not_owned = program_cq(&driver, two, uar, umem);
    assert_eq!(driver.command(&not_owned, 16).0, 5);
    let cqn = driver.create(cq);
    // Nor the driver's objects; the driver can name all objects.
    let not_owned = program_cq(&driver, one, driver.uar, umem);
    assert_eq!(driver.command(&not_owned, 16).0, 5);
    for (uid, status) in [(one, 0), (two, 5), (0, 0), (99, 3)] {
        let query = Input::new(op::QUERY_CQ, 16).or(0, 0, uid).or(8, 0, cqn);
        assert_eq!(driver.command(&query, 0x50).0, status, "context {uid}");
        let query = Input::new(op::QUERY_ISSI, 16).or(0, 0, uid);
        assert_eq!(driver.command(&query, 0x70).0 == 0, uid != 99);
        let key = Input::new(op::CREATE_MKEY, 0x110)
            .or(0, 0, uid)
            .or(0x10, 8, 2)
            .or(0x1c, 0, pd);
        assert_eq!(driver.command(&key, 16).0, status, "context {uid}");
    }
    for opcode in [
        op::CREATE_EQ,
        op::DISABLE_HCA,
        op::ACCESS_REG,
        op::SET_HCA_CAP,
    ] {
        let not_permitted = Input::new(opcode, 16).or(0, 0, one);
        assert_eq!(driver.command(&not_permitted, 16).0, 2);
    }
    // All of memory.
    let key = Input::new(op::CREATE_MKEY, 0x110)
        .or(0, 0, one)
        .or(0x1c, 0, pd);
    assert_eq!(driver.command(&key, 16).0, 3);
    // The reserved lkey.
    for opcode in [op::CREATE_SQ, op::CREATE_RQ] {
        let queue = Input::new(opcode, 0x118)
            .or(0, 0, one)
            .or(0x28, 0, cqn)
            .or(0x58, 0, pd)
            .or(0x70, 16, 6)
            .or(0x78, 0, umem)
            .or(0x74, 30, 3)
            .or(0x7c, 0, umem);
        assert_eq!(driver.command(&queue.clone().or(0x20, 31, 1), 16).0, 3);
        driver.create(queue);
    }
    // Programs may query the driver's shared objects, but not destroy them.
    let counters = Input::new(op::ALLOC_Q_COUNTER, 16).or(0, 0, 0xffff);
    let (_, output) = driver.command(&counters, 16);
    let counters = u32::from(output[11]);
    let query = Input::new(op::QUERY_Q_COUNTER, 0x20)
        .or(0, 0, one)
        .or(0x1c, 0, counters);
    assert_eq!(driver.command(&query, 0x100).0, 0);
    let dealloc = |uid| {
        let input = Input::new(op::DEALLOC_Q_COUNTER, 16);
        input.or(0, 0, uid).or(8, 0, counters)
    };
    assert_eq!(driver.command(&dealloc(one), 16).0, 5);
    assert_eq!(driver.command(&dealloc(0xffff), 16).0, 0);
    let destroy = Input::new(op::DESTROY_UCTX, 16).or(8, 0, one);
    assert_eq!(
        driver.command(&destroy, 16).0,
        6,
        "the context still has objects"
    );
}

#[test]
fn a_umem_in_use_is_not_destroyed() {
    let mut driver = Driver::new("ib-devx");
    let (uid, _, uar, umem) = program(&mut driver);
    let (_, _, _, other) = program(&mut driver);
    let cq = program_cq(&driver, uid, uar, umem);
    // Beyond the memory; records that are not aligned; memory of another program.
    for (at, value, status) in [
        (0x50, 4096 + 64, 3),
        (0x50, u64::MAX, 3),
        (0x48, 4096 + 4, 3),
        (0x48, 8192 - 4, 3),
        (0x48, u64::MAX - 7, 3),
        (0x58, u64::from(other) << 32 | 1 << 31, 5),
        (0x58, 0xffff << 32 | 1 << 31, 5),
    ] {
        let mut invalid = cq.clone();
        invalid.0[at..at + 8].copy_from_slice(&value.to_be_bytes());
        assert_eq!(driver.command(&invalid, 16).0, status, "{at:#x} {value:#x}");
    }
    let cqn = driver.create(cq);
    let of_program = |opcode, number| Input::new(opcode, 16).or(0, 0, uid).or(8, 0, number);
    let destroy = of_program(op::DESTROY_UMEM, umem);
    assert_eq!(driver.command(&destroy, 16).0, 6);
    driver.execute(&of_program(op::DESTROY_CQ, cqn), 16);
    driver.execute(&destroy, 16);
    assert_eq!(driver.command(&destroy, 16).0, 5);
    // Pages that are missing, that may not be read, or are too large.
    let umem = |count, entry: u64, size| {
        Input::new(op::CREATE_UMEM, 0x38)
            .or(0, 0, uid)
            .or(0x20, 0, size)
            .put64(0x28, count)
            .put64(0x30, entry)
    };
    for (count, entry, size) in [(0, 1, 0), (2, 1, 0), (u64::MAX, 1, 0), (1, 2, 0)] {
        assert_ne!(driver.command(&umem(count, entry, size), 16).0, 0);
    }
    let offset = umem(1, 1, 0).or(0x24, 0, 4096);
    assert_eq!(driver.command(&offset, 16).0, 3);
    driver.execute(&umem(1, 1, 31), 16);
}

#[test]
pub(super) fn the_link_counts_when_it_goes_down() {
    let mut driver = Driver::new("ib");
    let downed = |driver: &mut Driver, group: u32| {
        let query = Input::new(op::ACCESS_REG, 0x20)
            .or(0x4, 0, 1)
            .or(0x8, 0, 0x5008)
            .or(0x10, 0, group);
        driver.execute(&query, 0x110)[0x1b]
    };
    assert_eq!(downed(&mut driver, 0x20), 0);
    for plugged in [false, false, true, false] {
        driver.hca.set_cable(plugged);
    }
    assert_eq!((downed(&mut driver, 0x20), downed(&mut driver, 0)), (2, 0));
    for _ in 0..300 {
        driver.hca.set_cable(true);
        driver.hca.set_cable(false);
    }
    assert_eq!(downed(&mut driver, 0x20), 255);
}
