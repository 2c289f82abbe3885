//! What a completion says.

use std::fmt;

use uverbs::AhAttr;

use super::address::source_gid;
use crate::data::Payload;
use crate::device::{self, Entry, WorkCompletion};
use crate::inflight::{Posted, Retired};
use crate::memory::Buffer;
use crate::operation::Operation;
use crate::qp::LocalAddress;
use crate::query::Gid;

/// How an operation ended (`enum ibv_wc_status`).
///
/// Open: a value that has no name here is kept as it came.
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
    /// It was done.
    SUCCESS = 0, "success";
    /// A message was longer than its receive, or a buffer too short.
    LOC_LEN_ERR = 1, "local length error: the message does not fit the buffer";
    /// The queue pair, or its end-to-end context, is inconsistent.
    LOC_QP_OP_ERR = 2, "local queue pair operation error";
    /// Reserved.
    LOC_EEC_OP_ERR = 3, "local EE context operation error";
    /// The memory is not registered so that the operation could use it.
    LOC_PROT_ERR = 4, "local protection error: a key or address range is not valid for this";
    /// It never began, or was given up: the queue pair is in the error state.
    WR_FLUSH_ERR = 5, "flushed: the queue pair is in the error state";
    /// A memory window could not be bound.
    MW_BIND_ERR = 6, "memory window bind error";
    /// The peer's answer was not what it should have been.
    BAD_RESP_ERR = 7, "bad response of the peer";
    /// A message of the peer touched what it may not.
    LOC_ACCESS_ERR = 8, "local access error";
    /// The peer could not make sense of the request.
    REM_INV_REQ_ERR = 9, "the peer calls the request invalid";
    /// The peer does not allow it.
    REM_ACCESS_ERR = 10, "the peer does not allow this access: wrong key, range or rights";
    /// The peer failed.
    REM_OP_ERR = 11, "the peer could not do it";
    /// The peer did not answer.
    RETRY_EXC_ERR = 12, "the peer did not answer (transport retries exceeded)";
    /// The peer had no receive posted for too long.
    RNR_RETRY_EXC_ERR = 13, "the peer had no receive posted (RNR retries exceeded)";
    /// Reserved.
    LOC_RDD_VIOL_ERR = 14, "local RDD violation";
    /// Reserved.
    REM_INV_RD_REQ_ERR = 15, "the peer calls the RD request invalid";
    /// The peer gave up.
    REM_ABORT_ERR = 16, "aborted by the peer";
    /// Reserved.
    INV_EECN_ERR = 17, "invalid EE context number";
    /// Reserved.
    INV_EEC_STATE_ERR = 18, "invalid EE context state";
    /// The device failed.
    FATAL_ERR = 19, "fatal error of the device";
    /// No answer in time.
    RESP_TIMEOUT_ERR = 20, "no answer in time";
    /// Something else.
    GENERAL_ERR = 21, "general error";
    /// Of tag matching.
    TM_ERR = 22, "tag matching error";
    /// A rendezvous that was not completed by the device.
    TM_RNDV_INCOMPLETE = 23, "tag matching: incomplete rendezvous";
}

impl Status {
    /// Whether the operation was done.
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
/// `IBV_WC_WITH_IMM`.
pub(super) const FLAG_IMMEDIATE: u32 = 2;

/// Whether a receive was used up by a write with immediate data, which went to
/// other memory.
#[inline(always)]
pub(super) fn is_remote_write(opcode: u32) -> bool {
    opcode == OPCODE_RECV_RDMA_WITH_IMM
}

/// Bytes that a message of `byte_len` has put into its receive.
#[inline(always)]
pub(super) fn received(opcode: u32, byte_len: u32) -> u32 {
    if is_remote_write(opcode) { 0 } else { byte_len }
}

#[inline(always)]
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

/// What an operation that was done has to tell.
///
/// The order is that of what the device writes, so that it is copied in few
/// pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Success {
    /// Bytes moved. Of a receive: of the message, in a datagram with the 40
    /// bytes of its route header; if the message was a write with immediate
    /// data, the bytes written. Of a send: not set by every device.
    pub byte_len: u32,
    ex: u32,
    /// The sender's queue pair, of a datagram.
    pub src_qp: u32,
    flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
    port_num: u8,
    /// Told by nobody; with it, one piece.
    reserved: u8,
    opcode: u32,
}

impl Success {
    #[inline(always)]
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

    /// The sender's LID, of a datagram on InfiniBand; 0 on Ethernet.
    #[inline]
    pub fn slid(&self) -> u16 {
        self.slid
    }

    /// The service level that a datagram came with.
    #[inline]
    pub fn service_level(&self) -> u8 {
        self.sl
    }

    /// Which of the port's LIDs a datagram was sent to: the low bits, as many as
    /// its mask has (`lmc` of [`Context::query_port`](crate::Context::query_port)).
    #[inline]
    pub fn path_bits(&self) -> u8 {
        self.dlid_path_bits
    }

    /// Immediate data that came with the message, host byte order.
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        (self.flags & FLAG_IMMEDIATE != 0).then_some(u32::from_be(self.ex))
    }

    /// The key of ours that the message has invalidated.
    #[inline]
    pub fn invalidated(&self) -> Option<u32> {
        (self.flags & device::FLAG_INVALIDATED != 0).then_some(self.ex)
    }

    /// Which of the port's partition keys a datagram came with.
    #[inline]
    pub fn pkey_index(&self) -> u16 {
        self.pkey_index
    }

    /// Whether the first 40 bytes of a datagram's buffer are the global route
    /// header that it came with.
    #[inline]
    pub fn has_grh(&self) -> bool {
        self.flags & FLAG_GRH != 0
    }

    /// Whether a receive was used up by the peer's write with immediate data,
    /// which went to other memory.
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

/// Why an operation was not done. A failed operation says nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub status: Status,
    /// The device's own number for it.
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

/// A completed operation, with what it owned.
#[derive(Debug)]
pub struct Completion {
    /// The token that it was posted with.
    pub token: u64,
    /// The queue pair that it was posted to, or that a shared receive was used
    /// by.
    pub qp_num: u32,
    /// What it was.
    pub operation: Operation,
    /// What became of it.
    pub result: Result<Success, Failure>,
    /// Its memory, free again.
    pub payload: Payload,
}

impl Default for Completion {
    /// The completion of nothing: a place to poll into.
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
    /// From what the device wrote, and what was in flight.
    #[inline(always)]
    pub(crate) fn new(entry: Entry<'_>, retired: Retired<'_>) -> Self {
        let mut this = Self::default();
        this.replace(entry, retired);
        this
    }

    /// Turns a place to poll into into the completion that the device wrote, of
    /// what was in flight.
    #[inline(always)]
    pub(super) fn replace(&mut self, entry: Entry<'_>, retired: Retired<'_>) {
        // What was in the place is dropped before anything is taken out: then
        // all goes from where it was in flight to where it belongs.
        if !matches!(self.payload, Payload::None) {
            self.payload = Payload::None;
        }
        // SAFETY: what has something to drop is moved out of the operation, once:
        // its payload, into this, which is written whole and has none itself,
        // and its companion.
        unsafe {
            retired.in_place(|posted: *const Posted| {
                // Read as late as this, the fields need no place in between.
                let wc = device::read(&entry);
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
                    // A sender's own completion says that it sent immediate
                    // data, and does not have them.
                    if let Ok(success) = &mut self.result {
                        success.flags = 0;
                    }
                } else if wc.status == Status::SUCCESS.0 {
                    self.payload.received(received(wc.opcode, wc.byte_len));
                }
                (&raw const (*posted).companion)
                    .read()
                    .release(wc.status == Status::SUCCESS.0);
            });
        }
    }

    /// How it ended.
    #[inline]
    pub fn status(&self) -> Status {
        match &self.result {
            Ok(_) => Status::SUCCESS,
            Err(failure) => failure.status,
        }
    }

    /// The way back to whoever sent a datagram to this address: for an answer,
    /// with [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle).
    /// The sender's LID, and its GID if the datagram says that, at the service
    /// level that it came with (as `ibv_init_ah_from_wc(3)` has it).
    ///
    /// `None` of what is no datagram's receive, and of one that says neither.
    pub fn way_back(&self, local: &LocalAddress) -> Option<AhAttr> {
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

    /// The address that a datagram came from, out of the route header in its
    /// buffer: [`source_gid`](super::source_gid). On InfiniBand datagrams may come
    /// without: [`way_back`](Self::way_back).
    pub fn sender(&self) -> Option<Gid> {
        let success = self.result.ok()?;
        if !success.has_grh() {
            return None;
        }
        let header = match &self.payload {
            Payload::Buffer(buffer) => buffer.first_chunk()?,
            Payload::Buffers(buffers) => buffers.first()?.first_chunk()?,
            _ => return None,
        };
        source_gid(header)
    }

    /// The buffer that was posted, if it was one.
    #[inline]
    pub fn take_buffer(&mut self) -> Option<Buffer> {
        std::mem::take(&mut self.payload).into_buffer()
    }

    /// The buffers that were posted.
    pub fn take_buffers(&mut self) -> Vec<Buffer> {
        std::mem::take(&mut self.payload).into_buffers()
    }
}
