//! Address handles.

use std::hash::{BuildHasher, Hasher, RandomState};

use mlx5_abi::CreateAhResp;
use uverbs::{Ah, AhAttr, ContextRef, PdHandle, Udata};
use zerocopy::IntoBytes;

use crate::CreateError;
use crate::abi::WqeAddressVector;

/// Link of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet, and whether the source GID is one of RoCE version 2.
    Ethernet {
        /// RoCE version 2.
        udp: bool,
    },
}

/// An address handle. Datagrams carry its address vector.
#[derive(Debug)]
pub struct AddressHandle<C: ContextRef> {
    /// The kernel object, which resolves the path; none on InfiniBand.
    pub object: Option<Ah<C>>,
    /// The address in a send WQE.
    pub address: Address,
}

/// An address vector, without the peer's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub(crate) WqeAddressVector);

impl<C: ContextRef> AddressHandle<C> {
    /// Creates an address handle for a port with that link.
    ///
    /// # Errors
    /// Those of CREATE_AH; EINVAL on Ethernet without a global route.
    pub fn create(
        context: &C,
        pd: PdHandle,
        attr: &AhAttr,
        user_handle: u64,
        link: Link,
    ) -> Result<Self, CreateError> {
        let mut address = vector(attr, link);
        if link == Link::InfiniBand {
            return Ok(Self {
                object: None,
                address: Address(address),
            });
        }
        let mut answer = CreateAhResp::default();
        let udata = Udata::output(answer.as_mut_bytes());
        let object = Ah::create(context, pd, attr, user_handle, udata)?;
        address.rmac = answer.dmac;
        Ok(Self {
            object: Some(object),
            address: Address(address),
        })
    }
}

/// The device's encoding of an injection rate limit (`enum ib_rate`); for an
/// unsupported one, of the next lower, or none.
fn rate(static_rate: u8) -> u8 {
    const RATES: [u8; 21] = [
        0, 0, 7, 8, 9, 10, 11, 12, 13, 14, 15, 11, 13, 15, 0, 9, 15, 0, 0, 9, 13,
    ];
    RATES.get(usize::from(static_rate)).copied().unwrap_or(0)
}

/// The UDP source port of a flow: its label folded to 14 bits.
fn source_port(flow_label: u32) -> u16 {
    const FIRST: u16 = 0xc000;
    let label = flow_label & 0xf_ffff;
    let folded = match label {
        // Any port, the same for all packets of the handle.
        0 => RandomState::new().build_hasher().finish() as u32,
        _ => label ^ label >> 14,
    };
    FIRST | folded as u16 & 0x3fff
}

pub(crate) fn vector(attr: &AhAttr, link: Link) -> WqeAddressVector {
    let mut to = WqeAddressVector::default();
    // Whether there is a global route; not set on Ethernet, which always has one.
    let mut global = 0;
    match link {
        Link::Ethernet { udp } => {
            to.stat_rate_sl = rate(attr.static_rate) << 4 | (attr.sl & 7) << 1;
            if udp {
                to.rlid = source_port(attr.grh.flow_label).to_be_bytes();
            }
        }
        Link::InfiniBand => {
            to.stat_rate_sl = rate(attr.static_rate) << 4 | attr.sl & 0xf;
            to.fl_mlid = attr.src_path_bits & 0x7f;
            to.rlid = attr.dlid.to_be_bytes();
            global = 1;
        }
    }
    if attr.is_global {
        to.tclass = attr.grh.traffic_class;
        to.hop_limit = attr.grh.hop_limit;
        let index = u32::from(attr.grh.sgid_index) << 20;
        let word = global << 30 | index | attr.grh.flow_label & 0xf_ffff;
        to.grh_gid_fl = word.to_be();
        to.rgid = attr.grh.dgid;
    }
    to
}

#[cfg(test)]
mod tests {
    use uverbs::GlobalRoute;

    use super::*;

    const ATTR: AhAttr = AhAttr {
        grh: GlobalRoute {
            dgid: [9; 16],
            flow_label: 0x12345,
            sgid_index: 3,
            hop_limit: 64,
            traffic_class: 5,
        },
        dlid: 0x1234,
        sl: 9,
        src_path_bits: 1,
        static_rate: 3,
        is_global: true,
        port_num: 1,
    };

    /// The vector's bytes.
    fn bytes(vector: &WqeAddressVector) -> [u8; 48] {
        // SAFETY: 48 bytes of integers without padding.
        unsafe { std::mem::transmute_copy(vector) }
    }

    #[test]
    fn an_infiniband_vector_has_its_lid() {
        let bytes = bytes(&vector(&ATTR, Link::InfiniBand));
        assert_eq!(bytes[12..16], [0x89, 1, 0x12, 0x34]);
        assert_eq!(bytes[26..32], [5, 64, 0x40, 0x31, 0x23, 0x45]);
        assert_eq!(bytes[32..], [9; 16]);
        let local = AhAttr {
            is_global: false,
            ..ATTR
        };
        assert_eq!(vector(&local, Link::InfiniBand).grh_gid_fl, 0);
    }

    #[test]
    fn an_ethernet_vector_has_its_source_port() {
        let roce = |udp| bytes(&vector(&ATTR, Link::Ethernet { udp }));
        assert_eq!(roce(false)[12..16], [0x82, 0, 0, 0]);
        // 0x12345 = 0x4 << 14 | 0x2345.
        assert_eq!(roce(true)[14..16], (0xc000u16 | 0x2345 ^ 4).to_be_bytes());
        assert_eq!(roce(true)[28..32], [0x00, 0x31, 0x23, 0x45]);
        assert!(source_port(0) >= 0xc000);
    }
}
