//! Flows to queue pairs, with counters.

use mlx5_abi::{CreateFlow, FlowCountersData, FlowCountersDesc};
use uverbs::flow::{self, FlowInit, Specs};
use uverbs::{Context, Error, FlowHandle, QpHandle, Udata};
use zerocopy::IntoBytes;

/// As [`uverbs::flow::create`]. If `points` are given, one specification names counters
/// that no flow has used yet; the points say what each of them counts.
///
/// # Errors
/// As there; EINVAL for points of counters that a flow has used.
pub fn create_flow(
    context: &Context,
    qp: QpHandle,
    init: &FlowInit,
    specs: Specs,
    points: Option<&[FlowCountersDesc]>,
) -> Result<FlowHandle, Error> {
    let Some(points) = points else {
        return flow::create(context, qp, init, specs, Udata::none());
    };
    let request = CreateFlow {
        ncounters_data: 1,
        data: FlowCountersData {
            counters_data: points.as_ptr().expose_provenance() as u64,
            ncounters: points.len() as u32,
            ..FlowCountersData::default()
        },
        ..CreateFlow::default()
    };
    // SAFETY: the points, which the driver reads during the command.
    let udata = unsafe { Udata::new(request.as_bytes(), &mut []) };
    flow::create(context, qp, init, specs, udata)
}
