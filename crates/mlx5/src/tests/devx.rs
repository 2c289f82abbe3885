//! DevX: what is sent, and the handling of answers and refusals.

use uverbs::Errno;
use uverbs::kernel::fake::Target;

use super::objects::FakeDevice;
use super::*;
use crate::CreateError;
use crate::commands::{Capabilities, IndirectKey, KeyOptions, Psv, dc_paging};
use crate::ioctl::devx::{self, Umem, UmemInit};
use crate::ioctl::ids::*;

const GENERAL: Target = Target::Method(OBJECT_DEVX, METHOD_DEVX_OTHER);
const CREATE: Target = Target::Method(OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_CREATE);
const REGISTER: Target = Target::Method(OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_REG);

/// Answers a query of capabilities by their group: the words at these offsets.
fn capabilities(machine: &FakeDevice, words: &'static [(u16, usize, u32)]) {
    machine.fake.on(GENERAL, move |reply| {
        let input = reply.call().bytes(ATTR_DEVX_OTHER_IN).unwrap().to_vec();
        assert_eq!(be16(&input, 0), 0x100);
        let mut answer = vec![0; 16 + 4096];
        for (group, at, word) in words {
            if be16(&input, 6) == group << 1 | 1 {
                answer[16 + at..20 + at].copy_from_slice(&word.to_be_bytes());
            }
        }
        reply.set(ATTR_DEVX_OTHER_OUT, &answer);
        Ok(())
    });
}

#[test]
fn capabilities_are_those_of_their_groups() {
    let machine = FakeDevice::new();
    capabilities(
        &machine,
        &[
            (0, 0x4, 1 << 31),
            (0, 0xc, 10 << 16),
            (0, 0x24, 1 << 29 | 4 << 16 | 3),
            (0, 0x28, 1 << 14 | 1 << 13),
            (0, 0x4c, 1 << 7 | 2),
            (0, 0x80, 1),
            (0, 0x84, 1 << 12),
            (0, 0xe8, 1 << 23),
            (0x20, 0x10, 5 << 8),
            // Another group's word at the same place.
            (0x20, 0x24, u32::MAX),
            (2, 0x20, 1 << 31 | 1 << 26),
        ],
    );
    let caps = Capabilities::query(&machine.context).unwrap();
    assert_eq!(caps.dc_reads, [16, 8]);
    assert_eq!((caps.longest_memcpy, caps.memcpy_by_qp), (1024, true));
    assert!(caps.udp_source_port && caps.extended_context);
    assert!(caps.lag_affinity && caps.lag_change);
    assert_eq!(caps.general_objects, 1 << 32 | 1 << 12);
    assert_eq!((caps.lag_ports, caps.log_reserved_numbers), (2, 5));
    // Sends, and receives of shared queues.
    assert_eq!(dc_paging(&machine.context).unwrap(), 1 | 1 << 5);
    capabilities(&machine, &[]);
    let caps = Capabilities::query(&machine.context).unwrap();
    assert_eq!((caps.longest_memcpy, caps.general_objects), (0, 0));
}

#[test]
fn a_context_without_devx_has_no_capabilities() {
    let machine = FakeDevice::new();
    for errno in [libc::EPROTONOSUPPORT, libc::EINVAL] {
        machine.fake.on(GENERAL, move |_| Err(Errno::new(errno)));
        assert_eq!(
            Capabilities::query(&machine.context).unwrap(),
            Capabilities::default()
        );
        assert_eq!(dc_paging(&machine.context).unwrap(), 0);
    }
    machine.fake.on(GENERAL, |_| Err(Errno::new(libc::EIO)));
    assert_eq!(
        Capabilities::query(&machine.context).unwrap_err().errno(),
        libc::EIO
    );
}

#[test]
fn a_refusal_of_the_device_has_its_status() {
    let machine = FakeDevice::new();
    for (status, errno) in [
        (3, libc::EINVAL),
        (6, libc::EBUSY),
        (8, libc::ENOMEM),
        (77, libc::EIO),
    ] {
        machine.fake.on(CREATE, move |reply| {
            let mut answer = [0; 16];
            (answer[0], answer[7]) = (status, 9);
            reply.set(ATTR_DEVX_OBJ_CREATE_OUT, &answer);
            Err(Errno::new(libc::EREMOTEIO))
        });
        let error = IndirectKey::create(&machine.context, 1, 4, KeyOptions::default()).unwrap_err();
        assert_eq!(error.errno(), errno);
        let text = error.to_string();
        assert!(
            text.contains("CREATE_MKEY") && text.contains("syndrome 0x9"),
            "{text}"
        );
    }
    // Without a status it is the kernel's error.
    for raw in [libc::EINVAL, libc::EREMOTEIO] {
        machine.fake.on(CREATE, move |_| Err(Errno::new(raw)));
        let error = IndirectKey::create(&machine.context, 1, 4, KeyOptions::default()).unwrap_err();
        assert!(matches!(error, CreateError::Command(_)));
        assert_eq!(error.errno(), raw);
    }
    machine.assert_only_domains_left();
}

#[test]
fn an_indirect_key_is_created_free() {
    let machine = FakeDevice::new();
    machine.fake.on(CREATE, |reply| {
        let input = reply
            .call()
            .bytes(ATTR_DEVX_OBJ_CREATE_IN)
            .unwrap()
            .to_vec();
        assert_eq!(input.len(), 272);
        assert_eq!(be16(&input, 0), 0x200);
        // Free, changed by work requests, local reads, lists; any queue pair.
        assert_eq!(be32(&input, 16), 1 << 30 | 1 << 15 | 1 << 10 | 2 << 8);
        assert_eq!(be32(&input, 20), 0xffff_ff00);
        assert_eq!(be32(&input, 28), 1 << 24 | 0x12_3456);
        assert_eq!(be32(&input, 16 + 0x34), 8);
        assert_eq!(be32(&input, 16 + 0x20) | be32(&input, 16 + 0x3c), 0);
        let mut answer = [0; 16];
        // Of the index 24 bits count.
        answer[8..12].copy_from_slice(&0xab00_0102u32.to_be_bytes());
        reply.set(ATTR_DEVX_OBJ_CREATE_OUT, &answer);
        Ok(())
    });
    let options = KeyOptions {
        remote_invalidate: true,
        ..KeyOptions::default()
    };
    let key = IndirectKey::create(&machine.context, 0xff12_3456, 5, options).unwrap();
    assert_eq!((key.key, key.entries), (0x0001_0200, 8));
    drop(key);
    machine.assert_only_domains_left();
    let refused = IndirectKey::create(&machine.context, 1, u16::MAX, KeyOptions::default());
    assert!(matches!(refused, Err(CreateError::TooLarge { .. })));
}

#[test]
fn protected_keys_have_formats_and_psvs() {
    let machine = FakeDevice::new();
    for (signatures, encryption, octowords) in [(true, false, 4), (false, true, 4), (true, true, 8)]
    {
        machine.fake.on(CREATE, move |reply| {
            let input = reply
                .call()
                .bytes(ATTR_DEVX_OBJ_CREATE_IN)
                .unwrap()
                .to_vec();
            assert_eq!(be32(&input, 28), 1 << 30 | 3);
            assert_eq!(be32(&input, 16 + 0x20), octowords);
            assert_eq!(be32(&input, 16 + 0x3c) != 0, encryption);
            reply.set(ATTR_DEVX_OBJ_CREATE_OUT, &[0; 16]);
            Ok(())
        });
        let options = KeyOptions {
            signatures,
            encryption,
            ..KeyOptions::default()
        };
        IndirectKey::create(&machine.context, 3, 5, options).unwrap();
    }
    machine.fake.on(CREATE, |reply| {
        let input = reply
            .call()
            .bytes(ATTR_DEVX_OBJ_CREATE_IN)
            .unwrap()
            .to_vec();
        assert_eq!((be16(&input, 0), be32(&input, 8)), (0x600, 1 << 28 | 3));
        let mut answer = [0; 32];
        answer[16..20].copy_from_slice(&0xab12_3456u32.to_be_bytes());
        reply.set(ATTR_DEVX_OBJ_CREATE_OUT, &answer);
        Ok(())
    });
    assert_eq!(Psv::create(&machine.context, 3).unwrap().number, 0x12_3456);
}

#[test]
fn memory_is_deregistered_when_it_is_dropped() {
    let machine = FakeDevice::new();
    machine.fake.on(REGISTER, |reply| {
        reply.set(ATTR_DEVX_UMEM_REG_NUMBER, &7u32.to_ne_bytes());
        Ok(())
    });
    let init = UmemInit {
        addr: 0x1000,
        length: 0x2000,
        access: 1,
        page_sizes: None,
        dmabuf: None,
    };
    // SAFETY: there is no device.
    let (memory, number) = unsafe { Umem::register(&machine.context, &init) }.unwrap();
    assert_eq!(number, 7);
    assert_eq!(machine.fake.live_objects().len(), 1);
    drop(memory);
    assert!(machine.fake.live_objects().is_empty());
    machine.fake.on(REGISTER, |reply| {
        reply.set_unwritten(ATTR_DEVX_UMEM_REG_NUMBER);
        Ok(())
    });
    // SAFETY: there is no device.
    let error = unsafe { Umem::register(&machine.context, &init) }.unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTO);
    assert!(machine.fake.live_objects().is_empty());
}

#[test]
fn an_answer_of_the_device_is_there_when_it_refuses() {
    let machine = FakeDevice::new();
    machine.fake.on(GENERAL, |reply| {
        reply.set(ATTR_DEVX_OTHER_OUT, &[3; 16]);
        Err(Errno::new(libc::EREMOTEIO))
    });
    let mut answer = [0; 16];
    // SAFETY: there is no device.
    let result = unsafe { devx::general(&machine.context, &[0; 16], &mut answer) };
    assert_eq!(result.unwrap_err().errno().raw(), libc::EREMOTEIO);
    assert_eq!(answer, [3; 16]);
}
