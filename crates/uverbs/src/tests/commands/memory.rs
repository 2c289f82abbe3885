//! Protection domains, regions, windows, address handles.

use zerocopy::IntoBytes;

use super::super::{context, with_pd};
use super::queue_pair::full_attr;
use super::*;
use crate::abi::ids::*;
use crate::abi::write::{self, cmd};
use crate::kernel::fake::Target;
use crate::*;

#[test]
fn protection_domain() {
    let (fake, context) = context();
    let pd = Pd::alloc(&context, Udata::none()).unwrap();
    is_write(
        &only(&fake),
        cmd::CMD_ALLOC_PD,
        write::AllocPd { response: 0 },
        4,
    );
    let handle = pd.handle();
    assert_eq!(fake.live_objects(), [(handle.0, OBJECT_PD)]);
    pd.destroy().unwrap();
    let call = only(&fake);
    is_method(&call, OBJECT_PD, METHOD_PD_DESTROY);
    assert_eq!(
        sent_attrs(&call),
        [SentAttr::Object(ATTR_DESTROY_PD_HANDLE, handle.0.into())]
    );
    assert!(fake.live_objects().is_empty());
}

#[test]
fn memory_region() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Write(cmd::CMD_REG_MR), |reply| {
        reply.set_core_out(&write::RegMrResp {
            mr_handle: 0x77,
            lkey: 0xa1,
            rkey: 0xa2,
        });
        Ok(())
    });
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    let init = MrInit {
        pd: pd.handle(),
        addr: 0x1000,
        length: 0x2000,
        iova: 0x9000,
        access,
    };
    // SAFETY: the fake accesses no memory.
    let mut region = unsafe { Mr::register(&context, &init, Udata::none()) }.unwrap();
    let request = write::RegMr {
        response: 0,
        start: 0x1000,
        length: 0x2000,
        hca_va: 0x9000,
        pd_handle: pd.handle().0,
        access_flags: 0b101,
    };
    is_write(&only(&fake), cmd::CMD_REG_MR, request, 12);
    assert_eq!(
        (region.handle(), region.lkey(), region.rkey()),
        (MrHandle(0x77), 0xa1, 0xa2)
    );

    fake.on(Target::Write(cmd::CMD_REREG_MR), |reply| {
        reply.set_core_out(&write::ReregMrResp {
            lkey: 0xb1,
            rkey: 0xb2,
        });
        Ok(())
    });
    let cases = [
        (
            Rereg {
                translation: Some((1, 2, 3)),
                ..Rereg::default()
            },
            (1, 1, 2, 3, 0, 0),
        ),
        (
            Rereg {
                pd: Some(PdHandle(44)),
                ..Rereg::default()
            },
            (2, 0, 0, 0, 44, 0),
        ),
        (
            Rereg {
                access: Some(AccessFlags::LOCAL_WRITE),
                ..Rereg::default()
            },
            (4, 0, 0, 0, 0, 1),
        ),
    ];
    for (change, (flags, start, length, hca_va, pd_handle, access_flags)) in cases {
        // SAFETY: as above.
        unsafe { region.rereg(&change, Udata::none()) }.unwrap();
        let request = write::ReregMr {
            response: 0,
            mr_handle: 0x77,
            flags,
            start,
            length,
            hca_va,
            pd_handle,
            access_flags,
        };
        is_write(&only(&fake), cmd::CMD_REREG_MR, request, 8);
    }
    assert_eq!(
        (region.lkey(), region.rkey()),
        (0xb1, 0xb2),
        "the keys are the new ones"
    );
    // The fake knows the region by its own number.
    region.into_handle();
}

/// How programs detect whether a driver can register DMA buffers.
#[test]
fn a_region_without_a_dma_buffer_is_still_requested() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR), |_| {
        Err(Errno::new(libc::EBADF))
    });
    let init = DmabufMrInit {
        pd: pd.handle(),
        offset: 0,
        length: 0,
        iova: 0,
        fd: None,
        access: AccessFlags::empty(),
        driver_access: None,
    };
    let error = Mr::register_dmabuf(&context, &init, Udata::none()).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EBADF);
    assert_eq!(only(&fake).u32(ATTR_REG_DMABUF_MR_FD), Some(u32::MAX));
}

#[test]
fn region_of_a_dma_buffer() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR), |reply| {
        reply.set(ATTR_REG_DMABUF_MR_RESP_LKEY, 0x11u32.as_bytes());
        reply.set(ATTR_REG_DMABUF_MR_RESP_RKEY, 0x22u32.as_bytes());
        Ok(())
    });
    let access = AccessFlags::LOCAL_WRITE;
    let init = DmabufMrInit {
        pd: pd.handle(),
        offset: 1,
        length: 2,
        iova: 3,
        fd: Some(borrowed_fd(9)),
        access,
        driver_access: None,
    };
    let region = Mr::register_dmabuf(&context, &init, Udata::none()).unwrap();
    assert_eq!((region.lkey(), region.rkey()), (0x11, 0x22));
    let call = only(&fake);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Object(ATTR_REG_DMABUF_MR_HANDLE, 0),
            SentAttr::Out(ATTR_REG_DMABUF_MR_RESP_LKEY, 4),
            SentAttr::Out(ATTR_REG_DMABUF_MR_RESP_RKEY, 4),
            SentAttr::Object(ATTR_REG_DMABUF_MR_PD_HANDLE, pd.handle().0.into()),
            in64(ATTR_REG_DMABUF_MR_OFFSET, 1),
            in64(ATTR_REG_DMABUF_MR_LENGTH, 2),
            in64(ATTR_REG_DMABUF_MR_IOVA, 3),
            in32(ATTR_REG_DMABUF_MR_FD, 9),
            in32(ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 1),
        ]
    );

    fake.on(Target::Method(OBJECT_MR, METHOD_QUERY_MR), |reply| {
        reply.set(ATTR_QUERY_MR_RESP_LKEY, 0x11u32.as_bytes());
        reply.set(ATTR_QUERY_MR_RESP_RKEY, 0x22u32.as_bytes());
        reply.set(ATTR_QUERY_MR_RESP_LENGTH, 2u64.as_bytes());
        reply.set_unwritten(ATTR_QUERY_MR_RESP_IOVA);
        Ok(())
    });
    let attr = mr::query(&context, region.handle()).unwrap();
    assert_eq!(
        attr,
        MrAttr {
            lkey: 0x11,
            rkey: 0x22,
            length: 2,
            iova: 0
        },
        "iova is optional"
    );
    let call = only(&fake);
    assert_eq!(
        sent_attrs(&call).first(),
        Some(&SentAttr::Object(
            ATTR_QUERY_MR_HANDLE,
            region.handle().0.into()
        ))
    );

    let sges = [
        Sge {
            addr: 1,
            length: 2,
            lkey: 3,
        },
        Sge {
            addr: 4,
            length: 5,
            lkey: 6,
        },
    ];
    context
        .advise_mr(
            pd.handle(),
            Advice::PREFETCH_WRITE,
            AdviseFlags::FLUSH,
            &sges,
        )
        .unwrap();
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_ADVISE_MR_PD_HANDLE, pd.handle().0.into()),
            in64(ATTR_ADVISE_MR_ADVICE, 1),
            in32(ATTR_ADVISE_MR_FLAGS, 1),
            SentAttr::In(ATTR_ADVISE_MR_SGE_LIST, sges.as_bytes().to_vec()),
        ]
    );
}

#[test]
fn memory_window() {
    let (fake, context, pd) = with_pd();
    let window = Mw::alloc(&context, pd.handle(), MwType::TYPE_2, Udata::none()).unwrap();
    let request = write::AllocMw {
        response: 0,
        pd_handle: pd.handle().0,
        mw_type: 2,
        reserved: [0; 3],
    };
    is_write(&only(&fake), cmd::CMD_ALLOC_MW, request, 8);
    let handle = window.handle();
    window.destroy().unwrap();
    assert_eq!(
        sent_attrs(&only(&fake)),
        [SentAttr::Object(ATTR_DESTROY_MW_HANDLE, handle.0.into())]
    );
}

#[test]
fn address_handle() {
    let (fake, context, pd) = with_pd();
    let (attr, _) = full_attr();
    let ah = Ah::create(&context, pd.handle(), &attr.ah_attr, 0x66, Udata::none()).unwrap();
    let request = write::CreateAh {
        response: 0,
        user_handle: 0x66,
        pd_handle: pd.handle().0,
        reserved: 0,
        attr: write::AhAttr {
            grh: write::GlobalRoute {
                dgid: [0x10; 16],
                flow_label: 0x1_0010,
                sgid_index: 0x11,
                hop_limit: 0x12,
                traffic_class: 0x13,
                reserved: 0,
            },
            dlid: 0x210,
            sl: 0x14,
            src_path_bits: 0x15,
            static_rate: 0x16,
            is_global: 1,
            port_num: 0x17,
            reserved: 0,
        },
    };
    is_write(&only(&fake), cmd::CMD_CREATE_AH, request, 4);
    let handle = ah.handle();
    ah.destroy().unwrap();
    assert_eq!(
        sent_attrs(&only(&fake)),
        [SentAttr::Object(ATTR_DESTROY_AH_HANDLE, handle.0.into())]
    );
}
