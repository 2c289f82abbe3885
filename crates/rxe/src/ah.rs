//! Address handles.

use uverbs::{Ah, AhAttr, ContextRef, PdHandle};

use crate::CreateError;
use crate::abi::{self, CreateAhResp};

/// An address handle. Datagrams name it by its number.
#[derive(Debug)]
pub struct AddressHandle<C: ContextRef> {
    /// The kernel object.
    pub object: Ah<C>,
    /// The number in a send work request; never 0.
    pub ah_num: u32,
}

impl<C: ContextRef> AddressHandle<C> {
    /// Creates an address handle.
    ///
    /// # Errors
    /// Those of CREATE_AH; [`CreateError::NoAddressHandleNumber`] on old
    /// kernels.
    pub fn create(
        context: &C,
        pd: PdHandle,
        attr: &AhAttr,
        user_handle: u64,
    ) -> Result<Self, CreateError> {
        let mut response = CreateAhResp::default();
        let udata = abi::response(&mut response);
        let object = Ah::create(context, pd, attr, user_handle, udata)?;
        match response.ah_num {
            0 => Err(CreateError::NoAddressHandleNumber),
            ah_num => Ok(Self { object, ah_num }),
        }
    }
}
