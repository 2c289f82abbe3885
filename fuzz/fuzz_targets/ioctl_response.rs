//! Every command with a kernel that gives arbitrary answers.
//!
//! The input has, for each command in turn: its errno or success, the outputs that are
//! written and their contents, the number of a new object, the bytes of an event. Like a
//! real kernel, it writes only to the given buffers. For every input: no panic, no access
//! out of bounds, and results within the bounds of the request.

#![no_main]

use std::sync::{Arc, Mutex};

use libfuzzer_sys::fuzz_target;
use mlx5::ioctl::ids::{
    METHOD_DEVX_OBJ_CREATE, METHOD_DEVX_OBJ_DESTROY, METHOD_DEVX_OBJ_MODIFY, METHOD_DEVX_OTHER,
    METHOD_DEVX_QUERY_EQN, METHOD_DEVX_UMEM_DEREG, METHOD_DEVX_UMEM_REG, OBJECT_DEVX,
    OBJECT_DEVX_OBJ, OBJECT_DEVX_UMEM,
};
use uverbs::abi::ids::*;
use uverbs::abi::write::{CMD_FLAG_EXTENDED, cmd};
use uverbs::kernel::fake::{FakeKernel, Reply, Target};
use uverbs::*;

/// The rest of the input; zeros at its end.
#[derive(Clone)]
struct Input(Arc<Mutex<std::collections::VecDeque<u8>>>);

impl Input {
    fn byte(&self) -> u8 {
        self.0.lock().unwrap().pop_front().unwrap_or(0)
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }

    fn word(&self) -> u64 {
        u64::from_le_bytes(self.bytes(8).try_into().unwrap())
    }

    fn result(&self) -> Result<(), Errno> {
        match self.byte() {
            0..=199 => Ok(()),
            // A failed system call has a positive errno.
            255 => Err(Errno::new((self.word() as i32).max(1))),
            errno => Err(Errno::new(i32::from(errno) - 195)),
        }
    }

    fn answer(&self, reply: &mut Reply<'_>) -> Result<(), Errno> {
        for id in reply.outputs() {
            match self.byte() {
                0..=63 => {}
                64..=79 => reply.set_unwritten(id),
                len => {
                    reply.set(id, &self.bytes(usize::from(len) - 79));
                }
            }
        }
        if let Some(id) = reply.new_object()
            && self.byte() > 250
        {
            reply.set_data(id, self.word());
        }
        self.result()
    }
}

const TARGETS: &[Target] = &[
    Target::Method(OBJECT_DEVX, METHOD_DEVX_OTHER),
    Target::Method(OBJECT_DEVX, METHOD_DEVX_QUERY_EQN),
    Target::Method(OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_CREATE),
    Target::Method(OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_MODIFY),
    Target::Method(OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_DESTROY),
    Target::Method(OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_REG),
    Target::Method(OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_DEREG),
    Target::Method(OBJECT_DEVICE, METHOD_GET_CONTEXT),
    Target::Method(OBJECT_DEVICE, METHOD_QUERY_CONTEXT),
    Target::Method(OBJECT_DEVICE, METHOD_QUERY_PORT),
    Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_TABLE),
    Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY),
    Target::Method(OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC),
    Target::Method(OBJECT_CQ, METHOD_CQ_CREATE),
    Target::Method(OBJECT_CQ, METHOD_CQ_DESTROY),
    Target::Method(OBJECT_QP, METHOD_QP_CREATE),
    Target::Method(OBJECT_QP, METHOD_QP_DESTROY),
    Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE),
    Target::Method(OBJECT_SRQ, METHOD_SRQ_DESTROY),
    Target::Method(OBJECT_WQ, METHOD_WQ_CREATE),
    Target::Method(OBJECT_WQ, METHOD_WQ_DESTROY),
    Target::Method(OBJECT_RWQ_IND_TBL, METHOD_RWQ_IND_TBL_DESTROY),
    Target::Method(OBJECT_MR, METHOD_QUERY_MR),
    Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR),
    Target::Method(OBJECT_MR, METHOD_MR_DESTROY),
    Target::Method(OBJECT_PD, METHOD_PD_DESTROY),
    Target::Write(cmd::CMD_ALLOC_PD),
    Target::Write(cmd::CMD_REG_MR),
    Target::Write(cmd::CMD_REREG_MR),
    Target::Write(cmd::CMD_ALLOC_MW),
    Target::Write(cmd::CMD_CREATE_COMP_CHANNEL),
    Target::Write(cmd::CMD_RESIZE_CQ),
    Target::Write(cmd::CMD_REQ_NOTIFY_CQ),
    Target::Write(CMD_FLAG_EXTENDED | cmd::EX_CMD_MODIFY_WQ),
    Target::Write(CMD_FLAG_EXTENDED | cmd::EX_CMD_CREATE_RWQ_IND_TBL),
    Target::Write(cmd::CMD_MODIFY_SRQ),
    Target::Write(cmd::CMD_QUERY_SRQ),
    Target::Write(cmd::CMD_MODIFY_QP),
    Target::Write(cmd::CMD_QUERY_QP),
    Target::Write(cmd::CMD_OPEN_QP),
    Target::Write(cmd::CMD_CREATE_AH),
    Target::Write(cmd::CMD_OPEN_XRCD),
    Target::Write(cmd::CMD_QUERY_DEVICE),
    Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE),
    Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_MODIFY_QP),
];

fn run(fake: &FakeKernel, context: &Context, input: &Input) {
    let context = &context;
    let mut driver = [0xaa; 24];
    let _ = context.get_context(Udata::output(&mut driver));
    let _ = context.query_context();
    let _ = mlx5::ioctl::query_context(context, &mut driver);
    let _ = mlx5::ioctl::query_pd(context, PdHandle(1));
    let _ = context.query_device();
    if let Ok(attr) = context.query_device_ex(Udata::none()) {
        assert!(attr.response_length >= 184);
    }
    let _ = context.query_port(1);
    let mut gids = [GidEntry::default(); 3];
    if let Ok(count) = context.query_gid_table(&mut gids) {
        assert!(count <= gids.len());
    }
    let _ = context.query_gid_entry(1, 0);
    if let Ok(channel) = CompletionChannel::create(context) {
        fake.push_read(
            channel.fd(),
            input
                .result()
                .map(|()| input.bytes(usize::from(input.byte()))),
        );
        let _ = channel.read_event();
    }
    if let Ok(file) = AsyncEventFile::alloc(context) {
        fake.push_read(
            file.fd(),
            input
                .result()
                .map(|()| input.bytes(usize::from(input.byte()))),
        );
        if let Ok(event) = file.read_event() {
            let _ = format!("{event:?}");
        }
    }
    let pd = Pd::alloc(context, Udata::output(&mut driver));
    let pd_handle = pd.as_ref().map_or(PdHandle(1), Pd::handle);
    let access = AccessFlags::LOCAL_WRITE;
    let init = MrInit {
        pd: pd_handle,
        addr: 0,
        length: 1,
        iova: 0,
        access,
    };
    // SAFETY: the fake touches no memory.
    if let Ok(mut mr) = unsafe { Mr::register(context, &init, Udata::none()) } {
        let _ = uverbs::mr::query(context, mr.handle());
        // SAFETY: as above.
        let _ = unsafe {
            mr.rereg(
                &Rereg {
                    access: Some(access),
                    ..Rereg::default()
                },
                Udata::none(),
            )
        };
        if let Err(error) = mr.destroy() {
            let _ = error.to_string();
        }
    }
    let init = DmabufMrInit {
        pd: pd_handle,
        offset: 0,
        length: 1,
        iova: 0,
        fd: None,
        access,
        driver_access: None,
    };
    let _ = Mr::register_dmabuf(context, &init, Udata::none());
    let _ = Mw::alloc(context, pd_handle, MwType::TYPE_2, Udata::none());
    let _ = Ah::create(
        context,
        pd_handle,
        &AhAttr::default(),
        0,
        Udata::output(&mut driver),
    );
    let xrcd = Xrcd::open(context, &XrcdOpen::default(), Udata::none());
    let xrcd_handle = xrcd.as_ref().map_or(XrcdHandle(1), Xrcd::handle);
    let cq = Cq::create(
        context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::output(&mut driver),
    );
    if let Ok(cq) = &cq {
        let _ = cq.resize(2, Udata::output(&mut driver));
        let _ = cq.req_notify(false);
    }
    let cq_handle = cq.as_ref().map_or(CqHandle(1), Cq::handle);
    for kind in [
        SrqKind::Basic,
        SrqKind::Xrc {
            xrcd: xrcd_handle,
            cq: cq_handle,
        },
    ] {
        let init = SrqInit {
            pd: pd_handle,
            user_handle: 0,
            max_wr: 1,
            max_sge: 1,
            limit: 0,
            kind,
            async_fd: None,
        };
        if let Ok(srq) = Srq::create(context, &init, Udata::output(&mut driver)) {
            assert_eq!(srq.srq_num().is_some(), kind != SrqKind::Basic);
            let _ = srq.query();
            let _ = srq.modify(
                &SrqModify {
                    limit: Some(1),
                    max_wr: None,
                },
                Udata::none(),
            );
        }
    }
    let init = WqInit {
        pd: pd_handle,
        cq: cq_handle,
        max_wr: 1,
        max_sge: 1,
        flags: 0,
        user_handle: 0,
        async_fd: None,
    };
    if let Ok(counters) = uverbs::Counters::create(context) {
        let _ = counters.read(&mut [0; 3], 0);
    }
    if let Ok(wq) = Wq::create(context, &init, Udata::output(&mut driver)) {
        let ready = WqChange {
            state: Some(WqState::READY),
            ..WqChange::default()
        };
        let _ = wq.modify(&ready, Udata::none());
        if let Ok((table, _)) = uverbs::wq::create_table(context, &[wq.handle(); 4]) {
            let _ = uverbs::wq::destroy_table(context, table);
        }
    }
    let init = QpInit {
        qp_type: QpType::RC,
        pd: Some(pd_handle),
        ..QpInit::default()
    };
    if let Ok(qp) = Qp::create(context, &init, Udata::output(&mut driver)) {
        let _ = qp.modify(&QpAttr::default(), QpAttrMask::STATE, Udata::none());
        let _ = qp.modify(&QpAttr::default(), QpAttrMask::RATE_LIMIT, Udata::none());
        if let Ok((attr, _)) = qp.query(QpAttrMask::STATE) {
            let _ = format!("{attr:?}");
        }
        let _ = qp.destroy();
    }
    let open = QpOpen {
        xrcd: xrcd_handle,
        qpn: 1,
        qp_type: QpType::XRC_TGT,
        user_handle: 0,
    };
    let _ = Qp::open(context, &open, Udata::none());
    commands(context);
}

/// Commands in a ConnectX's own format, whose answers come from the device.
fn commands(context: &&Context) {
    use mlx5::commands::*;
    use mlx5::ioctl::devx::{Umem, UmemInit, query_eqn};
    if let Ok(caps) = Capabilities::query(context) {
        assert!(caps.lag_ports < 16 && caps.log_reserved_numbers < 32);
        assert!(caps.longest_memcpy <= 1 << 31);
    }
    if let Ok(bits) = dc_paging(context) {
        assert!(bits < 1 << 6);
    }
    let _ = query_eqn(context, 0);
    let init = UmemInit {
        addr: 0,
        length: 1,
        access: 0,
        page_sizes: Some(4096),
        dmabuf: None,
    };
    // SAFETY: the fake touches no memory.
    let _ = unsafe { Umem::register(context, &init) };
    match IndirectKey::create(context, 1, 5, KeyOptions::default()) {
        Ok(key) => assert!(key.key & 0xff == 0 && key.entries == 8),
        Err(error) => assert!(error.errno() != 0 && !error.to_string().is_empty()),
    }
    if let Ok(psv) = Psv::create(context, 1) {
        assert!(psv.number < 1 << 24);
    }
    let _ = EncryptionLimits::query(context);
    let init = EncryptionKeyInit {
        pdn: 1,
        is_long: false,
        has_tag: true,
        opaque: [1; 8],
        key: &[2; 128],
    };
    if let Ok(key) = EncryptionKey::create(context, &init) {
        let _ = key.query();
    }
    if let Ok(login) = Login::create(context, 1, 1, &[3; 48]) {
        let _ = login.is_valid();
    }
    let _ = stopped_at(context, QpHandle(1), 1);
    if let Ok(numbers) = ReservedNumbers::create(context) {
        assert!(numbers.count != 0);
    }
    let _ = Scheduling::is_supported(context);
    let _ = Scheduling::has_groups(context);
    if let Ok((element, number)) = Scheduling::default().create(context) {
        let _ = Scheduling::default().modify(&element, number);
    }
    let _ = set_udp_source_port(context, QpHandle(1), 1, 1);
    let _ = reset_stream(context, QpHandle(1), 1, 1);
    let _ = mlx5::ioctl::query_port(context, 1, &mut [0; 64]);
    let _ = mlx5::ioctl::dm::map_operation(context, DmHandle(1), 0);
}

fuzz_target!(|bytes: &[u8]| {
    let input = Input(Arc::new(Mutex::new(bytes.iter().copied().collect())));
    let fake = FakeKernel::new();
    fake.add_methods(mlx5::ioctl::METHODS);
    for &target in TARGETS {
        let input = input.clone();
        fake.on(target, move |reply| input.answer(reply));
    }
    let context = fake.context();
    run(&fake, &context, &input);
});
