//! Flows: rules by which the device gives received packets to a queue pair.

use core::ffi::{c_int, c_void};
use core::slice;

use mlx5::CounterPoint;
use mlx5::create_flow as create_flow_with;
use uverbs::flow::{FlowInit, Specs};
use uverbs::{FlowHandle, QpHandle};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::mlx5::counters::{SharedCounterPoints, counters_of};
use crate::mlx5::flow_action;

/// `struct ibv_flow`.
#[repr(C)]
pub struct ibv_flow {
    comp_mask: u32,
    context: *mut ibv_context,
    handle: u32,
    // The provider's part; programs use the members above.
    counters: Option<SharedCounterPoints>,
}

impl ibv_flow {
    /// A flow without a kernel object yet.
    pub fn new(context: *mut ibv_context) -> Self {
        Self {
            comp_mask: 0,
            context,
            handle: 0,
            counters: None,
        }
    }

    /// Sets the handle of the new kernel object.
    pub fn set_handle(&mut self, handle: FlowHandle) {
        self.handle = handle.0;
    }
}

/// `struct ibv_flow_attr`; `num_of_specs` specifications follow.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_flow_attr {
    comp_mask: u32,
    kind: u32,
    size: u16,
    priority: u16,
    num_of_specs: u8,
    port: u8,
    flags: u32,
}

/// The beginning of a specification.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SpecHeader {
    kind: u32,
    size: u16,
}

const _: () = assert!(size_of::<ibv_flow_attr>() == 20 && size_of::<SpecHeader>() == 8);

/// Flag of a type: matches the packet inside a tunnel (`IBV_FLOW_SPEC_INNER`).
const INNER: u32 = 0x100;

/// Types of specifications (`enum ibv_flow_spec_type`).
mod spec {
    pub const ETH: u32 = 0x20;
    pub const IPV4: u32 = 0x30;
    pub const IPV6: u32 = 0x31;
    pub const IPV4_EXT: u32 = 0x32;
    pub const ESP: u32 = 0x34;
    pub const TCP: u32 = 0x40;
    pub const UDP: u32 = 0x41;
    pub const VXLAN_TUNNEL: u32 = 0x50;
    pub const GRE: u32 = 0x51;
    pub const MPLS: u32 = 0x60;
    pub const TAG: u32 = 0x1000;
    pub const DROP: u32 = 0x1001;
    pub const ACTION: u32 = 0x1002;
    pub const COUNT: u32 = 0x1003;
}

/// Offset and length of the values of a header to match, and whether a later header may add
/// more. The offset depends on their alignment.
fn filter(kind: u32) -> Option<(usize, usize, bool)> {
    Some(match kind & !INNER {
        spec::ETH => (6, 16, false),
        spec::IPV4 => (8, 8, false),
        spec::IPV4_EXT => (8, 12, true),
        spec::IPV6 => (8, 39, true),
        spec::ESP => (8, 8, false),
        spec::TCP | spec::UDP => (6, 4, false),
        spec::VXLAN_TUNNEL => (8, 4, true),
        spec::GRE => (8, 8, false),
        spec::MPLS => (8, 4, false),
        _ => return None,
    })
}

/// The pointer in a specification that names an object.
fn pointer(bytes: &[u8]) -> Result<*mut c_void, Errno> {
    let field = bytes.get(8..16).ok_or(Errno::INVAL)?.as_ptr();
    // SAFETY: a pointer may have any bytes, and is only returned.
    let pointer = unsafe { field.cast::<*mut c_void>().read_unaligned() };
    match pointer.is_null() {
        true => Err(Errno::INVAL),
        false => Ok(pointer),
    }
}

/// Adds the specification in `bytes`.
fn convert(kind: u32, bytes: &[u8], specs: &mut Specs) -> Result<(), Errno> {
    let part = |from: usize, length: usize| bytes.get(from..from + length).ok_or(Errno::INVAL);
    match kind {
        spec::TAG => specs.add(kind, &[part(8, 4)?, &[0; 4]])?,
        spec::DROP => specs.add(kind, &[])?,
        _ => {
            let (begin, known, longer) = filter(kind).ok_or(Errno::INVAL)?;
            let length = match longer {
                true => bytes.len().saturating_sub(begin) / 2,
                false => known,
            };
            let (values, mask) = (part(begin, length)?, part(begin + length, length)?);
            let (Some(values), Some((mask, unknown))) =
                (values.get(..known), mask.split_at_checked(known))
            else {
                return Err(Errno::INVAL);
            };
            if unknown.iter().any(|byte| *byte != 0) {
                return Err(Errno::OPNOTSUPP);
            }
            let kind = match kind & !INNER {
                spec::IPV4_EXT => spec::IPV4 | kind & INNER,
                _ => kind,
            };
            // The kernel's structure of IPv6 ends with a reserved byte.
            let pad: &[u8] = match kind & !INNER {
                spec::IPV6 => &[0],
                _ => &[],
            };
            specs.add(kind, &[values, pad, mask, pad])?;
        }
    }
    Ok(())
}

/// `ibv_create_flow`. EINVAL for malformed specifications, for counters without a point, and
/// for two sets of counters; EOPNOTSUPP for matches or actions that the device does not
/// support.
pub unsafe extern "C" fn create_flow(qp: *mut ibv_qp, attr: *mut ibv_flow_attr) -> *mut ibv_flow {
    // SAFETY: libibverbs passes a live queue pair of ours, and the application
    // attributes that so many specifications follow.
    entry::pointer(|| unsafe {
        let given = *attr;
        let mut specs = Specs::default();
        let mut counted = None;
        let mut at = attr.add(1).cast::<u8>();
        for _ in 0..given.num_of_specs {
            let SpecHeader { kind, size } = at.cast::<SpecHeader>().read_unaligned();
            let bytes = slice::from_raw_parts(at, size.into());
            let object = match kind {
                spec::COUNT => {
                    let counters = counters_of(pointer(bytes)?.cast());
                    if counted.replace(counters).is_some() {
                        return Err(Errno::INVAL);
                    }
                    Some(counters.handle().0)
                }
                spec::ACTION => Some(flow_action::handle_of(pointer(bytes)?.cast())),
                _ => None,
            };
            match object {
                Some(handle) => specs.add(kind, &[&handle.to_ne_bytes(), &[0; 4]])?,
                None => convert(kind, bytes, &mut specs)?,
            }
            at = at.add(size.into());
        }
        let mut flow = try_box(ibv_flow::new((*qp).context)).map_err(|(_, errno)| errno)?;
        let init = FlowInit {
            kind: given.kind,
            priority: given.priority,
            port: given.port,
            flags: given.flags,
        };
        let ctx = CtxRef::of((*qp).context);
        let qp = QpHandle((*qp).handle);
        let make =
            |points: Option<&[CounterPoint]>| Ok(create_flow_with(&ctx, qp, &init, specs, points)?);
        let (handle, points) = match counted {
            Some(counters) => {
                let (handle, points) = counters.create_flow_with(make)?;
                (handle, Some(points))
            }
            None => (make(None)?, None),
        };
        flow.set_handle(handle);
        flow.counters = points;
        Ok(Box::into_raw(flow))
    })
}

/// `ibv_destroy_flow`. The flow is unchanged if the kernel refuses.
pub unsafe extern "C" fn destroy_flow(flow: *mut ibv_flow) -> c_int {
    // SAFETY: libibverbs passes a live flow of ours.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*flow).context);
        let result = uverbs::flow::destroy(&ctx, FlowHandle((*flow).handle));
        destroyed(result.map_err(Into::into))?;
        if let Some(points) = &Box::from_raw(flow).counters {
            points.flow_destroyed();
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use core::fmt::Write as _;
    use core::mem::offset_of;

    use testing::c_headers::{are_installed, compile};

    use super::*;

    /// The C structure of a header to match, its kernel structure, and its type.
    const STRUCTURES: [(&str, &str, &str, u32); 9] = [
        ("eth", "eth", "ETH", spec::ETH),
        ("ipv4", "", "IPV4", spec::IPV4),
        ("ipv4_ext", "ipv4", "IPV4_EXT", spec::IPV4_EXT),
        ("ipv6", "ipv6", "IPV6", spec::IPV6),
        ("esp", "esp", "ESP", spec::ESP),
        ("tcp_udp", "tcp_udp", "UDP", spec::UDP),
        ("tunnel", "tunnel", "VXLAN_TUNNEL", spec::VXLAN_TUNNEL),
        ("gre", "gre", "GRE", spec::GRE),
        ("mpls", "mpls", "MPLS", spec::MPLS),
    ];

    #[test]
    fn specifications_match_the_headers() {
        let mut c = "#include <stddef.h>\n#include <infiniband/verbs.h>\n\
            #include <rdma/ib_user_verbs.h>\n"
            .to_owned();
        if !are_installed(&c, "libibverbs-dev libc6-dev") {
            return;
        }
        let mut check = |condition: String| {
            writeln!(c, "_Static_assert({condition}, \"{condition}\");").unwrap();
        };
        for (user, kernel, name, kind) in STRUCTURES {
            let (begin, known, _) = filter(kind).unwrap();
            let structure = format!("struct ibv_flow_spec_{user}");
            check(format!("IBV_FLOW_SPEC_{name} == {kind}"));
            check(format!("offsetof({structure}, val) == {begin}"));
            // IPv6 ends with a byte of padding.
            let size = known.next_multiple_of(2);
            check(format!("sizeof((({structure} *)0)->val) == {size}"));
            check(format!("offsetof({structure}, mask) == {}", begin + size));
            if !kernel.is_empty() {
                let structure = format!("struct ib_uverbs_flow_spec_{kernel}");
                check(format!("sizeof({structure}) == {}", 8 + 2 * size));
            }
        }
        check(format!("IBV_FLOW_SPEC_TCP == {}", spec::TCP));
        check(format!("IBV_FLOW_SPEC_INNER == {INNER}"));
        check(format!("IBV_FLOW_SPEC_ACTION_TAG == {}", spec::TAG));
        check(format!("IBV_FLOW_SPEC_ACTION_DROP == {}", spec::DROP));
        check("offsetof(struct ibv_flow_spec_action_tag, tag_id) == 8".to_owned());
        check("sizeof(struct ib_uverbs_flow_spec_action_tag) == 16".to_owned());
        for (field, offset) in [
            ("priority", offset_of!(ibv_flow_attr, priority)),
            ("num_of_specs", offset_of!(ibv_flow_attr, num_of_specs)),
            ("port", offset_of!(ibv_flow_attr, port)),
            ("flags", offset_of!(ibv_flow_attr, flags)),
        ] {
            check(format!(
                "offsetof(struct ibv_flow_attr, {field}) == {offset}"
            ));
        }
        check(format!(
            "offsetof(struct ibv_flow, handle) == {}",
            offset_of!(ibv_flow, handle)
        ));
        assert_eq!(compile(&c), Some(Ok(())));
    }

    /// A specification whose values begin at `begin`, followed by the mask.
    fn specification(begin: usize, values: &[u8], mask: &[u8]) -> Vec<u8> {
        [&[0; 8][..begin], values, mask].concat()
    }

    #[test]
    fn unknown_fields_and_types_are_refused() {
        let convert = |kind, bytes: &[u8]| convert(kind, bytes, &mut Specs::default());
        let (values, mut mask) = ([1; 16], [1; 16]);
        // A longer filter, of a later header.
        let ipv4 = |mask: &[u8]| convert(spec::IPV4_EXT, &specification(8, &values, mask));
        assert_eq!(ipv4(&mask), Err(Errno::OPNOTSUPP));
        mask[12..].fill(0);
        assert_eq!(ipv4(&mask), Ok(()));
        // One that is too short, or ends early.
        let ipv4 = specification(8, &values[..10], &mask[..10]);
        assert_eq!(convert(spec::IPV4_EXT, &ipv4), Err(Errno::INVAL));
        let eth = specification(6, &values, &mask[..15]);
        assert_eq!(convert(spec::ETH, &eth), Err(Errno::INVAL));
        assert_eq!(convert(spec::TAG, &eth[..11]), Err(Errno::INVAL));
        for kind in [0, 0x33, 0x1002, 0x1003, spec::ETH | 0x200] {
            assert_eq!(convert(kind, &[0; 64]), Err(Errno::INVAL), "{kind:#x}");
        }
        let mut specs = Specs::default();
        for _ in 0..uverbs::flow::MAX_SPECS {
            super::convert(spec::DROP, &[], &mut specs).unwrap();
        }
        assert!(super::convert(spec::DROP, &[], &mut specs).is_err());
    }
}
