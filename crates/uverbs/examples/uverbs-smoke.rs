//! Makes every kind of object on a real rxe device, asks about it, destroys
//! it, and says what it saw. Ends with status 1 at the first surprise.
//!
//! `uverbs-smoke [DEVICE]`: the first rxe device if none is named.
#![allow(missing_docs, reason = "a program")]

use std::error::Error as StdError;
use std::os::fd::AsFd;
use std::sync::Arc;

use ringverbs_uverbs::abi::write::Sge;
use ringverbs_uverbs::discovery::{self, Device, DriverId, netlink, sysfs};
use ringverbs_uverbs::kernel::{Kernel, RealKernel};
use ringverbs_uverbs::{
    AccessFlags, Advice, AdviseFlags, Ah, AhAttr, AsyncEventFile, CompletionChannel, Context, Cq,
    CqInit, Error, GidEntry, GlobalRoute, Mr, MrInit, Mw, MwType, Pd, PostSendDoorbell, Qp, QpAttr,
    QpAttrMask, QpCap, QpInit, QpState, QpType, Rereg, Srq, SrqInit, SrqKind, SrqModify, Udata,
    Xrcd, XrcdOpen, mr,
};

type Result<T> = std::result::Result<T, Box<dyn StdError>>;

// Lengths of rxe's answers (rdma_user_rxe.h): a mapping to make is 16 bytes.
const MMAP_INFO: usize = 16;
const CREATE_SRQ: usize = MMAP_INFO + 8;
const CREATE_QP: usize = 2 * MMAP_INFO;
const CREATE_AH: usize = 8;

fn check(what: &str, holds: bool) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(format!("not so: {what}").into())
    }
}

fn refused<T>(what: &str, result: std::result::Result<T, Error>, errnos: &[i32]) -> Result<()> {
    match result {
        Ok(_) => Err(format!("{what} was not refused").into()),
        Err(error) if errnos.contains(&error.errno().raw()) => {
            println!("{what}: refused, as it should be: {error}");
            Ok(())
        }
        Err(error) => Err(format!("{what}: {error}").into()),
    }
}

/// What some kernels, or rxe, lack: then they must say so.
fn optional<T>(what: &str, result: std::result::Result<T, Error>) -> Result<Option<T>> {
    match result {
        Ok(value) => {
            println!("{what}: done");
            Ok(Some(value))
        }
        Err(error) if error.errno().raw() == libc::EOPNOTSUPP => {
            println!("{error}");
            Ok(None)
        }
        Err(error) => Err(format!("{what}: {error}").into()),
    }
}

fn find(name: Option<&str>) -> Result<Device> {
    let by_netlink = netlink::devices(&RealKernel)?;
    let by_sysfs = sysfs::devices(&RealKernel)?;
    println!("netlink: {by_netlink:#x?}");
    println!("sysfs: {by_sysfs:#x?}");
    check(
        "netlink and sysfs name as many devices",
        by_netlink.len() == by_sysfs.len(),
    )?;
    for device in &by_netlink {
        let twin = by_sysfs
            .iter()
            .find(|other| other.name == device.name)
            .ok_or("sysfs lacks it")?;
        let same = Device {
            index: device.index,
            driver_id: device.driver_id,
            ..twin.clone()
        };
        check("netlink and sysfs agree", *device == same)?;
        let path = std::ffi::CString::new(device.device_path())?;
        check(
            "the node has that number",
            RealKernel.device_number(&path) == Ok(device.dev_t),
        )?;
    }
    println!("copy on fork: {}", netlink::copy_on_fork(&RealKernel));
    let wanted = |device: &Device| {
        name.map_or(device.driver_id == DriverId::RXE, |name| {
            device.name == name
        })
    };
    Ok(discovery::devices(&RealKernel)?
        .into_iter()
        .find(wanted)
        .ok_or("no such rxe device")?)
}

fn main() -> std::process::ExitCode {
    match smoke() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            println!("uverbs-smoke: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn smoke() -> Result<()> {
    let name = std::env::args().nth(1);
    let device = find(name.as_deref())?;
    let context = Arc::new(Context::open(Box::new(RealKernel), &device)?);
    refused(
        "a command before get_context",
        Pd::alloc(&context, Udata::none()),
        &[libc::EINVAL],
    )?;
    let info = context.get_context(Udata::none())?;
    println!("{}: {info:?}", device.name);
    refused(
        "a second get_context",
        context.get_context(Udata::none()),
        &[libc::EINVAL],
    )?;
    let async_file = AsyncEventFile::alloc(&context)?;
    let again = optional("query_context", context.query_context())?;
    check(
        "query_context agrees",
        again.is_none_or(|again| again == info),
    )?;
    let gid = queries(&context, &device)?;
    memory(&context)?;
    queues(&context, &async_file, gid)?;
    unsupported(&context)?;
    println!("uverbs-smoke: ok");
    Ok(())
}

fn queries(context: &Arc<Context>, device: &Device) -> Result<GidEntry> {
    let attr = context.query_device()?;
    let extended = context.query_device_ex(Udata::none())?;
    println!("{extended:?}");
    check("both device queries agree", attr == extended.base)?;
    check(
        "the GUID is netlink's",
        Some(u64::from_be_bytes(attr.node_guid)) == device.node_guid,
    )?;
    check(
        "it has ports",
        Some(u32::from(attr.phys_port_cnt)) == device.num_ports,
    )?;
    let port = context.query_port(1)?;
    println!("{port:?}");
    check("the port is active (4)", port.legacy.state == 4)?;
    refused("port 77", context.query_port(77), &[libc::EINVAL])?;

    let mut entries = [GidEntry::default(); 64];
    let count = context.query_gid_table(&mut entries)?;
    check("there are GIDs", count > 0)?;
    for entry in entries.iter().take(count) {
        check(
            "entry and table agree",
            context.query_gid_entry(entry.port_num, entry.gid_index)? == *entry,
        )?;
        let by_sysfs = sysfs::read_gid(
            &RealKernel,
            &device.ibdev_path,
            entry.port_num as u8,
            entry.gid_index as u16,
        )?;
        check("sysfs and table agree", by_sysfs == entry.gid)?;
        println!(
            "GID {}: {:02x?} type {} netdev {}",
            entry.gid_index, entry.gid, entry.gid_type, entry.netdev_ifindex
        );
    }
    refused(
        "GID 9999",
        context.query_gid_entry(1, 9999),
        &[libc::EINVAL, libc::ENODATA],
    )?;
    check(
        "P_Key 0 is the default",
        sysfs::read_pkey(&RealKernel, &device.ibdev_path, 1, 0)? == 0xffff,
    )?;
    refused(
        "P_Key 9999",
        sysfs::read_pkey(&RealKernel, &device.ibdev_path, 1, 9999),
        &[libc::ENOENT],
    )?;
    // An IPv4 address's GID if there is one: that is sure to have a route.
    let used = entries.get(..count).unwrap_or_default();
    let ipv4 = used
        .iter()
        .find(|entry| entry.gid_type == 2 && entry.gid.starts_with(&[0; 10]));
    Ok(*ipv4.or(used.first()).ok_or("no GID")?)
}

fn memory(context: &Arc<Context>) -> Result<()> {
    let pd = Pd::alloc(context, Udata::none())?;
    let other = Pd::alloc(context, Udata::none())?;
    let buffer = vec![0u8; 16384];
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::MW_BIND;
    let addr = buffer.as_ptr().addr() as u64;
    let init = MrInit {
        pd: pd.handle(),
        addr,
        length: 8192,
        iova: addr,
        access,
    };
    // SAFETY: nobody is given the keys, and the buffer outlives the region.
    let mut region = unsafe { Mr::register(context, &init, Udata::none()) }?;
    println!("{region:?}");
    check("keys are given", region.lkey() != 0 && region.rkey() != 0)?;
    if let Some(attr) = optional("query of a region", mr::query(context, region.handle()))? {
        let same = attr.lkey == region.lkey() && attr.length == 8192;
        check("query agrees", same)?;
    }
    let bad = MrInit {
        addr: 0x1000,
        iova: 0x1000,
        ..init
    };
    // SAFETY: nothing is mapped there.
    let unmapped = unsafe { Mr::register(context, &bad, Udata::none()) };
    refused("unmapped memory", unmapped, &[libc::EFAULT])?;

    let error = pd
        .destroy()
        .err()
        .ok_or("a used protection domain was destroyed")?;
    println!("in use: {error}");
    check("that is EBUSY", error.errno().raw() == libc::EBUSY)?;

    // The rxe of Linux 6.1 can do none of these, that of 6.12 all but the last.
    let more = Some(access | AccessFlags::REMOTE_WRITE);
    for change in [
        Rereg {
            access: more,
            ..Rereg::default()
        },
        Rereg {
            pd: Some(other.handle()),
            ..Rereg::default()
        },
        Rereg {
            translation: Some((addr, 4096, addr)),
            ..Rereg::default()
        },
    ] {
        // SAFETY: as above.
        let changed = unsafe { region.rereg(&change, Udata::none()) };
        optional("change of a region", changed)?;
    }

    for kind in [MwType::TYPE_1, MwType::TYPE_2] {
        let window = Mw::alloc(context, other.handle(), kind, Udata::none())?;
        println!("{window:?}");
        window.destroy()?;
    }
    let sge = Sge {
        addr,
        length: 4096,
        lkey: region.lkey(),
    };
    let advised = context.advise_mr(other.handle(), Advice::PREFETCH, AdviseFlags::FLUSH, &[sge]);
    optional("advice", advised)?;
    region.destroy()?;
    other.destroy()?;
    pd.destroy()?;
    drop(buffer);
    Ok(())
}

fn queues(
    context: &Arc<Context>,
    async_file: &AsyncEventFile<Arc<Context>>,
    gid: GidEntry,
) -> Result<()> {
    let pd = Pd::alloc(context, Udata::none())?;
    let channel = CompletionChannel::create(context)?;
    channel.set_nonblocking(true)?;
    refused(
        "an event that is not there",
        channel.read_event(),
        &[libc::EAGAIN],
    )?;
    async_file.set_nonblocking(true)?;
    refused(
        "an asynchronous event that is not there",
        async_file.read_event(),
        &[libc::EAGAIN],
    )?;

    let mut mapping = [0; MMAP_INFO];
    let init = CqInit {
        cqe: 100,
        user_handle: 0xc0ffee,
        channel: Some(channel.as_fd()),
        ..CqInit::default()
    };
    let cq = Cq::create(context, &init, Udata::output(&mut mapping))?;
    println!("{cq:?} mapping {mapping:02x?}");
    check("at least the entries asked for", cq.cqe() >= 100)?;
    check("a mapping is offered", mapping != [0; MMAP_INFO])?;
    println!(
        "resized to {}",
        cq.resize(200, Udata::output(&mut mapping))?
    );
    cq.req_notify(false)?;
    cq.req_notify(true)?;
    optional("moderation", cq.modify_moderation(1, 1))?;
    let bad = CqInit {
        comp_vector: info_beyond(context),
        ..init
    };
    refused(
        "a bad completion vector",
        Cq::create(context, &bad, Udata::output(&mut mapping)),
        &[libc::EINVAL],
    )?;
    refused(
        "no room for the mapping",
        Cq::create(context, &init, Udata::none()),
        &[libc::EINVAL],
    )?;

    let mut answer = [0; CREATE_SRQ];
    let init = SrqInit {
        pd: pd.handle(),
        user_handle: 0x512,
        max_wr: 50,
        max_sge: 2,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: Some(async_file.as_fd()),
    };
    let srq = Srq::create(context, &init, Udata::output(&mut answer))?;
    println!("{srq:?} {:?}", srq.query()?);
    check("at least the receives asked for", srq.max_wr() >= 50)?;
    let mut moved = [0u8; MMAP_INFO];
    let place = (moved.as_mut_ptr().expose_provenance() as u64).to_ne_bytes();
    // rxe wants this with every change, also one that moves nothing.
    for change in [
        SrqModify {
            max_wr: Some(100),
            limit: None,
        },
        SrqModify {
            max_wr: None,
            limit: Some(10),
        },
    ] {
        // SAFETY: rxe takes the address of where to write the new mapping, 16 bytes.
        srq.modify(&change, unsafe { Udata::new(&place, &mut []) })?;
    }
    println!("{:?} {moved:02x?}", srq.query()?);
    check("the limit is armed", srq.query()?.limit == 10)?;

    for (qp_type, shared) in [
        (QpType::RC, true),
        (QpType::UC, false),
        (QpType::UD, false),
        (QpType::RC, false),
    ] {
        let mut answer = [0; CREATE_QP];
        let init = QpInit {
            qp_type,
            pd: Some(pd.handle()),
            send_cq: Some(cq.handle()),
            recv_cq: Some(cq.handle()),
            srq: shared.then(|| srq.handle()),
            cap: QpCap {
                max_send_wr: 10,
                max_recv_wr: 10,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            sq_sig_all: true,
            user_handle: 0x9b,
            async_fd: Some(async_file.as_fd()),
            ..QpInit::default()
        };
        let qp = Qp::create(context, &init, Udata::output(&mut answer))?;
        println!("{qp:?}");
        let qp = connect(context, qp, qp_type, gid)?;
        check("no events were read", qp.destroy()? == 0)?;
    }

    let path = path_to(gid);
    let mut answer = [0; CREATE_AH];
    let ah = Ah::create(context, pd.handle(), &path, 0, Udata::output(&mut answer))?;
    println!("{ah:?} number {answer:02x?}");
    ah.destroy()?;

    check("no events were read", srq.destroy()? == 0)?;
    let events = cq.destroy()?;
    println!("{events:?}");
    pd.destroy()?;
    Ok(())
}

/// A completion vector that no machine has.
fn info_beyond(_context: &Context) -> u32 {
    1 << 20
}

fn path_to(gid: GidEntry) -> AhAttr {
    AhAttr {
        grh: GlobalRoute {
            dgid: gid.gid,
            sgid_index: gid.gid_index as u8,
            hop_limit: 64,
            ..GlobalRoute::default()
        },
        is_global: true,
        port_num: 1,
        ..AhAttr::default()
    }
}

/// Brings a queue pair up to RTS, connected to itself, and rings its doorbell.
fn connect(
    context: &Arc<Context>,
    qp: Qp<Arc<Context>>,
    qp_type: QpType,
    gid: GidEntry,
) -> Result<Qp<Arc<Context>>> {
    type Mask = QpAttrMask;
    let doorbell = PostSendDoorbell::new(context, qp.handle());
    println!("doorbell in RESET: {:?}", doorbell.ring());
    let to = |state, attr: QpAttr, mask: Mask| {
        qp.modify(
            &QpAttr {
                qp_state: state,
                ..attr
            },
            Mask::STATE | mask,
            Udata::none(),
        )
    };
    let base = Mask::PKEY_INDEX | Mask::PORT;
    let attr = QpAttr {
        port_num: 1,
        qkey: 0x1111_1111,
        qp_access_flags: AccessFlags::REMOTE_WRITE,
        ..QpAttr::default()
    };
    let datagram = qp_type == QpType::UD;
    to(
        QpState::INIT,
        attr,
        base | if datagram {
            Mask::QKEY
        } else {
            Mask::ACCESS_FLAGS
        },
    )?;
    let attr = QpAttr {
        ah_attr: path_to(gid),
        path_mtu: 3,
        dest_qp_num: qp.qp_num(),
        rq_psn: 0x123,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        ..QpAttr::default()
    };
    let connected = Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
    let reliable = Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER;
    to(
        QpState::RTR,
        attr,
        match qp_type {
            QpType::UD => Mask::empty(),
            QpType::UC => connected,
            _ => connected | reliable,
        },
    )?;
    let attr = QpAttr {
        sq_psn: 0x123,
        max_rd_atomic: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    };
    let reliable = Mask::MAX_QP_RD_ATOMIC | Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY;
    to(
        QpState::RTS,
        attr,
        Mask::SQ_PSN
            | if qp_type == QpType::RC {
                reliable
            } else {
                Mask::empty()
            },
    )?;

    let (attr, init) = qp.query(Mask::from_bits_retain(0x1f_ffff))?;
    println!("{attr:?} {init:?}");
    check("it is ready to send", attr.qp_state == QpState::RTS)?;
    check("it signals all", init.sq_sig_all)?;
    if !datagram {
        check("the peer's number", attr.dest_qp_num == qp.qp_num())?;
        check(
            "the path",
            attr.ah_attr.grh.dgid == gid.gid && attr.ah_attr.is_global,
        )?;
        check("the packet number", attr.rq_psn == 0x123)?;
    }
    doorbell
        .ring()
        .map_err(|errno| format!("doorbell in RTS: {errno}"))?;
    if datagram {
        // 239.1.2.3 as a RoCE v2 multicast address.
        let group = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
        let mut ipv6 = [0; 16];
        (ipv6[0], ipv6[1], ipv6[15]) = (0xff, 0x0e, 1);
        for address in [group, ipv6] {
            qp.attach_multicast(&address, 0)?;
            let (same, error) = qp_busy(context, &qp)?;
            check(
                "a queue pair in a group is busy",
                same && error.errno().raw() == libc::EBUSY,
            )?;
            qp.detach_multicast(&address, 0)?;
            println!("in and out of group {address:02x?}");
        }
    }
    refused(
        "an impossible transition",
        to(QpState::INIT, QpAttr::default(), Mask::empty()),
        &[libc::EINVAL],
    )?;
    to(QpState::ERR, QpAttr::default(), Mask::empty())?;
    Ok(qp)
}

/// Tries to destroy a queue pair that cannot be; says whether it is still there.
fn qp_busy(context: &Arc<Context>, qp: &Qp<Arc<Context>>) -> Result<(bool, Error)> {
    let Err(error) = ringverbs_uverbs::qp::destroy(context, qp.handle()) else {
        return Err("a queue pair in a group was destroyed".into());
    };
    Ok((qp.query(QpAttrMask::STATE).is_ok(), error))
}

/// What rxe lacks: the kernel must say so.
fn unsupported(context: &Arc<Context>) -> Result<()> {
    let open = XrcdOpen {
        fd: None,
        oflags: libc::O_CREAT,
    };
    refused(
        "an XRC domain",
        Xrcd::open(context, &open, Udata::none()),
        &[libc::EOPNOTSUPP],
    )
}
