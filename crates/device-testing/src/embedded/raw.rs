//! Commands built attribute by attribute, and memory for their addresses.

use std::os::fd::RawFd;
use std::ptr;

use mlx5::ioctl::ids::{
    ATTR_FLOW_MATCHER_DESTROY_HANDLE, METHOD_FLOW_MATCHER_DESTROY, OBJECT_FLOW_MATCHER,
};
use uverbs::Context;
use uverbs::abi::ids::*;
use uverbs::abi::ioctl::{ATTR_F_MANDATORY, Attr, IoctlHdr, RDMA_VERBS_IOCTL};
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub const PAGE: usize = 4096;
/// Size of the buffer of a command, whatever its header says.
pub const MAX_COMMAND: usize = 8192;

/// Memory that only commands and devices use, between inaccessible pages and canary pages
/// that must stay unchanged.
pub struct Arena {
    mapping: *mut u8,
    pages: usize,
}

const CANARY: u8 = 0xa5;

impl Arena {
    pub fn new(pages: usize) -> Self {
        let total = (pages + 6) * PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let mapping = unsafe { libc::mmap(ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED);
        let mapping = mapping.cast::<u8>();
        for (from, count) in [(1, 1), (3, pages), (pages + 4, 1)] {
            // SAFETY: pages of the mapping, which are not in use yet.
            let result = unsafe {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                libc::mprotect(mapping.add(from * PAGE).cast(), count * PAGE, access)
            };
            assert_eq!(result, 0);
        }
        let arena = Self { mapping, pages };
        for canary in arena.canaries() {
            // SAFETY: a page of the mapping.
            unsafe { canary.write_bytes(CANARY, PAGE) };
        }
        arena
    }

    fn canaries(&self) -> [*mut u8; 2] {
        // SAFETY: inside the mapping.
        [1, self.pages + 4].map(|page| unsafe { self.mapping.add(page * PAGE) })
    }

    pub fn len(&self) -> usize {
        self.pages * PAGE
    }

    pub fn start(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.mapping.add(3 * PAGE) }
    }

    pub fn address(&self) -> u64 {
        self.start().expose_provenance() as u64
    }

    /// Writes a byte. Nothing runs the device meanwhile.
    pub fn set(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        // SAFETY: inside the arena.
        unsafe { self.start().add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Makes the first page read-only.
    pub fn protect_first(&self) {
        // SAFETY: a page of the arena, which is not in use yet.
        let result = unsafe { libc::mprotect(self.start().cast(), PAGE, libc::PROT_READ) };
        assert_eq!(result, 0);
    }

    pub fn check(&self) {
        for canary in self.canaries() {
            for at in 0..PAGE {
                // SAFETY: inside the mapping.
                let byte = unsafe { canary.add(at).read_volatile() };
                assert_eq!(byte, CANARY, "byte {at}");
            }
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which is no longer used.
        unsafe { libc::munmap(self.mapping.cast(), (self.pages + 6) * PAGE) };
    }
}

/// A command.
#[derive(Clone, Debug)]
pub struct Command {
    pub header: IoctlHdr,
    pub attrs: Vec<Attr>,
    /// Buffers that attributes point to.
    buffers: Vec<Vec<u64>>,
}

impl Command {
    pub fn new(object_id: u16, method_id: u16) -> Self {
        let header = IoctlHdr {
            object_id,
            method_id,
            driver_id: uverbs::discovery::DriverId::MLX5.0,
            ..IoctlHdr::default()
        };
        Self {
            header,
            attrs: Vec::new(),
            buffers: Vec::new(),
        }
    }

    /// Builds a write command, with a buffer for its answer.
    pub fn write(number: u32, body: &(impl IntoBytes + Immutable + ?Sized), answer: u16) -> Self {
        let mut command = Self::new(OBJECT_DEVICE, METHOD_INVOKE_WRITE);
        command.constant(ATTR_WRITE_CMD, number.into());
        command.input(ATTR_CORE_IN, body.as_bytes());
        if answer != 0 {
            command.out(ATTR_CORE_OUT, answer);
        }
        command
    }

    pub fn attr(&mut self, attr_id: u16, len: u16, data: u64) -> &mut Self {
        self.attrs.push(Attr {
            attr_id,
            len,
            flags: ATTR_F_MANDATORY,
            enum_or_reserved: 0,
            data,
        });
        self
    }

    pub fn input(&mut self, id: u16, bytes: &[u8]) -> &mut Self {
        let mut buffer = vec![0u64; bytes.len().div_ceil(8).max(1)];
        buffer.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        let data = match bytes.len() {
            0..=8 => buffer[0],
            _ => {
                let address = buffer.as_mut_ptr().expose_provenance() as u64;
                self.buffers.push(buffer);
                address
            }
        };
        self.attr(id, bytes.len() as u16, data)
    }

    pub fn u32(&mut self, id: u16, value: u32) -> &mut Self {
        self.input(id, &value.to_ne_bytes())
    }

    pub fn constant(&mut self, id: u16, value: u64) -> &mut Self {
        self.attr(id, 8, value)
    }

    pub fn object(&mut self, id: u16, handle: u64) -> &mut Self {
        self.attr(id, 0, handle)
    }

    pub fn out(&mut self, id: u16, length: u16) -> &mut Self {
        let mut buffer = vec![0u64; usize::from(length).div_ceil(8)];
        let address = buffer.as_mut_ptr().expose_provenance() as u64;
        self.buffers.push(buffer);
        self.attr(id, length, address)
    }

    pub fn driver(&mut self, bytes: &[u8]) -> &mut Self {
        self.input(ATTR_UHW_IN, bytes)
    }

    pub fn find(&mut self, id: u16) -> &mut Attr {
        self.attrs
            .iter_mut()
            .find(|attr| attr.attr_id == id)
            .unwrap()
    }

    pub fn without(&mut self, id: u16) -> &mut Self {
        self.attrs.retain(|attr| attr.attr_id != id);
        self
    }

    /// Executes the command. Returns the resulting attributes, or the errno.
    ///
    /// # Safety
    /// Addresses in attributes and driver data are valid or unmapped, until the new
    /// object is destroyed.
    pub unsafe fn run(&self, context: &Context) -> Result<Vec<Attr>, i32> {
        let mut frame = vec![0u64; MAX_COMMAND / 8];
        let mut header = self.header;
        let bytes = size_of::<IoctlHdr>() + size_of_val(&self.attrs[..]);
        assert!(bytes <= MAX_COMMAND);
        header.num_attrs = header.num_attrs.wrapping_add(self.attrs.len() as u16);
        header.length = header.length.wrapping_add(bytes as u16);
        let buffer = frame.as_mut_bytes();
        buffer[..24].copy_from_slice(header.as_bytes());
        buffer[24..bytes].copy_from_slice(self.attrs.as_bytes());
        let argument = frame.as_mut_ptr().cast();
        // SAFETY: the buffer is longer than any command that is accepted; the caller
        // guarantees the addresses in it.
        let result = unsafe { (context.kernel()).ioctl(context.fd(), RDMA_VERBS_IOCTL, argument) };
        result.map_err(|errno| errno.raw())?;
        // The command succeeded, so the header's number was correct.
        let total = usize::from(header.num_attrs) * size_of::<Attr>();
        let attrs = &frame.as_bytes()[24..24 + total];
        Ok(attrs
            .chunks_exact(size_of::<Attr>())
            .map(|bytes| Attr::read_from_bytes(bytes).unwrap())
            .collect())
    }
}

/// Returns the handle of the object that a command has created.
pub fn created(attrs: &[Attr], id: u16) -> u32 {
    attrs.iter().find(|attr| attr.attr_id == id).unwrap().data as u32
}

/// Returns the structure that a command has written to an output.
pub fn answer<T: FromBytes>(attrs: &[Attr], id: u16) -> T {
    let attr = attrs.iter().find(|attr| attr.attr_id == id).unwrap();
    assert_eq!(usize::from(attr.len), size_of::<T>());
    let from = ptr::with_exposed_provenance::<u8>(attr.data as usize);
    // SAFETY: an output of that length, whose buffer the command still owns.
    let bytes = unsafe { std::slice::from_raw_parts(from, attr.len.into()) };
    T::read_from_bytes(bytes).unwrap()
}

/// Builds the command for a completion queue, without driver data.
pub fn create_cq(cqe: u32) -> Command {
    let mut command = Command::new(OBJECT_CQ, METHOD_CQ_CREATE);
    command
        .object(ATTR_CREATE_CQ_HANDLE, 0)
        .u32(ATTR_CREATE_CQ_CQE, cqe)
        .constant(ATTR_CREATE_CQ_USER_HANDLE, 1)
        .u32(ATTR_CREATE_CQ_COMP_VECTOR, 0)
        .out(ATTR_CREATE_CQ_RESP_CQE, 4)
        .out(ATTR_UHW_OUT, 8);
    command
}

/// Builds the command for a queue pair, without driver data.
pub fn create_qp(kind: u32, receives: u32) -> Command {
    let cap = [4, receives, 1, 1, 0u32];
    let mut command = Command::new(OBJECT_QP, METHOD_QP_CREATE);
    command
        .object(ATTR_CREATE_QP_HANDLE, 0)
        .constant(ATTR_CREATE_QP_USER_HANDLE, 2)
        .constant(ATTR_CREATE_QP_TYPE, kind.into())
        .input(ATTR_CREATE_QP_CAP, cap.as_bytes())
        .out(ATTR_CREATE_QP_RESP_CAP, 20)
        .out(ATTR_CREATE_QP_RESP_QP_NUM, 4)
        .out(ATTR_UHW_OUT, 40);
    command
}

/// Builds the command for a shared receive queue, without driver data.
pub fn create_srq(pd: u32, max_wr: u32) -> Command {
    let mut command = Command::new(OBJECT_SRQ, METHOD_SRQ_CREATE);
    command
        .object(ATTR_CREATE_SRQ_HANDLE, 0)
        .object(ATTR_CREATE_SRQ_PD_HANDLE, pd.into())
        .constant(ATTR_CREATE_SRQ_TYPE, 0)
        .constant(ATTR_CREATE_SRQ_USER_HANDLE, 3)
        .u32(ATTR_CREATE_SRQ_MAX_WR, max_wr)
        .u32(ATTR_CREATE_SRQ_MAX_SGE, 1)
        .u32(ATTR_CREATE_SRQ_LIMIT, 0)
        .out(ATTR_CREATE_SRQ_RESP_MAX_WR, 4)
        .out(ATTR_CREATE_SRQ_RESP_MAX_SGE, 4)
        .out(ATTR_UHW_OUT, 8);
    command
}

/// `struct mlx5_ib_create_cq`.
pub fn cq_driver(entries: u64, records: u64, size: u32, uar: u32) -> Vec<u8> {
    /// `MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX`, in the flags after the size.
    const NAMES_UAR: u64 = 1 << 1 << 48;
    [
        entries.to_ne_bytes(),
        records.to_ne_bytes(),
        (NAMES_UAR | u64::from(size)).to_ne_bytes(),
        u64::from(uar).to_ne_bytes(),
    ]
    .concat()
}

/// `struct mlx5_ib_create_srq`.
pub fn srq_driver(entries: u64, records: u64, user_index: u32) -> Vec<u8> {
    let rest = [0, 0, user_index, 0u32];
    [
        &entries.to_ne_bytes(),
        &records.to_ne_bytes(),
        rest.as_bytes(),
    ]
    .concat()
}

/// `MLX5_QP_FLAG_UAR_PAGE_INDEX`.
pub const NAMES_UAR: u32 = 1 << 10;

/// `struct mlx5_ib_create_qp`, with the number of send blocks, the number of receives, and
/// the logarithm of a receive's size.
pub fn qp_driver(
    entries: u64,
    records: u64,
    sizes: [u32; 3],
    user_index: u32,
    uar: u32,
) -> Vec<u8> {
    let [blocks, receives, shift] = sizes;
    let rest = [
        blocks, receives, shift, NAMES_UAR, user_index, uar, 0, 0, 0, 0,
    ];
    [
        &entries.to_ne_bytes(),
        &records.to_ne_bytes(),
        rest.as_bytes(),
    ]
    .concat()
}

/// Builds the command that destroys an object.
pub fn destroy(object: u16, handle: u32) -> Command {
    let (method, id, room) = match object {
        OBJECT_CQ => (METHOD_CQ_DESTROY, ATTR_DESTROY_CQ_HANDLE, 8),
        OBJECT_QP => (METHOD_QP_DESTROY, ATTR_DESTROY_QP_HANDLE, 4),
        OBJECT_SRQ => (METHOD_SRQ_DESTROY, ATTR_DESTROY_SRQ_HANDLE, 4),
        OBJECT_WQ => (METHOD_WQ_DESTROY, ATTR_DESTROY_WQ_HANDLE, 4),
        OBJECT_RWQ_IND_TBL => (
            METHOD_RWQ_IND_TBL_DESTROY,
            ATTR_DESTROY_RWQ_IND_TBL_HANDLE,
            0,
        ),
        OBJECT_MR => (METHOD_MR_DESTROY, ATTR_DESTROY_MR_HANDLE, 0),
        OBJECT_MW => (METHOD_MW_DESTROY, ATTR_DESTROY_MW_HANDLE, 0),
        OBJECT_AH => (METHOD_AH_DESTROY, ATTR_DESTROY_AH_HANDLE, 0),
        OBJECT_FLOW_MATCHER => (
            METHOD_FLOW_MATCHER_DESTROY,
            ATTR_FLOW_MATCHER_DESTROY_HANDLE,
            0,
        ),
        OBJECT_COUNTERS => (METHOD_COUNTERS_DESTROY, ATTR_DESTROY_COUNTERS_HANDLE, 0),
        OBJECT_FLOW_ACTION => (
            METHOD_FLOW_ACTION_DESTROY,
            ATTR_DESTROY_FLOW_ACTION_HANDLE,
            0,
        ),
        OBJECT_DM => (METHOD_DM_FREE, ATTR_FREE_DM_HANDLE, 0),
        OBJECT_XRCD => (METHOD_XRCD_DESTROY, ATTR_DESTROY_XRCD_HANDLE, 0),
        _ => (METHOD_PD_DESTROY, ATTR_DESTROY_PD_HANDLE, 0),
    };
    let mut command = Command::new(object, method);
    command.object(id, handle.into());
    if room != 0 {
        command.out(1, room);
    }
    command
}

pub fn close(context: &Context, fd: RawFd) {
    // SAFETY: a descriptor of this context that the caller no longer uses.
    unsafe { context.kernel().close(fd) }.unwrap();
}

impl Command {
    /// Returns the data of an attribute: inline, or in its buffer.
    fn data(&mut self, id: u16) -> Option<&mut [u8]> {
        let at = self.attrs.iter().position(|attr| attr.attr_id == id)?;
        let (length, data) = (usize::from(self.attrs[at].len), self.attrs[at].data);
        let mut buffers = self.buffers.iter_mut();
        let found = buffers.find(|buffer| buffer.as_ptr().addr() as u64 == data);
        if length <= 8 {
            // A short output has an address, too.
            let inline = found.is_none().then_some(&mut self.attrs[at].data)?;
            return inline.as_mut_bytes().get_mut(..length);
        }
        let buffer = found?;
        buffer.as_mut_bytes().get_mut(..length)
    }

    /// Changes a byte of an input, at `from` or behind it.
    pub fn set_byte(&mut self, id: u16, from: usize, at: usize, byte: u8) {
        let tail = self.data(id).and_then(|data| data.get_mut(from..));
        let target = tail.and_then(|tail| {
            let length = tail.len().max(1);
            tail.get_mut(at % length)
        });
        if let Some(target) = target {
            *target = byte;
        }
    }

    /// Makes an input shorter.
    pub fn truncate(&mut self, id: u16, length: usize) {
        let Some(data) = self.data(id) else { return };
        let length = length.min(data.len());
        let mut inline = [0; 8];
        if length <= 8 {
            inline[..length].copy_from_slice(&data[..length]);
        }
        let attr = self.find(id);
        attr.len = length as u16;
        if length <= 8 {
            attr.data = u64::from_ne_bytes(inline);
        }
    }
}
