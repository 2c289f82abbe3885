//! Flows: rules by which a device gives received packets to a queue pair.

use crate::abi::write::{
    CMD_FLAG_EXTENDED, CreateFlow, CreateFlowResp, DestroyFlow, FlowAttr, cmd,
};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, Error, FlowHandle, QpHandle, Udata};
use zerocopy::IntoBytes;

/// Maximum number of specifications of a flow, of all kernels.
pub const MAX_SPECS: usize = 10;

/// Bytes before a specification's values.
const SPEC_HEADER: usize = 8;
/// Bytes of the longest: two IPv6 headers' fields.
const LONGEST_SPEC: usize = SPEC_HEADER + 2 * 40;

/// `IB_FLOW_SPEC_ETH`: fields of the Ethernet header.
const SPEC_ETHERNET: u32 = 0x20;

/// The request of a flow: its fixed part, and the specifications.
const LONGEST: usize = size_of::<CreateFlow>() + MAX_SPECS * LONGEST_SPEC;

/// The specifications of a flow, in order: headers that packets must have, and actions
/// (`struct ib_uverbs_flow_spec_hdr` and the bytes after it).
#[derive(Debug)]
pub struct Specs {
    /// The request, whose fixed part [`create`] fills.
    bytes: [u8; LONGEST],
    used: usize,
    count: u8,
}

impl Default for Specs {
    /// None.
    fn default() -> Self {
        Self {
            bytes: [0; LONGEST],
            used: size_of::<CreateFlow>(),
            count: 0,
        }
    }
}

impl Specs {
    /// Adds a specification of the type `kind` (`enum ib_flow_spec_type`). Of a header
    /// to match `parts` are the values and the mask of its fields, in wire order, of the
    /// same length.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than [`MAX_SPECS`], or more bytes than any has.
    pub fn add(&mut self, kind: u32, parts: &[&[u8]]) -> Result<(), Error> {
        let size = SPEC_HEADER + parts.iter().map(|part| part.len()).sum::<usize>();
        if usize::from(self.count) == MAX_SPECS || size > LONGEST_SPEC {
            return Err(invalid("more specifications than a flow can have"));
        }
        // Followed by a reserved field.
        let header = [
            &kind.to_ne_bytes()[..],
            &(size as u16).to_ne_bytes(),
            &[0; 2],
        ];
        for part in header.iter().chain(parts) {
            self.bytes[self.used..][..part.len()].copy_from_slice(part);
            self.used += part.len();
        }
        self.count += 1;
        Ok(())
    }
}

impl Specs {
    /// Returns the specification that packets have this destination MAC address.
    pub fn destination_mac(mac: [u8; 6]) -> Self {
        // The address is the first field of `struct ib_uverbs_flow_eth_filter`.
        const REST: [u8; 10] = [0; 10];
        let mut specs = Self::default();
        let added = specs.add(SPEC_ETHERNET, &[&mac, &REST, &[0xff; 6], &REST]);
        debug_assert!(added.is_ok(), "the first, and short");
        specs
    }
}

pub(crate) enum FlowKind {}

impl Kind for FlowKind {
    type Handle = FlowHandle;
    type Events = ();
    const DESTROY: Command = Command::DestroyFlow;
    fn destroy(context: &Context, handle: FlowHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// A flow to a queue pair, which it must not outlive.
#[derive(Debug)]
pub struct Flow<C: ContextRef> {
    owned: Owned<C, FlowKind>,
}

owned_methods!(Flow, FlowHandle, (), "");

impl<C: ContextRef> Flow<C> {
    /// Creates a flow to a queue pair.
    ///
    /// # Errors
    /// As [`create`].
    pub fn create(context: &C, qp: QpHandle, init: &FlowInit, specs: Specs) -> Result<Self, Error> {
        let handle = create(context, qp, init, specs, Udata::none())?;
        Ok(Self {
            owned: Owned::new(context, handle),
        })
    }
}

/// Parameters of a flow.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlowInit {
    /// Which packets are looked at (`enum ib_flow_attr_type`): 0 those that match, 1
    /// all, 2 all multicast, 3 a copy of all.
    pub kind: u32,
    /// Lower ones are looked at first.
    pub priority: u16,
    /// The port, from 1.
    pub port: u8,
    /// `IB_FLOW_ATTR_FLAGS_*`.
    pub flags: u32,
}

/// Creates a flow to a queue pair. It is destroyed before that is.
///
/// # Errors
/// EPERM without CAP_NET_RAW, EINVAL, EOPNOTSUPP for what the device does not match.
pub fn create(
    context: &Context,
    qp: QpHandle,
    init: &FlowInit,
    mut specs: Specs,
    udata: Udata<'_>,
) -> Result<FlowHandle, Error> {
    let header = size_of::<CreateFlow>();
    let request = CreateFlow {
        qp_handle: qp.0,
        flow_attr: FlowAttr {
            kind: init.kind,
            size: (specs.used - header) as u16,
            priority: init.priority,
            num_of_specs: specs.count,
            port: init.port,
            flags: init.flags,
            ..FlowAttr::default()
        },
        ..CreateFlow::default()
    };
    specs.bytes[..header].copy_from_slice(request.as_bytes());
    let mut resp = CreateFlowResp::default();
    let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_CREATE_FLOW;
    Ioctl::write_bytes(
        Command::CreateFlow,
        number,
        &specs.bytes[..specs.used],
        &mut resp,
    )
    .acts_on(qp.0)
    .udata(udata)
    .run(context)?;
    Ok(FlowHandle(resp.flow_handle))
}

/// Destroys a flow.
///
/// # Errors
/// EIO if the device was removed.
pub fn destroy(context: &Context, flow: FlowHandle) -> Result<(), Error> {
    let request = DestroyFlow {
        flow_handle: flow.0,
        ..DestroyFlow::default()
    };
    let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_DESTROY_FLOW;
    Ioctl::write(Command::DestroyFlow, number, &request, &mut ())
        .acts_on(flow.0)
        .run(context)
}

fn invalid(what: &'static str) -> Error {
    Error::Invalid {
        command: Command::CreateFlow,
        what,
    }
}
