//! Device memory, and regions of it.

use super::super::with_pd;
use super::*;
use crate::abi::later::*;
use crate::abi::mlx5;

const ALLOC: Target = Target::Method(OBJECT_DM, METHOD_DM_ALLOC);
const QUERY: Target = Target::Method(OBJECT_DM, mlx5::METHOD_DM_QUERY);
const REGISTER: Target = Target::Method(OBJECT_MR, METHOD_DM_MR_REG);

#[test]
fn device_memory() {
    let (fake, context, pd) = with_pd();
    fake.on(ALLOC, |reply| {
        reply.set(mlx5::ATTR_ALLOC_DM_START_OFFSET, 0x1_0040u64.as_bytes());
        reply.set(mlx5::ATTR_ALLOC_DM_PAGE_INDEX, 0x102u16.as_bytes());
        Ok(())
    });
    let dm = Mlx5Dm::alloc(&context, 0x300, 6).unwrap();
    let place = Mlx5DmPlace {
        start_offset: 0x1_0040,
        page_index: 0x102,
    };
    assert_eq!(dm.place(), place);
    let call = only(&fake);
    is_method(&call, OBJECT_DM, METHOD_DM_ALLOC);
    assert_eq!(
        sent(&call),
        [
            Sent::Object(ATTR_ALLOC_DM_HANDLE, 0),
            in64(ATTR_ALLOC_DM_LENGTH, 0x300),
            in32(ATTR_ALLOC_DM_ALIGNMENT, 6),
            Sent::Out(mlx5::ATTR_ALLOC_DM_START_OFFSET, 8),
            Sent::Out(mlx5::ATTR_ALLOC_DM_PAGE_INDEX, 2),
        ]
    );

    fake.on(QUERY, |reply| {
        reply.set(mlx5::ATTR_QUERY_DM_START_OFFSET, 0x1_0040u64.as_bytes());
        reply.set(mlx5::ATTR_QUERY_DM_PAGE_INDEX, 0x102u16.as_bytes());
        reply.set(mlx5::ATTR_QUERY_DM_LENGTH, 0x300u64.as_bytes());
        Ok(())
    });
    let asked = mlx5_dm::query(&context, dm.handle()).unwrap();
    assert_eq!(asked, (place, 0x300));
    assert_eq!(
        sent(&only(&fake)).first(),
        Some(&Sent::Object(
            mlx5::ATTR_QUERY_DM_HANDLE,
            dm.handle().0.into()
        ))
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
        sent(&only(&fake)),
        [
            Sent::Object(ATTR_REG_DM_MR_HANDLE, 0),
            Sent::Out(ATTR_REG_DM_MR_RESP_LKEY, 4),
            Sent::Out(ATTR_REG_DM_MR_RESP_RKEY, 4),
            Sent::Object(ATTR_REG_DM_MR_PD_HANDLE, pd.handle().0.into()),
            Sent::Object(ATTR_REG_DM_MR_DM_HANDLE, dm.handle().0.into()),
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
        sent(&only(&fake)),
        [Sent::Object(ATTR_FREE_DM_HANDLE, handle.0.into())]
    );
    assert_eq!(fake.live_objects(), [(pd.handle().0, OBJECT_PD)]);
}

#[test]
fn what_is_answered_by_half_is_freed_again() {
    let (fake, context, pd) = with_pd();
    for missing in [
        mlx5::ATTR_ALLOC_DM_START_OFFSET,
        mlx5::ATTR_ALLOC_DM_PAGE_INDEX,
    ] {
        fake.on(ALLOC, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let error = Mlx5Dm::alloc(&context, 64, 0).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO);
    }
    fake.reset(ALLOC);
    let dm = Mlx5Dm::alloc(&context, 64, 0).unwrap();
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
fn a_dma_buffer_is_closed_once_or_given_up() {
    const EXPORT: Target = Target::Method(OBJECT_DMABUF, METHOD_DMABUF_ALLOC);
    let (fake, context) = context();
    let before = fake.open_fds();
    // SAFETY: the fake maps nothing.
    let buffer = unsafe { Dmabuf::export(&context, 0x1_0200_3000) }.unwrap();
    let call = only(&fake);
    is_method(&call, OBJECT_DMABUF, METHOD_DMABUF_ALLOC);
    assert_eq!(
        sent(&call),
        [
            Sent::Object(ATTR_ALLOC_DMABUF_HANDLE, 0),
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
