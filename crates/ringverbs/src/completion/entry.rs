//! Completions and their status.

use std::fmt;

use uverbs::AhAttr;

#[cfg(feature = "embedded")]
use crate::context::Context;
use crate::data::Payload;
use crate::device::{self, Entry, WorkCompletion};
use crate::inflight::{Posted, Retired};
use crate::memory::Buffer;
use crate::operation::Operation;
use crate::qp::LocalAddress;
use crate::query::Gid;
use crate::route_header::source_gid;

/// The status of a completed operation (`enum ibv_wc_status`).
///
/// Values without a constant are kept as the device reported them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)+) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($number);)+

            fn name(self) -> Option<&'static str> {
                match self { $(Self::$name => Some(stringify!($name)),)+ _ => None }
            }

            fn text(self) -> Option<&'static str> {
                match self { $(Self::$name => Some($text),)+ _ => None }
            }
        }
    };
}

statuses! {
    /// The operation succeeded.
    SUCCESS = 0, "success";
    /// A message was longer than its receive, or a buffer too short.
    LOC_LEN_ERR = 1, "local length error: the message does not fit the buffer";
    /// The queue pair, or its end-to-end context, is inconsistent.
    LOC_QP_OP_ERR = 2, "local queue pair operation error";
    /// Reserved.
    LOC_EEC_OP_ERR = 3, "local EE context operation error";
    /// The memory's registration does not allow the operation.
    LOC_PROT_ERR = 4, "local protection error: a key or address range does not allow the operation";
    /// The operation was not started or was aborted: the queue pair is in the
    /// error state.
    WR_FLUSH_ERR = 5, "flushed: the queue pair is in the error state";
    /// A memory window could not be bound.
    MW_BIND_ERR = 6, "memory window bind error";
    /// The peer's response was invalid.
    BAD_RESP_ERR = 7, "bad response of the peer";
    /// A message of the peer violated the access rights of local memory.
    LOC_ACCESS_ERR = 8, "local access error";
    /// The peer found the request invalid.
    REM_INV_REQ_ERR = 9, "the peer found the request invalid";
    /// The peer does not allow the access.
    REM_ACCESS_ERR = 10, "the peer does not allow this access: wrong key, range or rights";
    /// The operation failed on the peer's side.
    REM_OP_ERR = 11, "the operation failed on the peer's side";
    /// The peer did not respond.
    RETRY_EXC_ERR = 12, "the peer did not answer (transport retries exceeded)";
    /// The peer had no receive posted for too long.
    RNR_RETRY_EXC_ERR = 13, "the peer had no receive posted (RNR retries exceeded)";
    /// Reserved.
    LOC_RDD_VIOL_ERR = 14, "local RDD violation";
    /// Reserved.
    REM_INV_RD_REQ_ERR = 15, "the peer found the RD request invalid";
    /// The peer aborted the operation.
    REM_ABORT_ERR = 16, "aborted by the peer";
    /// Reserved.
    INV_EECN_ERR = 17, "invalid EE context number";
    /// Reserved.
    INV_EEC_STATE_ERR = 18, "invalid EE context state";
    /// The device has failed.
    FATAL_ERR = 19, "fatal error of the device";
    /// There was no response in time.
    RESP_TIMEOUT_ERR = 20, "response timeout";
    /// Another error.
    GENERAL_ERR = 21, "general error";
    /// A tag matching error.
    TM_ERR = 22, "tag matching error";
    /// The device did not complete a rendezvous.
    TM_RNDV_INCOMPLETE = 23, "tag matching: incomplete rendezvous";
}

impl Status {
    /// Returns whether the operation succeeded.
    #[inline]
    pub fn is_success(self) -> bool {
        self == Self::SUCCESS
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "Status({})", self.0),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => f.write_str(text),
            None => write!(f, "unknown completion status {}", self.0),
        }
    }
}

/// `IBV_WC_RECV_RDMA_WITH_IMM`.
const OPCODE_RECV_RDMA_WITH_IMM: u32 = 129;
/// `IBV_WC_GRH`.
pub(super) const FLAG_GRH: u32 = 1;
/// `IBV_WC_IP_CSUM_OK`, of raw packets. (rdma_rxe, which has no raw packets, uses the bit
/// for an invalidated key.)
pub(super) const FLAG_CHECKSUMS: u32 = 4;
/// `IBV_WC_WITH_IMM`.
pub(super) const FLAG_IMMEDIATE: u32 = 2;

/// Returns whether the peer's write with immediate data, which stores its data elsewhere,
/// consumed the receive.
#[inline]
pub(super) fn is_remote_write(opcode: u32) -> bool {
    opcode == OPCODE_RECV_RDMA_WITH_IMM
}

/// Returns the number of bytes of a message of `byte_len` that are in its receive.
#[inline]
pub(super) fn received(opcode: u32, byte_len: u32) -> u32 {
    if is_remote_write(opcode) { 0 } else { byte_len }
}

#[inline]
fn outcome(wc: &WorkCompletion) -> Result<Success, Failure> {
    if wc.status == Status::SUCCESS.0 {
        Ok(Success::new(wc))
    } else {
        Err(Failure {
            status: Status(wc.status),
            vendor_err: wc.vendor_err,
        })
    }
}

/// The fields of a successful completion.
///
/// They are in the order of the device's entry, so that a copy takes few moves.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Success {
    /// Bytes transferred. For a receive, the message's length; for a datagram it includes the
    /// 40 bytes of the route header, for a write with immediate data it is the number of
    /// bytes written. For a send, not set by every device.
    pub byte_len: u32,
    ex: u32,
    /// The sender's queue pair number, of a datagram.
    pub src_qp: u32,
    flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
    port_num: u8,
    /// Unused; included so that the copy is contiguous.
    reserved: u8,
    opcode: u32,
}

impl Success {
    #[inline]
    fn new(wc: &WorkCompletion) -> Self {
        Self {
            byte_len: wc.byte_len,
            ex: wc.ex,
            src_qp: wc.src_qp,
            flags: wc.wc_flags,
            pkey_index: wc.pkey_index,
            slid: wc.slid,
            sl: wc.sl,
            dlid_path_bits: wc.dlid_path_bits,
            port_num: wc.port_num,
            reserved: wc.reserved,
            opcode: wc.opcode,
        }
    }

    /// Returns the sender's LID, of a datagram on InfiniBand; 0 on Ethernet.
    #[inline]
    pub fn slid(&self) -> u16 {
        self.slid
    }

    /// Returns the service level of a datagram.
    #[inline]
    pub fn service_level(&self) -> u8 {
        self.sl
    }

    /// Returns the low bits of the LID that a datagram was sent to (`dlid_path_bits`). Their
    /// number is the port's LMC (`lmc` of
    /// [`Context::query_port`](crate::Context::query_port)).
    #[inline]
    pub fn path_bits(&self) -> u8 {
        self.dlid_path_bits
    }

    /// Returns the immediate data of the message, in host byte order.
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        (self.flags & FLAG_IMMEDIATE != 0).then_some(u32::from_be(self.ex))
    }

    /// Returns the local rkey that the message has invalidated.
    #[inline]
    pub fn invalidated(&self) -> Option<u32> {
        (self.flags & device::FLAG_INVALIDATED != 0).then_some(self.ex)
    }

    /// Returns the index of the partition key of a datagram in the port's table.
    #[inline]
    pub fn pkey_index(&self) -> u16 {
        self.pkey_index
    }

    /// Returns whether the first 40 bytes of a datagram's buffer are its global
    /// route header.
    #[inline]
    pub fn has_grh(&self) -> bool {
        self.flags & FLAG_GRH != 0
    }

    /// Returns whether the peer's write with immediate data, which stores its data
    /// elsewhere, consumed the receive.
    #[inline]
    pub fn is_remote_write(&self) -> bool {
        is_remote_write(self.opcode)
    }
}

impl fmt::Debug for Success {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Success")
            .field("byte_len", &self.byte_len)
            .field("immediate", &self.immediate())
            .field("invalidated", &self.invalidated())
            .field("src_qp", &self.src_qp)
            .finish()
    }
}

/// The reason for a failure. A failed completion has no other fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The status.
    pub status: Status,
    /// The device's vendor error code.
    pub vendor_err: u32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        if self.vendor_err != 0 {
            write!(f, " (vendor error {:#x})", self.vendor_err)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// A completed operation, with the memory that it owned.
#[derive(Debug)]
pub struct Completion {
    /// The token that it was posted with.
    pub token: u64,
    /// The number of the queue pair that it was posted to, or that consumed a
    /// shared receive.
    pub qp_num: u32,
    /// The type of the operation.
    pub operation: Operation,
    /// The result.
    pub result: Result<Success, Failure>,
    /// The memory of the operation, returned to the caller.
    pub payload: Payload,
}

impl Default for Completion {
    /// A placeholder to poll into.
    fn default() -> Self {
        Self {
            token: 0,
            qp_num: 0,
            operation: Operation::Send,
            result: Err(Failure {
                status: Status::GENERAL_ERR,
                vendor_err: 0,
            }),
            payload: Payload::None,
        }
    }
}

impl Completion {
    /// Returns why the operation failed, with both sides of what was compared
    /// ([`Context::explanation`]); `None` if it has succeeded, and on devices that are not
    /// embedded, which do not tell.
    ///
    /// `context` is that of the queue pair. Nothing is computed before this is called; it takes
    /// the device's lock.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use ringverbs::{Device, Transport};
    ///
    /// let context = Device::embedded()?.open()?;
    /// let domain = context.alloc_pd()?;
    /// let mut queue = context.completion_queue().entries(16).build()?;
    /// let mut qp = domain.queue_pair(Transport::Reliable, &queue).build()?;
    /// let address = context.local_address(1)?;
    /// let endpoint = qp.endpoint(&address);
    /// qp.connect(&address, &endpoint)?;
    /// // The queue pair, which is connected to itself, receives less than it sends.
    /// qp.receive(domain.alloc(4096)?.into_buffer(), 1)?;
    /// qp.send(domain.alloc(8192)?.into_buffer(), 2)?;
    /// let completion = queue.poll_until_one()?;
    /// assert!(completion.result.is_err());
    /// println!("{}", completion.explanation(&context).unwrap_or_default());
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "embedded")]
    pub fn explanation(&self, context: &Context) -> Option<String> {
        self.result.as_ref().err()?;
        context.explanation(self.qp_num)
    }

    /// Builds a completion from the device's entry and the operation in flight.
    #[inline]
    pub(crate) fn new(entry: Entry<'_>, retired: Retired<'_>) -> Self {
        let mut this = Self::default();
        this.replace(entry, retired);
        this
    }

    /// Replaces `self` with the completion built from the device's entry and the operation in
    /// flight.
    #[inline]
    pub(super) fn replace(&mut self, entry: Entry<'_>, retired: Retired<'_>) {
        // The previous payload is dropped first, so that everything can be moved
        // directly from the operation in flight to its destination.
        if !matches!(self.payload, Payload::None) {
            self.payload = Payload::None;
        }
        // SAFETY: the parts of the operation that need dropping are moved out
        // exactly once: the payload into `self`, which is overwritten and has no
        // payload to drop itself, and the attachment.
        unsafe {
            retired.in_place(|posted: *const Posted| {
                // Read this late, the fields need no intermediate storage.
                let wc = entry.read();
                let operation = (*posted).operation;
                let completion = Self {
                    token: (*posted).token,
                    qp_num: wc.qp_num,
                    operation,
                    result: outcome(&wc),
                    payload: (&raw const (*posted).payload).read(),
                };
                std::ptr::write(self, completion);
                if operation != Operation::Receive {
                    // A sender's own completion has the flag of immediate data,
                    // but not the data.
                    if let Ok(success) = &mut self.result {
                        success.flags = 0;
                    }
                } else if wc.status == Status::SUCCESS.0 {
                    self.payload.received(received(wc.opcode, wc.byte_len));
                }
                (&raw const (*posted).attachment)
                    .read()
                    .release(wc.status == Status::SUCCESS.0);
            });
        }
    }

    /// Returns the status.
    #[inline]
    pub fn status(&self) -> Status {
        match &self.result {
            Ok(_) => Status::SUCCESS,
            Err(failure) => failure.status,
        }
    }

    /// Returns the path back to the sender of a datagram that arrived at `local`,
    /// to reply with
    /// [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle).
    /// The path has the sender's LID, the sender's GID if the datagram has a
    /// route header, and the service level of the datagram (like
    /// `ibv_init_ah_from_wc(3)`).
    ///
    /// `None` if this is not the receive of a datagram, or there is neither LID
    /// nor GID.
    pub fn reply_address(&self, local: &LocalAddress) -> Option<AhAttr> {
        let success = self.result.ok()?;
        let gid = self.sender();
        if self.operation != Operation::Receive || gid.is_none() && success.slid() == 0 {
            return None;
        }
        let mut path = local.path_to(gid.unwrap_or_default(), success.slid());
        path.is_global = gid.is_some();
        path.sl = success.service_level();
        path.src_path_bits = success.path_bits();
        Some(path)
    }

    /// Returns the sender's GID from the route header in a datagram's buffer:
    /// [`source_gid`](super::source_gid). Datagrams on InfiniBand may have no
    /// route header; see [`reply_address`](Self::reply_address).
    pub fn sender(&self) -> Option<Gid> {
        let success = self.result.ok()?;
        if !success.has_grh() {
            return None;
        }
        let header = self.payload.route_header()?;
        source_gid(header)
    }

    /// Takes the buffer that was posted, if there was exactly one.
    #[inline]
    pub fn take_buffer(&mut self) -> Option<Buffer> {
        std::mem::take(&mut self.payload).into_buffer()
    }

    /// Takes the buffers that were posted.
    pub fn take_buffers(&mut self) -> Vec<Buffer> {
        std::mem::take(&mut self.payload).into_buffers()
    }
}
