//! What the driver and this side agree on when a device is opened, and the
//! device's doorbell registers.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use ring::{BlueFlame, Mapping, Watched};
use uverbs::{Context, ContextInfo, ContextRef, Mlx5Uar, Udata};

use crate::Clock;
use crate::CreateError;
use crate::abi::{AllocUcontextReq, AllocUcontextResp, HAS_NULL_KEY, LIB_CAP_4K_UAR, Plain};

/// Bytes of a UAR, the device's unit of registers.
const UAR: usize = 4096;
/// Where its two BlueFlame registers begin.
const REGISTERS: usize = 0x800;
/// Where completion queues are armed.
const ARM: usize = 0x20;
/// Registers of a UAR that queue pairs may have.
const PER_UAR: u32 = 2;
/// Registers of a UAR as the driver numbers them in its answers.
const NUMBERED_PER_UAR: u32 = 4;

/// Registers that are asked for, and how many of them only one queue pair
/// each gets: what the C provider asks for.
const WANTED_REGISTERS: u32 = 16;
const WANTED_EXCLUSIVE: u32 = 4;
/// More than this no driver gives.
const MOST_REGISTERS: u32 = 512;

/// Completions name queue pairs by user index.
const CQE_VERSION: u8 = 1;

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a send work request.
    pub max_send_entry: usize,
    /// Bytes of a receive.
    pub max_recv_entry: usize,
    /// Blocks of a send queue.
    pub max_send_blocks: u32,
    /// Receives of a receive queue.
    pub max_recv_wr: u32,
    /// Receives of a shared receive queue.
    pub max_srq_wr: u32,
    /// Ports.
    pub ports: u32,
}

/// An opened mlx5 device: what its driver answered, its registers, and the
/// numbers that its queue pairs are known by.
///
/// Any thread may use it; it locks, and is for the control path.
#[derive(Debug)]
pub struct DeviceContext {
    /// What the device can do.
    pub limits: Limits,
    /// Registers that there are.
    registers: u32,
    /// Bytes of a register, of two halves; 0: no BlueFlame.
    register_size: usize,
    uars_per_page: u32,
    pages: Mutex<Vec<Option<Arc<Page>>>>,
    indices: Arc<Indices>,
    /// Where completion queues are armed.
    arm: (BlueFlame, Arc<Page>),
    /// The device's time.
    clock: Clock,
    /// Reads give nothing, and writes go nowhere, with this key.
    null_key: Option<u32>,
}

/// Maps `size` bytes of what mlx5_ib has under a command (`enum
/// mlx5_ib_mmap_cmd`) and an index: in units of pages, the index's low half,
/// the command, the index's high half.
pub(crate) fn map_command(
    context: &Context,
    command: u8,
    index: u16,
    size: usize,
) -> Result<Mapping, CreateError> {
    map_by(context, command, index, |fd, offset| {
        Mapping::new(fd, offset, size)
    })
}

/// As [`map_command`], of a page that is read only.
pub(crate) fn watch_command(
    context: &Context,
    command: u8,
    index: u16,
) -> Result<Watched, CreateError> {
    map_by(context, command, index, |fd, offset| {
        Watched::new(fd, offset, Mapping::page_size())
    })
}

fn map_by<T>(
    context: &Context,
    command: u8,
    index: u16,
    map: impl FnOnce(BorrowedFd<'_>, u64) -> std::io::Result<T>,
) -> Result<T, CreateError> {
    let [high, low] = index.to_be_bytes().map(u64::from);
    let pages = high << 16 | u64::from(command) << 8 | low;
    let offset = pages * Mapping::page_size() as u64;
    // SAFETY: the context keeps its descriptor open for the length of the call.
    let fd = unsafe { BorrowedFd::borrow_raw(context.fd()) };
    map(fd, offset).map_err(|error| CreateError::Map {
        page: pages as u32,
        error,
    })
}

impl DeviceContext {
    /// Makes the kernel's context for an open device, as
    /// [`Context::get_context`] does, and maps the first registers.
    ///
    /// # Errors
    /// Those of GET_CONTEXT and of mapping; [`CreateError::Unsupported`] of a
    /// device whose completions do not carry user indices (before
    /// ConnectX-4); [`CreateError::BadAnswer`].
    pub fn open(context: &Context) -> Result<(ContextInfo, Self), CreateError> {
        let request = AllocUcontextReq {
            total_num_bfregs: WANTED_REGISTERS,
            num_low_latency_bfregs: WANTED_EXCLUSIVE,
            max_cqe_version: CQE_VERSION,
            lib_caps: LIB_CAP_4K_UAR,
            ..AllocUcontextReq::default()
        };
        let mut answer = AllocUcontextResp::default();
        // SAFETY: the request names no address.
        let udata = unsafe { Udata::new(request.bytes(), answer.bytes_mut()) };
        let info = context.get_context(udata)?;
        Ok((info, Self::from_answer(context, &answer)?))
    }

    fn from_answer(context: &Context, answer: &AllocUcontextResp) -> Result<Self, CreateError> {
        let bad = |what| CreateError::BadAnswer { what };
        if answer.cqe_version != CQE_VERSION {
            return Err(CreateError::Unsupported {
                what: "a device whose completions carry no user index",
            });
        }
        // Kernels before 4K UARs leave this out.
        let uars_per_page = answer.num_uars_per_page.max(1);
        if uars_per_page as usize * UAR > Mapping::page_size() {
            return Err(bad("more UARs in a page than fit"));
        }
        if !(1..=MOST_REGISTERS).contains(&answer.tot_bfregs) {
            return Err(bad("the number of registers"));
        }
        let register_size = answer.bf_reg_size as usize;
        // The UAR's second half has four of them.
        if register_size > (UAR - REGISTERS) / 4
            || !register_size.is_multiple_of(2 * BlueFlame::BLOCK)
        {
            return Err(bad("the size of a register"));
        }
        if answer.max_sq_desc_sz < 64 || answer.max_rq_desc_sz < 16 {
            return Err(bad("the size of a work request"));
        }
        let first = Arc::new(Page::map(context, 0)?);
        // SAFETY: in the first UAR of the page, which is kept beside it.
        // Several queues are armed through it.
        let arm = unsafe { BlueFlame::new(first.mapping.as_ptr().add(ARM), 0, true) };
        Ok(Self {
            limits: Limits {
                max_send_entry: answer.max_sq_desc_sz.into(),
                max_recv_entry: answer.max_rq_desc_sz.into(),
                max_send_blocks: answer.max_send_wqebb,
                max_recv_wr: answer.max_recv_wr,
                max_srq_wr: answer.max_srq_recv_wr,
                ports: answer.num_ports.into(),
            },
            registers: answer.tot_bfregs,
            register_size,
            uars_per_page,
            pages: Mutex::new(vec![Some(Arc::clone(&first))]),
            indices: Arc::default(),
            arm: (arm, first),
            clock: Clock::of(context, answer),
            null_key: (answer.comp_mask & HAS_NULL_KEY != 0).then_some(answer.dump_fill_mkey),
        })
    }

    /// The local key of a region of all addresses in which nothing is: what is
    /// read there is anything, what is written there is gone. None of a device
    /// that has none.
    pub fn null_key(&self) -> Option<u32> {
        self.null_key
    }

    /// The device's time.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Where completion queues are armed.
    #[inline(always)]
    pub fn arm_register(&self) -> &BlueFlame {
        &self.arm.0
    }

    /// A user index that nobody else has.
    pub(crate) fn user_index(&self) -> Result<UserIndex, CreateError> {
        UserIndex::take(&self.indices)
    }

    /// The register that the driver has given a queue pair, by its number.
    pub(crate) fn register(&self, context: &Context, number: u32) -> Result<Register, CreateError> {
        let bad = || CreateError::BadAnswer {
            what: "the number of a queue pair's register",
        };
        let (uar, which) = (number / NUMBERED_PER_UAR, number % NUMBERED_PER_UAR);
        if which >= PER_UAR || uar * PER_UAR + which >= self.registers {
            return Err(bad());
        }
        // Under the lock all the while: a page is mapped once.
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let page = uar / self.uars_per_page;
        let index = page as usize;
        if pages.len() <= index {
            pages.resize(index + 1, None);
        }
        let page = match &mut pages[index] {
            Some(page) => Arc::clone(page),
            place => {
                let page = Arc::new(Page::map(context, page)?);
                *place = Some(Arc::clone(&page));
                page
            }
        };
        let in_page = (uar % self.uars_per_page) as usize;
        let position = in_page * PER_UAR as usize + which as usize;
        // The first register of all takes doorbells only.
        let half = match number {
            0 => 0,
            _ => self.register_size / 2,
        };
        let exclusive = uar * PER_UAR + which >= self.registers.saturating_sub(WANTED_EXCLUSIVE);
        let at = page.register(position, || {
            let offset = in_page * UAR + REGISTERS + which as usize * self.register_size;
            // SAFETY: in the page, by the bounds that `from_answer` checked,
            // and kept with it. An exclusive register is one queue pair's at a
            // time, whose posts are made one at a time.
            unsafe { BlueFlame::new(page.mapping.as_ptr().add(offset), half, !exclusive) }
        })?;
        Ok(Register { at, _page: page })
    }
}

/// A register of a thread domain's own: it takes whole entries, and what is
/// posted through it takes no lock.
///
/// It is destroyed after the queue pairs that were made with it: the kernel
/// refuses before.
#[derive(Debug)]
pub struct OwnRegister<C: ContextRef> {
    register: Register,
    uar: Mlx5Uar<C>,
}

impl<C: ContextRef> OwnRegister<C> {
    /// Allocates a page of registers, of which one is used.
    ///
    /// # Errors
    /// Those of UAR_OBJ_ALLOC and of mapping;
    /// [`CreateError::Unsupported`] of a device without BlueFlame.
    pub fn allocate(context: &C, device: &DeviceContext) -> Result<Self, CreateError> {
        if device.register_size == 0 {
            return Err(CreateError::Unsupported {
                what: "a register of one's own on a device without BlueFlame",
            });
        }
        let uar = Mlx5Uar::alloc(context)?;
        let place = uar.place();
        let length = place.mmap_length as usize;
        // What was asked about registers holds for these too.
        if length < UAR || length > Mapping::page_size() {
            return Err(CreateError::BadAnswer {
                what: "the length of a page of registers",
            });
        }
        let page = Page::map_at(context, place.mmap_offset, place.page_id)?;
        let page = Arc::new(page);
        let half = device.register_size / 2;
        // SAFETY: in the first UAR of the page, by the bounds that
        // `DeviceContext::open` checked, and kept with it. Those who post
        // through it do so one at a time: that is what a thread domain is for.
        let make = || unsafe { BlueFlame::new(page.mapping.as_ptr().add(REGISTERS), half, false) };
        let at = page.register(0, make)?;
        Ok(Self {
            register: Register { at, _page: page },
            uar,
        })
    }

    /// The number by which queue pairs are made to use it.
    pub(crate) fn page_id(&self) -> u32 {
        self.uar.place().page_id
    }

    pub(crate) fn register(&self) -> Register {
        self.register.clone()
    }

    /// Gives it back to the kernel.
    ///
    /// # Errors
    /// Those of UAR_OBJ_DESTROY; it is as it was.
    pub fn destroy(self) -> Result<(), (Self, uverbs::Error)> {
        let Self { register, uar } = self;
        uar.destroy()
            .map_err(|(uar, error)| (Self { register, uar }, error))
    }
}

/// A mapped page of registers.
#[derive(Debug)]
struct Page {
    mapping: Mapping,
    /// Made when first asked for, and kept: a register's halves are in turn
    /// whoever writes to it.
    registers: [std::sync::OnceLock<BlueFlame>; Self::MOST],
}

// SAFETY: the mapping is written to through the registers only.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Registers of a page at most: 16 UARs in 64 KiB.
    const MOST: usize = 32;

    fn map(context: &Context, page: u32) -> Result<Self, CreateError> {
        // Command 0, MLX5_IB_MMAP_REGULAR_PAGE, in the bits above the index.
        let size = Mapping::page_size() as u64;
        Self::map_at(context, u64::from(page) * size, page)
    }

    /// Maps from an offset of the command descriptor; `page` is for the error.
    fn map_at(context: &Context, offset: u64, page: u32) -> Result<Self, CreateError> {
        // SAFETY: the context keeps its descriptor open for the length of the
        // call.
        let fd = unsafe { BorrowedFd::borrow_raw(context.fd()) };
        let mapping = Mapping::new(fd, offset, Mapping::page_size())
            .map_err(|error| CreateError::Map { page, error })?;
        Ok(Self {
            mapping,
            registers: Default::default(),
        })
    }

    fn register(
        &self,
        position: usize,
        make: impl FnOnce() -> BlueFlame,
    ) -> Result<NonNull<BlueFlame>, CreateError> {
        let place = self.registers.get(position);
        let place = place.ok_or(CreateError::BadAnswer {
            what: "more UARs in a page than fit",
        })?;
        Ok(NonNull::from(place.get_or_init(make)))
    }
}

/// A register, and the page that it is in.
#[derive(Clone, Debug)]
pub(crate) struct Register {
    /// One of the page's.
    at: NonNull<BlueFlame>,
    _page: Arc<Page>,
}

// SAFETY: it leads to what any thread may use, as it may the page.
unsafe impl Send for Register {}
// SAFETY: as above.
unsafe impl Sync for Register {}

impl Register {
    #[inline(always)]
    pub(crate) fn get(&self) -> &BlueFlame {
        // SAFETY: it was made before this, and stays where it is, and as it is,
        // for as long as the page, of which this has a share.
        unsafe { self.at.as_ref() }
    }
}

/// The numbers that are taken, as bits.
#[derive(Debug, Default)]
struct Indices(Mutex<Vec<u64>>);

/// A number by which completions name a queue pair; given back when dropped.
#[derive(Debug)]
pub(crate) struct UserIndex {
    indices: Arc<Indices>,
    index: u32,
}

impl UserIndex {
    /// One more than the largest: 24 bits, of which the last number means none.
    const END: usize = 0xff_ffff;

    fn take(indices: &Arc<Indices>) -> Result<Self, CreateError> {
        let mut words = indices.0.lock().unwrap_or_else(PoisonError::into_inner);
        let word = words.iter().position(|word| *word != u64::MAX);
        let word = word.unwrap_or(words.len());
        if word == words.len() {
            words.try_reserve(1).map_err(|_| CreateError::NoMemory)?;
            words.push(0);
        }
        let bit = words[word].trailing_ones();
        let index = word * 64 + bit as usize;
        if index >= Self::END {
            return Err(CreateError::NoMemory);
        }
        words[word] |= 1 << bit;
        Ok(Self {
            indices: Arc::clone(indices),
            index: index as u32,
        })
    }

    pub(crate) fn get(&self) -> u32 {
        self.index
    }
}

impl Drop for UserIndex {
    fn drop(&mut self) {
        let mut words = (self.indices.0.lock()).unwrap_or_else(PoisonError::into_inner);
        if let Some(word) = words.get_mut(self.index as usize / 64) {
            *word &= !(1 << (self.index % 64));
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Registers in ordinary memory, and user indices without a device.

    use std::ptr::NonNull;

    use super::*;

    impl UserIndex {
        /// One of numbers of its own.
        pub(crate) fn alone(index: u32) -> Self {
            Self {
                indices: Arc::default(),
                index,
            }
        }
    }

    impl Register {
        /// In ordinary memory, which is returned.
        pub(crate) fn in_memory(half: usize) -> (Self, NonNull<u64>) {
            let mapping = Mapping::anonymous(UAR).unwrap();
            let at = mapping.as_ptr();
            let page = Arc::new(Page {
                mapping,
                registers: Default::default(),
            });
            // SAFETY: in the page, which is kept beside it.
            let make = || unsafe { BlueFlame::new(at, half, false) };
            let register = page.register(0, make).unwrap();
            let made = Self {
                at: register,
                _page: page,
            };
            (made, at.cast())
        }
    }

    #[test]
    fn numbers_are_given_back() {
        let indices = Arc::default();
        let take = || UserIndex::take(&indices).unwrap();
        let mut all: Vec<_> = (0..130).map(|_| take()).collect();
        assert!(all.iter().enumerate().all(|(i, n)| n.get() == i as u32));
        drop(all.remove(70));
        drop(all.remove(3));
        let three = take();
        let seventy = take();
        assert_eq!((three.get(), seventy.get()), (3, 70));
    }
}
