//! Commands of `RDMA_VERBS_IOCTL` in the program's memory, for what follows its objects on
//! devices of the host, too.

use std::ffi::c_void;

use uverbs::abi::ioctl::{Attr, IoctlHdr};
use zerocopy::FromBytes;

use crate::hooks;

/// Maximum length of a command: a page.
const MAX_COMMAND: usize = 4096;
/// Inputs of up to this many bytes are in the attribute itself.
const MAX_INLINE: usize = 8;

/// A command, in the program's memory.
pub(crate) struct Request {
    pub(crate) object: u16,
    pub(crate) method: u16,
    address: usize,
    attributes: Vec<Attr>,
}

impl Request {
    pub(crate) fn read(argument: *mut c_void) -> Option<Self> {
        let address = argument.expose_provenance();
        // SAFETY: all members may have any value.
        let header = unsafe { hooks::read::<IoctlHdr>(address)?.assume_init() };
        let count = usize::from(header.num_attrs);
        if count * size_of::<Attr>() > MAX_COMMAND {
            return None;
        }
        let mut request = Self {
            object: header.object_id,
            method: header.method_id,
            address: address.checked_add(size_of::<IoctlHdr>())?,
            attributes: vec![Attr::default(); count],
        };
        request.read_attributes().then_some(request)
    }

    /// Reads the attributes, into which a command writes handles.
    pub(crate) fn read_attributes(&mut self) -> bool {
        let mut address = self.address;
        self.attributes.iter_mut().all(|attribute| {
            let read = hooks::read::<Attr>(address);
            address += size_of::<Attr>();
            // SAFETY: all members may have any value.
            read.map(|it| *attribute = unsafe { it.assume_init() })
                .is_some()
        })
    }

    fn attribute(&self, id: u16) -> Option<&Attr> {
        self.attributes.iter().find(|it| it.attr_id == id)
    }

    /// Returns an input; the rest of a shorter one is zero.
    pub(crate) fn input<T: FromBytes>(&self, id: u16) -> Option<T> {
        let attribute = self.attribute(id)?;
        let length = usize::from(attribute.len);
        match length <= MAX_INLINE {
            true => of_bytes(attribute.data.to_ne_bytes().to_vec()),
            false => of_bytes(hooks::read_bytes(
                attribute.data,
                length.min(size_of::<T>()),
            )?),
        }
    }

    /// Returns an output.
    pub(crate) fn output<T: FromBytes>(&self, id: u16) -> Option<T> {
        let attribute = self.attribute(id)?;
        let length = usize::from(attribute.len).min(size_of::<T>());
        of_bytes(hooks::read_bytes(attribute.data, length)?)
    }

    /// Returns a handle.
    pub(crate) fn handle(&self, id: u16) -> Option<u32> {
        self.attribute(id).map(|it| it.data as u32)
    }
}

/// Returns a value of bytes, which are followed by zeros.
fn of_bytes<T: FromBytes>(mut bytes: Vec<u8>) -> Option<T> {
    bytes.resize(size_of::<T>(), 0);
    T::read_from_bytes(&bytes).ok()
}
