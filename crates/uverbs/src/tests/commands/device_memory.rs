//! Device memory, and regions of it.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use super::super::with_pd;
use super::*;
use crate::abi::later::*;
use crate::dmah::{self, DmahInit, DmahMrInit, Source};
use crate::driver::{DriverOutput, NAMESPACE};
use crate::kernel::fake::{AttrSpec, AttrType, MethodSpec};

const ALLOC: Target = Target::Method(OBJECT_DM, METHOD_DM_ALLOC);
const REGISTER: Target = Target::Method(OBJECT_MR, METHOD_DM_MR_REG);

/// Outputs that a driver adds to DM_ALLOC.
const START: u16 = NAMESPACE;
const PAGE: u16 = NAMESPACE + 1;
const DRIVER: &[MethodSpec] = &[MethodSpec {
    object: OBJECT_DM,
    method: METHOD_DM_ALLOC,
    udata: false,
    attrs: &[output(START, 8), output(PAGE, 2)],
}];

const fn output(id: u16, length: u16) -> AttrSpec {
    AttrSpec {
        id,
        ty: AttrType::Out(length),
        mandatory: true,
    }
}

fn alloc(
    context: &Arc<Context>,
    length: u64,
    log_alignment: u32,
    [start, page]: [&mut [u8]; 2],
) -> Result<Dm<Arc<Context>>, Error> {
    let outputs = [(START, start), (PAGE, page)];
    let outputs = outputs.map(|(attr_id, buffer)| DriverOutput { attr_id, buffer });
    Dm::alloc(context, length, log_alignment, None, outputs)
}

#[test]
fn device_memory() {
    let (fake, context, pd) = with_pd();
    fake.add_methods(DRIVER);
    fake.on(ALLOC, |reply| {
        reply.set(START, 0x1_0040u64.as_bytes());
        reply.set(PAGE, 0x102u16.as_bytes());
        Ok(())
    });
    let (mut start, mut page) = ([0xff; 8], [0xff; 2]);
    let dm = alloc(&context, 0x300, 6, [&mut start, &mut page]).unwrap();
    assert_eq!(u64::from_ne_bytes(start), 0x1_0040);
    assert_eq!(u16::from_ne_bytes(page), 0x102);
    let call = only(&fake);
    is_method(&call, OBJECT_DM, METHOD_DM_ALLOC);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Object(ATTR_ALLOC_DM_HANDLE, 0),
            in64(ATTR_ALLOC_DM_LENGTH, 0x300),
            in32(ATTR_ALLOC_DM_ALIGNMENT, 6),
            SentAttr::Out(START, 8),
            SentAttr::Out(PAGE, 2),
        ]
    );

    fake.on(REGISTER, |reply| {
        reply.set(ATTR_REG_DM_MR_RESP_LKEY, 0x11u32.as_bytes());
        reply.set(ATTR_REG_DM_MR_RESP_RKEY, 0x22u32.as_bytes());
        Ok(())
    });
    let init = DmMrInit {
        pd: pd.handle(),
        dm: dm.handle(),
        offset: 0x40,
        length: 0x80,
        access: AccessFlags::LOCAL_WRITE | AccessFlags::ZERO_BASED,
    };
    let (region, keys) = mr::register_dm(&context, &init).unwrap();
    assert_eq!((keys.lkey, keys.rkey), (0x11, 0x22));
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_REG_DM_MR_HANDLE, 0),
            SentAttr::Out(ATTR_REG_DM_MR_RESP_LKEY, 4),
            SentAttr::Out(ATTR_REG_DM_MR_RESP_RKEY, 4),
            SentAttr::Object(ATTR_REG_DM_MR_PD_HANDLE, pd.handle().0.into()),
            SentAttr::Object(ATTR_REG_DM_MR_DM_HANDLE, dm.handle().0.into()),
            in64(ATTR_REG_DM_MR_OFFSET, 0x40),
            in64(ATTR_REG_DM_MR_LENGTH, 0x80),
            in32(ATTR_REG_DM_MR_ACCESS_FLAGS, 0x21),
        ]
    );
    mr::destroy(&context, region).unwrap();
    fake.take_calls();

    let handle = dm.handle();
    dm.destroy().unwrap();
    assert_eq!(
        sent_attrs(&only(&fake)),
        [SentAttr::Object(ATTR_FREE_DM_HANDLE, handle.0.into())]
    );
    assert_eq!(fake.live_objects(), [(pd.handle().0, OBJECT_PD)]);
}

#[test]
fn a_missing_output_frees_the_allocation() {
    let (fake, context, pd) = with_pd();
    fake.add_methods(DRIVER);
    let (mut start, mut page) = ([0; 8], [0; 2]);
    for missing in [START, PAGE] {
        fake.on(ALLOC, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let error = alloc(&context, 64, 0, [&mut start, &mut page]).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO);
    }
    fake.reset(ALLOC);
    let dm = alloc(&context, 64, 0, [&mut start, &mut page]).unwrap();
    for missing in [ATTR_REG_DM_MR_RESP_LKEY, ATTR_REG_DM_MR_RESP_RKEY] {
        fake.on(REGISTER, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let init = DmMrInit {
            pd: pd.handle(),
            dm: dm.handle(),
            offset: 0,
            length: 64,
            access: AccessFlags::ZERO_BASED,
        };
        let error = mr::register_dm(&context, &init).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO);
    }
    drop(dm);
    assert_eq!(fake.live_objects(), [(pd.handle().0, OBJECT_PD)]);
}

#[test]
fn a_dma_buffer_is_closed_once_or_released() {
    const EXPORT: Target = Target::Method(OBJECT_DMABUF, METHOD_DMABUF_ALLOC);
    let (fake, context) = context();
    let before = fake.open_fds();
    // SAFETY: the fake maps nothing.
    let buffer = unsafe { Dmabuf::export(&context, 0x1_0200_3000) }.unwrap();
    let call = only(&fake);
    is_method(&call, OBJECT_DMABUF, METHOD_DMABUF_ALLOC);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Object(ATTR_ALLOC_DMABUF_HANDLE, 0),
            in64(ATTR_ALLOC_DMABUF_PGOFF, 0x1_0200_3000),
        ]
    );
    let fd = buffer.fd();
    assert!(!before.contains(&fd) && fake.open_fds().contains(&fd));
    drop(buffer);
    assert_eq!(fake.open_fds(), before);

    // SAFETY: the fake maps nothing.
    let kept = unsafe { Dmabuf::export(&context, 0) }.unwrap().into_fd();
    assert!(fake.open_fds().contains(&kept));
    fake.take_calls();

    fake.on(EXPORT, |reply| {
        reply.set_data(ATTR_ALLOC_DMABUF_HANDLE, u64::MAX);
        Ok(())
    });
    // SAFETY: the fake maps nothing.
    let error = unsafe { Dmabuf::export(&context, 0) }.unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::AllocDmabuf,
            ..
        }
    ));
    // A kernel without the object.
    fake.on(EXPORT, |_| Err(Errno::new(libc::EPROTONOSUPPORT)));
    // SAFETY: the fake maps nothing.
    let error = unsafe { Dmabuf::export(&context, 0) }.unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTONOSUPPORT);
    let text = error.to_string();
    assert!(text.starts_with("DMABUF_ALLOC on DMA buffer: "), "{text}");
    assert!(text.ends_with("or the kernel is older than 7.0"), "{text}");
}

#[test]
fn regions_with_dma_handles() {
    const REGISTER: Target = Target::Method(OBJECT_MR, METHOD_REG_MR);
    let (fake, context, pd) = with_pd();
    let init = DmahInit {
        steering: Some((7, 1)),
        hint: 2,
    };
    let dmah = dmah::alloc(&context, &init).unwrap();
    let call = only(&fake);
    is_method(&call, OBJECT_DMAH, METHOD_DMAH_ALLOC);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Object(ATTR_ALLOC_DMAH_HANDLE, 0),
            in32(ATTR_ALLOC_DMAH_CPU_ID, 7),
            SentAttr::Object(ATTR_ALLOC_DMAH_TPH_MEM_TYPE, 0),
            SentAttr::In(ATTR_ALLOC_DMAH_PH, vec![2]),
        ]
    );
    let memory = call.attrs[2].attr.enum_or_reserved;
    assert_eq!(memory.to_ne_bytes(), [1, 0]);

    fake.on(REGISTER, |reply| {
        reply.set(ATTR_REG_MR_RESP_LKEY, 0x11u32.as_bytes());
        reply.set(ATTR_REG_MR_RESP_RKEY, 0x22u32.as_bytes());
        Ok(())
    });
    let mut region = DmahMrInit {
        pd: pd.handle(),
        dmah,
        source: Source::Memory(0x1000),
        length: 0x80,
        iova: 0x7000,
        access: AccessFlags::LOCAL_WRITE,
    };
    // SAFETY: the fake accesses no memory.
    let register = |init: &DmahMrInit<'_>| unsafe { dmah::register(&context, init) };
    let (first, keys) = register(&region).unwrap();
    assert_eq!((keys.lkey, keys.rkey), (0x11, 0x22));
    let common = [
        SentAttr::Object(ATTR_REG_MR_HANDLE, 0),
        SentAttr::Out(ATTR_REG_MR_RESP_LKEY, 4),
        SentAttr::Out(ATTR_REG_MR_RESP_RKEY, 4),
        SentAttr::Object(ATTR_REG_MR_PD_HANDLE, pd.handle().0.into()),
        SentAttr::Object(ATTR_REG_MR_DMA_HANDLE, dmah.0.into()),
        in64(ATTR_REG_MR_IOVA, 0x7000),
    ];
    let end = [
        in64(ATTR_REG_MR_LENGTH, 0x80),
        in32(ATTR_REG_MR_ACCESS_FLAGS, 1),
    ];
    let calls = sent_attrs(&only(&fake));
    assert_eq!(calls[..6], common);
    assert_eq!(
        calls[6..],
        [&[in64(ATTR_REG_MR_ADDR, 0x1000)], &end[..]].concat()
    );

    let file = std::fs::File::open("/dev/null").unwrap();
    region.source = Source::Dmabuf(file.as_fd(), 0x40);
    let (second, _) = register(&region).unwrap();
    let calls = sent_attrs(&only(&fake));
    let fd = SentAttr::Object(ATTR_REG_MR_FD, file.as_raw_fd() as u64);
    let buffer = [fd, in64(ATTR_REG_MR_FD_OFFSET, 0x40)];
    assert_eq!(calls[6..], [&buffer[..], &end[..]].concat());

    for region in [first, second] {
        crate::mr::destroy(&context, region).unwrap();
    }
    dmah::free(&context, dmah).unwrap();
}
