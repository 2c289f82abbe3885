//! Firmware commands, for contexts that were opened with DevX
//! ([`crate::ioctl::devx`]): capabilities that the driver does not report, attributes
//! of queue pairs, indirect memory keys and their protection, scheduling elements, reserved
//! numbers.

mod protection;

pub use protection::{
    EncryptionKey, EncryptionKeyInit, EncryptionLimits, EncryptionSupport, Login, Psv,
    SignatureSupport, stop_at_wrong_signatures, stopped_at,
};

mod lag;

use uverbs::{Context, ContextRef, QpHandle};

pub use lag::{LagQueue, lag_port, set_lag_port};

use crate::ioctl::devx::{self, DevxObject};
use crate::{Address, CreateError, CryptoEngine};

/// Opcodes of commands.
mod opcode {
    pub const QUERY_HCA_CAP: u32 = 0x100;
    pub const CREATE_MKEY: u32 = 0x200;
    pub const RTS2RTS_QP: u32 = 0x505;
    pub const QUERY_QP: u32 = 0x50b;
    pub const INIT2INIT_QP: u32 = 0x50e;
    pub const CREATE_PSV: u32 = 0x600;
    pub const QUERY_LAG: u32 = 0x842;
    pub const MODIFY_TIS: u32 = 0x913;
    pub const QUERY_TIS: u32 = 0x915;
    pub const CREATE_GENERAL_OBJECT: u32 = 0xa00;
    pub const MODIFY_GENERAL_OBJECT: u32 = 0xa01;
    pub const QUERY_GENERAL_OBJECT: u32 = 0xa02;
}

/// Types of general objects.
mod object_type {
    pub const DEK: u32 = 0xc;
    pub const CRYPTO_LOGIN: u32 = 0x1f;
    pub const SCHEDULING_ELEMENT: u32 = 0x26;
    pub const RESERVED_QPN: u32 = 0x2c;
    pub const AV_QP_MAPPING: u32 = 0x3a;
}

/// Bytes of an answer that has only an identifier.
const ANSWER: usize = 16;

/// A command's input, big-endian words.
struct Input<const N: usize>([u8; N]);

impl<const N: usize> Input<N> {
    /// A command with an opcode.
    fn new(opcode: u32) -> Self {
        let mut input = Self([0; N]);
        input.set(0, opcode << 16);
        input
    }

    /// A command on a general object.
    fn general(opcode: u32, kind: u32) -> Self {
        let mut input = Self::new(opcode);
        input.set(4, kind);
        input
    }

    /// Sets bits of the word at an offset.
    fn set(&mut self, at: usize, value: u32) {
        let old = word(&self.0, at);
        self.0[at..at + 4].copy_from_slice(&(old | value).to_be_bytes());
    }

    fn set_u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }
}

/// A word of an answer; 0 beyond its end.
fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    u32::from_be_bytes(word.unwrap_or_default())
}

/// The device's status and syndrome if it refused the command; otherwise the kernel's error.
fn refusal(command: &'static str, error: uverbs::Error, answer: &[u8]) -> CreateError {
    let status = answer.first().copied().unwrap_or_default();
    match error.errno().raw() {
        libc::EREMOTEIO if status != 0 => CreateError::Device {
            command,
            status,
            syndrome: word(answer, 4),
        },
        _ => CreateError::Command(error),
    }
}

/// The value of [`Capabilities::out_of_order`], by service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutOfOrderSupport {
    /// Unreliable datagrams.
    pub ud: bool,
    /// Unreliable connections.
    pub uc: bool,
    /// Extended reliable connections.
    pub xrc: bool,
    /// Dynamic connections.
    pub dc: bool,
    /// Reliable connections.
    pub rc: bool,
}

/// Capabilities of the device that the driver does not report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Maximum outstanding reads and atomics of a DC initiator, and of a target.
    pub dc_reads: [u64; 2],
    /// Maximum bytes that a work request may copy in local memory; 0: not supported. Queue
    /// pairs must be enabled for it if `memcpy_by_qp`.
    pub longest_memcpy: u64,
    /// See `longest_memcpy`.
    pub memcpy_by_qp: bool,
    /// The UDP source port of a connected queue pair can be changed.
    pub udp_source_port: bool,
    /// Queue pairs have the extended context: streams can be reset, groups set.
    pub extended_context: bool,
    /// Types of general objects, as bits.
    pub general_objects: u64,
    /// Ports of the LAG; 0: none.
    pub lag_ports: u8,
    /// Queue pairs have a LAG port, even if `lag_ports` is 0.
    pub lag_affinity: bool,
    /// The port of a queue pair that is ready to send can be changed.
    pub lag_change: bool,
    /// Binary logarithm of the numbers of a [`ReservedNumbers`].
    pub log_reserved_numbers: u8,
    /// The device reports whether it writes the data of a queue pair in order.
    pub data_in_order: bool,
    /// Services whose receives may be consumed in any order
    /// ([`crate::Features::out_of_order`]).
    pub out_of_order: OutOfOrderSupport,
    /// Signatures of memory keys.
    pub signatures: SignatureSupport,
    /// Encryption of memory keys.
    pub encryption: EncryptionSupport,
    /// Quality of service is supported.
    qos: bool,
}

/// Kinds of capabilities.
mod group {
    pub const GENERAL: u32 = 0x0;
    pub const PAGING: u32 = 0x2;
    pub const QOS: u32 = 0xc;
    pub const CRYPTO: u32 = 0x1a;
    pub const GENERAL_2: u32 = 0x20;
}

/// Queries a group of capabilities. A context without DevX has none.
fn query<T: Default>(
    context: &Context,
    group: u32,
    read: impl FnOnce(&dyn Fn(usize) -> u32) -> T,
) -> Result<T, CreateError> {
    const HEADER: usize = 16;
    /// The current capabilities, not the maximum.
    const CURRENT: u32 = 1;
    let mut input = Input::<16>::new(opcode::QUERY_HCA_CAP);
    input.set(4, group << 1 | CURRENT);
    let mut answer = [0; HEADER + 4096];
    // SAFETY: a query changes nothing.
    let result = unsafe { devx::general(context, &input.0[..], &mut answer) };
    match result.map_err(|error| refusal("QUERY_HCA_CAP", error, &answer)) {
        // EPROTONOSUPPORT: the device has no DevX. EINVAL: this context has none.
        Err(CreateError::Command(error))
            if [libc::EPROTONOSUPPORT, libc::EINVAL].contains(&error.errno().raw()) =>
        {
            return Ok(T::default());
        }
        result => result?,
    }
    Ok(read(&|at| word(&answer, HEADER + at)))
}

impl Capabilities {
    /// Queries the capabilities.
    ///
    /// # Errors
    /// The kernel's and the device's.
    pub fn query(context: &Context) -> Result<Self, CreateError> {
        const HAS_GROUP_2: u32 = 1 << 31;
        let (mut all, has_group_2) = query(context, group::GENERAL, |word| {
            let bit = |at, bit: u32| word(at) & 1 << bit != 0;
            let memcpy_by_qp = bit(0xe8, 23);
            let longest_memcpy = match (bit(0x28, 12) || memcpy_by_qp, word(0xc) >> 16 & 0x1f) {
                (false, _) => 0,
                // Limited by the length field of a segment.
                (true, 0) => 1 << 31,
                (true, log) => 1 << log,
            };
            let reads = [word(0x24) >> 16 & 0x3f, word(0x24) & 0x3f];
            let all = Self {
                dc_reads: reads.map(|log| 1 << log),
                longest_memcpy,
                memcpy_by_qp,
                udp_source_port: bit(0x28, 14),
                extended_context: bit(0x24, 29),
                general_objects: u64::from(word(0x80)) << 32 | u64::from(word(0x84)),
                lag_ports: (word(0x4c) & 0xf) as u8,
                lag_affinity: bit(0x4c, 7),
                lag_change: bit(0x28, 13),
                log_reserved_numbers: 0,
                data_in_order: bit(0xc, 29),
                out_of_order: OutOfOrderSupport {
                    ud: bit(0x64, 15),
                    uc: bit(0x64, 14),
                    xrc: bit(0x64, 13),
                    dc: bit(0x64, 12),
                    rc: bit(0x64, 11),
                },
                signatures: SignatureSupport {
                    // Also with the domain and kind of a wrong one.
                    is_supported: bit(0x40, 8) && bit(0x90, 31),
                    block_4048: bit(0x3c, 15),
                    crc32c: bit(0x28, 23),
                    crc64_xp10: bit(0x28, 24),
                },
                encryption: EncryptionSupport {
                    is_supported: bit(0x8c, 22),
                    engine: match (bit(0x7c, 13), bit(0x7c, 14)) {
                        (true, _) => Some(CryptoEngine::MultiBlock),
                        (false, true) => Some(CryptoEngine::SingleBlock),
                        (false, false) => None,
                    },
                },
                qos: bit(0x40, 4),
            };
            (all, word(0x4) & HAS_GROUP_2 != 0)
        })?;
        if has_group_2 {
            all.log_reserved_numbers = query(context, group::GENERAL_2, |word| {
                (word(0x10) >> 8 & 0x1f) as u8
            })?;
        }
        Ok(all)
    }

    fn has_object(&self, kind: u32) -> bool {
        self.general_objects & 1 << kind != 0
    }
}

/// Queries which operations of DC may take page faults: the bits of
/// `enum ibv_odp_transport_cap_bits`.
///
/// # Errors
/// As [`Capabilities::query`].
pub fn dc_paging(context: &Context) -> Result<u32, CreateError> {
    // Send, receive, write, read, atomic, shared receive, from the top.
    query(context, group::PAGING, |word| {
        let bits = word(0x20);
        (0..6).map(|i| (bits >> (31 - i) & 1) << i).sum()
    })
}

/// Offsets of the fields of a command on a queue pair.
mod qp {
    pub const BYTES: usize = 464;
    pub const NUMBER: usize = 0x8;
    /// In the word of the number: the extended context follows.
    pub const EXTENDED: u32 = 1 << 31;
    pub const MASK: usize = 0x108;
    pub const UDP_SOURCE_PORT: usize = 0x50;
    pub const EXTENSION: usize = 0x110;
    pub const REQUESTER_GROUP: usize = EXTENSION + 4;
    pub const RESPONDER_GROUP: usize = EXTENSION + 8;
}

/// Bits of the mask of a command on a queue pair.
mod qp_mask {
    pub const STREAM: u64 = 1 << 0;
    pub const GROUP: u64 = 1 << 1;
    pub const UDP_SOURCE_PORT: u64 = 1 << 2;
    pub const MEMCPY: u64 = 1 << 3;
}

fn on_qp(command: u32, number: u32, extended: bool, mask: u64) -> Input<{ qp::BYTES }> {
    let mut input = Input::new(command);
    let flag = if extended { qp::EXTENDED } else { 0 };
    input.set(qp::NUMBER, flag | number & 0xff_ffff);
    input.set_u64(qp::MASK, mask);
    input
}

fn modify<const N: usize>(
    context: &Context,
    handle: QpHandle,
    name: &'static str,
    input: &Input<N>,
) -> Result<(), CreateError> {
    let mut answer = [0; ANSWER];
    // SAFETY: the commands of this module set no memory.
    let result = unsafe { devx::modify(context, handle.0, &input.0[..], &mut answer) };
    result.map_err(|error| refusal(name, error, &answer))
}

/// Queries an object by its handle.
fn query_object<const N: usize>(
    context: &Context,
    handle: u32,
    name: &'static str,
    input: &Input<N>,
    answer: &mut [u8],
) -> Result<(), CreateError> {
    // SAFETY: a query changes nothing.
    let result = unsafe { devx::query(context, handle, &input.0[..], answer) };
    result.map_err(|error| refusal(name, error, answer))
}

/// Queries a queue pair; the answer has its context at byte 0x18.
fn query_qp(
    context: &Context,
    handle: QpHandle,
    number: u32,
) -> Result<[u8; qp::BYTES], CreateError> {
    let mut input = Input::<16>::new(opcode::QUERY_QP);
    input.set(qp::NUMBER, number & 0xff_ffff);
    let mut answer = [0; qp::BYTES];
    query_object(context, handle.0, "QUERY_QP", &input, &mut answer)?;
    Ok(answer)
}

/// Queries whether the device writes the data of a queue pair's messages in the order of
/// addresses.
///
/// # Errors
/// The device's.
pub fn data_in_order(
    context: &Context,
    handle: QpHandle,
    number: u32,
) -> Result<bool, CreateError> {
    const CONTEXT: usize = 0x18;
    const IN_ORDER: u32 = 1 << 5;
    let answer = query_qp(context, handle, number)?;
    Ok(word(&answer, CONTEXT + 8) & IN_ORDER != 0)
}

/// Changes the UDP source port of a queue pair that is ready to send.
///
/// # Errors
/// The device's.
pub fn set_udp_source_port(
    context: &Context,
    handle: QpHandle,
    number: u32,
    port: u16,
) -> Result<(), CreateError> {
    let mut input = on_qp(opcode::RTS2RTS_QP, number, false, qp_mask::UDP_SOURCE_PORT);
    input.set(qp::UDP_SOURCE_PORT, port.into());
    modify(context, handle, "RTS2RTS_QP", &input)
}

/// Resets a failed stream of a DC initiator, so that it can send again.
///
/// # Errors
/// The device's.
pub fn reset_stream(
    context: &Context,
    handle: QpHandle,
    number: u32,
    stream: u16,
) -> Result<(), CreateError> {
    let mut input = on_qp(opcode::RTS2RTS_QP, number, true, qp_mask::STREAM);
    input.set(qp::EXTENSION, stream.into());
    modify(context, handle, "RTS2RTS_QP", &input)
}

/// Enables copies in local memory for a queue pair in the state INIT.
///
/// # Errors
/// The device's.
pub fn enable_memcpy(context: &Context, handle: QpHandle, number: u32) -> Result<(), CreateError> {
    const ENABLED: u32 = 1 << 29;
    let mut input = on_qp(opcode::INIT2INIT_QP, number, true, qp_mask::MEMCPY);
    input.set(qp::EXTENSION, ENABLED);
    modify(context, handle, "INIT2INIT_QP", &input)
}

/// Sets the scheduling elements of a queue pair's requests and responses, by number;
/// 0 is none. The queue pair is in the state INIT, or ready to send.
///
/// # Errors
/// The device's.
pub fn set_groups(
    context: &Context,
    handle: QpHandle,
    number: u32,
    is_init: bool,
    [requester, responder]: [u32; 2],
) -> Result<(), CreateError> {
    let (command, name) = match is_init {
        true => (opcode::INIT2INIT_QP, "INIT2INIT_QP"),
        false => (opcode::RTS2RTS_QP, "RTS2RTS_QP"),
    };
    let mut input = on_qp(command, number, true, qp_mask::GROUP);
    input.set(qp::REQUESTER_GROUP, requester);
    input.set(qp::RESPONDER_GROUP, responder);
    modify(context, handle, name, &input)
}

/// Creates an object; returns it and its number in the device.
fn create<C: ContextRef, const N: usize>(
    context: &C,
    name: &'static str,
    input: &Input<N>,
) -> Result<(DevxObject<C>, u32), CreateError> {
    let mut answer = [0; ANSWER];
    let made = create_with(context, name, input, &mut answer)?;
    Ok((made, word(&answer, 8)))
}

/// As [`create`], with the whole answer.
fn create_with<C: ContextRef, const N: usize>(
    context: &C,
    name: &'static str,
    input: &Input<N>,
    answer: &mut [u8],
) -> Result<DevxObject<C>, CreateError> {
    // SAFETY: the objects that this module creates have no memory.
    let made = unsafe { DevxObject::create(context, &input.0[..], answer) };
    made.map_err(|error| refusal(name, error, answer))
}

/// Maps an address to a queue pair in the device. The mapping exists as long as the returned
/// object.
///
/// # Errors
/// [`CreateError::Unsupported`]; the device's.
pub fn map_address<C: ContextRef>(
    context: &C,
    address: &Address,
    number: u32,
) -> Result<DevxObject<C>, CreateError> {
    const MAPPING: usize = 16;
    if !Capabilities::query(context)?.has_object(object_type::AV_QP_MAPPING) {
        return Err(CreateError::Unsupported {
            what: "the mapping of an address to a queue pair",
        });
    }
    let vector = &address.0;
    let source = u32::from_be(vector.grh_gid_fl) >> 20 & 0xff;
    let mut input = Input::<80>::general(opcode::CREATE_GENERAL_OBJECT, object_type::AV_QP_MAPPING);
    input.set(MAPPING + 0xc, number);
    input.set(MAPPING + 0x1c, u32::from(vector.stat_rate_sl & 0xf) << 24);
    input.set(MAPPING + 0x2c, source << 20);
    input.0[MAPPING + 0x30..].copy_from_slice(&vector.rgid);
    Ok(create(context, "CREATE_GENERAL_OBJECT", &input)?.0)
}

/// Options of a new [`IndirectKey`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyOptions {
    /// A peer may invalidate the key.
    pub remote_invalidate: bool,
    /// The key may have signatures.
    pub signatures: bool,
    /// Its data may be encrypted.
    pub encryption: bool,
}

/// A memory key whose layout is configured by work requests
/// ([`SendQueue::push_layout`](crate::SendQueue::push_layout)).
#[derive(Debug)]
pub struct IndirectKey<C: ContextRef> {
    /// The kernel's object.
    pub object: DevxObject<C>,
    /// The key, lkey and rkey.
    pub key: u32,
    /// Elements that its layout may have.
    pub entries: u16,
}

impl<C: ContextRef> IndirectKey<C> {
    /// Creates a key without a layout, for `entries` elements, in the protection domain
    /// of that number.
    ///
    /// # Errors
    /// [`CreateError::TooLarge`]; the device's.
    pub fn create(
        context: &C,
        pdn: u32,
        entries: u16,
        options: KeyOptions,
    ) -> Result<Self, CreateError> {
        const CONTEXT: usize = 0x10;
        const FREE: u32 = 1 << 30;
        const CHANGED_BY_WORK_REQUESTS: u32 = 1 << 15;
        const LOCAL_READ: u32 = 1 << 10;
        const LISTS: u32 = 2 << 8;
        const ANY_QP: u32 = 0xff_ffff << 8;
        const REMOTE_INVALIDATE: u32 = 1 << 24;
        const BYTE_STREAM_FORMATS: u32 = 1 << 30;
        const FORMAT_OCTOWORDS: u32 = 4;
        const ENCRYPTED: u32 = 1 << 27;
        let entries = entries
            .checked_next_multiple_of(4)
            .ok_or(CreateError::TooLarge {
                what: "entries of a memory key",
            })?;
        let mut input = Input::<272>::new(opcode::CREATE_MKEY);
        input.set(
            CONTEXT,
            FREE | CHANGED_BY_WORK_REQUESTS | LOCAL_READ | LISTS,
        );
        input.set(CONTEXT + 4, ANY_QP);
        let mut flags = 0;
        if options.remote_invalidate {
            flags |= REMOTE_INVALIDATE;
        }
        if options.signatures || options.encryption {
            flags |= BYTE_STREAM_FORMATS;
        }
        input.set(CONTEXT + 0xc, flags | pdn & 0xff_ffff);
        let formats = u32::from(options.signatures) + u32::from(options.encryption);
        input.set(CONTEXT + 0x20, formats * FORMAT_OCTOWORDS);
        input.set(CONTEXT + 0x34, entries.into());
        input.set(
            CONTEXT + 0x3c,
            if options.encryption { ENCRYPTED } else { 0 },
        );
        let (object, index) = create(context, "CREATE_MKEY", &input)?;
        Ok(Self {
            object,
            key: index << 8,
            entries,
        })
    }
}

/// Reserved QP numbers, which no queue pair of the device gets, for the connection manager.
#[derive(Debug)]
pub struct ReservedNumbers<C: ContextRef> {
    /// The kernel's object.
    pub object: DevxObject<C>,
    /// The first number.
    pub first: u32,
    /// The count of numbers.
    pub count: u32,
}

impl<C: ContextRef> ReservedNumbers<C> {
    /// Reserves a block of numbers, of the size that the device has.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`]; the device's.
    pub fn create(context: &C) -> Result<Self, CreateError> {
        let caps = Capabilities::query(context)?;
        if !caps.has_object(object_type::RESERVED_QPN) {
            return Err(CreateError::Unsupported {
                what: "reserved numbers of queue pairs",
            });
        }
        let log = u32::from(caps.log_reserved_numbers);
        let mut input =
            Input::<32>::general(opcode::CREATE_GENERAL_OBJECT, object_type::RESERVED_QPN);
        input.set(0xc, log << 24);
        let (object, first) = create(context, "CREATE_GENERAL_OBJECT", &input)?;
        Ok(Self {
            object,
            first,
            count: 1 << log,
        })
    }
}

/// Attributes of a scheduling element.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scheduling {
    /// The number of the parent element; 0: the root.
    pub parent: u32,
    /// A leaf: it has queues, not elements.
    pub is_leaf: bool,
    /// Its bandwidth share among its siblings, if that is set.
    pub share: Option<u32>,
    /// Its maximum average bandwidth, if that is set.
    pub max_bandwidth: Option<u32>,
}

impl Scheduling {
    /// Returns whether the device schedules by such elements.
    ///
    /// # Errors
    /// As [`Capabilities::query`].
    pub fn is_supported(context: &Context) -> Result<bool, CreateError> {
        const TSAR_AND_GROUPS: u32 = 1 << 16 | 1 << 20;
        const WEIGHTED: u32 = 1 << 0;
        if !Capabilities::query(context)?.qos {
            return Ok(false);
        }
        query(context, group::QOS, |word| {
            let both = TSAR_AND_GROUPS | WEIGHTED;
            word(0x20) & both == both
        })
    }

    /// Returns whether queue pairs can be put into groups.
    ///
    /// # Errors
    /// As [`Capabilities::query`].
    pub fn has_groups(context: &Context) -> Result<bool, CreateError> {
        let caps = Capabilities::query(context)?;
        if !caps.qos || !caps.extended_context {
            return Ok(false);
        }
        query(context, group::QOS, |word| word(4) & 1 << 30 != 0)
    }

    fn input(&self, command: u32, number: u32) -> Input<144> {
        const ELEMENT: usize = 16;
        const CONTEXT: usize = ELEMENT + 0x20;
        const OF_PORT: u32 = 3 << 24;
        const GROUP: u32 = 4 << 24;
        const SHARE: u64 = 1 << 0;
        const BANDWIDTH: u64 = 1 << 1;
        let mut input = Input::general(command, object_type::SCHEDULING_ELEMENT);
        let mut mask = 0;
        if let Some(share) = self.share {
            mask |= SHARE;
            input.set(CONTEXT + 0x14, share);
        }
        if let Some(bandwidth) = self.max_bandwidth {
            mask |= BANDWIDTH;
            input.set(CONTEXT + 0x18, bandwidth);
        }
        input.set(8, number);
        input.set_u64(ELEMENT, mask);
        input.set(ELEMENT + 8, OF_PORT);
        input.set(CONTEXT, if self.is_leaf { GROUP } else { 0 });
        input.set(CONTEXT + 8, self.parent);
        input
    }

    /// Creates an element. Returns it and its number.
    ///
    /// # Errors
    /// The device's.
    pub fn create<C: ContextRef>(&self, context: &C) -> Result<(DevxObject<C>, u32), CreateError> {
        let input = self.input(opcode::CREATE_GENERAL_OBJECT, 0);
        create(context, "CREATE_GENERAL_OBJECT", &input)
    }

    /// Changes the attributes of an element that are set.
    ///
    /// # Errors
    /// The device's.
    pub fn modify<C: ContextRef>(
        &self,
        element: &DevxObject<C>,
        number: u32,
    ) -> Result<(), CreateError> {
        let input = self.input(opcode::MODIFY_GENERAL_OBJECT, number);
        let mut answer = [0; ANSWER];
        let handle = element.handle().0;
        // SAFETY: the command sets no memory.
        let result = unsafe { devx::modify(element.context(), handle, &input.0[..], &mut answer) };
        result.map_err(|error| refusal("MODIFY_GENERAL_OBJECT", error, &answer))
    }
}
