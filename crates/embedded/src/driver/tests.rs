//! The driver alone, without network, threads and sockets: commands, their refusals and the
//! causes of these.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File as HostFile;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use device_testing::embedded::raw::{
    Command, MAX_COMMAND, create_cq, create_qp, create_srq, destroy,
};
use libc::{EACCES, EAGAIN, EBADF, EBUSY, EFAULT, EHOSTUNREACH, EINVAL, EIO, ENODATA, ENOENT};
use libc::{ENOMEM, ENOSPC, ENOTTY, EOPNOTSUPP, EPERM, EPROTONOSUPPORT, EREMOTEIO};
use mlx5_abi::ids::*;
use mlx5_abi::{ALLOC_UCTX_DEVX, AllocUcontextReq, CreateQp, LIB_CAP_4K_UAR};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use roce::fabric::Fabric;
use roce::packet::Pool;
use softhca::Settings;
use softhca::command::opcode as op;
use softhca::fault::{Action, Faults};
use softhca::profile::Profile;
use softhca::rule::Rule;
use softhca::status::Status;
use uverbs::abi::ids::*;
use uverbs::abi::ioctl::{Attr, IoctlHdr};
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::{AllocPd, ModifyQp, OpenXrcd, RegMr};
use uverbs::{AccessFlags, Errno, QpAttrMask as Mask, QpState, QpType};
use zerocopy::{FromBytes, IntoBytes};

use super::cause::{Cause, Class, Container, VerbError};
use super::files::{ContextFile, File};
use super::gids::GidTable;
use super::memory::Process;
use super::object::{Mr, Pd};
use super::request::Request;
use super::state::State;

/// A device with one open context, and memory for queues and regions.
struct Driver {
    state: State,
    fd: RawFd,
    memory: Vec<u64>,
    next: usize,
}

/// An outcome: the attributes of the command, with outputs.
type Outcome = Result<Vec<Attr>, VerbError>;

impl Driver {
    fn new() -> Self {
        let profile = Profile::named("roce").unwrap().with_devx();
        let settings = Settings::numbered(profile, 0);
        let (gids, fabric) = (GidTable::default(), Fabric::new(1));
        let process = Process::new(None);
        let state = State::new(process, settings, None, &gids, &fabric, Pool::new());
        let mut driver = Self {
            state: state.unwrap(),
            fd: 0,
            memory: vec![0; 8 * 4096],
            next: 0,
        };
        driver.fd = driver.open();
        let request = AllocUcontextReq {
            total_num_bfregs: 16,
            num_low_latency_bfregs: 4,
            flags: ALLOC_UCTX_DEVX,
            max_cqe_version: 1,
            lib_caps: LIB_CAP_4K_UAR,
            ..AllocUcontextReq::default()
        };
        driver.run(&get_context(&request)).unwrap();
        driver
    }

    /// Opens a context that is not initialized.
    fn open(&mut self) -> RawFd {
        let (file, fd) = ContextFile::new().unwrap();
        self.state.files.insert(fd, File::Context(Box::new(file)));
        fd
    }

    /// Returns the address of a free page.
    fn page(&mut self) -> u64 {
        let start = self
            .memory
            .as_mut_ptr()
            .expose_provenance()
            .next_multiple_of(4096);
        self.next += 1;
        assert!(self.next < 15);
        (start + (self.next - 1) * 4096) as u64
    }

    fn run(&mut self, command: &Command) -> Outcome {
        self.run_on(self.fd, command)
    }

    /// Executes a command of a context.
    fn run_on(&mut self, fd: RawFd, command: &Command) -> Outcome {
        let outcome = self.execute_on(fd, command);
        if let Err(error) = &outcome {
            record(error);
        }
        outcome
    }

    fn execute_on(&mut self, fd: RawFd, command: &Command) -> Outcome {
        let mut frame = vec![0u64; MAX_COMMAND / 8];
        let mut header = command.header;
        header.num_attrs += command.attrs.len() as u16;
        header.length += (size_of::<IoctlHdr>() + size_of_val(&command.attrs[..])) as u16;
        let buffer = frame.as_mut_bytes();
        buffer[..24].copy_from_slice(header.as_bytes());
        buffer[24..24 + size_of_val(&command.attrs[..])].copy_from_slice(command.attrs.as_bytes());
        // SAFETY: a header with its attributes, whose buffers the command owns.
        let request = unsafe { Request::read(frame.as_mut_ptr().cast(), None) };
        // SAFETY: addresses are those of the memory of the driver under test, or unmapped.
        request.and_then(|mut request| unsafe { self.state.execute(fd, &mut request) })?;
        let attrs = frame.as_bytes()[24..][..size_of_val(&command.attrs[..])].chunks_exact(16);
        Ok(attrs.map(|it| Attr::read_from_bytes(it).unwrap()).collect())
    }

    /// Executes a command that is refused.
    fn refused(&mut self, command: &Command) -> VerbError {
        self.run(command).expect_err("a refused command")
    }

    /// Creates an object; returns its handle.
    fn create(&mut self, command: &Command, handle: u16) -> u32 {
        let attrs = self.run(command).unwrap();
        attrs.iter().find(|it| it.attr_id == handle).unwrap().data as u32
    }

    fn pd(&mut self) -> u32 {
        let mut command = Command::write(CMD_ALLOC_PD, &AllocPd::default(), 4);
        command.out(ATTR_UHW_OUT, 4);
        self.run(&command).unwrap();
        let fd = self.fd;
        let handles = self.state.objects.entries();
        let of_pd = handles.filter(|(_, it)| it.file == fd && it.of::<Pd>().is_some());
        of_pd.map(|(handle, _)| handle).max().unwrap()
    }

    fn cq_command(&mut self, cqe: u32) -> Command {
        let mut driver = mlx5_abi::CreateCq {
            cqe_size: 64,
            ..mlx5_abi::CreateCq::default()
        };
        (driver.buf_addr, driver.db_addr) = (self.page(), self.page());
        let mut command = create_cq(cqe);
        command.driver(driver.as_bytes());
        command
    }

    fn cq(&mut self) -> u32 {
        let command = self.cq_command(15);
        self.create(&command, ATTR_CREATE_CQ_HANDLE)
    }

    fn qp_command(&mut self, pd: u32, cq: u32, change: impl FnOnce(&mut CreateQp)) -> Command {
        let mut driver = CreateQp {
            sq_wqe_count: 16,
            rq_wqe_count: 4,
            rq_wqe_shift: 4,
            ..CreateQp::default()
        };
        (driver.buf_addr, driver.db_addr) = (self.page(), self.page());
        change(&mut driver);
        let mut command = create_qp(QpType::RC.0, 4);
        command
            .object(ATTR_CREATE_QP_PD_HANDLE, pd.into())
            .object(ATTR_CREATE_QP_SEND_CQ_HANDLE, cq.into())
            .object(ATTR_CREATE_QP_RECV_CQ_HANDLE, cq.into())
            .driver(driver.as_bytes());
        command
    }
}

fn get_context(request: &AllocUcontextReq) -> Command {
    let mut command = Command::new(OBJECT_DEVICE, METHOD_GET_CONTEXT);
    command
        .out(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 4)
        .out(ATTR_GET_CONTEXT_CORE_SUPPORT, 8)
        .driver(request.as_bytes())
        .out(ATTR_UHW_OUT, 72);
    command
}

fn reg_mr(pd: u32, start: u64, length: u64, access: AccessFlags) -> Command {
    let body = RegMr {
        start,
        length,
        hca_va: start,
        pd_handle: pd,
        access_flags: access.bits(),
        ..RegMr::default()
    };
    Command::write(CMD_REG_MR, &body, 12)
}

fn modify_qp(qp: u32, mask: Mask, change: impl FnOnce(&mut ModifyQp)) -> Command {
    let mut body = ModifyQp {
        qp_handle: qp,
        attr_mask: mask.bits(),
        port_num: 1,
        ..ModifyQp::default()
    };
    change(&mut body);
    Command::write(CMD_MODIFY_QP, &body, 0)
}

/// Asserts the cause of a refusal, and the error number that derives from it.
#[track_caller]
fn assert_cause(error: VerbError, errno: i32, what: &str, value: u64, rule: Rule) {
    let found = (error.errno().raw(), error.what, error.value, error.rule);
    assert_eq!(found, (errno, what, value, rule), "{error}");
}

#[test]
fn methods_and_attributes_are_checked() {
    let mut driver = Driver::new();
    let unknown = Command::new(OBJECT_DEVICE, 77);
    let error = driver.refused(&unknown);
    assert_cause(
        error,
        EPROTONOSUPPORT,
        "object and method",
        77,
        Rule::Supported,
    );
    let mut unknown = Command::new(OBJECT_DEVICE, METHOD_QUERY_PORT);
    unknown.constant(0xfff, 1);
    let error = driver.refused(&unknown);
    assert_cause(error, EPROTONOSUPPORT, "attribute", 0xfff, Rule::Supported);
    let mut incomplete = driver.cq_command(15);
    incomplete.without(ATTR_CREATE_CQ_CQE);
    let error = driver.refused(&incomplete);
    let id = ATTR_CREATE_CQ_CQE.into();
    assert_cause(error, EINVAL, "attribute", id, Rule::Present);
    let mut repeated = driver.cq_command(15);
    repeated.u32(ATTR_CREATE_CQ_CQE, 4);
    let error = driver.refused(&repeated);
    assert_cause(error, EINVAL, "attribute", id, Rule::Once);
    let mut short = driver.cq_command(15);
    short.find(ATTR_CREATE_CQ_CQE).len = 2;
    let error = driver.refused(&short);
    assert_cause(error, EINVAL, "length", 2, Rule::Between(4, 4));
    assert_eq!(error.of, Some(Container::Number(ATTR_CREATE_CQ_CQE.into())));
    let mut unmapped = driver.cq_command(15);
    unmapped.find(ATTR_CREATE_CQ_RESP_CQE).data = 64;
    let error = driver.refused(&unmapped);
    assert_cause(error, EFAULT, "output", 64, Rule::Writable);
    let error = driver.refused(&Command::write(0x7e, &[0u32; 2], 0));
    assert_cause(error, EINVAL, "write command", 0x7e, Rule::Known);
    let error = driver.refused(&Command::write(CMD_ALLOC_PD, &[0u8; 0], 4));
    assert_eq!(error.errno().raw(), EINVAL);
    let error = driver.refused(&Command::write(CMD_REG_MR, &[0u32; 2], 12));
    let least = Rule::AtLeast(size_of::<RegMr>() as u64);
    assert_cause(error, ENOSPC, "length of the input", 8, least);
}

#[test]
fn contexts_and_objects_are_checked() {
    let mut driver = Driver::new();
    let error = driver.refused(&get_context(&AllocUcontextReq {
        total_num_bfregs: 16,
        max_cqe_version: 1,
        ..AllocUcontextReq::default()
    }));
    let fd = driver.fd as u64;
    assert_cause(
        error,
        EINVAL,
        "descriptor",
        fd,
        Rule::InState("without a context"),
    );
    let error = driver.refused(&get_context(&AllocUcontextReq {
        total_num_bfregs: 513,
        max_cqe_version: 1,
        ..AllocUcontextReq::default()
    }));
    assert_cause(error, ENOMEM, "total_num_bfregs", 513, Rule::AtMost(512));
    let error = driver.refused(&get_context(&AllocUcontextReq {
        comp_mask: 4,
        ..AllocUcontextReq::default()
    }));
    assert_cause(error, EOPNOTSUPP, "comp_mask", 4, Rule::Zero);
    let other = driver.open();
    let query = Command::write(CMD_ALLOC_PD, &AllocPd::default(), 4);
    let error = driver.run_on(other, &query).unwrap_err();
    assert_eq!((error.what, error.value), ("descriptor", other as u64));
    let error = driver.run_on(-7, &query).unwrap_err();
    assert_cause(error, EBADF, "descriptor", u64::MAX, Rule::Exists);
    let pd = driver.pd();
    let cq = driver.cq();
    let missing = destroy(OBJECT_CQ, 999);
    assert_cause(
        driver.refused(&missing),
        ENOENT,
        "handle",
        999,
        Rule::Exists,
    );
    let wrong = destroy(OBJECT_CQ, pd);
    let of_cq = Rule::Is(OBJECT_CQ.into());
    let error = driver.refused(&wrong);
    assert_cause(error, EINVAL, "type of the object", OBJECT_PD.into(), of_cq);
    assert_eq!(error.of, Some(Container::Number(pd)));
    let foreign = destroy(OBJECT_CQ, cq);
    let other_fd = driver.open();
    let error = driver.run_on(other_fd, &foreign).unwrap_err();
    assert_cause(error, ENOENT, "handle", cq.into(), Rule::Exists);
    let page = driver.page();
    driver
        .run(&reg_mr(pd, page, 4096, AccessFlags::LOCAL_WRITE))
        .unwrap();
    let error = driver.refused(&destroy(OBJECT_PD, pd));
    assert_cause(error, EBUSY, "protection domain", 1, Rule::Unused);
}

#[test]
fn queues_are_checked() {
    let mut driver = Driver::new();
    let (pd, cq) = (driver.pd(), driver.cq());
    let command = driver.cq_command(0);
    let range = Rule::Between(1, (1 << 22) - 1);
    assert_cause(driver.refused(&command), EINVAL, "cqe", 0, range);
    let mut command = driver.cq_command(4);
    let vector = ATTR_CREATE_CQ_COMP_VECTOR;
    command.without(vector).u32(vector, 9);
    let error = driver.refused(&command);
    assert_cause(error, EINVAL, "comp_vector", 9, Rule::AtMost(3));
    driver.next -= 4;
    let command = driver.qp_command(pd, cq, |it| it.sq_wqe_count = 3);
    let size = Rule::PowerOfTwo(1 << 15);
    assert_cause(driver.refused(&command), EINVAL, "sq_wqe_count", 3, size);
    driver.next -= 2;
    let command = driver.qp_command(pd, cq, |it| it.db_addr += 4);
    let at = driver.refused(&command);
    assert_eq!((at.what, at.rule), ("db_addr", Rule::MultipleOf(8)));
    driver.next -= 2;
    let command = driver.qp_command(pd, cq, |it| it.buf_addr = 1 << 60);
    let error = driver.refused(&command);
    assert_cause(
        error,
        EFAULT,
        "memory of the queue",
        1 << 60,
        Rule::Writable,
    );
    driver.next -= 2;
    let mut command = driver.qp_command(pd, cq, |_| {});
    command.without(ATTR_CREATE_QP_TYPE);
    command.constant(ATTR_CREATE_QP_TYPE, 77);
    let error = driver.refused(&command);
    assert_cause(error, EINVAL, "qp_type", 77, Rule::Supported);
    let mut command = create_srq(pd, 1 << 15);
    command.driver(mlx5_abi::CreateSrq::default().as_bytes());
    let error = driver.refused(&command);
    assert_cause(
        error,
        EINVAL,
        "max_wr",
        1 << 15,
        Rule::AtMost((1 << 15) - 1),
    );
}

#[test]
fn transitions_are_checked() {
    let mut driver = Driver::new();
    let (pd, cq) = (driver.pd(), driver.cq());
    let command = driver.qp_command(pd, cq, |_| {});
    let qp = driver.create(&command, ATTR_CREATE_QP_HANDLE);
    let to_rtr = |it: &mut ModifyQp| it.qp_state = QpState::RTR.0;
    let error = driver.refused(&modify_qp(qp, Mask::STATE, to_rtr));
    let rule = Rule::Transition { from: 0, to: 2 };
    assert_cause(error, EINVAL, "qp_state", 2, rule);
    let number = driver.state.objects.qp(driver.fd, qp).unwrap().number;
    assert_eq!(error.queue_pair(), Some(number));
    let to_init = |it: &mut ModifyQp| it.qp_state = QpState::INIT.0;
    let needed = Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    let error = driver.refused(&modify_qp(qp, Mask::STATE | Mask::PORT, to_init));
    let rule = Rule::Contains(needed.bits().into());
    assert_cause(error, EINVAL, "attr_mask", Mask::PORT.bits().into(), rule);
    let beyond = |it: &mut ModifyQp| (it.qp_state, it.pkey_index) = (QpState::INIT.0, 200);
    let error = driver.refused(&modify_qp(qp, Mask::STATE | needed, beyond));
    assert_cause(error, EINVAL, "pkey_index", 200, Rule::AtMost(127));
    let command = modify_qp(qp, Mask::STATE | needed, to_init);
    driver.run(&command).unwrap();
    let wrong = |it: &mut ModifyQp| (it.qp_state, it.cur_qp_state) = (1, 3);
    let mask = Mask::STATE | Mask::CUR_STATE;
    let error = driver.refused(&modify_qp(qp, mask, wrong));
    assert_cause(error, EINVAL, "cur_qp_state", 3, Rule::Is(1));
    let mask = Mask::AV
        | Mask::PATH_MTU
        | Mask::DEST_QPN
        | Mask::RQ_PSN
        | Mask::MAX_DEST_RD_ATOMIC
        | Mask::MIN_RNR_TIMER;
    let error = driver.refused(&modify_qp(qp, Mask::STATE | mask, |it| {
        (it.qp_state, it.path_mtu, it.dest.port_num) = (2, 6, 1);
    }));
    assert_cause(error, EINVAL, "path_mtu", 6, Rule::Between(1, 5));
}

#[test]
fn regions_are_checked() {
    let mut driver = Driver::new();
    let (pd, page) = (driver.pd(), driver.page());
    let none = AccessFlags::empty();
    let error = driver.refused(&reg_mr(pd, page, 0, none));
    assert_cause(error, EINVAL, "length", 0, Rule::NonZero);
    let error = driver.refused(&reg_mr(pd, u64::MAX - 7, 64, none));
    assert_cause(error, EINVAL, "start", u64::MAX - 7, Rule::NoWrap);
    let error = driver.refused(&reg_mr(pd, 1 << 60, 64, none));
    assert_cause(error, EFAULT, "start", 1 << 60, Rule::Readable);
    let remote = AccessFlags::REMOTE_WRITE;
    let error = driver.refused(&reg_mr(pd, page, 64, remote));
    let needed = Rule::Contains(AccessFlags::LOCAL_WRITE.bits().into());
    let bits = remote.bits().into();
    assert_cause(error, EINVAL, "access_flags", bits, needed);
}

#[test]
fn refusals_of_the_device_are_in_the_error() {
    let mut driver = Driver::new();
    driver
        .state
        .hca
        .inject_next(Action::FailCommand(op::CREATE_CQ), 1);
    let command = driver.cq_command(15);
    let error = driver.refused(&command);
    let Class::Device(inner) = error.class() else {
        panic!("{error}");
    };
    assert_eq!(inner.status(), Status::Internal);
    assert_cause(error, EIO, "CREATE_CQ", op::CREATE_CQ.into(), Rule::NoFault);
    // A command of the program, for a protection domain that does not exist.
    let mut command = Command::new(OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_CREATE);
    let mut input = [0; 0x110];
    input[..2].copy_from_slice(&op::CREATE_MKEY.to_be_bytes());
    // `mkc.pd`.
    input[0x1c..0x20].copy_from_slice(&77u32.to_be_bytes());
    command
        .object(ATTR_DEVX_OBJ_CREATE_HANDLE, 0)
        .input(ATTR_DEVX_OBJ_CREATE_IN, &input)
        .out(ATTR_DEVX_OBJ_CREATE_OUT, 16);
    let error = driver.refused(&command);
    assert!(matches!(error.class(), Class::Program(_)), "{error}");
    assert_eq!(error.errno().raw(), EREMOTEIO);
    assert_eq!((error.what, error.value), ("CREATE_MKEY", 77));
}

#[test]
fn an_object_that_the_device_does_not_destroy_stays() {
    let mut driver = Driver::new();
    let (pd, page) = (driver.pd(), driver.page());
    driver
        .run(&reg_mr(pd, page, 4096, AccessFlags::LOCAL_WRITE))
        .unwrap();
    let regions = |driver: &Driver| {
        let range = page as usize..page as usize + 1;
        driver
            .state
            .objects
            .regions_in(&range)
            .map(|it| it.0)
            .collect::<Vec<_>>()
    };
    let [mr] = regions(&driver)[..] else {
        panic!("one region expected");
    };
    driver
        .state
        .hca
        .inject_next(Action::FailCommand(op::DESTROY_MKEY), 1);
    assert_eq!(driver.refused(&destroy(OBJECT_MR, mr)).errno().raw(), EIO);
    assert_eq!(regions(&driver), [mr]);
    assert!(driver.state.objects.typed::<Mr>(driver.fd, mr).is_ok());
    assert_eq!(driver.refused(&destroy(OBJECT_PD, pd)).errno().raw(), EBUSY);
    driver.run(&destroy(OBJECT_MR, mr)).unwrap();
    assert!(regions(&driver).is_empty());
    driver.run(&destroy(OBJECT_PD, pd)).unwrap();
    assert_eq!(driver.state.objects.len(), 0);
}

/// `mlx5_cmd_check` maps each status.
#[test]
fn error_numbers_derive_from_the_status() {
    let mut driver = Driver::new();
    let mut of = |opcode: u16, number: u32| {
        let input = super::command::Input::about(opcode, number);
        let error = super::command::run(&mut driver.state.hca, &input, 16).unwrap_err();
        error.errno().raw()
    };
    // Bad resource, bad opcode, busy.
    assert_eq!(of(op::DESTROY_CQ, 999), EINVAL);
    assert_eq!(of(0xfff, 0), EINVAL);
    assert_eq!(of(op::DESTROY_EQ, 0), EINVAL);
    // No resources: the range of device memory is not free.
    assert_eq!(of(op::ALLOC_MEMIC, 0), EAGAIN);
}

#[test]
fn the_observer_is_told_refusals_and_events() {
    let mut driver = Driver::new();
    let causes = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&causes);
    let observe = move |cause: &Cause| told.lock().unwrap().push(*cause);
    driver.state.observe(Some(Arc::new(observe)));
    driver
        .state
        .hca
        .inject_next(Action::FailCommand(op::CREATE_CQ), 1);
    let command = driver.cq_command(15);
    let error = driver.refused(&command);
    let Class::Device(inner) = error.class() else {
        panic!("{error}");
    };
    let expected = Cause::Device(softhca::cause::Cause::Command {
        opcode: op::CREATE_CQ,
        error: inner,
    });
    assert_eq!(causes.lock().unwrap()[..], [expected]);
    driver.state.fail();
    let last = *causes.lock().unwrap().last().unwrap();
    let event = uverbs::AsyncEventType::DEVICE_FATAL;
    assert_eq!(last, Cause::Event { event, element: 0 });
}

thread_local! {
    /// The classes of the errors that drivers of this thread's test have returned.
    static RECORDED: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

fn record(error: &VerbError) {
    RECORDED.with_borrow_mut(|recorded| _ = recorded.insert(name(error.class())));
}

/// Declares the names of all classes. A new one does not compile until it is here, and then has
/// to be produced.
macro_rules! names {
    ($($class:ident)+) => {
        const NAMES: &[&str] = &[$(stringify!($class)),+];

        fn name(class: Class) -> &'static str {
            match class {
                $(Class::$class { .. } => stringify!($class)),+
            }
        }
    };
}

names! {
    Invalid Unsupported Unknown NotFound BadDescriptor NotADevice NoMemory Busy Fault Permission
    Again NoSpace Conflict Unreachable NoData Removed Device Program System Injected
}

/// A flow that contradicts another one is refused in `tests/flows.rs`, and a command to a removed
/// device before the driver has it, in `tests/causes.rs`.
const BEYOND_THE_DRIVER: [&str; 2] = ["Conflict", "Removed"];

/// Every class of errors is that of a command.
#[test]
fn every_class_is_produced() {
    methods_and_attributes_are_checked();
    contexts_and_objects_are_checked();
    refusals_of_the_device_are_in_the_error();
    descriptors_and_files_are_checked();
    addresses_are_checked();
    prefetches_are_checked();
    injected_faults_are_errors();
    let recorded = RECORDED.with_borrow(BTreeSet::clone);
    let missing: Vec<&str> = (NAMES.iter().copied())
        .filter(|name| !recorded.contains(name) && !BEYOND_THE_DRIVER.contains(name))
        .collect();
    assert_eq!(missing, [""; 0]);
    assert!(BEYOND_THE_DRIVER.iter().all(|it| !recorded.contains(it)));
}

#[test]
fn descriptors_and_files_are_checked() {
    let mut driver = Driver::new();
    driver
        .run(&Command::write(CMD_CREATE_COMP_CHANNEL, &[0u64; 1], 4))
        .unwrap();
    let mut files = driver.state.files.iter();
    let channel = files.find(|(_, it)| matches!(it, File::Events(_)));
    let channel = *channel.unwrap().0;
    let command = Command::write(CMD_ALLOC_PD, &AllocPd::default(), 4);
    let error = driver.run_on(channel, &command).unwrap_err();
    let rule = Rule::OfType("device");
    assert_cause(error, ENOTTY, "descriptor", channel as u64, rule);
    let file = HostFile::open("/proc/self/exe").unwrap();
    let open = OpenXrcd {
        fd: file.as_raw_fd() as u32,
        ..OpenXrcd::default()
    };
    let error = driver.refused(&Command::write(CMD_OPEN_XRCD, &open, 4));
    let rule = Rule::Contains(libc::O_CREAT as u64);
    assert_cause(error, EAGAIN, "oflags", 0, rule);
    // A buffer that cannot be written to.
    let buffer = memfd_create(c"buffer", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    ftruncate(&buffer, 4096).unwrap();
    fcntl(&buffer, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    let path = format!("/proc/self/fd/{}", buffer.as_raw_fd());
    let buffer = HostFile::open(path).unwrap();
    let mut register = Command::new(OBJECT_MR, METHOD_REG_DMABUF_MR);
    register
        .object(ATTR_REG_DMABUF_MR_HANDLE, 0)
        .object(ATTR_REG_DMABUF_MR_PD_HANDLE, driver.pd().into())
        .input(ATTR_REG_DMABUF_MR_OFFSET, &[0; 8])
        .input(ATTR_REG_DMABUF_MR_LENGTH, &4096u64.to_ne_bytes())
        .input(ATTR_REG_DMABUF_MR_IOVA, &[0; 8])
        .u32(ATTR_REG_DMABUF_MR_FD, buffer.as_raw_fd() as u32)
        .u32(ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 1)
        .out(ATTR_REG_DMABUF_MR_RESP_LKEY, 4)
        .out(ATTR_REG_DMABUF_MR_RESP_RKEY, 4);
    let error = driver.refused(&register);
    let (what, value) = ("mapping of a DMA buffer", buffer.as_raw_fd() as u64);
    assert_cause(error, EACCES, what, value, Rule::Granted);
}

#[test]
fn addresses_are_checked() {
    let mut driver = Driver::new();
    let mut query = Command::new(OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY);
    query
        .constant(ATTR_QUERY_GID_ENTRY_PORT, 1)
        .constant(ATTR_QUERY_GID_ENTRY_GID_INDEX, 100)
        .u32(ATTR_QUERY_GID_ENTRY_FLAGS, 0)
        .out(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, 32);
    let error = driver.refused(&query);
    assert_cause(error, ENODATA, "gid_index", 100, Rule::Exists);
    let (pd, cq) = (driver.pd(), driver.cq());
    let command = driver.qp_command(pd, cq, |_| {});
    let qp = driver.create(&command, ATTR_CREATE_QP_HANDLE);
    let mask = Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    let to_init = modify_qp(qp, mask, |it| it.qp_state = QpState::INIT.0);
    driver.run(&to_init).unwrap();
    let mask = Mask::STATE
        | Mask::AV
        | Mask::PATH_MTU
        | Mask::DEST_QPN
        | Mask::RQ_PSN
        | Mask::MAX_DEST_RD_ATOMIC
        | Mask::MIN_RNR_TIMER;
    let error = driver.refused(&modify_qp(qp, mask, |it| {
        (it.qp_state, it.path_mtu, it.dest.port_num) = (QpState::RTR.0, 3, 1);
        (it.dest.is_global, it.dest.dgid) = (1, [0x20; 16]);
    }));
    let start = 0x2020_2020_2020_2020;
    assert_cause(error, EHOSTUNREACH, "GID", start, Rule::Exists);
}

#[test]
fn prefetches_are_checked() {
    let mut driver = Driver::new();
    let (pd, other, page) = (driver.pd(), driver.pd(), driver.page());
    let access = AccessFlags::ON_DEMAND;
    driver.run(&reg_mr(pd, page, 4096, access)).unwrap();
    let of_mr = |(_, it): (_, &super::object::Object)| it.of::<Mr>().map(|it| it.key);
    let key = driver.state.objects.entries().find_map(of_mr).unwrap();
    let mut advise = |pd: u32, advice: u64| {
        let segment = [
            page.to_ne_bytes(),
            (u64::from(key) << 32 | 64).to_ne_bytes(),
        ];
        let mut command = Command::new(OBJECT_MR, METHOD_ADVISE_MR);
        command
            .object(ATTR_ADVISE_MR_PD_HANDLE, pd.into())
            .constant(ATTR_ADVISE_MR_ADVICE, advice)
            .u32(ATTR_ADVISE_MR_FLAGS, 0)
            .input(ATTR_ADVISE_MR_SGE_LIST, segment.as_bytes());
        driver.run(&command)
    };
    advise(pd, 0).unwrap();
    let rule = Rule::With("the region's key");
    let error = advise(other, 0).unwrap_err();
    assert_cause(error, EPERM, "pd_handle", other.into(), rule);
    // Prefetch for writing.
    let error = advise(pd, 1).unwrap_err();
    assert_cause(error, EPERM, "lkey", key.into(), Rule::Writable);
}

#[test]
fn injected_faults_are_errors() {
    let mut driver = Driver::new();
    let (pd, page) = (driver.pd(), driver.page());
    let faults = Faults::parse("memlock 4KiB\n").unwrap();
    driver.state.hca.add_faults(&faults);
    let register = |length| reg_mr(pd, page, length, AccessFlags::LOCAL_WRITE);
    driver.run(&register(64)).unwrap();
    let error = driver.refused(&register(8192));
    let what = "injected fault of line";
    assert_cause(error, ENOMEM, what, 1, Rule::NoFault);
    assert_eq!(error.class(), Class::Injected(Errno::new(ENOMEM)));
}

/// One rule of each kind, with operands as in `docs/explain.md`.
const RULES: [Rule; 35] = [
    Rule::AtMost(4),
    Rule::AtLeast(4),
    Rule::Between(1, 4),
    Rule::Is(4),
    Rule::OneOf(&[1, 2]),
    Rule::MultipleOf(8),
    Rule::PowerOfTwo(64),
    Rule::Bits(7),
    Rule::Contains(3),
    Rule::Excludes(4),
    Rule::Zero,
    Rule::NonZero,
    Rule::Known,
    Rule::WellFormed,
    Rule::NoWrap,
    Rule::Readable,
    Rule::Writable,
    Rule::Within(4096),
    Rule::Exists,
    Rule::OfType("TIR"),
    Rule::OfContext,
    Rule::Unused,
    Rule::Free,
    Rule::Permitted,
    Rule::Supported,
    Rule::Present,
    Rule::Absent,
    Rule::Once,
    Rule::With("GRH"),
    Rule::Without("GRH"),
    Rule::InState("joined"),
    Rule::Transition { from: 0, to: 3 },
    Rule::NoFault,
    Rule::Granted,
    Rule::CommonMultiple { with: 3, limit: 64 },
];

/// The page of `--explain` has the sentence of each rule by which the driver refuses a command.
#[test]
fn the_sentences_of_rules_are_documented() {
    let page = include_str!("../../../../docs/explain.md");
    let (_, section) = page.split_once("## Refused commands\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| ..."));
    let sentences: Vec<&str> = rows
        .map(|line| line.split('|').nth(1).unwrap().trim())
        .collect();
    let expected: Vec<String> = (RULES.iter().enumerate())
        .map(|(number, rule)| {
            assert_eq!(usize::from(rule.number()), number);
            format!("... {rule}")
        })
        .collect();
    assert_eq!(sentences, expected);
}
