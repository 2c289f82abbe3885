//! Successful commands allocate nothing: under memory pressure they fail only if the kernel
//! fails them.
#![allow(missing_docs, reason = "a test")]

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::RawFd;

use ringverbs_uverbs::abi::ioctl::{ATTR_F_VALID_OUTPUT, Attr, IoctlHdr};
use ringverbs_uverbs::discovery::DriverId;
use ringverbs_uverbs::kernel::Kernel;
use ringverbs_uverbs::{
    AccessFlags, Ah, AhAttr, Context, Cq, CqInit, Errno, GidEntry, Mr, MrInit, Mw, MwType, Pd,
    PostSendDoorbell, Qp, QpAttr, QpAttrMask, QpInit, QpType, Srq, SrqInit, SrqKind, SrqModify,
    Udata, Xrcd, XrcdOpen,
};
use testing::allocations::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A kernel on which every call succeeds; outputs stay zero and are marked written.
#[derive(Debug)]
struct AlwaysSucceeds;

// SAFETY: it ignores descriptors, and none of them is used as a file.
unsafe impl Kernel for AlwaysSucceeds {
    fn open(&self, _: &CStr, _: c_int) -> Result<RawFd, Errno> {
        Ok(3)
    }
    unsafe fn close(&self, _: RawFd) -> Result<(), Errno> {
        Ok(())
    }
    unsafe fn ioctl(
        &self,
        _: RawFd,
        _: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        // SAFETY: the crate gives a header followed by its attributes.
        let header = unsafe { argument.cast::<IoctlHdr>().read() };
        for index in 0..usize::from(header.num_attrs) {
            // SAFETY: the attributes follow the header.
            let attr = unsafe {
                argument
                    .byte_add(size_of::<IoctlHdr>())
                    .cast::<Attr>()
                    .add(index)
            };
            // SAFETY: as above; nothing else accesses it during the call.
            unsafe { (*attr).flags |= ATTR_F_VALID_OUTPUT };
        }
        Ok(0)
    }
    unsafe fn read(&self, _: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        Ok(buffer.len())
    }
    unsafe fn write(&self, _: RawFd, buffer: &[u8]) -> Result<usize, Errno> {
        Ok(buffer.len())
    }
    unsafe fn wait_readable(&self, _: RawFd, _: c_int) -> Result<bool, Errno> {
        Ok(true)
    }
    unsafe fn set_nonblocking(&self, _: RawFd, _: bool) -> Result<(), Errno> {
        Ok(())
    }
    fn device_number(&self, _: &CStr) -> Result<libc::dev_t, Errno> {
        Ok(0)
    }
    fn list_directory(&self, _: &CStr) -> Result<Vec<String>, Errno> {
        Ok(Vec::new())
    }
    fn netlink(&self, _: &[u8], _: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno> {
        Ok(())
    }
    fn sysfs_path(&self) -> String {
        String::new()
    }
}

#[test]
fn commands_allocate_nothing() {
    // SAFETY: this kernel has no descriptors.
    let context = unsafe { Context::from_owned_fd(Box::new(AlwaysSucceeds), 3, DriverId::RXE) };
    assert_eq!(allocations(|| every_command(&context)).0, 0);
    // The counter does count.
    assert_eq!(allocations(|| std::hint::black_box(Box::new(1))).0, 1);
}

fn every_command(context: &Context) {
    context.get_context(Udata::none()).unwrap();
    context.query_device().unwrap();
    context.query_port(1).unwrap();
    context
        .query_gid_table(&mut [GidEntry::default(); 4])
        .unwrap();
    context.query_gid_entry(1, 1).unwrap();
    let pd = Pd::alloc(&context, Udata::none()).unwrap();
    let init = MrInit {
        pd: pd.handle(),
        addr: 0,
        length: 1,
        iova: 0,
        access: AccessFlags::LOCAL_WRITE,
    };
    // SAFETY: this kernel touches no memory.
    let mr = unsafe { Mr::register(&context, &init, Udata::none()) }.unwrap();
    let mw = Mw::alloc(&context, pd.handle(), MwType::TYPE_2, Udata::none()).unwrap();
    let cq = Cq::create(
        &context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::output(&mut [0; 16]),
    )
    .unwrap();
    cq.resize(5, Udata::output(&mut [0; 16])).unwrap();
    cq.req_notify(true).unwrap();
    let init = SrqInit {
        pd: pd.handle(),
        user_handle: 0,
        max_wr: 1,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    let srq = Srq::create(&context, &init, Udata::output(&mut [0; 24])).unwrap();
    srq.modify(
        &SrqModify {
            limit: Some(1),
            max_wr: None,
        },
        Udata::none(),
    )
    .unwrap();
    srq.query().unwrap();
    let init = QpInit {
        qp_type: QpType::RC,
        pd: Some(pd.handle()),
        ..QpInit::default()
    };
    let qp = Qp::create(&context, &init, Udata::output(&mut [0; 32])).unwrap();
    qp.modify(&QpAttr::default(), QpAttrMask::STATE, Udata::none())
        .unwrap();
    qp.query(QpAttrMask::STATE).unwrap();
    qp.attach_multicast(&[0; 16], 0).unwrap();
    PostSendDoorbell::new(&context, qp.handle()).ring().unwrap();
    let ah = Ah::create(&context, pd.handle(), &AhAttr::default(), 0, Udata::none()).unwrap();
    let xrcd = Xrcd::open(&context, &XrcdOpen::default(), Udata::none()).unwrap();
    qp.destroy().unwrap();
    cq.destroy().unwrap();
    drop((srq, ah, mw, mr, xrcd, pd));
}
