//! Parameters of connections and datagram services.

use uverbs::{AccessFlags, AhAttr, GlobalRoute, QpAttr, QpAttrMask, QpCap, QpState};

use crate::abi;
use crate::{Command, Error};

/// Maximum private data of a connect over IP, on InfiniBand and RoCE.
pub const MAX_CONNECT_DATA: usize = 56;
/// Maximum private data of a request for a datagram service over IP.
pub const MAX_UD_CONNECT_DATA: usize = 180;
/// Maximum private data of an accept.
pub const MAX_ACCEPT_DATA: usize = 196;
/// Maximum private data of an answer to a request for a datagram service.
pub const MAX_UD_ACCEPT_DATA: usize = 136;
/// Maximum private data of a reject.
pub const MAX_REJECT_DATA: usize = 148;
/// Maximum private data of a command, whose length field is a byte. The kernel
/// rejects more than the message can carry.
pub const MAX_DATA: usize = 255;

/// Parameters of a connection, for [`connect`](crate::Id::connect) and
/// [`accept`](crate::Id::accept).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnParam<'a> {
    /// Number of the local queue pair, 24 bits.
    pub qp_num: u32,
    /// Queue key of a datagram id with an InfiniBand address; zero is the
    /// default key.
    pub qkey: u32,
    /// Data for the peer. InfiniBand and RoCE carry [`MAX_CONNECT_DATA`] bytes
    /// in a request (datagram: [`MAX_UD_CONNECT_DATA`]) and [`MAX_ACCEPT_DATA`]
    /// in an answer ([`MAX_UD_ACCEPT_DATA`]).
    pub private_data: &'a [u8],
    /// Maximum number of outstanding RDMA reads and atomics from the peer.
    pub responder_resources: u8,
    /// Maximum number of outstanding RDMA reads and atomics to the peer.
    pub initiator_depth: u8,
    /// Whether the hardware supports flow control.
    pub flow_control: bool,
    /// Retries after a timeout, 0 to 7, of which 7 is unlimited on rdma_rxe. The
    /// connecting side chooses for both sides.
    pub retry_count: u8,
    /// Retries after "receiver not ready", 0 to 7, of which 7 is unlimited;
    /// used by the peer.
    pub rnr_retry_count: u8,
    /// Whether the queue pair uses a shared receive queue.
    pub srq: bool,
}

impl Default for ConnParam<'_> {
    /// One RDMA read at a time in each direction, 6 retries after a timeout, unlimited
    /// ones without a receive, no private data.
    fn default() -> Self {
        Self {
            qp_num: 0,
            qkey: 0,
            private_data: &[],
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: false,
            retry_count: 6,
            rnr_retry_count: 7,
            srq: false,
        }
    }
}

/// Copies private data to the fixed-size field of a structure.
pub(crate) fn private_data_field(
    command: Command,
    data: &[u8],
) -> Result<([u8; abi::MAX_PRIVATE_DATA], u8), Error> {
    let too_long = Error::PrivateDataTooLong {
        command,
        len: data.len(),
        max: MAX_DATA,
    };
    let len = u8::try_from(data.len()).map_err(|_| too_long)?;
    let mut field = [0; abi::MAX_PRIVATE_DATA];
    for (to, from) in field.iter_mut().zip(data) {
        *to = *from;
    }
    Ok((field, len))
}

impl ConnParam<'_> {
    /// Converts to the kernel's structure. Values that the kernel would
    /// truncate silently are errors.
    pub(crate) fn to_kernel(self, command: Command) -> Result<abi::ConnParam, Error> {
        if self.qp_num > 0xff_ffff {
            return Err(Error::Invalid {
                command,
                what: "the queue pair number exceeds 24 bits",
            });
        }
        if self.retry_count > 7 || self.rnr_retry_count > 7 {
            return Err(Error::Invalid {
                command,
                what: "a retry count exceeds 7",
            });
        }
        let (private_data, private_data_len) = private_data_field(command, self.private_data)?;
        Ok(abi::ConnParam {
            qp_num: self.qp_num,
            qkey: self.qkey,
            private_data,
            private_data_len,
            srq: self.srq.into(),
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: self.flow_control.into(),
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            valid: 1,
        })
    }
}

/// Parameters of the peer's connection in an event.
///
/// `responder_resources` and `initiator_depth` are swapped to the receiver's
/// view: in a connection request they are the values that an accept may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerConnection<'e> {
    /// The peer's queue pair number, 24 bits.
    pub qp_num: u32,
    /// The peer's private data. Messages have fixed-size fields, and the whole
    /// field is returned, with zeros after the peer's bytes.
    pub private_data: &'e [u8],
    /// Number of RDMA reads and atomics from the peer that would be
    /// outstanding.
    pub responder_resources: u8,
    /// Number of RDMA reads and atomics to the peer that may be outstanding.
    pub initiator_depth: u8,
    /// Whether the peer supports flow control in hardware.
    pub flow_control: bool,
    /// Retries after a timeout.
    pub retry_count: u8,
    /// Retries after "receiver not ready".
    pub rnr_retry_count: u8,
    /// Whether the peer's queue pair uses a shared receive queue.
    pub srq: bool,
}

/// Returns the first `len` bytes of a private data field.
fn private_data(field: &[u8; abi::MAX_PRIVATE_DATA], len: u8) -> &[u8] {
    field.get(..usize::from(len)).unwrap_or(field)
}

impl<'e> From<&'e abi::ConnParam> for PeerConnection<'e> {
    fn from(param: &'e abi::ConnParam) -> Self {
        Self {
            qp_num: param.qp_num & 0xff_ffff,
            private_data: private_data(&param.private_data, param.private_data_len),
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control != 0,
            retry_count: param.retry_count,
            rnr_retry_count: param.rnr_retry_count,
            srq: param.srq != 0,
        }
    }
}

/// Parameters of a datagram service or a multicast group in an event: the
/// destination of sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdParam<'e> {
    /// Destination queue pair number, 24 bits.
    pub qp_num: u32,
    /// Queue key for sends.
    pub qkey: u32,
    /// Path to the peer or the group, for an address handle.
    pub ah_attr: AhAttr,
    /// The peer's private data, zero-padded to the size of the message's field.
    pub private_data: &'e [u8],
}

impl<'e> From<&'e abi::UdParam> for UdParam<'e> {
    fn from(param: &'e abi::UdParam) -> Self {
        Self {
            qp_num: param.qp_num & 0xff_ffff,
            qkey: param.qkey,
            ah_attr: ah_attr(&param.ah_attr),
            private_data: private_data(&param.private_data, param.private_data_len),
        }
    }
}

pub(crate) fn ah_attr(kernel: &uverbs::abi::write::AhAttr) -> AhAttr {
    AhAttr {
        grh: GlobalRoute {
            dgid: kernel.grh.dgid,
            flow_label: kernel.grh.flow_label,
            sgid_index: kernel.grh.sgid_index,
            hop_limit: kernel.grh.hop_limit,
            traffic_class: kernel.grh.traffic_class,
        },
        dlid: kernel.dlid,
        sl: kernel.sl,
        src_path_bits: kernel.src_path_bits,
        static_rate: kernel.static_rate,
        is_global: kernel.is_global != 0,
        port_num: kernel.port_num,
    }
}

/// Converts attributes to the types of `uverbs`, with the mask of those that
/// are valid.
///
/// Some kernels leave internal bits in the mask (21 to 24, for RoCE); they are
/// removed.
///
/// # Errors
/// A description of the number that exceeds the range of its attribute.
pub fn qp_attr(kernel: &abi::QpAttr) -> Result<(QpAttr, QpAttrMask), &'static str> {
    const INTERNAL_BITS: u32 = 0b1111 << 21;
    let small = |number: u32, what| u8::try_from(number).map_err(|_| what);
    let attr = QpAttr {
        qp_state: QpState(small(kernel.qp_state, "a queue pair state over 255")?),
        cur_qp_state: QpState(small(kernel.cur_qp_state, "a queue pair state over 255")?),
        path_mtu: small(kernel.path_mtu, "a path MTU code over 255")?,
        path_mig_state: small(kernel.path_mig_state, "a path migration state over 255")?,
        qkey: kernel.qkey,
        rq_psn: kernel.rq_psn & 0xff_ffff,
        sq_psn: kernel.sq_psn & 0xff_ffff,
        dest_qp_num: kernel.dest_qp_num & 0xff_ffff,
        qp_access_flags: AccessFlags::from_bits_retain(kernel.qp_access_flags),
        ah_attr: ah_attr(&kernel.ah_attr),
        alt_ah_attr: ah_attr(&kernel.alt_ah_attr),
        cap: QpCap {
            max_send_wr: kernel.max_send_wr,
            max_recv_wr: kernel.max_recv_wr,
            max_send_sge: kernel.max_send_sge,
            max_recv_sge: kernel.max_recv_sge,
            max_inline_data: kernel.max_inline_data,
        },
        pkey_index: kernel.pkey_index,
        alt_pkey_index: kernel.alt_pkey_index,
        en_sqd_async_notify: kernel.en_sqd_async_notify != 0,
        sq_draining: kernel.sq_draining != 0,
        max_rd_atomic: kernel.max_rd_atomic,
        max_dest_rd_atomic: kernel.max_dest_rd_atomic,
        min_rnr_timer: kernel.min_rnr_timer,
        port_num: kernel.port_num,
        timeout: kernel.timeout,
        retry_cnt: kernel.retry_cnt,
        rnr_retry: kernel.rnr_retry,
        alt_port_num: kernel.alt_port_num,
        alt_timeout: kernel.alt_timeout,
        rate_limit: 0,
    };
    let mask = QpAttrMask::from_bits_retain(kernel.qp_attr_mask & !INTERNAL_BITS);
    Ok((attr, mask))
}
