//! Counters of flows: an object has one counter of the device, which counts packets and bytes.
//! The first flow that uses it says which of the object's values are packets, and which bytes
//! (`mlx5_ib_read_counters`, `mlx5_ib_flow_counters_set_data`).

use std::mem::offset_of;
use std::os::fd::RawFd;

use mlx5_abi::{CreateFlow, FlowCountersData, FlowCountersDesc};
use roce::bits::get64;
use softhca::command::opcode as op;
use softhca::layout::flow;
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::cause::{Class, Result, at_most, invalid, memory, require, require_support};
use crate::driver::command::{Input, make, run};
use crate::driver::data::Counters;
use crate::driver::object::{Object, ObjectData, Summary};
use crate::driver::request::Request;
use crate::driver::state::State;
use crate::user::copy_in;

/// `IB_UVERBS_READ_COUNTERS_PREFER_CACHED`.
const PREFER_CACHED: u32 = 1 << 0;
/// Packets and bytes (`enum ib_counters_description`).
const DESCRIPTIONS: u32 = 2;
/// Length of the device's answer with both counts.
const ANSWER: usize = flow::FLOW_STATISTICS + 8 * DESCRIPTIONS as usize;
/// Bytes of the assignment of packets or bytes to a value, and the maximum number of them.
const POINT: usize = size_of::<FlowCountersDesc>();
const MAX_POINTS: u32 = u16::MAX as u32 / POINT as u32;

/// The description of counters that a flow can bring, in memory of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Description(FlowCountersData);

impl Description {
    /// Reads the driver data of a flow; `None` if they have no description.
    ///
    /// # Errors
    /// EOPNOTSUPP for shorter or unknown data; EINVAL for several descriptions.
    pub(crate) fn of(request: &Request) -> Result<Option<Self>> {
        const HEADER: usize = offset_of!(CreateFlow, data);
        const LENGTH: usize = size_of::<CreateFlow>();
        let room = request.driver_length();
        if room == 0 {
            return Ok(None);
        }
        let what = "length of the driver input";
        require_support(room >= HEADER, what, room, Rule::AtLeast(HEADER as u64))?;
        let CreateFlow {
            ncounters_data,
            data,
            ..
        } = request.driver();
        let expected = match ncounters_data {
            0 => HEADER,
            1 => LENGTH,
            count => return invalid("ncounters_data", count, Rule::AtMost(1)),
        };
        let is_known = request.driver_is_cleared(expected);
        require_support(is_known, what, room, Rule::AtMost(expected as u64))?;
        require(room >= expected, what, room, Rule::AtLeast(expected as u64))?;
        Ok((expected == LENGTH).then_some(Self(data)))
    }

    /// Reads what the values count.
    ///
    /// # Errors
    /// EFAULT; EINVAL for too many, or something else than packets and bytes.
    ///
    /// # Safety
    /// As for [`copy_in`].
    unsafe fn points(self) -> Result<Vec<FlowCountersDesc>> {
        at_most("ncounters", self.0.ncounters, MAX_POINTS.into())?;
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { copy_in(self.0.counters_data, self.0.ncounters as usize * POINT) };
        let bytes = bytes.map_err(memory(
            "counters_data",
            self.0.counters_data,
            Rule::Readable,
        ))?;
        let points = bytes.chunks_exact(POINT);
        let points = points.filter_map(|bytes| FlowCountersDesc::read_from_bytes(bytes).ok());
        let points: Vec<FlowCountersDesc> = points.collect();
        for point in &points {
            at_most(
                "description",
                point.description,
                u64::from(DESCRIPTIONS) - 1,
            )?;
        }
        Ok(points)
    }
}

impl ObjectData for Counters {
    fn kind(&self) -> u16 {
        OBJECT_COUNTERS
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "flow counters",
            number: self.number,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DEALLOC_FLOW_COUNTER, self.number)
    }
}

impl State {
    pub(crate) fn create_counters(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let number = make(&mut self.hca, &Input::new(op::ALLOC_FLOW_COUNTER, 16))?;
        let handle = self.objects.insert(Object::new(
            fd,
            Counters {
                number,
                points: Vec::new(),
            },
        ));
        request.set_handle(ATTR_CREATE_COUNTERS_HANDLE, handle);
        Ok(())
    }

    pub(crate) fn read_counters(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let handle = request.handle(ATTR_READ_COUNTERS_HANDLE)?;
        let is_used = self.objects.get(fd, handle)?.uses != 0;
        require(is_used, "handle", handle, Rule::InState("used by a flow"))?;
        request.flags(ATTR_READ_COUNTERS_FLAGS, PREFER_CACHED)?;
        let Counters { number, points } = self.objects.counters(fd, handle)?;
        let mut values = vec![0u64; request.room(ATTR_READ_COUNTERS_BUFF) / 8];
        let query = Input::new(op::QUERY_FLOW_COUNTER, 0x20).set(flow::FLOW_COUNTER_ID, *number);
        let counts = run(&mut self.hca, &query, ANSWER)?;
        for point in points {
            let most = (values.len() as u64).saturating_sub(1);
            let Some(value) = values.get_mut(point.index as usize) else {
                return invalid("index", point.index, Rule::AtMost(most));
            };
            let count = get64(
                &counts,
                flow::FLOW_STATISTICS + 8 * point.description as usize,
            );
            *value = value.wrapping_add(count);
        }
        request.put(ATTR_READ_COUNTERS_BUFF, values.as_bytes());
        Ok(())
    }

    /// Returns the number of the device's counter of an object that a new flow names. A flow
    /// describes counters that no flow uses.
    ///
    /// # Errors
    /// EINVAL if there is no such object, if it needs a description or already has one; those
    /// of the description.
    ///
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn describe_counters(
        &mut self,
        fd: RawFd,
        handle: u32,
        description: Option<Description>,
    ) -> Result<u32> {
        let is_used = (self.objects.get(fd, handle)).is_ok_and(|object| object.uses != 0);
        let counters =
            (self.objects.counters_mut(fd, handle)).map_err(|it| it.as_class(Class::Invalid))?;
        let is_described = is_used && !counters.points.is_empty();
        match description {
            Some(description) if !is_described => {
                // SAFETY: guaranteed by the caller.
                counters.points = unsafe { description.points() }?;
            }
            None if is_described => {}
            Some(_) => return invalid("handle", handle, Rule::InState("without a description")),
            None => return invalid("handle", handle, Rule::InState("described")),
        }
        Ok(counters.number)
    }
}
