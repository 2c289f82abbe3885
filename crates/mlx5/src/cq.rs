//! Completion queues: the kernel object and its ring.

use std::mem::ManuallyDrop;

use mlx5_abi::{
    CQ_FLAG_CQE_128B_PAD, CQ_FLAG_UAR_PAGE_INDEX, CreateCq, CreateCqResp, ResizeCq, mini_format,
};
use uverbs::driver::DriverInput;
use uverbs::{ContextRef, Cq, CqInit, Udata};
use zerocopy::IntoBytes;

use crate::QueueAllocator;
use crate::cq_ring::CqeFormat;
use crate::ioctl::ids::ATTR_CREATE_CQ_UAR_INDEX;
use crate::qp::flag;
use crate::{Arming, CqeRing, CreateError, DeviceContext};

/// The contents of a mini CQE besides the fields that this crate reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiniFormat {
    /// A hash of the packet's addresses.
    Hash,
    /// The packet's checksum.
    Checksum,
}

/// Format of CQEs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CqOptions {
    /// CQEs of 128 bytes, of which 64 can carry data; otherwise 64 bytes, of which 32 can.
    pub wide: bool,
    /// CQEs may be compressed: fewer bus writes, more processor time.
    pub compression: Option<MiniFormat>,
    /// CQEs of 128 bytes are written whole.
    pub padded: bool,
}

/// A completion queue. The parts are public so that the caller
/// can put each under its own lock or owner.
///
/// The entries' memory is freed after the kernel object was destroyed. If the
/// kernel refuses that (EBUSY while queue pairs use the queue), it is leaked.
#[derive(Debug)]
pub struct CompletionQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Cq<C>,
    /// The entries and the reader of them.
    pub ring: CqeRing,
    /// Arms the queue.
    pub arming: Arming,
}

impl<C: ContextRef> CompletionQueue<C> {
    /// Maximum entries of any device.
    const MAX_ENTRIES: u32 = 1 << 24;

    /// Creates a completion queue of at least `init.cqe` entries in the format
    /// that every device has. Its capacity is `object.cqe()`.
    ///
    /// # Errors
    /// As [`CompletionQueue::create_with`].
    pub fn create(context: &C, device: &DeviceContext, init: &CqInit) -> Result<Self, CreateError> {
        Self::create_with(context, device, init, CqOptions::default(), None)
    }

    /// Creates a completion queue of at least `init.cqe` entries, in memory of `allocator` if
    /// there is one. Its capacity is `object.cqe()`.
    ///
    /// # Errors
    /// [`CreateError::TooLarge`] for 0 or too many entries; those of memory and of CREATE_CQ:
    /// EOPNOTSUPP if the device does not support the format. Nothing is left behind.
    pub fn create_with(
        context: &C,
        device: &DeviceContext,
        init: &CqInit,
        options: CqOptions,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        let format = CqeFormat {
            shift: if options.wide { 7 } else { 6 },
            compresses: options.compression.is_some(),
        };
        let entries = Self::entries(init.cqe)?;
        let ring = CqeRing::new(entries.ilog2(), format, allocator)?;
        let page = device.cq_uar_page();
        let short_page = page.and_then(|page| u16::try_from(page).ok());
        let request = CreateCq {
            buf_addr: ring.memory().address(),
            db_addr: ring.records().address(),
            cqe_size: format.bytes() as u32,
            cqe_comp_en: format.compresses.into(),
            cqe_comp_res_format: match options.compression {
                None => 0,
                Some(MiniFormat::Hash) => mini_format::HASH,
                Some(MiniFormat::Checksum) => mini_format::CSUM,
            },
            flags: (flag(options.padded, CQ_FLAG_CQE_128B_PAD.into())
                | flag(short_page.is_some(), CQ_FLAG_UAR_PAGE_INDEX.into()))
                as u16,
            uar_page_index: short_page.unwrap_or_default(),
            ..CreateCq::default()
        };
        let mut answer = CreateCqResp::default();
        let init = CqInit {
            cqe: entries - 1,
            driver_uar: page
                .filter(|_| short_page.is_none())
                .map(|value| DriverInput {
                    attr_id: ATTR_CREATE_CQ_UAR_INDEX,
                    value,
                }),
            ..*init
        };
        // SAFETY: the addresses are those of the ring's `entries` entries and of its two
        // doorbell records. Both are held for the object.
        let udata = unsafe { Udata::new(request.as_bytes(), answer.as_mut_bytes()) };
        let object = Cq::create(context, &init, udata)?;
        ring.hold_for(&object.existence());
        if object.cqe() != entries - 1 {
            return Err(CreateError::BadAnswer {
                what: "the entries of a completion queue",
            });
        }
        Ok(Self {
            arming: Arming::new(&ring, answer.cqn),
            object,
            ring,
        })
    }
    /// The number of entries for a request of `cqe`: one more, as in the stock provider,
    /// rounded up to a power of two, which the driver requires.
    fn entries(cqe: u32) -> Result<u32, CreateError> {
        (cqe != 0)
            .then(|| cqe.checked_add(1)?.checked_next_power_of_two())
            .flatten()
            .filter(|entries| *entries <= Self::MAX_ENTRIES)
            .ok_or(CreateError::TooLarge { what: "cqe" })
    }

    /// Resizes a queue to at least `cqe` entries. Unread completions stay, in
    /// order. Returns the capacity.
    ///
    /// The caller has exclusive access to `ring` until this returns; [`crate::EmptyCheck`]
    /// may be used meanwhile. The old entries exist until the kernel has answered; then
    /// their addresses stay readable, as zeros.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] if `ring` is not the object's,
    /// [`CreateError::TooLarge`] for 0 or too many entries, and those of memory and of
    /// RESIZE_CQ (EINVAL if the unread completions do not fit): nothing has changed.
    /// [`CreateError::BadAnswer`]: the queue has the new size, but completions may be
    /// missing.
    pub fn resize(
        object: &Cq<C>,
        ring: &mut CqeRing,
        cqe: u32,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<u32, CreateError> {
        let entries = Self::entries(cqe)?;
        let existence = object.existence();
        if !ring.memory().is_held_for(&existence) {
            return Err(CreateError::Unsupported {
                what: "resizing a completion queue with another's ring",
            });
        }
        // The driver ignores a resize to the same size.
        if entries == ring.capacity() {
            return Ok(entries - 1);
        }
        let log2 = entries.ilog2();
        // Leaked if a panic ends the command: the device may write to it already.
        let memory = ManuallyDrop::new(CqeRing::new_entries(log2, ring.format(), allocator)?);
        let request = ResizeCq {
            buf_addr: memory.address(),
            cqe_size: ring.format().bytes() as u16,
            ..ResizeCq::default()
        };
        // SAFETY: the address is that of `entries` entries, which are held for the object if
        // the driver accepts them.
        let udata = unsafe { Udata::new(request.as_bytes(), &mut []) };
        let resized = (ring.suspend())
            .and_then(|()| Ok(object.resize(entries - 1, udata)?))
            .inspect_err(|_| ring.publish());
        let memory = ManuallyDrop::into_inner(memory);
        let answered = resized?;
        memory.hold_for(&existence);
        if !ring.move_to(memory, log2) || answered != entries - 1 {
            return Err(CreateError::BadAnswer {
                what: "the resize CQE of a completion queue",
            });
        }
        Ok(answered)
    }
}
