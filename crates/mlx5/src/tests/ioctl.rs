//! mlx5_ib's ioctl methods: the attributes that are sent, and the handling of
//! the answer.

use uverbs::abi::ids::*;
use uverbs::kernel::fake::{IoctlCall, Target};
use uverbs::{Errno, Error, Pd, PdHandle, Udata};

use super::objects::{ALLOC_UAR, FakeDevice};
use crate::ioctl::ids::*;
use crate::ioctl::{self, DmLocation, Uar, UarHandle, UarKind};

const PD: Target = Target::Method(OBJECT_PD, METHOD_PD_QUERY);
const ALLOC_DM: Target = Target::Method(OBJECT_DM, METHOD_DM_ALLOC);
const QUERY_DM: Target = Target::Method(OBJECT_DM, METHOD_DM_QUERY);

/// Number, length and data of an attribute; data are 0 for output buffers.
type Attribute = (u16, u16, u64);

/// Returns object, method and attributes of the only call since the last.
fn sent(machine: &FakeDevice) -> ((u16, u16), Vec<Attribute>) {
    let calls = machine.fake.take_ioctls();
    let [call] = calls.as_slice() else {
        panic!("{calls:?}");
    };
    ((call.object, call.method), attributes(call))
}

fn attributes(call: &IoctlCall) -> Vec<Attribute> {
    let attrs = call.attrs.iter().map(|recorded| {
        let attr = recorded.attr;
        let is_output = attr.len > 0 && recorded.bytes.is_empty();
        let data = if is_output { 0 } else { attr.data };
        (attr.attr_id, attr.len, data)
    });
    attrs.collect()
}

#[test]
fn uars() {
    let machine = FakeDevice::new();
    let context = &machine.context;
    for (kind, number) in [(UarKind::BlueFlame, 0), (UarKind::Doorbells, 1)] {
        machine.fake.on(ALLOC_UAR, |reply| {
            reply.set(ATTR_ALLOC_UAR_MMAP_OFFSET, &0x1_2000u64.to_ne_bytes());
            reply.set(ATTR_ALLOC_UAR_MMAP_LENGTH, &4096u32.to_ne_bytes());
            reply.set(ATTR_ALLOC_UAR_PAGE_ID, &0x77u32.to_ne_bytes());
            Ok(())
        });
        let uar = Uar::alloc(context, kind).unwrap();
        let location = uar.location();
        assert_eq!(
            (location.mmap_offset, location.mmap_length, location.page_id),
            (0x1_2000, 4096, 0x77)
        );
        let (method, attrs) = sent(&machine);
        assert_eq!(method, (OBJECT_UAR, METHOD_UAR_ALLOC));
        assert_eq!(
            attrs,
            [
                (ATTR_ALLOC_UAR_HANDLE, 0, 0),
                (ATTR_ALLOC_UAR_TYPE, 8, number),
                (ATTR_ALLOC_UAR_MMAP_OFFSET, 8, 0),
                (ATTR_ALLOC_UAR_MMAP_LENGTH, 4, 0),
                (ATTR_ALLOC_UAR_PAGE_ID, 4, 0),
            ]
        );
        let handle = u64::from(uar.handle().0);
        uar.destroy().unwrap();
        let (method, attrs) = sent(&machine);
        assert_eq!(method, (OBJECT_UAR, METHOD_UAR_DESTROY));
        assert_eq!(attrs, [(ATTR_DESTROY_UAR_HANDLE, 0, handle)]);
    }
    for missing in [
        ATTR_ALLOC_UAR_MMAP_OFFSET,
        ATTR_ALLOC_UAR_MMAP_LENGTH,
        ATTR_ALLOC_UAR_PAGE_ID,
    ] {
        machine.fake.on(ALLOC_UAR, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let error = Uar::alloc(context, UarKind::BlueFlame).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO);
    }
    for raw in [libc::ENOMEM, libc::EIO, libc::EINVAL, 4095] {
        machine.fake.on(ALLOC_UAR, move |_| Err(Errno::new(raw)));
        let error = Uar::alloc(context, UarKind::BlueFlame).unwrap_err();
        assert_eq!(error.errno().raw(), raw);
    }
    assert!(machine.fake.live_objects().is_empty());
}

/// Commands on an object name it in their errors.
#[test]
fn refused_commands_name_the_object() {
    let machine = FakeDevice::new();
    let context = &machine.context;
    let errors = [
        ioctl::uar::destroy(context, UarHandle(5)).err(),
        ioctl::query_pd(context, PdHandle(5)).err(),
        ioctl::dm::query(context, uverbs::DmHandle(5)).err(),
    ];
    let texts = [
        "UAR_OBJ_DESTROY on UAR 5: ",
        "PD_QUERY on protection domain 5: ",
        "DM_QUERY on device memory 5: ",
    ];
    for (error, text) in errors.into_iter().zip(texts) {
        let error = error.unwrap();
        assert!(matches!(
            error,
            Error::Refused {
                handle: Some(5),
                ..
            }
        ));
        assert!(error.to_string().starts_with(text), "{error}");
    }
}

#[test]
fn number_of_a_protection_domain() {
    let machine = FakeDevice::new();
    let context = &machine.context;
    let pd = Pd::alloc(context, Udata::none()).unwrap();
    machine.fake.take_calls();
    machine.fake.on(PD, |reply| {
        reply.set(ATTR_QUERY_PD_NUMBER, &0x55u32.to_ne_bytes());
        Ok(())
    });
    assert_eq!(ioctl::query_pd(context, pd.handle()).unwrap(), 0x55);
    let (method, attrs) = sent(&machine);
    assert_eq!(method, (OBJECT_PD, METHOD_PD_QUERY));
    assert_eq!(
        attrs,
        [
            (ATTR_QUERY_PD_HANDLE, 0, pd.handle().0.into()),
            (ATTR_QUERY_PD_NUMBER, 4, 0),
        ]
    );
    let error = ioctl::query_pd(context, PdHandle(0x1234)).unwrap_err();
    assert_eq!(error.errno().raw(), libc::ENOENT);
    machine.fake.on(PD, |reply| {
        reply.set_unwritten(ATTR_QUERY_PD_NUMBER);
        Ok(())
    });
    let error = ioctl::query_pd(context, pd.handle()).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTO);
}

#[test]
fn location_of_device_memory() {
    let machine = FakeDevice::new();
    let context = &machine.context;
    machine.fake.on(ALLOC_DM, |reply| {
        reply.set(ATTR_ALLOC_DM_START_OFFSET, &0x1_0040u64.to_ne_bytes());
        reply.set(ATTR_ALLOC_DM_PAGE_INDEX, &0x102u16.to_ne_bytes());
        Ok(())
    });
    let (dm, location) = ioctl::dm::alloc(context, 0x300, 6).unwrap();
    let expected = DmLocation {
        start_offset: 0x1_0040,
        page_index: 0x102,
    };
    assert_eq!(location, expected);
    let (method, attrs) = sent(&machine);
    assert_eq!(method, (OBJECT_DM, METHOD_DM_ALLOC));
    assert_eq!(
        attrs,
        [
            (ATTR_ALLOC_DM_HANDLE, 0, 0),
            (ATTR_ALLOC_DM_LENGTH, 8, 0x300),
            (ATTR_ALLOC_DM_ALIGNMENT, 4, 6),
            (ATTR_ALLOC_DM_START_OFFSET, 8, 0),
            (ATTR_ALLOC_DM_PAGE_INDEX, 2, 0),
        ]
    );
    machine.fake.on(QUERY_DM, |reply| {
        reply.set(ATTR_QUERY_DM_START_OFFSET, &0x1_0040u64.to_ne_bytes());
        reply.set(ATTR_QUERY_DM_PAGE_INDEX, &0x102u16.to_ne_bytes());
        reply.set(ATTR_QUERY_DM_LENGTH, &0x300u64.to_ne_bytes());
        Ok(())
    });
    let found = ioctl::dm::query(context, dm.handle()).unwrap();
    assert_eq!(found, (expected, 0x300));
    let (_, attrs) = sent(&machine);
    assert_eq!(attrs[0], (ATTR_QUERY_DM_HANDLE, 0, dm.handle().0.into()));
    for missing in [ATTR_ALLOC_DM_START_OFFSET, ATTR_ALLOC_DM_PAGE_INDEX] {
        machine.fake.on(ALLOC_DM, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let error = ioctl::dm::alloc(context, 64, 0).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO);
    }
    drop(dm);
    assert!(machine.fake.live_objects().is_empty());
}

#[test]
fn memory_of_flow_steering() {
    const HEADER_CHANGES: u32 = 2;
    let machine = FakeDevice::new();
    machine.fake.on(ALLOC_DM, |reply| {
        reply.set(ATTR_ALLOC_DM_START_OFFSET, &0x7_0000_1040u64.to_ne_bytes());
        Ok(())
    });
    let alloc = || ioctl::dm::alloc_steering(&machine.context, HEADER_CHANGES, 0x1000, 12);
    let (dm, address) = alloc().unwrap();
    assert_eq!(address, 0x7_0000_1040);
    let (_, attrs) = sent(&machine);
    assert_eq!(
        attrs,
        [
            (ATTR_ALLOC_DM_HANDLE, 0, 0),
            (ATTR_ALLOC_DM_LENGTH, 8, 0x1000),
            (ATTR_ALLOC_DM_ALIGNMENT, 4, 12),
            (ATTR_ALLOC_DM_TYPE, 8, HEADER_CHANGES.into()),
            (ATTR_ALLOC_DM_START_OFFSET, 8, 0),
        ]
    );
    machine.fake.on(ALLOC_DM, |reply| {
        reply.set_unwritten(ATTR_ALLOC_DM_START_OFFSET);
        Ok(())
    });
    assert_eq!(alloc().unwrap_err().errno().raw(), libc::EPROTO);
    drop(dm);
    assert!(machine.fake.live_objects().is_empty());
}

#[test]
fn steering_anchors() {
    const ANCHOR: Target = Target::Method(OBJECT_STEERING_ANCHOR, METHOD_STEERING_ANCHOR_CREATE);
    let machine = FakeDevice::new();
    machine.fake.on(ANCHOR, |reply| {
        reply.set(ATTR_STEERING_ANCHOR_FT_ID, &0x1234u32.to_ne_bytes());
        Ok(())
    });
    let create = || ioctl::flow::create_anchor(&machine.context, 1, 0x302);
    let (anchor, number) = create().unwrap();
    assert_eq!(number, 0x1234);
    let (_, attrs) = sent(&machine);
    assert_eq!(
        attrs,
        [
            (ATTR_STEERING_ANCHOR_CREATE_HANDLE, 0, 0),
            (ATTR_STEERING_ANCHOR_FT_TYPE, 8, 1),
            (ATTR_STEERING_ANCHOR_PRIORITY, 2, 0x302),
            (ATTR_STEERING_ANCHOR_FT_ID, 4, 0),
        ]
    );
    ioctl::flow::destroy_anchor(&machine.context, anchor).unwrap();
    let (_, attrs) = sent(&machine);
    let destroyed = (ATTR_STEERING_ANCHOR_DESTROY_HANDLE, 0, anchor.0.into());
    assert_eq!(attrs, [destroyed]);
    machine.fake.on(ANCHOR, |reply| {
        reply.set_unwritten(ATTR_STEERING_ANCHOR_FT_ID);
        Ok(())
    });
    assert_eq!(create().unwrap_err().errno().raw(), libc::EPROTO);
    assert!(machine.fake.live_objects().is_empty());
}
