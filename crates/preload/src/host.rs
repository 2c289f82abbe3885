//! Checks of programs on devices of the host: `RINGVERBS_CHECK_HOST`.
//!
//! Commands pass to the kernel. After each one that has succeeded, its attributes tell how the
//! program's objects have changed, as the drivers of embedded devices do.
//!
//! The kernel numbers objects by context, so each context counts as a device of its own here.

use std::collections::BTreeMap;
use std::ffi::{c_ulong, c_void};
use std::net::Ipv6Addr;
use std::os::fd::RawFd;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, Once};

use embedded::{ObjectChange, QueuePairAttributes};
use uverbs::abi::ids::*;
use uverbs::abi::ioctl::RDMA_VERBS_IOCTL;
use uverbs::abi::later::{
    ATTR_REG_MR_ACCESS_FLAGS, ATTR_REG_MR_ADDR, ATTR_REG_MR_IOVA, ATTR_REG_MR_LENGTH,
    ATTR_REG_MR_RESP_LKEY, METHOD_REG_MR,
};
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::extended::EX_MODIFY_QP;
use uverbs::abi::write::{
    AllocMwResp, AllocPdResp, ExModifyQp, ModifyQp, ModifySrq, RegMr, RegMrResp,
};
use uverbs::{AccessFlags, CqFlags, QpAttrMask, QpState, QpType};
use zerocopy::FromBytes;

use crate::check::Checker;
use crate::config::{self, CheckConfig, print_error};
use crate::explain::{Explainer, Target, lock};
use crate::request::Request;
use crate::switch::Switch;
use crate::{hooks, internal, promises};

/// Whether the program is checked on the host's devices.
static SWITCH: Switch = Switch::new();
/// The explainer of this process; null before its first command.
static CURRENT: AtomicPtr<Explainer> = AtomicPtr::new(ptr::null_mut());
/// The program's contexts.
static CONTEXTS: Mutex<Contexts> = Mutex::new(Contexts {
    open: BTreeMap::new(),
    names: Vec::new(),
});

/// `IB_UVERBS_QP_CREATE_SQ_SIG_ALL`.
const SIGNALS_ALL: u32 = 1 << 4;
/// `IB_SRQ_LIMIT`.
const LIMIT: u32 = 1 << 1;
/// A queue may have room for more sends than the kernel has promised, if they are short: with
/// more than so many times their number, completions are not seen.
const MORE_SENDS: u32 = 16;

/// Returns whether the program is checked on the host's devices.
#[inline]
pub(crate) fn is_on() -> bool {
    SWITCH.is_on(|| {
        let is_asked = config::check_on_host().is_some();
        if is_asked {
            promises::look_for_contexts();
        }
        is_asked
    })
}

/// Returns what reports the errors of this process, if it is checked and has used a device.
#[inline]
pub(crate) fn explainer() -> Option<&'static Explainer> {
    // SAFETY: one is never freed once it is current.
    unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
}

fn current() -> Option<&'static Explainer> {
    static START: Once = Once::new();
    START.call_once(|| {
        if let Some((config, report)) = config::check_on_host() {
            start(&config, &report);
        }
    });
    explainer()
}

fn start(config: &CheckConfig, report: &Path) {
    let checker = match Checker::new(config) {
        Ok(checker) => checker.on_host(),
        Err(error) => return print_error(&error),
    };
    let target = match Target::open(report) {
        Ok(target) => target,
        Err(error) => return print_error(&format!("{}: {error}", report.display())),
    };
    // SAFETY: called once, in a process without embedded devices.
    let explainer = unsafe { Explainer::new((target, config.format), false, Some(checker)) };
    let explainer = Box::leak(Box::new(explainer));
    CURRENT.store(explainer, Ordering::Release);
    explainer.observe(&[]);
    // SAFETY: the handler may be called in any process, and exists until it ends.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
}

/// Runs in a child of fork, which is not checked: another thread of its parent may have had any
/// lock.
extern "C" fn after_fork() {
    SWITCH.turn_off();
    CURRENT.store(ptr::null_mut(), Ordering::Relaxed);
}

/// An object of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    /// The address of its structure in libibverbs is the user handle.
    CompletionQueue {
        user_handle: u64,
    },
    QueuePair(QueuePair),
    Region {
        key: u32,
    },
    SharedQueue {
        user_handle: u64,
        /// It has a completion queue of its own.
        has_completions: bool,
    },
    Other,
}

/// A queue pair, with the attributes that the program has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueuePair {
    number: u32,
    user_handle: u64,
    port: u8,
    state: QpState,
    attributes: QueuePairAttributes,
}

/// A context of the program.
#[derive(Debug, Default)]
struct Context {
    /// Its number as a device.
    device: usize,
    /// Name of the device in sysfs.
    name: String,
    /// By handle.
    objects: BTreeMap<u32, Object>,
}

#[derive(Debug)]
struct Contexts {
    /// By descriptor.
    open: BTreeMap<RawFd, Context>,
    /// Names of the devices of all contexts so far.
    names: Vec<String>,
}

impl Contexts {
    /// Returns the context of a descriptor.
    fn context(&mut self, fd: RawFd) -> &mut Context {
        let Self { open, names } = self;
        open.entry(fd).or_insert_with(|| {
            let name = device_of_host(fd);
            names.push(name.clone());
            Context {
                device: names.len() - 1,
                name,
                objects: BTreeMap::new(),
            }
        })
    }
}

/// Returns the name of the host's device that a descriptor is of.
pub(crate) fn device_of_host(fd: RawFd) -> String {
    let file = std::fs::read_link(format!("/proc/thread-self/fd/{fd}")).unwrap_or_default();
    let file = file
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("");
    let name = std::fs::read_to_string(format!("/sys/class/infiniband_verbs/{file}/ibdev"));
    name.map_or_else(|_| file.to_owned(), |name| name.trim_end().to_owned())
}

/// Reads a file of a port in sysfs.
fn port_file(device: &str, port: u8, file: &str) -> Option<String> {
    let path = format!("/sys/class/infiniband/{device}/ports/{port}/{file}");
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim_end().to_owned())
}

/// Returns the number of the device that a descriptor is of, if it is checked.
pub(crate) fn device_of(fd: RawFd) -> Option<usize> {
    explainer()?;
    let contexts = lock(&CONTEXTS);
    contexts.open.get(&fd).map(|context| context.device)
}

/// Returns the name of a device with this number.
pub(crate) fn device_name(number: usize) -> Option<String> {
    explainer()?;
    lock(&CONTEXTS).names.get(number).cloned()
}

/// Returns whether a device has an Ethernet port.
pub(crate) fn is_ethernet(number: usize) -> bool {
    let layer = device_name(number).and_then(|name| port_file(&name, 1, "link_layer"));
    layer.is_some_and(|layer| layer == "Ethernet")
}

/// Called after a command of the program that has succeeded.
#[inline]
pub(crate) fn after_command(fd: RawFd, request: c_ulong, argument: *mut c_void) {
    if request == RDMA_VERBS_IOCTL && is_on() {
        note_command(fd, argument);
    }
}

#[cold]
fn note_command(fd: RawFd, argument: *mut c_void) {
    if internal::is_in_handler() || internal::is_internal() {
        return;
    }
    let _scope = internal::enter();
    let Some(explainer) = current() else { return };
    let Some(request) = Request::read(argument) else {
        return;
    };
    let (device, changes) = {
        let contexts = &mut *lock(&CONTEXTS);
        if (request.object, request.method) == (OBJECT_DEVICE, METHOD_GET_CONTEXT) {
            // The descriptor may have been another one's before.
            contexts.open.remove(&fd);
        }
        let context = contexts.context(fd);
        (context.device, context.changes(&request))
    };
    explainer.changed((fd, device), Some(fd), &changes);
    hooks::hook_builders(explainer, (fd, device), &changes);
    promises::after_command(fd);
    for change in changes {
        if let ObjectChange::CompletionQueueCreated { user_handle, .. } = change {
            hooks::queue_created(user_handle);
            hooks::hook_created(fd, true);
        }
    }
}

/// Called before the program closes a descriptor.
#[inline]
pub(crate) fn closing(fd: RawFd) {
    if is_on() {
        note_closing(fd);
    }
}

#[cold]
fn note_closing(fd: RawFd) {
    if internal::is_in_handler() || internal::is_internal() {
        return;
    }
    let Some(explainer) = explainer() else { return };
    let _scope = internal::enter();
    let closed = lock(&CONTEXTS).open.remove(&fd);
    if let Some(context) = closed {
        explainer.context_closed(context.device, fd);
    }
}

impl Context {
    /// Returns what a command has changed.
    fn changes(&mut self, request: &Request) -> Vec<ObjectChange> {
        let changes = match (request.object, request.method) {
            (OBJECT_DEVICE, METHOD_INVOKE_WRITE) => self.write_changes(request),
            (OBJECT_CQ, METHOD_CQ_CREATE) => self.completion_queue_created(request),
            (OBJECT_QP, METHOD_QP_CREATE) => self.queue_pair_created(request),
            (OBJECT_SRQ, METHOD_SRQ_CREATE) => self.shared_queue_created(request),
            (OBJECT_MR, METHOD_REG_MR) => self.region_registered(request),
            (OBJECT_MR, METHOD_REG_DMABUF_MR) => request
                .handle(ATTR_REG_DMABUF_MR_HANDLE)
                .zip(request.output(ATTR_REG_DMABUF_MR_RESP_LKEY))
                .map(|(handle, key)| vec![self.add_region(handle, key)]),
            (OBJECT_MR, METHOD_DM_MR_REG) => request
                .handle(ATTR_REG_DM_MR_HANDLE)
                .zip(request.output(ATTR_REG_DM_MR_RESP_LKEY))
                .map(|(handle, key)| vec![self.add_region(handle, key)]),
            (OBJECT_CQ, METHOD_CQ_DESTROY)
            | (OBJECT_QP, METHOD_QP_DESTROY)
            | (OBJECT_SRQ, METHOD_SRQ_DESTROY)
            | (OBJECT_MR, METHOD_MR_DESTROY)
            | (OBJECT_MW, METHOD_MW_DESTROY)
            | (OBJECT_PD, METHOD_PD_DESTROY) => self.destroyed(request),
            _ => None,
        };
        changes.unwrap_or_default()
    }

    /// As above, of a write command.
    fn write_changes(&mut self, request: &Request) -> Option<Vec<ObjectChange>> {
        fn given<T: FromBytes>(request: &Request) -> Option<T> {
            request.input(ATTR_CORE_IN)
        }
        fn answer<T: FromBytes>(request: &Request) -> Option<T> {
            request.output(ATTR_CORE_OUT)
        }
        match request.input::<u64>(ATTR_WRITE_CMD)? as u32 {
            CMD_ALLOC_PD => {
                let AllocPdResp { pd_handle, .. } = answer(request)?;
                Some(vec![self.add(
                    pd_handle,
                    Object::Other,
                    ("protection domain", 0),
                )])
            }
            CMD_REG_MR => {
                let (given, answer): (RegMr, RegMrResp) = (given(request)?, answer(request)?);
                let created = self.add_region(answer.mr_handle, answer.lkey);
                let registered = ObjectChange::RegionRegistered {
                    key: answer.lkey,
                    iova: given.hca_va,
                    address: given.start,
                    length: given.length,
                    access: AccessFlags::from_bits_retain(given.access_flags),
                };
                Some(vec![created, registered])
            }
            CMD_ALLOC_MW => {
                let answer: AllocMwResp = answer(request)?;
                let what = ("memory window", answer.rkey);
                Some(vec![self.add(answer.mw_handle, Object::Other, what)])
            }
            CMD_MODIFY_QP => self.queue_pair_modified(&given(request)?),
            EX_MODIFY_QP => self.queue_pair_modified(&given::<ExModifyQp>(request)?.base),
            CMD_MODIFY_SRQ => {
                let given: ModifySrq = given(request)?;
                (given.attr_mask & LIMIT != 0).then(|| {
                    vec![ObjectChange::ReceiveLimitSet {
                        handle: given.srq_handle,
                    }]
                })
            }
            _ => None,
        }
    }

    fn add(
        &mut self,
        handle: u32,
        object: Object,
        (name, number): (&'static str, u32),
    ) -> ObjectChange {
        self.objects.insert(handle, object);
        ObjectChange::Created {
            handle,
            name,
            number,
        }
    }

    fn add_region(&mut self, handle: u32, key: u32) -> ObjectChange {
        self.add(handle, Object::Region { key }, ("memory region", key))
    }

    fn region_registered(&mut self, request: &Request) -> Option<Vec<ObjectChange>> {
        let key = request.output(ATTR_REG_MR_RESP_LKEY)?;
        let created = self.add_region(request.handle(0)?, key);
        let access: u32 = request.input(ATTR_REG_MR_ACCESS_FLAGS).unwrap_or_default();
        let address = request.input(ATTR_REG_MR_ADDR).unwrap_or_default();
        let registered = ObjectChange::RegionRegistered {
            key,
            iova: request.input(ATTR_REG_MR_IOVA).unwrap_or(address),
            address,
            length: request.input(ATTR_REG_MR_LENGTH).unwrap_or_default(),
            access: AccessFlags::from_bits_retain(access),
        };
        Some(vec![created, registered])
    }

    fn completion_queue_created(&mut self, request: &Request) -> Option<Vec<ObjectChange>> {
        let user_handle = request.input(ATTR_CREATE_CQ_USER_HANDLE)?;
        let flags: u32 = request.input(ATTR_CREATE_CQ_FLAGS).unwrap_or_default();
        let flags = CqFlags::from_bits_retain(flags);
        let created = self.add(
            request.handle(ATTR_CREATE_CQ_HANDLE)?,
            Object::CompletionQueue { user_handle },
            ("completion queue", 0),
        );
        let queue = ObjectChange::CompletionQueueCreated {
            number: 0,
            user_handle,
            ignores_overrun: flags.contains(CqFlags::IGNORE_OVERRUN),
        };
        Some(vec![created, queue])
    }

    fn queue_pair_created(&mut self, request: &Request) -> Option<Vec<ObjectChange>> {
        let number = request.output(ATTR_CREATE_QP_RESP_QP_NUM)?;
        let user_handle = request.input(ATTR_CREATE_QP_USER_HANDLE)?;
        let flags: u32 = request.input(ATTR_CREATE_QP_FLAGS).unwrap_or_default();
        let kind: u64 = request.input(ATTR_CREATE_QP_TYPE).unwrap_or_default();
        let requested: Option<[u32; 5]> = request.input(ATTR_CREATE_QP_CAP);
        let given: Option<[u32; 5]> = request.output(ATTR_CREATE_QP_RESP_CAP);
        let [sends, receives, _, _, _] = given.or(requested).unwrap_or_default();
        let [.., max_inline] = requested.unwrap_or_default();
        let shared_queue = request.handle(ATTR_CREATE_QP_SRQ_HANDLE);
        let receive_queue = self.receive_queue(request, shared_queue);
        let queue_pair = QueuePair {
            number,
            user_handle,
            port: 1,
            state: QpState::RESET,
            attributes: QueuePairAttributes::default(),
        };
        let created = self.add(
            request.handle(ATTR_CREATE_QP_HANDLE)?,
            Object::QueuePair(queue_pair),
            ("queue pair", number),
        );
        let queue_pair = ObjectChange::QueuePairCreated {
            number,
            kind: QpType(kind as u32),
            user_handle,
            entries: [sends, receives],
            send_blocks: sends.saturating_mul(MORE_SENDS),
            signals_all: flags & SIGNALS_ALL != 0,
            max_inline,
            shared_queue,
            receive_queue,
        };
        Some(vec![created, queue_pair])
    }

    /// Returns the user handle of the completion queue that a queue pair's receives complete into,
    /// if it is the one that the queue pair names.
    fn receive_queue(&self, request: &Request, shared_queue: Option<u32>) -> Option<u64> {
        let shared = shared_queue.map(|handle| self.objects.get(&handle));
        match shared {
            None
            | Some(Some(Object::SharedQueue {
                has_completions: false,
                ..
            })) => {}
            Some(_) => return None,
        }
        match self
            .objects
            .get(&request.handle(ATTR_CREATE_QP_RECV_CQ_HANDLE)?)?
        {
            Object::CompletionQueue { user_handle } => Some(*user_handle),
            _ => None,
        }
    }

    fn shared_queue_created(&mut self, request: &Request) -> Option<Vec<ObjectChange>> {
        let user_handle = request.input(ATTR_CREATE_SRQ_USER_HANDLE)?;
        let handle = request.handle(ATTR_CREATE_SRQ_HANDLE)?;
        let queue = Object::SharedQueue {
            user_handle,
            has_completions: request.handle(ATTR_CREATE_SRQ_CQ_HANDLE).is_some(),
        };
        Some(vec![self.add(handle, queue, ("shared receive queue", 0))])
    }

    fn queue_pair_modified(&mut self, given: &ModifyQp) -> Option<Vec<ObjectChange>> {
        let Self { objects, name, .. } = self;
        let Some(Object::QueuePair(queue_pair)) = objects.get_mut(&given.qp_handle) else {
            return None;
        };
        let mask = QpAttrMask::from_bits_retain(given.attr_mask);
        let QueuePair {
            port,
            state,
            attributes,
            ..
        } = queue_pair;
        let set = |of: QpAttrMask, to: &mut u8, value: u8| {
            if mask.contains(of) {
                *to = value;
            }
        };
        set(QpAttrMask::STATE, &mut state.0, given.qp_state);
        set(QpAttrMask::PORT, port, given.port_num);
        set(QpAttrMask::TIMEOUT, &mut attributes.timeout, given.timeout);
        set(
            QpAttrMask::RETRY_CNT,
            &mut attributes.retry_count,
            given.retry_cnt,
        );
        set(
            QpAttrMask::RNR_RETRY,
            &mut attributes.rnr_retry,
            given.rnr_retry,
        );
        set(
            QpAttrMask::MAX_DEST_RD_ATOMIC,
            &mut attributes.max_dest_rd_atomic,
            given.max_dest_rd_atomic,
        );
        if mask.contains(QpAttrMask::ACCESS_FLAGS) {
            attributes.access = AccessFlags::from_bits_retain(given.qp_access_flags);
        }
        if mask.contains(QpAttrMask::AV) {
            let path = &given.dest;
            attributes.is_global = path.is_global != 0;
            attributes.hop_limit = path.hop_limit;
            let gid = port_file(name, *port, &format!("gids/{}", path.sgid_index));
            let gid: Option<Ipv6Addr> = gid.and_then(|text| text.parse().ok());
            attributes.source = (path.sgid_index, gid.map_or([0; 16], |gid| gid.octets()));
            attributes.destination = match attributes.is_global {
                true => path.dgid,
                false => u128::from(path.dlid).to_be_bytes(),
            };
        }
        Some(vec![ObjectChange::QueuePairModified {
            number: queue_pair.number,
            state: queue_pair.state,
            attributes: queue_pair.attributes,
        }])
    }

    fn destroyed(&mut self, request: &Request) -> Option<Vec<ObjectChange>> {
        let handle = request.handle(0)?;
        let object = self.objects.remove(&handle)?;
        // The counts of events that the program has read.
        let [first, second]: [u32; 2] = request.output(ATTR_DESTROY_CQ_RESP).unwrap_or_default();
        let destroyed = |user_handle, events| ObjectChange::Destroyed {
            handle,
            user_handle,
            events,
        };
        Some(match object {
            Object::CompletionQueue { user_handle } => vec![
                ObjectChange::CompletionQueueDestroyed {
                    user_handle,
                    events: first,
                },
                destroyed(user_handle, second),
            ],
            Object::QueuePair(QueuePair {
                number,
                user_handle,
                ..
            }) => vec![
                ObjectChange::QueuePairDestroyed { number },
                destroyed(user_handle, first),
            ],
            Object::SharedQueue { user_handle, .. } => vec![destroyed(user_handle, first)],
            Object::Region { key } => {
                vec![ObjectChange::RegionDeregistered { key }, destroyed(0, 0)]
            }
            Object::Other => vec![destroyed(0, 0)],
        })
    }
}

const _: () = assert!(ATTR_DESTROY_CQ_RESP == ATTR_DESTROY_QP_RESP);
const _: () = assert!(ATTR_DESTROY_CQ_RESP == ATTR_DESTROY_SRQ_RESP);

#[cfg(test)]
mod tests {
    use uverbs::abi::ioctl::{Attr, IoctlHdr};
    use uverbs::abi::write::QpDest;
    use zerocopy::IntoBytes;

    use super::*;

    /// Returns what a command with these attributes has changed: identifiers, lengths, and data or
    /// addresses of it.
    fn changes(
        context: &mut Context,
        (object_id, method_id): (u16, u16),
        attributes: &[(u16, usize, u64)],
    ) -> Vec<ObjectChange> {
        let header = IoctlHdr {
            object_id,
            method_id,
            num_attrs: attributes.len() as u16,
            ..IoctlHdr::default()
        };
        let mut bytes = header.as_bytes().to_vec();
        for &(attr_id, len, data) in attributes {
            let attribute = Attr {
                attr_id,
                len: len as u16,
                data,
                ..Attr::default()
            };
            bytes.extend_from_slice(attribute.as_bytes());
        }
        let request = Request::read(bytes.as_mut_ptr().cast()).unwrap();
        context.changes(&request)
    }

    fn address<T>(value: &T) -> u64 {
        ptr::from_ref(value).expose_provenance() as u64
    }

    #[test]
    fn completion_queues_are_followed() {
        let mut context = Context::default();
        let create = [
            (ATTR_CREATE_CQ_HANDLE, 0, 5),
            (ATTR_CREATE_CQ_USER_HANDLE, 8, 0x7000),
            (ATTR_CREATE_CQ_FLAGS, 4, 2),
        ];
        let made = changes(&mut context, (OBJECT_CQ, METHOD_CQ_CREATE), &create);
        let created = ObjectChange::Created {
            handle: 5,
            name: "completion queue",
            number: 0,
        };
        let queue = ObjectChange::CompletionQueueCreated {
            number: 0,
            user_handle: 0x7000,
            ignores_overrun: true,
        };
        assert_eq!(made, [created, queue]);
        let events = [3_u32, 1];
        let destroy = [
            (ATTR_DESTROY_CQ_HANDLE, 0, 5),
            (ATTR_DESTROY_CQ_RESP, 8, address(&events)),
        ];
        let mut destroy = || changes(&mut context, (OBJECT_CQ, METHOD_CQ_DESTROY), &destroy);
        let queue = ObjectChange::CompletionQueueDestroyed {
            user_handle: 0x7000,
            events: 3,
        };
        let object = ObjectChange::Destroyed {
            handle: 5,
            user_handle: 0x7000,
            events: 1,
        };
        assert_eq!(destroy(), [queue, object]);
        assert_eq!(destroy(), []);
    }

    #[test]
    fn attributes_of_a_queue_pair_are_kept() {
        let mut context = Context::default();
        let (number, capacity) = (0x11_u32, [8_u32, 4, 1, 1, 64]);
        let create = [
            (ATTR_CREATE_QP_HANDLE, 0, 7),
            (ATTR_CREATE_QP_USER_HANDLE, 8, 0x8000),
            (ATTR_CREATE_QP_TYPE, 0, QpType::RC.0.into()),
            (ATTR_CREATE_QP_CAP, 20, address(&capacity)),
            (ATTR_CREATE_QP_FLAGS, 4, SIGNALS_ALL.into()),
            (ATTR_CREATE_QP_RESP_QP_NUM, 4, address(&number)),
        ];
        let made = changes(&mut context, (OBJECT_QP, METHOD_QP_CREATE), &create);
        let queue_pair = ObjectChange::QueuePairCreated {
            number: 0x11,
            kind: QpType::RC,
            user_handle: 0x8000,
            entries: [8, 4],
            send_blocks: 8 * MORE_SENDS,
            signals_all: true,
            max_inline: 64,
            shared_queue: None,
            receive_queue: None,
        };
        assert_eq!(made[1], queue_pair);
        let mut modify = |given: &ModifyQp| {
            let write = [
                (ATTR_WRITE_CMD, 8, CMD_MODIFY_QP.into()),
                (ATTR_CORE_IN, size_of::<ModifyQp>(), address(given)),
            ];
            let made = changes(&mut context, (OBJECT_DEVICE, METHOD_INVOKE_WRITE), &write);
            match made[..] {
                [
                    ObjectChange::QueuePairModified {
                        number: 0x11,
                        state,
                        attributes,
                    },
                ] => (state, attributes),
                _ => panic!("{made:?}"),
            }
        };
        let path = QpDest {
            is_global: 1,
            dgid: [9; 16],
            hop_limit: 3,
            ..QpDest::default()
        };
        let (state, _) = modify(&ModifyQp {
            qp_handle: 7,
            attr_mask: (QpAttrMask::STATE | QpAttrMask::AV).bits(),
            qp_state: QpState::RTR.0,
            dest: path,
            timeout: 12,
            ..ModifyQp::default()
        });
        assert_eq!(state, QpState::RTR);
        let (state, attributes) = modify(&ModifyQp {
            qp_handle: 7,
            attr_mask: QpAttrMask::TIMEOUT.bits(),
            timeout: 14,
            ..ModifyQp::default()
        });
        assert_eq!((state, attributes.timeout), (QpState::RTR, 14));
        assert!(attributes.is_global && attributes.hop_limit == 3);
        assert_eq!(attributes.destination, [9; 16]);
    }
}
