//! Completion queues: creation, resizing, destruction.

use std::mem::offset_of;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use mlx5_abi::{
    CQ_FLAG_CQE_128B_PAD, CQ_FLAG_REAL_TIME_TS, CQ_FLAG_UAR_PAGE_INDEX, CreateCq, CreateCqResp,
    mini_format,
};
use softhca::command::opcode as op;
use softhca::layout::{PAGE_LIST, cqc, header};
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::write::{DestroyCqResp, ResizeCq, ResizeCqResp};

use crate::driver::cause::{
    Class, Result, at_most, between, invalid, is, known_bits, refuse, require, unsupported,
};
use crate::driver::command::{Input, NUMBER};
use crate::driver::descriptors::ObjectChange;
use crate::driver::event::EventCounter;
use crate::driver::object::{Cq, Created, Events, Object, ObjectData, Summary};
use crate::driver::queues::{QueueAddresses, check_driver_length};
use crate::driver::request::Request;
use crate::driver::state::{State, VECTORS};

/// Maximum number of entries of a completion queue, as a logarithm.
const MAX_LOG_CQ_SIZE: u32 = 22;

/// Flags of a completion queue.
const TIMESTAMPS: u32 = 1 << 0;
const IGNORE_OVERRUN: u32 = 1 << 1;

/// A command that creates a completion queue.
struct CqRequest {
    driver: CreateCq,
    /// Size of an entry, and format of compressed entries, as the device encodes them.
    entry_size: u32,
    format: u32,
    uar: u32,
    /// Interrupt vector.
    vector: u32,
    log_size: u32,
    flags: u32,
}

impl CqRequest {
    fn addresses(&self) -> QueueAddresses {
        QueueAddresses {
            entries: self.driver.buf_addr,
            records: self.driver.db_addr,
        }
    }

    /// Returns the length of the queue's memory.
    fn bytes(&self) -> u64 {
        u64::from(self.driver.cqe_size) << self.log_size
    }

    /// Returns the number of entries that the program learns.
    fn cqe(&self) -> u32 {
        (1 << self.log_size) - 1
    }

    fn ignores_overrun(&self) -> bool {
        self.flags & IGNORE_OVERRUN != 0
    }
}

/// Checks the requested number of entries, and returns the actual one as a logarithm. As in the
/// driver: one more than requested, rounded up to a power of two.
fn log_entries(requested: u32) -> Result<u32> {
    between("cqe", requested, (1, (1 << MAX_LOG_CQ_SIZE) - 1))?;
    Ok((requested + 1).next_power_of_two().ilog2())
}

impl ObjectData for Cq {
    fn kind(&self) -> u16 {
        OBJECT_CQ
    }

    fn creation(&self) -> Option<ObjectChange> {
        Some(ObjectChange::CompletionQueueCreated {
            number: self.number,
            user_handle: self.events.user_handle,
            ignores_overrun: self.ignores_overrun,
        })
    }

    fn destruction(&self) -> Option<ObjectChange> {
        Some(ObjectChange::CompletionQueueDestroyed {
            user_handle: self.events.user_handle,
            events: self.completions.load(Ordering::Relaxed),
        })
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "completion queue",
            number: self.number,
            length: 0,
        }
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn events(&self) -> Option<&Events> {
        Some(&self.events)
    }

    fn represents(&self, object: Created) -> bool {
        object == Created::new(op::CREATE_CQ, self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_CQ, self.number)?;
        state.watch.remove_arm(self.number);
        Ok(())
    }

    fn release(&self, _: &mut State, _: RawFd, _: u32) {
        if let Some(channel) = &self.channel {
            channel.forget(&self.completions);
        }
    }

    fn report(&self, request: &mut Request) {
        let counts = DestroyCqResp {
            comp_events_reported: self.completions.load(Ordering::Relaxed),
            async_events_reported: self.events.reported.load(Ordering::Relaxed),
        };
        request.answer(ATTR_DESTROY_CQ_RESP, &counts);
    }
}

impl State {
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_cq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// The answer ends with the number.
        const ANSWER: usize = offset_of!(CreateCqResp, reserved);
        let parsed = self.parse_cq(fd, request, ANSWER)?;
        let channel = self.event_file(request, ATTR_CREATE_CQ_COMP_CHANNEL);
        let user_handle = request.value(ATTR_CREATE_CQ_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_CQ_EVENT_FD);
        let input = self.encode_cq(fd, &parsed)?;
        let addresses = parsed.addresses();
        let ranges = addresses.ranges(parsed.bytes())?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        // SAFETY: the doorbell records stay valid until the queue is destroyed,
        // which also ends watching them.
        unsafe { self.watch.add_arm(number, addresses.records) };
        let cq = Cq {
            number,
            cqe: parsed.cqe(),
            entry: parsed.driver.cqe_size,
            entry_size: parsed.entry_size,
            real_time: parsed.driver.flags & CQ_FLAG_REAL_TIME_TS != 0,
            ignores_overrun: parsed.ignores_overrun(),
            channel,
            completions: EventCounter::default(),
            events,
        };
        let handle = self.objects.insert(Object::new(fd, cq).with_memory(ranges));
        request.queue_created(user_handle);
        request.set_handle(ATTR_CREATE_CQ_HANDLE, handle);
        request.answer(ATTR_CREATE_CQ_RESP_CQE, &parsed.cqe());
        let answer = CreateCqResp {
            cqn: number,
            reserved: 0,
        };
        request.driver_answer_until(&answer, ANSWER);
        Ok(())
    }

    /// Reads the attributes of a new completion queue and checks them. The driver's answer has
    /// `answer` bytes.
    fn parse_cq(&self, fd: RawFd, request: &Request, answer: usize) -> Result<CqRequest> {
        /// The first version of the structure.
        const MIN_LENGTH: usize = offset_of!(CreateCq, flags);
        const KNOWN: u16 = CQ_FLAG_CQE_128B_PAD | CQ_FLAG_UAR_PAGE_INDEX | CQ_FLAG_REAL_TIME_TS;
        check_driver_length(request, MIN_LENGTH)?;
        request.check_driver_output(answer)?;
        let driver: CreateCq = request.driver();
        let (entry, flags) = (driver.cqe_size, driver.flags);
        known_bits("driver flags", flags, KNOWN.into())?;
        require(
            matches!(entry, 64 | 128),
            "cqe_size",
            entry,
            Rule::OneOf(&[64, 128]),
        )?;
        is("reserved0", driver.reserved0, 0)?;
        is("reserved1", driver.reserved1, 0)?;
        let uar = match flags & CQ_FLAG_UAR_PAGE_INDEX != 0 {
            true => self.check_uar(fd, driver.uar_page_index.into())?,
            false => self.default_uar(fd)?,
        };
        let format = match driver.cqe_comp_res_format {
            _ if driver.cqe_comp_en != 1 => 0,
            mini_format::HASH => 0,
            mini_format::CSUM => 1,
            format @ mini_format::CSUM_STRIDX => {
                return unsupported("cqe_comp_res_format", format, Rule::Supported);
            }
            format => return invalid("cqe_comp_res_format", format, Rule::Known),
        };
        let entry_size = match (entry, flags & CQ_FLAG_CQE_128B_PAD != 0) {
            (64, false) => 0,
            (128, false) => 1,
            (128, true) => 2,
            _ => return unsupported("cqe_size with padding", entry, Rule::Is(128)),
        };
        let vector: u32 = request.value(ATTR_CREATE_CQ_COMP_VECTOR)?;
        at_most("comp_vector", vector, u64::from(VECTORS) - 1)?;
        let log_size = log_entries(request.value(ATTR_CREATE_CQ_CQE)?)?;
        let flags = request.flags(ATTR_CREATE_CQ_FLAGS, TIMESTAMPS | IGNORE_OVERRUN)?;
        Ok(CqRequest {
            driver,
            entry_size,
            format,
            uar,
            vector,
            log_size,
            flags,
        })
    }

    /// Encodes the command that creates a completion queue.
    fn encode_cq(&self, fd: RawFd, parsed: &CqRequest) -> Result<Input> {
        let addresses = parsed.addresses();
        let is_compressed = parsed.driver.cqe_comp_en == 1;
        Input::new(op::CREATE_CQ, PAGE_LIST + 8)
            .by(self.uid(fd))
            .fields(
                cqc::AT,
                [
                    (cqc::CQE_SZ, parsed.entry_size),
                    (cqc::OI, parsed.ignores_overrun().into()),
                    (cqc::CQE_COMPRESSION_EN, is_compressed.into()),
                    (cqc::MINI_CQE_RES_FORMAT, parsed.format),
                    (cqc::LOG_CQ_SIZE, parsed.log_size),
                    (cqc::UAR_PAGE, parsed.uar),
                    (cqc::C_EQN, self.event_queue(parsed.vector)),
                ],
            )
            .long(cqc::AT + cqc::DBR_ADDR, addresses.records)
            .pages(
                (cqc::LOG_PAGE_SIZE.at(cqc::AT), cqc::PAGE_OFFSET.at(cqc::AT)),
                (addresses.entries, parsed.bytes()),
            )
    }

    /// Moves the completion queue to another buffer.
    ///
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn resize_cq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: ResizeCq = request.core()?;
        let cq = self.objects.cq(fd, requested.cq_handle)?;
        let log_size = log_entries(requested.cqe)?;
        let cqe = (1 << log_size) - 1;
        if cqe != cq.cqe {
            let driver: mlx5_abi::ResizeCq = request.driver();
            let entries = driver.buf_addr;
            match request.driver_length() {
                0 => return refuse(Class::Fault, "driver input", 0u32, Rule::Present),
                _ => check_driver_length(request, size_of_val(&driver))?,
            }
            let (number, entry, entry_size) = (cq.number, cq.entry, cq.entry_size);
            // The size of an entry must not change.
            is("cqe_size", driver.cqe_size, entry.into())?;
            is("reserved0", driver.reserved0, 0)?;
            is("reserved1", driver.reserved1, 0)?;
            let bytes = u64::from(entry) << log_size;
            let input = Input::new(op::MODIFY_CQ, PAGE_LIST + 8)
                .set(header::OP_MOD, cqc::OP_MOD_RESIZE)
                .set(NUMBER, number)
                .fields(
                    cqc::AT,
                    [(cqc::CQE_SZ, entry_size), (cqc::LOG_CQ_SIZE, log_size)],
                )
                .pages(
                    (cqc::LOG_PAGE_SIZE.at(cqc::AT), cqc::PAGE_OFFSET.at(cqc::AT)),
                    (entries, bytes),
                )?;
            // SAFETY: guaranteed by the caller.
            unsafe { self.create_with_memory(&[(entries, bytes)], &input) }?;
            if let Some(old) = self
                .objects
                .replace_memory(requested.cq_handle, (entries, bytes))
            {
                self.hca.platform_mut().revoke(old.0, old.1);
            }
            self.objects.cq_mut(fd, requested.cq_handle)?.cqe = cqe;
        }
        request.core_answer(&ResizeCqResp { cqe, reserved: 0 });
        Ok(())
    }
}
